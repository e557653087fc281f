"""What a step body sees of the batch, and its collectives with the other replicas.

`Replica`; the rows of a batch; and `Reduction`, how the state and the outputs of replicas become those of the entire
batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxlit import sharding


def identity(tree: Any) -> Any:
    """Return the tree unchanged."""
    return tree


@dataclass(frozen=True)
class Replica:
    """What a step body sees of the batch, and its collectives with the other replicas."""

    # The one thing about strategies that a step's body knows: the same body serves all of them. Where it sees the
    # global batch, sums over its rows are global already, and everything below is the identity.
    axis: str | None = None  # the mapped axis of the replicas; None when the body sees the global batch
    count: int = 1  # replicas on the axis
    sees_all_rows: bool = False  # every replica sees all rows, for a batch that does not divide among them
    sync_batchnorm: bool = True  # BatchNorm takes its statistics over all replicas
    loss_reduction: str = "mean"  # what a step's loss is over the rows it sees, "mean" or "sum"
    constrain_batch: Callable[[Any], Any] = identity  # shards a global batch inside the step
    prepare: Callable[[Any], Any] = identity  # called with the module in each trace of a step, before it runs
    passes: float = 1  # how many passes a step takes, where each sees a part of the batch

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
    return jax.tree.map(lambda x: x.update(shape=(rows, *x.shape[1:])) if x.shape else x, abstract_batch(batch))


@dataclass(frozen=True)
class Reduction:
    """What is done with each value that a step computes on n replicas, so that it is that of the entire batch."""

    # for each leaf of what the step returns, but its loss: "keep"; the "mean", "sum", "min" or "max" of the replicas;
    # "first" for that of the first replica, "times" and "over" for n times and one n-th of a replica's
    actions: tuple[str, ...]
    # leaves of the state that add up over the replicas: during the step the first replica has the value, the others 0
    parts: frozenset[int]


def scatter_state(replica: Replica, state: Any, reduction: Reduction | None) -> Any:
    """Return the state as this replica's step takes it."""
    if reduction is None or not replica.splits or not reduction.parts:
        return state
    leaves, treedef = jax.tree.flatten(state)
    for i in reduction.parts:
        leaves[i] = jnp.where(replica.is_first, leaves[i], jnp.zeros_like(leaves[i]))
    return treedef.unflatten(leaves)


def reduced(replica: Replica, results: Any, reduction: Reduction | None) -> Any:
    """Return a step's (state, values, weights, outputs), given those of this replica.

    The state, and outputs without rows, are the same on every replica. Values and weights are such that the sum of the
    replicas' tables is the batch's.
    """
    if reduction is None or not replica.splits:
        return results
    leaves, treedef = jax.tree.flatten(results)
    return treedef.unflatten(map(partial(_reduce, replica), leaves, reduction.actions))


_COLLECTIVES = {"mean": jax.lax.pmean, "sum": jax.lax.psum, "min": jax.lax.pmin, "max": jax.lax.pmax}


def _reduce(replica: Replica, x: jax.Array, action: str) -> jax.Array:
    if action == "first":
        data = jax.random.key_data(x)
        first = replica.psum(jnp.where(replica.is_first, data, jnp.zeros_like(data)))
        return jax.random.wrap_key_data(first, impl=jax.random.key_impl(x))
    if action in _COLLECTIVES:
        return _COLLECTIVES[action](x, str(replica.axis))
    if action == "times":
        return x * float(replica.count)
    if action == "over" and jnp.issubdtype(x.dtype, jnp.integer):
        part = x // replica.count
        return jnp.where(replica.is_first, x - part * (replica.count - 1), part)
    return x / replica.count if action == "over" else x
