"""The line that an epoch leaves behind."""

import re
from collections.abc import Sequence

from jaxlit.reporting.terminal import bar, join, line_width

_SHORTEST, _LONGEST = 6, 18  # cells of a bar: fewer tell nothing


def epoch_line(epoch: str, done: int, total: float, numbers: Sequence[str]) -> str:
    """Return an epoch's line, with as long a bar as fits; where there is no terminal without one.

    Numbers are padded with spaces, so that they stand below those of other epochs; before the bar goes, spaces do.

    Args:
        epoch: The epoch, in words.
        done: Its batches so far.
        total: How many it has.
        numbers: What stands behind the bar; of the last ones an empty text or spaces keep the room free.
    """
    numbers, width = [x for x in numbers if x], line_width()
    # With spaces as they are, with one between two parts, and with one wherever there are several.
    for gap, parts in (("  ", numbers), (" ", numbers), (" ", [re.sub(" +", " ", x).rstrip() or x for x in numbers])):
        room = (width or 0) - len(gap.join([epoch, *parts])) - len(gap)
        if room >= _SHORTEST:
            return gap.join([epoch, bar(done, total, min(room, _LONGEST)), *parts]).rstrip()
    return join([epoch, *(x for x in numbers if x.strip())], " " * (len(epoch) + 2), between="  ")


def live_line(epoch: str, done: int, total: float, numbers: str) -> str:
    """Return the line of an epoch that goes on; a narrow terminal has a shorter bar, and the line is cut there."""
    room = (line_width() or 200) - len(f"{epoch}{numbers}") - 8
    return f"{epoch}  {bar(done, total, min(max(room, _SHORTEST), _LONGEST))}  {numbers}"
