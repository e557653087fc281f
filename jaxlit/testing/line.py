"""What scripts and tests begin with: simulated devices, and the model that the documentation trains with its data."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxlit.core.module import TrainModule
from jaxlit.data.array_loader import ArrayLoader
from jaxlit.distributed.job import jax_runs

_FLAG = "--xla_force_host_platform_device_count"


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


def fake_devices(count: int) -> None:
    """Simulate `count` CPU devices; call it before the first use of jax, for example in a conftest.

    After that it only checks that there are at least `count` devices.

    Args:
        count: How many.

    Raises:
        RuntimeError: jax runs already, with fewer devices.

    Example:
        >>> import jaxlit as jl
        >>> jl.testing.fake_devices(8)
    """
    if not jax_runs():
        flags = re.sub(rf"{_FLAG}=\d+", "", os.environ.get("XLA_FLAGS", ""))
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={count}".strip()
        os.environ.pop("JAX_NUM_CPU_DEVICES", None)  # it would win over the flag
        jax.config.update("jax_platforms", "cpu")
        return
    if jax.device_count() < count:
        raise RuntimeError(
            f"fake_devices({count}) came after the first use of jax, which runs with {jax.device_count()} devices. "
            f"Call it earlier, or start Python with XLA_FLAGS={_FLAG}={count}."
        )
