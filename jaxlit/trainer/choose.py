"""Which checkpoint a run begins with."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.model_checkpoint import ModelCheckpoint
from jaxlit.checkpoints.files import FOLDER, Checkpoint, locate, newest, read
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxlit.reporting.terminal import say, short_path
from jaxlit.trainer.run_folder import RunFolder

_logger = logging.getLogger("jaxlit")


def find(resume: Any, ckpt_path: Any, verb: str, callbacks: Sequence[Callback], folder: RunFolder) -> Checkpoint | None:
    """Return the checkpoint that a run begins with, verified; None to begin anew.

    Args:
        resume: `Trainer(resume=...)`; only a fit goes on from it.
        ckpt_path: The argument of the Trainer's method.
        verb: The method.
        callbacks: The Trainer's callbacks, whose folders are searched.
        folder: That of the run.

    Raises:
        ArgumentError: Two are named, or a name means nothing here.
        CheckpointError: There is none, or none that verifies.
    """
    resume = resume if verb == "fit" else None
    if ckpt_path is not None and resume is not None:
        raise ArgumentError(
            f"Trainer(resume={str(resume)!r}) and fit(ckpt_path={str(ckpt_path)!r}) name two checkpoints. "
            "Leave one out."
        )
    wanted, argument = (
        (ckpt_path, f"Trainer.{verb}(ckpt_path=...)") if resume is None else (resume, "Trainer(resume=...)")
    )
    if wanted is None:
        return None
    if not isinstance(wanted, (str, Path)):
        raise ArgumentTypeError(f"{argument} takes 'last', 'best' or a path, got {wanted!r}.")
    if wanted in ("auto", "last", "best"):
        savers = [c for c in callbacks if isinstance(c, ModelCheckpoint)]
        own = Path(os.path.abspath(folder.path)) / FOLDER
        folders = list(dict.fromkeys([*(c.folder(folder.path) for c in savers), own]))
        found, skipped = _newest(folders)
        if wanted == "best":
            found = _best(savers, found)
        if found is None and resume != "auto":
            places = " or ".join(map(str, folders))
            raise CheckpointError(f"{argument}: {wanted!r} was asked for, and there is no checkpoint in {places}.")
        if found is None:
            _tell(f"resume: no checkpoint in {short_path(own)}, starting from scratch")
    else:
        found, skipped = locate(wanted, argument)
    for reason in skipped:
        _logger.warning("A newer checkpoint was passed over. %s", reason)
    if found is not None:
        state = found.state
        what = "resume" if verb == "fit" else verb
        _tell(f"{what}: {short_path(found.path)} (step {state['global_step']}, epoch {state['epoch']})")
    return found


def _newest(folders: list[Path]) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint of several folders that has seen most, and why others were passed over."""
    found, skipped, failed = [], [], None
    for folder in folders:
        try:
            checkpoint, reasons = newest(folder)
            skipped += reasons
            found += [checkpoint] if checkpoint is not None else []
        except CheckpointError as error:
            failed = error
            skipped.append(str(error))
    if failed is not None and not found:
        raise failed
    place = lambda checkpoint: (checkpoint.state["position"]["total_batch_idx"], checkpoint.state["epoch"])  # noqa: E731
    return max(found, key=place, default=None), skipped


def _best(callbacks: list[ModelCheckpoint], last: Checkpoint | None) -> Checkpoint | None:
    if callbacks and callbacks[0].best_model_path:
        return read(Path(callbacks[0].best_model_path))
    # Of an earlier process: the newest checkpoint knows.
    states = {} if last is None else last.state["callbacks"]
    mine = callbacks[0].state_key if callbacks else ""
    for state in (states.get(mine, {}), *states.values()):
        name = state.get("best_model")
        if last is not None and isinstance(name, str) and name:
            return read(last.path.parent / Path(name).name)
    return None


def _tell(line: str) -> None:
    if jax.process_index() == 0:
        say(line)
