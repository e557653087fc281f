"""Drawing from a user's loader, which is opened once an epoch, and the position of the iteration.

`Source` is the interface. `ArraySource` draws from an `ArrayLoader`, `GrainSource` from grain's three kinds of loaders,
and `PlainSource` from any other iterable of batches.
"""

import contextlib
import copy
import hashlib
import itertools
import json
import logging
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlit.compat import loader_parts, repeats_without_end, reseeded_loader, reseeded_stage
from jaxlit.data.array_loader import ArrayLoader, differences
from jaxlit.errors import DataError, note_place

_logger = logging.getLogger("jaxlit")
_FEW = 1000  # batches that a loader without a state may draw again to reach the next one
# A MapDataset is read by threads of grain's, whose default of 500 batches ahead would fill the memory.
_THREADS, _AHEAD = 16, 16


class Source(ABC):
    """A user's loader, opened once an epoch. It only draws batches: the `Prefetcher` checks and places them.

    Each batch comes with the iteration's position after it, so that batches which were drawn ahead do not count.
    `jaxlit.data.loaders.source_of` chooses the class for a loader. Subclasses override the members up to `length`.

    Args:
        loader: The loader.
        argument: Where it was passed, for messages.
        may_continue: Whether an epoch begins where the last one stopped, if the loader has no end or is an iterator.
        overfit: Whether every epoch is epoch 0.
        keep: Batches of the first epoch that every epoch repeats; None for new ones.

    Attributes:
        peeked: Whether the first batch was drawn ahead of time.
        gave: Whether the loader has returned a batch.
        times: The seconds of the first draws.
        waited: The seconds of the epoch in which the devices waited for a batch.
    """

    is_grain = False
    """Whether the loader is grain's."""

    makes_batches = False
    """Whether a stage of grain's makes batches of records."""

    is_shared = False
    """Whether every number of processes that share its rows gives the same batches."""

    is_iterator = False
    """Whether the loader is a generator or the like, which can be iterated once only."""

    is_endless = False
    """Whether the loader is known never to end."""

    def __init__(
        self, loader: Any, argument: str, *, may_continue: bool = False, overfit: bool = False, keep: int | None = None
    ) -> None:
        self.loader, self.argument = loader, argument
        self._may_continue, self._overfit, self._keep = may_continue, overfit, keep
        self.peeked = self.gave = False
        self.times, self.waited = list[float](), 0.0
        self._cached: list[tuple[Any, Any]] | None = None  # what is drawn in every epoch, if `keep` is set
        self._stream: Generator[tuple[Any, Any], None, None] | None = None
        self._peeked: _Peeked | None = None
        self._start: _Start | None = None

    @abstractmethod
    def draws(self, epoch: int, at: Any) -> Iterator[tuple[Any, Any]]:
        """Return an epoch's (batch, position after it), from position `at`; None for the beginning."""

    @property
    @abstractmethod
    def is_fresh(self) -> bool:
        """Whether each batch has its own memory; other memory may be filled again while a step reads it."""

    @abstractmethod
    def may_start(self, at: Any) -> bool:
        """Return whether `at` is a position in this kind of loader."""

    def content(self) -> dict[str, Any]:
        """Return what the order and the content of the batches depend on, as far as known."""
        return {}

    def gatherer(self, epoch: int) -> Callable[[int, int], Any] | None:
        """Return a function of the first batch and a count that gathers a batch, or a `Stack` of several.

        None if batches are drawn one by one only. The iteration of the epoch is not begun.
        """
        return None

    @property
    def length(self) -> int | None:
        """How many batches an epoch has, None if unknown or without end."""
        return length_of(self.loader)

    @property
    def continues(self) -> bool:
        """Whether an epoch begins where the last one stopped."""
        return self._may_continue and (self.is_endless or self.is_iterator)

    def epoch(self, epoch: int) -> Generator[tuple[Any, Any], None, None]:
        """Return one epoch's (batch, position after it)."""
        epoch = self._number(epoch)
        if self._keep is None:
            return self._continued(epoch)
        # The cache begins with the first batch, also if training continues after it.
        start, self._start = self._start, None
        return self._repeated(epoch, self._keep, 0 if start is None or start.at is None else start.at)

    def peek(self) -> list[Any]:
        """Draw the first batch ahead of time and return it in a list; the first epoch still begins with it.

        The list is empty if there is no batch, or if drawing one could lose it.
        """
        if self.peeked or (hasattr(self.loader, "__next__") and not self.is_iterator):
            return []  # an object that is its own iterator may restart when it is iterated again, or continue
        self.peeked = True
        epoch = self._number(self._start.epoch if self._start else 0)
        draws = self._begin(epoch)
        first = list(itertools.islice(draws, 1))
        self.gave |= bool(first)
        self._peeked = _Peeked(epoch, first, draws)
        return [batch for batch, _ in first]

    @property
    def first(self) -> Any:
        """The first batch, if it was drawn ahead of time and no epoch has begun; else None."""
        return next((batch for batch, _ in self._peeked.first), None) if self._peeked else None

    def redraw(self, epoch: int, at: Any, count: int) -> list[Any]:
        """Draw `count` batches from a position again; none if that is impossible, or takes many draws."""
        if self._cached is not None:
            return [copied(batch) for batch, _ in self._cached[at or 0 :][:count]]
        if not self.may_go_back(at):
            return []
        draws = self.draws(self._number(epoch), at)
        try:
            return [copied(batch) for batch, _ in itertools.islice(draws, count)]
        finally:
            if isinstance(draws, Generator):  # it may hold threads and processes
                draws.close()

    def may_go_back(self, at: Any) -> bool:
        """Return whether the iteration can be set back to a position, without much work."""
        return True

    def close(self) -> None:
        """Close the iterations that were begun, with their threads and processes."""
        for draws in (self._peeked.rest if self._peeked else None, self._stream):
            if isinstance(draws, Generator):
                with contextlib.suppress(ValueError):  # a thread hangs in it
                    draws.close()
        self._peeked = self._stream = None

    def state_dict(self, epoch: int, at: Any) -> dict[str, Any]:
        """Return the position of an iteration as JSON values; `at` came with the last batch that was used."""
        return {"epoch": self._number(epoch), "at": at, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch that was used; refuse a state of other data, batch size, seed or order."""
        saved, at = state["fingerprint"], state["at"]
        if saved is not None and (changes := differences(saved, self._fingerprint())):
            if at is not None:
                raise DataError(
                    f"{self.argument}: the iteration was saved with another loader: {changes}. Build the loader as it "
                    "was built then, or resume from a checkpoint of an epoch's end."
                )
            _logger.warning("%s is another loader than before the resume: %s.", self.argument, changes)
        if at is not None and not self.may_start(at):
            raise DataError(f"{self.argument}: the saved position {at!r:.60} is not one of this loader's kind.")
        self._start = _Start(int(state["epoch"]), at)
        self._peeked = self._stream = None
        self.gave |= at is not None

    @property
    def begins_at(self) -> Any:
        """Where the next epoch begins, by a loaded state; None for the beginning."""
        return None if self._start is None else self._start.at

    def between_epochs(self, at: Any) -> Any:
        """Return the position between two epochs, from the position at the end of the first."""
        return at if self.continues else None

    def empty(self) -> DataError:
        """Return the error of an epoch without a batch."""
        if not self.gave:
            return DataError(
                f"{self.argument} gave no batch. Check that it is not empty and that its batch size fits its length."
            )
        return DataError(
            f"{self.argument} gave no batch when it was opened again: it is an iterator that the first time used up. "
            "Pass an object that can be iterated again, such as a list or a jl.ArrayLoader."
        )

    def _number(self, epoch: int) -> int:
        return 0 if self._overfit else epoch

    def _fingerprint(self) -> dict[str, Any]:
        return {"loader": type(self.loader).__name__, "length": self.length} | self.content()

    def _repeated(self, epoch: int, count: int, start: int) -> Generator[tuple[Any, Any], None, None]:
        """Yield copies of the same batches in every epoch: a hook may change a batch in place, for one epoch."""
        if self._cached is not None:
            yield from ((copied(batch), at) for batch, at in self._cached[start:])
            return
        cached = []
        for i, (batch, _) in enumerate(itertools.islice(self._continued(epoch), count)):
            cached.append((batch, i + 1))
            self._cached = cached if len(cached) == count else None
            if i >= start:
                yield copied(batch), i + 1
        self._cached = cached

    def _continued(self, epoch: int) -> Generator[tuple[Any, Any], None, None]:
        if not self.continues:
            return self._open(epoch)
        if self._stream is None:
            self._stream = self._open(epoch)
        # A new generator around the stream: closing it leaves the stream open, to continue in the next epoch.
        return (draw for draw in self._stream)

    def _open(self, epoch: int) -> Generator[tuple[Any, Any], None, None]:
        # Taken now, as an epoch that is opened may end before its first draw.
        peeked, self._peeked = self._peeked, None
        if peeked is not None and (peeked.epoch == epoch or self.continues):
            return self._drawn(epoch, itertools.chain(peeked.first, peeked.rest))
        return self._drawn(epoch, None)

    def _drawn(self, epoch: int, draws: Iterator[tuple[Any, Any]] | None) -> Generator[tuple[Any, Any], None, None]:
        is_fresh = self.is_fresh
        for batch, after in self._begin(epoch) if draws is None else draws:
            self.gave = True
            yield batch if is_fresh else copied(batch), after

    def _begin(self, epoch: int) -> Iterator[tuple[Any, Any]]:
        """Begin the loader's own iteration."""
        at = None
        if self._keep is None:  # else `epoch` takes it: the cache begins with the first batch
            if self._start is not None and (self._start.epoch == epoch or self.continues):
                at = self._start.at
            self._start = None
        for shuffler in (self.loader, getattr(self.loader, "sampler", None)):
            if shuffler is not None and hasattr(shuffler, "set_epoch"):
                shuffler.set_epoch(epoch)
        return self.draws(epoch, at)


def copied(x: Any) -> Any:
    """Return a batch with copies of its arrays, whose memory the loader may fill again; any leaf may be no array."""
    if isinstance(x, np.ndarray):
        return np.array(x)
    if type(x) is dict:
        return {key: copied(value) for key, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(map(copied, x))
    if jax.tree_util.all_leaves([x]):
        # The tensor of another library, whose memory numpy would share.
        foreign = hasattr(x, "__array__") and not isinstance(x, (jax.Array, np.generic))
        return np.array(np.asarray(x)) if foreign else x
    return jax.tree.map(copied, x)


def length_of(loader: Any) -> int | None:
    """Return how many batches a loader has, None if unknown or without end."""
    try:
        length = len(loader)
    except (TypeError, NotImplementedError):
        return None
    return None if length >= sys.maxsize // 2 else length  # grain's repeat() without end


def located(error: BaseException, argument: str, epoch: int, batch: int) -> BaseException:
    """Return an error with a note of the loader that raised it, the epoch and the batch."""
    note_place(error, f"{argument} in epoch {epoch}, batch {batch}")
    if "terminated unexpectedly" in str(error):  # grain's words for a worker process that is gone
        error.add_note("Most often a worker is killed because memory ran out: use fewer workers, or smaller buffers.")
    return error


class _Start(NamedTuple):
    """A position that a loaded state continues at."""

    epoch: int
    at: Any


class _Peeked(NamedTuple):
    """The draws of an epoch whose first batch was drawn ahead of time."""

    epoch: int
    first: list[tuple[Any, Any]]  # no pair if the loader is empty
    rest: Iterator[tuple[Any, Any]]


class PlainSource(Source):
    """Draws from any iterable of batches.

    A loader with `state_dict` and `load_state_dict` reports its position. Any other continues by drawing the batches
    before the position again.
    """

    @property
    def is_fresh(self) -> bool:
        """Whether each batch has its own memory, as those of a list."""
        return isinstance(self.loader, (list, tuple))

    @property
    def is_iterator(self) -> bool:
        """Whether the loader is a generator or the like, which can be iterated once only."""
        return hasattr(self.loader, "__next__") and type(self.loader).__module__ in ("builtins", "itertools")

    @property
    def is_endless(self) -> bool:
        """Whether the loader is known never to end."""
        if isinstance(self.loader, itertools.repeat):
            return operator.length_hint(self.loader, -1) < 0
        return isinstance(self.loader, (itertools.cycle, itertools.count))

    def draws(self, epoch: int, at: Any) -> Iterator[tuple[Any, Any]]:
        """Return an epoch's (batch, the loader's own state or how many came so far)."""
        loader = self.loader
        if self._keeps_state:
            if at is not None:
                loader.load_state_dict(at)
            return ((batch, copy.deepcopy(loader.state_dict())) for batch in loader)  # the loader may change its own
        if isinstance(loader, (list, tuple)):
            return zip(loader[at or 0 :], itertools.count((at or 0) + 1), strict=False)
        return itertools.islice(zip(loader, itertools.count(1), strict=False), at or 0, None)

    def may_start(self, at: Any) -> bool:
        """Return whether `at` is a count of batches; a loader checks its own state itself."""
        return self._keeps_state or (type(at) is int and at >= 0)

    def may_go_back(self, at: Any) -> bool:
        """Return whether the loader's state is known, or drawing again from the beginning is quick."""
        if hasattr(self.loader, "__next__"):
            return False
        if self._keeps_state:
            return at is not None  # the state at the beginning is not known any more
        return isinstance(self.loader, (list, tuple)) or (at or 0) < _FEW

    def between_epochs(self, at: Any) -> Any:
        """Return the position between two epochs: a loader may count epochs in its own state."""
        counts_itself = self._keeps_state and not hasattr(self.loader, "set_epoch")
        return at if counts_itself else super().between_epochs(at)

    @property
    def _keeps_state(self) -> bool:
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")


class ArraySource(Source):
    """Draws from an `ArrayLoader`, whose batches are a function of seed, epoch and number."""

    loader: ArrayLoader
    is_shared = True

    @property
    def is_fresh(self) -> bool:
        """Whether each batch has its own memory; a subclass of `ArrayLoader` may reuse memory."""
        return type(self.loader) is ArrayLoader

    def draws(self, epoch: int, at: Any) -> Iterator[tuple[Any, int]]:
        """Return an epoch's (batch, how many came so far)."""
        done = at or 0
        # Counted here, not asked of the loader: a validation may share it.
        self.loader.load_state_dict({"epoch": epoch, "batch": done, "fingerprint": self.loader.fingerprint})
        return zip(self.loader, itertools.count(done + 1), strict=False)

    def gatherer(self, epoch: int) -> Callable[[int, int], Any] | None:
        """Return a function that takes batches from the arrays."""
        if not self.is_fresh or self._keep is not None:
            return None
        self._peeked = self._start = None
        self.gave = True
        return partial(self.loader.gather, self.loader.order(self._number(epoch)))

    def may_start(self, at: Any) -> bool:
        """Return whether `at` is a count of batches."""
        return type(at) is int and at >= 0

    def content(self) -> dict[str, Any]:
        """Return the loader's own fingerprint."""
        return self.loader.fingerprint


class GrainSource(Source):
    """Draws from a `MapDataset`, an `IterDataset` or a `DataLoader`."""

    is_grain = True

    def __init__(self, loader: Any, argument: str, **how: Any) -> None:
        super().__init__(loader, argument, **how)
        self._kind = kind_of(loader)
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
            return len(sampler) > 2**60 if hasattr(sampler, "__len__") else False
        return any(
            (kind_of(stage) == "MapDataset" and len(stage) > 2**60) or repeats_without_end(stage)
            for stage in _stages(self.loader)
        )

    def draws(self, epoch: int, at: Any) -> Iterator[tuple[Any, Any]]:
        """Yield an epoch's (batch, the iterator's state after it), shuffled as a repetition of the data would be."""
        if self._kind == "DataLoader":
            iterator = iter(reseeded_loader(self.loader, partial(_shifted, epoch=epoch)) if epoch else self.loader)
            pack, unpack = bytes.decode, partial(_from_here, iterator=iterator)  # the state is JSON already
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


def _stages(dataset: Any) -> list[Any]:
    """Return a dataset and all its ancestors, some of which are not in `parents`."""
    stages = list[Any]()
    queue = [dataset]
    while queue:
        stage = queue.pop(0)
        if not any(stage is other for other in stages):
            stages.append(stage)
            leaves = jax.tree.leaves(list(vars(stage).values()), is_leaf=_is_dataset)
            queue += [leaf for leaf in leaves if _is_dataset(leaf)]
    return stages


def _is_dataset(x: Any) -> bool:
    return kind_of(x) in ("MapDataset", "IterDataset")


def _dataset_at(x: Any, epoch: int) -> Any:
    """Return a dataset, or the datasets in a stage's value, in the order of repetition number `epoch`."""
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
    # Far apart: grain draws the randomness of a record from the sum of the seed and the record's index.
    return (seed + 1_000_003 * epoch) % 2**32


def _from_here(state: str, iterator: Any) -> bytes:
    """Return a DataLoader's state as its iterator takes it: grain compares reprs, which hold an id and the seed."""
    now = json.loads(iterator.get_state())
    return json.dumps({**json.loads(state), **{key: now[key] for key in ("sampler", "data_source")}}).encode()


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
        records = [source[i] for i in sorted({0, length // 2, length - 1})] if 0 < length < 2**60 else []
    except (TypeError, NotImplementedError):
        return digest.hexdigest()[:16]
    for leaf in jax.tree.leaves((length, records)):
        known = isinstance(leaf, (bytes, str, int, float, np.ndarray, np.generic))
        if known and not (isinstance(leaf, np.ndarray) and leaf.dtype == object):
            digest.update(leaf if isinstance(leaf, bytes) else np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]
