"""How a fit takes its optimizer steps, by its Trainer, its callbacks and its module."""

from collections.abc import Sequence
from typing import Any

import jax

from jaxlit.callbacks.base import Callback
from jaxlit.core.groups import labels_of, names_in
from jaxlit.core.module import TrainModule
from jaxlit.core.optimizer_of import optimizer_of
from jaxlit.core.parts import Part, by_part
from jaxlit.core.replica import num_rows, with_rows
from jaxlit.core.step_options import StepOptions
from jaxlit.errors import ArgumentError, ModuleError
from jaxlit.loop.hooks import Hooks, fitting, overrides
from jaxlit.loop.run_data import RunData
from jaxlit.loop.settings import Settings
from jaxlit.shown import shown


def first_example(data: RunData) -> Any:
    """Return the shapes and dtypes of the first batch of all processes; None where a hook has yet to make it."""
    example = data.loaders.validator_of(data.training[0]).example
    processes = jax.process_count()
    return example if example is None or processes == 1 else with_rows(example, processes * num_rows(example))


def step_options(settings: Settings, hooks: Hooks, example: Any) -> StepOptions:
    """Return how a fit takes its optimizer steps.

    Args:
        settings: The Trainer's arguments.
        hooks: The hooks of the fit.
        example: The shapes and dtypes of the first batch, of all processes; None where it is not known.
    """
    optimizer = optimizer_of(hooks.module)
    # A later epoch may need room for a window; a subclass need not know which.
    least = 1 if all(c.batches_per_step(0) is None for c in hooks.callbacks) else 2
    parts = frozen_parts(hooks.callbacks, hooks.module, optimizer.wrt)
    return StepOptions(
        by_part(optimizer, parts),
        accumulate=max(settings.accumulate_grad_batches, least),
        nan_policy="raise" if settings.nan_policy == "rollback" else settings.nan_policy,
        clip=settings.clip,
        extras=array_keepers(hooks),
        parts=parts,
        tolerates=hooks.tolerates,
        example=example,
    )


def frozen_parts(callbacks: Sequence[Callback], module: TrainModule, wrt: Any) -> tuple[Part, ...]:
    """Return the parts of the parameters that callbacks freeze for some epochs.

    Args:
        callbacks: The callbacks of a fit.
        module: Its module.
        wrt: The filter of what is trained.

    Raises:
        ArgumentError: A name is of no trained parameter, two have the same, or are called alike.
    """
    freezes: list[Any] = [c for c in callbacks if c.frozen_part is not None]
    parts = list[Part]()
    known = frozenset(names_in(module, wrt, ...))
    for callback, label in zip(freezes, labels_of([c.frozen_part for c in freezes], "part"), strict=True):
        names = frozenset(callback.names(module, wrt))
        whose = f"{type(callback).__name__}.names(...)"
        if not names or not names <= known:
            raise ArgumentError(
                f"{whose} takes names of trained parameters of {type(module).__name__}, got "
                f"{shown(sorted(names - known))}. It has: {shown(sorted(known))}."
            )
        if both := sorted(name for part in parts for name in part.names & names):
            raise ArgumentError(f"{whose} has {both[0]}, which another one also has. Give each its own parameters.")
        if label in {part.label for part in parts}:
            raise ArgumentError(f"Two BackboneFreezes have parts that are called {label!r}. Join them by nnx.Any.")
        parts.append(Part(label, names, callback.unfreeze_at_epoch, callback.tx))
    return tuple(parts)


def array_keepers(hooks: Hooks) -> dict[str, Callback]:
    """Return the callbacks that keep arrays, by the keys of their states.

    Raises:
        ModuleError: One has only one of the two methods, or a method takes other arguments.
    """
    methods = ("init_arrays", "update_arrays")
    keepers = {}
    for key, callback in hooks.keyed().items():
        defined = [fitting(callback, name) for name in methods if overrides(callback, name)]
        if len(defined) == 1:
            raise ModuleError(
                f"{type(callback).__name__} defines one of init_arrays and update_arrays: a callback's arrays are made "
                "by the first and changed by the second. Define both."
            )
        if defined:
            keepers[key] = callback
    return keepers
