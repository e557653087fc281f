"""The model of several benchmarks: layers of one width, trained by AdamW."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl


class Perceptron(jl.TrainModule):
    def __init__(self, width: int, depth: int, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])

    def predict_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return x

    def loss(self, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((self.predict_step(batch) - batch["y"]) ** 2)

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("val_loss", self.loss(batch))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


def make_batches(width: int, rows: int, steps: int, different: int = 8) -> list[dict[str, np.ndarray]]:
    """Return batches of random numbers, of which so many are different arrays."""
    rng = np.random.default_rng(0)
    few = [{k: rng.normal(size=(rows, width)).astype(np.float32) for k in "xy"} for _ in range(different)]
    return [few[i % different] for i in range(steps)]
