"""`PredictionWriter`, which writes predictions to files while they are computed."""

import functools
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import numpy as np

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.distributed.team import fetch
from jaxlit.errors import ArgumentError, DataError
from jaxlit.texts import named_leaves, shown

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_FILE_BYTES = 2**26  # of the rows of a file, which are in memory


class PredictionWriter(Callback):
    """Write the outputs of `predict_step` to files while `trainer.predict` runs, in the order of the data.

    Files of 64 MiB of rows are named by loader and number, `predictions_0_00000.npz`. Each has an array, or with
    "parquet" a column, for each leaf of the outputs, named by its path: `mean`, `sides.up`, or `predictions` if the
    outputs are one array; floats of 8 and 16 bits are written as float32. A single process also writes
    `Trainer(host_keys=...)`, if the outputs are a dict. The folder appears complete, in place of earlier predictions.

    Args:
        output_dir: The folder.
        format: "npz", or "parquet", which needs `pip install pyarrow`.

    Raises:
        ArgumentError: An argument is invalid, or the folder has other files.
        DataError: The outputs are not arrays with one row for each row of the batch.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(callbacks=jl.callbacks.PredictionWriter("predictions"), logger=False)
    """

    in_fast_dev_run = False

    def __init__(self, output_dir: str | Path, *, format: Literal["npz", "parquet"] = "npz") -> None:
        self.output_dir = Path(check.on_disk("output_dir", output_dir, owner="PredictionWriter"))
        self.format = check.one_of("format", format, ("npz", "parquet"), owner="PredictionWriter")
        if format == "parquet":
            check.import_package("pyarrow.parquet", owner="PredictionWriter", install="pyarrow", kind=ArgumentError)
        self._folder = self.output_dir.resolve()  # a link stays, and its target is replaced
        self.exclusive = "folder, the output_dir", self._folder
        self._begin(None)

    def _begin(self, partial: Path | None) -> None:
        self._partial = partial  # the folder that is written to, in the first process
        self._loader = 0  # the index of the rows' loader
        self._rows: list[dict[str, np.ndarray]] = []  # of the next file
        self._kinds: dict[int, dict[str, Any]] = {}  # by loader, the dtype (texts: kind) and row shape of leaves
        self._pending: list[tuple[int, Any]] = []  # a loader's index, and outputs that are not read yet

    @staticmethod
    def load(output_dir: str | Path, dataloader_idx: int = 0) -> dict[str, np.ndarray]:
        """Return the rows of a loader from .npz files; pandas and pyarrow read a folder of Parquet files."""
        if not (paths := sorted(Path(output_dir).glob(f"predictions_{dataloader_idx}_*.npz"))):
            raise ArgumentError(f"PredictionWriter.load({str(output_dir)!r}, {dataloader_idx}) finds no such files.")
        return _concatenated([dict(np.load(path)) for path in paths])

    def on_predict_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Refuse to replace other files, and create the folder that is written to."""
        if not trainer.is_global_zero:
            return
        name = "predictions_[0-9]*_[0-9][0-9][0-9][0-9][0-9].*"
        others = [c._folder for c in trainer.callbacks if isinstance(c, PredictionWriter) and c is not self]
        inside = any(path.is_relative_to(self._folder) for path in [Path.cwd(), *others])  # it would be deleted
        if inside or (self._folder.exists() and not all(path.match(name) for path in self._folder.iterdir())):
            rule = "would replace what is there, and it holds no predictions. Name another folder, or delete it."
            raise ArgumentError(f"PredictionWriter(output_dir={str(self.output_dir)!r}) {rule}")
        partial = self._folder.with_name(f".{self._folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
        partial.mkdir(parents=True)
        self._begin(partial)

    def on_predict_batch_end(
        self, trainer: "Trainer", module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Read the outputs of the batch before, which are ready by now, and store these."""
        if trainer.host_keys and isinstance(outputs, dict):
            outputs = {**{str(key): np.asarray(batch[key]) for key in trainer.host_keys}, **outputs}
        self._read()
        self._pending = [(dataloader_idx, outputs)]

    def on_predict_epoch_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Write the rest, and rename the folder."""
        self._read()
        if (partial := self._partial) is not None and not trainer.interrupted:
            self._write(partial)
            self._partial = None  # complete: it stays if it cannot be renamed
            shutil.rmtree(self._folder, ignore_errors=True)
            partial.rename(self._folder)

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Delete the files of an interrupted prediction."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)
        self._begin(None)

    def _read(self) -> None:
        """Fetch pending outputs to the host, in all processes, and write full files in the first."""
        for loader, outputs in self._pending:
            rows = {name or "predictions": np.asarray(x) for name, x in named_leaves(jax.tree.map(fetch, outputs))}
            if (partial := self._partial) is None:
                continue
            narrow = {name for name, x in rows.items() if x.dtype.kind == "V" or x.dtype == np.float16}
            rows |= {name: rows[name].astype(np.float32) for name in narrow}
            counts = {x.shape[:1] for x in rows.values()}
            kinds = {name: (x.dtype.kind if x.dtype.kind in "US" else x.dtype, x.shape[1:]) for name, x in rows.items()}
            if len(counts) != 1 or () in counts or kinds != self._kinds.setdefault(loader, kinds):
                raise DataError(
                    "PredictionWriter: predict_step must return arrays with one row for each row of the batch, of the "
                    f"same shapes and dtypes in all batches, got {shown(rows)}. Pad them, or leave out what has none."
                )
            if loader != self._loader or sum(x.nbytes for x in rows.values()) * (len(self._rows) + 1) > _FILE_BYTES:
                self._write(partial)
            self._loader = loader
            self._rows.append(rows)

    def _write(self, partial: Path) -> None:
        if not self._rows:
            return
        rows, self._rows = _concatenated(self._rows), []
        path = partial / f"predictions_{self._loader}_{len(list(partial.iterdir())):05}.{self.format}"
        if self.format == "npz":
            with zipfile.ZipFile(path, "w") as archive:
                for name, x in rows.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, x, allow_pickle=False)
        else:
            from pyarrow import FixedSizeListArray, array, parquet, table

            nest = FixedSizeListArray.from_arrays  # from the last dim on
            columns = {name: functools.reduce(nest, x.shape[:0:-1], array(x.ravel())) for name, x in rows.items()}
            parquet.write_table(table(columns), path)


def _concatenated(batches: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([rows[name] for rows in batches]) for name in batches[0]}
