"""Data parallel: every device holds the entire state and a share of the rows."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxlit.core.pure_module import PureModule
from jaxlit.core.train_state import TrainState
from jaxlit.strategies.base import Strategy


class DDP(Strategy):
    """Keep a full copy of the state on every device and split the batch.

    The step sees the global batch, so the numbers are those of `single`, also for losses and BatchNorm, which couple
    rows. XLA averages the gradients.

    Args:
        mesh: A mesh of the user's, or the sizes of its axes: the batch is split over its axis `data`, or its single
            axis, and the state is replicated.

    Raises:
        ArgumentError: The mesh has several axes and none named `data`.
        ArgumentTypeError: `mesh` is not a mesh or a mapping.

    Example:
        >>> import jax, jaxlit as jl
        >>> trainer = jl.Trainer(strategy="ddp", max_epochs=1, logger=False)
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> trainer = jl.Trainer(strategy=jl.strategies.DDP(mesh=mesh), max_epochs=1, logger=False)
    """

    def __init__(self, *, mesh: jax.sharding.Mesh | Mapping[str, int] | None = None) -> None:
        self.use_mesh(mesh)

    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return the replicated sharding for every leaf."""
        return jax.tree.map(lambda _: self.replicated, state)
