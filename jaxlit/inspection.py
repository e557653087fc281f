"""Looks at the program of a training step for what its numbers would not tell."""

import contextlib
import inspect
import logging
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxlit import jaxpr
from jaxlit.errors import StateError
from jaxlit.model import Model
from jaxlit.module import TrainModule
from jaxlit.replica import Replica
from jaxlit.state import leaf_name

_logger = logging.getLogger("jaxlit")
_MANY_BYTES = 64 * 2**20  # of constants in a step


def inspect_step(model: Model, replica: Replica, *args: Any, twice: bool = False) -> None:
    """Refuse or warn of a training step whose program does not do what its author means.

    Args:
        model: The model, whose training step was traced.
        replica: What the step sees.
        *args: The arguments of the step's body, abstract.
        twice: Trace the step once more, and warn if it comes out another.

    Raises:
        StateError: The step writes to what the optimizer trains.
    """
    closed, shapes = jax.make_jaxpr(model.body("training", replica), return_shape=True)(*args)
    program = closed.jaxpr
    _, (new_frozen, _, _, _, _, written) = shapes
    _check_writes(model.name, program, written)
    # In a lower precision a frozen variable that was only handed through comes out rounded: it is kept.
    noted = model.noted("training")
    changed = list(noted.changed)
    for i in range(len(jax.tree.leaves(new_frozen))):
        changed[i] = changed[i] and jaxpr.is_computed(program, program.outvars[1 + i])
    noted.changed = tuple(changed)
    _warn_of_no_gradient(model.name, program, args[0])
    _warn_of_constants(closed, model.origin)
    if twice:
        _warn_of_chance(model, replica, args)


def _check_writes(name: str, program: Any, written: dict[str, Any]) -> None:
    """Refuse a training step that writes to what the optimizer trains.

    nnx.scan and its like hand every variable back as a new value, so a new value alone is no write:
    it must have been computed. The dict comes last among the outputs, its leaves in the order of its keys.
    """
    for variable, var in zip(sorted(written), program.outvars[-len(written) :] if written else (), strict=True):
        if jaxpr.is_computed(program, var):
            raise StateError(
                f"{name}.training_step wrote to {variable}, which the optimizer trains. Return a loss instead, or "
                "leave the variable out of jl.Optimizer(wrt=...)."
            )


def _warn_of_no_gradient(name: str, program: Any, params: Any) -> None:
    names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if any(jaxpr.has_gradient(program, 0)[: len(names)]):
        return
    some = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    _logger.warning(
        "The loss of %s.training_step depends on no parameter, so that nothing is trained: %s. "
        "Return the loss of the model's outputs.",
        name,
        some,
    )


def _warn_of_chance(model: Model, replica: Replica, args: tuple[Any, ...]) -> None:
    # Two new functions: a trace of the body itself would be taken from the cache.
    one, other = (jax.make_jaxpr(partial(model.run, "training", replica, None))(*args) for _ in range(2))
    if not jaxpr.same_program(one, other):
        _logger.warning(
            "%s.training_step came out another when it was traced again: it draws from numpy or random, or reads a "
            "clock. What it reads is frozen into the compiled step: draw from nnx.Rngs, or pass it in the batch.",
            model.name,
        )


def _warn_of_constants(closed: Any, module: TrainModule) -> None:
    for array in jaxpr.constants(closed):
        if getattr(array, "nbytes", 0) > _MANY_BYTES:
            _logger.warning(
                "%s.training_step captures %s, an array of %.0f MiB, as a constant of the step. Pass it in the "
                "batch, or hold it in an nnx.Variable.",
                type(module).__name__,
                _name_of(array, module),
                array.nbytes / 2**20,
            )


def _name_of(array: Any, module: TrainModule) -> str:
    step: Any = inspect.unwrap(type(module).training_step)
    names = dict(getattr(step, "__globals__", {}))
    free = step.__code__.co_freevars if hasattr(step, "__code__") else ()
    for name, cell in zip(free, getattr(step, "__closure__", None) or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell may still be empty
            names[name] = cell.cell_contents
    for name, value in names.items():
        if value is array or (isinstance(value, np.ndarray) and np.shares_memory(value, array)):
            return name
    return f"{array.dtype}{list(array.shape)}"
