"""A job of several processes: how they join it, which rows each has, and the check that they run the same training."""

import functools
import hashlib
import json
import logging
import os
import platform
import re
import socket
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import flax
import jax
import jaxlib.version
import numpy as np
import optax
from jax.extend.source_info_util import summarize
from jax.stages import Traced

from jaxlit import checks as check
from jaxlit.compat import clusters, coordination
from jaxlit.distributed.fate import DEAD_AFTER_S, fate, reach
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError, ProcessError
from jaxlit.programs.jaxpr import described
from jaxlit.texts import listed
from jaxlit.version import __version__

_logger = logging.getLogger("jaxlit")

P = ParamSpec("P")
T = TypeVar("T")

# Of jax's settings those that change numbers, or what is raised.
JAX_SETTINGS = (
    *("jax_enable_x64", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion", "jax_default_matmul_precision"),
    *("jax_default_prng_impl", "jax_threefry_partitionable", "jax_random_seed_offset"),
    *("jax_use_shardy_partitioner", "jax_disable_jit", "jax_debug_nans", "jax_debug_infs"),
)
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_MOST_ITEMS, _MOST_TEXT, _MOST_FRAMES = 8, 160, 1000
_LIBRARY = str(Path(__file__).parents[1])
_SAME_START = (
    "The processes do not run the same training. Start the same script with the same arguments and libraries in each."
)


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
        process_id: The index of this process, from 0.
        local_device_ids: The devices that this process uses; None for all that it sees.
        timeout: Seconds to wait for the other processes.
        dead_after: Seconds without a sign of life after which a process counts as dead, and the others end.
        heartbeat_timeout: The same for jax's own watch, which aborts the others; it must be larger.
        shutdown_timeout: Seconds that a process which has ended waits for the others to end.

    Raises:
        ArgumentError: Some of the first three arguments are set, but not all, or one is out of its range; also if the
            environment sets them.
        ProcessError: jax runs already, or the other processes did not come in time.

    Example:
        >>> import jaxlit as jl
        >>> jl.distributed.initialize()  # does nothing in a single process
    """
    if coordinator_address is num_processes is process_id is None:
        coordinator_address, num_processes, process_id = _from_environment()
    is_complete = _check_job(coordinator_address, num_processes, process_id)
    _check_seconds(dead_after, heartbeat_timeout=heartbeat_timeout, shutdown_timeout=shutdown_timeout)
    if jax.distributed.is_initialized() or not (is_complete or _cluster_is_present()):
        return
    _check_early()
    if coordinator_address is not None and process_id:
        _wait_for(coordinator_address, timeout)
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            local_device_ids,
            initialization_timeout=max(1, round(timeout)),
            heartbeat_timeout_seconds=round(heartbeat_timeout),
            shutdown_timeout_seconds=round(shutdown_timeout),
        )
    except RuntimeError as error:
        raise ProcessError(_not_met(coordinator_address or "the coordinator that jax detected", timeout)) from error
    if coordination().num_processes > 1:
        fate(dead_after)


def _cluster_is_present() -> bool:
    return "JAX_COORDINATOR_ADDRESS" in os.environ or any(cluster.is_env_present() for cluster in clusters())


def _check_early() -> None:
    if jax_runs():
        raise ProcessError(
            "distributed.initialize came after the first use of jax, which runs as one process already. Call it at the "
            "top of the script."
        )


def _check_job(address: str | None, count: int | None, index: int | None) -> bool:
    """Return whether all three are set; raise an ArgumentError if some are missing."""
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


def _from_environment() -> tuple[str, int, int] | tuple[None, None, None]:
    """Return the job that the environment names; if it has an address only, jax detects the rest."""
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    numbers = [os.environ.get(name, "") for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")]
    if address is None or not any(numbers):
        return None, None, None
    count, index = (int(text) if text.isdecimal() else -1 for text in numbers)
    return address, count, index


def _check_seconds(dead_after: float, **of_jax: float) -> None:
    rule, owner = "takes seconds above 0", "distributed.initialize"
    check.positive("dead_after", dead_after, owner=owner, rule=rule)
    for name, seconds in of_jax.items():
        if check.positive(name, seconds, owner=owner, rule=rule) <= dead_after:
            raise ArgumentError(
                f"distributed.initialize({name}={seconds:g}, dead_after={dead_after:g}): jax would abort the processes "
                "before they have said which one is dead. Make it larger than dead_after."
            )


def _wait_for(address: str, timeout: float) -> None:
    # jax itself would end the process without naming the address.
    end = time.monotonic() + timeout
    while True:
        try:
            return reach(address, 1.0)
        except OSError as error:
            if time.monotonic() >= end:
                raise ProcessError(_not_met(address, timeout)) from error
        time.sleep(0.1)


def _not_met(address: str, timeout: float) -> str:
    return (
        f"distributed.initialize: the processes did not meet at {address} within {timeout:g} s. Check that process 0 "
        "runs, that its address can be reached from here, and that all processes are started."
    )


def join_job() -> None:
    """Join the processes of the job that the environment names, unless this process has joined them."""
    if jax.distributed.is_initialized() or (count := job_size()) == 1:
        return
    if jax_runs():
        raise ProcessError(
            f"The environment names a job of {count} processes, but jax runs in this one already: each would train "
            "alone. Call jl.distributed.initialize() at the top of the script, before anything uses jax; in Ray, start "
            "them with jl.integrations.ray.RayTrainer. If each is meant to train alone, set JAX_NUM_PROCESSES=1."
        )
    initialize()
    if (detected := coordination().num_processes) != count:
        raise ProcessError(
            f"The environment names a job of {count} processes, and jax has found {detected}. Pass "
            "the address of process 0 to jl.distributed.initialize, or set JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID; "
            "in Ray, start them with jl.integrations.ray.RayTrainer."
        )


def job_size() -> int:
    """Return how many processes the job of the environment has, 1 without a job.

    `JAX_NUM_PROCESSES` has priority. jax detects SLURM, Open MPI, TPU pods and indexed jobs of Kubernetes, Ray the
    workers of Ray Train.
    """
    if (count := os.environ.get("JAX_NUM_PROCESSES", "")).isdecimal():
        return int(count)
    if (ray_train := sys.modules.get("ray.train")) is not None:  # as in a worker of Ray Train
        with suppress(Exception):
            return ray_train.get_context().get_world_size()
    is_indexed = "JOB_COMPLETION_INDEX" in os.environ  # a pod without it is no process of a job
    with suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for cluster in clusters():
            if (cluster.__name__ != "K8sCluster" or is_indexed) and cluster.is_env_present():
                return cluster.get_process_count()
    if is_indexed:
        _logger.warning(
            "JOB_COMPLETION_INDEX says that this is a pod of an indexed job, and jax cannot find the others: it trains "
            'alone. To train together, pip install "jax[k8s]" and let the pods read their job; else set '
            "JAX_NUM_PROCESSES=1."
        )
    return 1


def jax_runs() -> bool:
    """Return whether jax has initialized its devices."""
    count = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    try:
        jax.config.update("jax_num_cpu_devices", count + 1)  # jax refuses this once its devices are initialized
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", count)
    return False


def own_rows(rows: int, process: int | None = None) -> slice:
    """Return the slice of a global batch's rows that belongs to this process: equal parts if the rows divide.

    Args:
        rows: Rows of the batch.
        process: Another process than this one.

    Example:
        >>> import jaxlit as jl
        >>> jl.distributed.own_rows(64)  # in a single process
        slice(0, 64, None)
    """
    count = jax.process_count()
    process = jax.process_index() if process is None else process
    return slice(rows * process // count, rows * (process + 1) // count)


def shard_options(*, drop_remainder: bool = True) -> Any:
    """Return this process's `grain.sharding.ShardOptions`, for a `grain.DataLoader` or its sampler.

    Args:
        drop_remainder: Leave out the records that do not divide, so that every process has as many batches. grain's
            DataLoader leaves them out in any case.
    """
    import grain

    return grain.sharding.ShardOptions(jax.process_index(), jax.process_count(), drop_remainder)


def rank_zero_only(function: Callable[P, T]) -> Callable[P, T | None]:
    """Run a function in process 0 only; in the others it returns None.

    The function must not read arrays that other processes hold parts of: they would not take part.

    Example:
        >>> import jaxlit as jl
        >>> @jl.rank_zero_only
        ... def write(text):
        ...     return len(text)
        >>> write("done")  # in process 0
        4
    """

    @functools.wraps(function)
    def in_process_0(*args: P.args, **kwargs: P.kwargs) -> T | None:
        return function(*args, **kwargs) if jax.process_index() == 0 else None

    return in_process_0


def same_job(
    topic: str,
    make_items: Callable[[], Mapping[str, str]],
    *,
    rule: str = _SAME_START,
    most: int = _MOST_ITEMS,
    place: Callable[[str], str] = lambda name: "",
) -> None:
    """Raise a ProcessError in every process if an item differs between them; exchange only a digest if none does.

    `make_items`, which is not called in a single process, returns what must be the same, a text by its name, and `rule`
    what to do about a difference. At most so many are named, with their values, processes and hosts, and the place of
    each in the user's code, which may differ.
    """
    processes = team()
    if processes.size == 1:
        return
    items = make_items()
    digests = processes.agree(topic, _digest(sorted(items.items())))
    kinds = list(dict.fromkeys(digests))
    if len(kinds) == 1:
        return
    # All processes have the same digests, and so take the same way from here on. First the leader of each kind of
    # process sends a digest of each item: the text of a program may take megabytes.
    leaders = [digests.index(kind) for kind in kinds]
    table = {name: _digest(text) for name, text in items.items()} if processes.index in leaders else None
    tables = [x for x in processes.agree(f"{topic}: what differs", table) if x is not None]
    names = [x for x in dict.fromkeys(x for table in tables for x in table) if len({t.get(x) for t in tables}) > 1]
    values = {name: [items.get(name, "nothing"), place(name) if name in items else ""] for name in names[:most]}
    hosts, values_of = zip(*processes.agree(f"{topic}: the values", [socket.gethostname(), values]), strict=True)
    lines = [f"  {name}: {_compared([x[name] for x in values_of], hosts)}" for name in values]
    if most > 1 and len(names) > most:
        lines.append(f"  and {len(names) - most} more")
    error = ProcessError(f"{rule} What differs in {topic}:\n" + "\n".join(lines))
    processes.same_error(f"{topic}: it differs", error)


def same_program(name: str, make_program: Callable[[], Any], step: Any = None) -> None:
    """Refuse in every process a program that differs between them, before it is compiled.

    Learning rates and seeds are constants of a program. The error names the first equation that differs, with its place
    in the user's code if `step` is the trace of the user's step. `make_program` returns the program's trace, a
    `jax.stages.Traced` or a `ClosedJaxpr`; None if jax cannot trace it.
    """
    if team().size == 1:
        return
    program = make_program()
    traces = {"the user's step": step, name: program.jaxpr if isinstance(program, Traced) else program}
    parts = {
        f"equation {k} of {title}": part
        for title, closed in traces.items()
        for k, part in enumerate(() if closed is None else described(closed))
    }
    texts = {key: text for key, (text, _) in parts.items()}
    same_job(f"the program {name}", lambda: texts, most=1, place=lambda key: _place(parts[key][1]))


def environment() -> dict[str, str]:
    """Return the versions, the settings of jax and XLA, and the devices that a process's numbers depend on."""
    libraries: Sequence[Any] = (jax, flax, optax, np)
    versions = {library.__name__: library.__version__ for library in libraries} | {"jaxlib": jaxlib.version.__version__}
    config = {name: str(jax.config.values.get(name)) for name in JAX_SETTINGS}  # type: ignore[attr-defined]
    # Dumps change no number.
    flags = {name: " ".join(sorted(x for x in os.environ.get(name, "").split() if "dump" not in x)) for name in _FLAGS}
    kinds = [device.device_kind for device in jax.local_devices()]
    devices = {"local devices": ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))}
    return {"python": platform.python_version(), "jaxlit": __version__} | versions | config | flags | devices


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _compared(values: Sequence[Sequence[str]], hosts: Sequence[str]) -> str:
    """Return the values of an item, each with its place in the code and the processes that have it."""
    processes = dict[str, list[int]]()
    for process, (text, _) in enumerate(values):
        processes.setdefault(text, []).append(process)
    same = (len(set(letters)) == 1 for letters in zip(*processes, strict=False))
    start = max(len(list(takewhile(bool, same))) - _MOST_TEXT // 2, 0)  # show long texts around the difference
    end = start + _MOST_TEXT
    result = []
    for text, indices in processes.items():
        shown = "..." * (start > 0) + text[start:end] + "..." * (len(text) > end)
        named = listed([f"process {i} ({hosts[i]})" for i in indices], 3)
        result.append(f"{shown}{values[indices[0]][1]} in {named}")
    return "; ".join(result)


def _place(eqn: Any) -> str:
    """Return where an equation is in the user's code, in parentheses."""
    if eqn is None:
        return ""
    # Lines "file:line:column (function)", the innermost frame first. Outside of jaxlit's frames, every equation has the
    # line that called the Trainer.
    frames = reversed(summarize(eqn.source_info, num_frames=_MOST_FRAMES).splitlines())
    inner = list(takewhile(lambda frame: not frame.startswith(_LIBRARY), frames))
    users = [frame for frame in inner if "site-packages" not in frame]
    places = [re.match(r".+?:\d+", frame.rpartition("site-packages/")[2]) for frame in users or inner]
    return f" ({places[0][0]})" if places and places[0] else ""
