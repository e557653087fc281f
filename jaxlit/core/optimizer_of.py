"""What `configure_optimizers` returned, as an `Optimizer`."""

from collections.abc import Mapping, Sequence
from typing import Any

import optax
from flax import nnx

from jaxlit.core.module import TrainModule
from jaxlit.core.optimizer import Optimizer
from jaxlit.errors import ModuleError
from jaxlit.notes import noting_place
from jaxlit.shown import shown

_KINDS = optax.GradientTransformation | optax.MultiSteps | Optimizer


def optimizer_of(module: TrainModule, cls: type[TrainModule] | None = None) -> Optimizer:
    """Return what `configure_optimizers` returned, as an `Optimizer` of the module's parameters.

    Args:
        module: The module.
        cls: The class whose method is asked, its own if left out.

    Raises:
        ModuleError: It is missing or returned something else.
    """
    cls = cls or type(module)
    where = f"{cls.__name__}.configure_optimizers"
    if cls.configure_optimizers is TrainModule.configure_optimizers:
        raise ModuleError(f"fit needs {where}. Return an optax transform from it, for example optax.adamw(1e-3).")
    with noting_place(where):
        made = cls.configure_optimizers(module)
        # A transform is a tuple itself.
        while isinstance(made, (list, tuple)) and not isinstance(made, _KINDS) and len(made) == 1:
            (made,) = made
        if isinstance(made, optax.MultiSteps):  # a transform in all but its type
            made = made.gradient_transformation()
        if isinstance(made, optax.GradientTransformation):
            return Optimizer(made)
        if isinstance(made, Optimizer):
            return made.of(module)
    if isinstance(made, (list, tuple)) and len(made) > 1:
        raise ModuleError(_several(where, module, made))
    if isinstance(made, Mapping) and len(made) > 1 and all(isinstance(x, _KINDS) for x in made.values()):
        raise ModuleError(_by(where, f"a dict of {len(made)} optimizers", made))
    raise ModuleError(f"{where} must return an optax.GradientTransformation or a jaxlit.Optimizer, got {_other(made)}")


def _several(where: str, module: TrainModule, made: Sequence[Any]) -> str:
    optimizers = _optimizers_in(made)
    if len(optimizers) > 1:
        names = list(dict.fromkeys(str(path[0]) for path, _ in nnx.to_flat_state(nnx.state(module, nnx.Param))))
        return _by(
            where, f"{len(optimizers)} optimizers", names if len(names) == len(optimizers) else ["encoder", "decoder"]
        )
    return f"{where} returned {len(made)} things; return one optimizer. A schedule goes into it: optax.adamw(schedule)."


def _optimizers_in(made: Any) -> list[Any]:
    """Return the optimizers in lists of lists and dicts, as Lightning takes them with schedulers."""
    if isinstance(made, _KINDS):
        return [made]
    if isinstance(made, Mapping):
        return _optimizers_in(made.get("optimizer"))
    return [x for part in made for x in _optimizers_in(part)] if isinstance(made, (list, tuple)) else []


def _by(where: str, what: str, groups: Any) -> str:
    groups = ", ".join(f"{str(name)!r}: optax.adam(1e-3)" for name in groups)
    return (
        f"{where} returned {what}, and one takes a step.\n"
        f"Return one with a transform for each group of parameters, by their paths in the module:\n"
        f"    return jl.Optimizer(by={{{groups}}})"
    )


def _other(made: Any) -> str:
    """Return what else `configure_optimizers` returned, and what to return in its place."""
    if isinstance(made, nnx.Optimizer):
        return f"an {type(made).__name__} of nnx. Return its tx: what it keeps is kept in the training state."
    if isinstance(made, dict):
        keys = ", ".join(map(repr, made)) or "nothing"
        return f"a dict of {keys}. Return the optimizer alone, with the schedule inside: optax.adamw(schedule)."
    text = shown(made)
    return f"{text if len(text) <= 100 else type(made).__name__}. Return, for example, optax.adamw(1e-3)."
