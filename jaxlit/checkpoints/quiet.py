"""Hides the hundreds of lines that orbax prints of a save that fails: the error names the cause."""

import functools
import logging
import os
import sys
import traceback
from typing import Any

_ORBAX = f"{os.sep}orbax{os.sep}"


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
    return record.levelno < logging.WARNING or not any(_ORBAX in path for path in (record.pathname, *frames))


@functools.cache
def begin() -> None:
    """Hide orbax's warnings and errors from now on: the other writers of a save that failed end later than it."""
    for name in ("absl", "asyncio"):  # orbax's logger, and that of its event loops
        logging.getLogger(name).addFilter(_is_not_of_orbax)
    previous = sys.unraisablehook

    def hook(event: Any) -> None:
        # A write that has ended reports to the event loop that waited for it, which the failure of another has closed.
        if str(event.exc_value) != "Event loop is closed":
            previous(event)

    sys.unraisablehook = hook
