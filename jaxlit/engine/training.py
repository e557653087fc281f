"""How a module is trained: the state that it needs and the programs of its steps, before an array of it exists."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax

from jaxlit import sharding
from jaxlit.core.extras import check_extras, eval_index
from jaxlit.core.fused_steps import FusedSteps
from jaxlit.core.inspection import inspect_step
from jaxlit.core.microbatch_step import MicrobatchStep
from jaxlit.core.module import TrainModule
from jaxlit.core.precision import cast
from jaxlit.core.pure_module import PureModule
from jaxlit.core.rates import Rates, rates_of
from jaxlit.core.state import TrainState
from jaxlit.core.step import TrainStep
from jaxlit.core.step_options import StepOptions
from jaxlit.engine.creation import check_trainable, init_state, undone_with_window
from jaxlit.engine.state import StateSpec, state_spec
from jaxlit.engine.step_traces import trace_step
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.program import EACH, ROWS, SHARED, Program


@dataclass(frozen=True, eq=False)
class Training:
    """How a module is trained under a strategy; nothing here needs the devices' memory.

    Attributes:
        pure: The module taken apart.
        options: How optimizer steps are taken.
        rates: The learning rates of a step.
        init: A function of the module's trained, frozen and other variables to the state of step 0.
        spec: What its arrays are; the metrics have columns once `trace` has seen the step.
    """

    pure: PureModule
    options: StepOptions
    rates: Rates
    init: Callable[..., TrainState]
    spec: StateSpec

    def trace(self, batch: Any, *, debug: bool = False) -> "Training":
        """Trace the step on a batch, and return the training with the metrics that it logs.

        Args:
            batch: The first batch, or its shapes and dtypes.
            debug: Trace it twice, which shows a step that draws at random from what jax does not know.
        """
        spec, inspect = self.spec, partial(inspect_step, self.pure, twice=debug)
        trace_step(self.pure, spec.strategy, spec.tree, ("training", None), inspect, batch)
        return replace(self, spec=spec.with_metrics(self.pure.table("training")))

    @cached_property
    def step(self) -> TrainStep:
        """The bodies of the steps."""
        spec = self.spec
        return TrainStep(
            *(self.pure, self.options, spec.layout),
            rates=self.rates,
            wrap=spec.wrap,
            constrain_grads=partial(sharding.constrain, shardings=spec.grad_shardings),
        )

    @cached_property
    def written(self) -> tuple[int, ...]:
        """The indices in the state of what the step writes to the module."""
        changed = self.pure.trace_of("training").changed
        return tuple(itertools.compress(jax.tree.leaves(self.spec.index.variables), changed))

    @cached_property
    def train(self) -> Program:
        """The program of an optimizer step."""
        spec, step = self.spec, self.step
        return Program(
            name="train_step",
            kind="train",
            fn=step.update,
            inputs=(spec.array_specs,),
            # The state is donated: a step overwrites the arrays that it was given, and so holds one copy, not two.
            outputs=(spec.array_specs, SHARED, self._loss, outputs_of(self.pure, "training")),
            donate=(0,),
            passes=MicrobatchStep(step, self.written),
        )

    @property
    def micro(self) -> Program:
        """The program of a batch that completes no accumulation window."""
        outputs = (self.spec.array_specs, EACH, self._loss, outputs_of(self.pure, "training"))
        passes = MicrobatchStep(self.step, self.written, "micro")
        given = {"name": "micro_step", "kind": "micro", "fn": self.step.micro}
        return replace(self.train, **given, passes=passes, outputs=outputs)

    def traced(self, functions: tuple[Callable[..., Any], ...]) -> Program:
        """Return the program of an optimizer step that also returns what these functions compute in it.

        Args:
            functions: Of (grads, updates, params, opt_state).
        """
        step, train = replace(self.step, traced=functions), self.train
        assert train.passes is not None
        passes = replace(train.passes, step=step)
        train = replace(train, name="train_step_traced", fn=step.update, passes=passes)
        return replace(train, outputs=(*train.outputs, SHARED))

    def fused(self, window: int, kept: Sequence[int]) -> Program:
        """Return the program of the optimizer steps of a `Stack` of batches.

        Args:
            window: How many batches an optimizer step takes.
            kept: The indices of what is kept where a window begins.
        """
        spec, (_, *rest) = self.spec, self.train.outputs
        is_row = jax.tree.map(lambda kind: kind is ROWS, rest[-1])
        backup = [spec.array_specs[i] for i in kept]
        counters: Any = spec.index.counters
        fn = FusedSteps(self.step, window, counters, tuple(kept), is_row)
        return replace(
            self.train,
            **{"name": "train_steps", "fn": fn, "passes": None},
            inputs=(spec.array_specs, backup),
            outputs=(spec.array_specs, backup, *rest),
        )

    @property
    def _loss(self) -> Any:
        return None if self.spec.index.window is None else EACH


def training_of(module: TrainModule, pure: PureModule, strategy: Strategy, options: StepOptions) -> Training:
    """Return how a module is trained.

    Args:
        module: The module; its arrays may be shapes and dtypes.
        pure: The same taken apart.
        strategy: The strategy, set up.
        options: How optimizer steps are taken.

    Raises:
        ModuleError: The optimizer, or a callback's arrays, do not fit the module.
    """
    variables, precision = pure.split(module), pure.precision
    # Refused now: an optimizer that cannot be set up fails with a trace of optax's insides otherwise.
    check_trainable(options.tx, variables[0], module)
    params = jax.eval_shape(partial(cast, dtype=precision.held), variables[0])
    rates = rates_of(options.optimizer, params, options.parts)
    options = replace(options, extras=check_extras(options.extras, params, options.tolerates))
    # Each replica adds up its own window: one reduction an optimizer step, not one a batch.
    replicas = strategy.replica.stack_size if options.accumulate > 1 else 0
    init = partial(init_state, options.tx, replicas, precision, extras=options.extras)
    if options.nan_policy == "skip" and options.accumulate > 1:
        undone = undone_with_window(pure, strategy, jax.eval_shape(init, *variables), options.example)
        init = partial(init, undone=undone)
    spec = state_spec(pure, strategy, init, variables, options.example)
    eval_params = eval_index(options.extras, spec.index, spec.arrays)
    return Training(pure, options, rates, init, replace(spec, eval_params=eval_params))


def outputs_of(pure: PureModule, stage: str, loader: int | None = None) -> Any:
    """Return the kind of each output of a stage's step, which was traced."""
    traced = pure.trace_of(stage, loader)
    treedef = jax.tree.structure(traced.outputs)
    return treedef.unflatten([ROWS if is_row else SHARED for is_row in traced.rows_of])
