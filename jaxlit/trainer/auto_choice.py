"""Which strategy "auto" is, by what a training step takes of a device."""

import copy
import math
from typing import Any

from jaxlit.core.precision import Precision
from jaxlit.core.side_tables import attach, trainer_of
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError, OutOfMemoryError
from jaxlit.loop.hooks import Hooks
from jaxlit.loop.run_data import RunData
from jaxlit.loop.settings import Settings
from jaxlit.strategies.auto import Auto
from jaxlit.strategies.base import Strategy
from jaxlit.table import size
from jaxlit.trainer.step_cost import AbstractStep, StepCost, bytes_of_module, shapes_of
from jaxlit.trainer.step_options import first_example, step_options


def choose(auto: Auto, settings: Settings, hooks: Hooks, data: RunData) -> Strategy:
    """Return the first candidate that fits, with the reason.

    A candidate is compiled unless it is certain not to fit. The program of the one that fits is in the compile cache
    then, so only those that did not fit are compiled in vain, as a rule one.

    Args:
        auto: The strategy, set up.
        settings: The Trainer's arguments.
        hooks: The hooks of the fit.
        data: Its loaders, which are open.
    """
    # Devices of one kind may report other limits.
    limit = min(team().agree("the memory of a device", max(auto.limit(bytes_of_module(hooks.module)) or 0, 0)))
    module = shapes_of(hooks.module)
    example = _example(data)
    attach(module, trainer_of(hooks.module))
    options = step_options(settings, hooks, example)
    like: StepCost | None = None  # what the newest that was compiled takes
    chosen: Strategy | None = None
    names = ""
    reason = ""
    last = [*auto.candidates()][-1]
    for name, strategy in auto.candidates().items():
        strategy.setup(auto.mesh.size)
        try:
            step = AbstractStep(module, strategy, options, Precision(settings.precision))
        except ArgumentError:  # `remat` of a step without a scan
            continue
        needs: float = _least(step, None if name == last else like)
        text = f"needs at least {size(needs)} of {size(limit)} per device"
        if needs <= limit and example is not None and name != last:
            try:
                like = step.compiled(example)
                needs = like.total
                text = f"needs {size(like.total)} of {size(limit)} per device"
            except OutOfMemoryError:
                needs = math.inf
                text = f"needs more than {size(limit)} per device to be compiled"
        chosen = strategy
        names = name
        if needs <= limit:
            reason = reason or text
            break
        reason = f"{name} {text}"
    assert chosen is not None
    chosen.reason = f"auto: {names}, {reason}"
    return chosen


def _example(data: RunData) -> Any:
    """Return the shapes and dtypes of the first batch, as a hook of the user's prepares it."""
    source, _ = data.training
    validator = data.loaders.validator_of(source)
    if validator.example is None and source.first is not None:
        validator(copy.deepcopy(source.first))  # which the hook may change in place
    return first_example(data)


def _least(step: AbstractStep, like: StepCost | None) -> int:
    """Return the bytes that a step takes at least, given what the step of another candidate takes.

    Its temporaries are the same, but for the gradients, which may be split otherwise, and for updates of their size.
    """
    state = step.state
    if like is None:
        return state.held
    temporaries = like.temporaries - 2 * like.gradients + state.gradients
    return state.held + like.batch + max(temporaries, 0)
