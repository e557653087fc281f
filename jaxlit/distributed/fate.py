"""Fate sharing: when one process of a job fails or dies, all of them end soon, and say which one and why.

The file begins with an exchange of values by jax's key-value store, which needs no device: each process writes its
value and increments a counter, and the last one writes a key for which the others wait. So no process polls, and each
reads all values in one request.
"""

import atexit
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax

from jaxlit import compat
from jaxlit.background import Background
from jaxlit.errors import PeerError

DEAD_AFTER_S = 30.0
"""Seconds without a sign of life after which a process counts as dead, unless `initialize` is given others."""

RESTART = 75
"""The exit code of a process that another one's death has ended, EX_TEMPFAIL: the job may be started again."""

_FAILURE = "jaxlit/fate/failure"
_COUNT = "jaxlit/fate/failures"
_DONE = "jaxlit/fate/done"
_BEATS = "jaxlit/fate/beat/"
_GONE = "jaxlit/fate/gone/"
_BEAT_S = 1.0
_LINGER_S = 3.0  # that process 0 waits for the others after their deadline
# What jax raises, in several classes, from a collective whose peer is gone.
_BY_A_PEER = re.compile(
    "^(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED).*(gloo|nccl|peer|socket|connection)", re.I | re.S
)


def arrive(client: Any, folder: str, index: int, size: int, value: str) -> None:
    """Send this process's value to the exchange named `folder`, which has `size` processes."""
    client.key_value_set(f"{folder}/value/{index}", value)
    if client.key_value_increment(f"{folder}/count", 1) == size:
        client.key_value_set(f"{folder}/all", "")


def gather(client: Any, folder: str, size: int, seconds: float) -> list[str] | None:
    """Return the values of all processes, in their order; None if some are missing after `seconds`."""
    try:
        client.blocking_key_value_get(f"{folder}/all", max(1, int(seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None
    values = arrived(client, f"{folder}/value")
    return [values[process] for process in range(size)]


def arrived(client: Any, folder: str) -> dict[int, str]:
    """Return the values that have arrived in a folder, by process."""
    return {int(key.rsplit("/", 1)[1]): value for key, value in client.key_value_dir_get(f"{folder}/")}


def reach(address: str, timeout: float) -> None:
    """Raise an OSError if nothing answers at an address, "host:port"."""
    host, port = address.rsplit(":", 1)
    socket.create_connection((host.strip("[]"), int(port)), timeout=timeout).close()


class Failure(NamedTuple):
    """Why a job ends."""

    text: str  # the process, its host, its place and the reason
    code: int  # the exit code of the other processes
    has_died: bool  # the process cannot end by itself any more


class Watch(NamedTuple):
    """What a run sets of its process."""

    place: Callable[[], str]  # returns where the process is, in words
    fail_timeout: float  # seconds that the process may take to end, for teardown hooks and checkpoint writers


class _Beat(NamedTuple):
    """A sign of life."""

    count: int
    host: str
    place: str
    is_done: bool


class Fate:
    """Watches the other processes of a job over jax's coordination service, from one daemon thread.

    Once a second each process writes a beat and reads one small key, where the first process that fails writes its
    reason; process 0 alone reads all beats, in one request. After a failure nothing waits for other processes any more,
    and a process that has not ended by itself after `fail_timeout` seconds, for example because it is in a collective,
    is ended. The thread ends before jax shuts its client down: a thread that waits for the service then would abort the
    process.

    The service runs in process 0, at `address`, "host:port". A process counts as dead after `dead_after` seconds
    without a beat.
    """

    def __init__(self, client: Any, index: int, size: int, address: str, dead_after: float = DEAD_AFTER_S) -> None:
        self.client, self.index, self.size = client, index, size
        self._address, self._dead_after = address, dead_after
        self._host, self._pid = socket.gethostname(), os.getpid()
        self.listener: Callable[[], object] = lambda: None  # what the thread calls once a second
        self.watched = Watch(lambda: "outside of a run", 10.0)  # what the run has set
        self.failure: Failure | None = None  # why the job ends; None while it goes on
        self._deadline = 0.0
        self._code: int | None = None  # of this process, once it fails
        self._error: BaseException | None = None
        self._is_shown = False
        self._num_beats = 0
        self._is_done = False
        self._beats: dict[str, tuple[str, float]] = {}  # of each process, and when it last changed
        self._now = threading.Event()
        self._thread = Background("jaxlit-fate", self._watch)

    def start(self) -> None:
        """Start to watch, until the process ends."""
        with suppress(Exception):  # another process has written it
            self.client.key_value_set(_FAILURE, "")
        self._beat()
        compat.on_abort(self._aborted)
        hook = sys.excepthook

        def uncaught(kind: type[BaseException], error: BaseException, traceback: Any) -> None:
            if os.getpid() == self._pid:  # not in a forked child
                self.fail(error, self.watched.place())
            hook(kind, error, traceback)
            self._is_shown = True

        sys.excepthook = uncaught
        atexit.register(self._end)  # after jax has registered its own function, and so called before it
        self._thread.start()

    def fail(self, error: BaseException, place: str, code: int | None = None) -> None:
        """Publish that this process fails, and why, as in `Team.fail`; the first reason in a job counts."""
        if _is_by_a_peer(error) or isinstance(error, PeerError):
            # The connections to a process break before its reason arrives.
            end = time.monotonic() + self._dead_after + 10 * _BEAT_S
            while self.failure is None and time.monotonic() < end:
                time.sleep(0.05)
        if self.failure is not None:
            return
        self._error = error
        self._code = _code_of(error) if code is None else code
        lines = str(error).strip().splitlines() or [""]
        text = f"{self._name(self.index)} failed {place}: {type(error).__name__}: {lines[0]}"
        by_signal = 128 < self._code < 193 and self._code != 128 + signal.SIGINT
        self._fail(Failure(text, RESTART if by_signal or self._code in (RESTART, RESTART + 1) else 1, False))

    def listen_now(self) -> None:
        """Have the thread call its listener now."""
        self._now.set()

    def check(self) -> None:
        """Raise PeerError if another process has failed."""
        if self.failure is not None:
            raise PeerError(f"{self.failure.text}. So this process ends as well.")

    def explained(self, error: BaseException) -> BaseException:
        """Return a PeerError in place of what jax raises from a collective whose peer has failed, else the error."""
        try:
            if self._error is None and _is_by_a_peer(error):
                self.check()
        except PeerError as peer_error:
            peer_error.__cause__, error = error, peer_error
        return error

    @property
    def seconds_left(self) -> float | None:
        """Seconds in which this process must end; None while the job goes on."""
        return None if self.failure is None else max(self._deadline - time.monotonic() - 1.0, 0.0)

    def _fail(self, failure: Failure, *, publish: bool = True) -> None:
        self._deadline, self.failure = time.monotonic() + self.watched.fail_timeout, failure
        with suppress(Exception):  # without the service jax ends every process in a moment
            if publish and self.client.key_value_increment(_COUNT, 1) == 1:
                self.client.key_value_set(_FAILURE, json.dumps(failure), allow_overwrite=True)

    def _name(self, index: int, host: str | None = None) -> str:
        return f"process {index} on {host or self._host}"

    def _watch(self) -> None:
        while not self._thread.stopping.is_set():
            self._now.wait(_BEAT_S)
            self._now.clear()
            if self.failure is not None:
                if time.monotonic() >= self._deadline:
                    self.leave()
                continue
            try:
                self._listen()
            except jax.errors.JaxRuntimeError:  # the service is gone, and jax ends this process in a moment
                pass
            except Exception as error:  # no defect here may let the others wait for ever
                self.fail(error, "in its watch of the others")

    def _listen(self) -> None:
        try:
            text = self.client.blocking_key_value_get(_FAILURE, int(self._dead_after * 1000))
        except Exception as error:
            if "DEADLINE_EXCEEDED" not in str(error) or self._thread.stopping.is_set():
                raise
            silent = f"process 0 gave no sign of life for {self._dead_after:g} s"
            self._fail(Failure(silent, RESTART, True), publish=False)  # each process notices this itself
            return self._say(silent)
        self._beat()
        if text and self.failure is None:  # this process may have failed meanwhile
            failure = Failure(*json.loads(text))
            self._fail(failure, publish=False)
            self._say(failure.text)  # from here: the main thread may be in a collective
        elif self.index == 0 and (dead := self._find_dead()) is not None:
            self._fail(dead)
            self._say(dead.text)
        else:
            self.listener()

    def _beat(self) -> None:
        self._num_beats += 1
        beat = json.dumps(_Beat(self._num_beats, self._host, self.watched.place(), self._is_done))
        self.client.key_value_set(f"{_BEATS}{self.index}", beat, allow_overwrite=True)

    def _find_dead(self) -> Failure | None:
        """Return a failure if a process sends no beat any more."""
        now = time.monotonic()
        for key, text in self.client.key_value_dir_get(_BEATS):
            former, since = self._beats.get(key, ("", now))
            self._beats[key] = (text, since if former == text else now)
            if former == text and now - since > self._dead_after:
                beat = _Beat(*json.loads(text))
                silent = f"gave no sign of life for {self._dead_after:g} s; it was last seen {beat.place}"
                return Failure(f"{self._name(int(key.removeprefix(_BEATS)), beat.host)} {silent}", RESTART, True)
        return None

    def ended(self) -> list[int]:
        """Return the processes that have ended without a failure."""
        beats = self.client.key_value_dir_get(_BEATS)
        return [int(key.removeprefix(_BEATS)) for key, text in beats if _Beat(*json.loads(text)).is_done]

    def _end(self) -> None:
        """Wait for the others at the end of the process, as jax does, and listen meanwhile; leave if one fails."""
        if os.getpid() != self._pid:
            return
        self._is_done = True
        try:
            with suppress(jax.errors.JaxRuntimeError):  # the service is gone
                arrive(self.client, _DONE, self.index, self.size, "")
                while self.failure is None and gather(self.client, _DONE, self.size, 1.0) is None:
                    pass
        finally:
            self._thread.stop()
            self._now.set()
            self._thread.join(2 * _BEAT_S)
            if self.failure is not None:
                self.leave()

    def leave(self) -> None:
        """End this process after a failure, with its own exit code; process 0 waits for the others first."""
        assert self.failure is not None
        self._show_error()
        if self.index == 0:
            self._linger()
        else:
            with suppress(Exception):
                self.client.key_value_set(f"{_GONE}{self.index}", "")
        self._say(self.failure.text)
        Background("jaxlit-flush", _flush).start().join(1.0)  # a pipe may be full
        os._exit(self.failure.code if self._code is None else self._code)

    def _linger(self) -> None:
        """Wait for the others: the service ends with process 0, and jax then aborts those that still use it."""
        num_living = self.size - 1 - (self.failure is not None and self.failure.has_died)
        end = self._deadline + _LINGER_S
        while time.monotonic() < end:
            try:
                if len(self.client.key_value_dir_get(_GONE)) >= num_living:
                    return
            except Exception as error:
                if "NOT_FOUND" not in str(error):
                    return
            time.sleep(0.05)

    def _show_error(self) -> None:
        """Print the traceback of this process's error, if it was not raised in time."""
        if self._error is not None and not self._is_shown:
            self._is_shown = True
            with suppress(Exception):
                traceback.print_exception(self._error)

    def _say(self, text: str) -> None:
        """Write to stderr from any thread, without Python's streams, which another thread may hold."""
        here = "" if self._error is not None else f"; {self._name(self.index)} was {self.watched.place()}"
        with suppress(OSError):
            os.write(2, f"jaxlit: {text}{here}\n".encode(errors="replace"))

    def _aborted(self) -> int | None:
        """Return the exit code of a process that jax aborts as the job ends; None if that is not the reason."""
        end = time.monotonic() + 2 * _BEAT_S
        while self.failure is None and time.monotonic() < end:  # gloo aborts before the thread reads a peer's reason
            time.sleep(0.05)
        if self.failure is None:
            try:
                reach(self._address, 2.0)
                return None
            except OSError:
                gone = "process 0, which coordinates the job, is gone"
                self.failure = Failure(gone, RESTART, True)
        self._show_error()
        self._say(self.failure.text)
        return self.failure.code if self._code is None else self._code


def _is_by_a_peer(error: BaseException) -> bool:
    return isinstance(error, (RuntimeError, ValueError)) and _BY_A_PEER.search(str(error)) is not None


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _code_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


_fate: Fate | None = None


def fate(dead_after: float = DEAD_AFTER_S) -> Fate:
    """Return the watcher of this job's processes, which starts at the first call."""
    global _fate
    if _fate is None:
        job = compat.coordination()
        address = str(job.coordinator_address)
        _fate = Fate(job.client, job.process_id, job.num_processes, address, dead_after)
        _fate.start()
    return _fate
