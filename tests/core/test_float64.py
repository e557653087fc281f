"""Trainings under jax_enable_x64: what is added up, logged and compared has the digits of float64, as in numpy."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.journal import Rows, at_batch, hooks
from kit.modules import module
from kit.trainers import BARE, STRATEGIES, fit, splitting, thinned

import jaxlit as jl

SIZES = (8, 8, 8, 5, 16, 8)
RATE, MOMENTUM = 1e-3, 0.9
OPTIONS: dict[str, dict[str, Any]] = {
    "one batch": {},
    "windows": {"accumulate_grad_batches": 2},
    "clipped windows": {"accumulate_grad_batches": 2, "gradient_clip_val": 2.0},
    "fused": {"steps_per_execution": 2},
}
CASES = [(strategy, kind) for strategy in STRATEGIES for kind in OPTIONS]
CASES += [("pipeline", kind) for kind in OPTIONS if kind != "fused"]
OFTEN = [("single", "windows"), ("shard_map", "fused"), ("pipeline", "clipped windows"), ("fsdp", "one batch")]


@pytest.fixture(autouse=True)
def numbers_of_64_bits() -> Iterator[None]:
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def batches() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=(n, 3)), "y": rng.normal(size=(n, 1)) + 100} for n in SIZES]


class Deep(jl.TrainModule):
    """Two matrices in float64, which a pipeline divides."""

    def __init__(self, rate: float = RATE) -> None:
        self.rate = rate
        self.inner = nnx.Param(jnp.asarray(np.linspace(-1, 1, 6).reshape(3, 2)))
        self.outer = nnx.Param(jnp.ones((2, 1), jnp.float64))

    def loss(self, batch: Any) -> jax.Array:
        x = jl.pipeline_yield(batch["x"] @ self.inner[...])
        return jnp.mean((x @ self.outer[...] - batch["y"]) ** 2)

    def training_step(self, batch: Any) -> jax.Array:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(lambda step: self.rate / (1 + step), momentum=MOMENTUM)


def by_hand(window: int = 1, clip: float = np.inf, rate: float = RATE) -> dict[str, Any]:
    """Return the weights after an epoch, the epoch's loss, the validation's, and the last rate, in numpy."""
    weights = {"inner": np.linspace(-1, 1, 6).reshape(3, 2), "outer": np.ones((2, 1))}
    trace = {name: np.zeros_like(x) for name, x in weights.items()}
    total, lr = 0.0, 0.0
    for step, first in enumerate(range(0, len(SIZES), window)):
        of_window = batches()[first : first + window]
        x, y = (np.concatenate([batch[key] for batch in of_window]) for key in ("x", "y"))
        hidden = x @ weights["inner"]
        error = hidden @ weights["outer"] - y
        grads = {"inner": 2 * x.T @ error @ weights["outer"].T / len(x), "outer": 2 * hidden.T @ error / len(x)}
        factor = min(1, clip / np.sqrt(sum((g**2).sum() for g in grads.values())))
        total += (error**2).sum()
        lr = rate / (1 + step)
        for name, g in grads.items():
            trace[name] = MOMENTUM * trace[name] + factor * g
            weights[name] = weights[name] - lr * trace[name]
    errors = [((b["x"] @ weights["inner"] @ weights["outer"] - b["y"]) ** 2).sum() for b in batches()]
    return weights | {"loss_epoch": total / sum(SIZES), "val": sum(errors) / sum(SIZES), "lr": lr}


def assert_exact(module: Any, metrics: Any, expected: dict[str, Any]) -> None:
    for name in ("inner", "outer"):
        np.testing.assert_allclose(np.asarray(getattr(module, name)[...]), expected[name], rtol=1e-12, err_msg=name)
    for name in ("loss_epoch", "val", "lr"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-12), name


@pytest.mark.parametrize(("strategy", "kind"), thinned(CASES, *OFTEN))
def test_training_equals_numpy_in_float64(strategy: str, kind: str) -> None:
    rows, made, given = Rows(rates=True), Deep(), OPTIONS[kind]
    pipeline = jl.strategies.Pipeline(stages=2, microbatches=2) if strategy == "pipeline" else splitting(strategy)
    trainer = fit(made, batches(), batches(), rows, strategy=pipeline, log_every_n_steps=1, **given)
    expected = by_hand(given.get("accumulate_grad_batches", 1), given.get("gradient_clip_val", np.inf))
    logged = {"loss_epoch": rows.of("loss_epoch")[-1], "lr": rows.of("lr")[-1], "val": trainer.callback_metrics["val"]}
    assert_exact(made, logged, expected)


def test_a_member_of_a_population_equals_numpy_in_float64() -> None:
    rates = (RATE, RATE / 2)
    members = jl.fit_many(Deep, [{"rate": rate} for rate in rates], batches(), batches(), max_epochs=1)
    rows = {row["member"]: row for row in members.rows() if "loss_epoch" in row}
    for i, rate in enumerate(rates):
        expected = by_hand(rate=rate)
        made = members.module(i)
        assert rows[i]["loss_epoch"] == pytest.approx(expected["loss_epoch"], rel=1e-12)
        np.testing.assert_allclose(np.asarray(made.inner[...]), expected["inner"], rtol=1e-12)


def test_a_finite_loss_beyond_float32_trains() -> None:
    def init(self: Any) -> None:
        self.w = nnx.Param(jnp.asarray(1.0, jnp.float64))

    made = module(lambda self, batch: jnp.mean(self.w * batch["x"]) * 1e39, tx=optax.sgd(1e-40), init=init)
    fit(made, [{"x": np.ones((4, 1))}], **BARE)
    assert float(made.w[...]) == pytest.approx(0.9, rel=1e-12)


def test_early_stopping_sees_a_change_of_1e_9() -> None:
    falling = [-1.0 - 1e-9 * i for i in range(6)]
    step = lambda self, batch: self.log("energy", self.epoch[...] * -1e-9 - 1.0)  # noqa: E731

    def init(self: Any) -> None:
        self.w, self.epoch = nnx.Param(jnp.zeros(1)), nnx.Variable(jnp.zeros((), jnp.float64))

    made = module(validation=step, init=init)
    count = hooks(on_train_epoch_start=lambda t, m: m.epoch.set_value(jnp.float64(t.current_epoch)))
    stop = jl.callbacks.EarlyStopping("energy", patience=1)
    rows = Rows()
    data = [{"x": np.ones((8, 1))}]
    fit(made, data, data, stop, count, rows, max_epochs=6, num_sanity_val_steps=0, **BARE)
    assert rows.of("energy") == falling


@pytest.mark.parametrize("wide", [True, False])
def test_a_resume_with_or_without_64_bits_continues_the_sums(wide: bool) -> None:
    def data() -> list[dict[str, np.ndarray]]:
        return [{"x": np.full((8, 1), 1.0 + i, np.float32)} for i in range(6)]

    def training_step(self: Any, batch: Any) -> jax.Array:
        self.log("x", jnp.mean(batch["x"]), on_step=False, on_epoch=True)
        return jnp.mean(self.error(batch) ** 2)

    def init(self: Any) -> None:
        self.w = nnx.Param(jnp.zeros(1, jnp.float32))

    given: dict[str, Any] = {"accumulate_grad_batches": 2}
    first, resumed, rows = module(training_step, init=init), module(training_step, init=init), Rows()
    jax.config.update("jax_enable_x64", wide)
    fit(first, data(), None, at_batch(2, lambda t, m: t.save_checkpoint("middle")), **given)
    jax.config.update("jax_enable_x64", not wide)
    trainer = fit(resumed, data(), None, rows, ckpt_path="middle", **given)
    assert rows.of("x") == [3.5]
    assert trainer.state.sums.dtype == (jnp.float32 if wide else jnp.float64)
    np.testing.assert_allclose(np.asarray(resumed.w[...]), np.asarray(first.w[...]), rtol=1e-6)
