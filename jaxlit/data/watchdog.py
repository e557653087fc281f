"""Ends a process in which nothing moves any more."""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxlit.background import Background
from jaxlit.control import Control

EXIT_CODE = 76
"""The exit code of a process that the watchdog ended."""


class Watchdog:
    """Ends the process where it hangs: the stacks are printed, what can be saved is, and the exit code is 76.

    What hangs cannot be interrupted from Python, and the processes beside it would wait for ever.

    Args:
        data: Seconds that a wait for a batch may take, None for no limit.
        hang: Seconds in which anything must have moved, None for no limit.
        control: Is told of a wait for a batch, which a signal may cut.
        progress: Returns what changes whenever the run moves.
        place: Says where the run stands.
        rescue: Saves what can be saved, and says what came of it; it is given as long as the hang has taken.
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
    ) -> None:
        self._data, self._hang, self.control = data, hang, control or Control()
        self._progress, self._place, self._rescue = progress, place, rescue
        self._watched: tuple[float, str, int, int] | None = None
        self._over = threading.Event()

    @property
    def has_limit(self) -> bool:
        """Whether there is a limit to the wait for a batch."""
        return self._data is not None

    def watch(self, argument: str, epoch: int, batch: int) -> None:
        """Begin to count, for a batch of a loader."""
        self._watched = (time.monotonic(), argument, epoch, batch)

    def rest(self) -> None:
        """Stop counting: the batch came."""
        self._watched = None

    def __enter__(self) -> "Watchdog":
        if limits := [limit for limit in (self._data, self._hang) if limit is not None]:
            pause = min(1.0, *(limit / 4 for limit in limits))
            threading.Thread(target=self._run, args=(pause,), daemon=True, name="jaxlit-watchdog").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self, pause: float) -> None:
        seen, since = self._progress(), time.monotonic()
        while not self._over.wait(pause):
            if (progress := self._progress()) != seen:
                seen, since = progress, time.monotonic()
            watched = self._watched
            if watched is not None and self._data is not None and time.monotonic() - watched[0] > self._data:
                _, argument, epoch, batch = watched
                what = f"{argument} gave no batch {batch} of epoch {epoch}"
                self._bite(f"{what} within Trainer(data_timeout={self._data:g}) seconds.", self._data)
            elif self._hang is not None and time.monotonic() - since > self._hang:
                what = f"Nothing has moved for Trainer(hang_timeout={self._hang:g}) seconds"
                self._bite(f"{what}, {self._place()}.", self._hang)

    def _bite(self, what: str, patience: float) -> None:
        try:
            with contextlib.suppress(Exception):  # there may be nothing left to write to
                _tell(f"{what} The stacks of all threads follow, then the process ends with code {EXIT_CODE}.")
                faulthandler.dump_traceback(file=_stderr(), all_threads=True)
            try:
                saved = Background("jaxlit-rescue", self._rescue).start().result(patience)
            except Exception as error:
                saved = f"Nothing could be saved: {error!r}."
            with contextlib.suppress(Exception):
                _tell(saved)
                sys.stdout.flush()
        finally:
            os._exit(EXIT_CODE)


def _tell(text: str) -> None:
    print(text, file=_stderr(), flush=True)


def _stderr() -> Any:
    return sys.__stderr__ or sys.stderr  # a notebook's own has no file after it
