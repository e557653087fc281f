"""The processes of one job: which of them this is, what they agree on, and when they act together."""

import itertools
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point

from jaxlit import errors
from jaxlit.distributed.fate import fate
from jaxlit.errors import JaxlitError, PeerError, ProcessError

PATIENCE_S = 300.0
"""Seconds that a process waits for the others, where all are about to do the same."""

_SILENT_S = 60.0  # after which it says whom it waits for
_FOR_THE_TIME_S = 24 * 3600.0  # a process may wait for data; one that ends is noticed by jax
_MOST_S = 10.0  # between two exchanges of times
_logger = logging.getLogger("jaxlit")

_agreements = itertools.count()
_looks = itertools.count()  # at jax's notice, of all trainings: its numbers must increase equally in every process


class Alone:
    """The one process of a job. `Several` has the same members, which all processes must use at the same places.

    Attributes:
        index: Which process this is.
        size: How many there are.
        announces: Whether jax announces a SIGTERM of one process to all of them, as it does by default.
        over: Whether a process has failed, so that none may wait for another.
        now: The result of the last `elapsed`.
    """

    index, size, announces, over = 0, 1, False, False

    def __init__(self) -> None:
        self._began, self.now = time.monotonic(), 0.0

    def agree(self, topic: str, value: Any, *, timeout: float = PATIENCE_S) -> list[Any]:
        """Exchange a JSON value.

        Args:
            topic: What is agreed on, for messages.
            value: This process's value.
            timeout: Seconds to wait for the others.

        Returns:
            The value of each process, by its index.

        Raises:
            ProcessError: A process did not come in time, or is at another topic.
            PeerError: A process has failed.
        """
        return [value]

    def watch(self, place: Callable[[], str], fail_timeout: float) -> None:
        """Set what is said of this process if the job fails, and how many seconds it then has for its end.

        Args:
            place: Returns where it is, in words.
            fail_timeout: The seconds.
        """

    def fail(self, error: BaseException, place: str, code: int | None = None) -> str:
        """End the other processes, which would wait for this one for ever; not if they raise the same.

        Args:
            error: What this one has raised.
            place: Where.
            code: The exit code of this process; None for that of the error.

        Returns:
            What the others are told.
        """
        return ""

    def check(self) -> None:
        """Raise what another process has failed of.

        Raises:
            PeerError: One has.
        """

    @property
    def seconds_left(self) -> float | None:
        """Seconds that this process has before it must end, as the job has failed; None as long as it has not."""
        return None

    def same_error(self, topic: str, error: JaxlitError | None) -> None:
        """Raise in every process the error of one of them; after a failure only that of this process.

        Args:
            topic: What it is about, for messages.
            error: The error of this process, if there is one.

        Raises:
            JaxlitError: A process has an error.
        """
        if error is not None:
            raise error

    def decide(self, flag: bool) -> bool:
        """Return whether training ends here: what this process asks for, or jax announces to all of several."""
        return flag

    def meets(self, shared: bool) -> bool:
        """Return whether all processes come here; of several, only if what has led this one here is `shared` by all."""
        return True

    def elapsed(self, due: float | None = None, *, ask: bool = False) -> float:
        """Return the seconds since this object was made, where they decide something the same in every process.

        Args:
            due: The earliest time that is waited for, None for none.
            ask: Exchange the times now, and at the next call as well.
        """
        self.now = time.monotonic() - self._began
        return self.now


class Several(Alone):
    """The processes of a job; see `Alone`."""

    def __init__(self) -> None:
        super().__init__()
        from jax._src.distributed import global_state  # jax has no public way to ask

        self.index, self.size = jax.process_index(), jax.process_count()
        self.announces = global_state.preemption_sync_manager is not None
        self._fate = fate()
        self._calls = 0  # of `elapsed` since the last exchange
        self._rest = 0  # how many go without one

    def agree(self, topic: str, value: Any, *, timeout: float = PATIENCE_S) -> list[Any]:
        """See `Alone`."""
        client, number = _client(), next(_agreements)
        self.check()
        folder = f"jaxlit/agree/{number}"
        client.key_value_set(f"{folder}/value/{self.index}", json.dumps([topic, value]))
        if client.key_value_increment(f"{folder}/count", 1) == self.size:
            client.key_value_set(f"{folder}/all", "")
        elif self.index == 0 and number >= 2:  # all that are at the last agreement have read the one before it
            client.key_value_delete(f"jaxlit/agree/{number - 2}")
        self._wait_for_all(folder, topic, timeout)
        values: list[Any] = [None] * self.size
        for key, text in client.key_value_dir_get(f"{folder}/value/"):
            process = int(key.rsplit("/", 1)[1])
            their_topic, values[process] = json.loads(text)
            if their_topic != topic:
                raise ProcessError(
                    f"Process {self.index} is at '{topic}' while process {process} is at '{their_topic}'. Every "
                    "process must run the same script with the same arguments, and give the same number of batches."
                )
        return values

    def _wait_for_all(self, folder: str, topic: str, timeout: float) -> None:
        """Wait until the last process has come, and look once a second for one that has failed."""
        client, begun, silent = _client(), time.monotonic(), True
        while True:
            left = begun + timeout - time.monotonic()
            with suppress(jax.errors.JaxRuntimeError):
                return client.blocking_key_value_get(f"{folder}/all", max(1, int(min(left, 1.0) * 1000))) and None
            self.check()
            if left > 1.0 and (not silent or left > timeout - _SILENT_S):
                continue
            there = {int(key.rsplit("/", 1)[1]) for key, _ in client.key_value_dir_get(f"{folder}/value/")}
            missing = ", ".join(str(process) for process in range(self.size) if process not in there)
            if left <= 1.0:
                raise ProcessError(
                    f"Process {missing} did not reach '{topic}' within {timeout:g} s, where process {self.index} "
                    "waits. It has ended, hangs, or has a different number of batches: look at its log."
                )
            silent = False
            if self.index == min(there):  # one of them speaks
                _logger.warning("Still waiting at '%s', since %d s, for process %s.", topic, _SILENT_S, missing)

    def watch(self, place: Callable[[], str], fail_timeout: float) -> None:
        """See `Alone`."""
        self._fate.place, self._fate.fail_timeout = place, fail_timeout

    def fail(self, error: BaseException, place: str, code: int | None = None) -> str:
        """See `Alone`."""
        if not (isinstance(error, PeerError) or getattr(error, "in_all", False)):
            self._fate.fail(error, place, code)
        return self._fate.failure.text if self._fate.failure is not None else ""

    def check(self) -> None:
        """See `Alone`."""
        self._fate.check()

    @property
    def over(self) -> bool:  # type: ignore[override]
        """See `Alone`."""
        return self._fate.failure is not None

    @property
    def seconds_left(self) -> float | None:
        """See `Alone`."""
        return self._fate.seconds_left

    def same_error(self, topic: str, error: JaxlitError | None) -> None:
        """See `Alone`."""
        if self.over:
            return super().same_error(topic, error)
        given = self.agree(topic, None if error is None else [type(error).__name__, str(error)])
        for name, text in filter(None, given):  # the first one, in every process
            first = error if str(error) == text and error is not None else getattr(errors, name)(text)
            raise errors.in_all(first)

    def decide(self, flag: bool) -> bool:
        """See `Alone`."""
        return reached_preemption_sync_point(next(_looks)) if self.announces else flag

    def meets(self, shared: bool) -> bool:
        """See `Alone`."""
        return shared

    def elapsed(self, due: float | None = None, *, ask: bool = False) -> float:
        """See `Alone`.

        The clocks of processes differ, and each reaches a step at another time: if each used its clock, one would
        stop a step before the others, which would wait for it forever. So they exchange their times, and the latest
        counts. An exchange takes a millisecond, so the next one follows after half of the time that is left, at most
        ten seconds, counted in calls at the pace of the last ones.
        """
        self._calls += 1
        if not ask and self._calls <= self._rest:
            return self.now
        mine = time.monotonic() - self._began
        before, self.now = self.now, max(self.agree("the time", mine, timeout=_FOR_THE_TIME_S))
        pace, left = (self.now - before) / self._calls, _MOST_S
        if due is not None:
            left = max(min(left, (due - self.now) / 2), 0.0)
        self._calls, self._rest = 0, 0 if ask or pace <= 0 else int(left / pace)
        return self.now


Team: TypeAlias = Alone | Several


def team() -> Team:
    """Return the processes of this job, with a time that begins now."""
    return Several() if jax.process_count() > 1 else Alone()


def _client() -> Any:
    from jax._src import distributed  # jax has no public access to its key-value store, which needs no device

    return distributed.global_state.client
