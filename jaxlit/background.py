"""Threads for work that the training loop must not wait for, or not for long."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A function that runs in a separate thread.

    Args:
        name: The thread's name.
        work: The function. One that runs until it is stopped looks at `stopping`.
        daemon: Whether the process may end while it runs: work that may hang must not keep the process from its end.

    Attributes:
        stopping: Set once the function is asked to return.

    Example:
        >>> from jaxlit.background import Background
        >>> Background("sum", lambda: 1 + 2).start().result(timeout=10)
        3
    """

    def __init__(self, name: str, work: Callable[[], T], *, daemon: bool = True) -> None:
        self._work, self._future = work, Future[T]()
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self.stopping = threading.Event()

    def start(self) -> "Background[T]":
        """Start the thread, and return this object."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Ask the function to return, and do not wait for it."""
        self.stopping.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the thread has ended, at most `timeout` seconds; return whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_done(self) -> bool:
        """Whether the function has returned or raised."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """What the function raised; None while it runs, or if it returned."""
        return self._future.exception() if self.is_done else None

    def when_done(self, call: Callable[[], object]) -> None:
        """Call a function once this one has returned or raised, in its thread; now if it has."""
        self._future.add_done_callback(lambda _: call())

    def result(self, timeout: float | None = None) -> T:
        """Return what the function returns, or raise what it raises; a TimeoutError while it still runs."""
        try:
            return self._future.result(timeout)
        except TimeoutError:
            if self.is_done:  # the function raised it
                raise
            raise TimeoutError(f"no answer after {timeout:.0f} s") from None

    def _run(self) -> None:
        try:
            result = self._work()
        except BaseException as error:
            self._future.set_exception(error)
        else:
            self._future.set_result(result)


class BackgroundQueue(Background[None]):
    """A thread that does jobs in their order; the caller that submits them never waits.

    What a job raises is passed to `on_error`, in the thread; the jobs after it are done all the same.
    """

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        super().__init__(name, self._do_jobs)
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._on_error, self._num_left, self._idle = on_error, 0, threading.Condition()
        self.start()

    def __len__(self) -> int:
        """Return how many jobs are not done."""
        return self._num_left

    def submit(self, job: Callable[[], Any]) -> None:
        """Do a job once those before it are done."""
        with self._idle:
            self._num_left += 1
        self._jobs.put(job)

    def wait_idle(self, timeout: float) -> bool:
        """Wait until all jobs are done, at most `timeout` seconds; return whether they are."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._num_left, timeout)

    def stop(self) -> None:
        """End the thread once the jobs are done; no job may be submitted after it."""
        super().stop()
        self._jobs.put(None)

    def _do_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._on_error(error)
            with self._idle:
                self._num_left -= 1
                self._idle.notify_all()
