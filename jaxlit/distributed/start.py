"""Several processes: how they start, and which rows each has."""

import os
import re
import socket
import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxlit import checks as check
from jaxlit.compat import clusters, coordination
from jaxlit.distributed.fate import DEAD_AFTER_S, fate
from jaxlit.errors import ArgumentError, ProcessError


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    timeout: float = 300.0,
    dead_after: float = DEAD_AFTER_S,
    heartbeat_timeout: float = 100.0,
    shutdown_timeout: float = 300.0,
) -> None:
    """Join the processes of one training; call it first in the script, before anything else uses jax.

    The first three arguments may be left out where the environment variables JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID give them, and under SLURM, Open MPI, Kubernetes or on a TPU pod, where jax
    detects them; elsewhere the program then continues as one process. A second call does nothing.

    Args:
        coordinator_address: "host:port" of process 0, the same in every process.
        num_processes: How many processes there are.
        process_id: Which one this is, from 0.
        local_device_ids: The devices that this process uses; None for all that it sees.
        timeout: Seconds to wait for the other processes.
        dead_after: Seconds without a sign of life after which a process counts as dead, and the others end.
        heartbeat_timeout: The same of jax's own watch, which aborts the others; it must be larger.
        shutdown_timeout: Seconds that a process which has ended waits for the others to end.

    Raises:
        ArgumentError: Some of the first three arguments are given, but not all, or one is out of its range; by the
            environment as well.
        ProcessError: jax runs already, or the other processes did not come in time.

    Example:
        >>> import jaxlit as jl
        >>> jl.distributed.initialize()  # alone, nothing happens
    """
    if coordinator_address is num_processes is process_id is None:
        coordinator_address, num_processes, process_id = _from_environment()
    given = coordinator_address, num_processes, process_id
    is_complete = _check_given(*given)
    _check_seconds(dead_after, heartbeat_timeout=heartbeat_timeout, shutdown_timeout=shutdown_timeout)
    if jax.distributed.is_initialized() or not (is_complete or _cluster_is_present()):
        return
    _check_early()
    if coordinator_address is not None and process_id:
        _wait_for(coordinator_address, timeout)
    try:
        jax.distributed.initialize(
            *given,
            local_device_ids,
            initialization_timeout=max(1, round(timeout)),
            heartbeat_timeout_seconds=round(heartbeat_timeout),
            shutdown_timeout_seconds=round(shutdown_timeout),
        )
    except RuntimeError as error:
        raise ProcessError(_not_met(coordinator_address or "the coordinator that jax detected", timeout)) from error
    if coordination().num_processes > 1:
        fate(dead_after)


def _check_given(address: str | None, count: int | None, index: int | None) -> bool:
    """Return whether all three are given; all may be left out."""
    if None not in (address, count, index):
        fits = re.fullmatch(r".+:\d+", str(address)) and 0 <= int(index or 0) < int(count or 0)
    else:
        fits = address is count is index is None
    if not fits:
        raise ArgumentError(
            "distributed.initialize takes coordinator_address='host:port', num_processes and process_id, which counts "
            f"from 0, got {address!r}, {count!r}, {index!r}. Pass all three, or none to take them from "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or to let jax detect them."
        )
    return address is not None


def _check_early() -> None:
    if jax_runs():
        raise ProcessError(
            "distributed.initialize came after the first use of jax, which runs as one process already. Call it at the "
            "top of the script."
        )


def _from_environment() -> tuple[str, int, int] | tuple[None, None, None]:
    """Return the job that the environment names; an address alone is jax's, which then detects the rest."""
    number = {name: os.environ.get(name, "") for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")}
    if "JAX_COORDINATOR_ADDRESS" not in os.environ or not any(number.values()):
        return None, None, None
    count, index = (int(text) if text.isdecimal() else -1 for text in number.values())
    return os.environ["JAX_COORDINATOR_ADDRESS"], count, index


def _check_seconds(dead_after: float, **of_jax: float) -> None:
    rule, owner = "takes seconds above 0", "distributed.initialize"
    check.positive("dead_after", dead_after, owner=owner, rule=rule)
    for name, seconds in of_jax.items():
        if check.positive(name, seconds, owner=owner, rule=rule) <= dead_after:
            raise ArgumentError(
                f"distributed.initialize({name}={seconds:g}, dead_after={dead_after:g}): jax would abort the processes "
                "before they have said which one is dead. Make it larger than dead_after."
            )


def jax_runs() -> bool:
    """Return whether jax has initialized its devices."""
    count = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", count + 1)  # which jax refuses from then on
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def own_rows(rows: int, process: int | None = None) -> slice:
    """Return the slice of a global batch's rows that is this process's: equal parts where they divide.

    Args:
        rows: Rows of the batch.
        process: Another process than this one.

    Example:
        >>> import jaxlit as jl
        >>> jl.distributed.own_rows(64)  # alone
        slice(0, 64, None)
    """
    count = jax.process_count()
    process = jax.process_index() if process is None else process
    return slice(rows * process // count, rows * (process + 1) // count)


def shard_options(*, drop_remainder: bool = True) -> Any:
    """Return this process's `grain.sharding.ShardOptions`, for a `grain.DataLoader` or its sampler.

    Args:
        drop_remainder: Leave out the records that do not divide, so that every process gives as many batches.
    """
    import grain

    return grain.sharding.ShardOptions(jax.process_index(), jax.process_count(), drop_remainder)


def _wait_for(address: str, timeout: float) -> None:
    # jax itself would end the process without naming the address.
    host, port = address.rsplit(":", 1)
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                raise ProcessError(_not_met(address, timeout)) from error
        time.sleep(0.1)


def _not_met(address: str, timeout: float) -> str:
    return (
        f"distributed.initialize: the processes did not meet at {address} within {timeout:g} s. Check that process 0 "
        "runs, that its address can be reached from here, and that all processes are started."
    )


def _cluster_is_present() -> bool:
    return "JAX_COORDINATOR_ADDRESS" in os.environ or any(cluster.is_env_present() for cluster in clusters())
