"""Exchange of values and arrays between processes."""

import itertools
import json
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxlit.errors import ProcessError

# Seconds that a process waits for the others, where all are about to do the same.
PATIENCE_S = 300.0

_agreements = itertools.count()


def agree(topic: str, value: Any, *, timeout: float = PATIENCE_S) -> list[Any]:
    """Exchange a JSON value between all processes, which must all call this.

    Args:
        topic: What is agreed on, for messages.
        value: This process's value.
        timeout: Seconds to wait for the others.

    Returns:
        The value of each process, by its index.

    Raises:
        ProcessError: A process did not call it in time, or is at another topic.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return [value]
    client, number = _client(), next(_agreements)
    client.key_value_set(f"jaxlit/{number}/{index}", json.dumps([topic, value]))
    if number >= 2:  # every process at the last agreement has read all values of the one before it
        client.key_value_delete(f"jaxlit/{number - 2}/{index}")
    values = []
    for process in range(count):
        try:
            their_topic, theirs = json.loads(
                client.blocking_key_value_get(f"jaxlit/{number}/{process}", int(timeout * 1000))
            )
        except jax.errors.JaxRuntimeError as error:
            raise ProcessError(
                f"Process {process} did not reach '{topic}' within {timeout:g} s, where process {index} waits. It "
                "has ended, hangs, or has a different number of batches: look at its log."
            ) from error
        if their_topic != topic:
            raise ProcessError(
                f"Process {index} is at '{topic}' while process {process} is at '{their_topic}'. Every process must "
                "run the same script with the same arguments, and give the same number of batches."
            )
        values.append(theirs)
    return values


def once_per_node(work: Callable[[], None], topic: str) -> None:
    """Run `work` in one process of each computer, while the others wait for it.

    Raises:
        ProcessError: It failed in another process.
    """
    nodes = agree(f"{topic}: which computer", [socket.gethostname(), _boot_id()])
    leads = nodes.index(nodes[jax.process_index()]) == jax.process_index()
    failure: BaseException | None = None
    try:
        if leads:
            work()
    except Exception as error:
        failure = error
    # A download may take hours; a process that dies is noticed by jax itself.
    failures = agree(topic, None if failure is None else repr(failure), timeout=7 * 24 * 3600.0)
    if failure is not None:
        raise failure
    for process, error in enumerate(failures):
        if error is not None:
            raise ProcessError(f"{topic} failed in process {process}: {error}")


def fetch(x: Any) -> np.ndarray:
    """Return an entire array as numpy; if other processes hold parts of it, all must call this."""
    if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
        from jax.experimental import multihost_utils

        return multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


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


def _client() -> Any:
    from jax._src import distributed  # jax has no public access to its key-value store, which needs no device

    return distributed.global_state.client


def _boot_id() -> str:
    # Containers on one computer may share a name, and computers a name by mistake.
    path = "/proc/sys/kernel/random/boot_id"
    if not os.path.exists(path):
        return ""
    with open(path) as file:
        return file.read().strip()
