"""Work that the training loop must not wait for, or not for long."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """One thread that does jobs in their order; whoever hands them over never waits.

    Args:
        name: The thread's name.
        on_error: What is called, in the thread, with what a job raised.
    """

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._on_error, self._left = on_error, 0
        self._idle = threading.Condition()
        # A daemon: a job that hangs must not keep the process from its end.
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def __len__(self) -> int:
        """Return how many jobs are not done."""
        return self._left

    def submit(self, job: Callable[[], Any]) -> None:
        """Do a job once those before it are done."""
        with self._idle:
            self._left += 1
        self._jobs.put(job)

    def join(self, timeout: float) -> bool:
        """Wait until all is done, at most `timeout` seconds; returns whether it is."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._left, timeout)

    def close(self) -> None:
        """End the thread once the jobs are done; there must be no more."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._on_error(error)
            with self._idle:
                self._left -= 1
                self._idle.notify_all()


def begin(work: Callable[[], T], future: Future[T]) -> None:
    """Run `work` in a thread, whose result goes to a future."""

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="jaxlit-within", daemon=True).start()


def within(seconds: float, work: Callable[[], T], *, late: Callable[[T], Any]) -> T:
    """Run `work` in a thread and return what it returns.

    Args:
        seconds: How long to wait.
        work: What to do.
        late: What to do with a result that comes when nobody waits any more.

    Raises:
        TimeoutError: It took longer.
        Exception: What it raised.
    """
    start, future = time.monotonic(), Future[T]()
    try:
        begin(work, future)
        wait([future], seconds)
    except BaseException:  # a Ctrl-C: nobody waits any more
        when_done(future, late)
        raise
    if not future.done():
        when_done(future, late)
        raise TimeoutError(f"no answer after {time.monotonic() - start:.0f} s")
    return future.result()


def when_done(future: Future[T], do: Callable[[T], Any]) -> None:
    """Do something with a result when it is there, in the thread that makes it; nothing if that fails."""

    def done(ended: Future[T]) -> None:
        with contextlib.suppress(Exception):
            do(ended.result())

    future.add_done_callback(done)
