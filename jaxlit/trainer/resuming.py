"""What a run takes from the checkpoint that it begins with, beside arrays and position."""

import logging

import jax

from jaxlit.checkpoints.files import Checkpoint
from jaxlit.errors import CheckpointError
from jaxlit.loop import snapshot
from jaxlit.loop.run import Run
from jaxlit.reporting.terminal import say

_logger = logging.getLogger("jaxlit")


def restore_callbacks(run: Run, checkpoint: Checkpoint) -> None:
    """Give the callbacks their states, and tell of states that nobody takes."""
    left = snapshot.load_callbacks(run, checkpoint.state)
    about_files = ("ModelCheckpoint", "CSVLogger", "JSONLLogger")
    if left := [name for name in left if not name.startswith(about_files)]:
        _logger.warning(
            "%s keeps the state of %s, which is not among the callbacks now.", checkpoint.path, ", ".join(left)
        )


def tell_of_bad_step(checkpoint: Checkpoint, nan_policy: str) -> None:
    """Say that a checkpoint was written before a step that was not finite, and what comes of it now."""
    if (bad := checkpoint.state.get("not_finite")) is None or jax.process_index():
        return
    first, end = bad["batches"]
    batches = f"batch {first}" if end == first + 1 else f"batches {first} to {end - 1}"
    then = {
        "raise": "run again now, it ends training again if it gives the same; nan_policy='skip' would leave it out",
        "skip": "run again now, it is left out by nan_policy='skip' if it gives the same",
        "rollback": "run again now, it is left out by nan_policy='rollback' if it gives the same",
        "ignore": "nan_policy='ignore' trains on it now",
    }
    took = len(bad["optimizer"])
    inside = f" {took} arrays of the optimizer's state have taken it (state.json names them)." * (took > 0)
    say(f"resume: step {bad['step']} (epoch {bad['epoch']}, {batches}) was not finite: {then[nan_policy]}.{inside}")


def check_window(checkpoint: Checkpoint, run: Run) -> None:
    """Refuse another `accumulate_grad_batches` in the middle of a window, unless a hook had set that of the window.

    Raises:
        CheckpointError: Naming the number that it needs.
    """
    was, filled = checkpoint.state["accumulate"], checkpoint.state["position"]["filled"]
    accumulate = run.settings.accumulate_grad_batches
    if filled and accumulate != was and not snapshot.keeps_accumulation(run, checkpoint.state):
        raise CheckpointError(
            f"{checkpoint.path} has {filled} of {was} batches in its accumulation window, and the Trainer has "
            f"accumulate_grad_batches={accumulate}. Resume with {was}, or from a checkpoint of an epoch's end."
        )
