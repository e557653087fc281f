"""The processes of one job: which of them this is, what they agree on, and when they act together."""

import itertools
import json
import time
from typing import Any, TypeAlias

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point

from jaxlit import errors
from jaxlit.errors import JaxlitError, ProcessError

PATIENCE_S = 300.0
"""Seconds that a process waits for the others, where all are about to do the same."""

_FOR_THE_TIME_S = 24 * 3600.0  # a process may wait for data; one that ends is noticed by jax
_MOST_S = 10.0  # between two exchanges of times
_agreements = itertools.count()
_looks = itertools.count()  # at jax's notice, of all trainings: its numbers must increase equally in every process


class Alone:
    """The one process of a job. `Several` has the same members, which all processes must use at the same places.

    Attributes:
        index: Which process this is.
        size: How many there are.
        announces: Whether jax announces a SIGTERM of one process to all of them, as it does by default.
        now: The result of the last `elapsed`.
    """

    index, size, announces = 0, 1, False

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
        """
        return [value]

    def same_error(self, topic: str, error: JaxlitError | None) -> None:
        """Raise in every process the error of one of them.

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
        self._calls = 0  # of `elapsed` since the last exchange
        self._rest = 0  # how many go without one

    def agree(self, topic: str, value: Any, *, timeout: float = PATIENCE_S) -> list[Any]:
        """See `Alone`."""
        client, number = _client(), next(_agreements)
        client.key_value_set(f"jaxlit/{number}/{self.index}", json.dumps([topic, value]))
        if number >= 2:  # every process at the last agreement has read all values of the one before it
            client.key_value_delete(f"jaxlit/{number - 2}/{self.index}")
        values = []
        for process in range(self.size):
            try:
                their_topic, theirs = json.loads(
                    client.blocking_key_value_get(f"jaxlit/{number}/{process}", int(timeout * 1000))
                )
            except jax.errors.JaxRuntimeError as error:
                raise ProcessError(
                    f"Process {process} did not reach '{topic}' within {timeout:g} s, where process {self.index} "
                    "waits. It has ended, hangs, or has a different number of batches: look at its log."
                ) from error
            if their_topic != topic:
                raise ProcessError(
                    f"Process {self.index} is at '{topic}' while process {process} is at '{their_topic}'. Every "
                    "process must run the same script with the same arguments, and give the same number of batches."
                )
            values.append(theirs)
        return values

    def same_error(self, topic: str, error: JaxlitError | None) -> None:
        """See `Alone`."""
        given = self.agree(topic, None if error is None else [type(error).__name__, str(error)])
        for name, text in filter(None, given):  # the first one, in every process
            raise error if str(error) == text and error is not None else getattr(errors, name)(text)

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
