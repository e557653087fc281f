"""`Watchdog`, which ends a process that makes no progress any more."""

import contextlib
import faulthandler
import os
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxlit.background import Background
from jaxlit.control import Control

EXIT_CODE = 76
"""The exit code of a process that the watchdog ended."""


class _Wait(NamedTuple):
    begun: float
    argument: str
    epoch: int
    batch: int


class Watchdog:
    """Ends a process that hangs, with exit code 76: it prints the stacks, and saves what can be saved.

    Python cannot interrupt what hangs, and the other processes of the job would wait for ever. A wait for a batch may
    take `data` seconds, the run must make progress in `hang` seconds; None for no limit. `progress` returns a value
    that changes with any progress, `place` where the run is, for the message. `rescue` saves what it can, and returns
    what it saved; it may take as long as the hang did. `leave` ends the process with an exit code.
    """

    def __init__(
        self,
        data: float | None,
        hang: float | None = None,
        *,
        control: Control | None = None,
        progress: Callable[[], object] = lambda: None,
        place: Callable[[], str] = lambda: "before the first step",
        rescue: Callable[[], str] = lambda: "Nothing was there to be saved.",
        leave: Callable[[int], None] = lambda code: os._exit(code),
    ) -> None:
        self._data, self._hang, self.control = data, hang, control or Control()
        self._progress, self._place, self._rescue, self._leave = progress, place, rescue, leave
        self._wait: _Wait | None = None
        self._limits = [limit for limit in (data, hang) if limit is not None]
        self._thread = Background("jaxlit-watchdog", self._run)

    @property
    def has_limit(self) -> bool:
        """Whether there is a limit to the wait for a batch."""
        return self._data is not None

    def watch(self, argument: str, epoch: int, batch: int) -> None:
        """Begin to count, for a batch of a loader."""
        self._wait = _Wait(time.monotonic(), argument, epoch, batch)

    def rest(self) -> None:
        """Stop counting: the batch has arrived."""
        self._wait = None

    def __enter__(self) -> "Watchdog":
        if self._limits:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.stop()

    def _run(self) -> None:
        pause = min(1.0, *(limit / 4 for limit in self._limits))
        seen, since = self._progress(), time.monotonic()
        while not self._thread.stopping.wait(pause):
            wait, now = self._wait, time.monotonic()
            if (progress := self._progress()) != seen:
                seen, since = progress, now
            if wait is not None and self._data is not None and now - wait.begun > self._data:
                problem = f"{wait.argument} gave no batch {wait.batch} of epoch {wait.epoch}"
                self._bite(f"{problem} within Trainer(data_timeout={self._data:g}) seconds.", self._data)
            elif self._hang is not None and now - since > self._hang:
                problem = f"Nothing has moved for Trainer(hang_timeout={self._hang:g}) seconds"
                self._bite(f"{problem}, {self._place()}.", self._hang)

    def _bite(self, problem: str, patience: float) -> None:
        try:
            with contextlib.suppress(Exception):  # the stream may be closed
                _print(f"{problem} The stacks of all threads follow, then the process ends with code {EXIT_CODE}.")
                faulthandler.dump_traceback(file=_stderr(), all_threads=True)
            try:
                saved = Background("jaxlit-rescue", self._rescue).start().result(patience)
            except Exception as error:
                saved = f"Nothing could be saved: {error!r}."
            with contextlib.suppress(Exception):
                _print(saved)
                sys.stdout.flush()
        finally:
            self._leave(EXIT_CODE)


def _print(text: str) -> None:
    print(text, file=_stderr(), flush=True)


def _stderr() -> Any:
    return sys.__stderr__ or sys.stderr  # a notebook's stderr has no file
