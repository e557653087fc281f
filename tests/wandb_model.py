"""A training of one weight, whose every number can be computed by hand, for tests of W&B."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

X = np.linspace(0.5, 1.5, 32, dtype=np.float32)
BATCH, START, LR = 16, 2.0, 1.5  # such a rate is too much: losses grow, and the best one is not the last


class Line(jl.TrainModule):
    def __init__(self, start: float = START, api_key: str = "planted", *, rngs: nnx.Rngs) -> None:
        self.weight = nnx.Param(jnp.full((1,), start))

    def training_step(self, batch: Any) -> jax.Array:
        loss = jnp.mean((self.weight * batch["x"]) ** 2)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        loss = jnp.mean((self.weight * batch["x"]) ** 2)
        self.log_dict({"val/loss": loss, "val/score": -loss, "val/other": loss})

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(LR)


def data() -> jl.ArrayLoader:
    return jl.ArrayLoader({"x": X}, BATCH)


def by_hand(epochs: int) -> list[dict[str, float]]:
    """Return the rows that a training logs with `log_every_n_steps=1`, without epochs."""
    x, weight, rows = X.astype(np.float64), START, []
    for step in range(2 * epochs):
        squares = float(np.mean(x[BATCH * (step % 2) :][:BATCH] ** 2))
        rows.append({"step": step, "train/loss": weight**2 * squares})
        weight -= LR * 2 * weight * squares
        if step % 2:
            loss = weight**2 * float(np.mean(x**2))
            rows.append({"step": step, "val/loss": loss, "val/score": -loss, "val/other": loss})
    return rows
