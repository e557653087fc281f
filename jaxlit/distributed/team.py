"""The processes of one job: which of them this is, what they agree on, and when they act together.

`Team` is what a run asks. Below it are the exchanges of values, texts and arrays, and `Decisions`, which finds the step
after which all processes do what one of them asks for.
"""

import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather, reached_preemption_sync_point

from jaxlit import errors
from jaxlit.compat import coordination
from jaxlit.distributed.fate import Fate, Watch, arrive, arrived, fate, gather
from jaxlit.errors import JaxlitError, PeerError, ProcessError, raised_everywhere

PATIENCE_S = 300.0
"""Seconds that a process waits for the others to reach the same place."""

LONG_S = 7 * 24 * 3600.0
"""The same where the others read or write files, which may take hours; a failure ends the wait."""

READS_ARE_COMPARED: ContextVar[bool] = ContextVar("READS_ARE_COMPARED", default=False)
"""Whether a read of an array by all processes is compared first, to name a read that only some of them make."""

_LOOK_S = 5.0  # between two looks at which processes are missing
_SILENT_S = 60.0  # before a process logs which others it waits for
_logger = logging.getLogger("jaxlit")

_agreements = itertools.count()
_looks = itertools.count()  # at jax's notice, of all trainings: its numbers must increase equally in every process


def team() -> "Team":
    """Return the processes of this job."""
    return _MultiProcess() if jax.process_count() > 1 else Team()


class Team:
    """The processes of a job. All of them must call the same methods at the same places.

    This class is a job of one process; in several, `team()` returns a subclass that does the same over jax's
    coordination service.
    """

    index = 0  # which process this is
    size = 1  # how many processes there are
    announces = False  # whether jax announces a SIGTERM of one process to all of them, as it does by default

    def agree(self, topic: str, value: Any, *, timeout: float = PATIENCE_S) -> list[Any]:
        """Exchange a JSON value, and return that of each process, by its index; the topic is for messages.

        Raises:
            ProcessError: A process did not come within `timeout` seconds, or is at another topic.
            PeerError: A process has failed.
        """
        return [value]

    def watch(self, watch: Watch) -> Watch:
        """Set how messages describe this process and how long it may take to end; return the former setting."""
        return watch

    def fail(self, error: BaseException, place: str, code: int | None = None) -> str:
        """End the other processes, which would wait for this one for ever, unless they raise the same error.

        Return the text that they print. The exit code of this process is by default that of the error.
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
    def over(self) -> bool:
        """Whether a process has failed, so that none may wait for another."""
        return self.seconds_left is not None

    @property
    def seconds_left(self) -> float | None:
        """Seconds in which this process must end after a failure of the job; None while there is none."""
        return None

    def same_error(self, topic: str, error: JaxlitError | None, *, timeout: float = PATIENCE_S) -> None:
        """Raise in every process the error of one of them, if any has one; after a failure only this process's."""
        if error is not None:
            raise error

    def begin(self) -> None:
        """Begin a run: forget what processes have asked for in the run before."""

    def decide(self, asked: Sequence[str]) -> list[str]:
        """Return what all processes do in this step: what one of them has asked for; see `Decisions`."""
        return list(asked)

    def is_preempted(self) -> bool:
        """Return whether jax announces here, in every process, that one of them will be preempted."""
        return False


class _MultiProcess(Team):
    def __init__(self) -> None:
        self.index, self.size = jax.process_index(), jax.process_count()
        self.announces = coordination().preemption_sync_manager is not None
        self._fate = fate()

    def agree(self, topic: str, value: Any, *, timeout: float = PATIENCE_S) -> list[Any]:
        client, number = _client(), next(_agreements)
        self.check()
        folder = f"jaxlit/agree/{number}"
        arrive(client, folder, self.index, self.size, json.dumps([topic, value]))
        values = []
        for process, text in enumerate(self._gather(folder, topic, timeout)):
            other_topic, other_value = json.loads(text)
            if other_topic != topic:
                raise ProcessError(
                    f"Process {self.index} is at '{topic}' while process {process} is at '{other_topic}'. Every "
                    "process must run the same script with the same arguments, and give the same number of batches."
                )
            values.append(other_value)
        if self.index == 0 and number:  # every process in this agreement has read the one before it
            client.key_value_delete(f"jaxlit/agree/{number - 1}")
        return values

    def _gather(self, folder: str, topic: str, timeout: float) -> list[str]:
        """Wait for all processes; once a second look for a process that has failed."""
        client = _client()
        end = time.monotonic() + timeout
        next_look = time.monotonic() + _LOOK_S
        has_warned = False
        while True:
            seconds = end - time.monotonic()
            if (values := gather(client, folder, self.size, min(seconds, 1.0))) is not None:
                return values
            self.check()
            if seconds > 1.0 and time.monotonic() < next_look:
                continue
            next_look = time.monotonic() + _LOOK_S
            ended = self._fate.ended()  # before `arrived`: the last process to arrive may end
            present = arrived(client, f"{folder}/value")
            missing = ", ".join(str(process) for process in range(self.size) if process not in present)
            if gone := [process for process in ended if process not in present]:
                raise ProcessError(f"Process {gone[0]} has ended, and does not come to '{topic}': look at its log.")
            if seconds <= 1.0:
                raise ProcessError(
                    f"Process {missing} did not reach '{topic}' within {timeout:g} s, where process {self.index} "
                    "waits. It has ended, hangs, or has a different number of batches: look at its log."
                )
            # One of the waiting processes logs.
            if not has_warned and timeout - seconds >= _SILENT_S and self.index == min(present):
                has_warned = True
                _logger.warning("Still waiting at '%s', since %d s, for process %s.", topic, _SILENT_S, missing)

    def watch(self, watch: Watch) -> Watch:
        former, self._fate.watched = self._fate.watched, watch
        return former

    def fail(self, error: BaseException, place: str, code: int | None = None) -> str:
        if not (isinstance(error, PeerError) or getattr(error, "raised_everywhere", False)):
            self._fate.fail(error, place, code)
        return self._fate.failure.text if self._fate.failure is not None else ""

    def explained(self, error: BaseException) -> BaseException:
        return self._fate.explained(error)

    def leave(self, code: int) -> None:
        if self.over:
            self._fate.leave()
        super().leave(code)

    def check(self) -> None:
        self._fate.check()

    @property
    def seconds_left(self) -> float | None:
        return self._fate.seconds_left

    def same_error(self, topic: str, error: JaxlitError | None, *, timeout: float = PATIENCE_S) -> None:
        if self.over:
            return super().same_error(topic, error)
        raised = self.agree(topic, None if error is None else [type(error).__name__, str(error)], timeout=timeout)
        for name, text in filter(None, raised):  # the first error, in every process
            first = error if str(error) == text and error is not None else getattr(errors, name)(text)
            raise errors.raised_everywhere(first)

    def begin(self) -> None:
        _decisions(self._fate).begin()

    def decide(self, asked: Sequence[str]) -> list[str]:
        return _decisions(self._fate).decide(asked)

    def is_preempted(self) -> bool:
        return self.announces and reached_preemption_sync_point(next(_looks))


def _client() -> Any:
    return coordination().client


@contextmanager
def error_of_all(topic: str, timeout: float = PATIENCE_S) -> Iterator[None]:
    """Raise at the end of a block, to which all processes come, the error of one of them; see `Team.same_error`."""
    problem = None
    try:
        yield
    except JaxlitError as error:
        problem = error
    team().same_error(topic, problem, timeout=timeout)


def agree_or_raise(topic: str, value: Any, error: JaxlitError | None) -> list[Any]:
    """Return a JSON value of each process, or raise in all of them the error of one, by a second agreement."""
    processes = team()
    values, failures = zip(*processes.agree(topic, [value, error is not None]), strict=True)
    if any(failures):
        processes.same_error(topic, error)
    return list(values)


def once_per_node(work: Callable[[], None], topic: str) -> None:
    """Run `work` in one process of each computer, while the others wait for it; its error is raised in all of them."""
    processes = team()
    # Containers on one computer may share a name, and computers a name by mistake.
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    computer = [socket.gethostname(), boot_id.read_text() if boot_id.exists() else ""]
    nodes = processes.agree(f"{topic}: which computer", computer)
    failure: BaseException | None = None
    try:
        if nodes.index(nodes[processes.index]) == processes.index:
            work()
    except Exception as error:
        failure = error
    failures = processes.agree(topic, None if failure is None else repr(failure), timeout=LONG_S)
    if failure is not None:
        raise raised_everywhere(failure)
    for process, error in enumerate(failures):
        if error is not None:
            raise raised_everywhere(ProcessError(f"{topic} failed in process {process}: {error}"))


def send(topic: str, text: str) -> None:
    """Send the other processes a short text, by a topic that is used once. Any thread may call this."""
    _client().key_value_set(f"jaxlit/{topic}/{jax.process_index()}", text)


def received(topic: str) -> list[str]:
    """Wait in process 0 until each other process has sent its text, delete the texts, and return them."""
    texts = [_wait_for(topic, process) for process in range(1, jax.process_count())]
    _client().key_value_delete(f"jaxlit/{topic}/")
    return texts


def _wait_for(topic: str, process: int) -> str:
    while True:
        with suppress(jax.errors.JaxRuntimeError):
            return _client().blocking_key_value_get(f"jaxlit/{topic}/{process}", 1000)
        team().check()


def fetch(x: Any) -> np.ndarray:
    """Return an entire array as numpy; if other processes hold parts of it, all must call this.

    For a pair of an array and an index, return that entry: one step of several that were dispatched together.
    """
    if type(x) is tuple:
        return fetch(x[0])[x[1]]
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        if READS_ARE_COMPARED.get():
            team().agree(f"{_reader()} reads an array that all processes hold parts of", None)
        return process_allgather(x, tiled=True)
    return np.asarray(x)


def fetch_once(x: Any) -> np.ndarray:
    """Return what `fetch` does; jax would keep that copy on the host for as long as the array lives."""
    if isinstance(x, jax.Array):
        parts = [shard.data for shard in x.addressable_shards]
        x = jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)
    return fetch(x)


def _reader() -> str:
    """Return which hook reads an array."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        name, owner = frame.f_code.co_name, frame.f_locals.get("self")
        if name.startswith("on_") and owner is not None:
            return f"{type(owner).__name__}.{name}"
    return "the loop"


def join_rows(x: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """Return the rows of all processes, in their order, from this process's and the number of each."""
    padded = np.zeros((max(rows), *x.shape[1:]), x.dtype)
    padded[: len(x)] = x
    parts = process_allgather(padded)
    return np.concatenate([np.asarray(part[:n]) for part, n in zip(parts, rows, strict=True)])


class Decisions:
    """Finds the step after which all processes do what one of them asks for: a stop, a signal, a save by time.

    A collective would be exact as well, but every step would pay for it, and the host would wait for its result.
    Instead, the threads that watch the processes exchange in rounds how many calls of `decide`, or places, each process
    has made; all act at the first place that none has passed. During a round no process passes its next `decide`, and
    the process that asks waits in it: if all ask for the same at one place, as an early stopping does, they act there.
    """

    def __init__(self, fate: Fate) -> None:
        self._fate, self._turn = fate, threading.Condition()
        self._round = self._run = 0
        self._places = 0  # that this process has reached
        self._stays = False  # at the newest place
        self._pending = set[str]()  # what was asked for and is not done yet
        self._asked = list[str]()  # by this process, for the next round
        self._due: dict[int, list[str]] = {}  # by place
        self._is_open = False  # this process has sent its place in the round
        fate.listener = self._listen

    def begin(self) -> None:
        """Forget what the run before asked for; all processes call this, and agree before one of them asks again."""
        with self._turn:
            self._run += 1
            self._pending.clear()
            self._due.clear()

    def decide(self, asked: Sequence[str]) -> list[str]:
        """Return what all processes do now; all call this at the same places.

        `asked` is what this process asks for, in this and in earlier calls.

        Raises:
            PeerError: A process has failed.
        """
        with self._turn:
            self._wait_while(lambda: self._is_open)  # no place is passed during a round
            self._places += 1
            if new := [x for x in dict.fromkeys(asked) if x not in self._pending]:
                self._ask(new)
            due = self._due.pop(self._places, [])
            self._pending.difference_update(due)
            return due

    def _ask(self, new: list[str]) -> None:
        self._asked, self._stays = new, True
        current_round = self._round
        self._fate.client.key_value_set(f"{self._folder}/asked/{self._fate.index}", "")
        self._fate.listen_now()
        try:
            self._wait_while(lambda: self._round == current_round)
        finally:
            self._stays = False

    def _wait_while(self, condition: Callable[[], bool]) -> None:
        while condition():
            self._fate.check()
            self._turn.wait(0.2)

    @property
    def _folder(self) -> str:
        return f"jaxlit/decide/{self._round}"

    def _listen(self) -> None:
        """Take part in a round, if a process has begun one."""
        client, folder, size = self._fate.client, self._folder, self._fate.size
        if not self._is_open:
            if not client.key_value_dir_get(f"{folder}/asked/"):
                return
            with self._turn:
                self._is_open = True
                entry = _Entry(self._places + (not self._stays), self._run, self._asked)
            arrive(client, folder, self._fate.index, size, json.dumps(entry))
        if (texts := gather(client, folder, size, 0.5)) is None:  # the thread has other work as well
            return self._fate.listen_now()
        entries = [_Entry(*json.loads(text)) for text in texts]
        with self._turn:
            asked = dict.fromkeys(x for entry in entries if entry.run == self._run for x in entry.asked)
            self._due.setdefault(max(entry.place for entry in entries), []).extend(asked)
            self._pending.update(asked)
            self._asked = []
            self._round += 1
            self._is_open = self._stays = False
            self._turn.notify_all()
        if self._fate.index == 0 and self._round > 1:  # every process in this round has read the one before it
            client.key_value_delete(f"jaxlit/decide/{self._round - 2}")


class _Entry(NamedTuple):
    """What a process sends in a round of `Decisions`."""

    place: int  # the first at which it can act
    run: int
    asked: list[str]


_decisions = cache(Decisions)  # one for all runs: its places must be counted alike in every process
