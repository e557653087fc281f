"""Logged rows as lines of JSON."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxlit.callbacks.file_logger import FileLogger
from jaxlit.errors import LoggerError
from jaxlit.reporting.histogram import count


class JSONLLogger(FileLogger):
    """Write every logged row to a file as a JSON object on a line of its own, flushed at once.

    A row holds `step`, `epoch` and all metrics that were logged there, no others, with every digit; what is not finite
    is the text "NaN", "Infinity" or "-Infinity", since JSON has no such numbers. Texts, tables and histograms have rows
    of their own.

    Args:
        filename: The file's name in `trainer.run_dir`.
        on_error: What a file that cannot be written does: "warn" says so once and tries again with the next row,
            "raise" ends training.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=[jl.callbacks.JSONLLogger()])
    """

    role = "jsonl_logger"

    def __init__(self, filename: str = "metrics.jsonl", *, on_error: str = "warn") -> None:
        super().__init__(filename, on_error=on_error)

    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        """Write a text."""
        self._log(key, str(text), step)

    def log_table(
        self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], *, step: int | None = None
    ) -> None:
        """Write a table."""
        rows = [list(row) for row in data]
        self._log(key, {"columns": list(columns), "data": rows}, step)

    def log_histogram(self, key: str, values: Any, *, bins: int = 64, step: int | None = None) -> None:
        """Write the counts of a histogram and the edges of its bins."""
        counts, edges = count(values, bins)
        self._log(key, {"counts": counts.tolist(), "edges": edges.tolist()}, step)

    def _log(self, key: str, value: Any, step: int | None) -> None:
        if (trainer := self._trainer) is None:
            raise LoggerError("JSONLLogger has no file yet. Log from a hook, or after the first run of its Trainer.")
        at = max(trainer.global_step - 1, 0) if step is None else step
        self.on_log(trainer, {"epoch": trainer.current_epoch, key: value}, at)

    def _open(self, path: Path) -> None:
        path.touch()
        rows = self._read(path)
        if not path.read_text().endswith("\n") and path.stat().st_size:
            self._rewrite(path, rows)  # the machine died while it wrote the last one
        self._rows = len(rows)

    def _text(self, row: dict[str, Any]) -> str:
        return json.dumps(_plain(row), allow_nan=False) + "\n"

    def _read(self, path: Path) -> list[dict[str, Any]]:
        whole, _, torn = path.read_text().rpartition("\n")
        try:
            rows: list[Any] = [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            rows = [None]
        ours = torn[:9] == '{"step": '[: len(torn)]  # as each row begins
        if not (ours and all(isinstance(row, dict) and "step" in row for row in rows)):
            raise LoggerError(
                f"JSONLLogger appends to files of rows that have a step, and {path} holds something else. Pass another "
                "JSONLLogger(filename=...), or move that file away."
            )
        return rows

    def _rewrite(self, path: Path, rows: list[dict[str, Any]]) -> None:
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text("".join(map(self._text, rows)))
        os.replace(temporary, path)


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {str(key): _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    if hasattr(x, "tolist"):  # numpy's and jax's
        return _plain(np.asarray(x).tolist())
    if isinstance(x, float) and not math.isfinite(x):
        return "NaN" if math.isnan(x) else "Infinity" if x > 0 else "-Infinity"
    return x if x is None or isinstance(x, (bool, int, float, str)) else str(x)
