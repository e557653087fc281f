"""Drawing from an iterable of batches of which nothing more is known."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from jaxlit.data.rows import doubted_rows
from jaxlit.data.source import Source

_FEW = 1000  # batches that are drawn again to come to the next one


class PlainSource(Source):
    """Draws from any iterable of batches.

    One with a `state_dict` and a `load_state_dict` is asked where it stands. Of another all that is known is how many
    batches came; it continues after them by drawing them again.
    """

    @property
    def is_fresh(self) -> bool:
        """Whether each batch has memory of its own: those of a list do."""
        return isinstance(self.loader, (list, tuple))

    @property
    def is_iterator(self) -> bool:
        """Whether the loader is a generator or the like, which can be iterated once only."""
        return hasattr(self.loader, "__next__") and type(self.loader).__module__ in ("builtins", "itertools")

    @property
    def is_endless(self) -> bool:
        """Whether the loader is known never to end."""
        if isinstance(self.loader, itertools.repeat):
            try:
                return self.loader.__length_hint__() < 0
            except TypeError:
                return True
        return isinstance(self.loader, (itertools.cycle, itertools.count))

    def draws(self, epoch: int, at: Any) -> Iterator[tuple[Any, Any]]:
        """Return an epoch's (batch, the loader's own state or how many came so far)."""
        loader = self.loader
        if self._keeps_state:
            if at is not None:
                loader.load_state_dict(at)
            return ((batch, copy.deepcopy(loader.state_dict())) for batch in loader)  # a living one moves on
        if isinstance(loader, (list, tuple)):
            return zip(loader[at or 0 :], itertools.count((at or 0) + 1), strict=False)
        return itertools.islice(zip(loader, itertools.count(1), strict=False), at or 0, None)

    def doubts(self, batch: Any) -> str | None:
        """Return why the first batch seems to be a single row."""
        return doubted_rows(self.loader, batch, self.argument)

    def may_start(self, at: Any) -> bool:
        """Return whether `at` is a count of batches; a state is the loader's own affair, and so is what it compares."""
        return self._keeps_state or (type(at) is int and at >= 0)

    def may_go_back(self, at: Any) -> bool:
        """Return whether a state of the loader's own is known, or it is drawn again from its beginning in a moment."""
        if hasattr(self.loader, "__next__"):
            return False
        if self._keeps_state:
            return at is not None  # how it stood at its beginning is not known any more
        return isinstance(self.loader, (list, tuple)) or (at or 0) < _FEW

    def between_epochs(self, at: Any) -> Any:
        """Return where the iteration stands once an epoch is over: a loader may count its epochs in its own state."""
        counts_itself = self._keeps_state and not hasattr(self.loader, "set_epoch")
        return at if counts_itself else super().between_epochs(at)

    @property
    def _keeps_state(self) -> bool:
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")
