"""What a batch must be: `BatchValidator` refuses what no step could take, and converts the rest.

In several processes, `Agreement` checks that their batches make one global batch, and `InStep` that none of them runs
out of batches before the others.
"""

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.core.replica import abstract_batch, num_rows, with_rows
from jaxlit.data.array_loader import ArrayLoader, differences
from jaxlit.data.source import copied, length_of
from jaxlit.distributed.job import own_rows
from jaxlit.distributed.team import join_rows, team
from jaxlit.errors import DataError, PeerError, did_you_mean
from jaxlit.strategies.base import ReplicatedBatch
from jaxlit.texts import leaf_name, shown

_logger = logging.getLogger("jaxlit")

_MOST_AHEAD = 8  # batches that are drawn before the processes compare how many they have


@dataclass(frozen=True)
class _Kind:
    """Batches of one structure, dtypes and shapes."""

    shown: dict[str, str]  # by leaf, "batch['x'][0]": "int32[8, 3]", as the step takes it
    narrowed: tuple[tuple[int, str], ...]  # leaves of 64 bits that a step takes as 32: index and name
    example: Any  # a batch's shapes and dtypes, as the step takes it
    as_is: bool  # the batch needs neither conversion nor checks


class BatchValidator:
    """Checks the batches of one loader, and splits them into what the step gets and what stays on the host.

    A hook of the user's, `prepare`, runs first. A batch is checked if it is of another kind than those before.
    `argument` is where the loader was passed, for messages. `host_keys` stay on the host, `max_recompiles` (None for no
    limit) restricts new shapes and dtypes, and `debug` refuses NaN in every batch.

    Attributes:
        blamed: Where an error comes from: the loader, or the user's hook if the hook raised.
    """

    def __init__(
        self,
        argument: str,
        *,
        prepare: Callable[[Any], Any] | None = None,
        prepared_by: str = "on_before_batch_transfer",
        host_keys: Sequence[str | int] = (),
        max_recompiles: int | None = None,
        debug: bool = False,
    ) -> None:
        self.argument = self.blamed = argument
        self._prepare, self._prepared_by = prepare, prepared_by
        self._host_keys, self._max_recompiles, self._debug = tuple(host_keys), max_recompiles, debug
        self._kinds: dict[Any, _Kind] = {}
        self._treedef: Any = None
        self._last_key: Any = None
        self.kind = _Kind({}, (), None, as_is=False)  # the structure, dtypes and shapes of the newest batch
        self._has_warned = False  # of float64
        self.example: Any = None  # the shapes and dtypes of the first batch, as the step takes them; None before it
        self.change = ""  # how the newest kind of batch differs from the kind before

    @property
    def prepares(self) -> bool:
        """Whether a hook of the user's changes the batches."""
        return self._prepare is not None

    @property
    def is_plain(self) -> bool:
        """Whether a step takes the loader's arrays, apart from narrowed 64-bit numbers."""
        return self._prepare is None and not (self._host_keys or self._debug)

    def narrow(self, arrays: Any) -> Any:
        """Return arrays of the newest kind of batch, or a stack of such batches, as a step takes them."""
        if not self.kind.narrowed:
            return arrays
        leaves, treedef = jax.tree.flatten(arrays)
        for i, name in self.kind.narrowed:
            leaves[i] = self._narrow(leaves[i], name)
        return treedef.unflatten(leaves)

    def __call__(self, batch: Any) -> tuple[Any, Any]:
        """Return the batch as hooks see it, with numpy leaves, and the part of it that goes to the step."""
        if self._prepare is not None:
            try:
                batch = copied(self._prepare(batch))  # the hook may fill the same memory again, like a loader
            except Exception:
                self.blamed = self._prepared_by
                raise
            if batch is None:
                raise DataError(f"{self.argument}: on_before_batch_transfer returned None. Return the batch.")
        to_step = self._without_host_keys(batch) if self._host_keys else batch
        outer = type(to_step)
        key: list[Any] = [outer, *to_step] if outer is dict else [outer]
        try:  # most often an array, or a dict, tuple or list of arrays: no call is needed to flatten it
            for x in (to_step,) if outer not in (dict, tuple, list) else to_step:
                x = to_step[x] if outer is dict else x
                key += type(x), x.dtype, x.shape
        except AttributeError:  # another pytree
            key = _key(to_step)
        if key == self._last_key:  # cheaper than a hash, and nearly always true
            kind = self.kind
        else:
            kind = self._kinds.get(tuple(key)) or self._new_kind(tuple(key), to_step)
            self._last_key, self.kind = key, kind
        if kind.as_is:
            return batch, to_step
        arrays, treedef = jax.tree.flatten(jax.tree.map(np.asarray, to_step))
        if self._debug:
            self._refuse_nan(kind, arrays)
        host = to_step = treedef.unflatten(arrays)
        if self._host_keys and isinstance(batch, dict):
            host = {**batch, **to_step}
        elif self._host_keys:
            host = type(batch)(old if new is None else new for old, new in zip(batch, to_step, strict=True))
        for i, name in kind.narrowed:
            arrays[i] = self._narrow(arrays[i], name)
        return host, treedef.unflatten(arrays)

    def _new_kind(self, key: Any, batch: Any) -> _Kind:
        """Check a batch of a new kind."""
        check_batch(batch, self.argument)
        named = batch_leaves(batch)
        example = abstract_batch(jax.tree.map(np.asarray, batch))
        dtypes = [x.dtype for x in jax.tree.leaves(example)]  # as the step takes it: int64 and int32 compile it once
        shown = {name: f"{dtype}{list(np.shape(x))}" for (name, x), dtype in zip(named, dtypes, strict=True)}
        narrowed = tuple((i, name) for i, (name, x) in enumerate(named) if np.asarray(x).dtype != dtypes[i])
        is_plain = all(type(x) is np.ndarray for _, x in named)
        kind = _Kind(shown, narrowed, example, as_is=is_plain and not narrowed and not self._debug)
        treedef = jax.tree.structure(batch)
        if self._kinds:
            self._compare(kind, treedef)
        else:
            self.example = example
        self._treedef = treedef
        self._kinds[key] = kind
        return kind

    def _compare(self, kind: _Kind, treedef: Any) -> None:
        """Refuse another structure, and count the shapes and dtypes that recompile the step."""
        kinds = list(self._kinds.values())
        if treedef != self._treedef:
            change = differences(kinds[0].shown, kind.shown)
            raise DataError(
                f"{self.argument}: the structure of the batch changed: {change or treedef}. Give every batch the same "
                "keys and nesting."
            )
        recompiles = len({tuple(k.shown.items()) for k in (*kinds, kind)}) - 1
        self.change = change = differences(kinds[-1].shown, kind.shown)
        if self._max_recompiles is not None and recompiles > self._max_recompiles:
            raise DataError(
                f"{self.argument}: a batch of another shape or dtype, {change}, would compile the step again, and "
                f"Trainer(max_recompiles={self._max_recompiles}) allows that {self._max_recompiles} times. Pad the "
                "batches to a few sizes, or raise max_recompiles."
            )
        if recompiles >= 3 and (recompiles + 1).bit_count() == 1:  # 3, 7, 15, ...
            _logger.warning(
                "%s: batches of %d shapes or dtypes so far, each compiles the step again. The newest: %s. Pad them to "
                "a few sizes; Trainer(max_recompiles=...) refuses more.",
                self.argument,
                recompiles + 1,
                change,
            )
        elif change:
            _logger.info("%s: the step is compiled again: %s.", self.argument, change)

    def _without_host_keys(self, batch: Any) -> Any:
        known = batch if isinstance(batch, dict) else range(len(batch) if type(batch) in (tuple, list) else 0)
        if missing := [key for key in self._host_keys if key not in known]:
            hint = did_you_mean(str(missing[0]), [k for k in known if isinstance(k, str)])
            raise DataError(
                f"{self.argument}: the batch has no {missing[0]!r}, which Trainer(host_keys=...) names; it is a "
                f"{type(batch).__name__} with {', '.join(map(repr, known)) or 'no keys'}.{hint} Give dicts or tuples "
                "that all have it, or leave it out of host_keys."
            )
        if isinstance(batch, dict):
            return {k: v for k, v in batch.items() if k not in self._host_keys}
        # None is not a leaf: each part keeps its index, and the step unpacks the batch as hooks do.
        return type(batch)(None if i in self._host_keys else x for i, x in enumerate(batch))

    def _narrow(self, x: np.ndarray, name: str) -> np.ndarray:
        """Return 64-bit numbers as 32-bit ones; refuse what jax would wrap around or make infinite silently."""
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        lost = list[Any]()
        with np.errstate(over="ignore"):
            narrow = x.astype(dtype)
        if x.dtype.kind in "iu":
            info = np.iinfo(dtype)
            if x.size and (x.min() < info.min or x.max() > info.max):
                lost = x[narrow != x]
        elif (infinite := np.isinf(narrow)).any():
            lost = x[infinite & np.isfinite(x)]
        if len(lost):
            raise DataError(
                f"{self.argument}: {name} is {x.dtype} and holds {lost[0]}, which would wrap around or become infinite "
                f"as {dtype}. Map ids to smaller ones, scale numbers, or set jax_enable_x64."
            )
        if x.dtype.kind not in "iu" and x.ndim and not self._has_warned:
            self._has_warned = True
            _logger.warning("%s: %s is %s and is cast to %s in every batch.", self.argument, name, x.dtype, dtype)
        return narrow

    def _refuse_nan(self, kind: _Kind, arrays: Sequence[np.ndarray]) -> None:
        for name, x in zip(kind.shown, arrays, strict=True):
            if not np.issubdtype(x.dtype, np.integer) and x.dtype != bool and (bad := x != x).any():
                raise DataError(
                    f"{self.argument}: {name}{np.argwhere(bad)[0].tolist() or ''} is NaN, as are {bad.sum()} of its "
                    f"{x.size} numbers. Clean the data, or mask it in the step."
                )


def _key(batch: Any) -> list[Any]:
    """Return a key that is equal for batches of one kind; `__call__` builds the keys of plain batches."""
    leaves, treedef = jax.tree.flatten(batch)
    arrays = [x if hasattr(x, "dtype") else np.asarray(x) for x in leaves]
    return [treedef, *[(type(x), array.dtype, array.shape) for x, array in zip(leaves, arrays, strict=True)]]


def check_batch(batch: Any, argument: str) -> None:
    """Raise a DataError if no step could take a batch of the loader that was passed as `argument`."""
    leaves = jax.tree_util.tree_leaves_with_path(
        batch, is_leaf=lambda x: type(x) is list and len(x) > 1 and all(isinstance(y, (bool, int, float)) for y in x)
    )
    if not leaves:
        raise DataError(f"{argument} gave {shown(batch)}, a batch with no array. Give a pytree of numpy arrays.")
    sizes: dict[str, int] = {}
    for path, leaf in leaves:
        name = _name(path)
        if type(leaf) is list:
            raise DataError(
                f"{argument}: {name} is a list of Python numbers, which jax treats as that many scalars. Make it an "
                "array with np.asarray; if it belongs to a single row, batch the rows."
            )
        x = np.asarray(leaf)
        is_number = jnp.issubdtype(x.dtype, jnp.number) or x.dtype == np.bool_
        if not (is_number and x.dtype.isnative and x.dtype.itemsize <= (16 if x.dtype.kind == "c" else 8)):
            key = getattr(path[0], "key", getattr(path[0], "idx", None)) if path else None
            if is_dataclass(leaf):
                advice = f"Decorate {type(leaf).__name__} with jax.tree_util.register_dataclass, or else keep it"
            elif key is not None:
                advice = f"Pass Trainer(host_keys=({key!r},)) to keep {_name(path[:1])}"
            else:
                advice = "Make the batch a dict with host_keys to keep it"
            raise DataError(
                f"{argument}: {name} holds {shown(leaf, 60)}, which no device takes. {advice} on the host, leave it "
                "out of the batch, or make it numbers of at most 64 bits."
            )
        if x.ndim:
            sizes[name] = x.shape[0]
    if not sizes:
        raise DataError(
            f"{argument} gave {shown(batch)}, which has no array with rows. A batch is a pytree of arrays of rows: if "
            "this is a single row, batch the rows."
        )
    if len(set(sizes.values())) > 1:
        raise DataError(
            f"{argument}: leading sizes differ: {sizes}. Every array needs one row for each row of the batch; if this "
            "is a single row, batch the rows. A graph, or what else belongs together, is a row: yield "
            "{key: value[None] for key, value in batch.items()}, and take value[0] in the step."
        )
    if 0 in sizes.values() and jax.process_count() == 1:  # a process's share of a last batch may have no rows
        raise DataError(f"{argument}: the batch has 0 rows ({sizes}). Leave empty batches out.")


def batch_leaves(batch: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a batch, each with its name as a user writes it: `batch['x'][0]`."""
    return [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(batch)]


def _name(path: Sequence[Any]) -> str:
    name = "batch"
    for entry in path:
        key = getattr(entry, "key", getattr(entry, "idx", None))
        name += f"[{key!r}]" if key is not None else f".{getattr(entry, 'name', leaf_name((entry,)))}"
    return name


class Agreement:
    """Checks that the batches of all processes make one global batch.

    The processes compare the first batch of a loader, and the last one of each epoch, whose rows may differ. Other
    batches need no exchange. Rows that do not divide among the devices, or that devices of several processes hold
    together, are joined: `splits` returns whether each process places its own rows, by a global batch's shapes.
    `prepares` is whether a hook of the user's changes the batches.
    """

    def __init__(self, loader: Any, argument: str, prepares: bool, splits: Callable[[Any], bool]) -> None:
        self._loader, self._argument, self._prepares, self._splits = loader, argument, prepares, splits
        self._rows: list[int] | None = None  # rows of each process in every batch but the last
        self._num_batches = 0

    def __call__(self, batch: Any, at: Any, *, last: bool) -> tuple[Any, Any]:
        """Return the global batch's shapes, and what to place: this process's rows, or a `ReplicatedBatch` of all.

        `batch` is this process's part, `at` the iteration's position after it, `last` whether the epoch ends with it.
        """
        argument, loader = self._argument, self._loader
        rows, process = num_rows(batch), jax.process_index()
        self._num_batches += 1
        if self._rows is None:
            rows_of = self._rows = self._compare_first(batch, last)
        elif type(loader) is ArrayLoader and not self._prepares:  # known without an exchange
            count = min(loader.batch_size, loader.num_rows - (at - 1) * loader.batch_size)
            parts = [own_rows(count, process) for process in range(jax.process_count())]
            rows_of = [part.stop - part.start for part in parts]
        elif last:
            rows_of = team().agree(f"batch {self._num_batches} of {argument}, the last of an epoch", rows)
        elif rows == self._rows[process]:
            rows_of = self._rows
        else:
            raise DataError(
                f"{argument}: a batch in the middle of an epoch has {rows} rows in process {process}, those before had "
                f"{self._rows[process]}. Only the last batch of an epoch may differ in rows between processes: "
                "in the middle of an epoch, a process does not ask the others for their number of rows."
            )
        shapes = with_rows(batch, sum(rows_of))
        splits = len(set(rows_of)) == 1 and self._splits(shapes)
        return shapes, batch if splits else joined(batch, rows_of)

    def in_step(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Return as many of the loader's batches as every process has; an exact length has been compared."""
        return stream if type(self._loader) in (ArrayLoader, list, tuple) else InStep(stream, self._argument)

    def _compare_first(self, batch: Any, last: bool) -> list[int]:
        """Compare the first batches of all processes, and return the rows of each."""
        argument, loader = self._argument, self._loader
        is_shared = type(loader) is ArrayLoader
        kinds = {name: f"{x.dtype}{list(x.shape[1:])}" for name, x in batch_leaves(batch)}
        kinds |= loader.fingerprint if is_shared else {}
        digest = hashlib.sha256()
        for x in jax.tree.leaves(batch):
            digest.update(np.ascontiguousarray(x).tobytes())
        summary = _Summary(kinds, num_rows(batch), length_of(loader), last, digest.hexdigest()[:16])
        summaries = [_Summary(*fields) for fields in team().agree(f"the first batch of {argument}", summary)]
        for process, other in enumerate(summaries):
            if changes := differences(other.kinds, kinds):
                raise DataError(
                    f"{argument}: the loader differs between process {process} (was) and process {jax.process_index()} "
                    f"(is): {changes}. Build the same one everywhere; a jl.ArrayLoader with all the arrays and the "
                    "same seed takes its own share of each batch."
                )
        rows = [x.rows for x in summaries]
        has_same_rows = len(set(rows)) == 1 or is_shared or all(x.is_last for x in summaries)
        if len({(x.length, x.is_last) for x in summaries}) > 1 or not has_same_rows:
            raise DataError(
                f"{argument}: the processes differ in the number of batches or in the rows of the first one: batches "
                f"{[x.length for x in summaries]}, rows {rows}, by process. Give each the same: leave the remainder of "
                "the data out when you share it, for example with drop_remainder=True."
            )
        has_distinct_rows = any(len(np.unique(x, axis=0)) > 1 for x in jax.tree.leaves(batch) if x.ndim)
        if not is_shared and has_distinct_rows and len({x.digest for x in summaries}) == 1:
            raise DataError(
                f"{argument}: every process reads the same rows. Give each its share: "
                "dataset[jax.process_index()::jax.process_count()] of a grain dataset, before it is batched, "
                "jl.distributed.shard_options() for a grain.DataLoader, or a jl.ArrayLoader, which shares by itself."
            )
        return rows


def joined(batch: Any, rows: Sequence[int]) -> ReplicatedBatch:
    """Return a batch of all processes' rows, from this process's part and the rows of each process."""
    return ReplicatedBatch(jax.tree.map(lambda x: join_rows(x, rows) if x.ndim else x, batch))


class _Summary(NamedTuple):
    """What the processes compare of their first batches."""

    kinds: dict[str, str]
    rows: int
    length: int | None
    is_last: bool
    digest: str


class InStep:
    """The batches of a loader that may end earlier in one process than in another: as many as every process has.

    The processes compare how many batches they have drawn, a few at a time, so that none begins a step for which
    another has no batch. The next few are drawn one by one while those that were compared are used. Between two draws,
    `stream`, the loader's batches, may be replaced by a thread that draws from it.
    """

    def __init__(self, stream: Iterator[Any], argument: str) -> None:
        self.stream, self._argument = stream, argument
        self._ready = deque[Any]()  # batches that were compared
        self._drawn = deque[Any]()  # batches that were not compared yet
        self._size = 1  # batches that are compared next
        self._count = 0
        self._over = False
        self._error: Exception | None = None
        self._failed = list[int]()  # processes whose loaders have raised

    def __iter__(self) -> "InStep":
        return self

    def __next__(self) -> Any:
        if self._ready:
            self._draw(min(2, self._size - len(self._drawn)))  # two for one, as the next comparison needs more
        elif not self._over:
            self._draw(self._size - len(self._drawn))
            self._compare()
        if not self._ready and self._error is None and self._failed:
            raise PeerError(f"{self._argument}: the loader of process {self._failed[0]} has failed.")
        if not self._ready:
            raise self._error or StopIteration
        return self._ready.popleft()

    def _draw(self, count: int) -> None:
        if self._error is None and not self._over:
            try:
                self._drawn.extend(itertools.islice(self.stream, count))
            except Exception as error:  # raised after the batches before it
                self._error = error

    def _compare(self) -> None:
        processes = team()
        topic = f"batches of {self._argument} after batch {self._count}"
        draw = [min(len(self._drawn), self._size), self._error is not None]
        counts, failures = zip(*processes.agree(topic, draw), strict=True)
        self._failed = [process for process, has_failed in enumerate(failures) if has_failed]
        least = min(counts)
        self._over = least < self._size
        self._ready.extend(self._drawn.popleft() for _ in range(least))
        self._count += least
        self._size = min(2 * self._size, _MOST_AHEAD)
        if least < max(counts) and processes.index == 0 and not self._failed:
            ended = ", ".join(str(process) for process, count in enumerate(counts) if count == least)
            unused = ", ".join(f"{count - least} in process {i}" for i, count in enumerate(counts) if count > least)
            _logger.warning(
                "%s: process %s has no batch left after %d batches, so the epoch ends there in all processes. At least "
                "so many batches are left out: %s.",
                self._argument,
                ended,
                self._count,
                unused,
            )
