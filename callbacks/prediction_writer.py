"""Write predictions to files as they are made."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.prediction_files import FORMATS, Rows, holds_rows, pyarrow_or_refuse, read_rows, refuse_texts
from jaxlit.distributed.exchange import agree, fetch
from jaxlit.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


class PredictionWriter(Callback):
    """Write what `predict_step` returns to files while `trainer.predict` runs, in the order of the data.

    With `trainer.predict(..., return_predictions=False)` a batch or two are in memory at a time. In several processes
    the rows of all are gathered batch by batch, as `trainer.predict` returns them, and the first process writes them.

    The folder appears when all is written: what was cut short leaves none, and one that is there is replaced then, if
    it holds predictions. In it `index.json` says what there is. A pytree of outputs is a `.npy` file for each leaf,
    named as the leaf is, or a column for each in `predictions.parquet`; `PredictionWriter.load(folder)` puts them
    together again. Several loaders have a folder each, `dataloader_idx_0` and so on, also one without rows. Where
    outputs are a dict, `Trainer(host_keys=...)` are written as well, in one process. bfloat16 and float16 are written
    as float32.

    Args:
        output_dir: The folder.
        write_interval: "batch" to write each batch as it comes, "epoch" to keep those of a loader in memory and write
            them at its end, in one piece.
        format: "npy", or "parquet", which holds texts too and needs `pip install jaxlit[parquet]`.

    Raises:
        ArgumentError: An argument is out of its set, pyarrow is not installed, or before the first batch: the folder
            holds something else, cannot be replaced, or is that of another writer.
        DataError: The outputs are no arrays with one row for each row of the batch, or change their shape.

    Example:
        >>> import jaxlit as jl
        >>> writer = jl.callbacks.PredictionWriter("predictions")
        >>> trainer = jl.Trainer(callbacks=writer, logger=False)
    """

    in_fast_dev_run = False

    def __init__(self, output_dir: str | Path, write_interval: str = "batch", *, format: str = "npy") -> None:
        if not isinstance(output_dir, (str, Path)) or not str(output_dir):
            raise ArgumentTypeError(f"PredictionWriter(output_dir=...) takes a path, got {output_dir!r}.")
        self.output_dir = Path(output_dir)
        self.write_interval = check.one_of(
            "write_interval", write_interval, ("batch", "epoch"), owner="PredictionWriter"
        )
        self.format = check.one_of("format", format, tuple(FORMATS), owner="PredictionWriter")
        if format == "parquet":
            pyarrow_or_refuse()
        self._folder = self.output_dir  # without links, from the start of a run on
        self._partial: Path | None = None  # the folder that is being written
        self._clear()

    def _clear(self) -> None:
        self._rows: dict[int, Rows] = {}  # by loader, those that continue
        self._waiting: tuple[int, Any] | None = None  # a loader, and outputs that are not read yet
        self._kept: dict[int, list[Any]] = {}  # by loader, batches that are written in one piece

    @staticmethod
    def load(output_dir: str | Path) -> Any:
        """Return the predictions of a folder; a list of those of each loader if there are several, None without rows.

        Args:
            output_dir: The folder. Arrays of `.npy` files are mapped from it, and read where they are looked at.

        Raises:
            ArgumentError: It holds no predictions.
        """
        folder = Path(output_dir)
        if holds_rows(folder):
            return read_rows(folder)
        if not (folders := _loaders(folder)):
            raise ArgumentError(f"PredictionWriter.load({str(output_dir)!r}) finds no predictions there.")
        return [read_rows(found) for found in folders]

    def on_predict_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Refuse a folder of something else, and host keys that only this process has."""
        self._clear()
        if trainer.host_keys and jax.process_count() > 1:
            raise ArgumentError(
                f"Trainer(host_keys={trainer.host_keys}): in several processes predictions are of all rows, and host "
                "keys of this process's. Put what tells the rows apart, a number say, into the batch as an array."
            )
        self._folder = self.output_dir.resolve()  # what a link points to is replaced, and not the link
        problem = agree("the folder of predictions", self._problem(trainer) if trainer.is_global_zero else None)[0]
        if problem is not None:
            raise ArgumentError(f"PredictionWriter(output_dir={str(self.output_dir)!r}) {problem}")

    def _problem(self, trainer: "Trainer") -> str | None:
        """Return what stands against the folder; makes the one that is written, and tries what is done at the end."""
        folder = self._folder
        if Path.cwd().is_relative_to(folder):
            return "is the folder that the program runs in, or one above it, and would be replaced. Name another."
        for other in (c for c in trainer.callbacks if isinstance(c, PredictionWriter) and c is not self):
            theirs = other.output_dir.resolve()
            if theirs.is_relative_to(folder) or folder.is_relative_to(theirs):
                return f"and another one with {str(other.output_dir)!r} replace each other's files. Give each its own."
        there = folder.exists()
        if there and not (holds_rows(folder) or _loaders(folder) or (folder.is_dir() and not any(folder.iterdir()))):
            return "would replace what is there, and it holds no predictions. Name another folder, or delete it."
        try:
            partial, before = (folder.with_name(f".{folder.name}.{kind}") for kind in ("partial", "before"))
            self._partial = partial
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            partial.mkdir(parents=True)
            if there:
                folder.rename(before)
                before.rename(folder)
        except OSError as error:
            return f"cannot be made or replaced when all is written: {error}. Name a folder in it, or another one."
        return None

    def on_predict_batch_start(
        self, trainer: "Trainer", module: "TrainModule", batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Refuse texts that .npy files do not hold, before the step is compiled."""
        if batch_idx == 0 and self.format == "npy" and isinstance(trainer.predict_outputs, dict):
            for key in trainer.host_keys:
                refuse_texts(str(key), np.asarray(batch[key]))

    def on_predict_batch_end(
        self,
        trainer: "Trainer",
        module: "TrainModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keep the outputs, and write those of the batch before, which are ready by now."""
        self._take()
        if trainer.host_keys and isinstance(outputs, dict):
            outputs = {**{str(key): np.asarray(batch[key]) for key in trainer.host_keys}, **outputs}
        self._waiting = dataloader_idx, outputs

    def on_predict_epoch_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Write what is left, and give the folder its name."""
        self._take()
        self._write_kept()
        if self._partial is None or not self._rows or trainer.interrupted:
            return
        count = len(trainer.num_predict_batches)
        for loader in {*range(count)} - self._rows.keys():  # those without rows keep their place
            self._rows[loader] = Rows(self._partial / f"{_LOADER}{loader}", self.format)
        for rows in self._rows.values():
            rows.close()
        made = self._partial if count > 1 else self._partial / f"{_LOADER}0"
        shutil.rmtree(self._folder, ignore_errors=True)
        made.rename(self._folder)

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Delete what was cut short."""
        for rows in self._rows.values():
            rows.give_up()
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
        self._partial = None
        self._clear()

    def _take(self) -> None:
        """Bring the outputs that wait to the host, in all processes, and write them in the first."""
        if self._waiting is None:
            return
        (loader, outputs), self._waiting = self._waiting, None
        found = jax.tree.map(fetch, outputs)
        if self._partial is None:
            return
        if loader not in self._rows:
            self._write_kept()
            self._rows[loader] = Rows(self._partial / f"{_LOADER}{loader}", self.format)
        if self.write_interval == "epoch":
            self._kept.setdefault(loader, []).append(found)
        else:
            self._rows[loader].write(found)

    def _write_kept(self) -> None:
        """Write a loader's batches in one piece, after its last one."""
        for loader, batches in self._kept.items():
            self._rows[loader].write(jax.tree.map(lambda *x: np.concatenate(x), *batches))
        self._kept.clear()


_LOADER = "dataloader_idx_"


def _loaders(folder: Path) -> list[Path]:
    """Return the folders of several loaders' predictions, in the order of the loaders."""
    found = [path for path in folder.glob(f"{_LOADER}*") if holds_rows(path)]
    return sorted(found, key=lambda path: int(path.name.removeprefix(_LOADER)))
