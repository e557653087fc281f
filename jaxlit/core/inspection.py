"""Looks at the program of a step for mistakes that its numbers would not show.

First what a training or an evaluation step writes; then, from the relations between replicas, how what each of n
replicas computes becomes what one device computes, with refusals of what cannot.
"""

import itertools
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.core.attributes import RETURN_THE_LOSS, check_hidden
from jaxlit.core.log import Metric
from jaxlit.core.module import STAGES, watchers
from jaxlit.core.pure_module import Leaf, PureModule
from jaxlit.core.replica import Reduction, Replica
from jaxlit.errors import ModuleError, StateError
from jaxlit.programs import jaxpr
from jaxlit.programs.costs import Flops, count_flops
from jaxlit.programs.jaxpr import sources
from jaxlit.programs.relations import MEAN, MIXED, ROWS, SAME, TOTAL, UNKNOWN, ZERO, Relation, relate
from jaxlit.texts import is_key, named_leaves

_logger = logging.getLogger("jaxlit")


def inspect_step(pure: PureModule, replica: Replica, *args: Any, twice: bool = False) -> None:
    """Note what a training step writes to, and refuse or warn of a program that is not what its author means.

    Args:
        pure: The module, split.
        replica: What the step sees.
        *args: The arguments of the step's body, abstract.
        twice: Trace the step twice more, and warn if the programs differ.

    Raises:
        StateError: It writes to trained parameters in a lower precision than theirs.
        ModuleError: It updates parameters by an optimizer of its own, and returns a loss to train them by.
    """
    closed = pure.body("training", replica).trace(*args).jaxpr
    traced, trained = pure.trace_of("training"), len(jax.tree.leaves(args[0]))
    traced.program = closed
    _check_hidden(pure, "training", closed)
    traced.changed = written_to(pure, closed, *args[:3])
    precision = pure.precision
    if any(traced.changed[:trained]) and precision.compute is not None and precision.held is None:
        raise StateError(
            f"{pure.name}.training_step writes to {pure.leaves(*args[:3])[traced.changed.index(True)].name}, which is "
            f"trained, and under precision={precision.name!r} it sees it as {jnp.dtype(precision.compute).name}: each "
            "step would round the weights to that. Use precision='32-true'."
        )
    flops = count_flops(closed.jaxpr) if precision.compute is not None else Flops()
    wide = sum(count for kind, count in flops.by_dtype.items() if kind.startswith("float32"))
    if 2 * wide > flops.count:
        _logger.warning(
            f"Under precision={precision.name!r}, {wide / flops.count:.0%} of the matrix products of "
            f"{pure.name}.training_step take float32: a layer or constant of float32 makes what comes after it so. "
            f"Pass dtype=jnp.{jnp.dtype(precision.compute).name} to such layers, for example to each nnx.Embed."
        )
    gradients = jaxpr.reaches(closed.jaxpr, [0], gradient=True)
    reached = gradients[:trained]
    if traced.stepped is not None and any(traced.changed[:trained]) and any(reached):
        raise ModuleError(
            f"{pure.name}.training_step has updated parameters by self.{traced.stepped}, an optimizer of nnx. "
            f"{RETURN_THE_LOSS}"
        )
    if not pure.resumed:
        _warn_of_gradients(pure, gradients, args)
    # Two new functions: a trace of the body itself would be taken from the cache.
    traces = [jax.make_jaxpr(partial(pure.run, "training", replica, None))(*args) for _ in range(2 * twice)]
    texts = [[text for text, _ in jaxpr.described(x)] for x in traces]
    if twice and texts[0] != texts[1]:
        _logger.warning(
            f"{pure.name}.training_step gave a different program when it was traced again: it draws from numpy or "
            "random, or reads a clock. What it reads is frozen into the compiled step. Draw from nnx.Rngs, or pass it "
            "in the batch."
        )


def _warn_of_gradients(pure: PureModule, reached: Sequence[bool], args: Sequence[Any]) -> None:
    """Warn of parameters without a gradient, and of arrays in no Variable with one, which no optimizer trains."""
    changed, paths = pure.trace_of("training").changed, [path for path, _ in named_leaves(args[0])]
    used = [a or b for a, b in zip(reached, changed, strict=False)]  # a step may train its parameters itself
    if unused := [path for path, is_used in zip(paths, used, strict=False) if not is_used]:
        number = f"{len(unused)} of {len(paths)} parameters"
        if len(unused) == len(paths):
            number = "any parameter: nothing is trained"
        part = re.sub(r"\[.*", "", [unused[0], *unused[0].split(".")[-2:-1]][-1])
        _logger.warning(
            f"The loss of {pure.name}.training_step does not depend on {number}. The gradient is zero: "
            f"{_some(unused)}. Call the layer in the step, or leave it out of training: "
            f"jl.Optimizer(tx, wrt=nnx.All(nnx.Param, nnx.Not(nnx.PathContains({part!r}))))."
        )
    leaves, arrays = pure.leaves(*args[:3]), jax.tree.leaves(args[:3])
    plain = [
        leaf
        for leaf, x, is_reached, writes in zip(leaves, arrays, reached, changed, strict=False)
        if leaf.kind is None and is_reached and not writes and jnp.issubdtype(x.dtype, jnp.floating)
    ]
    if plain:
        of_flax = any(leaf.owner == "weightnorm" for leaf in plain)
        why = f" (nnx.WeightNorm holds its scale so in flax {flax.__version__})" * of_flax
        _logger.warning(
            f"The loss of {pure.name}.training_step has a gradient by arrays that are in no nnx.Variable, and stay as "
            f"they are: {_some([leaf.name for leaf in plain])}{why}. Hold what shall be trained in an nnx.Param, and a "
            "constant in an nnx.Variable."
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + f" and {len(names) - 5} more" * (len(names) > 5)


def _check_hidden(pure: PureModule, stage: str, closed: Any) -> None:
    """Refuse a step whose constants are arrays of Variables that nnx does not see in the module."""
    if not (constants := {id(x) for x in jaxpr.numbers_of(closed) if isinstance(x, jax.Array)}):
        return
    watcher = watchers.pop(id(pure.origin), None)  # the module as the trace has seen it, without newer arrays
    try:
        check_hidden(pure.origin, f"{pure.name}.{STAGES[stage].step}", lambda x: id(x) in constants)
    finally:
        if watcher is not None:
            watchers[id(pure.origin)] = watcher


def written_to(pure: PureModule, closed: Any, params: Any, frozen: Any, model_state: Any) -> tuple[bool, ...]:
    """Return for each leaf of the state whether a training step, given its program, writes to it."""
    parameters, count = (len(jax.tree.leaves(x)) for x in ((params, frozen), (params, frozen, model_state)))
    origins = _origins_of_state(pure, closed.jaxpr, [*range(count)], parameters)
    # nnx.scan and its like return every variable as a new value: what leaves as it came in was not written to.
    return tuple(x != i for i, x in enumerate(origins))


def _origins_of_state(pure: PureModule, program: Any, leaves: list[int], parameters: int) -> list[int | None]:
    """Return which input each of some leaves of the state is, of those that come after a step's loss."""
    compute = pure.precision.compute
    casts = () if compute is None else (jnp.dtype(jnp.float32), jnp.dtype(compute))
    exact, rounded = (jaxpr.origins(program, dtypes)[1:] for dtypes in ((), casts))
    # Only parameters are cast.
    return [(rounded if leaf < parameters else exact)[i] for i, leaf in enumerate(leaves)]


def inspect_evaluation(pure: PureModule, stage: str, loader: int | None, replica: Replica, *args: Any) -> None:
    """Refuse an evaluation step that writes to the module's state, but to metrics: only training changes it.

    The arguments are those of the step's body, abstract; the first three are the state.

    Raises:
        StateError: Naming the variable and what to do.
    """
    trace = pure.body(stage, replica, loader).trace(*args)
    closed, (_, (written, *_)) = trace.jaxpr, trace.out_info
    pure.trace_of(stage, loader).program = closed
    _check_hidden(pure, stage, closed)
    leaves, state, parameters = pure.leaves(*args[:3]), jax.tree.leaves(args[:3]), len(jax.tree.leaves(args[:2]))
    indices, carried = sorted(written), []  # the order of a dict's leaves
    for i, origin in zip(indices, _origins_of_state(pure, closed.jaxpr, indices, parameters), strict=True):
        if origin != i and leaves[i].owner == "metric" and stage != "predict" and not replica.splits:
            carried.append(i)
        # A key differs between replicas already.
        elif origin != i and not _is_scratch(leaves[i]) and not (is_key(state[i]) and replica.splits):
            raise StateError(
                f"{pure.name}.{STAGES[stage].step} wrote to {leaves[i].name}. Only training changes the state, so the "
                "write would be lost. Return the value, or log it; log an nnx metric itself: "
                f"self.log('acc', metric). Or write to the variable in on_{stage}_end. Draw random numbers from an "
                "nnx.Rngs that the module holds, whose streams differ between batches."
            )
    pure.trace_of(stage, loader).carried = tuple(carried)


def _is_scratch(leaf: Leaf) -> bool:
    """Return whether a step may use a variable as it likes: what it writes there is meant for itself."""
    scratch = (nnx.RngState, nnx.Cache, nnx.Intermediate)
    return leaf.owner == "normalizing" or (leaf.kind is not None and issubclass(leaf.kind, scratch))


class _Related(NamedTuple):
    """The relations of a step's results."""

    state: list[Relation]
    values: list[Relation]
    weights: list[Relation]
    outputs: list[Relation]


@dataclass(frozen=True)
class StepTraces:
    """The program of a step's body on one replica, traced for two numbers of rows: the replica's and the batch's.

    Attributes:
        program: The `ClosedJaxpr` of the body.
        longer: The same with more rows; None if the step could not be traced with them.
        arguments: Its arguments, of which the first three are the state and the fourth the batch; abstract.
        results: What it returns, abstract: (loss, (state, values, weights, outputs)).
        step: The name for messages, `Model.training_step`.
        metrics: What it logs, one for each of the values that it returns.
    """

    program: Any
    longer: Any
    arguments: tuple
    results: Any
    step: str
    metrics: Sequence[Metric]

    def relate(self, replica: Replica, state: Sequence[Relation] = (), *, alike: bool = False) -> _Related:
        """Follow the relations of the state's leaves, by default the same on every replica, to the results.

        Raises:
            StateError: The step draws the same random numbers on every replica.
        """
        treedef = jax.tree.structure(self.results)
        outputs, same_draws = [UNKNOWN] * treedef.num_leaves, False
        if self.longer is not None:
            arrays, batch, rest = map(jax.tree.leaves, (self.arguments[:3], self.arguments[3], self.arguments[4:]))
            rows = [ROWS if x.ndim else SAME for x in batch]
            inputs = [*(state or [SAME] * len(arrays)), *rows, *[SAME] * len(rest)]
            axis, count = str(replica.axis), replica.count
            outputs, same_draws = relate(self.program, self.longer, inputs, axis, count, alike=alike)
        if same_draws:
            raise StateError(
                f"{self.step} draws random numbers for its rows from a key that is the same on every replica: each "
                "would draw the same for its own rows. Draw from nnx.Rngs, or from a typed key (jax.random.key) that "
                "the module holds in an nnx.Variable; or use strategy='ddp', whose steps see the entire batch."
            )
        _, parts = treedef.unflatten(outputs)
        return _Related(*map(jax.tree.leaves, parts))


def reduction_of(
    traces: StepTraces,
    replica: Replica,
    rows_of: tuple[bool, ...],
    leaves: Sequence[Leaf] = (),
    changed: tuple[bool, ...] = (),
) -> Reduction:
    """Return how a step's state, values and outputs become those of the entire batch.

    Args:
        traces: The step's program.
        replica: What the step sees.
        rows_of: Which of its outputs have rows.
        leaves: What each leaf of a training step's state is.
        changed: Which of them the step writes to.

    Raises:
        ModuleError: The loss is a sum where a mean is meant or the other way round, or an output differs.
        StateError: A leaf that the step writes to does not follow from those of the replicas, or the step draws the
            same random numbers on every replica.
    """
    arrays = jax.tree.leaves(traces.arguments[:3])
    written = {i for i, is_changed in enumerate(changed) if is_changed}
    keys = {i for i in written if is_key(arrays[i])}
    written -= keys
    parts: set[int] = set()  # leaves that add up over replicas
    while True:  # a leaf that is in parts may make another one so
        related = traces.relate(replica, [TOTAL if i in parts else SAME for i in range(len(leaves))])
        # BatchNorm's statistics are the same on every replica already, or averaged on purpose.
        pairs = zip(leaves, related.state, strict=False)
        state = [MEAN if x == UNKNOWN and leaf.owner == "batchnorm" else x for leaf, x in pairs]
        unclear = {i for i in written if not _is_reducible(state[i], arrays[i].dtype)}
        if unclear <= parts:
            break
        parts |= unclear
    unclear |= {i for i in parts if state[i].as_total() != TOTAL}
    if unclear:
        why = "" if traces.longer else " (it could not be traced with more rows, which would show it)"
        raise StateError(
            f"{traces.step} writes a value to {leaves[min(unclear)].name} that depends on the rows of a batch, and "
            f"each of {replica.count} replicas sees its own rows: the program does not show a sum or a mean over all "
            f"rows{why}. Write a mean or a running sum over rows, log the value instead, or use strategy='ddp', whose "
            "steps see the entire batch."
        )
    if parts:
        _check_reads(traces, replica, leaves, parts, related)
    outputs = _outputs(related, traces, rows_of)
    _check_loss_and_values(traces.relate(replica, alike=True), traces, replica, is_training=bool(leaves))
    # Under loss_reduction="sum" the step has multiplied the loss already.
    loss = [MEAN] if leaves and replica.loss_reduction == "sum" else related.values[:1]
    return Reduction(
        state=tuple(SAME if i in keys else state[i] if i in written else None for i in range(len(changed))),
        parts=frozenset(parts),
        values=(*loss, *related.values[1:]),
        weights=tuple(related.weights),
        outputs=outputs,
    )


def _is_reducible(relation: Relation, dtype: Any) -> bool:
    """Return whether the batch's value follows from the replicas'."""
    if relation.kind in ("total", "same"):
        exact = relation.power >= 0 and dtype != jnp.bool_
        return relation == SAME or exact or bool(jnp.issubdtype(dtype, jnp.floating))
    return relation == ZERO


def _check_reads(
    traces: StepTraces, replica: Replica, leaves: Sequence[Leaf], parts: set[int], related: _Related
) -> None:
    """Refuse a step that uses what replicas count in parts: each would see its own part only."""
    # What adds up over replicas may depend on a part, but for the loss, which is differentiated on each of them.
    relations = [UNKNOWN, *itertools.chain(*related)]
    for i, (relation, used) in enumerate(zip(relations, sources(traces.program.jaxpr), strict=True)):
        read = [leaves[k].name for k in sorted(parts) if used >> k & 1]
        if read and i - 1 not in parts and relation != ZERO and relation.as_total().kind != "total":
            raise StateError(
                f"{traces.step} reads {read[0]}, which adds up over the rows that each of {replica.count} replicas "
                "sees: a replica has its part only until the step ends. Read it in a hook, log the metric itself by "
                "self.log(name, metric), or use strategy='ddp'."
            )


def _outputs(related: _Related, traces: StepTraces, rows_of: tuple[bool, ...]) -> tuple[Relation, ...]:
    """Return the relations of a step's outputs, or refuse one without rows that does not follow from the replicas'."""
    relations = []
    for (name, x), has_rows, relation in zip(named_leaves(traces.results[1][3]), rows_of, related.outputs, strict=True):
        if not has_rows and not _is_reducible(relation, x.dtype):
            # A number of each replica, such as a masked mean: the replicas' are averaged.
            floating = jnp.issubdtype(x.dtype, jnp.floating)
            if relation == ROWS or not floating or traces.step.endswith("predict_step"):
                raise ModuleError(
                    f"{traces.step} returned {name or 'an array'}, {x.dtype}{list(x.shape)}, which differs between the "
                    "replicas and has no row for each row of the batch. Return rows, log it with self.log, or use "
                    "strategy='ddp', whose steps see the entire batch."
                )
            relation = MEAN
        relations.append(relation)
    return tuple(relations)


def _check_loss_and_values(related: _Related, traces: StepTraces, replica: Replica, *, is_training: bool) -> None:
    """Refuse a loss that is plainly not what the strategy takes it for, and warn of what may not be the batch's."""
    loss, wanted = related.values[0] if is_training else ZERO, TOTAL if replica.loss_reduction == "sum" else MEAN
    if loss == MIXED or loss.as_total() not in (wanted, ZERO, UNKNOWN):
        kinds = {MIXED: "a sum and another term", TOTAL: "a sum", MEAN: "a mean"}
        raise ModuleError(
            f"{traces.step} returns {kinds.get(loss.as_total(), 'a scaled sum')} over the rows of a batch under "
            f"loss_reduction={replica.loss_reduction!r}, and each of {replica.count} replicas sees its own rows: their "
            "losses do not make that of the entire batch. Return a mean over the rows, or a sum under "
            "jl.strategies.ShardMapDDP(loss_reduction='sum'), or use 'ddp' or 'fsdp', whose steps see the entire batch."
        )
    # A mean that is weighted by what each replica counts, for example a masked one, is exact.
    unclear = [
        f"the logged {metric.name!r}" if metric.name != "loss" or not is_training else "the loss"
        for metric, value, weight in zip(traces.metrics, related.values, related.weights, strict=True)
        if metric.reduce_fx in ("mean", "sum") and value == UNKNOWN and weight.kind != "total"
    ]
    outputs = zip(named_leaves(traces.results[1][3]), related.outputs, strict=True)
    unclear += [f"the output {name!r}" if name else "what it returns" for (name, _), x in outputs if x == UNKNOWN]
    if unclear:
        _logger.warning(
            "%s: %s may differ from one device. The program does not show a mean or a sum over rows, or rows that "
            "depend on no other row, and each of %d replicas sees its own rows. strategy='ddp' sees the entire batch.",
            traces.step,
            ", ".join(unclear),
            replica.count,
        )
