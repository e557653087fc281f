"""Drawing from grain's three kinds of loaders, whose epochs are repetitions of their data."""

import copy
import hashlib
import logging
import sys
import threading
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np

from jaxlit.compat import loader_parts, repeats_without_end, reseeded_loader, reseeded_stage, state_here
from jaxlit.data.source import ENDLESS, Source, length_of, reached

_logger = logging.getLogger("jaxlit")
# A MapDataset is read by threads of grain's, whose default of 500 batches ahead would fill the memory.
_THREADS, _AHEAD = 16, 16
# The stages that begin another epoch by `set_state`. Others keep something of the epoch in which they were made: a
# seed, which packing has, or the state at its beginning.
_NAMES = "WithOptions Batch Rebatch ConcatThenSplit Map Filter Limit ThreadPrefetch Zip Mixed"
_SET_BACK = {f"{name}IterDataset" for name in _NAMES.split()}


class GrainSource(Source):
    """Draws from a `MapDataset`, an `IterDataset` or a `DataLoader`."""

    is_grain = True

    def __init__(self, loader: Any, argument: str, **how: Any) -> None:
        super().__init__(loader, argument, **how)
        self._kind = kind_of(loader)
        self._kept: Any = None  # an iterator that ended or was left,
        self._pids = set[int]()  # and the worker processes that were there
        from absl import flags

        if not flags.FLAGS.is_parsed():  # worker processes read absl's flags, also where absl did not start the program
            flags.FLAGS.mark_as_parsed()
        self._warn_of_losses()

    def _warn_of_losses(self) -> None:
        """Warn of records that are in no shard or in no window of an epoch."""
        if self._kind == "DataLoader":
            sampler, _, _, shards = loader_parts(self.loader)
            count, length = shards.shard_count, length_of(sampler) or 0
            if not shards.drop_remainder and length % count:
                _logger.warning(
                    "%s: grain.DataLoader gives each of %d shards %d of %d records, also with drop_remainder=False: %d "
                    "are in none. Use a MapDataset, whose dataset[i::%d] has all.",
                    *(self.argument, count, length // count, length, length % count, count),
                )
        for stage in self._stages:
            window = _numbers(stage).get("window_size") if type(stage).__name__ == "WindowShuffleMapDataset" else None
            if window and (length := length_of(stage) or 0) % window:
                _logger.warning(
                    "%s: WindowShuffleMapDataset(window_size=%d) of %d records repeats some in an epoch and leaves "
                    "others out. Pass a window that divides, or use grain's WindowShuffleIterDataset.",
                    *(self.argument, window, length),
                )

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
            return len(sampler) > ENDLESS if hasattr(sampler, "__len__") else False
        return _is_endless(self.loader)

    def draws(self, epoch: int, at: Any) -> Iterator[tuple[Any, Any]]:
        """Yield an epoch's (batch, the iterator's state after it), shuffled as a repetition of the data would be."""
        epoch = 0 if self.continues else epoch  # also in a resume: the first epoch goes on
        if self._kind == "DataLoader":
            loader = reseeded_loader(
                self.loader, partial(_shifted, epoch=epoch) if epoch else None, partial(_dataset_at, epoch=None)
            )
            iterator = iter(loader)
            pack, unpack = bytes.decode, partial(state_here, iterator=iterator)  # the state is JSON already
        else:
            iterator, at = self._iterator(epoch, at)
            pack, unpack = copy.deepcopy, copy.deepcopy
        keeps = self._keeps_workers
        try:
            if at is not None:
                iterator.set_state(unpack(at))
            for batch in iterator:
                yield batch, pack(iterator.get_state())
        except Exception:
            keeps = False
            raise
        finally:
            if keeps:
                from jaxlit.data.grain_workers import alive

                iterator, self._kept, self._pids = self._kept, iterator, alive()
            if hasattr(iterator, "close"):  # stops its threads and processes
                iterator.close()

    def _iterator(self, epoch: int, at: Any) -> tuple[Any, Any]:
        """Return an iterator of a dataset, and the state from which it gives an epoch; None for the one that it has."""
        import grain

        dataset = self.loader
        if self._kind == "MapDataset":
            ahead = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD)
            return iter(_dataset_at(dataset, epoch).to_iter_dataset(ahead)), at
        begun = iter(_dataset_at(dataset, epoch, step=int(self._may_continue)))
        if (kept := self._kept) is None:
            return begun, at
        from jaxlit.data.grain_workers import alive

        self._kept = None
        if not self._pids <= alive():  # one was killed, which may hold a lock for ever
            threading.Thread(target=kept.close, daemon=True).start()
            return begun, at
        at = at or begun.get_state()
        begun.close()
        return kept, at

    def close(self) -> None:
        """Close the iterations that were begun, with their threads and processes."""
        super().close()
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    @cached_property
    def _keeps_workers(self) -> bool:
        """Whether worker processes stay from epoch to epoch: what comes after them can be set back."""
        here = reached(self.loader, lambda stage: [] if _are_workers(stage) else _sources_of(stage))
        workers = [x for x in here if _are_workers(x)]
        return bool(workers) and all(x in workers or type(x).__name__ in _SET_BACK for x in here)

    def may_start(self, at: Any) -> bool:
        """Return whether `at` is the state of such an iterator."""
        return isinstance(at, str if self._kind == "DataLoader" else dict)

    def content(self) -> dict[str, Any]:
        """Return each stage's numbers, and a hash of a few records."""
        if self._kind == "DataLoader":
            sampler, data_source, *_ = loader_parts(self.loader)
            is_grains = type(sampler).__module__.startswith("grain")  # another repr may hold an address
            name = repr(sampler) if is_grains else type(sampler).__name__
            sources = {"sampler": name, "source": _digest(data_source)}
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
        if self._kind == "DataLoader":
            return list(loader_parts(self.loader).operations)
        return reached(self.loader, _sources_of)


def kind_of(loader: Any) -> str | None:
    """Return "MapDataset", "IterDataset" or "DataLoader", None for what is not grain's."""
    if "grain" not in sys.modules:  # then it cannot be one, and importing grain takes seconds
        return None
    import grain

    kinds = ("MapDataset", "IterDataset", "DataLoader")
    return next((kind for kind in kinds if isinstance(loader, getattr(grain, kind))), None)


def _sources_of(stage: Any) -> list[Any]:
    """Return the datasets that a stage reads, some of which are not in `parents`."""
    return [x for x in jax.tree.leaves(list(vars(stage).values()), is_leaf=_is_dataset) if _is_dataset(x)]


def _is_endless(stage: Any) -> bool:
    """Return whether a dataset repeats its elements without end: one of several ends with the first that does."""
    if kind_of(stage) == "MapDataset":
        return len(stage) > ENDLESS
    limited, sources = type(stage).__name__ == "LimitIterDataset", _sources_of(stage)
    return repeats_without_end(stage) or (bool(sources) and not limited and all(map(_is_endless, sources)))


def _is_dataset(x: Any) -> bool:
    return kind_of(x) in ("MapDataset", "IterDataset")


def _are_workers(stage: Any) -> bool:
    """Return whether a stage joins what `mp_prefetch` iterates in processes."""
    # A sequential slice is made in the sources themselves, which an epoch shares with the next.
    alone = [type(x).__name__ == "ProcessPrefetchIterDataset" and not _slices_in_place(x) for x in _sources_of(stage)]
    return type(stage).__name__ == "InterleaveIterDataset" and bool(alone) and all(alone)


def _slices_in_place(stage: Any) -> bool:
    return any(vars(x).get("_sequential_slice") for x in reached(stage, _sources_of))


def _dataset_at(x: Any, epoch: int | None, step: int = 0) -> Any:
    """Return a dataset, or the datasets in a stage's value, in the order of repetition number `epoch`.

    Worker processes end with this process, and go on with the epoch that is `step` later. Those of a DataLoader, which
    has no epoch here, end with theirs.
    """
    if not _is_dataset(x):
        inside = type(x) in (list, tuple, dict)
        return jax.tree.map(partial(_dataset_at, epoch=epoch, step=step), x, is_leaf=_is_dataset) if inside else x
    if kind_of(x) == "MapDataset":
        length = len(x)
        return x.repeat(epoch + 1)[epoch * length : (epoch + 1) * length] if epoch and length <= ENDLESS else x
    if _are_workers(x):
        from jaxlit.data.grain_workers import InWorker, Workers

        inner = [InWorker(y.parents[0], epoch, _dataset_at, step) for y in _sources_of(x)]
        return Workers([reseeded_stage(y, int, {"_parents": (z,)}) for y, z in zip(_sources_of(x), inner, strict=True)])
    parts = {name: _dataset_at(value, epoch, step) for name, value in vars(x).items()}
    return reseeded_stage(x, partial(_shifted, epoch=epoch or 0), parts)


def _shifted(seed: int, epoch: int) -> int:
    # Far apart: grain draws the randomness of a record from the sum of the seed and the record's index.
    return (seed + 1_000_003 * epoch) % 2**32


def _numbers(stage: Any) -> dict[str, Any]:
    settings = ("batch_size", "drop_remainder", "seed", "window", "num_epochs", "start", "stop", "step")
    numbers = {
        name.strip("_"): int(value)
        for name, value in sorted(vars(stage).items())
        if isinstance(value, (int, np.integer)) and any(setting in name.strip("_") for setting in settings)
    }
    return numbers | ({"length": len(stage)} if kind_of(stage) == "MapDataset" else {})


def _digest(source: Any) -> str:
    """Return a hash of a few records of a random access source, or of its class if it has none."""
    digest = hashlib.sha256(type(source).__name__.encode())
    try:
        length = len(source)
        records = [source[i] for i in sorted({0, length // 2, length - 1})] if 0 < length < ENDLESS else []
    except (TypeError, NotImplementedError):
        return digest.hexdigest()[:16]
    for leaf in jax.tree.leaves((length, records)):
        known = isinstance(leaf, (bytes, str, int, float, np.ndarray, np.generic))
        if known and not (isinstance(leaf, np.ndarray) and leaf.dtype == object):
            digest.update(leaf if isinstance(leaf, bytes) else np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]
