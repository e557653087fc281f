"""Which strategy "auto" is, by what a training step takes of a device."""

from jaxlit.core.precision import Precision
from jaxlit.core.side_tables import attach, trainer_of
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError
from jaxlit.loop.run import Setup
from jaxlit.strategies.auto import Auto
from jaxlit.strategies.base import Strategy
from jaxlit.table import size
from jaxlit.trainer.step_cost import AbstractStep, StepCost, shapes_of
from jaxlit.trainer.step_options import first_example, step_options


def choose(auto: Auto, run: Setup) -> Strategy:
    """Return the first candidate that fits, with the reason.

    A candidate is compiled unless it surely does not fit. As the program of the one that fits is in the compile cache
    then, this takes one compile more than that strategy: of the first that might have fitted.

    Args:
        auto: The strategy, set up.
        run: The fit, whose loaders are open.
    """
    # Devices of one kind may report other limits.
    limit = min(team().agree("the memory of a device", auto.limit))
    module, example = shapes_of(run.module), first_example(run)
    attach(module, trainer_of(run.module))
    options = step_options(run, example)
    like: StepCost | None = None  # what the newest that was compiled takes
    chosen: Strategy | None = None
    reason, last = "", [*auto.candidates()][-1]
    for name, strategy in auto.candidates().items():
        strategy.setup(auto.mesh.size)
        try:
            step = AbstractStep(module, strategy, options, Precision(run.settings.precision))
        except ArgumentError:  # `remat` of a step without a scan
            continue
        chosen, needs, how = strategy, _at_least(step, None if name == last else like), "at least "
        if needs <= limit and example is not None and name != last:
            like = step.compiled(example)
            needs, how = like.total, ""
        text = f"needs {how}{size(needs)} of {size(limit)} per device"
        if needs <= limit:
            reason = reason or text
            break
        reason = f"{name} {text}"
    assert chosen is not None
    chosen.reason = f"auto: {reason}"
    return chosen


def _at_least(step: AbstractStep, like: StepCost | None) -> int:
    """Return bytes that a step takes surely: of its state, and of another strategy's temporaries if some are known.

    Of these the gradients and the updates, which are of their size, may be split otherwise; the rest is the same.
    """
    state = step.state.held
    return state if like is None else state + like.batch + max(like.temporaries - 2 * like.gradients, 0)
