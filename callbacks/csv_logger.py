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
        self._rows = 0
        self._keep: tuple[int, list[str]] | None = None  # rows and columns that a checkpoint knows

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
            with contextlib.suppress(FileNotFoundError), path.open(newline="") as file:
                self._rows = max(sum(1 for _ in csv.reader(file)) - 1, 0)
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
        self._rows += 1

    def _widen(self, path: Path, new: list[str]) -> None:
        """Rewrite the file with more columns; a crash leaves the old file or the new one."""
        with path.open(newline="") as old:
            rows = list(csv.DictReader(old))
        self._rewrite(path, self._columns + new, rows)

    def _rewrite(self, path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, path)
        self._columns, self._rows = columns, len(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows and which columns the file has."""
        return {"rows": self._rows, "columns": self._columns}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what the file had; `on_load_checkpoint` drops what has come since."""
        self._keep = int(state_dict["rows"]), [str(name) for name in state_dict["columns"]]

    def on_load_checkpoint(self, trainer: "Trainer", module: "TrainModule", checkpoint: dict[str, Any]) -> None:
        """Drop the rows that training will make again."""
        self._drop(trainer, checkpoint["global_step"])

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Drop the rows of a training that left no checkpoint, and begins anew."""
        if trainer.resume == "auto" and not trainer.global_step and self.path is None:
            self._drop(trainer, 0)

    def _drop(self, trainer: "Trainer", step: int) -> None:
        """Drop rows from a step on, and those that a checkpoint does not know."""
        path, kept, self._keep = trainer.run_dir / self.filename, self._keep, None
        if not trainer.is_global_zero or not path.exists():
            return
        self._close()
        count, columns = kept or (None, _columns_of(path))
        known = count is not None  # else all that tells is the step
        with path.open(newline="") as old:
            rows = list(csv.DictReader(old))[:count]
        self.path = path
        self._rewrite(
            path,
            columns or ["step", "epoch"],
            [row for row in rows if known or (row["step"].isdigit() and int(row["step"]) < step)],
        )

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
