"""Logged rows in a CSV file."""

import contextlib
import csv
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError, LoggerError

if TYPE_CHECKING:
    from jaxlit.module import TrainModule
    from jaxlit.trainer import Trainer


class CSVLogger(Callback):
    """Write every logged row to a CSV file in the run's folder, flushed at once.

    The columns are `step`, `epoch` and the metrics in the order in which they first appear.

    Args:
        filename: The file's name in `trainer.run_dir`.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=[jl.callbacks.CSVLogger("rows.csv")])
    """

    in_fast_dev_run = False

    def __init__(self, filename: str = "metrics.csv") -> None:
        if not isinstance(filename, str) or not filename or Path(filename).name != filename:
            raise ArgumentError(f"CSVLogger(filename=...) takes a file name without folders, got {filename!r}.")
        self.filename = filename
        self.path: Path | None = None
        self._columns: list[str] = []
        self._file: TextIO | None = None
        self._size = 0  # bytes of whole rows

    def on_log(self, trainer: "Trainer", values: dict[str, float], step: int) -> None:
        """Write one row.

        Raises:
            LoggerError: The file cannot be written.
        """
        if not trainer.is_global_zero:
            return
        row = {"step": step, **values}
        try:
            self._write(trainer.run_dir / self.filename, row)
        except OSError as error:
            self._drop_torn_row()
            raise LoggerError(
                f"CSVLogger cannot write {trainer.run_dir / self.filename}: {error}. Free the disk, pass another "
                "Trainer(default_root_dir=...), or Trainer(logger=False)."
            ) from error

    def _write(self, path: Path, row: dict[str, Any]) -> None:
        if path != self.path:
            self._close()
            path.parent.mkdir(parents=True, exist_ok=True)
            self.path, self._columns = path, _columns_of(path)
            if not self._columns:
                self._columns = ["step", "epoch"]
                path.write_text(",".join(self._columns) + "\n")
        new = [name for name in row if name not in self._columns]
        if new:
            self._close()
            self._widen(path, new)
        if self._file is None:
            self._file = path.open("a", newline="")
            self._size = path.stat().st_size
        csv.DictWriter(self._file, self._columns, restval="", lineterminator="\n").writerow(row)
        self._file.flush()
        self._size = self._file.tell()

    def _widen(self, path: Path, new: list[str]) -> None:
        """Rewrite the file with more columns; a crash leaves the old file or the new one."""
        with path.open(newline="") as old:
            rows = list(csv.DictReader(old))
        columns = self._columns + new
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, path)
        self._columns = columns

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Close the file; a later run of the same Trainer goes on with it."""
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _drop_torn_row(self) -> None:
        """Close after a failure, and leave whole rows only, so that a later fit can go on."""
        if self._file is not None:
            # Closing tries to write what is left once more; the caller raises the first error.
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                os.truncate(self._file.name, self._size)
            self._file = None


def _columns_of(path: Path) -> list[str]:
    """Return the columns of a file that is there, whose rows are kept; none if it is new."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        columns = next(csv.reader(file), [])
    if columns and columns[:2] != ["step", "epoch"]:
        raise LoggerError(
            f"CSVLogger appends to files whose first columns are step,epoch, and {path} has {','.join(columns)}. "
            "Pass another CSVLogger(filename=...), or move that file away."
        )
    return columns
