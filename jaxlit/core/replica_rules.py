"""Finds out how what n replicas compute becomes what one device computes, and refuses what cannot."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlit.core.leaves import Leaf
from jaxlit.core.log import Metric
from jaxlit.core.reduction import Sharing
from jaxlit.core.replica import Replica
from jaxlit.errors import ModuleError, StateError
from jaxlit.leaf_names import is_key, leaf_name
from jaxlit.programs import jaxpr
from jaxlit.programs.by_rows import same_computation
from jaxlit.programs.relate import relate
from jaxlit.programs.relation import MEAN, ROWS, SAME, TOTAL, UNKNOWN, ZERO, Relation, row_dims

_logger = logging.getLogger("jaxlit")


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
        programs: Every program that was traced, with its number of rows.
    """

    program: Any
    longer: Any
    arguments: tuple[Any, ...]
    results: Any
    step: str
    metrics: Sequence[Metric]
    programs: list[tuple[int, Any]]

    @property
    def state(self) -> list[Any]:
        """The state's leaves, abstract."""
        return jax.tree.leaves(self.arguments[:3])

    def relate(self, state: Sequence[Relation], replica: Replica, *, alike: bool = False) -> "_Related":
        """Follow the relations of the state's leaves to the results."""
        treedef = jax.tree.structure(self.results)
        outputs, same_draws = [UNKNOWN] * treedef.num_leaves, False
        if self.longer is not None:
            batch, rest = self.arguments[3], self.arguments[4:]
            inputs = [*state, *(ROWS if x.ndim else SAME for x in jax.tree.leaves(batch)), *(SAME for _ in rest)]
            related = relate(self.program, self.longer, inputs, str(replica.axis), replica.count, alike=alike)
            outputs, same_draws = related.outputs, related.same_draws
        loss, parts = treedef.unflatten(outputs)
        flat = [jax.tree.leaves(x, is_leaf=_is_relation) for x in parts]
        return _Related(loss, *flat, same_draws=same_draws)


@dataclass(frozen=True)
class _Related:
    loss: Relation
    state: list[Relation]
    values: list[Relation]
    weights: list[Relation]
    outputs: list[Relation]
    same_draws: bool


def _is_relation(x: Any) -> bool:
    return isinstance(x, Relation)


def share_evaluation(traces: StepTraces, replica: Replica, rows_of: tuple[bool, ...]) -> Sharing:
    """Return how an evaluation step's values and outputs become those of the whole batch.

    Raises:
        ModuleError: An output cannot.
        StateError: It draws the same random numbers on every replica.
    """
    found = traces.relate([SAME] * len(traces.state), replica)
    _check_draws(found, traces.step)
    outputs = _outputs(found, traces, rows_of)
    _warn_of_unclear(traces.relate([SAME] * len(traces.state), replica, alike=True), traces, replica)
    return Sharing(values=tuple(found.values), weights=tuple(found.weights), outputs=outputs)


def share_training(
    traces: StepTraces, replica: Replica, leaves: list[Leaf], changed: tuple[bool, ...], rows_of: tuple[bool, ...]
) -> Sharing:
    """Return how a training step's state, values and outputs become those of the whole batch.

    Args:
        traces: The step's program.
        replica: What the step sees.
        leaves: What each leaf of the state is.
        changed: Which of them the step writes to.
        rows_of: Which of its outputs have rows.

    Raises:
        ModuleError: The loss is a sum where a mean is meant or the other way round, or an output differs.
        StateError: A leaf that the step writes to cannot be told from what replicas have, or it draws the same random
            numbers on every replica.
    """
    dtypes = [x.dtype for x in traces.state]
    written = [i for i, was in enumerate(changed) if was and not is_key(jax.ShapeDtypeStruct((), dtypes[i]))]
    spreads = _spreads(leaves, changed, traces.relate([SAME] * len(leaves), replica).state)
    parts: set[int] = set()
    while True:  # each turn adds to the parts
        found = traces.relate(_inputs(len(leaves), parts, spreads), replica)
        state = _known(found.state, leaves)
        in_spread = {i for _, mean, m2 in spreads for i in (mean, m2)}
        odd = {i for i in written if i not in in_spread and not _can_be_whole(state[i], dtypes[i])}
        if odd <= parts:
            break
        parts |= odd
    _check_draws(found, traces.step)
    alike = traces.relate([SAME] * len(leaves), replica, alike=True)
    _check_loss(alike.loss, replica, traces.step)
    unclear = odd | {i for i in parts if not state[i].is_total} | {count for count, *_ in spreads if count not in parts}
    if unclear:
        raise _cannot_be_whole(traces, leaves[min(unclear)].name, replica)
    _check_reads(traces, replica, leaves, parts, spreads, found)
    _warn_of_unclear(alike, traces, replica)
    keys = {i for i, was in enumerate(changed) if was} - set(written)
    relations = tuple(state[i] if i in written else SAME if i in keys else None for i in range(len(leaves)))
    # Under loss_reduction="sum" the step has multiplied the loss already.
    loss = MEAN if replica.loss_reduction == "sum" else found.values[0]
    held = frozenset(parts) | {i for places in spreads for i in places}
    return Sharing(
        state=relations,
        parts=held,
        spreads=spreads,
        values=(loss, *found.values[1:]),
        weights=tuple(found.weights),
        outputs=_outputs(found, traces, rows_of),
    )


def warn_of_rows(traces: StepTraces, replica: Replica) -> None:
    """Warn if a step is another computation for another number of rows, which two programs need not show."""
    if not same_computation(traces.programs):
        counts = ", ".join(map(str, sorted({rows for rows, _ in traces.programs})))
        _logger.warning(
            "%s depends on the number of rows: its programs for %s rows differ in more than their shapes. Each of %d "
            "replicas sees only its own rows of a batch, so the result differs from one device. Compute the same for "
            "every number of rows, or use strategy='ddp', which sees the entire batch.",
            traces.step,
            counts,
            replica.count,
        )


def _inputs(count: int, parts: set[int], spreads: tuple[tuple[int, int, int], ...]) -> list[Relation]:
    inputs = [SAME] * count
    for i in parts:
        inputs[i] = TOTAL
    for _, mean, m2 in spreads:
        inputs[mean] = inputs[m2] = UNKNOWN
    return inputs


def _spreads(leaves: list[Leaf], changed: tuple[bool, ...], state: list[Relation]) -> tuple[tuple[int, int, int], ...]:
    """Return the places of (count, mean, m2) of each Welford that a step gives rows."""
    groups: dict[int, dict[str, int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.owner == "welford":
            groups.setdefault(leaf.group, {})[leaf.name.rpartition(".")[2]] = i
    found = [(g["count"], g["mean"], g["m2"]) for g in groups.values()]
    return tuple(places for places in found if any(changed[i] and state[i] not in (SAME, ZERO) for i in places))


def _known(state: list[Relation], leaves: list[Leaf]) -> list[Relation]:
    """Return the relations of the state, with what is known of BatchNorm."""
    state = list(state)
    for i, leaf in enumerate(leaves):
        # Synchronised statistics are the same on every replica already, others are averaged on purpose.
        if leaf.owner == "batchnorm" and state[i] == UNKNOWN:
            state[i] = MEAN
    return state


def _can_be_whole(relation: Relation, dtype: Any) -> bool:
    """Return whether the whole value follows from what the replicas have."""
    if relation in (SAME, ZERO):
        return True
    if relation.kind == "total" or relation.kind == "same":
        return bool(jnp.issubdtype(dtype, jnp.floating)) or (relation.power >= 0 and dtype != jnp.bool_)
    return False


def _check_draws(found: _Related, step: str) -> None:
    if found.same_draws:
        raise StateError(
            f"{step} draws random numbers for its rows from a key that is the same on every replica: each would draw "
            "the same for its own rows. Draw from nnx.Rngs, or from a typed key (jax.random.key) that the module holds "
            "in an nnx.Variable; or use strategy='ddp', whose steps see the whole batch."
        )


def _check_loss(loss: Relation, replica: Replica, step: str) -> None:
    """Refuse a loss that is plainly not what the strategy takes it for, and tell of one that may not be."""
    wanted = TOTAL if replica.loss_reduction == "sum" else MEAN
    if loss.kind in ("unknown", "rows"):
        _logger.warning(
            "%s: the loss may not be a %s over the rows of a batch. jaxlit treats what each of %d replicas returns for "
            "its own rows as one. Use strategy='ddp' to compute the loss from the entire batch.",
            step,
            replica.loss_reduction,
            replica.count,
        )
    if loss.as_total().kind not in ("total", "mixed") or loss.as_total() == wanted:
        return
    if loss.kind == "mixed":
        raise ModuleError(
            f"{step} returns a sum over the rows of a batch and, added to it, a term of another size: the losses that "
            f"{replica.count} replicas have for their own rows make no loss of the whole batch. Return a mean over the "
            "rows and the term, or use strategy='ddp', whose steps see the whole batch."
        )
    if wanted == TOTAL:
        raise ModuleError(
            f"{step} returns a mean over the rows of a batch under loss_reduction='sum': the losses of "
            f"{replica.count} replicas would be added up. Return a sum over the rows, or leave loss_reduction out."
        )
    raise ModuleError(
        f"{step} returns a sum over the rows of a batch, and each of {replica.count} replicas sees its own rows: "
        "their mean is not the loss of the whole batch. Return a mean over the rows, or say it by "
        "jl.strategies.ShardMapDDP(loss_reduction='sum'), or train by 'ddp' or 'fsdp', which see the whole batch."
    )


def _warn_of_unclear(found: _Related, traces: StepTraces, replica: Replica) -> None:
    """Warn of logged values and outputs that may not be those of the whole batch."""
    # A mean that is weighted by what each replica counts, for example a masked one, is exact.
    logged = zip(traces.metrics, found.values, found.weights, strict=True)
    unclear = [
        f"the logged {metric.name!r}"
        for metric, value, weight in logged
        if metric.name != "loss" and metric.reduce_fx in ("mean", "sum") and value == UNKNOWN and weight.kind == "same"
    ]
    named = jax.tree_util.tree_leaves_with_path(traces.results[1][3])
    outputs = [leaf_name(path) for (path, _), relation in zip(named, found.outputs, strict=True) if relation == UNKNOWN]
    unclear += [f"the output {name!r}" if name else "what it returns" for name in outputs]
    if unclear:
        _logger.warning(
            "%s: %s may differ from one device. The program does not show a mean or a sum over rows, or rows that "
            "depend on no other row, and each of %d replicas sees its own rows. strategy='ddp' sees the entire batch.",
            traces.step,
            ", ".join(unclear),
            replica.count,
        )


def _cannot_be_whole(traces: StepTraces, name: str, replica: Replica) -> StateError:
    why = "" if traces.longer else " (it could not be traced with more rows, which would tell)"
    return StateError(
        f"{traces.step} writes a value to {name} that depends on the rows of a batch, and each of {replica.count} "
        f"replicas sees its own rows: the program does not show a sum or a mean over all rows{why}. Write a mean or a "
        "running sum over rows, log the value instead, or use strategy='ddp', whose steps see the whole batch."
    )


def _check_reads(
    traces: StepTraces,
    replica: Replica,
    leaves: list[Leaf],
    parts: set[int],
    spreads: tuple[tuple[int, int, int], ...],
    found: _Related,
) -> None:
    """Refuse a step that uses what replicas count in parts: each would see its own part only."""
    held = parts | {i for places in spreads for i in places}
    if not held:
        return
    results = [found.loss, *found.state, *found.values, *found.weights, *found.outputs]
    for place, relation in enumerate(results):
        leaf = place - 1  # after the loss comes the state
        follows = place > 0 and (relation == ZERO or relation.as_total().kind == "total")
        if follows or (0 <= leaf < len(leaves) and leaf in held):
            continue
        used = jaxpr.reaches(traces.program.jaxpr, [place])
        if read := [leaves[i].name for i in sorted(held) if used[i]]:
            raise StateError(
                f"{traces.step} reads {read[0]}, which adds up over the rows that each of {replica.count} replicas "
                "sees: a replica has its part only until the step ends. Read it in a hook, log the metric itself by "
                "self.log(name, metric), or use strategy='ddp'."
            )


def _outputs(found: _Related, traces: StepTraces, rows_of: tuple[bool, ...]) -> tuple[Relation, ...]:
    """Return the relations of a step's outputs.

    Raises:
        ModuleError: One is another on each replica.
    """
    named = jax.tree_util.tree_leaves_with_path(traces.results[1][3])
    programs = [x.jaxpr for x in (traces.program, traces.longer) if x is not None]
    averages = not traces.step.endswith("predict_step")
    relations, first = [], len(programs[0].outvars) - len(named)
    for place, ((path, x), relation, rows) in enumerate(zip(named, found.outputs, rows_of, strict=True), first):
        grown = row_dims(*(p.outvars[place] for p in programs)) if len(programs) == 2 else [0]
        if (made := _output(relation, x.dtype, rows and grown == [0], averages=averages and not rows)) is None:
            raise ModuleError(
                f"{traces.step} returned {leaf_name(path) or 'an array'}, {x.dtype}{list(x.shape)}, which is another "
                "on each replica and has no row for each row of the batch. Return rows, log it with self.log, or use "
                "strategy='ddp', whose steps see the whole batch."
            )
        relations.append(made)
    return tuple(relations)


def _output(relation: Relation, dtype: Any, rows: bool, *, averages: bool) -> Relation | None:
    """Return how an output becomes that of the whole batch; None if it cannot."""
    if rows:  # where the program does not tell, the shape does
        return relation if relation == ROWS or relation.kind != "rows" else None
    if _can_be_whole(relation, dtype):
        return relation
    averages = averages and relation.kind != "rows" and bool(jnp.issubdtype(dtype, jnp.floating))
    return MEAN if averages else None
