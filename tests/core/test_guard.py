"""What is not finite, and what only looks so."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.line import (
    START,
    Line,
    assert_weights,
    make_batches,
)
from kit.trainers import make_trainer

from jaxlit.errors import NonFiniteError


class Huge(Line):
    """Has gradients that are finite, and whose squares are not."""

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean(batch["x"] @ self.w) * 1e25

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-25)


@pytest.mark.parametrize(("strategy", "accumulate"), [("single", 1), ("shard_map", 1), ("ddp", 2), ("pmap", 2)])
def test_finite_gradients_whose_norm_overflows_are_trained_on(strategy: str, accumulate: int) -> None:
    batches, module = make_batches(16, 16), Huge()
    make_trainer(strategy=strategy, accumulate_grad_batches=accumulate, nan_policy="raise").fit(module, batches)
    steps = np.mean([b["x"].mean(0) for b in batches], axis=0) * (3 - accumulate)
    assert_weights(module, START - steps)


def test_finite_gradients_in_float16_whose_norm_overflows_are_trained_on() -> None:
    class Half(Line):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(2, jnp.float16))

        def loss(self, batch: Any) -> jax.Array:
            return (self.w[...] * jnp.array([300.0, 400.0], jnp.float16)).sum().astype(jnp.float32)

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(2.0**-10)

    module = Half()
    make_trainer(nan_policy="raise").fit(module, make_batches(8))
    # Exact: the steps are multiples of the spacing of float16 below 1.
    np.testing.assert_array_equal(np.asarray(module.w[...], np.float32), 1 - np.array([300, 400]) / 1024)


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
def test_one_infinite_gradient_under_a_finite_loss_is_seen(strategy: str) -> None:
    class Infinite(Line):
        def loss(self, batch: Any) -> jax.Array:
            # The derivative of sqrt is infinite at 0, in the second weight alone.
            return (self.w[0] * batch["x"][:, 0]).mean() + jnp.sqrt(self.w[1] + 1.0)

    module = Infinite()
    with pytest.raises(NonFiniteError, match="step 0"):
        make_trainer(strategy=strategy).fit(module, make_batches(16))
    assert_weights(module, START)


class Tracking(Line):
    """Keeps a running mean of its input: momentum 0.5."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nnx.BatchStat(jnp.zeros(()))

    def training_step(self, batch: Any) -> Any:
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * batch["x"].mean()
        return self.loss(batch)


def steady(bad: int, count: int = 6) -> list[dict[str, np.ndarray]]:
    """Return batches of constant x = 8**i, one with targets that are NaN."""
    fill = lambda i: np.full(8, np.nan if i == bad else 0.0, np.float32)  # noqa: E731
    return [{"x": np.full((8, 2), 8.0**i, np.float32), "y": fill(i)} for i in range(count)]


@pytest.mark.parametrize("strategy", ["single", "fsdp", "pmap"])
def test_no_statistic_is_of_the_bad_batch_or_of_one_after_it(strategy: str) -> None:
    module = Tracking()
    with pytest.raises(NonFiniteError, match="step 2"):
        make_trainer(strategy=strategy, nan_policy="raise").fit(module, steady(bad=2))
    assert float(module.mean[...]) == 0.25 * 1 + 0.5 * 8  # exact in binary


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
def test_no_statistic_is_of_a_batch_behind_the_bad_window(strategy: str) -> None:
    means = []
    for count in (4, 6):  # the second window is bad, and the last
        module = Tracking()
        with pytest.raises(NonFiniteError, match="step 1"):
            make_trainer(strategy=strategy, nan_policy="raise", accumulate_grad_batches=2).fit(
                module, steady(bad=3, count=count)
            )
        means.append(float(module.mean[...]))
    assert means[0] == means[1] <= 0.125 * 1 + 0.25 * 8 + 0.5 * 64


@pytest.mark.parametrize("strategy", ["ddp", "pmap"])
def test_a_skipped_step_leaves_no_statistic_and_the_next_one_does(strategy: str) -> None:
    module = Tracking()
    make_trainer(strategy=strategy, nan_policy="skip").fit(module, steady(bad=1, count=3))
    assert float(module.mean[...]) == 0.25 * 1 + 0.5 * 64
