"""Decides how what n replicas compute becomes what one device computes, and refuses what cannot."""

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxlit.core.leaves import Leaf
from jaxlit.core.log import Metric
from jaxlit.core.reduction import Reduction
from jaxlit.core.replica import Replica
from jaxlit.errors import ModuleError, StateError
from jaxlit.leaf_names import is_key, named_leaves
from jaxlit.programs.jaxpr import sources
from jaxlit.programs.relate import relate
from jaxlit.programs.relation import MEAN, MIXED, ROWS, SAME, TOTAL, UNKNOWN, ZERO, Relation

_logger = logging.getLogger("jaxlit")


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
    arguments: tuple[Any, ...]
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
            given, batch, rest = map(jax.tree.leaves, (self.arguments[:3], self.arguments[3], self.arguments[4:]))
            rows = [ROWS if x.ndim else SAME for x in batch]
            inputs = [*(state or [SAME] * len(given)), *rows, *[SAME] * len(rest)]
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
        leaves: What each leaf of the state is, of a training step.
        changed: Which of them the step writes to.

    Raises:
        ModuleError: The loss is a sum where a mean is meant or the other way round, or an output differs.
        StateError: A leaf that the step writes to does not follow from those of the replicas, or the step draws the
            same random numbers on every replica.
    """
    arrays = jax.tree.leaves(traces.arguments[:3])
    keys = {i for i, was in enumerate(changed) if was and is_key(arrays[i])}
    written = {i for i, was in enumerate(changed) if was} - keys
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
        state=tuple(SAME if i in keys else state[i] if was else None for i, was in enumerate(changed)),
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
    """Return the relations of a step's outputs, of which rows need none.

    Raises:
        ModuleError: An output has no rows and does not follow from those of the replicas.
    """
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
        made = {MIXED: "a sum and another term", TOTAL: "a sum", MEAN: "a mean"}
        raise ModuleError(
            f"{traces.step} returns {made.get(loss.as_total(), 'a scaled sum')} over the rows of a batch under "
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
