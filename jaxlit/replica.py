"""What a step body sees of the batch, and how it meets the other replicas."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlit.errors import ModuleError, StateError
from jaxlit.state import leaf_name


def _same(tree: Any) -> Any:
    return tree


@dataclass(frozen=True)
class Replica:
    """What a step body sees of the batch, and how it meets the other replicas.

    Attributes:
        axis: The mapped axis that the replicas stand on; None when the body sees the global batch.
        count: Replicas on the axis.
        whole: Every replica sees all rows, for a batch that does not divide among them.
        varying_types: The axis is one of `jax.shard_map`, which tracks what varies over it.
        sync_batchnorm: BatchNorm takes its statistics over all replicas.
        constrain_batch: Shards a global batch inside the step.
        constrain_grads: Shards the gradients inside the step.
    """

    axis: str | None = None
    count: int = 1
    whole: bool = False
    varying_types: bool = False
    sync_batchnorm: bool = True
    constrain_batch: Callable[[Any], Any] = _same
    constrain_grads: Callable[[Any], Any] = _same

    @property
    def splits(self) -> bool:
        """Whether this body sees its own share of the rows."""
        return self.axis is not None and not self.whole

    @property
    def share(self) -> float:
        """The part of this body's rows that counts in a sum over replicas."""
        return 1 / self.count if self.axis is not None and self.whole else 1.0

    def vary(self, tree: Any) -> Any:
        """Mark arrays as differing between replicas, so that gradients stay local.

        Without it the gradient of a replicated parameter is already a sum over replicas, and the mean
        that follows leaves it `count` times too large.
        """
        if not (self.splits and self.varying_types):
            return tree
        return jax.tree.map(lambda x: x if self.varies(x) else jax.lax.pcast(x, self.axis, to="varying"), tree)

    def varies(self, x: jax.Array) -> bool:
        """Tell whether `x` may differ between replicas."""
        if self.axis is None or not self.varying_types:
            return self.axis is not None
        return self.axis in jax.typeof(x).manual_axis_type.varying

    def psum(self, tree: Any) -> Any:
        """Return the sum over replicas."""
        return tree if self.axis is None else jax.lax.psum(tree, self.axis)

    def pmean(self, tree: Any) -> Any:
        """Return the mean over replicas that see different rows."""
        return jax.lax.pmean(tree, self.axis) if self.splits else tree


def reduce_state(replica: Replica, state: Any, changed: tuple[bool, ...]) -> Any:
    """Make state the same on every replica: floating leaves that a step changed are averaged.

    Raises:
        StateError: Another leaf differs between replicas.
    """
    if not replica.splits:
        return state
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)

    def reduce(path: tuple[Any, ...], x: jax.Array, written: bool) -> jax.Array:
        if not written or not replica.varies(x):
            return x
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jax.lax.pmean(x, str(replica.axis))
        if replica.varying_types:
            raise StateError(
                f"{leaf_name(path[1:])} ({x.dtype}) differs between replicas after training_step, and only floating "
                "state can be averaged. Update it with values that do not depend on the batch, or use strategy='ddp'."
            )
        return x

    return treedef.unflatten([reduce(path, x, w) for (path, x), w in zip(leaves, changed, strict=True)])


def reduce_outputs(replica: Replica, outputs: Any, rows_of: tuple[bool, ...], step: str) -> Any:
    """Average what is no row of the batch, so that each replica returns its rows and shared values.

    Args:
        replica: What the body sees.
        outputs: What the step returned.
        rows_of: Which of its leaves have one row for each row of the batch.
        step: The step's name, for messages.

    Raises:
        ModuleError: A leaf differs between replicas and cannot be averaged.
    """
    if not replica.splits:
        return outputs
    leaves, treedef = jax.tree_util.tree_flatten_with_path(outputs)

    def reduce(path: tuple[Any, ...], x: jax.Array, rows: bool) -> jax.Array:
        if rows or not replica.varies(x):
            return x
        if jnp.issubdtype(x.dtype, jnp.floating) and step != "predict_step":
            return jax.lax.pmean(x, str(replica.axis))
        if replica.varying_types:
            raise ModuleError(
                f"{step} returned {leaf_name(path) or 'an array'}, {x.dtype}{list(x.shape)}, which is another on each "
                "replica and has no row for each row of the batch. Return rows, log it with self.log, or use "
                "strategy='ddp', whose steps see the whole batch."
            )
        return x

    return treedef.unflatten([reduce(path, x, rows) for (path, x), rows in zip(leaves, rows_of, strict=True)])


def is_row(x: Any, rows: int) -> bool:
    """Tell whether an output has one row for each row of the batch."""
    return x.ndim > 0 and x.shape[0] == rows


def num_rows(batch: Any) -> int:
    """Return the leading size of a batch's arrays; 1 if it holds scalars only."""
    return next((x.shape[0] for x in jax.tree.leaves(batch) if getattr(x, "ndim", 0)), 1)
