"""Drawing from an `ArrayLoader`, and from an iterable of batches of which nothing more is known."""

import copy
import itertools
import operator
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from jaxlit.data.array_loader import ArrayLoader
from jaxlit.data.source import Source

_FEW = 1000  # batches that may be drawn again to reach the next one


class PlainSource(Source):
    """Draws from any iterable of batches.

    One with a `state_dict` and a `load_state_dict` reports its position. Of another only the number of batches is
    known; it continues after them by drawing them again.
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
        """Return whether the loader's state is known, or drawing again from its beginning is quick."""
        if hasattr(self.loader, "__next__"):
            return False
        if self._keeps_state:
            return at is not None  # the state at its beginning is not known any more
        return isinstance(self.loader, (list, tuple)) or (at or 0) < _FEW

    def between_epochs(self, at: Any) -> Any:
        """Return the position between two epochs: a loader may count its epochs in its own state."""
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
        """Whether each batch has its own memory; a class derived from `ArrayLoader` may do as it likes."""
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
