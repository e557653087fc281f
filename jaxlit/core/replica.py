"""What a step body sees of the batch, and its collectives with the other replicas.

`Replica`; the rows of a batch; and `Reduction`, how the state and the outputs of replicas become those of the entire
batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlit import sharding
from jaxlit.core.log import Table
from jaxlit.programs.relations import MEAN, SAME, TOTAL, ZERO, Relation
from jaxlit.texts import is_key


def identity(tree: Any) -> Any:
    """Return the tree unchanged."""
    return tree


@dataclass(frozen=True)
class Replica:
    """What a step body sees of the batch, and its collectives with the other replicas.

    Attributes:
        axis: The mapped axis of the replicas; None when the body sees the global batch.
        count: Replicas on the axis.
        sees_all_rows: Every replica sees all rows, for a batch that does not divide among them.
        sync_batchnorm: BatchNorm takes its statistics over all replicas.
        loss_reduction: What a step's loss is over the rows it sees, "mean" or "sum".
        constrain_batch: Shards a global batch inside the step.
        prepare: Called with the module in each trace of a step, before it runs.
        passes: How many passes a step takes, where each sees a part of the batch.
    """

    # The one thing about strategies that a step's body knows: the same body serves all of them. Where it sees the
    # global batch, sums over its rows are global already, and everything below is the identity.
    axis: str | None = None
    count: int = 1
    sees_all_rows: bool = False
    sync_batchnorm: bool = True
    loss_reduction: str = "mean"
    constrain_batch: Callable[[Any], Any] = identity
    prepare: Callable[[Any], Any] = identity
    passes: float = 1

    @property
    def splits(self) -> bool:
        """Whether this body sees its own share of the rows."""
        return self.axis is not None and not self.sees_all_rows

    @property
    def stack_size(self) -> int | None:
        """Size of the leading dim of sums over batches, which differ between replicas; None if there is one copy."""
        return None if self.axis is None else self.count

    @property
    def share(self) -> float:
        """The part of this body's rows that counts in a sum over replicas."""
        # All n replicas have the same rows: each counts for one n-th, or their sum would count the rows n times.
        return 1 / self.count if self.axis is not None and self.sees_all_rows else 1.0

    @property
    def loss_factor(self) -> float:
        """What a replica's loss is multiplied by, so that the mean over replicas is that of the entire batch."""
        # Gradients are averaged over replicas: n times a replica's sum has the sum over all rows as mean.
        if self.loss_reduction != "sum":
            return 1
        return self.count if self.splits else self.passes

    @property
    def index(self) -> jax.Array:
        """() int32, the index of this replica on the axis."""
        return jax.lax.axis_index(str(self.axis))

    @property
    def is_first(self) -> jax.Array:
        """() bool, whether this is the first replica, which keeps what is not summed, such as a random key."""
        return self.index == 0

    def psum(self, tree: Any) -> Any:
        """Return the sum over replicas."""
        return tree if self.axis is None else sharding.all_reduce(tree, self.axis, "sum")

    def pmean(self, tree: Any) -> Any:
        """Return the mean over replicas that see different rows."""
        # With the same rows everywhere the mean is what each has: no collective is needed.
        return sharding.all_reduce(tree, str(self.axis)) if self.splits else tree

    def part_of(self, batch: Any) -> Any:
        """Return a batch, or the shapes of the part of it that one pass of a training step sees."""
        return batch if self.passes == 1 else with_rows(batch, -(-num_rows(batch) // int(self.passes)))


def is_row(x: Any, rows: int) -> bool:
    """Return whether an output has one row for each row of the batch."""
    return x.ndim > 0 and x.shape[0] == rows


def num_rows(batch: Any) -> int:
    """Return the leading size of a batch's arrays; 1 if it holds scalars only."""
    return next((x.shape[0] for x in jax.tree.leaves(batch) if getattr(x, "ndim", 0)), 1)


def abstract_batch(batch: Any) -> Any:
    """Return the shapes and dtypes that a batch has inside a step, where 64-bit numbers are 32."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), batch)


def with_rows(batch: Any, rows: int) -> Any:
    """Return the shapes and dtypes of a batch of another number of rows."""

    def resize(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) if x.shape else x

    return jax.tree.map(resize, abstract_batch(batch))


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

    state: tuple[Relation | None, ...]
    parts: frozenset[int]
    values: tuple[Relation, ...]
    weights: tuple[Relation, ...]
    outputs: tuple[Relation, ...]


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
        if relation is None:
            continue
        if is_key(leaves[i]):  # that of the first replica, as a single device would have it
            data = jax.random.key_data(leaves[i])
            first = replica.psum(jnp.where(replica.is_first, data, jnp.zeros_like(data)))
            leaves[i] = jax.random.wrap_key_data(first, impl=jax.random.key_impl(leaves[i]))
        else:
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
