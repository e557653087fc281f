"""How the state and the outputs of replicas become those of the whole batch."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlit.core.device_sums import Table
from jaxlit.core.replica import Replica
from jaxlit.leaf_names import is_key
from jaxlit.programs.relation import MEAN, SAME, TOTAL, ZERO, Relation


@dataclass(frozen=True)
class Sharing:
    """How each value that a step makes on n replicas becomes the one of the whole batch.

    Attributes:
        state: The relation of each leaf of (params, frozen, model_state); None for one that is left alone.
        parts: Leaves that the replicas hold in parts while the step runs: the first has what there was, the others
            nothing, so that what they count adds up.
        spreads: Places of (count, mean, m2) of each `nnx.metrics.Welford`, which are merged by their own formula.
        values: The relation of each logged value, the loss first in training.
        weights: The relation of each logged value's weight.
        outputs: The relation of each other output.
    """

    state: tuple[Relation | None, ...] = ()
    parts: frozenset[int] = frozenset()
    spreads: tuple[tuple[int, int, int], ...] = ()
    values: tuple[Relation, ...] = ()
    weights: tuple[Relation, ...] = ()
    outputs: tuple[Relation, ...] = ()


def hand_out(replica: Replica, state: Any, sharing: Sharing | None) -> Any:
    """Return the state as this replica's step takes it."""
    if sharing is None or not replica.splits or not sharing.parts:
        return state
    leaves, treedef = jax.tree.flatten(state)
    for i in sharing.parts:
        leaves[i] = jnp.where(replica.is_first, leaves[i], jnp.zeros_like(leaves[i]))
    return treedef.unflatten(leaves)


def gather(replica: Replica, state: Any, sharing: Sharing | None) -> Any:
    """Return the state after a step, the same on every replica."""
    if sharing is None or not replica.splits:
        return state
    leaves, treedef = jax.tree.flatten(state)
    merged = {i for places in sharing.spreads for i in places}
    for places in sharing.spreads:
        for i, x in zip(places, _merge(replica, *(leaves[i] for i in places)), strict=True):
            leaves[i] = x
    for i, relation in enumerate(sharing.state):
        if relation is None or i in merged:
            continue
        leaves[i] = _first(replica, leaves[i]) if is_key(leaves[i]) else whole(replica, leaves[i], relation)
    return treedef.unflatten(leaves)


def gather_outputs(replica: Replica, outputs: Any, sharing: Sharing | None, rows_of: tuple[bool, ...]) -> Any:
    """Return a step's outputs: its rows as they are, the others the same on every replica."""
    if sharing is None or not replica.splits:
        return outputs
    leaves, treedef = jax.tree.flatten(outputs)
    triples = zip(leaves, sharing.outputs, rows_of, strict=True)
    return treedef.unflatten([x if rows else whole(replica, x, relation) for x, relation, rows in triples])


def whole(replica: Replica, x: jax.Array, relation: Relation) -> jax.Array:
    """Return the value of the whole batch, given what each replica has of it."""
    if relation in (SAME, ZERO):
        return x
    if relation.kind == "total":
        if relation.power == -1:
            return jax.lax.pmean(x, str(replica.axis))
        x = replica.psum(x)
    return x if relation.power == 0 else x * replica.count**relation.power


def on_replica(
    replica: Replica, table: Table, values: list[jax.Array], weights: list[jax.Array], sharing: Sharing | None
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Return what a replica logs so that the replicas' tables, reduced, are that of the whole batch."""
    if sharing is None or not replica.splits:
        return values, weights
    made = []
    for value, relation, weight, metric in zip(values, sharing.values, sharing.weights, table.metrics, strict=True):
        if metric.reduce_fx == "sum":
            made.append(_scaled(replica, value, relation, TOTAL))
        elif metric.reduce_fx == "mean" and weight.kind == "same":
            made.append(_scaled(replica, value, relation, MEAN))
        else:  # not to be weighted by what each replica has
            made.append(whole(replica, value, relation) if relation.kind in ("same", "total") else value)
    return made, [_scaled(replica, w, r, TOTAL) for w, r in zip(weights, sharing.weights, strict=True)]


def _scaled(replica: Replica, x: jax.Array, relation: Relation, wanted: Relation) -> jax.Array:
    """Return a replica's value so that it relates to the whole one as wanted, without a word to the others."""
    if relation.as_total().kind != "total":
        return x
    power = relation.as_total().power - wanted.power
    return x if power == 0 else x * float(replica.count) ** power


def _first(replica: Replica, key: jax.Array) -> jax.Array:
    """Return the key of the first replica, which is the one that a single device would have."""
    data = jax.random.key_data(key)
    first = replica.psum(jnp.where(replica.is_first, data, jnp.zeros_like(data)))
    return jax.random.wrap_key_data(first, impl=jax.random.key_impl(key))


def _merge(replica: Replica, count: jax.Array, mean: jax.Array, m2: jax.Array) -> tuple[jax.Array, ...]:
    """Return the count, the mean and the sum of squared differences from it of all replicas' values.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """
    total = replica.psum(count)
    some = jnp.where(total > 0, total, 1)
    center = replica.psum(mean * count) / some
    squares = replica.psum(m2 + count * (mean - center) ** 2)
    return total.astype(count.dtype), center.astype(mean.dtype), squares.astype(m2.dtype)
