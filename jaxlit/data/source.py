"""Drawing from a user's loader, which is opened once an epoch, and the position of the iteration.

`Source` is the interface. `ArraySource` draws from an `ArrayLoader`, `PlainSource` from any iterable of batches, and
`jaxlit.data.grain_source` from grain's loaders.
"""

import contextlib
import copy
import hashlib
import itertools
import logging
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlit.compat import state_here
from jaxlit.data.array_loader import ArrayLoader, differences
from jaxlit.errors import DataError, note_place

_logger = logging.getLogger("jaxlit")
_FEW = 1000  # batches that a loader without a state may draw again to reach the next one
ENDLESS = 2**40  # elements that no dataset has: the length of grain's `repeat()` is 2**63 - 1, then divided by batches
_MARKED = 8  # batches of which some are marked, to compare them in a resume
_OTHERS = (
    "%s: %s that of the uninterrupted run: order or values depend on more than the epoch. Rows may come twice. "
    "Give the loader state_dict and load_state_dict, or set_epoch(epoch), or use a jl.ArrayLoader or grain."
)
_ENDS = 4096  # bytes of an array, at its beginning and at its end, by which it is compared with another one


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
    """

    is_grain = False
    """Whether the loader is grain's."""

    makes_batches = False
    """Whether a stage of grain's makes batches of records."""

    is_shared = False
    """Whether every number of processes that share its rows gives the same batches."""

    alike = 0
    """How many batches of an epoch, from its first, are of one kind in any case: one of them is checked."""

    is_iterator = False
    """Whether the loader is a generator or the like, which can be iterated once only."""

    is_endless = False
    """Whether the loader is known never to end."""

    def __init__(
        self, loader: Any, argument: str, *, may_continue: bool = False, overfit: bool = False, keep: int | None = None
    ) -> None:
        self.loader, self.argument = loader, argument
        self._may_continue, self._overfit, self._keep = may_continue, overfit, keep
        self.peeked = False  # whether the first batch was drawn ahead of time
        self.gave = False  # whether the loader has returned a batch
        self.times = list[float]()  # the seconds of the first draws
        self.waited = 0.0  # the seconds of the epoch in which the devices waited for a batch
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

    def set_epoch(self, epoch: int) -> None:
        """Call the loader's `set_epoch` with the epoch that begins."""
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)

    @property
    def length(self) -> int | None:
        """How many batches an epoch has, None if unknown or without end."""
        return length_of(self.loader)

    @property
    def continues(self) -> bool:
        """Whether an epoch begins where the last one stopped."""
        return self._may_continue and (self.is_endless or hasattr(self.loader, "__next__"))

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
        epoch = self._number(epoch)
        self.set_epoch(epoch)
        draws = self.draws(epoch, at)
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
        if at is not None and self._keep is None and not self.may_start(at):
            raise DataError(f"{self.argument}: the saved position {at!r:.60} is not one of this loader's kind.")
        if (epoch := int(state["epoch"])) < 0:
            raise ValueError(f"there is no epoch {epoch}")
        self._start = _Start(epoch, at)
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
        if not (self.continues and self.is_grain):  # an iterator continues where it is iterated again
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
        self.set_epoch(epoch)
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
    return None if length > ENDLESS else length


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

    A loader with `state_dict` and `load_state_dict`, or an iterator with `get_state` and `set_state`, reports its
    position. Any other continues by drawing batches again: those of its epoch before the position, or of all epochs if
    it is its own iterator. A few are compared with those of the interrupted run.
    """

    def __init__(self, loader: Any, argument: str, **how: Any) -> None:
        super().__init__(loader, argument, **how)
        self._goes_on = hasattr(loader, "__next__")
        names = [("state_dict", "load_state_dict")]
        names += [("get_state", "set_state")] if self._goes_on else []  # as grain's iterators
        self._access = next((x for x in names if all(hasattr(loader, name) for name in x)), None)
        self._ended = False  # whether the newest iteration of a loader with a state has come to its end
        # How often `next` was called in each iteration of a loader that is its own iterator; None before the first.
        self._calls: tuple[int, ...] | None = None
        self._marks = dict[int, str]()  # by the number of a batch, a hash of it
        self._expected = dict[int, str]()  # the same of the interrupted run
        self._orders = set[str]()  # the marks of first batches, if nothing has a `set_epoch`
        self._generators = [(sampler, sampler.generator) for sampler in _random_samplers(loader)]

    @property
    def is_fresh(self) -> bool:
        """Whether each batch has its own memory, as those of a list."""
        return isinstance(self.loader, (list, tuple))

    @property
    def is_iterator(self) -> bool:
        """Whether the loader is a generator or the like, which can be iterated once only."""
        return self._goes_on and type(self.loader).__module__ in ("builtins", "itertools")

    @property
    def is_endless(self) -> bool:
        """Whether the loader is known never to end."""
        if isinstance(self.loader, itertools.repeat):
            return operator.length_hint(self.loader, -1) < 0
        return isinstance(self.loader, (itertools.cycle, itertools.count))

    def draws(self, epoch: int, at: Any) -> Iterator[tuple[Any, Any]]:
        """Return an epoch's (batch, position after it).

        The position is a dict with states, a count, or of an iterator the calls of `next` in each iteration.
        """
        if self._access is not None:
            return self._with_states(epoch, at)
        self._marks.clear()
        if self._goes_on:
            return self._of_iterator(at)
        # `map` and `zip` would ask the iterator for an iterator, which could begin again.
        draws = zip(map(next, itertools.repeat(iter(self.loader))), itertools.count(1), strict=False)
        return itertools.chain(self._first(draws, at or 0), draws)  # all but the first cost no call of Python

    def _first(self, draws: Iterator[tuple[Any, int]], done: int) -> Iterator[tuple[Any, int]]:
        for batch, number in draws:
            self._look(number, batch)
            if number > done:
                yield batch, number
            if number >= max(done, _MARKED):
                return

    def _with_states(self, epoch: int, at: Any) -> Iterator[tuple[Any, Any]]:
        get, load = (getattr(self.loader, name) for name in self._access or ())
        after = copy.deepcopy(get()) if at is None and self._goes_on else None
        if at is not None:
            # Older checkpoints have the state alone.
            after, drop = (at["state"], at["drop"]) if isinstance(at, dict) and "drop" in at else (at, 0)
            if isinstance(after, bytes) and type(self.loader).__module__.startswith("grain."):
                after = state_here(after, self.loader)
            load(copy.deepcopy(after))
            if drop:  # the end of the epoch before, so that the loader is as it was where this one began
                for _ in itertools.islice(self.loader, drop):
                    after = None
                self.set_epoch(epoch)
        self._ended = False
        for batch in self.loader:
            before, after = after, copy.deepcopy(get())  # the loader may change its own
            yield batch, {"state": after, "drop": 0, "before": before}
        self._ended = True

    def _of_iterator(self, at: Any) -> Iterator[tuple[Any, Any]]:
        past, done = (self._calls or (), 0) if at is None else _calls_of(at)
        first = sum(past)
        number = 0 if self._calls is None else first + done  # of the batch before; an iterator of this process goes on
        for calls in past if self._calls is None else ():
            batches = iter(self.loader)
            for _ in range(calls):
                number += 1
                self._look(number, next(batches, None))
        batches = iter(self.loader)
        try:
            while True:
                number += 1
                if (batch := next(batches, self)) is self:
                    if number > first + 1 or not past:
                        return
                    continue  # only now it comes to the end of the epoch before, whose length has hidden it
                self._look(number, batch)
                if number > first + done:
                    yield batch, (past, number - first)
        finally:
            self._calls = (*past, number - first)

    def _look(self, number: int, batch: Any) -> None:
        """Mark a batch if its number is a power of two, and warn if it is not that of the interrupted run."""
        if number & (number - 1) or number > _MARKED or not self._may_continue:
            return
        self._marks[number] = mark = _mark(batch)
        parts = _parts(self.loader, "dataset") if number == 1 and not self._generators else ()
        if parts and not any(hasattr(x, "set_epoch") for x in parts):
            self._orders.add(mark)
        if self._expected.pop(number, mark) != mark:
            self._expected.clear()
            _logger.warning(_OTHERS, self.argument, f"batch {number}, drawn again for the resume, is not")

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the loader, its samplers and datasets, and seed random samplers of torch by the epoch."""
        # A validation may share a dataset with training, in whose epoch it is.
        for part in _parts(self.loader, *["dataset"] * self._may_continue):
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        for sampler, generator in self._generators:
            torch = sys.modules["torch"]
            seed = (0 if generator is None else generator.initial_seed()) + 1_000_003 * epoch
            # Its own in each process, which would draw the same rows otherwise.
            sampler.generator = torch.Generator().manual_seed((seed + 7_368_787 * jax.process_index()) % 2**64)
            if generator is not None and generator is self.loader.generator:  # whose first number seeds workers
                torch.empty((), dtype=torch.int64).random_(generator=sampler.generator)

    def close(self) -> None:
        """Close the iterations that were begun, and give samplers their generators back."""
        super().close()
        for sampler, generator in self._generators:
            sampler.generator = generator

    def state_dict(self, epoch: int, at: Any) -> dict[str, Any]:
        """Return the position of an iteration, with marks of batches before it."""
        if isinstance(at, dict) and "before" in at:
            at = {"state": at["state"], "drop": 0}
        number = 0 if at is None or self._access else sum(_calls_of(at)[0]) + _calls_of(at)[1]
        marks = [[k, mark] for k, mark in list(self._marks.items()) if k <= number]
        marks += [[0, "changes"]] if at is None and len(self._orders) > 1 else []
        return super().state_dict(epoch, at) | ({"batches": marks} if marks else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch that was used."""
        super().load_state_dict(state)
        self._expected = dict(state.get("batches") or ())
        if 0 in self._expected:
            _logger.warning(_OTHERS, self.argument, "the next batch may not be")

    def may_start(self, at: Any) -> bool:
        """Return whether `at` is a position in an iterable; a loader checks its own state itself."""
        is_count = isinstance(at, int) and at >= 0
        return self._access is not None or is_count or (isinstance(at, (list, tuple)) and len(at) == 2)

    def may_go_back(self, at: Any) -> bool:
        """Return whether the loader's state is known, or drawing again from the beginning is quick."""
        if self._goes_on or self._access:
            return not self._goes_on and at is not None  # the state at the beginning is not known any more
        return isinstance(self.loader, (list, tuple)) or at is None or _calls_of(at)[1] < _FEW

    def between_epochs(self, at: Any) -> Any:
        """Return the position between two epochs, of which the first may have been cut."""
        if not self._may_continue:
            return None
        if self._access:
            if not isinstance(at, dict) or "before" not in at:
                return at
            if hasattr(self.loader, "set_epoch"):
                return None
            # Its last batch is drawn again, and the end, if the loader came to it: a state may not begin an epoch.
            # Without the state before, in an epoch of one batch, the next one is drawn.
            if at["before"] is None:
                return {"state": at["state"], "drop": int(not self._goes_on)}
            return {"state": at["before"], "drop": 1 + self._ended}
        if not self._goes_on:
            return None
        past, done = (self._calls or (), 0) if at is None else _calls_of(at)
        # An iteration that has ended, or was cut, has drawn more than was used.
        calls = self._calls if self._calls and self._calls[:-1] == past else (*past, done)
        return (calls if done else past), 0


def _calls_of(at: Any) -> tuple[tuple[int, ...], int]:
    """Return a position in an iterator, or a count, as the calls of `next` in earlier iterations and in this one."""
    return ((), at) if type(at) is int else (tuple(at[0]), at[1])


def _parts(loader: Any, *more: str) -> list[Any]:
    """Return a loader, its samplers, and more of its attributes and theirs, by the names of torch."""
    return reached(loader, lambda part: [getattr(part, name, None) for name in ("batch_sampler", "sampler", *more)])


def reached(start: Any, parts_of: Callable[[Any], list[Any]]) -> list[Any]:
    """Return an object and all to which its parts lead, each once and without None, the nearest first."""
    objects, queue = list[Any](), [start]
    while queue:
        x = queue.pop(0)
        if x is not None and not any(x is other for other in objects):
            objects.append(x)
            queue += parts_of(x)
    return objects


def _random_samplers(loader: Any) -> list[Any]:
    """Return the samplers of a `torch.utils.data.DataLoader` that draw from a generator."""
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader):
        return []
    if hasattr(loader, "state_dict") and not loader.generator:  # one with a state has generators of its own in it
        return []
    kinds = (type(None), sys.modules["torch"].Generator)
    samplers = [part for part in _parts(loader) if isinstance(part, data.Sampler)]
    return [sampler for sampler in samplers if isinstance(vars(sampler).get("generator", loader), kinds)]


def _mark(batch: Any) -> str:
    """Return a hash of the shapes of a batch, and of the beginning and the end of each of its arrays."""
    digest = hashlib.sha256()
    with contextlib.suppress(Exception):  # what is no batch is refused where it is validated
        for leaf in jax.tree.leaves(batch):
            x = np.asarray(leaf)
            digest.update(f"{x.dtype}{x.shape}".encode())
            count = max(_ENDS // max(x.itemsize, 1), 1)
            for end in () if x.dtype.hasobject else (x.reshape(-1)[:count], x.reshape(-1)[-count:]):
                digest.update(end.tobytes())
    return digest.hexdigest()[:16]


class ArraySource(Source):
    """Draws from an `ArrayLoader`, whose batches are a function of seed, epoch and number."""

    loader: ArrayLoader
    is_shared = True

    @property
    def is_fresh(self) -> bool:
        """Whether each batch has its own memory; a subclass of `ArrayLoader` may reuse memory."""
        return type(self.loader) is ArrayLoader

    @property
    def alike(self) -> int:
        """The count of full batches."""
        return self.loader.num_rows // self.loader.batch_size if self.is_fresh else 0

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
