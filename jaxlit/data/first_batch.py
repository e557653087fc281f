"""The first batch of a loader, looked at before anything is compiled."""

import logging
from typing import Any

from jaxlit.control import Control, Interrupted
from jaxlit.data.intake import Intake
from jaxlit.data.rows import check_rows
from jaxlit.data.source import Source, located
from jaxlit.data.watchdog import Watchdog

_logger = logging.getLogger("jaxlit")


def check_first(source: Source, limit: int | None, intake: Intake, watchdog: Watchdog, *, required: bool) -> None:
    """Draw a loader's first batch and refuse one that no step could take.

    Args:
        source: The loader.
        limit: How many batches of it are wanted; nothing is drawn for 0.
        intake: What takes its batches in.
        watchdog: Watches the wait; a signal that cuts it leaves the batch to the loops, which then have no use for it.
        required: Whether an empty loader is refused; else it is only told of.
    """
    if source.looked or (limit == 0 and source.length != 0):
        return
    watchdog.watch(source.argument, 0, 0)
    try:
        for batch in _peek(source, watchdog.control):
            if not intake.prepares:  # what a hook makes of a batch is looked at in its turn
                check_rows(source.loader, batch, source.argument)
                intake(batch)
            if (doubts := source.doubts(batch)) is not None:
                _logger.warning(doubts)
    except Interrupted:
        return
    except Exception as error:
        located(error, intake.blamed, 0, 0)
        raise
    finally:
        watchdog.rest()
    if source.looked and not source.gave:
        if required:
            raise source.empty()
        _logger.warning(source.empty())


def _peek(source: Source, control: Control) -> list[Any]:
    """Draw the first batch in a wait that a signal may cut."""
    try:
        control.drawing = True
        return source.peek()
    finally:
        control.drawing = False
