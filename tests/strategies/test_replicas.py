"""Each trap of per-replica training, held shut: the right numbers, and proof that the wrong recipe gives others."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import random
from kit.line import Line, make_batches, outputs_of
from kit.modules import Linear
from kit.trainers import REPLICAS, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError, StateError
from jaxlit.testing.same_training import train


@pytest.mark.parametrize("strategy", thinned(REPLICAS, "pmap"))
def test_gradients_are_the_mean_over_replicas(strategy: str) -> None:
    (batch,) = random(1, rows=32)
    grads = train(Linear, [batch], strategy=strategy, steps=1, max_epochs=1).grads
    error = np.asarray(Linear()(batch["x"])) - batch["y"]
    np.testing.assert_allclose(grads["kernel"], 2 * batch["x"].T @ error / 32, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grads["bias"], 2 * error.mean(0), rtol=1e-5)


class Stacked(Line):
    """Three dropouts that nnx.vmap has built, and so one stack of three keys."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__()

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def build(rngs: nnx.Rngs) -> nnx.Dropout:
            return nnx.Dropout(0.5, rngs=rngs)

        self.drop = build(rngs)

    def masks(self, x: jax.Array) -> jax.Array:
        """Return the three masks of a batch, rows first."""
        apply = nnx.vmap(lambda drop, x: drop(x), in_axes=(0, None), out_axes=0)
        return jnp.swapaxes(apply(self.drop, jnp.ones((x.shape[0], 16))), 0, 1)

    def training_step(self, batch: Any) -> Any:
        return {"loss": self.loss(batch), "masks": self.masks(batch["x"])}

    def validation_step(self, batch: Any) -> Any:
        return {"masks": self.masks(batch["x"])}


def keys_of(module: Any) -> list[np.ndarray]:
    return [np.asarray(jax.random.key_data(x[...])) for _, x in nnx.iter_graph(module) if isinstance(x, nnx.RngKey)]


def masks_of(strategy: str, rows: int = 16) -> tuple[np.ndarray, Stacked]:
    """Return what two batches drew, (batch, row, layer, 16), and the module."""
    module = Stacked(rngs=nnx.Rngs(0))
    outputs = outputs_of("fit", module, make_batches(rows, rows), strategy)
    return np.stack([result["masks"] for result in outputs]), module


@pytest.mark.parametrize("strategy", thinned(REPLICAS, "pmap"))
def test_each_replica_draws_its_own_dropout_mask(strategy: str) -> None:
    masks, module = masks_of(strategy)
    assert set(np.unique(masks)) == {0.0, 2.0}
    # 96 draws of 16 bits each: equal ones would be a key that was used twice.
    assert len(np.unique(masks.reshape(-1, 16), axis=0)) > 90
    np.testing.assert_array_equal(masks, masks_of("shard_map")[0])
    # The keys leave the step unfolded, and counts advance.
    keys = keys_of(Stacked(rngs=nnx.Rngs(0)))
    assert [x.shape[0] for x in keys] == [3]
    np.testing.assert_array_equal(keys_of(module), keys)
    (count,) = [x[...] for _, x in nnx.iter_graph(module) if isinstance(x, nnx.RngCount)]
    np.testing.assert_array_equal(np.asarray(count), [2, 2, 2])


def test_equal_masks_are_refused_if_keys_are_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxlit.core.pure_module.fold_keys", lambda module, replica, batch_idx: lambda: None)
    with pytest.raises(StateError, match="from a key that is the same on every replica"):
        masks_of("shard_map")


@pytest.mark.parametrize("strategy", thinned(REPLICAS, "pmap"))
def test_a_tail_sees_the_masks_of_a_single_device(strategy: str) -> None:
    np.testing.assert_array_equal(masks_of(strategy, rows=13)[0], masks_of("single", rows=13)[0])


class Normed(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.norm(x))


def statistics(strategy: Any) -> tuple[np.ndarray, np.ndarray]:
    module = Normed()
    fit(module, random(1, rows=32), strategy=strategy)
    return np.asarray(module.norm.mean[...]), np.asarray(module.norm.var[...])


@pytest.mark.parametrize("strategy", thinned(REPLICAS, "pmap"))
def test_batchnorm_statistics_are_those_of_all_rows(strategy: str) -> None:
    x = random(1, rows=32)[0]["x"]
    mean, var = statistics(strategy)
    np.testing.assert_allclose(mean, 0.01 * x.mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(var, 0.99 + 0.01 * x.var(0), rtol=1e-5)


@pytest.mark.parametrize(
    "strategy",
    [
        jl.strategies.ShardMapDDP(sync_batchnorm=False),
        jl.strategies.PMap(sync_batchnorm=False),
        jl.strategies.Replicas(8, sync_batchnorm=False),
    ],
    ids=REPLICAS,
)
def test_without_sync_the_replicas_statistics_are_averaged(strategy: jl.Strategy) -> None:
    x = random(1, rows=32)[0]["x"].reshape(8, 4, 3)
    mean, var = statistics(strategy)
    np.testing.assert_allclose(mean, 0.01 * x.mean((0, 1)), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(var, 0.99 + 0.01 * x.var(1).mean(0), rtol=1e-5)


def test_a_tail_counts_once_in_metric_weights() -> None:
    class Mean(Linear):
        def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
            self.log("x", batch["x"].mean(), on_step=False, on_epoch=True)
            return super().training_step(batch)

    (data,) = random(1, rows=33)
    data["x"][32] = 1000
    trainer = fit(Mean(), jl.ArrayLoader(data, 32), strategy="shard_map", accumulate_grad_batches=2)
    assert trainer.callback_metrics["x"] == pytest.approx(data["x"].mean(), rel=1e-5)


@pytest.mark.parametrize("strategy", thinned(REPLICAS, "pmap"))
@pytest.mark.parametrize("devices", thinned((1, 2, 8), 2))
def test_losses_that_couple_rows_see_one_replicas_rows(strategy: str, devices: int) -> None:
    class Coupled(Linear):
        def loss(self, batch: dict[str, jax.Array]) -> jax.Array:
            return self(batch["x"]).mean() ** 2

    (batch,) = random(1, rows=16)
    outputs = np.asarray(Coupled()(batch["x"])).reshape(devices, -1)
    name = strategy.partition(":")[0]
    training = train(Coupled, [batch], strategy=name, devices=devices, steps=1)
    assert training.loss[0] == pytest.approx((outputs.mean(1) ** 2).mean(), rel=1e-5)


def test_a_batch_spec_of_a_replica_strategy_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"Own\.batch_spec splits a batch, and each replica sees entire rows"):
        type("Own", (jl.strategies.ShardMapDDP,), {"batch_spec": lambda self, x: None})().setup()


@pytest.mark.parametrize("strategy", thinned(["single", "pmap", "replicas:8"], "pmap"))
def test_stacked_dropouts_are_evaluated_without_dropping(strategy: str) -> None:
    for result in outputs_of("validate", Stacked(rngs=nnx.Rngs(0)), make_batches(16, 5), strategy):
        np.testing.assert_array_equal(result["masks"], 1.0)


class Dropped(Line):
    """A line after a dropout, which one of nnx's transforms may run."""

    def __init__(self, transform: Any, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.transform = transform

    def loss(self, batch: Any) -> jax.Array:
        x = self.transform(lambda drop, x: drop(x))(self.drop, batch["x"])
        return jnp.mean((x @ self.w - batch["y"]) ** 2)


def plainly(fn: Any) -> Any:
    return fn


@pytest.mark.parametrize("strategy", thinned(["shard_map", "pmap"], "shard_map"))
def test_dropout_under_remat_or_jit_drops_the_same(strategy: str) -> None:
    weights, batches = {}, make_batches(16, 16)
    for transform in (plainly, nnx.remat, nnx.jit):
        module = Dropped(transform, rngs=nnx.Rngs(0))
        keys = keys_of(module)
        make_trainer(strategy=strategy).fit(module, batches)
        weights[transform] = np.asarray(module.w[...])
        np.testing.assert_array_equal(keys_of(module), keys)
    np.testing.assert_allclose(weights[nnx.remat], weights[plainly], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(weights[nnx.jit], weights[plainly], rtol=1e-6, atol=1e-6)
    make_trainer(strategy=strategy).fit(whole := Line(), batches)
    assert np.abs(weights[plainly] - whole.w[...]).max() > 1e-3  # it has dropped
