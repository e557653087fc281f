"""One data-parallel step three ways, and the pitfalls that a hand-written one has.

A model of n devices simulated on one, the same on n devices, and the full batch give the same step.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl

LR = 0.1
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Regression(jl.TrainModule):
    def __init__(self, momentum: float | None = None, *, rngs: nnx.Rngs) -> None:
        self.momentum = momentum
        self.linear = nnx.Linear(5, 3, rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros(()))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        self.seen[...] += 1
        loss = jnp.mean((self.linear(batch["x"]) - batch["y"]) ** 2)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(LR, momentum=self.momentum)


def batches(count: int, rows: int = 16) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{k: rng.normal(size=(rows, d)).astype(np.float32) for k, d in (("x", 5), ("y", 3))} for _ in range(count)]


def loss_and_grads(params: Any, batch: dict[str, np.ndarray]) -> tuple[float, Any]:
    def loss(params: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["kernel"] + params["bias"] - batch["y"]) ** 2)

    return jax.value_and_grad(loss)(params)


def initial() -> Any:
    linear = Regression(rngs=nnx.Rngs(0)).linear
    return {"kernel": linear.kernel[...], "bias": linear.bias[...]}


def by_hand(data: list[Any], shards: int = 1, momentum: float | None = None) -> tuple[list[float], Any]:
    """Train by a Python loop over shards: the mean of their gradients, one update a step."""
    params, tx = initial(), optax.sgd(LR, momentum=momentum)
    opt_state, losses = tx.init(params), []
    for batch in data:
        parts = [jax.tree.map(lambda x, i=i: np.split(x, shards)[i], batch) for i in range(shards)]
        found = [loss_and_grads(params, part) for part in parts]
        losses.append(float(np.mean([loss for loss, _ in found])))
        grads = jax.tree.map(lambda *g: sum(g) / shards, *(grads for _, grads in found))
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return losses, params


class Losses(jl.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_log(self, trainer: Any, values: dict[str, float], step: int) -> None:
        self.losses.append(values["loss"])


def by_jaxlit(
    data: list[Any], strategy: str, devices: int | str = "auto", momentum: float | None = None
) -> tuple[list[float], Regression, jl.Trainer]:
    module, losses = Regression(momentum, rngs=nnx.Rngs(0)), Losses()
    trainer = jl.Trainer(
        strategy=strategy, devices=devices, max_epochs=1, log_every_n_steps=1, callbacks=[losses], **QUIET
    )
    trainer.fit(module, data)
    return losses.losses, module, trainer


def assert_same(module: Regression, params: Any) -> None:
    np.testing.assert_allclose(module.linear.kernel[...], params["kernel"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(module.linear.bias[...], params["bias"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("steps", (1, 4))
@pytest.mark.parametrize("n", (1, 2, 4, 8))
def test_simulated_devices_equal_devices_and_the_full_batch(n: int, steps: int) -> None:
    data = batches(steps)
    full_losses, full = by_hand(data)
    shard_losses, shards = by_hand(data, shards=n)
    simulated_losses, simulated, _ = by_jaxlit(data, f"simulate:{n}")
    mapped_losses, mapped, _ = by_jaxlit(data, "shard_map", n)
    np.testing.assert_allclose(simulated_losses, mapped_losses, rtol=1e-6)
    np.testing.assert_allclose(simulated_losses, full_losses, rtol=1e-5)
    np.testing.assert_allclose(simulated_losses, shard_losses, rtol=1e-5)
    for module in (simulated, mapped):
        assert_same(module, full)
        assert_same(module, shards)


@pytest.mark.parametrize("strategy", ("simulate:4", "shard_map", "pmap"))
def test_a_step_is_one_update_and_not_one_a_shard(strategy: str) -> None:
    data = batches(1)
    drifted = initial()
    for i in range(4):
        _, grads = loss_and_grads(drifted, jax.tree.map(lambda x, i=i: np.split(x, 4)[i], data[0]))
        drifted = jax.tree.map(lambda p, g: p - LR * g, drifted, grads)
    _, module, trainer = by_jaxlit(data, strategy, "auto" if strategy == "simulate:4" else 4)
    assert trainer.global_step == 1
    assert_same(module, by_hand(data)[1])
    assert np.abs(drifted["kernel"] - module.linear.kernel[...]).max() > 1e-2


@pytest.mark.parametrize("strategy", ("simulate:4", "shard_map", "pmap"))
def test_gradients_are_averaged_and_not_summed(strategy: str) -> None:
    data = batches(1)
    start = initial()["kernel"]
    _, grads = loss_and_grads(initial(), data[0])
    _, module, _ = by_jaxlit(data, strategy, "auto" if strategy == "simulate:4" else 4)
    moved = np.asarray(start - module.linear.kernel[...])
    np.testing.assert_allclose(moved, LR * grads["kernel"], rtol=1e-4, atol=1e-7)
    assert np.abs(moved - 4 * LR * np.asarray(grads["kernel"])).max() > 1e-2


def test_only_parameters_are_trained() -> None:
    _, module, trainer = by_jaxlit(batches(3), "shard_map", 4, momentum=0.9)
    trace = trainer.state.opt_state[0].trace
    assert jax.tree.structure(trace) == jax.tree.structure(trainer.state.params)
    assert {path[0].key for path, _ in jax.tree_util.tree_leaves_with_path(trace)} == {"linear"}
    assert float(module.seen[...]) == 3


@pytest.mark.parametrize("strategy", ("simulate:8", "shard_map", "pmap", "ddp", "fsdp"))
def test_shards_of_unequal_size_give_the_full_batch_step(strategy: str) -> None:
    data = batches(2, rows=13)
    losses, params = by_hand(data)
    got, module, _ = by_jaxlit(data, strategy)
    np.testing.assert_allclose(got, losses, rtol=1e-5)
    assert_same(module, params)


@pytest.mark.parametrize("strategy", ("simulate:8", "shard_map", "pmap"))
def test_the_optimizer_is_built_once_for_the_whole_run(strategy: str) -> None:
    data = batches(4)
    fresh, _ = initial(), None
    for batch in data:  # momentum that is born anew each step is none
        _, grads = loss_and_grads(fresh, batch)
        fresh = jax.tree.map(lambda p, g: p - LR * g, fresh, grads)
    _, module, _ = by_jaxlit(data, strategy, momentum=0.9)
    assert_same(module, by_hand(data, momentum=0.9)[1])
    assert np.abs(fresh["kernel"] - module.linear.kernel[...]).max() > 1e-2
