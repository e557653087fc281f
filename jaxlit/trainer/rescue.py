"""What can be saved of a training that hangs."""

import contextlib
from pathlib import Path
from typing import Any

from jaxlit.checkpoints import files
from jaxlit.loop.rewind import end_before_bad_step
from jaxlit.loop.run import Run


def rescue(trainer: Any, run: Run) -> str:
    """Write a checkpoint of where a run hangs, as after an error, in a thread beside it.

    Args:
        trainer: Its Trainer.
        run: The run.

    Returns:
        What came of it, in words.
    """
    with contextlib.suppress(Exception):  # else what is saved would be after a step that was not finite
        end_before_bad_step(run, TimeoutError("nothing moves"))
    before, told = run.progress, []
    savers: list[Any] = [c for c in run.hooks.callbacks if c.role == "checkpoint"]
    for callback in savers:
        last = callback.last_model_path
        callback.on_exception(trainer, run.module, TimeoutError("nothing moves"))
        if run.progress != before and callback.last_model_path != last:
            # It woke up meanwhile: the arrays may be of another step than the rest.
            files.remove(Path(callback.last_model_path))
            told.append("It moved while it was saved: that checkpoint was deleted.")
        elif callback.last_model_path:
            told.append(f"The newest checkpoint is {callback.last_model_path}.")
    return " ".join(told) or "Nothing was there to be saved."
