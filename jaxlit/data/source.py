"""Drawing from a user's loader, which is opened once an epoch, and the position of its iteration."""

import contextlib
import itertools
import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any

from jaxlit.data.array_loader import differences
from jaxlit.data.copies import copied
from jaxlit.errors import DataError
from jaxlit.notes import note_place

_logger = logging.getLogger("jaxlit")


class Source(ABC):
    """A user's loader, opened once an epoch. It only draws: what is done to a batch is the `Prefetcher`'s.

    Each batch comes with the iteration's position after it, so that batches which were drawn ahead do not count.
    `jaxlit.data.kinds.source_of` chooses the class for a loader. Subclasses override the members up to `length`.

    Args:
        loader: The loader.
        argument: Where it was given, for messages.
        may_continue: Whether an epoch begins where the last one stopped, if the loader has no end or is an iterator.
        overfit: Whether every epoch is epoch 0.
        keep: Batches of the first epoch to take again in each; None for new ones.

    Attributes:
        peeked: Whether its first batch was drawn ahead of time.
        gave: Whether it gave a batch at all.
        times: The seconds of its first draws.
        waited: The seconds of the epoch in which the devices waited for a batch of it.
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
        self,
        loader: Any,
        argument: str,
        *,
        may_continue: bool = False,
        overfit: bool = False,
        keep: int | None = None,
    ) -> None:
        self.loader, self.argument = loader, argument
        self._may_continue, self._overfit, self._keep = may_continue, overfit, keep
        self.peeked = self.gave = False
        self.times, self.waited = list[float](), 0.0
        self._kept: list[tuple[Any, Any]] | None = None
        self._stream: Generator[tuple[Any, Any], None, None] | None = None
        self._peeked: tuple[int, list[tuple[Any, Any]], Iterator[tuple[Any, Any]]] | None = None
        self._start: tuple[int, Any] | None = None  # the epoch to continue in, and where

    @abstractmethod
    def draws(self, epoch: int, at: Any) -> Iterator[tuple[Any, Any]]:
        """Return an epoch's (batch, position after it).

        Args:
            epoch: The epoch.
            at: Where to start: what came with the batch before, None for the beginning.
        """

    @property
    @abstractmethod
    def is_fresh(self) -> bool:
        """Whether each batch has its own memory; any other may be filled again while a step still reads it."""

    @abstractmethod
    def may_start(self, at: Any) -> bool:
        """Return whether `at` is a position in this kind of loader."""

    def content(self) -> dict[str, Any]:
        """Return what the order and the content of the batches depend on, as far as it is known."""
        return {}

    def gatherer(self, epoch: int) -> Callable[[int, int], Any] | None:
        """Return a function of the first batch and a count to a batch of an epoch, or a `Stack` of several.

        None where batches come one by one only. The iteration of the epoch is not begun.
        """
        return None

    @property
    def length(self) -> int | None:
        """Batches an epoch, None if unknown or without end."""
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
        # The batches to keep begin with the first, also if training continues after it.
        start, self._start = self._start, None
        return self._keeping(epoch, self._keep, (start[1] or 0) if start else 0)

    def peek(self) -> list[Any]:
        """Draw the first batch ahead of time, and return it in a list; the first epoch begins with it all the same.

        The list is empty if there is no batch, or if drawing one could lose it.
        """
        if self.peeked or (hasattr(self.loader, "__next__") and not self.is_iterator):
            return []  # an object that is its own iterator may start again when it is iterated again, or continue
        self.peeked, epoch = True, self._number(self._start[0] if self._start else 0)
        draws = self._begin(epoch)
        first = list(itertools.islice(draws, 1))
        self.gave |= bool(first)
        self._peeked = (epoch, first, draws)
        return [batch for batch, _ in first]

    @property
    def first(self) -> Any:
        """The first batch, if it was drawn ahead of time and no epoch has begun; else None."""
        pairs = [] if self._peeked is None else self._peeked[1]
        return pairs[0][0] if pairs else None

    def again(self, epoch: int, at: Any, count: int) -> list[Any]:
        """Draw batches of an epoch again; none where the loader cannot be set back, or only by drawing many.

        Args:
            epoch: The epoch.
            at: What came with the batch before them, None for the beginning.
            count: How many.
        """
        if self._kept is not None:
            return [copied(batch) for batch, _ in self._kept[at or 0 :][:count]]
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
        for draws in (self._peeked[2] if self._peeked else None, self._stream):
            if isinstance(draws, Generator):
                with contextlib.suppress(ValueError):  # a thread hangs in it
                    draws.close()
        self._peeked = self._stream = None

    def state_dict(self, epoch: int, at: Any) -> dict[str, Any]:
        """Return the position of an iteration, as JSON values.

        Args:
            epoch: The epoch.
            at: What came with the last batch that was used.
        """
        return {"epoch": self._number(epoch), "at": at, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position: the state's epoch starts after the last batch that was used.

        Raises:
            DataError: The state belongs to other data, or another batch size, seed or order.
        """
        was, at = state["fingerprint"], state["at"]
        if was is not None and (what := differences(was, self._fingerprint())):
            if at is not None:
                raise DataError(
                    f"{self.argument}: the iteration was saved with another loader: {what}. Build the loader as it was "
                    "built then, or resume from a checkpoint of an epoch's end."
                )
            _logger.warning("%s is another loader than before the resume: %s.", self.argument, what)
        if at is not None and not self.may_start(at):
            raise DataError(f"{self.argument}: the saved position {at!r:.60} is not one of this loader's kind.")
        self._start, self._peeked, self._stream = (int(state["epoch"]), at), None, None
        self.gave |= at is not None

    @property
    def begins_at(self) -> Any:
        """Where the epoch that is opened next begins, by a loaded state; None for the beginning."""
        return None if self._start is None else self._start[1]

    def between_epochs(self, at: Any) -> Any:
        """Return the position between two epochs, given the one at the end of the first."""
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

    def _keeping(self, epoch: int, count: int, start: int) -> Generator[tuple[Any, Any], None, None]:
        if self._kept is None:
            kept = []
            for i, (batch, _) in enumerate(itertools.islice(self._continued(epoch), count)):
                kept.append((batch, i + 1))
                self._kept = kept if len(kept) == count else None
                if i >= start:
                    yield copied(batch), i + 1
            self._kept = kept
        else:
            # Copies: a hook that changes a batch in place changes it for one epoch.
            yield from ((copied(batch), at) for batch, at in self._kept[start:])

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
        matches = peeked is not None and (peeked[0] == epoch or self.continues)
        return self._drawn(epoch, itertools.chain(*peeked[1:]) if peeked is not None and matches else None)

    def _drawn(self, epoch: int, draws: Iterator[tuple[Any, Any]] | None) -> Generator[tuple[Any, Any], None, None]:
        is_fresh = self.is_fresh
        for batch, after in self._begin(epoch) if draws is None else draws:
            self.gave = True
            yield batch if is_fresh else copied(batch), after

    def _begin(self, epoch: int) -> Iterator[tuple[Any, Any]]:
        """Begin the loader's own iteration."""
        at = None
        if self._keep is None:  # else `epoch` takes it: batches are kept from the first on
            if self._start is not None and (self._start[0] == epoch or self.continues):
                at = self._start[1]
            self._start = None
        for shuffler in (self.loader, getattr(self.loader, "sampler", None)):
            if shuffler is not None and hasattr(shuffler, "set_epoch"):
                shuffler.set_epoch(epoch)
        return self.draws(epoch, at)


def length_of(loader: Any) -> int | None:
    """Return a loader's batches an epoch, None if unknown or without end."""
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
