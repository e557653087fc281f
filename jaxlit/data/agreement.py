"""Agreement of several processes on the batches of one loader."""

import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxlit.core.replica import num_rows, with_rows
from jaxlit.data.array_loader import ArrayLoader, differences
from jaxlit.data.batch_validator import named_leaves
from jaxlit.data.source import length_of
from jaxlit.distributed.exchange import join_rows
from jaxlit.distributed.start import own_rows
from jaxlit.distributed.team import team
from jaxlit.errors import DataError, PeerError
from jaxlit.strategies.program import ReplicatedBatch

_MOST_AHEAD = 8  # batches that are drawn before the processes compare how many they have
_logger = logging.getLogger("jaxlit")


class Agreement:
    """Checks that the batches of all processes make one global batch.

    The processes compare the first batch of a loader, and the last one of each epoch, whose rows may differ. Other
    batches need no exchange, except for rows that do not divide among the devices, or that devices of several processes
    hold together: these are joined.

    Args:
        loader: The loader.
        argument: Where it was given, for messages.
        prepared: Whether a hook of the user's changes its batches.
        splits: Whether each process places rows of its own, given a global batch's shapes; else all rows are joined.
    """

    def __init__(self, loader: Any, argument: str, prepared: bool, splits: Callable[[Any], bool]) -> None:
        self._loader, self._argument, self._prepared, self._splits = loader, argument, prepared, splits
        self._rows: list[int] | None = None  # rows of each process in every batch but the last
        self._count = 0

    def __call__(self, batch: Any, at: Any, *, last: bool) -> tuple[Any, Any]:
        """Return the global batch's shapes, and what to place: this process's rows, or a `ReplicatedBatch` of all.

        Args:
            batch: This process's part.
            at: The iteration's position after it.
            last: Whether it is the last of the epoch.

        Raises:
            DataError: The processes' batches do not belong together.
        """
        argument, rows, loader = self._argument, num_rows(batch), self._loader
        process, self._count = jax.process_index(), self._count + 1
        if self._rows is None:
            rows_of = self._rows = self._first(batch, last)
        elif type(loader) is ArrayLoader and not self._prepared:  # known without asking
            count = min(loader.batch_size, loader.num_rows - (at - 1) * loader.batch_size)
            parts = [own_rows(count, process) for process in range(jax.process_count())]
            rows_of = [part.stop - part.start for part in parts]
        elif last:
            rows_of = team().agree(f"batch {self._count} of {argument}, the last of an epoch", rows)
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
        """Return as many of the loader's batches as every process has; a length that is exact has been compared."""
        return stream if type(self._loader) in (ArrayLoader, list, tuple) else InStep(stream, self._argument)

    def _first(self, batch: Any, last: bool) -> list[int]:
        """Compare the first batches; returns every process's rows."""
        argument, loader, rows = self._argument, self._loader, num_rows(batch)
        shared = type(loader) is ArrayLoader
        kinds = {name: f"{x.dtype}{list(x.shape[1:])}" for name, x in named_leaves(batch)}
        kinds |= loader.fingerprint if shared else {}
        mine = {"kinds": kinds, "rows": rows, "length": length_of(loader), "last": last, "digest": _digest(batch)}
        rows_of = team().agree(f"the first batch of {argument}", mine)
        for process, theirs in enumerate(rows_of):
            if what := differences(theirs["kinds"], kinds):
                raise DataError(
                    f"{argument}: the loader differs between process {process} (was) and process {jax.process_index()} "
                    f"(is): {what}. Build the same one everywhere; a jl.ArrayLoader with all the arrays and the same "
                    "seed takes its own share of each batch."
                )
        sizes, lengths, lasts = ([theirs[key] for theirs in rows_of] for key in ("rows", "length", "last"))
        same_rows = len(set(sizes)) == 1 or shared or all(lasts)
        if len({*zip(lengths, lasts, strict=True)}) > 1 or not same_rows:
            raise DataError(
                f"{argument}: the processes differ in the number of batches or in the rows of the first one: batches "
                f"{lengths}, rows {sizes}, by process. Give each the same: leave the remainder of the data out when "
                "you share it, for example with drop_remainder=True."
            )
        distinct = any(len(np.unique(x, axis=0)) > 1 for x in jax.tree.leaves(batch) if x.ndim)
        if not shared and distinct and all(theirs["digest"] == mine["digest"] for theirs in rows_of):
            raise DataError(
                f"{argument}: every process reads the same rows. Give each its share: "
                "dataset[jax.process_index()::jax.process_count()] of a grain dataset, before it is batched, "
                "jl.distributed.shard_options() for a grain.DataLoader, or a jl.ArrayLoader, which shares by itself."
            )
        return sizes


class InStep:
    """The batches of a loader that may end earlier in one process than in another: as many as every process has.

    The processes compare how many batches they have drawn, a few at a time, so that none begins a step that another one
    has no batch for. The next few are drawn one by one while those that were compared are used.

    Args:
        stream: Yields the loader's batches; a thread may take its place between two draws.
        argument: Where the loader was given, for messages.
    """

    def __init__(self, stream: Iterator[Any], argument: str) -> None:
        self.stream, self._argument = stream, argument
        self._ready, self._drawn = deque[Any](), deque[Any]()  # compared, and not yet
        self._size, self._count, self._over = 1, 0, False
        self._error: Exception | None = None
        self._failed = list[int]()  # processes whose loaders have raised

    def __iter__(self) -> "InStep":
        return self

    def __next__(self) -> Any:
        if self._ready:
            self._draw(min(2, self._size - len(self._drawn)))  # the next time more are needed than are used now
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
            except Exception as error:  # of the loader: the batches before it come first
                self._error = error

    def _compare(self) -> None:
        mine, processes = min(len(self._drawn), self._size), team()
        topic = f"batches of {self._argument} after batch {self._count}"
        given, failed = zip(*processes.agree(topic, [mine, self._error is not None]), strict=True)
        self._failed = [process for process, has_failed in enumerate(failed) if has_failed]
        least, self._over = min(given), min(given) < self._size
        self._ready.extend(self._drawn.popleft() for _ in range(least))
        self._count, self._size = self._count + least, min(2 * self._size, _MOST_AHEAD)
        if least < max(given) and processes.index == 0 and not self._failed:
            ended = ", ".join(str(process) for process, count in enumerate(given) if count == least)
            left = ", ".join(f"{count - least} in process {i}" for i, count in enumerate(given) if count > least)
            _logger.warning(
                "%s: process %s has no batch left after %d batches, so the epoch ends there in all processes. At least "
                "so many batches are left out: %s.",
                *(self._argument, ended, self._count, left),
            )


def joined(batch: Any, rows: Sequence[int]) -> ReplicatedBatch:
    """Return a batch of all processes' rows.

    Args:
        batch: This process's part.
        rows: How many each has.
    """
    return ReplicatedBatch(jax.tree.map(lambda x: join_rows(x, rows) if x.ndim else x, batch))


def _digest(batch: Any) -> str:
    digest = hashlib.sha256()
    for x in jax.tree.leaves(batch):
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()[:16]
