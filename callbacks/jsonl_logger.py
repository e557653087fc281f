"""Logged rows as lines of JSON."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jaxlit.callbacks.file_logger import FileLogger
from jaxlit.errors import LoggerError
from jaxlit.reporting.histogram import count
from jaxlit.to_json import to_json


class JSONLLogger(FileLogger):
    """Write every logged row to a file as a JSON object on one line, flushed at once.

    A row contains `step`, `epoch` and the metrics that were logged there, with every digit; a number that is not finite
    is the text "NaN", "Infinity" or "-Infinity", since JSON has no such numbers. Texts, tables and histograms are
    separate rows.

    Args:
        filename: The file's name in `trainer.run_dir`.
        on_error: What a file that cannot be written does: "warn" prints it once and tries again with the next row,
            "raise" ends training.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=[jl.callbacks.JSONLLogger()])
    """

    role = "jsonl_logger"

    def __init__(self, filename: str = "metrics.jsonl", *, on_error: Literal["warn", "raise"] = "warn") -> None:
        super().__init__(filename, on_error=on_error)

    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        """Write a text."""
        self.log_metrics({key: str(text)}, step)  # type: ignore[dict-item]

    def log_table(
        self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], *, step: int | None = None
    ) -> None:
        """Write a table."""
        table = {"columns": list(columns), "data": [list(row) for row in data]}
        self.log_metrics({key: table}, step)  # type: ignore[dict-item]

    def log_histogram(self, key: str, values: Any, *, bins: int = 64, step: int | None = None) -> None:
        """Write the counts of a histogram and the edges of its bins."""
        counts, edges = count(values, bins)
        histogram = {"counts": counts.tolist(), "edges": edges.tolist()}
        self.log_metrics({key: histogram}, step)  # type: ignore[dict-item]

    def _text(self, row: dict[str, Any]) -> str:
        return json.dumps(to_json(row, lenient=True), allow_nan=False) + "\n"

    def _read(self, path: Path) -> list[dict[str, Any]]:
        complete, _, torn = path.read_text().rpartition("\n")
        try:
            rows: list[Any] = [json.loads(line) for line in complete.splitlines()]
        except ValueError:
            rows = [None]
        ours = torn[:9] == '{"step": '[: len(torn)]  # as each row begins
        if not (ours and all(isinstance(row, dict) and "step" in row for row in rows)):
            raise LoggerError(
                f"JSONLLogger appends to files of rows that have a step, and {path} holds something else. Pass another "
                "JSONLLogger(filename=...), or move that file away."
            )
        return rows
