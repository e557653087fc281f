"""Drawing from grain's three kinds of loaders: each reshuffles, reports its place and continues there."""

import copy
import hashlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxlit.compat import loader_parts, repeats_without_end, reseeded_loader, reseeded_stage
from jaxlit.data.source import Source

# A MapDataset is read by threads of grain's, whose default of 500 batches ahead would fill the memory.
_THREADS, _AHEAD = 16, 16


class GrainSource(Source):
    """Draws from a `MapDataset`, an `IterDataset` or a `DataLoader`."""

    is_grain = True

    def __init__(self, loader: Any, argument: str, **how: Any) -> None:
        super().__init__(loader, argument, **how)
        self._kind = kind_of(loader)
        _mark_flags_parsed()

    @property
    def is_fresh(self) -> bool:
        """Whether each batch has its own memory; the stages of an `IterDataset` may be a user's."""
        return self._kind in ("MapDataset", "DataLoader")

    @property
    def is_shared(self) -> bool:
        """Whether every number of processes that share its rows gives the same batches."""
        return self._kind == "MapDataset"

    @property
    def is_endless(self) -> bool:
        """Whether the loader repeats its records without end."""
        if self._kind == "DataLoader":
            sampler = loader_parts(self.loader).sampler
            return len(sampler) > 2**60 if hasattr(sampler, "__len__") else False
        for stage in _stages(self.loader):
            if kind_of(stage) == "MapDataset" and len(stage) > 2**60:
                return True
            if repeats_without_end(stage):
                return True
        return False

    def draws(self, epoch: int, at: Any) -> Iterator[tuple[Any, Any]]:
        """Yield an epoch's (batch, the iterator's state after it), shuffled as a repetition of the data would be."""
        if self._kind == "DataLoader":
            iterator = iter(reseeded_loader(self.loader, partial(_shifted, epoch=epoch)) if epoch else self.loader)
            pack, unpack = bytes.decode, partial(_from_here, iterator=iterator)  # its state is JSON already
        else:
            dataset = _dataset_at(self.loader, epoch)
            if kind_of(dataset) == "MapDataset":
                import grain

                dataset = dataset.to_iter_dataset(grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD))
            iterator, pack, unpack = iter(dataset), copy.deepcopy, copy.deepcopy
        try:
            if at is not None:
                iterator.set_state(unpack(at))
            for batch in iterator:
                yield batch, pack(iterator.get_state())
        finally:
            if hasattr(iterator, "close"):  # stops its threads and processes
                iterator.close()

    def may_start(self, at: Any) -> bool:
        """Return whether `at` is the state of such an iterator."""
        return isinstance(at, str if self._kind == "DataLoader" else dict)

    def content(self) -> dict[str, Any]:
        """Return each stage's numbers, and a hash of a few records."""
        if self._kind == "DataLoader":
            sampler, data_source, _ = loader_parts(self.loader)
            ours = type(sampler).__module__.startswith("grain")  # another's repr may hold its address
            sources = {
                "sampler": repr(sampler) if ours else type(sampler).__name__,
                "source": _digest(data_source),
            }
        else:
            unread = (stage for stage in self._stages if kind_of(stage) == "MapDataset" and not stage.parents)
            sources = {f"source {i}": _digest(source) for i, source in enumerate(unread)}
        return {f"{i} {type(stage).__name__}": _numbers(stage) for i, stage in enumerate(self._stages)} | sources

    @property
    def makes_batches(self) -> bool:
        """Whether a stage makes batches of records."""
        return any("batch" in type(stage).__name__.lower() for stage in self._stages)

    @property
    def _stages(self) -> list[Any]:
        return list(loader_parts(self.loader).operations) if self._kind == "DataLoader" else _stages(self.loader)


def kind_of(loader: Any) -> str | None:
    """Return "MapDataset", "IterDataset" or "DataLoader", None for what is not grain's."""
    if "grain" not in sys.modules:  # then it cannot be one, and importing grain takes seconds
        return None
    import grain

    for kind in ("MapDataset", "IterDataset", "DataLoader"):
        if isinstance(loader, getattr(grain, kind)):
            return kind
    return None


def _mark_flags_parsed() -> None:
    """Let worker processes start in programs that absl did not start: they read absl's flags."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _stages(dataset: Any) -> list[Any]:
    """Return a dataset and all that it is made of; some stages keep theirs elsewhere than in `parents`."""
    seen, waiting = list[Any](), [dataset]
    while waiting:
        stage = waiting.pop(0)
        if not any(stage is other for other in seen):
            seen.append(stage)
            leaves = jax.tree.leaves(list(vars(stage).values()), is_leaf=_is_dataset)
            waiting += [leaf for leaf in leaves if _is_dataset(leaf)]
    return seen


def _is_dataset(x: Any) -> bool:
    return kind_of(x) in ("MapDataset", "IterDataset")


def _dataset_at(x: Any, epoch: int) -> Any:
    """Return a dataset as its repetition number `epoch` gives it: iterated twice, it would keep its order.

    Args:
        x: A dataset, or a value of a stage: datasets in lists, tuples and dicts are handled too.
        epoch: The number of the repetition.
    """
    if not _is_dataset(x):
        inside = epoch and type(x) in (list, tuple, dict)
        return jax.tree.map(partial(_dataset_at, epoch=epoch), x, is_leaf=_is_dataset) if inside else x
    if not epoch:
        return x
    if kind_of(x) == "MapDataset":
        length = len(x)
        return x if length > 2**60 else x.repeat(epoch + 1)[epoch * length : (epoch + 1) * length]
    parts = {name: _dataset_at(value, epoch) for name, value in vars(x).items()}
    return reseeded_stage(x, partial(_shifted, epoch=epoch), parts)


def _shifted(seed: int, epoch: int) -> int:
    # Far apart: a record's own randomness is drawn from the sum of the seed and its number.
    return (seed + 1_000_003 * epoch) % 2**32


def _from_here(state: str, iterator: Any) -> bytes:
    """Return a DataLoader's state as its iterator takes it: grain compares the source by a repr that holds its id."""
    source = json.loads(iterator.get_state())["data_source"]
    return json.dumps({**json.loads(state), "data_source": source}).encode()


def _numbers(stage: Any) -> dict[str, Any]:
    kept = ("batch_size", "drop_remainder", "seed", "window", "num_epochs", "start", "stop", "step")
    numbers = {k.strip("_"): int(v) for k, v in sorted(vars(stage).items()) if isinstance(v, (int, np.integer))}
    numbers = {k: v for k, v in numbers.items() if any(word in k for word in kept)}
    return numbers | ({"length": len(stage)} if kind_of(stage) == "MapDataset" else {})


def _digest(source: Any) -> str:
    """Return a hash of a few records of a random access source, or of its class if it has none."""
    digest = hashlib.sha256(type(source).__name__.encode())
    try:
        length = len(source)
        records = [source[i] for i in sorted({0, length // 2, length - 1})] if 0 < length < 2**60 else []
    except (TypeError, NotImplementedError):
        return digest.hexdigest()[:16]
    for leaf in jax.tree.leaves((length, records)):
        known = isinstance(leaf, (bytes, str, int, float, np.ndarray, np.generic))
        if known and not (isinstance(leaf, np.ndarray) and leaf.dtype == object):
            digest.update(leaf if isinstance(leaf, bytes) else np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]
