"""What a step's program tells beside its numbers: losses of no parameter, chance, large constants."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import random
from kit.modules import Linear, Net, module
from kit.refusals import warnings_of
from kit.trainers import THREE, fit, thinned


@pytest.mark.parametrize(
    ("loss", "strategy"),
    [
        *((jax.lax.stop_gradient, name) for name in THREE[1:]),
        (lambda loss: jnp.ones(()), "single"),
        (lambda loss: (loss < 1).astype(jnp.float32), "single"),
    ],
)
def test_a_loss_that_depends_on_no_parameter_is_told_once_with_the_parameters(
    loss: Any, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = module(lambda self, batch: loss(self.loss(batch)), base=Linear)
    fit(model, random(2), strategy=strategy, max_epochs=2)
    (message,) = [m for m in warnings_of(caplog) if "depend" in m]
    assert all(word in message for word in ("Made.training_step", "kernel", "bias")), message


def through_scan(loss: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (carry * 0.5, None), loss, None, length=2)[0]


THROUGH = {
    "plain": lambda loss: loss,
    "partly detached": lambda loss: loss + jax.lax.stop_gradient(loss),
    "where": lambda loss: jnp.where(loss < 1, loss, 2 * loss),
    "cond": lambda loss: jax.lax.cond(loss < 1, jnp.sin, jnp.cos, loss),
    "custom_jvp": jax.jit(jax.nn.relu),
    "checkpoint": jax.checkpoint(jnp.tanh),
    "scan": through_scan,
}


@pytest.mark.parametrize(
    ("through", "strategy"),
    thinned([*((x, "single") for x in THROUGH), ("scan", "shard_map")], ("cond", "single"), ("scan", "shard_map")),
)
def test_a_loss_that_depends_on_the_parameters_is_not_warned_about(
    through: str, strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    fit(module(lambda self, batch: THROUGH[through](self.loss(batch)), base=Linear), random(1), strategy=strategy)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("shape", [(), (1,)], ids=["a number", "an array"])
def test_random_numbers_of_a_generator_of_ones_own_in_a_step_are_told_in_debug_mode(
    shape: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    mine = np.random.default_rng()
    step = lambda self, batch: self.loss(batch) + (mine.normal(size=shape) * self.bias).sum()  # noqa: E731
    fit(module(step, base=Linear), random(2), debug=True)
    (message,) = warnings_of(caplog)
    assert "Made.training_step" in message and "numpy" in message and "nnx.Rngs" in message


def test_what_the_trace_has_told_of_is_not_told_again_in_debug_mode(caplog: pytest.LogCaptureFixture) -> None:
    step = lambda self, batch: self.loss(batch) + np.random.normal() * self.bias.sum()  # noqa: E731
    fit(module(step, base=Linear), random(2), debug=True)
    (message,) = warnings_of(caplog)
    assert "draws from np.random.normal" in message


@pytest.mark.parametrize("debug", [True, False])
def test_a_step_without_side_effects_is_not_warned_about(debug: bool, caplog: pytest.LogCaptureFixture) -> None:
    fit(Net(rate=0.5, rngs=nnx.Rngs(0)), random(2), debug=debug)
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("rows", [64, 65])
def test_a_large_constant_in_a_step_is_told_with_its_size_its_name_and_the_step(
    rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    table = np.ones((rows, 2**20), np.uint8)  # 65 MiB that a step closes over are too many

    def step(self: Any, batch: Any, batch_idx: Any) -> jax.Array:
        return self.loss(batch) * jnp.asarray(table)[batch_idx, 0]

    fit(module(step, base=Linear), random(1))
    found = warnings_of(caplog)
    assert len(found) == (rows > 64)
    for message in found:
        assert "Made.training_step captures table, an array of 65 MiB" in message and "nnx.Variable" in message
