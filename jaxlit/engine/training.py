"""How a module is trained: the state that it needs and the programs of its steps, before an array of it exists.

After `Training` and `training_of`: `Diagnosis`, which runs batches again after a bad step, and how a user's step is
traced before it is compiled.
"""

import contextlib
import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from operator import and_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlit import sharding
from jaxlit.core.derived_steps import FusedSteps, MicrobatchStep
from jaxlit.core.inspection import SAY_WEIGHT, Measure, Seen, StepTraces, inspect_step, reduction_of
from jaxlit.core.module import STAGES, TrainModule
from jaxlit.core.optimizer import averages_of
from jaxlit.core.parts import Rates, held_in, rates_of
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica, identity, is_row, num_rows, with_rows
from jaxlit.core.step import TrainStep
from jaxlit.core.train_state import StepOptions, TrainState, cast, check_extras, eval_index
from jaxlit.distributed.team import fetch
from jaxlit.engine.compiled_program import CompiledProgram
from jaxlit.engine.creation import check_rounding, check_trainable, init_state, undone_with_window
from jaxlit.engine.state import State, StateSpec, state_spec
from jaxlit.programs.jaxpr import LINEAR, growing, run_drawing_alike, sources
from jaxlit.programs.scans import scanned_dims
from jaxlit.strategies.base import EACH, ROWS, SHARED, Program, ReplicatedBatch, Strategy
from jaxlit.texts import is_key, named_leaves

_logger = logging.getLogger("jaxlit")


@dataclass(frozen=True, eq=False)
class Training:
    """How a module is trained under a strategy; nothing here needs the devices' memory."""

    pure: PureModule  # the module, split
    options: StepOptions  # how optimizer steps are taken
    rates: Rates  # the learning rates of a step
    # a function of the module's trained, frozen and other variables to the state of step 0
    init: Callable[..., TrainState]
    spec: StateSpec  # what its arrays are; the metrics have columns once `trace` has seen the step
    held: frozenset[str] = frozenset()  # the names of parameters that the epoch does not train

    def trace(self, batch: Any, arrays: tuple[TrainState, Any] | None = None, *, debug: bool = False) -> "Training":
        """Trace the step on a batch or its shapes, and return the training with the metrics that it logs.

        Args:
            batch: The batch.
            arrays: The state, and the batch as the strategy has placed it, see `trace_step`.
            debug: Trace the step twice more, which shows one that draws at random from what jax does not know.
        """
        spec, inspect = self.spec, partial(inspect_step, self.pure, twice=debug)
        trace_step(self.pure, spec, ("training", None), inspect, batch, arrays)
        is_weighted, replica = self.pure.trace_of("training").is_weighted, spec.strategy.replica
        has_parts = self.options.accumulate > 1 or replica.passes > 1
        if has_parts and arrays is not None and not (is_weighted or replica.splits or self.pure.resumed):
            _check_mean(self.pure, spec, batch, arrays)
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
            held=self.held,
        )

    @cached_property
    def written(self) -> tuple[int, ...]:
        """The indices in the state of what the step writes to the module."""
        changed = self.pure.trace_of("training").changed
        return tuple(itertools.compress(jax.tree.leaves(self.spec.index.variables), changed))

    @cached_property
    def constant(self) -> list[int]:
        """The indices of the module's arrays that no step writes, without the random keys and counts of a seed."""
        spec = self.spec
        written = self.written if ("training", None) in self.pure.traced else ()  # before a trace no step has run
        changing = {*jax.tree.leaves(spec.index.params), *spec.layout.key_impls, *written}
        leaves = zip(jax.tree.leaves(spec.index.variables), self.pure.leaves(*spec.tree.variables), strict=True)
        return [i for i, x in leaves if i not in changing and not issubclass(x.kind or object, nnx.RngState)]

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
        return replace(self.train, name="micro_step", kind="micro", fn=self.step.micro, passes=passes, outputs=outputs)

    def traced(self, functions: tuple[Callable, ...]) -> Program:
        """Return the program of an optimizer step that also returns results of (grads, updates, params, opt_state)."""
        step, train = replace(self.step, traced=functions), self.train
        assert train.passes is not None
        passes = replace(train.passes, step=step)
        return replace(train, name="train_step_traced", fn=step.update, passes=passes, outputs=(*train.outputs, SHARED))

    def fused(self, window: int, saved: Sequence[int]) -> Program:
        """Return the program of the optimizer steps of a `Stack` of batches.

        Args:
            window: How many batches an optimizer step takes.
            saved: The indices of what is backed up where a window begins.
        """
        spec, (_, *rest) = self.spec, self.train.outputs
        is_row = jax.tree.map(lambda kind: kind is ROWS, rest[-1])
        backup = [spec.array_specs[i] for i in saved]
        counters: Any = spec.index.counters
        return replace(
            self.train,
            name="train_steps",
            fn=FusedSteps(self.step, window, counters, tuple(saved), is_row),
            passes=None,
            inputs=(spec.array_specs, backup),
            outputs=(spec.array_specs, backup, *rest),
        )

    @property
    def _loss(self) -> Any:
        return None if self.spec.index.window is None else EACH


def training_of(module: TrainModule, pure: PureModule, strategy: Strategy, options: StepOptions) -> Training:
    """Return how a module, whose arrays may be shapes and dtypes, is trained; the strategy is set up."""
    # Without shardings: only equal types share one trace of the optimizer's first state.
    variables = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.typeof(x).dtype), pure.split(module))
    stacked: dict[str, int] = {}  # how many dims of stacked layers each parameter has; empty unless the optimizer asks
    options = options.for_params(variables[0], stacked)
    params = jax.eval_shape(partial(cast, dtype=pure.precision.held), variables[0])
    # Refused now: an optimizer that cannot be set up fails with a trace of optax's insides otherwise.
    check_trainable(options.optimizer.tx, params, module)
    check_rounding(options.optimizer.tx, params, module)
    options = replace(options, extras=check_extras(options.extras, params, options.tolerates))
    # Each replica adds up its own window: one reduction an optimizer step, not one a batch.
    replicas = strategy.replica.stack_size if options.accumulate > 1 else 0
    init = partial(init_state, options.optimizer.tx, replicas, pure.precision, extras=options.extras)
    if stacked and options.example is not None:  # only then, as the step is traced for it
        program = strategy.step_program(jax.eval_shape(init, *variables), pure, options.example)
        names, end = [name for name, _ in named_leaves(params)], len(program.jaxpr.invars) - 3  # the counters
        of_layers = scanned_dims(program, range(len(names)), range(end - len(jax.tree.leaves(options.example)), end))
        stacked.update({names[i]: len(x) for i, x in of_layers.items()})
    first_state = jax.make_jaxpr(options.optimizer.tx.init)(params).jaxpr
    options = replace(options, holds_weights=any(sources(first_state)))
    rates = rates_of(options.optimizer, params, options.parts)
    # A window is put back where a step is left out: after an overflow, or by the policy.
    if options.accumulate > 1 and (options.nan_policy == "skip" or pure.precision.first_scale() is not None):
        undone = undone_with_window(pure, strategy, jax.eval_shape(init, *variables), options.example)
        init = partial(init, undone=undone)
    spec = state_spec(pure, strategy, init, variables, options.example)
    eval_params = eval_index(options.extras, spec.index, spec.arrays)
    if eval_params is spec.index.params:  # else a callback has other averages
        spec = replace(spec, averages=averages_of(spec.index.opt_state))
    spec = replace(spec, eval_params=eval_params)
    return Training(pure, options, rates, init, spec, held_in(options.parts, 0))


def outputs_of(pure: PureModule, stage: str, loader: int | None = None) -> Any:
    """Return the kind of each output of a stage's step, which was traced."""
    traced = pure.trace_of(stage, loader)
    treedef = jax.tree.structure(traced.outputs)
    return treedef.unflatten([ROWS if is_row else SHARED for is_row in traced.rows_of])


class Diagnosis:
    """Takes the gradients of batches, one after the other, from the state as it is, and changes nothing.

    Its program is compiled when it is first needed.
    """

    def __init__(self, training: Training, state: State, compile: Callable[[Program], CompiledProgram]) -> None:
        train, step, spec = training.train, training.step, training.spec
        counters: Any = spec.index.counters
        passes = MicrobatchStep(step, training.written, "diagnose")
        self._state, self._step, self._written = state, step, [counters, *training.written]
        outputs = ([spec.array_specs[i] for i in self._written], SHARED, SHARED)
        program = replace(train, name="diagnose", fn=partial(step.diagnose, self._written), outputs=outputs)
        self._compile = partial(compile, replace(program, donate=(), passes=passes))

    def __call__(self, batches: Iterable[Any]) -> list[tuple[float, list[str]]]:
        """Return for each placed batch its loss, and the parameters whose gradient is not finite, by their paths."""
        program, names, leaves, results = self._compile(), self._names, list(self._state.leaves), []
        for batch in batches:
            written, table, bad = program.run(leaves, batch)
            for i, x in zip(self._written, written, strict=True):
                leaves[i] = x
            loss = self._step.table.read(np.asarray(table))[0]
            results.append((loss, list(itertools.compress(names, np.asarray(bad)))))
        return results

    def changed_arrays(self, bad: Collection[str] | None) -> list[str]:
        """Return the arrays of the optimizer's state that a bad step whose loss was finite has changed.

        Args:
            bad: The parameters whose gradients were not finite; None if unknown, for all that it may have changed.
        """
        spec, names = self._state.spec, self._names
        if spec.index.loss_scale is not None:  # such a step changes nothing
            return []
        known = {i for i, name in enumerate(names) if bad is not None and name in bad}
        leaves = zip(jax.tree.leaves(spec.index.opt_state), self._step.needed_grads(spec.tree), strict=True)
        return [spec.entries[i][0] for i, needs in leaves if len(needs) < len(names) and not needs & known]

    @property
    def _names(self) -> list[str]:
        spec = self._state.spec
        return [spec.entries[i][0].removeprefix("module.") for i in jax.tree.leaves(spec.index.params)]


def trace_step(
    pure: PureModule,
    spec: StateSpec,
    key: tuple[str, int | None],
    inspect: Callable[..., None],
    batch: Any,
    arrays: tuple[TrainState, Any] | None = None,
) -> None:
    """Trace a stage's step as it will run, and note in `pure` what it does.

    `key` is the stage, and the loader for a step that asks for it. `inspect` looks at the step, given the replica and
    the arguments of its body. `arrays` are the state, and the first batch as the strategy has placed it, if there are
    arrays.
    """
    states, strategy = (*spec.tree.variables, spec.tree.counters), spec.strategy
    (stage, loader), replica = key, strategy.replica
    batch = replica.part_of(batch) if stage == "training" else batch
    traces = None
    if replica.splits and replica.count > 1:
        traces = _trace_replicas(pure, replica, states, key, batch)
    strategy.trace(lambda replica, *args: inspect(replica, *_arguments(*args)), states, batch, spec.used)
    if traces is None:
        return
    traced, bits, measure, why = pure.trace_of(stage, loader), traces.dependence(), None, ""
    if traces.longer is None:
        why = "it could not be traced with more rows, which would show it"
    elif arrays is not None:
        try:
            wanted = [*itertools.compress(traces.places[0], traced.changed), *itertools.chain(*traces.places[1:])]
            measure = _measuring(strategy, traces, bits, batch, arrays, wanted)
            measure(frozenset(), None)
        except Exception as error:  # of what jax.vmap or the devices cannot run
            measure, why = None, f"it could not be run outside of training: {str(error).splitlines()[0]}"
    if why:
        _logger.warning("%s: what %d replicas compute is not checked: %s.", traces.step, replica.count, why)
    leaves = pure.leaves(*states[:3]) if stage == "training" else []
    with np.errstate(invalid="ignore", divide="ignore"):
        traced.reduction = reduction_of(traces, leaves, traced.changed, measure, why)


def _trace_replicas(
    pure: PureModule,
    replica: Replica,
    states: Any,
    key: tuple[str, int | None],
    batch: Any,
    under: Callable[[Callable], Callable] = identity,
) -> StepTraces:
    """Return the program of a step for the rows of one replica, and for those of the batch, on a single replica."""
    (stage, loader), rows = key, -(-num_rows(batch) // replica.count)
    states = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), states)

    def run(*args: Any) -> Any:
        return pure.body(stage, replica, loader)(*_arguments(*args))[1]

    def trace(replicas: int, rows: int) -> tuple[Any, Any]:
        axis_env = [(str(replica.axis), replicas)]
        return jax.make_jaxpr(under(run), axis_env=axis_env, return_shape=True)(*states, with_rows(batch, rows))

    program, results = trace(replica.count, rows)
    longer, rows_of = None, pure.trace_of(stage, loader).rows_of
    with contextlib.suppress(Exception):  # the step may take this very number only
        longer, more = trace(1, rows * replica.count)
        pairs = zip(jax.tree.leaves(results[3]), jax.tree.leaves(more[3]), strict=True)
        have_rows = [is_row(y, rows * replica.count) and x.shape[1:] == y.shape[1:] for x, y in pairs]
        rows_of = pure.trace_of(stage, loader).rows_of = tuple(map(and_, rows_of, have_rows))
    step, traced = f"{pure.name}.{STAGES[stage].step}", pure.trace_of(stage, loader)
    metrics, is_weighted = traced.table.metrics, traced.is_weighted
    rtol = 2e-3 if pure.precision.compute is None else 2e-2
    arguments = (*states, with_rows(batch, rows))
    return StepTraces(replica, program, longer, arguments, results, rows_of, step, metrics, rtol, is_weighted)


def _check_mean(pure: PureModule, spec: StateSpec, batch: Any, arrays: tuple[TrainState, Any]) -> None:
    """Warn if a loss is no mean over rows, where gradients of several parts of a batch are averaged by their rows."""
    strategy, states = spec.strategy, (*spec.tree.variables, spec.tree.counters)
    replica = replace(strategy.replica, axis="parts", count=2, passes=1, constrain_batch=identity)
    loss = None
    # Nothing is said of a step that takes no other number of rows, or of what jax.vmap or the devices cannot run.
    with contextlib.suppress(Exception), np.errstate(invalid="ignore", divide="ignore"):
        apart = replace(pure, traced={}, told=set(pure.told), _bodies={})  # its traces do not count
        traces = _trace_replicas(apart, replica, states, ("training", None), batch, strategy.in_mesh)
        place, bits = traces.places[1][0], traces.dependence()
        measure = partial(_measuring, strategy, traces, bits, batch, arrays, [place])
        # First only how it sums up what it computes of rows, which compiles next to nothing, and shows most means.
        grows = [growing(*x) or {} for x in itertools.permutations((traces.program.jaxpr, traces.longer.jaxpr))]
        known = [{x: 1.5 + np.cos(i) / 2 for i, x in enumerate(of) if not is_key(x.aval)} for of in grows]
        if bits[place] != LINEAR or not measure(known)(frozenset(), None)[place].fits("mean"):
            loss = measure()(frozenset(), None)[place]
    if loss is not None and not loss.fits("mean"):
        _logger.warning(
            "%s.training_step: on the first batch the loss is not a mean over rows. The batches or microbatches of an "
            "optimizer step count by their rows, so that the step may differ from that of one large batch. %s",
            *(pure.name, SAY_WEIGHT),
        )


def _measuring(
    strategy: Strategy,
    traces: StepTraces,
    bits: Sequence[int],
    example: Any,
    arrays: tuple[TrainState, Any],
    wanted: Sequence[int],
    known: Sequence[dict[Any, float]] = ({}, {}),
) -> Measure:
    """Return the `measure` of `reduction_of`, given how results depend on rows, and the batch's shapes.

    `arrays` is as in `trace_step`, `known` as in `run_drawing_alike`; `wanted` are the places of results to measure.
    """
    state, batch = arrays
    n, rows, axis = traces.replica.count, num_rows(example), str(traces.replica.axis)
    share, leaves = -(-rows // n), jax.tree.leaves((*state.variables, state.counters))
    (states, *others), shapes, both = traces.places, jax.tree.leaves(example), (traces.program, traces.longer)
    wanted = [i for i in wanted if i not in states or not is_key(leaves[i])]
    spread = strategy.replica.constrain_batch
    if strategy.per_replica:
        spread = partial(sharding.constrain, shardings=sharding.rows(strategy.mesh, axis))

    def first_batch(x: jax.Array, shape: jax.ShapeDtypeStruct, order: jax.Array) -> jax.Array:
        if not shape.ndim:
            return x.reshape(-1)[0]
        # Each replica has all rows, or its own in a dim of replicas or without one, perhaps of a stack of batches.
        is_replicated = isinstance(batch, ReplicatedBatch)
        x = x.reshape(-1, *shape.shape)[0] if is_replicated else x.reshape(rows, -1, *shape.shape[1:])[:, 0]
        return spread(x[order])  # no device has all of them

    def run(before: list[list[Any]], batch: Any, order: jax.Array, moves: jax.Array) -> list[list[Any]]:
        x = [first_batch(x, shape, order) for x, shape in zip(jax.tree.leaves(batch), shapes, strict=True)]
        results = []
        for program, numbers, (*variables, counters), size in zip(both, known, before, (n, 1), strict=True):
            later = jnp.where(moves[-1] > 0, counters.at[:2].set(1000), counters)  # the step and the epoch
            state = [*(_moved(y, i, moves[i]) for i, y in enumerate(variables)), later]
            split = [y.reshape(size, -1, *y.shape[1:]) if y.ndim else y for y in x]
            step = partial(run_drawing_alike, program, numbers, *state)
            leaves = jax.vmap(step, [0 if y.ndim else None for y in split], axis_name=axis, axis_size=size)(*split)
            results.append([(leaves[i] if bits[i] else leaves[i][:1], state[i] if i in states else 0) for i in wanted])
        return results

    program = strategy.on_state(run)

    @cache
    def measure(parts: frozenset[int], repeated: int | None) -> list[Any]:
        # Each replica's part of a sum is 1, which shows what a step does to a part.
        first, count = (0, rows) if repeated is None else (repeated * share, share)
        order = (first + np.arange(n * share) % count) % rows
        before = [[jnp.full_like(x, k) if i in parts else x for i, x in enumerate(leaves)] for k in (1, n)]
        seen = dict.fromkeys(range(others[-1].stop))
        for size in (0.3, 0):  # as the state may be after some steps, where what begins at 0 shows; then as it is
            moves = np.array([0 if i in parts else size for i in range(len(leaves))], np.float32)
            results = jax.tree.map(fetch, program(before, batch, order, moves))
            for i, (x, old), (y, old_whole) in zip(wanted, *results, strict=True):
                values = np.broadcast_to(x, (n, *x.shape[1:])), y[0]
                seen[i] = Seen(*values, traces.rtol, (old, old_whole), seen[i])
        return list(seen.values())

    return measure


def _moved(x: jax.Array, i: int, size: jax.Array) -> jax.Array:
    """Return an array with numbers of a size added."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return x + (size * jnp.cos(jnp.arange(x.size) + i)).reshape(x.shape).astype(x.dtype)


def _arguments(params: Any, frozen: Any, model_state: Any, counters: Any, batch: Any) -> Any:
    return (params, frozen, model_state, batch, *counters[:3])
