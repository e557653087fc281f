"""The ids of W&B's runs, kept on disk for a training that leaves no checkpoint."""

import json
from pathlib import Path
from typing import Any

_IDS = "wandb_run_ids.json"  # in the folder of a run that may be resumed: the id of each project's run


def read_id(folder: Path, key: str) -> str | None:
    """Return the id that a training which left no checkpoint has noted; None if there is none that can be read."""
    found = _read(folder / _IDS).get(key)
    return found if isinstance(found, str) and found else None


def write_id(folder: Path, key: str, id: str) -> None:
    """Note a run's id.

    Args:
        folder: The run's folder, which is made.
        key: What tells the runs of several loggers apart.
        id: The id.

    Raises:
        OSError: It cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _IDS).write_text(json.dumps({**_read(folder / _IDS), key: id}))


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
