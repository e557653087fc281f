"""The line that an epoch leaves behind."""

import re
from collections.abc import Sequence

from jaxlit.reporting.terminal import bar, join, line_width

_SHORTEST, _LONGEST = 6, 18  # cells of a bar: fewer tell nothing
_NUMBER = 7  # characters of a number, as 0.05882 has


def epoch_line(epoch: str, done: int, total: float, numbers: Sequence[str]) -> str:
    """Return an epoch's line, with as long a bar as fits; where there is no terminal without one.

    Numbers are padded with spaces, so that they stand below those of other epochs. Before the bar goes, spaces do,
    those on the right first; its length depends on no number.

    Args:
        epoch: The epoch, in words.
        done: Its batches so far.
        total: How many it has.
        numbers: What stands behind the bar; of the last ones an empty text or spaces keep the room free.
    """
    numbers, width = [x for x in numbers if x], line_width() or 0
    for gap in ("  ", " "):
        room = width - len(gap.join([epoch, *numbers])) - len(gap)
        if room >= _SHORTEST:
            return gap.join([epoch, bar(done, total, min(room, _LONGEST)), *numbers]).rstrip()
    parts = [epoch, bar(done, total, _SHORTEST), *numbers]
    for k in reversed(range(2, len(parts) if width else 0)):
        parts[k] = re.sub(" +", " ", parts[k]).rstrip() or parts[k]
        if len(line := " ".join(parts)) <= width:
            return line.rstrip()
    return join([epoch, *(x for x in numbers if x.strip())], " " * (len(epoch) + 2), between="  ")


def number(value: float) -> str:
    """Return a number of a metric, 7 characters wide whatever it is."""
    forms = [f"{value:.4g}", f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.3g}", f"{value:.2g}", f"{value:.1g}"]
    return f"{next((text for text in forms if len(text) <= _NUMBER), forms[-1]):<{_NUMBER}}"


def live_line(epoch: str, done: int, total: float, numbers: str) -> str:
    """Return the line of an epoch that goes on; a narrow terminal has a shorter bar, and the line is cut there."""
    room = (line_width() or 200) - len(f"{epoch}{numbers}") - 8
    return f"{epoch}  {bar(done, total, min(max(room, _SHORTEST), _LONGEST))}  {numbers}"
