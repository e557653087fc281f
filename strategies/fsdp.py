"""Fully sharded data parallel, and its smaller sibling that shards only the optimizer (ZeRO)."""

import math
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import checks as check
from jaxlit.core.state import TrainState
from jaxlit.strategies.base import Strategy, own_mesh
from jaxlit.strategies.like_params import like_params


class FSDP(Strategy):
    """Shard the state over the devices that split the batch.

    Each array is split along its largest dim that divides by the device count; arrays of at most
    `min_size` elements, and those with no such dim, stay whole. Random state, batch statistics and
    counters stay whole too. The step sees the global batch, so the numbers are those of `single`.

    The stages are those of ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054).

    Args:
        stage: What is sharded: 1 optimizer state, 2 gradients too, 3 parameters too.
        min_size: The most elements of an array that stays whole.
        mesh: A mesh of your own: batch and state are split over its axis `fsdp`, or over its only axis.

    Raises:
        ArgumentError: A value is out of its set, or the mesh has several axes and none named `fsdp`.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy=jl.strategies.FSDP(min_size=4096), max_epochs=1, logger=False)
    """

    axis = "fsdp"

    def __init__(self, *, stage: int = 3, min_size: int = 1024, mesh: jax.sharding.Mesh | None = None) -> None:
        whole = isinstance(min_size, int) and min_size >= 0
        check.require(stage in (1, 2, 3), "stage", stage, "must be 1, 2 or 3", owner="FSDP")
        check.require(whole, "min_size", min_size, "must be an int of at least 0", owner="FSDP")
        self.stage, self.min_size = stage, min_size
        own_mesh(self, mesh)

    def spec(self, shape: tuple[int, ...]) -> P:
        """Return how an array of this shape is split."""
        dividing = [d for d, size in enumerate(shape) if size % self.num_replicas == 0]
        if math.prod(shape) <= self.min_size or not dividing:
            return P()
        largest = max(dividing, key=lambda d: shape[d])
        return P(*(self.axis if d == largest else None for d in range(largest + 1)))

    def state_sharding(self, state: TrainState) -> Any:
        """Return sharded parameters and optimizer state, and the rest whole."""
        split = lambda tree: jax.tree.map(lambda x: NamedSharding(self.mesh, self.spec(x.shape)), tree)  # noqa: E731
        whole = jax.tree.map(lambda _: self.replicated, state)
        params = split(state.params) if self.stage == 3 else whole.params
        window = whole.window
        if window is not None and self.stage >= 2:
            window = replace(window, grads=split(state.params))
        return replace(
            whole,
            params=params,
            frozen=split(state.frozen) if self.stage == 3 else whole.frozen,
            opt_state=like_params(state.opt_state, state.params, split(state.params), self.replicated),
            window=window,
        )

    def constrain_grads(self, grads: Any) -> Any:
        """Shard the gradients from stage 2 on."""
        if self.stage == 1:
            return grads
        return jax.tree.map(
            lambda g: jax.lax.with_sharding_constraint(g, NamedSharding(self.mesh, self.spec(g.shape))), grads
        )
