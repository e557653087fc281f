"""`CSVLogger`, which writes logged rows to a CSV file."""

import contextlib
import csv
import io
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self

from jaxlit import checks as check
from jaxlit.callbacks.logger import Logger
from jaxlit.errors import LoggerError
from jaxlit.reporting.secrets import redacted
from jaxlit.reporting.terminal import say

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_TAIL = 4  # rows that values of their step may join: callbacks log at other steps in between

_logger = logging.getLogger("jaxlit")


class CSVLogger(Logger):
    """Write every logged row to a CSV file in the run's folder, flushed at once; a resume drops the rows it repeats.

    The columns are `step`, `epoch` and the metrics in the order in which they first appear. Numbers have six
    significant digits, integers all of their digits. Values that are logged at the same step and epoch under other
    names join the row of that step, one of the last four: the values of a step, of a validation after it and of the
    epoch that it ends are one row.

    Args:
        filename: The file's name in `trainer.run_dir`.
        on_error: If the file cannot be written, "warn" prints that once and tries again with the next row, "raise"
            ends training.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=[jl.callbacks.CSVLogger("rows.csv")])
    """

    role = "csv_logger"
    hyperparams_of_module = False  # checkpoints contain them

    def __init__(self, filename: str = "metrics.csv", *, on_error: Literal["warn", "raise"] = "warn") -> None:
        path = Path(str(filename))
        rule = "takes a file name with a suffix and without folders; the folder is Trainer(default_root_dir=...)"
        check.require(path.name == filename and path.suffix != "", "filename", filename, rule, owner="CSVLogger")
        self.filename, self.row_files = filename, (filename,)
        self.on_error = check.one_of("on_error", on_error, ("warn", "raise"), owner="CSVLogger")
        self.path: Path | None = None
        self._target: Path | None = None  # the file of the current run; None in a process that writes none
        self._file: BinaryIO | None = None
        self._columns: list[str] = []
        self._num_rows = 0
        self._tail: list[dict[str, Any]] = []  # the last rows of the file
        self._restored: dict[str, Any] | None = None  # the state of a checkpoint, until rows are dropped
        self._has_warned = False

    @property
    def location(self) -> str | None:
        """The file."""
        return None if self.path is None else str(self.path)

    @property
    def experiment(self) -> Self:  # type: ignore[override]
        """The logger itself, which writes the file."""
        return self

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write hyperparameters to `hparams.json` next to the rows, without secrets; other than JSON values as text."""
        if (trainer := self._attached) is None:
            raise self._no_run()
        if not trainer.is_global_zero:
            return
        path = trainer.run_dir / "hparams.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if path.exists() else {}
        values = redacted(json.loads(json.dumps({**known, **params}, default=str)))
        path.write_text(json.dumps(values, indent=1) + "\n")

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Begin a run."""
        self._target = trainer.run_dir / self.filename if trainer.is_global_zero else None
        self._has_warned = False

    def on_load_checkpoint(self, trainer: "Trainer", module: "TrainModule", checkpoint: dict[str, Any]) -> None:
        """Drop the rows that training will repeat."""
        # A checkpoint before a step that was not finite counts rows of later steps, which were undone.
        position = checkpoint["position"]
        begins = position["epoch"] + (position["batch_idx"] > 0 or position["over"])
        self._drop(checkpoint["global_step"], begins, undone="not_finite" in checkpoint)

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Drop the rows of a training that left no checkpoint and starts again."""
        if self._target is not None and (old := self._target.with_name("metrics.jsonl")).exists():
            _logger.warning("%s, of an earlier jaxlit, is not continued: new rows are in %s only.", old, self.filename)
        if trainer.resume == "auto" and not trainer.global_step and self.path is None:
            self._drop(0, 0)

    def on_log(self, trainer: "Trainer", values: dict[str, Any], step: int) -> None:
        """Write one row; refuse a file of another program, and with `on_error="raise"` one that cannot be written."""
        if (path := self._target) is None:
            return
        row: dict[str, Any] = {"step": step}
        for name, x in values.items():
            if type(x) not in (float, int) and x is not None:  # most often they are Python numbers
                x = x.item() if getattr(x, "ndim", None) == 0 else str(x)
            row[name.replace("\r", "\\r")] = x  # the csv module takes a carriage return for the end of a line
        try:
            if path != self.path:
                self._open(path)
            self._add(path, row)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._close()
            problem = f"CSVLogger cannot write {path}: {error}."
            if self.on_error == "raise":
                raise LoggerError(
                    f"{problem} Free the disk, pass another Trainer(default_root_dir=...), or Trainer(logger=False)."
                ) from error
            if not self._has_warned:
                self._has_warned = True
                say(f"{problem} Training continues; rows are missing until it can.")

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows in the file, and the last rows, which later values may join."""
        return {"rows": self._num_rows, "tail": self._tail}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Remember which rows the file had; `on_load_checkpoint` drops the rows after them."""
        self._restored = state_dict

    def finalize(self, status: str) -> None:
        """Close the file. A later run of the same Trainer appends new rows."""
        self._close()
        self._tail = []

    def _open(self, path: Path) -> None:
        """Begin to append to a file, a new one if there is none."""
        self._close()
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = self._read(path)
        if not path.exists() or not path.read_bytes().endswith(b"\n"):  # new, or a machine stopped in its last row
            self._rewrite(path, self._columns, rows)
        self.path, self._num_rows, self._tail = path, len(rows), []

    def _read(self, path: Path) -> list[dict[str, Any]]:
        """Return the complete rows of the file, and set its columns; refuse a file of another program."""
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        complete, _, torn = text.rpartition("\n")
        reader = csv.DictReader(io.StringIO(complete or torn or "step,epoch"))
        self._columns = list(reader.fieldnames or ())
        if self._columns[:2] != ["step", "epoch"]:
            raise LoggerError(
                f"CSVLogger appends to files whose first columns are step,epoch, and {path} has "
                f"{','.join(self._columns)}. Pass another CSVLogger(filename=...), or move that file away."
            )
        return list(reader)

    def _rewrite(self, path: Path, columns: list[str], rows: list[dict[str, Any]]) -> None:
        """Replace the file by one with these rows; a crash leaves the old file or the new one."""
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_bytes(_lines(columns, [{name: name for name in columns}, *rows]))
        os.replace(temporary, path)
        self._columns = columns

    def _drop(self, step: int, epoch: int, *, undone: bool = False) -> None:
        """Drop the rows that a checkpoint does not count; without a count, or if `undone`, those from a step on."""
        path, restored, self._restored = self._target, self._restored, None
        before = lambda cell, limit: str(cell).isdigit() and int(cell) < limit  # noqa: E731
        if path is None or not path.exists():
            return
        self._close()
        try:
            rows, tail, later = self._read(path), [], []
            if restored is not None:
                tail, later = restored["tail"], rows[restored["rows"] :]
                rows = [*rows[: restored["rows"] - len(tail)], *tail]
            if restored is None or undone:
                rows = [row for row in rows if before(row["step"], step)]
            # Rows of a `test` after the fit stay: of its last step, in the epoch that comes next.
            later = [row for row in later if before(row["step"], step) and not before(row["epoch"], epoch)]
            rows, tail = [*rows, *later], [*tail, *later][-_TAIL:]
            self._rewrite(path, self._columns, rows)
        except OSError as error:  # better no training than rows that are repeated
            raise LoggerError(
                f"CSVLogger cannot remove the rows that training writes again from {path}: {error}. Free the disk, or "
                "pass Trainer(logger=False)."
            ) from error
        self.path, self._num_rows = path, len(rows)
        self._tail = tail if rows[len(rows) - len(tail) :] == tail else []

    def _add(self, path: Path, row: dict[str, Any]) -> None:
        """Append a row, or join it to the last row of the tail with its step and epoch and other names."""
        index = len(self._tail)
        for i, other in enumerate(self._tail):
            has_same_step = other["step"] == row["step"] and other.get("epoch") == row.get("epoch")
            if has_same_step and other.keys() & row.keys() <= {"step", "epoch"}:
                index = i
        old, new = self._tail[index:], [row]
        if old:
            new = [{**old[0], **row}, *old[1:]]
        if row.keys() <= set(self._columns):
            self._replace_end(path, _lines(self._columns, old), _lines(self._columns, new))
        else:
            self._close()
            rows = self._read(path)
            columns = list(dict.fromkeys([*self._columns, *row]))
            self._rewrite(path, columns, [*rows[: len(rows) - len(old)], *new])
        self._tail = [*self._tail[:index], *new][-_TAIL:]
        self._num_rows += len(new) - len(old)

    def _replace_end(self, path: Path, old: bytes, new: bytes) -> None:
        """Write lines over the old ones at the end, in one call: a process killed at any moment loses none."""
        if self._file is None:
            self._file = path.open("r+b", buffering=0)
        start = self._file.seek(0, os.SEEK_END) - len(old)
        try:
            _write(self._file, start, new)
        except OSError:
            try:
                _write(self._file, start, old)  # a full disk still has the room of the old lines
            except OSError:
                self.path = None
                self._file.truncate(start)
            raise

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _write(file: BinaryIO, start: int, data: bytes) -> None:
    file.seek(start)
    while data:
        data = data[file.write(data) :]
    file.truncate()


def _lines(columns: list[str], rows: list[dict[str, Any]]) -> bytes:
    """Return the lines of rows: integers have all digits, other numbers six."""
    writer = csv.writer(text := io.StringIO(), lineterminator="\n")
    for row in rows:
        cells = [row.get(name) for name in columns]
        writer.writerow(
            [(int(x) if x % 1 == 0 and -(2**53) < x < 2**53 else f"{x:.6g}") if type(x) is float else x for x in cells]
        )
    return text.getvalue().encode()
