"""The line of an epoch."""

from collections.abc import Sequence

from jaxlit.reporting.terminal import bar, join, line_width

_SHORTEST, _LONGEST = 6, 18  # cells of a bar
_NUMBER = 10  # characters of a number with four significant digits, as -1.234e-05 has


def epoch_line(epoch: str, done: int, total: float, numbers: Sequence[str]) -> str:
    """Return an epoch's line, with as long a bar as fits; without a terminal there is no bar.

    The widths of the numbers alone decide the layout, so that all epochs have the same one. Spaces go before the bar.

    Args:
        epoch: The epoch, in words.
        done: Its batches so far.
        total: How many it has.
        numbers: The parts after the bar, padded with spaces to the same width in all epochs; then a mark, which stays
            next to the part before it, and a remark, which the layout leaves no room for.
    """
    *parts, mark, remark = [epoch, *numbers]
    parts, width = list(filter(None, parts)), line_width() or 0
    for gap in ("  ", " ") if width else ("  ",):
        fixed = gap.join(filter(None, [*parts, mark]))
        if (room := width - len(fixed) - len(gap)) >= _SHORTEST:
            parts.insert(1, bar(done, total, min(room, _LONGEST)))
            break
    parts[-1:] = [gap.join(filter(None, [parts[-1], mark]))]
    return join([*parts, remark], " " * (len(epoch) + 2), between=gap)


def number(value: float) -> str:
    """Return a metric's number with four significant digits, 10 characters wide."""
    return f"{value:<{_NUMBER}.4g}"


def live_line(epoch: str, done: int, total: float, numbers: str) -> str:
    """Return the line of an epoch that continues; a narrow terminal has a shorter bar, and the line is cut there."""
    room = (line_width() or 200) - len(f"{epoch}{numbers}") - 8
    return f"{epoch}  {bar(done, total, min(max(room, _SHORTEST), _LONGEST))}  {numbers}"
