"""Write predictions to files as they are made."""

import contextlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.prediction_files import LOADER, Rows, folders_of, import_pyarrow, read_rows
from jaxlit.distributed.exchange import fetch
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError, in_all

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


class PredictionWriter(Callback):
    """Write what `predict_step` returns to files while `trainer.predict` runs, in the order of the data.

    With `trainer.predict(..., return_predictions=False)` one or two batches are in memory at a time. In several
    processes the rows of all are gathered batch by batch, and the first process writes them.

    The folder appears when everything is written. A run that is interrupted leaves no folder; an earlier one with
    predictions is replaced at the end. `index.json` in it lists the leaves. Each leaf of the outputs is a `.npy` file
    of its name, or a column of `predictions.parquet`; `PredictionWriter.load(folder)` returns the pytree. Several
    loaders have a folder each, `dataloader_idx_0` and so on, also one without rows. Where outputs are a dict,
    `Trainer(host_keys=...)` are written as well, in one process. bfloat16 and float16 are written as float32.

    Args:
        output_dir: The folder.
        write_interval: "batch" to write each batch as it comes, "epoch" to keep those of a loader in memory and write
            them at its end, in one piece.
        format: "npy", or "parquet", which holds texts too and needs `pip install pyarrow`.

    Raises:
        ArgumentError: An argument is invalid, or the folder has other files, cannot be made or is another writer's.
        DataError: The outputs are no arrays with one row for each row of the batch, or change their shape.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(callbacks=jl.callbacks.PredictionWriter("predictions"), logger=False)
    """

    in_fast_dev_run = False

    def __init__(
        self,
        output_dir: str | Path,
        write_interval: Literal["batch", "epoch"] = "batch",
        *,
        format: Literal["npy", "parquet"] = "npy",
    ) -> None:
        owner = "PredictionWriter"
        self.output_dir = Path(check.on_disk("output_dir", output_dir, owner=owner))
        self.write_interval = check.one_of("write_interval", write_interval, ("batch", "epoch"), owner=owner)
        self.format = check.one_of("format", format, ("npy", "parquet"), owner=owner)
        if format == "parquet":
            import_pyarrow()
        self._folder = self.output_dir.resolve()  # a link stays, and its target is replaced
        self._partial: Path | None = None  # the folder that is being written
        self._rows: list[Rows] = []  # of the loaders so far; the last is open
        self._waiting: list[tuple[int, Any]] = []  # a loader, and outputs that are not read yet

    @staticmethod
    def load(output_dir: str | Path) -> Any:
        """Return the predictions of a folder; a list with those of each loader if there are several, None without rows.

        Args:
            output_dir: The folder. Arrays of `.npy` files are mapped, and read when they are used.

        Raises:
            ArgumentError: It contains no predictions.
        """
        if not (folders := folders_of(folder := Path(output_dir))):
            raise ArgumentError(f"PredictionWriter.load({str(output_dir)!r}) finds no predictions there.")
        return read_rows(folder) if folders == [folder] else [read_rows(path) for path in folders]

    def on_predict_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Refuse a folder of other files, and host keys that only this process has."""
        if trainer.host_keys and team().size > 1:
            error = ArgumentError(
                f"Trainer(host_keys={trainer.host_keys}): in several processes predictions are of all rows, and host "
                "keys of this process's. Put a number that tells the rows apart into the batch as an array."
            )
            raise in_all(error)
        problem = self._problem(trainer) if trainer.is_global_zero else None
        problem, *_ = team().agree("the folder of predictions", problem)
        if problem is not None:
            raise in_all(ArgumentError(f"PredictionWriter(output_dir={str(self.output_dir)!r}) {problem}"))

    def _problem(self, trainer: "Trainer") -> str | None:
        """Make the folder that is written, and return why the final one cannot be used, if so."""
        if Path.cwd().is_relative_to(folder := self._folder):
            return "is the folder that the program runs in, or one above it, and would be replaced. Name another."
        writers = [c.output_dir.resolve() for c in trainer.callbacks if isinstance(c, PredictionWriter)]
        if sum(theirs.is_relative_to(folder) for theirs in writers) > 1:
            return "and another one replace each other's files. Give each its own."
        try:
            if folder.exists() and not folders_of(folder) and any(folder.iterdir()):
                return "would replace what is there, and it holds no predictions. Name another folder, or delete it."
            self._partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(self._partial, ignore_errors=True)  # of a process that was killed
            self._partial.mkdir(parents=True)
        except OSError as error:
            return f"cannot be made: {error}. Name another folder."
        return None

    def on_predict_batch_end(
        self, trainer: "Trainer", module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep the outputs, and write those of the batch before, which are ready by now."""
        self._take()
        if trainer.host_keys and isinstance(outputs, dict):
            outputs = {**{str(key): np.asarray(batch[key]) for key in trainer.host_keys}, **outputs}
        self._waiting = [(dataloader_idx, outputs)]

    def on_predict_epoch_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Write the rest, and give the folder its name."""
        self._take()
        if self._partial is None or not self._rows or trainer.interrupted:
            return
        num_loaders = len(trainer.num_predict_batches)
        self._rows_of(num_loaders - 1, self._partial).close()
        partial, self._partial = self._partial, None  # complete: kept if it cannot be renamed
        shutil.rmtree(self._folder, ignore_errors=True)
        (partial if num_loaders > 1 else partial / f"{LOADER}0").rename(self._folder)
        shutil.rmtree(partial, ignore_errors=True)

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Delete what was interrupted."""
        if self._partial is not None:
            with contextlib.suppress(Exception):  # what is closed is deleted
                self._rows[-1].close()
            shutil.rmtree(self._partial, ignore_errors=True)
        self._partial, self._waiting, self._rows = None, [], []

    def _take(self) -> None:
        """Bring the outputs that wait to the host, in all processes, and write them in the first."""
        waiting, self._waiting = self._waiting, []
        for loader, outputs in waiting:
            arrays = jax.tree.map(fetch, outputs)
            if self._partial is not None:
                self._rows_of(loader, self._partial).add(arrays)

    def _rows_of(self, loader: int, partial: Path) -> Rows:
        """Return the files of a loader; those of the loaders before are complete, also of loaders without rows."""
        while len(self._rows) <= loader:
            for rows in self._rows[-1:]:
                rows.close()
            folder, at_once = partial / f"{LOADER}{len(self._rows)}", self.write_interval == "batch"
            self._rows.append(Rows(folder, self.format, at_once=at_once))
        return self._rows[loader]
