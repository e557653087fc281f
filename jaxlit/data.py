"""Loaders: where batches come from, checked and ready to be placed."""

import hashlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError
from jaxlit.state import leaf_name


class ArrayLoader:
    """Batches of arrays in memory, taken by one vectorised index each.

    Batch k of epoch e is a function of (seed, e, k) alone; the Trainer sets the epoch.

    Args:
        arrays: A pytree of arrays with the same leading size.
        batch_size: Global rows of a batch.
        shuffle: Take the rows in another order each epoch.
        seed: The seed of that order.
        drop_remainder: Leave out a last batch that is not full.

    Raises:
        ArgumentError: An argument is out of its range, or leading sizes differ.

    Example:
        >>> import jaxlit as jl, numpy as np
        >>> loader = jl.ArrayLoader({"x": np.zeros((10, 3)), "y": np.arange(10)}, 4, shuffle=True)
        >>> len(loader)
        3
    """

    def __init__(
        self, arrays: Any, batch_size: int, *, shuffle: bool = False, seed: int = 0, drop_remainder: bool = False
    ) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(arrays)
        if not leaves:
            raise ArgumentError(f"ArrayLoader(arrays, ...) takes a pytree of arrays, got {arrays!r}.")
        sizes = {}
        for path, x in leaves:
            if not getattr(x, "shape", ()):
                where = leaf_name(path) or "arrays"
                raise ArgumentError(
                    f"ArrayLoader(arrays, ...): {where} must be an array with rows, got {type(x).__name__}. "
                    "Pass numpy arrays whose first dim is the row."
                )
            sizes[leaf_name(path)] = x.shape[0]
        if len(set(sizes.values())) > 1:
            raise ArgumentError(f"ArrayLoader(arrays, ...): leading sizes differ: {sizes}. Give each the same rows.")
        if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
            raise ArgumentError(f"ArrayLoader(seed=...) must be an int of at least 0, got {seed!r}.")
        if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
            raise ArgumentError(f"ArrayLoader(batch_size=...) must be a positive int, got {batch_size!r}.")
        self.arrays, self.batch_size, self.shuffle = arrays, int(batch_size), bool(shuffle)
        self.seed, self.drop_remainder = int(seed), bool(drop_remainder)
        self.num_rows = next(iter(sizes.values()))
        self._epoch, self._next, self._start = 0, 0, 0

    def __len__(self) -> int:
        full, rest = divmod(self.num_rows, self.batch_size)
        return full + (rest > 0 and not self.drop_remainder)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order the next iteration takes."""
        if epoch != self._epoch:
            self._epoch, self._next, self._start = epoch, 0, 0

    def __iter__(self) -> Iterator[Any]:
        order, start, self._start = self._order(self._epoch), self._start, 0
        for k in range(start, len(self)):
            rows = slice(k * self.batch_size, (k + 1) * self.batch_size)
            index = rows if order is None else order[rows]
            self._next = k + 1
            # A copy also without shuffling: a device may alias the batch, and the arrays are the caller's.
            yield jax.tree.map(lambda x, i=index: np.array(x[i]), self.arrays)

    def unshuffled(self) -> "ArrayLoader":
        """Return a loader of the same rows in their own order."""
        return ArrayLoader(self.arrays, self.batch_size, drop_remainder=self.drop_remainder)

    def state_dict(self) -> dict[str, Any]:
        """Return where the iteration stands: epoch, next batch, and a fingerprint of the data's shape."""
        return {"epoch": self._epoch, "batch": self._next, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration where `state_dict` was taken.

        Raises:
            DataError: It was taken from another kind of data, batch size, seed or order.
        """
        if state["fingerprint"] != self._fingerprint():
            raise DataError(
                "ArrayLoader.load_state_dict: the state belongs to other arrays, or another batch_size, seed or "
                "shuffle. Build the loader as it was built when the state was taken."
            )
        self._epoch, self._start = int(state["epoch"]), int(state["batch"])
        self._next = self._start

    def _order(self, epoch: int) -> np.ndarray | None:
        return np.random.default_rng((self.seed, epoch)).permutation(self.num_rows) if self.shuffle else None

    def _fingerprint(self) -> str:
        leaves = jax.tree_util.tree_leaves_with_path(self.arrays)
        shapes = [(leaf_name(path), tuple(x.shape), str(x.dtype)) for path, x in leaves]
        told = (shapes, self.batch_size, self.seed, self.shuffle, self.drop_remainder)
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]


class Source:
    """A user's loader, opened once an epoch.

    Args:
        loader: A grain dataset or DataLoader, an `ArrayLoader`, or any re-iterable of batches.
        argument: Where it was given, for messages.
    """

    def __init__(self, loader: Any, argument: str) -> None:
        self.loader, self.argument = loader, argument
        self.pinned = False  # every epoch is epoch 0
        self.keep: int | None = None  # batches of the first epoch to take again in each
        self._kept: list[Any] | None = None
        self.check_all = False  # check every batch, not the first alone
        self.prepare: Callable[[Any], Any] | None = None  # the user's own last word on a host batch
        self.gave = False  # whether it gave a batch before
        self._convert: bool | None = None
        self._kind: dict[str, str] = {}  # of the first batch: the dtype and a row's shape by name
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
        self._grain = _grain_kind(loader)
        if self._grain:
            _mark_flags_parsed()

    @property
    def length(self) -> int | None:
        """Batches an epoch, None if unknown or without end."""
        try:
            length = len(self.loader)
        except (TypeError, NotImplementedError):
            return None
        return None if length >= sys.maxsize // 2 else length  # grain's repeat() without end

    @property
    def is_endless(self) -> bool:
        """Whether the loader says that it never ends, as grain's repeat() does."""
        try:
            return len(self.loader) > 2**60
        except (TypeError, NotImplementedError):
            return False

    def epoch(self, epoch: int) -> Iterator[Any]:
        """Return one epoch of host batches.

        Raises:
            DataError: The loader is an iterator that was used up.
        """
        if self._kept is not None:
            return iter(self._kept)
        epoch = 0 if self.pinned else epoch
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(epoch)
        iterable = self.loader
        if self._grain == "MapDataset" and (length := self.length) is not None:
            # A dataset iterated twice keeps its order; its repetitions are shuffled anew.
            iterable = self.loader.repeat(epoch + 1)[epoch * length : (epoch + 1) * length].to_iter_dataset()
        if self.keep is not None:
            self._kept = list(map(self._host, itertools.islice(iterable, self.keep)))
            return iter(self._kept)
        return map(self._host, iter(iterable))

    def _host(self, batch: Any) -> Any:
        if self.prepare is not None:
            batch = self.prepare(batch)
        if self._convert is None or self.check_all:
            check_batch(batch, self.argument)
            self._check_kind(batch)
            self.gave = True
            self._convert = not all(type(x) is np.ndarray for x in jax.tree.leaves(batch))
        return jax.tree.map(np.asarray, batch) if self._convert else batch

    def _check_kind(self, batch: Any) -> None:
        """Refuse a batch of another structure than the first."""
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        kind = {leaf_name(path): f"{np.asarray(x).dtype}{list(np.shape(x)[1:])}" for path, x in leaves}
        self._kind = self._kind or kind
        for name in self._kind.keys() | kind.keys():
            if self._kind.get(name) != kind.get(name):
                raise DataError(
                    f"{self.argument}: a batch holds {kind.get(name, 'nothing')} at {name or 'its top'}, the first one "
                    f"{self._kind.get(name, 'nothing')} (dtype and shape of a row). Give batches of one kind."
                )


_END = object()


def feed(source: Source, epoch: int, limit: int | None, place: Callable[[Any], Any]) -> Iterator[tuple[Any, Any, bool]]:
    """Yield (placed batch, host batch, is last) of one epoch.

    One batch is drawn ahead, so that the last is known as such even if the loader has no length.
    """
    batches = itertools.islice(source.epoch(epoch), limit)
    following = next(batches, _END)
    while following is not _END:
        batch, following = following, next(batches, _END)
        yield place(batch), batch, following is _END


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


def check_batch(batch: Any, where: str) -> None:
    """Refuse a first batch that no step could take.

    Raises:
        DataError: Naming the leaf, what it holds, and what to do.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise DataError(f"{where} gave {batch!r}, a batch with no array. Give a pytree of numpy arrays.")
    sizes: dict[str, int] = {}
    for path, leaf in leaves:
        x, name = np.asarray(leaf), "batch" + "".join(_subscript(entry) for entry in path)
        if not (np.issubdtype(x.dtype, np.number) or x.dtype == np.bool_ or "float" in x.dtype.name):
            kind = type(leaf).__name__ if x.dtype.kind == "O" else x.dtype.name
            raise DataError(
                f"{where}: {name} holds {kind}, which no device takes. "
                "Leave it out of the batch or encode it as numbers."
            )
        narrowed = jax.dtypes.canonicalize_dtype(x.dtype)
        if x.dtype.kind in "iu" and narrowed != x.dtype and x.size:
            info = np.iinfo(narrowed)
            if x.min() < info.min or x.max() > info.max:
                raise DataError(
                    f"{where}: {name} is {x.dtype} and holds {max(int(x.max()), -int(x.min()))}, which would wrap "
                    f"around as {info.dtype}. Map such ids to smaller ones, or set jax_enable_x64."
                )
        if x.ndim:
            sizes[name] = x.shape[0]
    if not sizes:
        raise DataError(f"{where} gave {batch!r}, which has no array with rows. A batch is a pytree of arrays of rows.")
    if len(set(sizes.values())) > 1:
        raise DataError(f"{where}: leading sizes differ: {sizes}. Every array needs one row for each row of the batch.")
    if 0 in sizes.values():
        raise DataError(f"{where}: the batch has 0 rows ({sizes}). Leave empty batches out.")


def _subscript(entry: Any) -> str:
    key = getattr(entry, "key", getattr(entry, "idx", None))
    return f"[{key!r}]" if key is not None else f".{getattr(entry, 'name', entry)}"


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


def _grain_kind(loader: Any) -> str | None:
    if "grain" not in sys.modules:  # then it cannot be one, and importing grain takes seconds
        return None
    import grain

    for kind in ("MapDataset", "IterDataset", "DataLoader"):
        if isinstance(loader, getattr(grain, kind)):
            return kind
    return None


def _mark_flags_parsed() -> None:
    # grain's worker processes read absl flags, which are parsed only in programs that absl started.
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
