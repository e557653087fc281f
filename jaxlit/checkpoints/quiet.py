"""What orbax prints of a save that fails, hundreds of lines, is left out: the error says it, and jaxlit in one line."""

import logging
import os
import sys
import threading
from types import TracebackType
from typing import Any

_LATE_S = 5.0
_LOGGERS = ("absl", "asyncio")  # orbax's own, and that of the loops which it runs
_lock = threading.Lock()
_saves = 0
_told = sys.unraisablehook  # the hook in whose place ours stands


class _OfOrbax(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        trace = record.exc_info[2] if record.exc_info else None
        return not _is_orbax(record.pathname) and not _is_in_orbax(trace)


_filter = _OfOrbax()


def begin() -> None:
    """Leave out what orbax prints until `end` was called as often."""
    global _saves, _told
    with _lock:
        _saves += 1
        if _saves == 1:
            for name in _LOGGERS:
                logging.getLogger(name).addFilter(_filter)
            _told, sys.unraisablehook = sys.unraisablehook, _unraisable


def end(*, failed: bool) -> None:
    """Take back a `begin`; a little later if the save failed, as its other writers have yet to end."""
    if failed:
        late = threading.Timer(_LATE_S, end, kwargs={"failed": False})
        late.daemon = True
        late.start()
        return
    global _saves
    with _lock:
        _saves -= 1
        if not _saves:
            for name in _LOGGERS:
                logging.getLogger(name).removeFilter(_filter)
            if sys.unraisablehook is _unraisable:
                sys.unraisablehook = _told


def _unraisable(told: Any) -> None:
    # A write that has ended tells the loop that waited for it, which the failure of another has closed.
    if str(told.exc_value) != "Event loop is closed":
        _told(told)


def _is_in_orbax(trace: TracebackType | None) -> bool:
    while trace is not None:
        if _is_orbax(trace.tb_frame.f_code.co_filename):
            return True
        trace = trace.tb_next
    return False


def _is_orbax(path: str) -> bool:
    return f"{os.sep}orbax{os.sep}" in path
