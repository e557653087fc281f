"""Optimizers of nnx that a training step updates itself: the Trainer takes the step after it."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxlit.core.step_notes import RETURN_THE_LOSS
from jaxlit.errors import ModuleError, StateError


def counts_of_steps(module: nnx.Module) -> list[tuple[str, nnx.Optimizer, Any]]:
    """Return the optimizers of nnx that a module holds: path, optimizer, and how many steps it has taken."""
    nodes = ((path, x) for path, x in nnx.iter_graph(module) if isinstance(x, nnx.Optimizer))
    return [(".".join(map(str, path)), x, x.step.get_value()) for path, x in nodes]


def check_own_steps(before: list[tuple[str, nnx.Optimizer, Any]], check: Callable[[], None], step: str) -> str | None:
    """Return the path of an optimizer that has taken a step since, None if none has.

    Args:
        before: What `counts_of_steps` returned before the step.
        check: Refuses what the step has changed beside its arrays, as such an optimizer may.
        step: The step's name.

    Raises:
        ModuleError: An optimizer has taken a step, and left what the check refuses.
    """
    stepped = next((path for path, x, count in before if x.step.get_value() is not count), None)
    try:
        check()
    except StateError as error:
        raise error if stepped is None else second_step(stepped, step) from None
    return stepped


def second_step(path: str, step: str) -> ModuleError:
    """Return the error of a step that updates parameters by an optimizer in its module, and has the Trainer do so."""
    return ModuleError(f"{step} has updated parameters by self.{path}, an optimizer of nnx. {RETURN_THE_LOSS}")
