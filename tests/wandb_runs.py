"""Helpers of tests whose processes log to a W&B server on this computer."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.processes import Ended, launch
from wandb_backend import Backend, ReceivedRun

STEP = "trainer/global_step"
QUIET: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1}


def start(work: Callable[[], None], folder: Path, backend: Backend, count: int = 1) -> list[Ended]:
    """Run processes that log to a server."""
    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            patch.delenv(name)
        for name, value in backend.env(folder).items():
            patch.setenv(name, value)
        return launch(work, folder, count=count, devices=1 if count == 1 else 4, join=count > 1)


def rows_of(run: ReceivedRun) -> list[dict[str, Any]]:
    """Return the rows of numbers, without what W&B adds."""
    rows = [{k: v for k, v in row.items() if not k.startswith("_")} for row in run.history]
    return [{"step": row.pop(STEP), **row} for row in rows if "epoch" in row]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that the training wrote to its own file."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
