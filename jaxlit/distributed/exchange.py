"""Exchange of values and arrays between processes."""

import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import FrameType
from typing import Any

import jax
import numpy as np

from jaxlit.distributed.team import _client, team
from jaxlit.errors import JaxlitError, ProcessError, in_all

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
        raise in_all(failure)
    for process, error in enumerate(failures):
        if error is not None:
            raise in_all(ProcessError(f"{topic} failed in process {process}: {error}"))


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
