"""Which checkpoint a run begins with."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import FOLDER, Checkpoint, best_of, locate, newest, read
from jaxlit.core.loading import tell_taken
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxlit.reporting.terminal import say, short_path
from jaxlit.shown import shown
from jaxlit.trainer.run_folder import RunFolder


@dataclass(frozen=True)
class Start:
    """What a fit begins with, as it was asked for; see `Trainer.fit`."""

    ckpt_path: Any
    init_from: Any
    strict: bool
    reset_optimizer: bool


def resolve_checkpoint(
    resume: Any,
    path: Any,
    verb: str,
    callbacks: Sequence[Callback],
    folder: RunFolder,
    argument: str = "ckpt_path",
) -> Checkpoint | None:
    """Return the checkpoint that a run begins with, verified; None to start again.

    Args:
        resume: `Trainer(resume=...)`; only a fit continues from it.
        path: What the Trainer's method was given.
        verb: The method.
        callbacks: The Trainer's callbacks, whose folders are searched.
        folder: That of the run.
        argument: The method's argument.

    Raises:
        ArgumentError: Two are named, or a name means nothing here.
        CheckpointError: There is none, or none that verifies.
    """
    resume = resume if verb == "fit" else None
    if path is not None and resume is not None:
        raise ArgumentError(
            f"Trainer(resume={str(resume)!r}) and fit({argument}={str(path)!r}) name two checkpoints. Leave one out."
        )
    purpose = "init_from" if argument == "init_from" else "resume" if verb == "fit" else verb
    wanted, argument = (path, f"Trainer.{verb}({argument}=...)") if resume is None else (resume, "Trainer(resume=...)")
    if wanted is None:
        return None
    if not isinstance(wanted, (str, Path)):
        raise ArgumentTypeError(f"{argument} takes 'auto', 'last', 'best' or a path, got {shown(wanted)}.")
    if wanted not in ("auto", "last", "best"):
        checkpoint, skipped = locate(wanted, argument)
    else:
        savers: list[Any] = [c for c in callbacks if c.role == "checkpoint"]
        own = Path(os.path.abspath(folder.path)) / FOLDER
        folders = list(dict.fromkeys([*(c.folder(folder.path) for c in savers), own]))
        checkpoint, skipped = _newest(folders)
        if wanted == "best":
            asked = min(savers, key=lambda c: c.monitor is None, default=None)  # as trainer.checkpoint_callback
            if asked is not None and asked.best_model_path:
                checkpoint = read(Path(asked.best_model_path))
            elif checkpoint is not None:  # saved by an earlier process: the newest checkpoint names it
                checkpoint = best_of(checkpoint, "" if asked is None else asked.state_key)
        if checkpoint is None and wanted != "auto":
            places = " or ".join(map(str, folders))
            raise CheckpointError(f"{argument}: {wanted!r} was asked for, and there is no checkpoint in {places}.")
        if checkpoint is None and jax.process_index() == 0:
            say(f"resume: no checkpoint in {short_path(own)}, starting from scratch")
    if checkpoint is not None:
        tell_taken(purpose, checkpoint, skipped)
    return checkpoint


def _newest(folders: list[Path]) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint of several folders that has seen most, and why others were passed over."""
    checkpoints, skipped, errors = [], [], []
    for folder in folders:
        try:
            checkpoint, reasons = newest(folder)
        except CheckpointError as error:
            errors.append(error)
            continue
        skipped += reasons
        checkpoints += [] if checkpoint is None else [checkpoint]
    if errors and not checkpoints:
        raise errors[-1]
    place = lambda checkpoint: (checkpoint.state["position"]["total_batch_idx"], checkpoint.state["epoch"])  # noqa: E731
    return max(checkpoints, key=place, default=None), [*skipped, *map(str, errors)]
