"""Where a Trainer's runs write, and which checkpoint a run begins with."""

import os
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import FOLDER, Checkpoint, FolderLock, best_of, locate, newest, read
from jaxlit.checkpoints.module_state import load_variables
from jaxlit.checkpoints.remote import local, names_in, staging
from jaxlit.core.module import TrainModule, log_taken
from jaxlit.distributed.team import computers, team
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError, raised_everywhere
from jaxlit.reporting.terminal import say, short_path
from jaxlit.texts import shown
from jaxlit.weights.loading import load_weights
from jaxlit.weights.sources import is_weights_file


class RunFolder:
    """The folder of a Trainer's runs, made by the first write.

    Args:
        root: `Trainer(default_root_dir=...)`; None for a fresh `runs/<time>-<id>`.
    """

    def __init__(self, root: str | Path | None) -> None:
        self._argument = root
        self.url = str(root) if check.is_url(root) else None
        place = root if self.url is None else staging(self.url)
        self.root = None if place is None else Path(os.path.abspath(place))  # whatever folder a program goes to later
        self.known = self.root
        self._is_ours = False

    @property
    def path(self) -> Path:
        """The folder; a fresh one gets its name when it is asked for."""
        if self.known is None:
            self.known = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        return self.known

    def fetch(self) -> None:
        """Fetch the newest checkpoint of a run in a bucket, unless this machine has it; in all processes together."""
        self._check_computers()
        if self.url is not None:
            local(self.url, "run")

    def claim(self, files: Sequence[str], resume: Any, checkpoint: Checkpoint | None, *, fitting: bool) -> None:
        """Make the folder this Trainer's; a fit refuses that of another run, unless it continues it.

        `files` is what loggers would leave in it, `resume` is `Trainer(resume=...)`.
        """
        path = None if checkpoint is None else checkpoint.path
        if self.root is None:
            if self.known is None and fitting and resume is not None and path and path.parent.name == FOLDER:
                self.known = path.parent.parent  # a run continues in its folder
            if (processes := team()).size > 1:  # its name holds a time and a random number
                self.known = Path(processes.agree("the run's folder", str(self.path))[0])
            return
        check.require(
            not self.root.is_file(), "default_root_dir", str(self._argument), "takes a folder", owner="Trainer"
        )
        inside = path is not None and Path(os.path.realpath(self.root)) in Path(os.path.realpath(path)).parents
        continues = resume == "auto" or inside
        self._check_computers()
        there = [] if self.url is None or continues or self._is_ours else names_in(self.url)
        used = [name for name in ("metrics.csv", FOLDER, *files) if name in there or _is_used(self.root / name)]
        if used and fitting and not (self._is_ours or continues):
            where = "" if self.url is None or used[0] in there else f", in {self.root},"
            raise ArgumentError(
                f"Trainer(default_root_dir={str(self._argument)!r}){where} holds {used[0]} of another run. Pass "
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
            raise raised_everywhere(error)

    def hold(self) -> FolderLock | None:
        """Keep other trainings out of a folder that was given, until the lock is closed; in all processes together."""
        if self.root is None:  # a fresh one has a name that no other run has
            return None
        lock = None
        problem = None
        try:
            lock = FolderLock(self.root, of_run=True) if jax.process_index() == 0 else None
        except CheckpointError as error:
            problem = error
        team().same_error("the run's folder", problem)
        return lock


def resolve_checkpoint(
    wanted: Any, argument: str, purpose: str, callbacks: Sequence[Callback], folder: RunFolder
) -> Checkpoint | None:
    """Return the checkpoint that a run begins with, verified; None to start again.

    `wanted` is "auto", "last", "best" or a path, None for nothing, `argument` where it was asked for, and `purpose` is
    in the line that names it. The folders of the callbacks are searched.
    """
    if wanted is None:
        return None
    if not isinstance(wanted, (str, Path)):
        raise ArgumentTypeError(f"{argument} takes 'auto', 'last', 'best' or a path, got {shown(wanted)}.")
    folder.fetch()
    if wanted not in ("auto", "last", "best"):
        checkpoint, skipped = locate(local(wanted, run=folder.url), argument)
    else:
        savers: list[Any] = [c for c in callbacks if c.role == "checkpoint"]
        default_folder = Path(os.path.abspath(folder.path)) / FOLDER
        folders = list(dict.fromkeys([*(c.folder(folder.path) for c in savers), default_folder]))
        if wanted == "auto":  # a job that was killed before its first full checkpoint may have written weights
            weights = {c.folder(folder.path) for c in savers if getattr(c, "save_weights_only", False)}
            folders = [x for x in folders if x not in weights] or folders
        checkpoint, skipped = _newest(folders, resumes=purpose == "resume")
        if wanted == "best":
            asked = min(savers, key=lambda c: c.monitor is None, default=None)  # as trainer.checkpoint_callback
            if asked is not None and asked.best_model_path:
                checkpoint = read(Path(asked.best_model_path))
            elif checkpoint is not None:  # saved by an earlier process: the newest checkpoint names it
                checkpoint = best_of(checkpoint, "" if asked is None else asked.state_key)
        if checkpoint is None and not (wanted == "auto" and argument == "Trainer(resume=...)"):
            places = " or ".join(map(str, folders))
            raise CheckpointError(f"{argument}: {wanted!r} was asked for, and there is no checkpoint in {places}.")
        if checkpoint is None and jax.process_index() == 0:
            say(f"resume: no checkpoint in {' or '.join(map(str, map(short_path, folders)))}, starting from scratch")
    if checkpoint is not None and checkpoint.weights_only and purpose == "resume":
        raise CheckpointError(
            f"{argument}: {checkpoint.path} has weights only, as ModelCheckpoint(save_weights_only=True) writes them. "
            "No training continues from it: begin a new one with fit(init_from=path)."
        )
    if checkpoint is not None:
        log_taken(purpose, checkpoint, skipped)
    return checkpoint


def resolve_weights(
    init_from: Any, callbacks: Sequence[Callback], folder: RunFolder
) -> Callable[[TrainModule], object] | None:
    """Return what gives a module the weights that a fit begins with, None for nothing."""
    if callable(init_from):
        return init_from
    if is_weights_file(init_from):
        return partial(load_weights, source=init_from, strict=False)
    checkpoint = resolve_checkpoint(init_from, "Trainer.fit(init_from=...)", "init_from", callbacks, folder)
    # Without the states of random generators: they are of the training that wrote it.
    return checkpoint and partial(load_variables, checkpoint=checkpoint, strict=False, draws=False)


def _newest(folders: list[Path], *, resumes: bool) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint that has seen the most batches, as each folder counts its own order, and why not others.

    For a resume those that have more than weights come first.
    """
    newest_of_folders = []
    errors = list[CheckpointError]()
    for folder in folders:
        try:
            newest_of_folders.append(newest(folder))
        except CheckpointError as error:  # none of it verifies; another folder may have a good one
            errors.append(error)
    checkpoints = [checkpoint for checkpoint, _ in newest_of_folders if checkpoint is not None]
    if errors and not checkpoints:
        raise errors[-1]

    def progress(checkpoint: Checkpoint) -> tuple[bool, int, int]:
        state = checkpoint.state
        is_complete = not (resumes and checkpoint.weights_only)
        return is_complete, state["position"]["total_batch_idx"], state["epoch"]

    skipped = [*(text for _, texts in newest_of_folders for text in texts), *map(str, errors)]
    return max(checkpoints, key=progress, default=None), skipped


def _is_used(path: Path) -> bool:
    """Return whether a path is a file, or a folder that holds more than locks and what a crash has left."""
    return any(not inside.name.startswith(".") for inside in path.iterdir()) if path.is_dir() else path.exists()
