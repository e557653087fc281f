"""A module for populations, with numbers that members differ in."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from kit.modules import Net


class Swept(Net):
    """A `Net` with numbers that are read in each place where a module can keep one."""

    def __init__(
        self, lr: float = 0.05, decay: float = 0.1, rate: float = 0.3, gain: float = 1.0, *, rngs: nnx.Rngs
    ) -> None:
        super().__init__(width=8, rate=rate, rngs=rngs)
        self.lr, self.decay, self.scales = lr, decay, [gain, 2 * gain]

    def loss(self, batch: Any) -> jax.Array:
        return super().loss(batch) * self.scales[1] + self.decay * jnp.mean(self.outer.kernel[...] ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(optax.cosine_decay_schedule(self.lr, 20), eps=1e-3, weight_decay=self.decay)
