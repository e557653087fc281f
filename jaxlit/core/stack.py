"""Several batches for one program."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stack:
    """Batches of one kind, stacked along dim 1 of their arrays: rows stay the leading dim, which strategies split.

    Args:
        arrays: A pytree like a batch, of arrays (rows, count, ...); one of (rows, count) for a number.
        count: How many batches.
        numbers: Whether each leaf is a number, which has no rows.
    """

    arrays: Any
    count: int = field(metadata={"static": True})
    numbers: tuple[bool, ...] = field(metadata={"static": True})

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        """Return a batch, of views; raises IndexError past the last, so that the batches can be iterated."""
        if i >= self.count:
            raise IndexError(i)
        return self.map(lambda x: x[:, i], lambda x: x[0, i])

    def traced(self, i: jax.Array) -> Any:
        """Return a batch inside a program."""
        take = lambda x: jax.lax.dynamic_index_in_dim(x, i, axis=1, keepdims=False)  # noqa: E731
        return self.map(take, lambda x: take(x)[0])

    def map(self, array: Callable[[Any], Any], number: Callable[[Any], Any]) -> Any:
        """Return the pytree with a function of each array, and one of each number."""
        leaves, treedef = jax.tree.flatten(self.arrays)
        each = zip(leaves, self.numbers, strict=True)
        return treedef.unflatten([number(x) if is_number else array(x) for x, is_number in each])


def stacked(batches: Sequence[Any]) -> Stack:
    """Stack host batches of one kind."""
    first, treedef = jax.tree.flatten(batches[0])
    numbers = tuple([not x.ndim for x in first])
    rows = next(len(x) for x in first if x.ndim)
    columns = zip(*map(treedef.flatten_up_to, batches), strict=True)
    arrays = [np.stack(x, axis=1) if x[0].ndim else np.tile(np.stack(x), (rows, 1)) for x in columns]
    return Stack(treedef.unflatten(arrays), len(batches), numbers)
