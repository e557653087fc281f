"""Decides how what n replicas compute becomes what one device computes, and refuses what cannot."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlit.core.leaves import Leaf
from jaxlit.core.log import Metric
from jaxlit.core.reduction import Reduction
from jaxlit.core.replica import Replica
from jaxlit.errors import ModuleError, StateError
from jaxlit.leaf_names import is_key, named_leaves
from jaxlit.programs.jaxpr import sources
from jaxlit.programs.relate import relate, same_computation
from jaxlit.programs.relation import MEAN, ROWS, SAME, TOTAL, UNKNOWN, ZERO, Relation, row_dims

_logger = logging.getLogger("jaxlit")


@dataclass(frozen=True)
class _Related:
    """The relations of a step's results."""

    loss: Relation
    state: list[Relation]
    values: list[Relation]
    weights: list[Relation]
    outputs: list[Relation]
    same_draws: bool


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

    def relate(self, replica: Replica, state: Sequence[Relation] = (), *, alike: bool = False) -> _Related:
        """Follow the relations of the state's leaves, by default the same on every replica, to the results."""
        treedef = jax.tree.structure(self.results)
        outputs, same_draws = [UNKNOWN] * treedef.num_leaves, False
        if self.longer is not None:
            batch, rest = self.arguments[3], self.arguments[4:]
            inputs = [*(state or [SAME] * len(self.state)), *(ROWS if x.ndim else SAME for x in jax.tree.leaves(batch))]
            inputs += [SAME] * len(rest)
            related = relate(self.program, self.longer, inputs, str(replica.axis), replica.count, alike=alike)
            outputs, same_draws = related.outputs, related.same_draws
        loss, parts = treedef.unflatten(outputs)
        flat = [jax.tree.leaves(x, is_leaf=lambda x: isinstance(x, Relation)) for x in parts]
        return _Related(loss, *flat, same_draws=same_draws)


def evaluation_reduction(traces: StepTraces, replica: Replica, rows_of: tuple[bool, ...]) -> Reduction:
    """Return how an evaluation step's values and outputs become those of the entire batch.

    Raises:
        ModuleError: An output cannot.
        StateError: It draws the same random numbers on every replica.
    """
    related = traces.relate(replica)
    _check_draws(related, traces.step)
    outputs = _outputs(related, traces, rows_of)
    _warn_of_unclear(traces.relate(replica, alike=True), traces, replica)
    return Reduction(values=tuple(related.values), weights=tuple(related.weights), outputs=outputs)


def training_reduction(
    traces: StepTraces, replica: Replica, leaves: list[Leaf], changed: tuple[bool, ...], rows_of: tuple[bool, ...]
) -> Reduction:
    """Return how a training step's state, values and outputs become those of the entire batch.

    Args:
        traces: The step's program.
        replica: What the step sees.
        leaves: What each leaf of the state is.
        changed: Which of them the step writes to.
        rows_of: Which of its outputs have rows.

    Raises:
        ModuleError: The loss is a sum where a mean is meant or the other way round, or an output differs.
        StateError: A leaf that the step writes to does not follow from those of the replicas, or the step draws the
            same random numbers on every replica.
    """
    dtypes = [x.dtype for x in traces.state]
    keys = {i for i, was in enumerate(changed) if was and is_key(traces.state[i])}
    written = [i for i, was in enumerate(changed) if was and i not in keys]
    welfords = _welfords(leaves, changed, traces.relate(replica).state)
    merged = {i for _, mean, m2 in welfords for i in (mean, m2)}
    parts: set[int] = set()  # leaves that add up over replicas
    while True:  # a leaf that is in parts may make another one so
        given = [UNKNOWN if i in merged else TOTAL if i in parts else SAME for i in range(len(leaves))]
        related = traces.relate(replica, given)
        # BatchNorm's statistics are the same on every replica already, or averaged on purpose.
        state = [
            MEAN if leaf.owner == "batchnorm" and x == UNKNOWN else x
            for leaf, x in zip(leaves, related.state, strict=True)
        ]
        unclear = {i for i in written if i not in merged and not _is_reducible(state[i], dtypes[i])}
        if unclear <= parts:
            break
        parts |= unclear
    _check_draws(related, traces.step)
    alike = traces.relate(replica, alike=True)
    _check_loss(alike.loss, replica, traces.step)
    unclear |= {i for i in parts if not state[i].is_total} | {count for count, *_ in welfords if count not in parts}
    if unclear:
        why = "" if traces.longer else " (it could not be traced with more rows, which would show it)"
        raise StateError(
            f"{traces.step} writes a value to {leaves[min(unclear)].name} that depends on the rows of a batch, and "
            f"each of {replica.count} replicas sees its own rows: the program does not show a sum or a mean over all "
            f"rows{why}. Write a mean or a running sum over rows, log the value instead, or use strategy='ddp', whose "
            "steps see the entire batch."
        )
    parts |= {i for indices in welfords for i in indices}
    _check_reads(traces, replica, leaves, parts, related)
    _warn_of_unclear(alike, traces, replica)
    # Under loss_reduction="sum" the step has multiplied the loss already.
    loss = MEAN if replica.loss_reduction == "sum" else related.values[0]
    return Reduction(
        state=tuple(SAME if i in keys else state[i] if was else None for i, was in enumerate(changed)),
        parts=frozenset(parts),
        welfords=welfords,
        values=(loss, *related.values[1:]),
        weights=tuple(related.weights),
        outputs=_outputs(related, traces, rows_of),
    )


def warn_of_rows(traces: StepTraces, replica: Replica) -> None:
    """Warn if a step is another computation for another number of rows, which two programs need not show."""
    if not same_computation(traces.programs):
        _logger.warning(
            "%s depends on the number of rows: its programs for %s rows differ in more than their shapes. Each of %d "
            "replicas sees only its own rows of a batch, so the result differs from one device. Compute the same for "
            "every number of rows, or use strategy='ddp', which sees the entire batch.",
            traces.step,
            ", ".join(map(str, sorted({rows for rows, _ in traces.programs}))),
            replica.count,
        )


def _welfords(leaves: list[Leaf], changed: tuple[bool, ...], state: list[Relation]) -> tuple[tuple[int, int, int], ...]:
    """Return the indices of (count, mean, m2) of each Welford that a step gives rows."""
    groups: dict[int, dict[str, int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.owner == "welford":
            groups.setdefault(leaf.group, {})[leaf.name.rpartition(".")[2]] = i
    indices = [(g["count"], g["mean"], g["m2"]) for g in groups.values()]
    return tuple(x for x in indices if any(changed[i] and state[i] not in (SAME, ZERO) for i in x))


def _is_reducible(relation: Relation, dtype: Any) -> bool:
    """Return whether the batch's value follows from the replicas'."""
    if relation.kind in ("total", "same"):
        exact = relation.power >= 0 and dtype != jnp.bool_
        return relation == SAME or exact or bool(jnp.issubdtype(dtype, jnp.floating))
    return relation == ZERO


def _check_draws(related: _Related, step: str) -> None:
    if related.same_draws:
        raise StateError(
            f"{step} draws random numbers for its rows from a key that is the same on every replica: each would draw "
            "the same for its own rows. Draw from nnx.Rngs, or from a typed key (jax.random.key) that the module holds "
            "in an nnx.Variable; or use strategy='ddp', whose steps see the entire batch."
        )


def _check_loss(loss: Relation, replica: Replica, step: str) -> None:
    """Refuse a loss that is plainly not what the strategy takes it for, and warn of one that may not be."""
    total = loss.as_total()
    if loss.kind in ("unknown", "rows"):
        _logger.warning(
            "%s: the loss may not be a %s over the rows of a batch. jaxlit treats what each of %d replicas returns for "
            "its own rows as one. Use strategy='ddp' to compute the loss from the entire batch.",
            step,
            replica.loss_reduction,
            replica.count,
        )
    elif loss.kind == "mixed":
        raise ModuleError(
            f"{step} returns a sum over the rows of a batch and, added to it, a term of another size: the losses that "
            f"{replica.count} replicas have for their own rows make no loss of the entire batch. Return a mean over "
            "the rows and the term, or use strategy='ddp', whose steps see the entire batch."
        )
    elif total.kind == "total" and replica.loss_reduction == "sum" and total != TOTAL:
        raise ModuleError(
            f"{step} returns a mean over the rows of a batch under loss_reduction='sum': the losses of "
            f"{replica.count} replicas would be added up. Return a sum over the rows, or leave loss_reduction out."
        )
    elif total.kind == "total" and replica.loss_reduction != "sum" and total != MEAN:
        raise ModuleError(
            f"{step} returns a sum over the rows of a batch, and each of {replica.count} replicas sees its own rows: "
            "their mean is not the loss of the entire batch. Return a mean over the rows, or choose "
            "jl.strategies.ShardMapDDP(loss_reduction='sum'), or train by 'ddp' or 'fsdp', which see the entire batch."
        )


def _warn_of_unclear(related: _Related, traces: StepTraces, replica: Replica) -> None:
    """Warn of logged values and outputs that may not be those of the entire batch."""
    # A mean that is weighted by what each replica counts, for example a masked one, is exact.
    unclear = [
        f"the logged {metric.name!r}"
        for metric, value, weight in zip(traces.metrics, related.values, related.weights, strict=True)
        if metric.name != "loss" and metric.reduce_fx in ("mean", "sum") and value == UNKNOWN and weight.kind == "same"
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


def _check_reads(traces: StepTraces, replica: Replica, leaves: list[Leaf], parts: set[int], related: _Related) -> None:
    """Refuse a step that uses what replicas count in parts: each would see its own part only."""
    relations = [related.loss, *related.state, *related.values, *related.weights, *related.outputs]
    for i, (relation, used) in enumerate(zip(relations, sources(traces.program.jaxpr), strict=True)):
        adds_up = i > 0 and (relation == ZERO or relation.as_total().kind == "total")
        if adds_up or i - 1 in parts:  # the state comes after the loss
            continue
        if read := [leaves[k].name for k in sorted(parts) if used >> k & 1]:
            raise StateError(
                f"{traces.step} reads {read[0]}, which adds up over the rows that each of {replica.count} replicas "
                "sees: a replica has its part only until the step ends. Read it in a hook, log the metric itself by "
                "self.log(name, metric), or use strategy='ddp'."
            )


def _outputs(related: _Related, traces: StepTraces, rows_of: tuple[bool, ...]) -> tuple[Relation, ...]:
    """Return the relations of a step's outputs.

    Raises:
        ModuleError: An output has no rows and does not follow from those of the replicas.
    """
    named = named_leaves(traces.results[1][3])
    variables = [x.jaxpr.outvars[-len(named) :] for x in (traces.program, traces.longer) if x is not None]
    averages = not traces.step.endswith("predict_step")
    relations = []
    for i, ((name, x), relation) in enumerate(zip(named, related.outputs, strict=True)):
        if rows_of[i] and (len(variables) < 2 or row_dims(*(outvars[i] for outvars in variables)) == [0]):
            known = relation.kind != "rows" or relation == ROWS  # where the program does not show it, the shape does
        elif not (known := _is_reducible(relation, x.dtype)):
            # A number of each replica, such as a masked mean: the replicas' are averaged.
            known = averages and not rows_of[i] and relation.kind != "rows" and jnp.issubdtype(x.dtype, jnp.floating)
            relation = MEAN
        if not known:
            raise ModuleError(
                f"{traces.step} returned {name or 'an array'}, {x.dtype}{list(x.shape)}, which is another "
                "on each replica and has no row for each row of the batch. Return rows, log it with self.log, or use "
                "strategy='ddp', whose steps see the entire batch."
            )
        relations.append(relation)
    return tuple(relations)
