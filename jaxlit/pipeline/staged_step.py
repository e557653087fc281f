"""A training step as passes of microbatches.

`placement_of` finds the stage of each array, `Microbatched` compiles the programs of each stage and runs a batch, and
`stage_table` shows the stages.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.core.derived_steps import MicrobatchStep
from jaxlit.core.replica import abstract_batch, num_rows
from jaxlit.core.train_state import TrainState, sum_dtype
from jaxlit.errors import ArgumentError, ModuleError, StateError
from jaxlit.pipeline.cut import Cut, Input, Role, StateOnTwoStages, cut
from jaxlit.pipeline.executor import BatchRun, Microbatch, StageSet, estimate, forwards
from jaxlit.pipeline.placed import Placed
from jaxlit.pipeline.schedules import FusedTask, Kind, Schedule, Task, simulate
from jaxlit.pipeline.segments import holds_mark
from jaxlit.pipeline.stages import Stage, flow_of
from jaxlit.programs.costs import ProgramCost, count_flops
from jaxlit.programs.jaxpr import inline
from jaxlit.texts import leaf_name, size, table


class StageFacts(NamedTuple):
    """The parameters and the operations of a stage."""

    names: list[str]  # of the parameters that it holds
    params: int  # their elements
    flops: int  # of a forward pass of one microbatch


def stage_table(
    facts: Sequence[StageFacts], residuals: Sequence[int] | None, schedule: Schedule, num_microbatches: int
) -> str:
    """Return a row for each stage, and the predicted bubble.

    `residuals` has the bytes that a microbatch keeps on each stage for its backward pass, None until the step is built.
    """
    simulation = simulate(schedule, num_microbatches)
    rows = [("stage", "rank", "layers", "params", "GFLOP", "kept a microbatch", "live at most")]
    for stage, (names, params, flops) in enumerate(facts):
        rank, residual = schedule.rank_of(stage), "-" if residuals is None else size(residuals[stage])
        figures = f"{params:,}", f"{flops / 1e9:.3g}", residual, str(simulation.peak_live[rank])
        rows.append((str(stage), str(rank), layers_of(names), *figures))
    lines = "\n".join(table(rows, texts=3))
    return f"{lines}\npredicted bubble {simulation.bubble:.1%}: the part of their time in which ranks wait"


def layers_of(names: Sequence[str]) -> str:
    """Return the layers that parameters belong to, at most three: "embed, blocks[0] ... blocks[7]"."""
    layers = [*dict.fromkeys(name.split(".")[0] for name in names)] or ["-"]
    return ", ".join(layers) if len(layers) <= 3 else f"{layers[0]}, {layers[1]} ... {layers[-1]}"


class Placement(NamedTuple):
    """The ranks and stages of a module's arrays."""

    ranks: tuple[Any, Any, Any]  # of each array of (params, frozen, model_state)
    sizes: list[int] | None  # how many of the parts between marks each stage has; None without the user's step
    facts: list[StageFacts] | None  # of each stage; None without the user's step
    stages: dict[str, int]  # of each parameter by its name


def placement_of(schedule: Schedule, balance: Any, state: TrainState, closed: Any) -> Placement:
    """Return the placement of each array of a module, given the abstract state and the user's step.

    Where the step is not known, None, the arrays are distributed in their order, by their bytes.
    """
    module = state.variables
    leaves, treedef = jax.tree.flatten(module)
    names = [leaf_name(path[1:]) for path, _ in jax.tree_util.tree_leaves_with_path(module)]
    num_weights, sizes, facts = len(jax.tree.leaves(module[:2])), None, None
    if closed is None:
        num_bytes = np.array([x.size * getattr(x.dtype, "itemsize", 4) for x in leaves], float)
        parts = (np.cumsum(num_bytes) - num_bytes / 2) * schedule.num_stages / max(num_bytes.sum(), 1)
        stages = [min(int(x), schedule.num_stages - 1) for x in parts]
    else:
        cut, stages = _by_use(closed, schedule.num_stages, balance, num_weights, names)
        sizes, facts = cut.sizes, list[StageFacts]()
        for piece in cut.pieces:
            held = [i for i, stage in enumerate(stages[:num_weights]) if stage == piece.stage]
            flops = count_flops(cut.closed.jaxpr.replace(eqns=piece.eqns)).count
            facts.append(StageFacts([names[i] for i in held], sum(leaves[i].size for i in held), flops))
    ranks = jax.tree.unflatten(treedef, [schedule.rank_of(stage) for stage in stages])
    return Placement(ranks, sizes, facts, dict(zip(names[:num_weights], stages, strict=False)))


def _by_use(
    closed: Any, num_stages: int, balance: Any, num_weights: int, names: Sequence[str]
) -> tuple[Cut, list[int]]:
    """Return the user's step, cut, and the stage of each array of the module."""
    closed = inline(closed, also=holds_mark)
    jaxpr, count = closed.jaxpr, len(names)
    roles = [Role.WEIGHT] * num_weights + [Role.STATE] * (count - num_weights)
    arrays = zip(roles, jaxpr.invars, jaxpr.outvars[1:], strict=False)
    inputs = [Input(role, None if out is var else 1 + i) for i, (role, var, out) in enumerate(arrays)]
    inputs += [Input(Role.BATCH)] * (len(jaxpr.invars) - count)
    result = _cut(closed, inputs, num_stages, balance, names)
    # An array that nothing uses goes to the stage of the array before it.
    last = next((x for x in result.home_of[:count] if x is not None), 0)
    return result, [last := last if stage is None else stage for stage in result.home_of[:count]]


def _cut(closed: Any, inputs: Sequence[Input], num_stages: int, balance: Any, names: Sequence[str]) -> Cut:
    try:
        return cut(closed, inputs, num_stages, balance=balance)
    except StateOnTwoStages as error:
        raise StateError(
            f"Pipeline: {names[error.place]} is updated on stage {error.updated} and read on stage {error.read}: each "
            "microbatch would wait for the one before it to come through. Update it where it is read, or let one stage "
            "hold both."
        ) from None


class Microbatched:
    """A compiled training program of a `Pipeline`: a function of (leaves, batch) to what its `Program` returns.

    `finish` is the program after the last pass. `outputs` are those of the user's step: whether each has a row for each
    row of the batch.
    """

    def __init__(
        self, strategy: Any, name: str, passes: MicrobatchStep, specs: Sequence[Any], finish: Placed, outputs: Any
    ) -> None:
        self.strategy, self.name, self.passes, self._specs, self._finish = strategy, name, passes, specs, finish
        self._outputs = outputs
        if strategy.num_microbatches > 1 and outputs is not None:
            self._check_outputs()
        self.places, self.schedule = strategy.places, strategy.schedule
        self.ranks = [self.places.rank_at(x.sharding) for x in specs]
        self._sets: dict[Any, StageSet] = {}
        self._orders: dict[int, Sequence[Task | FusedTask]] = {}
        self._zeros_of: dict[tuple[int, ...], Callable[[], list[jax.Array]]] = {}
        self._shapes: list[Any] = []
        self.residuals: Callable[[], list[int]] | None = None  # bytes of a microbatch that each stage keeps
        self._combine = jax.jit(partial(reduce, passes.step.table.combine))

    def __call__(self, leaves: list[Any], batch: Any) -> tuple[Any, ...]:
        """Run the program."""
        microbatches, sets = self.prepare(leaves, batch)
        run = BatchRun(self, leaves, microbatches, sets)
        written, grads, tables, outputs = run.run(self._order(len(microbatches)))
        rows = [x.rows for x in microbatches]
        rows_of, treedef = jax.tree.flatten(self._outputs)
        pairs = zip(outputs, rows_of, strict=False)
        joined = treedef.unflatten([_join(x, rows, is_rows=is_rows) for x, is_rows in pairs])
        return self._finish(leaves, written, grads, self._combine(tables), joined)

    def prepare(self, leaves: Sequence[Any], batch: Any) -> tuple[list[Microbatch], list[StageSet]]:
        """Return the microbatches of a batch, and the programs of each; of the state only shapes are read."""
        self._shapes = self._shapes or [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
        microbatches = self._split(batch)
        for x in microbatches:
            if x.shape not in self._sets:
                self._sets[x.shape] = self._build(x, jax.tree.structure(batch))
        return microbatches, [self._sets[x.shape] for x in microbatches]

    def estimate(self, leaves: Sequence[Any], batch: Any) -> ProgramCost:
        """Return the cost of a call, given arrays or their shapes, dtypes and shardings."""
        return estimate(self, leaves, batch)

    def _check_outputs(self) -> None:
        """Refuse outputs that cannot be joined from those of microbatches: neither rows nor numbers to average."""
        pure = self.passes.step.pure
        known = jax.tree_util.tree_leaves_with_path(pure.trace_of("training").outputs)
        for (path, x), is_rows in zip(known, jax.tree.leaves(self._outputs), strict=True):
            if not is_rows and not jnp.issubdtype(x.dtype, jnp.inexact):
                raise ModuleError(
                    f"{pure.name}.training_step returns {leaf_name(path)}, {x.dtype}{list(x.shape)}, which has no row "
                    "for each of the batch's, and a pipeline runs the step once for each microbatch. Return rows, or "
                    "log the number: self.log(name, value, reduce_fx='sum')."
                )

    def _split(self, batch: Any) -> list[Microbatch]:
        leaves, rows = jax.tree.leaves(batch), num_rows(batch)
        count = min(self.strategy.num_microbatches, rows)
        ends = np.cumsum([0, *(rows // count + (i < rows % count) for i in range(count))])
        microbatches = []
        for begin, end in itertools.pairwise(ends):
            arrays = [x[begin:end] if np.ndim(x) and x.shape[0] == rows else x for x in leaves]
            factor = rows / (end - begin) if self.strategy.loss_reduction == "sum" else 1
            shape = tuple((np.shape(x), np.dtype(x.dtype)) for x in arrays), factor
            microbatches.append(Microbatch(arrays, int(end - begin), shape))
        return microbatches

    def _order(self, count: int) -> Sequence[Task | FusedTask]:
        """Return the tasks of so many microbatches."""
        if count not in self._orders:
            schedule = self.schedule
            try:
                self._orders[count] = simulate(schedule, count).order
            except ArgumentError:
                if count >= self.strategy.num_microbatches:
                    raise
                # A tail of fewer rows than microbatches, for which the schedule has no order.
                stages = range(schedule.num_stages)
                ahead = [Task(stage, mb, Kind.FWD) for mb in range(count) for stage in stages]
                back = [Task(stage, mb, Kind.BWD) for mb in range(count) for stage in reversed(stages)]
                self._orders[count] = [*ahead, *back]
        return self._orders[count]

    def place_batch(self, ranks: Sequence[int], groups: list[list[Any]]) -> list[list[Any]]:
        """Place each group of a microbatch's arrays on a rank, with the batch sharding of the strategy within it."""
        inner = self.strategy.inner

        def sharding(rank: int, x: Any, rows: int) -> Any:
            replicated = inner.mesh.size == 1 or rows % inner.num_replicas
            return self.places.on(inner.replicated if replicated else inner._batch_sharding(x), rank)

        shardings = [[sharding(rank, x, num_rows(xs)) for x in xs] for rank, xs in zip(ranks, groups, strict=True)]
        return self.places.put(groups, shardings)

    def _build(self, microbatch: Microbatch, treedef: Any) -> StageSet:
        strategy, passes, count = self.strategy, self.passes, len(self._shapes)
        replica = replace(strategy.replica, passes=microbatch.shape[1])
        shapes = abstract_batch(microbatch.leaves)

        def forward(*args: Any) -> Any:
            return passes.forward(replica, list(args[:count]), treedef.unflatten(args[count:]))

        closed = inline(jax.make_jaxpr(strategy.in_mesh(forward))(*self._shapes, *shapes), also=holds_mark)
        weights = {*jax.tree.leaves((passes.at.params, passes.at.frozen))}
        updates = {place: 1 + k for k, place in enumerate(passes.written)}
        inputs = [Input(Role.WEIGHT if i in weights else Role.STATE, update=updates.get(i)) for i in range(count)]
        inputs += [Input(Role.BATCH)] * len(shapes)
        names = [leaf_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(passes.at)]
        cut = _cut(closed, inputs, self.schedule.num_stages, strategy.sizes, names)
        flow = flow_of(closed.jaxpr, passes.params)
        stages = [Stage(cut, x, flow, passes, self._jit_of(x.stage), strategy.remat) for x in cut.pieces]
        inputs_of_step = [*self._shapes, *shapes]
        self.residuals = self.residuals or (lambda: [x.nbytes for _, _, x in forwards(stages, inputs_of_step)])
        return StageSet(cut, stages, count, len(passes.written))

    def _jit_of(self, stage: int) -> Callable[..., Any]:
        rank = self.schedule.rank_of(stage)
        return lambda fn, task, **options: self.places.jit(rank, fn, f"{self.name}_{task}_{stage}", **options)

    def sums(self, params: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
        """Return the shapes and dtypes of the sums of the gradients of parameters."""
        accum_dtype = self.strategy.accum_dtype
        return [jax.ShapeDtypeStruct(x.shape, sum_dtype(x, accum_dtype)) for x in params]

    def zeros(self, rank: int, params: Sequence[int]) -> list[jax.Array]:
        """Return zeros for the gradients of parameters, on a rank."""
        key = (rank, *params)
        if key not in self._zeros_of:
            shardings = [self.places.on(self._specs[i].sharding, rank) for i in params]
            shapes = self.sums(self._shapes[i] for i in params)

            def make() -> list[jax.Array]:
                return [jnp.zeros(x.shape, x.dtype) for x in shapes]

            self._zeros_of[key] = self.places.jit(rank, make, "zeros", out_shardings=shardings)
        return self._zeros_of[key]()


def _join(parts: list[Any], rows: list[int], *, is_rows: bool) -> Any:
    """Return rows concatenated, and other outputs averaged over rows."""
    if len(parts) == 1:
        return parts[0]
    if is_rows:
        return jnp.concatenate(parts)
    return jnp.asarray(sum(x * (n / sum(rows)) for x, n in zip(parts, rows, strict=True)), parts[0].dtype)
