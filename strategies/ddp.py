"""Data parallel: every device holds the whole state and a share of the rows."""

from typing import Any

import jax

from jaxlit.state import TrainState
from jaxlit.strategies.base import Strategy


class DDP(Strategy):
    """Keep a full copy of the state on every device and split the batch.

    The step sees the global batch, so the numbers are those of `single`, also for losses and
    BatchNorm, which couple rows. XLA averages the gradients.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy="ddp", max_epochs=1, logger=False)
    """

    def state_sharding(self, state: TrainState) -> Any:
        """Return the replicated sharding for every leaf."""
        return jax.tree.map(lambda _: self.replicated, state)
