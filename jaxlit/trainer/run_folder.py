"""Where a Trainer's runs write."""

import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlit import checks as check
from jaxlit.checkpoints.files import FOLDER, Checkpoint
from jaxlit.checkpoints.folder_lock import FolderLock
from jaxlit.checkpoints.remote import local, names_in, staging
from jaxlit.distributed.exchange import computers
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError, CheckpointError, in_all


class RunFolder:
    """The folder of a Trainer's runs, made by the first write.

    Args:
        root: `Trainer(default_root_dir=...)`; None for a fresh `runs/<time>-<id>`.
    """

    def __init__(self, root: str | Path | None) -> None:
        self._given, self.url = root, str(root) if check.is_url(root) else None
        place = root if self.url is None else staging(self.url)
        self.root = None if place is None else Path(os.path.abspath(place))  # whatever folder a program goes to later
        self.known, self._is_ours = self.root, False

    @property
    def path(self) -> Path:
        """The folder; a fresh one gets its name when it is asked for."""
        if self.known is None:
            self.known = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        return self.known

    def fetch(self) -> None:
        """Fetch the newest checkpoint of a run in a bucket, unless this machine has it; in all processes together.

        Raises:
            ArgumentError: The processes are on several computers.
            CheckpointError: The run cannot be read.
        """
        self._check_computers()
        if self.url is not None:
            local(self.url, "run")

    def claim(self, files: Sequence[str], resume: Any, checkpoint: Checkpoint | None, *, fitting: bool) -> None:
        """Make the folder this Trainer's.

        Args:
            files: What a Trainer's loggers would leave in it.
            resume: `Trainer(resume=...)`.
            checkpoint: The checkpoint that the run begins with.
            fitting: Whether the run is a fit, which refuses a folder of another run.

        Raises:
            ArgumentError: It is a file, or holds another run, which the fit does not continue.
        """
        path = None if checkpoint is None else checkpoint.path
        if self.root is None:
            if self.known is None and fitting and resume is not None and path and path.parent.name == FOLDER:
                self.known = path.parent.parent  # a run continues in its folder
            if (processes := team()).size > 1:  # its name holds a time and a random number
                self.known = Path(processes.agree("the run's folder", str(self.path))[0])
            return
        check.require(not self.root.is_file(), "default_root_dir", str(self._given), "takes a folder", owner="Trainer")
        inside = path is not None and Path(os.path.realpath(self.root)) in Path(os.path.realpath(path)).parents
        continues = resume == "auto" or inside
        self._check_computers()
        there = [] if self.url is None or continues or self._is_ours else names_in(self.url)
        used = [name for name in ("metrics.csv", FOLDER, *files) if name in there or _is_used(self.root / name)]
        if used and fitting and not (self._is_ours or continues):
            where = "" if self.url is None or used[0] in there else f", in {self.root},"
            raise ArgumentError(
                f"Trainer(default_root_dir={str(self._given)!r}){where} holds {used[0]} of another run. Pass "
                "Trainer(resume='auto') to continue it, another folder, or move that run away."
            )
        self._is_ours = self._is_ours or fitting or continues or not used

    def _check_computers(self) -> None:
        if self.url is not None and len({*map(str, computers("the run's folder"))}) > 1:
            error = ArgumentError(
                f"Trainer(default_root_dir={self.url!r}) writes to a folder of one computer, which is copied, and the "
                "processes are on several. Pass a folder on a disk that they share, and "
                f"callbacks=jl.callbacks.Mirror({self.url!r})."
            )
            raise in_all(error)

    def hold(self) -> FolderLock | None:
        """Keep other trainings out of a folder that was given, until the lock is closed; in all processes together.

        Raises:
            CheckpointError: Another one writes to it.
        """
        if self.root is None:  # a fresh one has a name that no other run has
            return None
        lock, problem = None, None
        try:
            lock = FolderLock(self.root, of_run=True) if jax.process_index() == 0 else None
        except CheckpointError as error:
            problem = error
        team().same_error("the run's folder", problem)
        return lock


def _is_used(path: Path) -> bool:
    """Return whether a path is a file, or a folder that holds more than locks and what a crash has left."""
    return any(not inside.name.startswith(".") for inside in path.iterdir()) if path.is_dir() else path.exists()
