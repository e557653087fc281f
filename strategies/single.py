"""One device: the reference that the other strategies equal."""

from typing import Any

import jax

from jaxlit.core.pure_module import PureModule
from jaxlit.core.train_state import TrainState
from jaxlit.errors import ArgumentError
from jaxlit.strategies.base import Strategy


class SingleDevice(Strategy):
    """Train on the first device.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy="single", max_epochs=1, logger=False)
    """

    several_processes = False
    takes_mesh = False

    def setup(self, devices: int | None = None) -> None:
        """Take the first device; refuse a larger number."""
        if devices not in (None, 1):
            raise ArgumentError(
                f"Trainer(strategy='single', devices={devices}): 'single' uses one device. "
                f"Use strategy='ddp' for {devices}, or devices=1."
            )
        super().setup(1)

    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return the one device's sharding for every leaf."""
        return jax.tree.map(lambda _: self.replicated, state)
