"""What a step's program tells beside its numbers: losses of no parameter, chance, large constants."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random
from kit.by_hand import assert_same
from kit.modules import Linear, Net, module
from kit.refusals import warnings_of
from kit.trainers import THREE, fit

import jaxlit as jl


@pytest.mark.parametrize(
    ("loss", "strategy"),
    [
        *((jax.lax.stop_gradient, name) for name in THREE[1:]),
        (lambda loss: jnp.ones(()), "single"),
        (lambda loss: (loss < 1).astype(jnp.float32), "single"),
    ],
)
def test_a_loss_of_no_parameter_is_warned_of_once(loss: Any, strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    fit(module(lambda self, batch: loss(self.loss(batch)), base=Linear), random(2), strategy=strategy, max_epochs=2)
    (message,) = [m for m in warnings_of(caplog) if "depend" in m]
    assert all(word in message for word in ("Made.training_step", "kernel", "bias")), message


class Branches(Linear):
    """Has parameters that reach the loss in several ways, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.detached = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))
        self.stacked, self.written = nnx.Param(jnp.ones((2, 3))), nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        idle = jnp.ones(()) + jax.lax.stop_gradient(self.detached(x))
        pairs = (self.stacked[...], self.unused.kernel[...].T.repeat(2, 0))
        x, _ = jax.lax.scan(lambda x, pair: (x * pair[0], x * pair[1]), x, pairs)
        self.written[...] = x.mean()
        return super().__call__(jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)) + 0 * idle


def test_trained_parameters_that_the_loss_ignores_are_named(caplog: pytest.LogCaptureFixture) -> None:
    fit(Branches(), random(2), max_epochs=2)
    (message,) = warnings_of(caplog)
    names = "detached.bias, detached.kernel, unused.bias, unused.kernel"
    assert f"does not depend on 4 of 8 parameters. The gradient is zero: {names}." in message


def test_frozen_parameters_that_the_loss_ignores_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    held = (nnx.Not(nnx.PathContains(name)) for name in ("unused", "detached"))
    optimizer = jl.Optimizer(optax.sgd(0.1), wrt=nnx.All(nnx.Param, *held))
    fit(module(base=Branches, configure_optimizers=lambda self: optimizer), random(1))
    assert warnings_of(caplog) == []


def test_a_loss_of_the_parameters_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def through(loss: jax.Array) -> jax.Array:
        loss = jax.lax.cond(loss < 1, jnp.sin, jnp.cos, loss + jax.lax.stop_gradient(loss))
        loss = jax.checkpoint(jnp.tanh)(jax.jit(jax.nn.relu)(jnp.where(loss < 1, loss, 2 * loss)))
        return jax.lax.scan(lambda carry, _: (carry * 0.5, None), loss, None, length=2)[0]

    fit(module(lambda self, batch: through(self.loss(batch)), base=Linear), random(1))
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("shape", [(), (1,)], ids=["a number", "an array"])
def test_debug_warns_of_numpys_random_numbers(shape: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    mine = np.random.default_rng()
    step = lambda self, batch: self.loss(batch) + (mine.normal(size=shape) * self.bias).sum()  # noqa: E731
    fit(module(step, base=Linear), random(2), debug=True)
    (message,) = warnings_of(caplog)
    assert "Made.training_step" in message and "numpy" in message and "nnx.Rngs" in message


@pytest.mark.parametrize("debug", [True, False])
def test_a_step_without_side_effects_is_not_warned_about(debug: bool, caplog: pytest.LogCaptureFixture) -> None:
    fit(Net(rate=0.5, rngs=nnx.Rngs(0)), random(2), debug=debug)
    assert warnings_of(caplog) == []


def test_a_step_may_train_its_parameters_itself(caplog: pytest.LogCaptureFixture) -> None:
    class Alternates(jl.TrainModule):
        """An optimizer for each of two layers; the second layer's step sees the first one's."""

        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.first, self.second = nnx.Linear(3, 2, rngs=rngs), nnx.Linear(2, 1, rngs=rngs)
            self.of_first = nnx.Optimizer(self.first, optax.adam(0.1), wrt=nnx.Param)
            self.of_second = nnx.Optimizer(self.second, optax.adam(0.1), wrt=nnx.Param)

        def training_step(self, batch: Any) -> jax.Array:
            loss = lambda first, second: jnp.mean((second(first(batch["x"])) - batch["y"]) ** 2)  # noqa: E731
            grads = nnx.grad(lambda first: loss(first, self.second))(self.first)
            self.of_first.update(self.first, grads)
            value, grads = nnx.value_and_grad(lambda second: loss(self.first, second))(self.second)
            self.of_second.update(self.second, grads)
            return jax.lax.stop_gradient(value)

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.set_to_zero()

    model, by_hand = Alternates(rngs=nnx.Rngs(0)), Alternates(rngs=nnx.Rngs(0))
    fit(model, random(3))
    assert warnings_of(caplog) == []
    for batch in random(3):
        by_hand.training_step(batch)
    assert_same(model, by_hand)


class Words(jl.TrainModule):
    def __init__(self, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        self.embed, self.head = nnx.Embed(8, 4, dtype=dtype, rngs=rngs), nnx.Linear(4, 8, rngs=rngs)

    def training_step(self, batch: jax.Array) -> jax.Array:
        return jnp.mean(self.head(self.embed(batch)) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
def test_products_that_a_layer_made_float32_are_warned_of(precision: str, caplog: pytest.LogCaptureFixture) -> None:
    fit(Words(None), [np.zeros((2, 3), np.int32)] * 2, precision=precision)
    (message,) = [m for m in warnings_of(caplog) if "matrix products" in m]
    assert "100% of the matrix products of Words.training_step take float32" in message
    assert ("dtype=jnp.float16" if precision == "16-mixed" else "dtype=jnp.bfloat16") in message


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", jnp.bfloat16), ("32-true", None)])
def test_products_in_the_dtype_of_the_precision_are_not(
    precision: str, dtype: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fit(Words(dtype), [np.zeros((2, 3), np.int32)], precision=precision)
    assert not [m for m in warnings_of(caplog) if "matrix products" in m]
