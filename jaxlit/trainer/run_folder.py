"""Where a Trainer's runs write."""

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlit.checkpoints.files import FOLDER, Checkpoint, raise_together
from jaxlit.checkpoints.folder_lock import FolderLock
from jaxlit.distributed.exchange import agree
from jaxlit.errors import ArgumentError, CheckpointError


class RunFolder:
    """The folder of a Trainer's runs, made by the first write.

    Args:
        root: `Trainer(default_root_dir=...)`; None for a fresh `runs/<time>-<id>`.
    """

    def __init__(self, root: str | Path | None) -> None:
        self._given = root
        self.root = None if root is None else Path(os.path.abspath(root))  # whatever folder a program goes to later
        self._path, self._is_ours = self.root, False
        self._is_lent = False  # by the run whose checkpoint is evaluated

    @property
    def known(self) -> Path | None:
        """The folder, None if it has no name yet."""
        return self._path

    @property
    def path(self) -> Path:
        """The folder."""
        if self._path is None:
            self._path = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        return self._path

    def give_back(self) -> None:
        """Forget the folder of another run, which an evaluation wrote to."""
        if self._is_lent:
            self._path, self._is_lent = None, False

    def claim(
        self, files: Sequence[str], resume: Any, checkpoint: Checkpoint | None, *, several: bool, fitting: bool = True
    ) -> None:
        """Make the folder this Trainer's.

        Args:
            files: What a Trainer's loggers would leave in it.
            resume: `Trainer(resume=...)`.
            checkpoint: The checkpoint that the run begins with.
            several: Whether several processes write to it.
            fitting: Whether a folder of another run is refused. An evaluation writes to that of its checkpoint's run.

        Raises:
            ArgumentError: It holds another run, which the fit does not continue.
        """
        if self.root is None:
            if self._path is None and not fitting:
                self._path = _run_of(resume if checkpoint is None else checkpoint.path, files)
                self._is_lent = self._path is not None
            elif (
                self._path is None
                and checkpoint is not None
                and resume is not None
                and checkpoint.path.parent.name == FOLDER
            ):
                self._path = checkpoint.path.parent.parent  # a run continues in its folder
            if several:  # its name holds a time and a number of chance
                self._path = Path(agree("the run's folder", str(self.path))[0])
            return
        continues = resume == "auto" or (
            checkpoint is not None
            and Path(os.path.realpath(self.root)) in Path(os.path.realpath(checkpoint.path)).parents
        )
        for name in () if self._is_ours or continues else ("metrics.csv", FOLDER, *files):
            if _is_used(self.root / name):
                if not fitting:
                    return
                raise ArgumentError(
                    f"Trainer(default_root_dir={str(self._given)!r}) holds {name} of another run. Pass "
                    "Trainer(resume='auto') to continue it, another folder, or move that run away."
                )
        self._is_ours = True

    def hold(self) -> FolderLock | None:
        """Keep other trainings out of a folder that was given, until the lock is closed; in all processes together.

        Raises:
            CheckpointError: Another one writes to it.
        """
        lock, problem = None, None
        if self.root is None:  # a fresh one has a name that no other run has
            return None
        try:
            lock = FolderLock(self.root, of_run=True) if jax.process_index() == 0 else None
        except CheckpointError as error:
            problem = error
        raise_together("the run's folder", problem)
        return lock


def _run_of(path: Any, files: Sequence[str]) -> Path | None:
    """Return the folder of the run that a checkpoint is in; None if it has no rows, or a training holds it."""
    places = [Path(path), *Path(path).parents][:3] if isinstance(path, (str, Path)) and path != "auto" else []
    for folder in places:  # a folder of checkpoints alone may be in any folder
        if (folder / FOLDER).is_dir() and any((folder / name).is_file() for name in files):
            try:
                if jax.process_index() == 0:  # whose folder is that of all
                    FolderLock(folder, of_run=True).close()
                    FolderLock(folder / FOLDER).close()
            except CheckpointError:
                return None
            return folder
    return None


def _is_used(path: Path) -> bool:
    """Return whether a path is a file, or a folder that holds more than locks and what a crash has left."""
    try:
        return any(not inside.name.startswith(".") for inside in path.iterdir()) if path.is_dir() else path.exists()
    except OSError:
        return True
