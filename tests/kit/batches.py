"""Batches to train on."""

from collections.abc import Iterator
from typing import Any

import numpy as np

ROWS = 8  # a row for each device


def numbered(count: int, first: int = 1, rows: int = ROWS) -> list[dict[str, np.ndarray]]:
    """Return batches for `Mean`, each row of which holds the batch's number: a hook knows which batch it sees."""
    return [{"x": np.full((rows, 1), first + k, np.float32)} for k in range(count)]


def number_of(batch: Any) -> int:
    return int(np.asarray(batch["x"])[0, 0])


def random(count: int = 3, rows: int = ROWS, features: int = 3, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return batches for `Linear` and `Net`: x (rows, features) and y (rows, 1), normal numbers."""
    return sized(*[rows] * count, features=features, seed=seed)


def sized(*rows: int, features: int = 3, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Return random batches with these numbers of rows."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(n, features), "y": draw(n, 1)} for n in rows]


class Stream:
    """A loader without a length, which counts how often it was opened.

    Args:
        *epochs: The batches of each epoch, the last ones again and again.
    """

    def __init__(self, *epochs: list[Any]) -> None:
        self.epochs, self.opened = epochs, 0

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        return iter(self.epochs[min(self.opened, len(self.epochs)) - 1])


def counted(*sizes: int, first: int = 0) -> list[dict[str, np.ndarray]]:
    """Return batches of these sizes for `Mean`, whose rows count on from batch to batch."""
    ends = first + np.cumsum(sizes)
    return [{"x": np.arange(end - n, end, dtype=np.float32)[:, None]} for n, end in zip(sizes, ends, strict=True)]


def rows_of(batches: Any) -> list[int]:
    """Return the numbers of the rows of batches, in order."""
    return [int(i) for batch in batches for i in np.ravel(batch["x"])]
