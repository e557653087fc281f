"""Where a WandbLogger's run is: one that is open already, or a folder that can be written."""

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlit.callbacks.file_logger import FileLogger
from jaxlit.errors import LoggerError
from jaxlit.reporting.terminal import say, short_path

if TYPE_CHECKING:
    import wandb

    from jaxlit.trainer import Trainer

_ROOM = 2**17  # bytes that a run needs at its start


def open_already(wanted: str | None) -> "wandb.Run | None":
    """Return the run that the program has opened itself, as the agents of sweeps ask for, unless it is another.

    Args:
        wanted: The id of the run that was asked for, None for any.
    """
    run = getattr(sys.modules.get("wandb"), "run", None)
    if run is None or wanted not in (None, run.id):
        return None
    say(f"W&B {short_path(Path(run.dir).parent) if run.offline else run.url} (the run that is open)")
    return run


def check_room(folder: Path) -> None:
    """Make the folder of a run, and see whether it can be written.

    Raises:
        OSError: It cannot.
        LoggerError: It never can.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM))  # on a full disk the SDK would print a traceback for every row
    except (NotADirectoryError, FileExistsError, PermissionError) as error:
        raise cannot_write(folder, error) from error


def cannot_write(folder: Path, error: OSError) -> LoggerError:
    """Return what is said of a folder that cannot be written."""
    return LoggerError(f"WandbLogger cannot write to {folder}: {error}. Pass another WandbLogger(save_dir=...).")


def rows_beside(trainer: "Trainer") -> str:
    """Return the files that have the rows as well; "" if there are none."""
    names = [logger.filename for logger in trainer.loggers if isinstance(logger, FileLogger)]
    return f"{' and '.join(names)} in {short_path(Path(trainer.run_dir))}" if names else ""
