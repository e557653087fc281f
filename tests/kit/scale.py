"""A module whose gradients, metrics and predictions have formulas."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxlit as jl


class Scale(jl.TrainModule):
    """Multiplies rows by the vector 1, 2, ..., and takes the mean for its loss."""

    def __init__(self, size: int = 3, lr: float = 1.0) -> None:
        self.lr = lr
        self.w = nnx.Param(jnp.arange(1.0, size + 1.0))

    def log_all(self, x: jax.Array, **where: bool) -> None:
        for reduce_fx, value in (("mean", x.mean()), ("sum", x.sum()), ("min", x.min()), ("max", x.max())):
            self.log(reduce_fx, value, reduce_fx=reduce_fx, **where)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        self.log_all(batch["x"], on_step=False, on_epoch=True)
        return (self.w[...] * batch["x"]).mean()

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log_all(batch["x"])

    def predict_step(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {"y": self.w[...] * batch["x"], "row": batch["row"]}

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(self.lr)
