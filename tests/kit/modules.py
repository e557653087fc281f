"""Modules to train, small enough to follow by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxlit as jl


class Mean(jl.TrainModule):
    """Learns the mean of its data: a step moves `w` half way to the mean of the batch. See `by_hand.mean`."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))

    def error(self, batch: Any) -> jax.Array:
        return batch["x"] - self.w[...]

    def training_step(self, batch: Any) -> jax.Array:
        loss = jnp.mean(self.error(batch) ** 2)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", jnp.mean(self.error(batch)))

    def test_step(self, batch: Any) -> None:
        self.log("test", jnp.mean(self.error(batch)))

    def predict_step(self, batch: Any) -> jax.Array:
        return self.error(batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.25)


class Linear(jl.TrainModule):
    """Linear regression of `batch["y"]` (rows, 1) on `batch["x"]` (rows, 3), by SGD with momentum."""

    def __init__(self, features: int = 3) -> None:
        self.kernel = nnx.Param(jnp.linspace(-1.0, 1.0, features)[:, None])
        self.bias = nnx.Param(jnp.zeros(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel + self.bias

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean((self(batch["x"]) - batch["y"]) ** 2)

    def training_step(self, batch: Any) -> jax.Array:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.loss(batch))

    def test_step(self, batch: Any) -> None:
        self.log("test", self.loss(batch))

    def predict_step(self, batch: Any) -> jax.Array:
        return self(batch["x"])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1, momentum=0.9)


class Net(Linear):
    """Layers with what training can forget: batch statistics, a dropout stream, a count; sizes split over 8 devices."""

    def __init__(self, width: int = 16, depth: int = 1, rate: float = 0.0, *, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(3, width, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.outer = nnx.Linear(width, 1, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.inner(x))
        for block in self.blocks:
            x = jnp.tanh(block(x))
        return self.outer(self.drop(self.norm(x)))

    def training_step(self, batch: Any) -> jax.Array:
        self.count[...] += 1
        return super().training_step(batch)


class Wide(Net):
    """Has a matrix that every strategy splits, and stays finite over a few steps."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(width=64, rngs=rngs)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.01, momentum=0.9)


def module(
    training: Callable[..., Any] | None = None,
    *,
    tx: Any = None,
    base: type[jl.TrainModule] = Mean,
    name: str = "Made",
    init: Callable[[Any], None] | None = None,
    **methods: Any,
) -> Any:
    """Return a module with these functions of (self, ...) in place of `base`'s methods.

    `validation` is short for `validation_step`, and so on; `init` is its constructor, `tx` its optimizer.
    """
    methods = {"training": training, "__init__": init, "configure_optimizers": tx and (lambda self: tx)} | methods
    steps = {stage: f"{stage}_step" for stage in ("training", "validation", "test", "predict")}
    return type(name, (base,), {steps.get(key, key): x for key, x in methods.items() if x is not None})()


def logging(training: Callable[..., Any] | None = None, validation: Callable[..., Any] | None = None) -> Any:
    """Return a `Mean` whose training step, and whose others, call functions of (self, batch, batch_idx) to log."""

    def training_step(self: Any, batch: Any, batch_idx: Any) -> jax.Array:
        if training is not None:
            training(self, batch, batch_idx)
        return jnp.mean(self.error(batch) ** 2)

    def evaluate(self: Any, batch: Any, batch_idx: Any) -> jax.Array:
        if validation is not None:
            validation(self, batch, batch_idx)
        return batch["x"]

    return module(training_step, validation=evaluate, test=evaluate, predict=evaluate, name="Logs")
