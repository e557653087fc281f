"""What a Trainer does about the errors of a run: some are explained, and a run that hangs is saved."""

import contextlib
from pathlib import Path
from typing import Any

import jax

from jaxlit.checkpoints import files
from jaxlit.data.watchdog import EXIT_CODE
from jaxlit.engine.memory import is_exhausted, out_of_memory
from jaxlit.errors import StateError
from jaxlit.loop.rewind import end_before_bad_step
from jaxlit.loop.run import Run, Setup
from jaxlit.reporting.placement import bytes_of


def explained(error: BaseException, run: Setup) -> BaseException:
    """Return the error that a run ends with: the one that was raised, or one that says more than jax's."""
    if is_exhausted(error):
        return _exhausted(error, run)
    if isinstance(error, RuntimeError) and "has been deleted" in str(error) and not isinstance(error, StateError):
        deleted = StateError(
            "An array of an earlier step was read, and a later step has overwritten it. Keep a copy instead: "
            "jax.tree.map(jnp.copy, ...), or read through the module, which is up to date in every hook."
        )
        deleted.__cause__ = error
        return deleted
    return error


def _exhausted(error: BaseException, run: Setup) -> BaseException:
    if not isinstance(run, Run):
        return out_of_memory(error, "before the first step")
    engine = run.engine
    failed, compiling = engine.failed, "compil" in str(error).lower()
    place, programs = run.place, engine.programs
    if failed is not None:  # to compile it again would only fail again, and may take minutes
        place = f"in {failed.name}, {'as it was compiled' if compiling else 'in its first call'}"
        programs = [] if compiling else [failed]
    example, batch = run.prefetcher.example, None
    if example is not None:
        batch = bytes_of(jax.tree.leaves(example)) // engine.strategy.num_replicas
    return out_of_memory(error, place, state=engine.state.spec.tree, batch=batch, programs=programs)


def rescue(trainer: Any, run: Setup | None) -> str:
    """Write a checkpoint of a run that hangs, as after an error, from another thread.

    Args:
        trainer: Its Trainer.
        run: The run.

    Returns:
        What was saved, as a text.
    """
    error = TimeoutError("nothing moved")
    failed = "" if run is None else run.times.team.fail(error, run.place, EXIT_CODE)
    if not isinstance(run, Run):
        return f"Nothing was there to be saved. {failed}".strip()
    with contextlib.suppress(Exception):  # else the checkpoint would be of after a step that was not finite
        end_before_bad_step(run, error)
    before, texts = run.progress, []
    savers: list[Any] = [c for c in run.hooks.callbacks if c.role == "checkpoint"]
    for callback in savers:
        last = callback.last_model_path
        callback.on_exception(trainer, run.module, error)
        if run.progress != before and callback.last_model_path != last:
            # The run moved meanwhile: the arrays may be of another step than the rest.
            files.remove(Path(callback.last_model_path))
            texts.append("It moved while it was saved: that checkpoint was deleted.")
        elif callback.last_model_path:
            texts.append(f"The newest checkpoint is {callback.last_model_path}.")
    return " ".join([*texts, failed]).strip() or "Nothing was there to be saved."
