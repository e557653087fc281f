"""What a run takes from the checkpoint that it begins with, beside arrays and position."""

import logging

from jaxlit.checkpoints.files import Checkpoint
from jaxlit.errors import CheckpointError
from jaxlit.loop import snapshot
from jaxlit.loop.run import Run

_logger = logging.getLogger("jaxlit")


def restore_callbacks(run: Run, checkpoint: Checkpoint) -> None:
    """Give the callbacks their states, and tell of states that nobody takes."""
    left = snapshot.load_callbacks(run.hooks.callbacks, run.loaders.datamodule, checkpoint.state)
    about_files = ("ModelCheckpoint", "CSVLogger", "JSONLLogger")
    if left := [name for name in left if not name.startswith(about_files)]:
        _logger.warning(
            "%s keeps the state of %s, which is not among the callbacks now.", checkpoint.path, ", ".join(left)
        )


def check_window(checkpoint: Checkpoint, accumulate: int | None) -> None:
    """Refuse another `accumulate_grad_batches` in the middle of a window.

    Raises:
        CheckpointError: Naming the number that it needs.
    """
    was, filled = checkpoint.state["accumulate"], checkpoint.state["position"]["filled"]
    if accumulate not in (None, was) and filled:
        raise CheckpointError(
            f"{checkpoint.path} has {filled} of {was} batches in its accumulation window, and the Trainer has "
            f"accumulate_grad_batches={accumulate}. Resume with {was}, or from a checkpoint of an epoch's end."
        )
