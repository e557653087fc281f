"""Which checkpoint a run begins with."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import FOLDER, Checkpoint, best_of, locate, newest, read
from jaxlit.checkpoints.remote import local
from jaxlit.checkpoints.weights import load_variables
from jaxlit.core.loading import tell_taken
from jaxlit.core.module import TrainModule
from jaxlit.errors import ArgumentTypeError, CheckpointError
from jaxlit.reporting.terminal import say, short_path
from jaxlit.shown import shown
from jaxlit.trainer.run_folder import RunFolder
from jaxlit.weights.loading import load_weights
from jaxlit.weights.sources import is_weights_file


@dataclass(frozen=True)
class Start:
    """What a fit begins with, as it was asked for; see `Trainer.fit`."""

    ckpt_path: Any
    init_from: Any
    strict: bool
    reset_optimizer: bool


def resolve_checkpoint(
    wanted: Any, argument: str, purpose: str, callbacks: Sequence[Callback], folder: RunFolder
) -> Checkpoint | None:
    """Return the checkpoint that a run begins with, verified; None to start again.

    Args:
        wanted: What was asked for: "auto", "last", "best" or a path; None for nothing.
        argument: Where, for messages.
        purpose: What it is for, for the line that names it.
        callbacks: The Trainer's callbacks, whose folders are searched.
        folder: That of the run.

    Raises:
        ArgumentTypeError: `wanted` is not a str or a path.
        CheckpointError: There is no checkpoint, or none that verifies.
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
        own = Path(os.path.abspath(folder.path)) / FOLDER
        folders = list(dict.fromkeys([*(c.folder(folder.path) for c in savers), own]))
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
        tell_taken(purpose, checkpoint, skipped)
    return checkpoint


def resolve_weights(
    init_from: Any, callbacks: Sequence[Callback], folder: RunFolder
) -> Callable[[TrainModule], object] | None:
    """Return what gives a module the weights that a fit begins with, None for nothing.

    Args:
        init_from: See `Trainer.fit`.
        callbacks: The Trainer's callbacks.
        folder: That of the run.

    Raises:
        ArgumentTypeError: It is neither a path nor a function.
        CheckpointError: There is no such checkpoint, or none that verifies.
    """
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
    found, errors = [], list[CheckpointError]()
    for folder in folders:
        try:
            found.append(newest(folder))
        except CheckpointError as error:  # none of it verifies; another folder may have a good one
            errors.append(error)
    checkpoints = [checkpoint for checkpoint, _ in found if checkpoint is not None]
    if errors and not checkpoints:
        raise errors[-1]
    seen = lambda c: (c.state["position"]["total_batch_idx"], c.state["epoch"])  # noqa: E731
    place = lambda c: (not (resumes and c.weights_only), *seen(c))  # noqa: E731
    skipped = [*(text for _, texts in found for text in texts), *map(str, errors)]
    return max(checkpoints, key=place, default=None), skipped
