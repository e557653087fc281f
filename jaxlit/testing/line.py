"""The model that the pages of the documentation train, and its data."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlit.core.module import TrainModule
from jaxlit.data.array_loader import ArrayLoader


class Line(TrainModule):
    """Fits y = slope * x by SGD on the mean squared error."""

    def __init__(self, slope: float = 0.0, lr: float = 0.1) -> None:
        self.slope, self.lr = nnx.Param(jnp.float32(slope)), lr

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Log and return the loss."""
        self.log("train/loss", loss := jnp.mean((self.slope * batch["x"] - batch["y"]) ** 2))
        return loss

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        """Log the loss."""
        self.log("val/loss", jnp.mean((self.slope * batch["x"] - batch["y"]) ** 2))

    def predict_step(self, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """Return y for each row."""
        return {"y": self.slope * batch["x"]}

    def configure_optimizers(self) -> optax.GradientTransformation:
        """Return SGD."""
        return optax.sgd(self.lr)


def line_data(batch_size: int = 8) -> ArrayLoader:
    """Return 64 rows of y = 3 * x, shuffled in each epoch."""
    x = np.linspace(-1, 1, 64, dtype=np.float32)
    return ArrayLoader({"x": x, "y": 3 * x}, batch_size, shuffle=True)
