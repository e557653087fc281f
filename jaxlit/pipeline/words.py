"""Schedules by their names."""

from collections.abc import Callable
from types import MappingProxyType

from jaxlit import checks as check
from jaxlit.pipeline.schedules import Eager1F1B, GPipe, Interleaved1F1B, Schedule, Std1F1B, ZeroBubbleH1
from jaxlit.pipeline.zbv import ZBV

# By name, what makes a schedule of so many ranks.
SCHEDULES: MappingProxyType[str, Callable[[int], Schedule]] = MappingProxyType(
    {
        "gpipe": GPipe,
        "1f1b": Std1F1B,
        "eager_1f1b": Eager1F1B,
        "interleaved_1f1b": lambda ranks: Interleaved1F1B(2 * ranks, ranks),
        "zb_h1": ZeroBubbleH1,
        "zbv": lambda ranks: ZBV(2 * ranks, ranks),
    }
)


def named_schedule(name: str, ranks: int, *, owner: str) -> Schedule:
    """Return the schedule of a name.

    Args:
        name: One of `SCHEDULES`.
        ranks: Ranks.
        owner: Who was given the name, for the error.

    Raises:
        ArgumentError: There is none.
    """
    return SCHEDULES[check.one_of("schedule", name, [*SCHEDULES], owner=owner)](ranks)
