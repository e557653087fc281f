"""Loaders: what can be one, how one is opened once an epoch, and where its iteration stands."""

import contextlib
import copy
import itertools
import logging
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxlit.data import grain_source as grain_data
from jaxlit.data.array_loader import ArrayLoader as ArrayLoader
from jaxlit.data.array_loader import differences
from jaxlit.data.intake import Intake
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError

_logger = logging.getLogger("jaxlit")


class Source:
    """A user's loader, opened once an epoch.

    Where an iteration stands is told with each batch, so that batches which were drawn ahead do not count.

    Args:
        loader: A grain dataset or DataLoader, an `ArrayLoader`, or any re-iterable of batches.
        argument: Where it was given, for messages.
    """

    def __init__(self, loader: Any, argument: str) -> None:
        self.loader, self.argument = loader, argument
        self.pinned = False  # every epoch is epoch 0
        self.keep: int | None = None  # batches of the first epoch to take again in each
        self._kept: list[tuple[Any, Any]] | None = None
        self.may_go_on = False  # an epoch may begin where the last one stopped
        self._stream: Generator[tuple[Any, Any], None, None] | None = None
        self.prepare: Callable[[Any], Any] | None = None  # the user's own last word on a host batch
        self.intake = Intake(argument)
        self.looked = False  # whether its first batch was looked at
        self.gave = False  # whether it gave a batch at all
        self.agreement: Any = None  # that of several processes, see jaxlit.data.agreement
        self.times: list[float] = []  # seconds that its first batches took
        self.waited = 0.0  # seconds of the epoch in which the devices had nothing to do but wait for a batch
        self._peeked: tuple[int, Generator[tuple[Any, Any], None, None]] | None = None
        self._start: tuple[int, Any] | None = None  # the epoch to go on in, and where
        if isinstance(loader, (str, bytes, dict, type)) or hasattr(loader, "shape") or not _iterable(loader):
            hint = (
                "Wrap arrays as jl.ArrayLoader(arrays, batch_size)."
                if hasattr(loader, "shape")
                else ("Pass a jl.ArrayLoader, a grain dataset of batches, or another iterable of batches.")
            )
            raise ArgumentTypeError(f"{argument} is no loader: got {_kind(loader)}. {hint}")
        if isinstance(loader, (list, tuple)) and _are_columns(loader):
            kinds = ", ".join(f"{x.dtype}{list(x.shape)}" for x in loader)
            raise ArgumentTypeError(
                f"{argument} is no loader: got a {type(loader).__name__} of arrays that are no batches of one kind, "
                f"{kinds}. Wrap arrays as jl.ArrayLoader((x, y), batch_size)."
            )
        self._grain = grain_data.kind_of(loader)
        # Any other may fill the same memory again, which a step still reads or a device aliases: it is copied.
        known = self._grain in ("MapDataset", "DataLoader") or type(loader) is ArrayLoader
        self._fresh = known or isinstance(loader, (list, tuple))
        if self._grain:
            grain_data.mark_flags_parsed()

    @property
    def length(self) -> int | None:
        """Batches an epoch, None if unknown or without end."""
        try:
            length = len(self.loader)
        except (TypeError, NotImplementedError):
            return None
        return None if length >= sys.maxsize // 2 else length  # grain's repeat() without end

    @property
    def is_grain(self) -> bool:
        """Whether the loader is grain's."""
        return self._grain is not None

    @property
    def is_iterator(self) -> bool:
        """Whether the loader is a generator or the like, which can be iterated once only."""
        return hasattr(self.loader, "__next__") and type(self.loader).__module__ in ("builtins", "itertools")

    @property
    def is_endless(self) -> bool:
        """Whether the loader is known never to end."""
        if self._grain:
            return grain_data.is_endless(self.loader)
        if isinstance(self.loader, itertools.repeat):
            try:
                return self.loader.__length_hint__() < 0
            except TypeError:
                return True
        return isinstance(self.loader, (itertools.cycle, itertools.count))

    @property
    def goes_on(self) -> bool:
        """Whether an epoch begins where the last one stopped."""
        return self.may_go_on and (self.is_endless or self.is_iterator)

    def epoch(self, epoch: int) -> Generator[tuple[Any, Any], None, None]:
        """Return one epoch's (batch, where the iteration stands behind it)."""
        epoch = self._number(epoch)
        if self._peeked is not None:
            (peeked, draws), self._peeked = self._peeked, None
            if peeked == epoch:
                return draws
        if self.keep is None:
            return self._draws(epoch)
        # What is kept begins with the first batch, also if training goes on behind it.
        start, self._start = self._start, None
        return _behind(self._keeping(epoch, self.keep), (start[1] or 0) if start else 0)

    def peek(self) -> None:
        """Draw the first batch and refuse one that no step could take; the first epoch begins with it."""
        if self.looked or (hasattr(self.loader, "__next__") and not self.is_iterator):
            return  # an object that is its own iterator may begin anew when it is iterated again, or go on
        self.looked, epoch = True, self._start[0] if self._start else 0
        draws = self.epoch(epoch)
        first = list(itertools.islice(draws, 1))
        self._peeked = (epoch, _chained(first, draws))
        for batch, _ in first:
            self.gave = True
            if self.prepare is None:  # what it makes of a batch is looked at in its turn
                self.intake(batch)
            if self._grain and grain_data.is_unbatched(self.loader):
                _warn_if_single(batch, self.argument)

    def close(self) -> None:
        """Let go of iterations that were begun, and so of their threads and processes."""
        for draws in (self._peeked[1] if self._peeked else None, self._stream):
            if draws is not None:
                with contextlib.suppress(ValueError):  # a thread hangs in it
                    draws.close()
        self._peeked = self._stream = None

    def take(self, batch: Any) -> tuple[Any, Any]:
        """Return a drawn batch as hooks see it, and what of it goes to the step."""
        self.gave = True
        if self.prepare is not None:
            batch = _own(self.prepare(batch))  # it may fill the same memory again, like a loader
            if batch is None:
                raise DataError(f"{self.argument}: on_before_batch_transfer returned None. Return the batch.")
        return self.intake(batch)

    def state_dict(self, epoch: int, at: Any) -> dict[str, Any]:
        """Return where an iteration stands, as JSON's values.

        Args:
            epoch: The epoch.
            at: What came with the last batch that was used.
        """
        return {"epoch": self._number(epoch), "at": at, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where an iteration stood: the state's epoch starts behind the last batch that was used.

        Raises:
            DataError: The state belongs to other data, or another batch size, seed or order.
        """
        was = state["fingerprint"]
        if was is not None and (what := differences(was, self._fingerprint())):
            if state["at"] is not None:
                raise DataError(
                    f"{self.argument}: the iteration was saved with another loader: {what}. Build the loader as it was "
                    "built then, or resume from a checkpoint of an epoch's end."
                )
            _logger.warning("%s is another loader than before the resume: %s.", self.argument, what)
        if not self._may_start(state["at"]):
            raise DataError(
                f"{self.argument}: the iteration's place {state['at']!r:.60} is none of this kind of loader."
            )
        self._start, self._peeked, self._stream = (int(state["epoch"]), state["at"]), None, None
        self.gave |= state["at"] is not None

    def between_epochs(self, at: Any) -> Any:
        """Return where the iteration stands once an epoch is over, given where it stood at its end."""
        return at if self.goes_on or (self._keeps_state and not hasattr(self.loader, "set_epoch")) else None

    @property
    def is_shared(self) -> bool:
        """Whether every number of processes that share its rows gives the same batches."""
        return isinstance(self.loader, ArrayLoader) or self._grain == "MapDataset"

    def _may_start(self, at: Any) -> bool:
        if at is None or self._keeps_state:
            return True
        if self._grain:
            return isinstance(at, str if self._grain == "DataLoader" else dict)
        return type(at) is int and at >= 0

    def _number(self, epoch: int) -> int:
        return 0 if self.pinned else epoch

    @property
    def _keeps_state(self) -> bool:
        ours = self._grain or isinstance(self.loader, ArrayLoader)
        return not ours and hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    def _fingerprint(self) -> dict[str, Any]:
        found = {"loader": type(self.loader).__name__, "length": self.length}
        if self._grain:
            return found | grain_data.fingerprint(self.loader)
        # One with a state_dict of its own compares what else it likes.
        return found | (self.loader.fingerprint if isinstance(self.loader, ArrayLoader) else {})

    def empty(self) -> DataError:
        """Return the error of an epoch without a batch."""
        if not self.gave:
            return DataError(
                f"{self.argument} gave no batch. Check that it is not empty and that its batch size fits its length."
            )
        return DataError(
            f"{self.argument} gave no batch when it was opened again: it is an iterator that the first time used up. "
            "Pass an object that can be iterated again, a list or a jl.ArrayLoader say."
        )

    def _keeping(self, epoch: int, count: int) -> Generator[tuple[Any, Any], None, None]:
        if self._kept is None:
            kept = []
            for i, (batch, _) in enumerate(itertools.islice(self._draws(epoch), count)):
                kept.append((batch, i + 1))
                self._kept = kept if len(kept) == count else None
                yield _own(batch), i + 1
            self._kept = kept
        else:
            # Copies: a hook that changes a batch in place changes it for one epoch.
            yield from ((_own(batch), at) for batch, at in self._kept)

    def _draws(self, epoch: int) -> Generator[tuple[Any, Any], None, None]:
        if not self.goes_on:
            return self._open(epoch)
        if self._stream is None:
            self._stream = self._open(epoch)
        # A generator that is not closed goes on where it was left.
        return (draw for draw in self._stream)

    def _open(self, epoch: int) -> Generator[tuple[Any, Any], None, None]:
        loader, at = self.loader, None
        if self._start is not None and (self._start[0] == epoch or self.goes_on):
            at = self._start[1]
        self._start = None
        for shuffler in (loader, getattr(loader, "sampler", None)):
            if shuffler is not None and hasattr(shuffler, "set_epoch"):
                shuffler.set_epoch(epoch)
        if self._grain:
            draws = grain_data.draws(loader, epoch, at)
        elif isinstance(loader, ArrayLoader):  # counted here: it may be shared with a validation
            loader.load_state_dict({"epoch": epoch, "batch": at or 0, "fingerprint": loader.fingerprint})
            draws = zip(loader, itertools.count((at or 0) + 1), strict=False)
        elif self._keeps_state:
            if at is not None:
                loader.load_state_dict(at)
            draws = ((batch, copy.deepcopy(loader.state_dict())) for batch in loader)  # a living one moves on
        elif isinstance(loader, (list, tuple)):
            draws = zip(loader[at or 0 :], itertools.count((at or 0) + 1), strict=False)
        else:  # all that is known is how many were drawn
            draws = itertools.islice(zip(loader, itertools.count(1), strict=False), at or 0, None)
        for batch, behind in draws:
            yield batch if self._fresh else _own(batch), behind


def _own(x: Any) -> Any:
    """Return a batch with copies of its arrays; what a host key holds need be no pytree."""
    if isinstance(x, np.ndarray):
        return np.array(x)
    if type(x) is dict:
        return {key: _own(value) for key, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(map(_own, x))
    if jax.tree_util.all_leaves([x]):
        # The tensor of another library, which numpy would look into.
        foreign = hasattr(x, "__array__") and not isinstance(x, (jax.Array, np.generic))
        return np.array(np.asarray(x)) if foreign else x
    return jax.tree.map(_own, x)


def sources(loaders: Any, argument: str) -> list[Source]:
    """Return a loader, or each of a list of loaders, as sources."""
    if loaders is None:
        return []
    several = isinstance(loaders, (list, tuple)) and loaders
    if several and (all(map(_is_loader, loaders)) or any(map(_is_surely_loader, loaders))):
        return [Source(x, f"{argument}[{i}]") for i, x in enumerate(loaders)]
    return [Source(loaders, argument)]


def limit_of(limit: int | float, source: Source, argument: str) -> int | None:
    """Return how many batches a limit allows, None for all.

    Raises:
        ArgumentError: A fraction of an unknown length, or of so few batches that none is left.
    """
    length = source.length
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if limit == 1.0:
        return length
    if limit == 0.0:
        return 0
    if length is None:
        raise ArgumentError(
            f"Trainer({argument}={limit}) is a fraction, but {source.argument} has no length. "
            "Give the number of batches as an int."
        )
    count = int(length * limit)
    if count == 0 and length:
        raise ArgumentError(
            f"Trainer({argument}={limit}) of {length} batches is less than one. "
            f"Give at least {1 / length:.3g}, or an int."
        )
    return count


def _behind(draws: Generator[Any, None, None], count: int) -> Generator[Any, None, None]:
    with contextlib.closing(draws):
        yield from itertools.islice(draws, count, None)


def _chained(first: Iterable[Any], rest: Iterable[Any]) -> Generator[Any, None, None]:
    yield from first
    yield from rest


def _warn_if_single(batch: Any, argument: str) -> None:
    ranks = [np.ndim(x) for x in jax.tree.leaves(batch)]
    if 0 in ranks:
        _logger.warning(
            "%s has no stage that makes batches, and its first element holds a number beside arrays: is it a single "
            "sample? Then add .batch(batch_size).",
            argument,
        )


def _iterable(x: Any) -> bool:
    return isinstance(x, Iterable) or (hasattr(x, "__getitem__") and hasattr(x, "__len__"))


def _are_columns(arrays: Any) -> bool:
    # Batches differ in their rows alone; a tuple of arrays is (x, y).
    if not arrays or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in arrays):
        return False
    return isinstance(arrays, tuple) or len({(x.shape[1:], x.dtype) for x in arrays}) > 1


def _is_surely_loader(x: Any) -> bool:
    return _is_loader(x) and not isinstance(x, list)


def _is_loader(x: Any) -> bool:
    # A list of batches is a loader itself; a list of loaders is several. Batches are pytrees of arrays.
    if isinstance(x, (Mapping, tuple, str, bytes)) or hasattr(x, "shape") or not _iterable(x):
        return False
    return not isinstance(x, list) or not x or not hasattr(x[0], "shape")


def _kind(x: Any) -> str:
    return f"the class {x.__name__}" if isinstance(x, type) else f"{type(x).__name__} {x!r:.60}"
