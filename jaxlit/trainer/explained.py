"""Errors that tell a user what jax's own would not."""

from typing import Any

import jax

from jaxlit.engine.engine import Engine
from jaxlit.engine.memory import is_exhausted, out_of_memory
from jaxlit.errors import StateError
from jaxlit.loop.run import Run


def explained(error: BaseException, run: Run) -> BaseException:
    """Return the error that a run ends with: the one that was raised, or one that says more.

    Args:
        error: What was raised.
        run: The run.
    """
    if is_exhausted(error):
        return _exhausted(error, run)
    if isinstance(error, RuntimeError) and "has been deleted" in str(error) and not isinstance(error, StateError):
        found = StateError(
            "An array of an earlier step was read, and a later step has overwritten it. Keep a copy instead: "
            "jax.tree.map(jnp.copy, ...), or read through the module, which is up to date in every hook."
        )
        found.__cause__ = error
        return found
    return error


def _exhausted(error: BaseException, run: Run) -> BaseException:
    engine: Engine | None = getattr(run, "engine", None)
    if engine is None:
        return out_of_memory(error, "before the first step")
    failed, compiling = engine.failed, "compil" in str(error).lower()
    place, programs = run.place, engine.programs
    if failed is not None:  # to compile it again would only fail again, and may take minutes
        place = f"in {failed.name}, {'as it was compiled' if compiling else 'in its first call'}"
        programs = [] if compiling else [failed]
    feeder = getattr(run, "feeder", None)
    batch = None if feeder is None or feeder.example is None else _per_device(feeder.example, engine)
    with run.compiles.paused():
        return out_of_memory(error, place, state=engine.state.stored(), batch=batch, programs=programs)


def _per_device(batch: Any, engine: Engine) -> int:
    """Return what a batch takes on a device: its rows are split where they divide."""
    replicas = engine.strategy.num_replicas
    split = [x.shape[0] % replicas == 0 if x.ndim else False for x in jax.tree.leaves(batch)]
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(batch)]
    return sum(count // replicas if by else count for count, by in zip(sizes, split, strict=True))
