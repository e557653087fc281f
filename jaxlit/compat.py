"""What jaxlit uses of private parts of other libraries: five, each with its reason; a test fails where one is gone."""

import copy
import ctypes
import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

# 1. The coordination service of jax: its store of small values, which works before and without devices. jax has no
# public client of it. `jax.distributed.is_initialized` is public since https://github.com/jax-ml/jax/issues/26009; the
# address, the number of processes and the client are not.


def coordination() -> Any:
    """Return jax's state of a job: `client`, `coordinator_address`, `process_id`, `num_processes`."""
    from jax._src.distributed import global_state

    return global_state


# 2. The clusters that `jax.distributed.initialize()` detects. jax has no public way to ask what it would detect:
# without it, a Trainer in a job of SLURM that was started without `initialize` would train alone in each process.
# https://github.com/jax-ml/jax/pull/12415 proposes that `initialize` raises where it detects nothing.


def clusters() -> list[Any]:
    """Return the classes of clusters that jax detects by itself: SLURM, Open MPI, TPU pods, Kubernetes."""
    from jax._src.clusters import ClusterEnv

    return [cluster for cluster in ClusterEnv._cluster_types if not cluster.opt_in_only_method]


# 3. The abort of a process whose coordinator is gone. jax ends it by SIGABRT from a thread of C++. No Python code runs
# after it, nor a handler of Python's `signal`, so the handler is set in C. jax has no public callback:
# https://github.com/jax-ml/jax/pull/39095 describes that every process ends with process 0.


def on_abort(exit_code: Callable[[], int | None]) -> None:
    """End with the exit code that a function returns when the process is aborted; None aborts as before."""

    def handle(number: int) -> None:
        if (code := exit_code()) is not None:
            os._exit(code)
        if before not in (None, 1):  # for example that of faulthandler; not "ignore"
            kind(before)(number)

    libc, kind = ctypes.CDLL(None), ctypes.CFUNCTYPE(None, ctypes.c_int)
    libc.signal.restype = ctypes.c_void_p
    handler = kind(handle)
    _handlers.append(handler)
    before = libc.signal(int(signal.SIGABRT), handler)


_handlers: list[Any] = []  # ctypes does not keep them


# 4. The parts of a `grain.DataLoader`, which is iterated in the same order each time. grain has no public way to read
# or to replace its sampler: https://github.com/google/grain/issues/572.


class LoaderParts(NamedTuple):
    """The parts of a `grain.DataLoader`."""

    sampler: Any
    data_source: Any
    operations: Sequence[Any]
    shard_options: Any


def loader_parts(loader: Any) -> LoaderParts:
    """Return the parts of a `grain.DataLoader`."""
    return LoaderParts(loader._sampler, loader._data_source, loader._operations, loader._shard_options)


def reseeded_loader(loader: Any, new_seed: Callable[[int], int] | None, changed: Callable[[Any], Any]) -> Any:
    """Return a `grain.DataLoader` of the same records with another order, if it shuffles, and other random numbers.

    `changed` returns what is iterated in place of its dataset; without `new_seed` the order stays.
    """
    import grain

    sampler = loader._sampler
    is_index = type(sampler) is grain.samplers.IndexSampler
    ends = sampler._num_epochs is not None if is_index else type(sampler) is grain.samplers.SequentialSampler
    copied = copy.copy(loader)
    if new_seed and ends and sampler._seed is not None:
        seed = new_seed(int(sampler._seed))
        options = {"shuffle": sampler._shuffle, "num_epochs": sampler._num_epochs} if is_index else {}
        copied._sampler = type(sampler)(sampler._num_records, sampler._shard_options, seed=seed, **options)
        copied._dataset = copied._create_dataset()
    copied._dataset = changed(copied._dataset)
    return copied


def state_here(state: str | bytes, iterator: Any) -> bytes:
    """Return a DataLoader's state as its iterator takes it: grain compares reprs, which hold an id and the seed."""
    now = json.loads(iterator.get_state())
    return json.dumps({**json.loads(state), **{key: now[key] for key in ("sampler", "data_source")}}).encode()


# 5. The seed and the repetitions of a stage of a `grain.IterDataset`, which cannot be indexed as a `MapDataset` can:
# `seed()` of its public methods concerns later stages only. Waits for the same as 4.


def reseeded_stage(stage: Any, new_seed: Callable[[int], int], parts: dict[str, Any]) -> Any:
    """Return a copy of a stage of an `IterDataset` with another seed, if it has one, and other parts."""
    copied = copy.copy(stage)  # stages are immutable, but a copy may have other parents
    vars(copied).update(parts)
    if isinstance(seed := vars(stage).get("_seed"), (int, np.integer)):
        copied._seed = new_seed(int(seed))
    return copied


def iterator_options(iterator: Any) -> Any:
    """Return the options of an iterator of an `IterDataset`, those included that later stages have set."""
    return iterator._ctx.dataset_options


def repeats_without_end(stage: Any) -> bool:
    """Return whether a stage of an `IterDataset` repeats its elements without end."""
    return type(stage).__name__ == "RepeatIterDataset" and stage._num_epochs is None
