"""Hides the hundreds of lines that orbax prints of a save that fails: the error names the cause."""

import logging
import os
import sys
import threading
import traceback
from typing import Any

_LATE_S = 5.0
_LOGGERS = ("absl", "asyncio")  # orbax's, and that of its event loops
_ORBAX = f"{os.sep}orbax{os.sep}"
_lock = threading.Lock()
_saves = 0
_previous = sys.unraisablehook


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    trace = record.exc_info[2] if record.exc_info else None
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(trace))
    return not any(_ORBAX in path for path in (record.pathname, *frames))


def _unraisable(event: Any) -> None:
    # A write that has ended reports to the event loop that waited for it, which the failure of another has closed.
    if str(event.exc_value) != "Event loop is closed":
        _previous(event)


def begin() -> None:
    """Hide orbax's messages until `end` was called as often."""
    _count(1)


def end(*, failed: bool) -> None:
    """Take back a `begin`; a little later if the save failed, as its other writers have yet to end."""
    if failed:
        late = threading.Timer(_LATE_S, _count, [-1])
        late.daemon = True
        late.start()
    else:
        _count(-1)


def _count(change: int) -> None:
    global _saves, _previous
    with _lock:
        before, _saves = _saves, _saves + change
        if bool(before) == bool(_saves):
            return
        for logger in map(logging.getLogger, _LOGGERS):
            (logger.addFilter if _saves else logger.removeFilter)(_is_not_of_orbax)
        if _saves:
            _previous, sys.unraisablehook = sys.unraisablehook, _unraisable
        elif sys.unraisablehook is _unraisable:
            sys.unraisablehook = _previous
