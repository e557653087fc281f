"""Several processes: how they start, and which rows each has."""

import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxlit.errors import ArgumentError, ProcessError


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: int | Sequence[int] | None = None,
    timeout: float = 300.0,
) -> None:
    """Join the processes of one training; call it first in the script, before anything else uses jax.

    Under SLURM, Open MPI, Kubernetes or on a TPU pod jax detects the arguments, which may be left out; without a
    cluster and without arguments the program continues as one process. A second call does nothing.

    Args:
        coordinator_address: "host:port" of process 0, the same in every process.
        num_processes: How many processes there are.
        process_id: Which one this is, from 0.
        local_device_ids: The devices that this process uses; None for all that it sees.
        timeout: Seconds to wait for the other processes.

    Raises:
        ArgumentError: Some of the first three arguments are given, but not all, or one is out of its range.
        ProcessError: jax runs already, or the other processes did not come in time.

    Example:
        >>> import jaxlit as jl
        >>> jl.distributed.initialize()  # alone, nothing happens
    """
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    is_complete = _check(given)
    if jax.distributed.is_initialized() or not (is_complete or _cluster_is_present()):
        return
    if jax_runs():
        raise ProcessError(
            "distributed.initialize came after the first use of jax, which runs as one process already. Call it at the "
            "top of the script."
        )
    if coordinator_address is not None and process_id:
        _wait_for(coordinator_address, timeout)
    try:
        jax.distributed.initialize(
            **given, local_device_ids=local_device_ids, initialization_timeout=max(1, round(timeout))
        )
    except RuntimeError as error:
        raise ProcessError(_not_met(coordinator_address or "the coordinator that jax detected", timeout)) from error


def jax_runs() -> bool:
    """Return whether jax has initialized its devices."""
    from jax._src import xla_bridge  # jax has no public way to ask without starting its backend

    return xla_bridge.backends_are_initialized()


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


def _check(given: Mapping[str, Any]) -> bool:
    """Refuse the arguments that name the processes unless all or none are given; return whether they are.

    Raises:
        ArgumentError: Some are missing, or one is out of its range.
    """
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ArgumentError(
            f"distributed.initialize got {', '.join(k for k in given if k not in missing)} without "
            f"{', '.join(missing)}. Pass all three, or none to let jax detect them."
        )
    address, count, process = (given[name] for name in ("coordinator_address", "num_processes", "process_id"))
    if address is not None and not re.fullmatch(r".+:\d+", address):
        raise ArgumentError(
            f"distributed.initialize(coordinator_address=...) takes 'host:port', got {address!r}. Choose a "
            "port that is free on process 0's computer."
        )
    if count is not None and process is not None and not 0 <= process < count:
        raise ArgumentError(
            f"distributed.initialize(process_id={process}, num_processes={count}): the id counts from 0, so "
            f"it is at most {count - 1}."
        )
    return not missing


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
    from jax._src.clusters import ClusterEnv  # nor a public way to ask what initialize() would detect

    if "JAX_COORDINATOR_ADDRESS" in os.environ:
        return True
    return any(env.is_env_present() for env in ClusterEnv._cluster_types if not env.opt_in_only_method)
