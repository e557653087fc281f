"""How the state and the outputs of replicas become those of the entire batch."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlit.core.device_sums import Table
from jaxlit.core.replica import Replica
from jaxlit.leaf_names import is_key
from jaxlit.programs.relation import MEAN, SAME, TOTAL, ZERO, Relation


@dataclass(frozen=True)
class Reduction:
    """How each value that a step computes on n replicas becomes that of the entire batch.

    Attributes:
        state: The relation of each leaf of (params, frozen, model_state); None for one that is left alone.
        parts: Leaves that add up over the replicas: during the step the first replica has the value, the others 0.
        values: The relation of each logged value, the loss first in training.
        weights: The relation of each logged value's weight.
        outputs: The relation of each other output.
    """

    state: tuple[Relation | None, ...] = ()
    parts: frozenset[int] = frozenset()
    values: tuple[Relation, ...] = ()
    weights: tuple[Relation, ...] = ()
    outputs: tuple[Relation, ...] = ()


def scatter_state(replica: Replica, state: Any, reduction: Reduction | None) -> Any:
    """Return the state as this replica's step takes it."""
    if reduction is None or not replica.splits or not reduction.parts:
        return state
    leaves, treedef = jax.tree.flatten(state)
    for i in reduction.parts:
        leaves[i] = jnp.where(replica.is_first, leaves[i], jnp.zeros_like(leaves[i]))
    return treedef.unflatten(leaves)


def reduce_state(replica: Replica, state: Any, reduction: Reduction | None) -> Any:
    """Return the state after a step, the same on every replica."""
    if reduction is None or not replica.splits:
        return state
    leaves, treedef = jax.tree.flatten(state)
    for i, relation in enumerate(reduction.state):
        if relation is not None and is_key(leaves[i]):  # that of the first replica, as a single device would have it
            data = jax.random.key_data(leaves[i])
            first = replica.psum(jnp.where(replica.is_first, data, jnp.zeros_like(data)))
            leaves[i] = jax.random.wrap_key_data(first, impl=jax.random.key_impl(leaves[i]))
        elif relation is not None:
            leaves[i] = _reduce(replica, leaves[i], relation)
    return treedef.unflatten(leaves)


def reduce_outputs(replica: Replica, outputs: Any, reduction: Reduction | None, rows_of: tuple[bool, ...]) -> Any:
    """Return a step's outputs: its rows as they are, the others the same on every replica."""
    if reduction is None or not replica.splits:
        return outputs
    leaves, treedef = jax.tree.flatten(outputs)
    triples = zip(leaves, reduction.outputs, rows_of, strict=True)
    return treedef.unflatten([x if rows else _reduce(replica, x, relation) for x, relation, rows in triples])


def share_of_metrics(
    replica: Replica,
    table: Table,
    values: list[jax.Array],
    weights: list[jax.Array],
    reduction: Reduction | None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return a replica's logged values and weights, such that the sum of the replicas' tables is the batch's."""
    if reduction is None or not replica.splits:
        return values, weights
    shares = []
    for value, relation, weight, metric in zip(values, reduction.values, reduction.weights, table.metrics, strict=True):
        if metric.reduce_fx == "sum" or (metric.reduce_fx == "mean" and weight.kind == "same"):
            wanted = TOTAL if metric.reduce_fx == "sum" else MEAN
            shares.append(_rescale(replica, value, relation, wanted))
        else:  # not to be weighted by what each replica has
            shares.append(_reduce(replica, value, relation) if relation.kind in ("same", "total") else value)
    return shares, [_rescale(replica, w, r, TOTAL) for w, r in zip(weights, reduction.weights, strict=True)]


def _reduce(replica: Replica, x: jax.Array, relation: Relation) -> jax.Array:
    """Return the value of the entire batch, given each replica's."""
    if relation in (SAME, ZERO):
        return x
    if relation == MEAN:
        return jax.lax.pmean(x, str(replica.axis))
    x = replica.psum(x) if relation.kind == "total" else x
    return x if relation.power == 0 else x * replica.count**relation.power


def _rescale(replica: Replica, x: jax.Array, relation: Relation, wanted: Relation) -> jax.Array:
    """Rescale a replica's value from one relation to another; no collective is needed."""
    if relation.as_total().kind != "total":
        return x
    power = relation.as_total().power - wanted.power
    return x if power == 0 else x * float(replica.count) ** power
