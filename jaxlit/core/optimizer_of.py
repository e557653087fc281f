"""What `configure_optimizers` returned, as an `Optimizer`."""

from typing import Any

import optax
from flax import nnx

from jaxlit.core.module import TrainModule
from jaxlit.core.optimizer import Optimizer
from jaxlit.errors import ModuleError
from jaxlit.notes import noting_place
from jaxlit.shown import shown


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
        made: Any = cls.configure_optimizers(module)
        while type(made) in (list, tuple) and len(made) == 1:
            (made,) = made
        if isinstance(made, (optax.GradientTransformation, optax.MultiSteps)):
            return Optimizer(made)  # type: ignore[arg-type]  # MultiSteps is a transform in all but its type
        if isinstance(made, Optimizer):
            return made.of(module)
    way = (
        "Return one, with the schedule inside, optax.adamw(schedule), or one transform for each group of parameters, "
        "jl.Optimizer(by={'encoder': optax.adam(1e-3), 'decoder': optax.adam(1e-3)})"
    )
    is_pair = type(made) in (list, tuple) and len(made) == 2 and all(type(x) in (list, tuple) for x in made)
    if is_pair or (isinstance(made, dict) and "lr_scheduler" in made):
        way = (
            "Return one transform with the schedule inside, optax.adamw(schedule): docs/schedules.md lists torch's "
            "schedules. A schedule counts steps: a milestone in epochs becomes epochs times the steps of an epoch"
        )
    if isinstance(made, nnx.Optimizer):
        way = "Return its tx: what it keeps is kept in the training state"
    raise ModuleError(
        f"{where} must return an optax.GradientTransformation or a jaxlit.Optimizer, got {shown(made, 100)}. {way}."
    )
