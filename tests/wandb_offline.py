"""What W&B's own reader finds in an offline run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_file(folder: Path) -> Path:
    """Return the newest offline run below a folder."""
    return max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)


def records(folder: Path) -> list[dict[str, Any]]:
    """Return every record of the newest run, in order."""
    return [json.loads(line) for line in _inspect(folder).splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    """Return what the newest run comes to: its description, config, summary and exit code."""
    return json.loads(_inspect(folder, "--summary"))


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of the newest run, without what W&B adds."""
    items = [record["history"]["item"] for record in records(folder) if record["type"] == "history"]
    return [{k: v for k, v in item.items() if not k.startswith("_")} for item in items]


def _inspect(folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(run_file(folder))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL, timeout=60)
    return done.stdout
