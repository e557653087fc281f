"""Logged rows in a CSV file."""

import csv
import io
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from jaxlit.callbacks.file_logger import FileLogger
from jaxlit.errors import LoggerError


class CSVLogger(FileLogger):
    """Write every logged row to a CSV file in the run's folder, flushed at once.

    The columns are `step`, `epoch` and the metrics in the order in which they first appear. Numbers have six
    significant digits, integers all of their digits. Values of one step and epoch are one row.

    Args:
        filename: The file's name in `trainer.run_dir`.
        on_error: What a file that cannot be written does: "warn" prints it once and tries again with the next row,
            "raise" ends training.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=[jl.callbacks.CSVLogger("rows.csv")])
    """

    role = "csv_logger"

    def __init__(self, filename: str = "metrics.csv", *, on_error: Literal["warn", "raise"] = "warn") -> None:
        super().__init__(filename, on_error=on_error)
        self._columns: list[str] = []

    def _open(self, path: Path) -> None:
        self._columns = ["step", "epoch"]
        super()._open(path)

    def _append(self, path: Path, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
        known = True
        for row in new:
            for name in row:
                known = known and name in self._columns
        if known:
            super()._append(path, old, new)
            return
        names = [name for name in dict.fromkeys(chain(*new)) if name not in self._columns]
        self._close()
        rows, before = self._read(path), self._columns
        self._columns = before + names
        try:
            self._rewrite(path, [*rows[: len(rows) - len(old)], *new])
        except OSError:
            self._columns = before
            raise

    def _text(self, row: dict[str, Any]) -> str:
        cells = [row.get(name) for name in self._columns]
        # Whole numbers with all their digits, others with six; no call for each, as a row may come with every step.
        return _line(
            [(int(x) if x % 1 == 0 and -(2**53) < x < 2**53 else f"{x:.6g}") if type(x) is float else x for x in cells]
        )

    def _read(self, path: Path) -> list[dict[str, Any]]:
        complete, _, torn = path.read_text().rpartition("\n")
        reader = csv.DictReader(io.StringIO(complete or torn))
        self._columns = list(reader.fieldnames or ())
        if self._columns[:2] != ["step", "epoch"]:
            raise LoggerError(
                f"CSVLogger appends to files whose first columns are step,epoch, and {path} has "
                f"{','.join(self._columns)}. Pass another CSVLogger(filename=...), or move that file away."
            )
        return list(reader)

    def _head(self) -> str:
        return _line(self._columns)


def _line(cells: list[Any]) -> str:
    csv.writer(line := io.StringIO(), lineterminator="\n").writerow(cells)
    return line.getvalue()
