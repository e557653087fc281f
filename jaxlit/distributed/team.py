"""The processes of one job: which of them this is, what they agree on, and when they act together."""

import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeAlias

import jax
from jax.experimental.multihost_utils import reached_preemption_sync_point

from jaxlit import errors
from jaxlit.compat import coordination
from jaxlit.distributed.decisions import Decisions
from jaxlit.distributed.fate import fate
from jaxlit.distributed.store import arrive, arrived, gather
from jaxlit.errors import JaxlitError, PeerError, ProcessError

PATIENCE_S = 300.0
"""Seconds that a process waits for the others, where all are about to do the same."""

_LOOK_S = 5.0  # from one look at which processes are missing to the next
_SILENT_S = 60.0  # after which it says whom it waits for
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
    """

    index, size, announces, over = 0, 1, False, False

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

    def watch(self, of: tuple[Callable[[], str], float]) -> tuple[Callable[[], str], float]:
        """Set how messages describe this process, and its seconds to end after a failure.

        Args:
            of: What returns where it is, in words, and the seconds.

        Returns:
            What was set before.
        """
        return of

    def fail(self, error: BaseException, place: str, code: int | None = None) -> str:
        """End the other processes, which would wait for this one for ever; not if they raise the same.

        Args:
            error: What this one has raised.
            place: Where.
            code: The exit code of this process; None for that of the error.

        Returns:
            What the others read.
        """
        return ""

    def explained(self, error: BaseException) -> BaseException:
        """Return a PeerError in place of what jax raises from a collective whose peer has failed, else the error."""
        return error

    def leave(self, code: int) -> None:
        """End this process at once, with an exit code; after a failure process 0 ends last."""
        os._exit(code)

    def check(self) -> None:
        """Raise PeerError if another process has failed."""

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

    def begin(self) -> None:
        """Begin a run: what processes have asked for in the one before is forgotten."""

    def decide(self, asked: Sequence[str]) -> list[str]:
        """Return what all processes do now, in the same step: what one of them asks for; see `Decisions`."""
        return list(asked)

    def is_preempted(self) -> bool:
        """Return whether jax announces here, to all of several processes, that one of them will be preempted."""
        return False


class Several(Alone):
    """The processes of a job; see `Alone`."""

    def __init__(self) -> None:
        self.index, self.size = jax.process_index(), jax.process_count()
        self.announces = coordination().preemption_sync_manager is not None
        self._fate = fate()

    def agree(self, topic: str, value: Any, *, timeout: float = PATIENCE_S) -> list[Any]:
        """See `Alone`."""
        client, number = _client(), next(_agreements)
        self.check()
        folder = f"jaxlit/agree/{number}"
        arrive(client, folder, self.index, self.size, json.dumps([topic, value]))
        values = []
        for process, text in enumerate(self._all(folder, topic, timeout)):
            their_topic, theirs = json.loads(text)
            if their_topic != topic:
                raise ProcessError(
                    f"Process {self.index} is at '{topic}' while process {process} is at '{their_topic}'. Every "
                    "process must run the same script with the same arguments, and give the same number of batches."
                )
            values.append(theirs)
        if self.index == 0 and number:  # all that are at this agreement have read the one before it
            client.key_value_delete(f"jaxlit/agree/{number - 1}")
        return values

    def _all(self, folder: str, topic: str, timeout: float) -> list[str]:
        """Wait for all processes; once a second look for one that has failed."""
        client, begun, silent = _client(), time.monotonic(), True
        look = begun + _LOOK_S
        while True:
            left = begun + timeout - time.monotonic()
            if (values := gather(client, folder, self.size, min(left, 1.0))) is not None:
                return values
            self.check()
            if left > 1.0 and time.monotonic() < look:
                continue
            look = time.monotonic() + _LOOK_S
            ended, there = self._fate.ended(), arrived(client, folder)  # in this order: the last to arrive may end
            missing = ", ".join(str(process) for process in range(self.size) if process not in there)
            if gone := [process for process in ended if process not in there]:
                raise ProcessError(f"Process {gone[0]} has ended, and does not come to '{topic}': look at its log.")
            if left <= 1.0:
                raise ProcessError(
                    f"Process {missing} did not reach '{topic}' within {timeout:g} s, where process {self.index} "
                    "waits. It has ended, hangs, or has a different number of batches: look at its log."
                )
            if silent and timeout - left >= _SILENT_S and self.index == min(there):  # one of them speaks
                silent = False
                _logger.warning("Still waiting at '%s', since %d s, for process %s.", topic, _SILENT_S, missing)

    def watch(self, of: tuple[Callable[[], str], float]) -> tuple[Callable[[], str], float]:
        """See `Alone`."""
        before = self._fate.place, self._fate.fail_timeout
        self._fate.place, self._fate.fail_timeout = of
        return before

    def fail(self, error: BaseException, place: str, code: int | None = None) -> str:
        """See `Alone`."""
        if not (isinstance(error, PeerError) or getattr(error, "in_all", False)):
            self._fate.fail(error, place, code)
        return self._fate.failure.text if self._fate.failure is not None else ""

    def explained(self, error: BaseException) -> BaseException:
        """See `Alone`."""
        return self._fate.explained(error)

    def leave(self, code: int) -> None:
        """See `Alone`."""
        if self.over:
            self._fate.leave()
        super().leave(code)

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

    def begin(self) -> None:
        """See `Alone`."""
        _decisions(self._fate).begin()

    def decide(self, asked: Sequence[str]) -> list[str]:
        """See `Alone`."""
        return _decisions(self._fate).decide(asked)

    def is_preempted(self) -> bool:
        """See `Alone`."""
        return self.announces and reached_preemption_sync_point(next(_looks))


Team: TypeAlias = Alone | Several


def team() -> Team:
    """Return the processes of this job."""
    return Several() if jax.process_count() > 1 else Alone()


_decisions = cache(Decisions)  # one for all runs: its places must be counted alike in every process


def _client() -> Any:
    return coordination().client
