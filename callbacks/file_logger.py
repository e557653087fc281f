"""The base of loggers that write rows to a file of the run."""

import contextlib
import json
import os
from abc import ABC, abstractmethod
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

_TAIL = 4  # rows that values of their step may join: callbacks log at a step of their own in between


class FileLogger(Logger, ABC):
    """Writes rows to a file in the run's folder, each flushed at once, and drops those that a resume makes again.

    Values that are logged at the same step and epoch under other names join the row of that step, one of the last four:
    the values of a step, of a validation after it and of the epoch that it ends are one row. A text, table or histogram
    is a row by itself, and rows before it are no longer joined.

    Args:
        filename: The file's name in `trainer.run_dir`.
        on_error: What a file that cannot be written does: "warn" prints it once and tries again with the next row,
            "raise" ends training.
    """

    hyperparams_of_module = False  # checkpoints hold them

    def __init__(self, filename: str, *, on_error: Literal["warn", "raise"] = "warn") -> None:
        name, path = type(self).__name__, Path(str(filename))
        rule = "takes a file name with a suffix and without folders; the folder is Trainer(default_root_dir=...)"
        check.require(path.name == filename and path.suffix != "", "filename", filename, rule, owner=name)
        self.filename, self.on_error = filename, check.one_of("on_error", on_error, ("warn", "raise"), owner=name)
        self.path: Path | None = None
        self._file: BinaryIO | None = None
        self._size = 0  # bytes of complete rows
        self._rows = 0
        self._tail: list[dict[str, Any]] = []  # the last rows, which others of their step may join
        self._keep: dict[str, Any] | None = None  # what a checkpoint knows of the file
        self._warned = False  # of a failure
        self._place: tuple[bool, Path] | None = None  # whether this process writes, and where, in the run at hand

    @property
    def row_files(self) -> tuple[str, ...]:  # type: ignore[override]
        """The file."""
        return (self.filename,)

    @property
    def location(self) -> str | None:
        """The file."""
        return None if self.path is None else str(self.path)

    @property
    def experiment(self) -> Self:  # type: ignore[override]
        """The logger itself, which writes the file."""
        return self

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write hyperparameters to `hparams.json` next to the rows, without secrets; other than JSON values as text.

        Raises:
            LoggerError: No run has begun.
        """
        if (trainer := self._attached) is None:
            raise LoggerError(f"{type(self).__name__} has no folder yet. Log from a hook, or after the first run.")
        if not trainer.is_global_zero:
            return
        path = trainer.run_dir / "hparams.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        known = json.loads(path.read_text()) if path.exists() else {}
        values = redacted(json.loads(json.dumps({**known, **params}, default=str)))
        path.write_text(json.dumps(values, indent=1) + "\n")

    # Of each format ---------------------------------------------------------------------------------

    def _open(self, path: Path) -> None:
        """Read an existing file, or make a new one."""
        if not path.exists() or not path.stat().st_size:  # on a full disk it may have been made and not written
            path.write_text(self._head())
        rows = self._read(path)
        if path.stat().st_size and not path.read_bytes().endswith(b"\n"):
            self._rewrite(path, rows)  # the machine stopped while it wrote the last row
        self._rows = len(rows)

    @abstractmethod
    def _text(self, row: dict[str, Any]) -> str:
        """Return a row as a line of the file."""

    @abstractmethod
    def _read(self, path: Path) -> list[dict[str, Any]]:
        """Return the complete rows of the file.

        Raises:
            LoggerError: It was not written by this kind of logger.
        """

    def _head(self) -> str:
        """Return the line before the rows."""
        return ""

    def _rewrite(self, path: Path, rows: list[dict[str, Any]]) -> None:
        """Replace the file by one that has these rows; a crash leaves the old one or the new one."""
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(self._head() + "".join(map(self._text, rows)), newline="")
        os.replace(temporary, path)

    # Hooks ------------------------------------------------------------------------------------------

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Begin a run."""
        self._attached, self._warned, self._place = trainer, False, None

    def on_log(self, trainer: "Trainer", values: dict[str, Any], step: int) -> None:
        """Write one row.

        Raises:
            LoggerError: The file was not written by a logger; or, with `on_error="raise"`, it cannot be written.
        """
        if self._place is None:
            self._place = trainer.is_global_zero, trainer.run_dir / self.filename
        writes, path = self._place
        if not writes:
            return
        plain = True
        for name in values:  # Python numbers, most often: then no call is made for each
            plain = plain and type(values[name]) in (float, int)
        if not plain:
            values = {name: x.item() if getattr(x, "ndim", None) == 0 else x for name, x in values.items()}
            plain = all(isinstance(x, (int, float)) for x in values.values())
        row = {"step": step, **values}
        try:
            if path is not self.path and path != self.path:
                self._close()
                path.parent.mkdir(parents=True, exist_ok=True)
                self._open(path)
                self.path, self._tail = path, []
            old, new = self._joined(row) if plain else ([], [row])
            self._append(path, old, new)
            self._tail = [*self._tail[: len(self._tail) - len(old)], *new][-_TAIL:] if plain else []
            self._rows += len(new) - len(old)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._close()
            problem = f"{type(self).__name__} cannot write {path}: {error}."
            if self.on_error == "raise":
                raise LoggerError(
                    f"{problem} Free the disk, pass another Trainer(default_root_dir=...), or Trainer(logger=False)."
                ) from error
            if not self._warned:
                self._warned = True
                say(f"{problem} Training continues; rows are missing until it can.")

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows the file has, and the last ones, which others may join later."""
        return {"rows": self._rows, "tail": self._tail}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what the file had; `on_load_checkpoint` drops the rows after it."""
        self._keep = {**state_dict, "rows": int(state_dict["rows"])}

    def on_load_checkpoint(self, trainer: "Trainer", module: "TrainModule", checkpoint: dict[str, Any]) -> None:
        """Drop the rows that training will make again."""
        # A checkpoint before a step that was not finite counts rows of later steps, which were undone.
        self._drop(trainer, checkpoint["global_step"], undone="not_finite" in checkpoint)

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Drop the rows of a training that left no checkpoint and starts again."""
        if trainer.resume == "auto" and not trainer.global_step and self.path is None:
            self._drop(trainer, 0)

    def finalize(self, status: str) -> None:
        """Close the file. A later run of the same Trainer appends new rows."""
        self._close()
        self._tail = []

    def _drop(self, trainer: "Trainer", step: int, *, undone: bool = False) -> None:
        """Drop rows from a step on, and those that a checkpoint does not count."""
        path, kept, self._keep = trainer.run_dir / self.filename, self._keep, None
        if not trainer.is_global_zero or not path.exists():
            return
        self._close()
        try:
            self._open(path)
            rows, tail = self._read(path), (kept or {}).get("tail", [])
            if kept is not None:
                rows = [*rows[: kept["rows"] - len(tail)], *tail]
            if kept is None or undone:  # only the step is known
                rows = [row for row in rows if str(row.get("step", "")).isdigit() and int(row["step"]) < step]
            self._rewrite(path, rows)
        except OSError as error:  # rows that come twice are worse than none: nothing has been trained yet
            raise LoggerError(
                f"{type(self).__name__} cannot remove the rows that training writes again from {path}: {error}. Free "
                "the disk, or pass Trainer(logger=False)."
            ) from error
        self.path, self._rows, self._tail = path, len(rows), tail if rows[len(rows) - len(tail) :] == tail else []

    def _joined(self, row: dict[str, Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the rows at the end of the file that a new row replaces, if it joins one, and what replaces them."""
        step = row["step"]
        if step not in [old["step"] for old in self._tail]:
            return [], [row]
        place = {name: row[name] for name in ("step", "epoch") if name in row}
        for k in reversed(range(len(self._tail))):
            if {name: x for name, x in self._tail[k].items() if name in row} == place:
                return self._tail[k:], [{**self._tail[k], **row}, *self._tail[k + 1 :]]
        return [], [row]

    def _append(self, path: Path, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> None:
        """Write rows over the old ones at the end of the file, in one call: a process killed at any moment loses none.

        Raises:
            OSError: They cannot be written; the file has the old ones, or else is read again with the next row.
        """
        if self._file is None:
            self._file = path.open("r+b", buffering=0)
            self._size = self._file.seek(0, os.SEEK_END)
        before, after = "".join(map(self._text, old)).encode(), "".join(map(self._text, new)).encode()
        start = self._size - len(before) if old else self._file.seek(0, os.SEEK_END)
        try:
            self._put(start, after)
        except OSError:
            try:
                self._put(start, before)  # a full disk has the place of the old ones still
            except OSError:
                self.path = None
                self._file.truncate(start)
            raise
        self._size = start + len(after)

    def _put(self, start: int, data: bytes) -> None:
        assert self._file is not None
        self._file.seek(start)
        while data:
            data = data[self._file.write(data) :]
        self._file.truncate()

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()
