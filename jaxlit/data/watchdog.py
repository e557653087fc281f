"""Ends a process that waits for data and gets none."""

import faulthandler
import os
import sys
import threading
import time

EXIT_CODE = 76
"""The exit code of a process that the watchdog ended."""


class Watchdog:
    """Ends the process when the wait for a batch takes too long: the stacks are printed, and the exit code is 76.

    A loader that hangs cannot be interrupted from Python, and the processes beside it would wait for ever.

    Args:
        timeout: Seconds that a wait may take, None for no limit.
    """

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._watched: tuple[float, str, int, int] | None = None
        self._over = threading.Event()

    @property
    def has_limit(self) -> bool:
        """Whether there is a limit."""
        return self._timeout is not None

    def watch(self, argument: str, epoch: int, batch: int) -> None:
        """Begin to count, for a batch of a loader."""
        self._watched = (time.monotonic(), argument, epoch, batch)

    def rest(self) -> None:
        """Stop counting: the batch came."""
        self._watched = None

    def __enter__(self) -> "Watchdog":
        if self._timeout is not None:
            threading.Thread(target=self._run, args=(self._timeout,), daemon=True, name="jaxlit-watchdog").start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _run(self, timeout: float) -> None:
        while not self._over.wait(min(timeout / 4, 1.0)):
            watched = self._watched
            if watched is not None and time.monotonic() - watched[0] > timeout:
                self._bite(timeout, *watched[1:])

    def _bite(self, timeout: float, argument: str, epoch: int, batch: int) -> None:
        try:
            self._tell(timeout, argument, epoch, batch)
        finally:  # also if there is nothing left to write to
            os._exit(EXIT_CODE)

    def _tell(self, timeout: float, argument: str, epoch: int, batch: int) -> None:
        stderr = sys.__stderr__ or sys.stderr  # a notebook's own has no file behind it
        print(
            f"{argument} gave no batch {batch} of epoch {epoch} within Trainer(data_timeout={timeout:g}) seconds. "
            f"The stacks of all threads follow, then the process ends with code {EXIT_CODE}.",
            file=stderr,
            flush=True,
        )
        faulthandler.dump_traceback(file=stderr, all_threads=True)
        sys.stdout.flush()
