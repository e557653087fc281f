"""The processes of one job: which of them this is, what they agree on, and when they act together.

Do in all processes, after the same step, what one of them asks for.

Exchange of values and arrays between processes.
"""

import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from functools import cache
from types import FrameType
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental.multihost_utils import reached_preemption_sync_point

from jaxlit import errors
from jaxlit.compat import coordination
from jaxlit.distributed.fate import Fate, arrive, arrived, fate, gather
from jaxlit.errors import JaxlitError, PeerError, ProcessError, raised_everywhere


class Decisions:
    """Finds the step after which all processes do what one of them asks for: a stop, a signal, a save by time.

    A collective would be exact as well, but every step would pay for it, and the host would wait for its result. Here
    the threads that watch the processes exchange how often each has come to the loop's `decide`, and the first place
    that none has passed is the one where all act. While they do, no process passes its next `decide`, and the one that
    asks stays where it is: if all ask for the same at one place, as an early stopping does, they act there.

    Args:
        fate: The watcher of the processes; its thread calls this object.
    """

    def __init__(self, fate: Fate) -> None:
        self._fate, self._turn, self._round, self._run = fate, threading.Condition(), 0, 0
        self._places = 0  # that this process has come to
        self._stays = False  # at the newest of them
        self._known = set[str]()  # what was asked for and is not done yet
        self._mine = list[str]()  # of this process, in the round that comes
        self._due: dict[int, list[str]] = {}  # by place
        self._is_open = False  # a round in which this process has given its place
        fate.listener = self._listen

    def begin(self) -> None:
        """Forget what the run before asked for; all processes call this, and agree before one of them asks again."""
        with self._turn:
            self._run += 1
            self._known.clear()
            self._due.clear()

    def decide(self, asked: Sequence[str]) -> list[str]:
        """Return what all processes do now; all call this at the same places.

        Args:
            asked: What this process asks for, in this and in earlier calls.

        Raises:
            PeerError: A process has failed.
        """
        with self._turn:
            self._wait_while(lambda: self._is_open)  # no place is passed in a round
            self._places += 1
            if new := [x for x in dict.fromkeys(asked) if x not in self._known]:
                self._ask(new)
            done = self._due.pop(self._places, [])
            self._known.difference_update(done)
            return done

    def _ask(self, new: list[str]) -> None:
        self._mine, self._stays, before = new, True, self._round
        self._fate.client.key_value_set(f"{self._folder}/asked/{self._fate.index}", "")
        self._fate.listen_now()
        try:
            self._wait_while(lambda: self._round == before)
        finally:
            self._stays = False

    def _wait_while(self, waits: Callable[[], bool]) -> None:
        while waits():
            self._fate.check()
            self._turn.wait(0.2)

    @property
    def _folder(self) -> str:
        return f"jaxlit/decide/{self._round}"

    def _listen(self) -> None:
        """Take part in the round that a process has begun, if one has."""
        client, folder, size = self._fate.client, self._folder, self._fate.size
        if not self._is_open:
            if not client.key_value_dir_get(f"{folder}/asked/"):
                return
            with self._turn:
                self._is_open = True
                mine = [self._places + (not self._stays), self._run, self._mine]
            arrive(client, folder, self._fate.index, size, json.dumps(mine))
        if (told := gather(client, folder, size, 0.5)) is None:  # the thread has more to do than to wait for it
            return self._fate.listen_now()
        places, runs, asked = zip(*map(json.loads, told), strict=True)
        with self._turn:
            together = dict.fromkeys(x for run, each in zip(runs, asked, strict=True) if run == self._run for x in each)
            self._due.setdefault(max(places), []).extend(together)
            self._known.update(together)
            self._mine, self._round, self._is_open, self._stays = [], self._round + 1, False, False
            self._turn.notify_all()
        if self._fate.index == 0 and self._round > 1:  # all that were in this round have read the one before it
            client.key_value_delete(f"jaxlit/decide/{self._round - 2}")


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
        if not (isinstance(error, PeerError) or getattr(error, "raised_everywhere", False)):
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
            raise errors.raised_everywhere(first)

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


READS_ARE_COMPARED: ContextVar[bool] = ContextVar("READS_ARE_COMPARED", default=False)
"""Whether a read of an array by all processes is compared first, so that one which reads it alone is named."""


def agree_or_raise(topic: str, value: Any, error: JaxlitError | None) -> list[Any]:
    """Return a JSON value of each process, or raise in all of them the error of one.

    This takes one agreement, and a second one only if there is an error.

    Args:
        topic: What is agreed on, for messages.
        value: This process's value.
        error: The error of this process, if there is one.

    Raises:
        JaxlitError: A process has an error.
    """
    processes = team()
    given = processes.agree(topic, [value, error is not None])
    if any(failed for _, failed in given):
        processes.same_error(topic, error)
    return [value for value, _ in given]


def computers(topic: str) -> list[Any]:
    """Return for each process what is equal for those of one computer; all must call it."""
    return team().agree(f"{topic}: which computer", [socket.gethostname(), _boot_id()])


def once_per_node(work: Callable[[], None], topic: str) -> None:
    """Run `work` in one process of each computer, while the others wait for it.

    Raises:
        ProcessError: It failed in another process.
    """
    processes = team()
    nodes = computers(topic)
    leads = nodes.index(nodes[processes.index]) == processes.index
    failure: BaseException | None = None
    try:
        if leads:
            work()
    except Exception as error:
        failure = error
    # A download may take hours; one that fails or dies ends the others.
    failures = processes.agree(topic, None if failure is None else repr(failure), timeout=7 * 24 * 3600.0)
    if failure is not None:
        raise raised_everywhere(failure)
    for process, error in enumerate(failures):
        if error is not None:
            raise raised_everywhere(ProcessError(f"{topic} failed in process {process}: {error}"))


def send(topic: str, text: str) -> None:
    """Give the other processes a short text. Unlike `agree` this may be called in any thread.

    Args:
        topic: A name that is used once.
        text: The text.
    """
    _client().key_value_set(f"jaxlit/{topic}/{jax.process_index()}", text)


def sent(topic: str) -> dict[int, str]:
    """Return the texts that are there, by process."""
    return {int(key.rsplit("/", 1)[1]): text for key, text in _client().key_value_dir_get(f"jaxlit/{topic}/")}


def received(topic: str) -> list[str]:
    """Wait in process 0 until each other process has given its text, delete the texts, and return them."""
    texts = [_wait_for(topic, process) for process in range(1, jax.process_count())]
    forget(topic)
    return texts


def shared_by_first(topic: str, text: str) -> str:
    """Return in every process the text of process 0, which waits for none."""
    if jax.process_index() == 0:
        _client().key_value_set(f"jaxlit/{topic}/0", text, allow_overwrite=True)
        return text
    return _wait_for(topic, 0)


def forget(topic: str) -> None:
    """Delete the texts of a topic, and of those whose names continue its own with a slash."""
    _client().key_value_delete(f"jaxlit/{topic}/")


def _wait_for(topic: str, process: int) -> str:
    while True:
        with suppress(jax.errors.JaxRuntimeError):
            return _client().blocking_key_value_get(f"jaxlit/{topic}/{process}", 1000)
        team().check()


def fetch(x: Any) -> np.ndarray:
    """Return an entire array as numpy; if other processes hold parts of it, all must call this.

    Of a pair of an array and an index it is that entry: one step's, of several steps that were dispatched together.
    """
    if type(x) is tuple:
        return fetch(x[0])[x[1]]
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils

        if READS_ARE_COMPARED.get():
            team().agree(f"{_reader()} reads an array that all processes hold parts of", None)
        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def _reader() -> str:
    """Return which hook reads an array."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if name.startswith("on_") and owner is not None:
            return f"{type(owner).__name__}.{name}"
        frame = frame.f_back
    return "the loop"


def join_rows(x: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Return the rows of all processes, in their order.

    Args:
        x: This process's, (rows[process], ...).
        rows: How many each process has.
    """
    from jax.experimental import multihost_utils

    padded = np.zeros((max(rows), *x.shape[1:]), x.dtype)
    padded[: len(x)] = x
    parts = multihost_utils.process_allgather(padded)
    return np.concatenate([np.asarray(part[:n]) for part, n in zip(parts, rows, strict=True)])


def _boot_id() -> str:
    # Containers on one computer may share a name, and computers a name by mistake.
    path = "/proc/sys/kernel/random/boot_id"
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read().strip()
