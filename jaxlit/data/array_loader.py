"""Batches of arrays in memory or mapped from disk."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxlit import checks as check
from jaxlit.core.derived_steps import Stack
from jaxlit.distributed.job import own_rows
from jaxlit.errors import ArgumentError, DataError
from jaxlit.faces import takes_only_its_arguments
from jaxlit.texts import leaf_name, shown


class ArrayLoader:
    """Batches of arrays in memory or mapped from disk, taken by one vectorised index each.

    Batch k of epoch e is a function of (seed, e, k) alone; the Trainer sets the epoch. In several processes, which
    all hold the same arrays, each gives its share of a batch's rows.

    Args:
        arrays: A pytree of arrays with the same leading size, `np.memmap` for data larger than memory.
        batch_size: Global rows of a batch.
        shuffle: Take the rows in a new order each epoch.
        seed: The seed of that order.
        drop_remainder: Leave out a last batch that is not full.

    Raises:
        ArgumentError: An argument is out of its range, or leading sizes differ.
        ArgumentTypeError: An argument of this name does not exist.

    Example:
        >>> import jaxlit as jl, numpy as np
        >>> loader = jl.ArrayLoader({"x": np.zeros((10, 3)), "y": np.arange(10)}, 4, shuffle=True)
        >>> len(loader)
        3
    """

    @takes_only_its_arguments("ArrayLoader")
    def __init__(
        self, arrays: Any, batch_size: int, *, shuffle: bool = False, seed: int = 0, drop_remainder: bool = False
    ) -> None:
        leaves = jax.tree.leaves(arrays)
        sizes: set[Any] = {x.shape[0] if getattr(x, "shape", ()) else None for x in leaves}
        if len(sizes) != 1 or None in sizes:
            raise ArgumentError(
                f"ArrayLoader(arrays, ...) takes a pytree of arrays with the same number of rows, got {shown(arrays)}. "
                "Pass numpy arrays whose first dim is the row."
            )
        self.batch_size = check.integer("batch_size", batch_size, low=1, owner="ArrayLoader")
        self.seed = check.integer("seed", seed, low=0, owner="ArrayLoader")
        self.arrays, self.shuffle, self.drop_remainder = arrays, bool(shuffle), bool(drop_remainder)
        self.num_rows = sizes.pop()
        # A plain view of a memory map is indexed faster than the map, and reads from the disk as late.
        # A pandas column is indexed by its labels, so it is made an array as well.
        self._leaves = [
            np.asarray(x) if isinstance(x, (np.ndarray, jax.Array)) or hasattr(x, "to_numpy") else x for x in leaves
        ]
        self._treedef = jax.tree.structure(arrays)
        self._epoch, self._next, self._start = 0, 0, 0

    def __len__(self) -> int:
        full, rest = divmod(self.num_rows, self.batch_size)
        return full + (rest > 0 and not self.drop_remainder)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.num_rows:,} rows, {len(self):,} batches of {self.batch_size}>"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration takes."""
        if epoch != self._epoch:
            self._epoch, self._next, self._start = epoch, 0, 0

    def __iter__(self) -> Iterator[Any]:
        order = self.order(self._epoch)
        start, self._start = self._start, 0
        size, num_rows = self.batch_size, self.num_rows
        is_shared = jax.process_count() > 1
        unflatten = self._treedef.unflatten
        for k in range(start, len(self)):
            first = k * size
            stop = first + size if first + size < num_rows else num_rows
            if is_shared:
                rows = own_rows(stop - first)
                first, stop = first + rows.start, first + rows.stop
            self._next = k + 1
            # Always new memory: a device may alias the batch, and the arrays are the caller's.
            if order is None:
                yield unflatten([np.array(x[first:stop]) for x in self._leaves])
            else:
                index = order[first:stop]
                yield unflatten([np.asarray(x[index]) for x in self._leaves])

    def gather(self, order: np.ndarray | None, first: int, count: int) -> Any:
        """Return `count` full batches, from batch `first`, as a `Stack`; batch `first` if the last of them is short."""
        size = self.batch_size
        if (first + count) * size > self.num_rows:
            count = 1
        rows = slice(first * size, min((first + count) * size, self.num_rows))
        if count == 1:
            return self._treedef.unflatten([np.array(x[rows if order is None else order[rows]]) for x in self._leaves])
        if order is None:
            blocks = [np.asarray(x[rows]).reshape(count, size, *x.shape[1:]) for x in self._leaves]
            arrays = [np.array(x.swapaxes(0, 1)) for x in blocks]  # new memory, as in `__iter__`
        else:
            columns = order[rows].reshape(count, size).T.ravel()
            arrays = [np.asarray(x[columns]).reshape(size, count, *x.shape[1:]) for x in self._leaves]
        return Stack(self._treedef.unflatten(arrays), count, (False,) * len(arrays))

    def unshuffled(self) -> "ArrayLoader":
        """Return a loader of the same rows that does not shuffle them."""
        return ArrayLoader(self.arrays, self.batch_size, drop_remainder=self.drop_remainder)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the iteration: epoch, next batch, and a fingerprint of data and arguments."""
        return {"epoch": self._epoch, "batch": self._next, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration at the position of `state_dict`.

        Raises:
            DataError: The state is of other data, or of another batch size, seed or order.
        """
        if changes := differences(state["fingerprint"], self.fingerprint):
            raise DataError(
                f"ArrayLoader.load_state_dict: the state belongs to other data: {changes}. Build the loader as it was "
                "built when the state was taken."
            )
        self._epoch = int(state["epoch"])
        self._start = self._next = int(state["batch"])

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What the order and the content of the batches depend on; the content is sampled at 16 rows."""
        named = zip(jax.tree_util.tree_leaves_with_path(self.arrays), self._leaves, strict=True)
        digest = hashlib.sha256()
        for (path, _), x in named:
            digest.update(repr((leaf_name(path), tuple(x.shape), str(x.dtype))).encode())
            if self.num_rows and x.dtype != object:  # whose bytes are addresses
                sample = np.unique(np.linspace(0, self.num_rows - 1, 16).astype(int))
                digest.update(np.ascontiguousarray(x[sample]).tobytes())
        names = ("batch_size", "shuffle", "seed", "drop_remainder")
        arguments = {name: getattr(self, name) for name in names}
        return {"rows": self.num_rows, **arguments, "arrays": digest.hexdigest()[:16]}

    def order(self, epoch: int) -> np.ndarray | None:
        """Return the order of an epoch's rows; None if they are not shuffled."""
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_rows) if self.shuffle else None


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what differs between two fingerprints; an empty text if they are equal."""
    changes = {}
    for name in {**now, **was}:
        if (old := was.get(name, "nothing")) != (new := now.get(name, "nothing")):
            # A hash of the content says nothing to people.
            changes["the data differ" if name.startswith(("arrays", "source")) else f"{name} was {old}, is {new}"] = 1
    return "; ".join(changes)
