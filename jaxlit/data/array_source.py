"""Drawing from an `ArrayLoader`."""

import itertools
from collections.abc import Iterator
from typing import Any

from jaxlit.data.array_loader import ArrayLoader
from jaxlit.data.source import Source


class ArraySource(Source):
    """Draws from an `ArrayLoader`, whose batches are a function of seed, epoch and number."""

    loader: ArrayLoader
    is_shared = True

    @property
    def is_fresh(self) -> bool:
        """Whether each batch has memory of its own; a class derived from ours may do as it likes."""
        return type(self.loader) is ArrayLoader

    def draws(self, epoch: int, at: Any) -> Iterator[tuple[Any, int]]:
        """Return an epoch's (batch, how many came so far)."""
        done = at or 0
        # Counted here, not asked of the loader: a validation may share it.
        self.loader.load_state_dict({"epoch": epoch, "batch": done, "fingerprint": self.loader.fingerprint})
        return zip(self.loader, itertools.count(done + 1), strict=False)

    def may_start(self, at: Any) -> bool:
        """Return whether `at` is a count of batches."""
        return type(at) is int and at >= 0

    def content(self) -> dict[str, Any]:
        """Return the loader's own fingerprint."""
        return self.loader.fingerprint
