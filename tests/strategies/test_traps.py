"""Each trap of per-replica training, held shut: the right numbers, and proof that the wrong recipe gives others."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlit as jl
from jaxlit.core.replica import Replica
from jaxlit.errors import StateError

PER_REPLICA = ("shard_map", "pmap", "simulate:8")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def arrays(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(rows, 4)).astype(np.float32), "y": rng.normal(size=(rows, 1)).astype(np.float32)}


class Linear(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(4, 1, rngs=rngs)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((self.linear(batch["x"]) - batch["y"]) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def full_batch_gradient(batch: dict[str, np.ndarray]) -> Any:
    graphdef, params = nnx.split(Linear(rngs=nnx.Rngs(0)))
    loss = lambda p: jnp.mean((nnx.merge(graphdef, p).linear(batch["x"]) - batch["y"]) ** 2)  # noqa: E731
    return jax.grad(loss)(nnx.as_pure(params))


def first_gradients(strategy: Any, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return jl.testing.train(lambda: Linear(rngs=nnx.Rngs(0)), [batch], strategy=strategy, steps=1, max_epochs=1).grads


@pytest.mark.parametrize("strategy", PER_REPLICA)
def test_gradients_are_the_mean_over_replicas(strategy: str) -> None:
    batch = arrays(32)
    expected = full_batch_gradient(batch)
    got = first_gradients(strategy, batch)
    np.testing.assert_allclose(got["linear.kernel"], expected["linear"]["kernel"], rtol=1e-5)
    np.testing.assert_allclose(got["linear.bias"], expected["linear"]["bias"], rtol=1e-5)


def test_a_gradient_without_its_mean_is_that_of_the_first_replicas_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = arrays(32)
    expected = full_batch_gradient({k: x[:4] for k, x in batch.items()})["linear"]["kernel"]
    monkeypatch.setattr(Replica, "pmean", lambda self, tree: tree)
    got = first_gradients("shard_map", batch)["linear.kernel"]
    np.testing.assert_allclose(got, expected, rtol=1e-5)


class Noisy(jl.TrainModule):
    """Returns the dropout mask that each row saw."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(()))

    def training_step(self, batch: jax.Array) -> dict[str, jax.Array]:
        mask = self.dropout(jnp.ones_like(batch))
        return {"loss": (self.scale[...] * mask * batch).mean(), "mask": mask}

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.0)


class KeepMasks(jl.Callback):
    def __init__(self) -> None:
        self.masks: list[np.ndarray] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.masks.append(np.asarray(outputs["mask"]))


def masks_of(strategy: str, rows: int = 16) -> tuple[list[np.ndarray], Noisy]:
    keep, module = KeepMasks(), Noisy(rngs=nnx.Rngs(0))
    batch = np.ones((rows, 64), np.float32)
    jl.Trainer(strategy=strategy, max_epochs=1, callbacks=[keep], **QUIET).fit(module, [batch, batch])
    return keep.masks, module


@pytest.mark.parametrize("strategy", PER_REPLICA)
def test_each_replica_draws_its_own_dropout_mask(strategy: str) -> None:
    first = masks_of(strategy)[0][0].reshape(8, 2, 64)
    assert len({replica.tobytes() for replica in first}) == 8


def test_equal_masks_are_refused_if_keys_are_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxlit.core.pure_module.fold_keys", lambda module, replica, batch_idx: lambda: None)
    with pytest.raises(StateError, match="from a key that is the same on every replica"):
        masks_of("shard_map")


@pytest.mark.parametrize("strategy", PER_REPLICA)
def test_keys_leave_the_step_unfolded_and_counts_advance(strategy: str) -> None:
    masks, module = masks_of(strategy)
    fresh = Noisy(rngs=nnx.Rngs(0))
    key = lambda m: np.asarray(jax.random.key_data(m.dropout.rngs.key[...]))  # noqa: E731
    np.testing.assert_array_equal(key(module), key(fresh))
    assert int(module.dropout.rngs.count[...]) == int(fresh.dropout.rngs.count[...]) + 2
    assert (masks[0] != masks[1]).any()


def test_per_replica_strategies_draw_the_same_masks() -> None:
    reference = masks_of("shard_map")[0]
    for strategy in ("pmap", "simulate:8"):
        np.testing.assert_array_equal(masks_of(strategy)[0], reference)


@pytest.mark.parametrize("strategy", PER_REPLICA)
def test_a_tail_sees_the_masks_of_a_single_device(strategy: str) -> None:
    np.testing.assert_array_equal(masks_of(strategy, rows=13)[0], masks_of("single", rows=13)[0])


class Normed(Linear):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((self.linear(self.norm(batch["x"])) - batch["y"]) ** 2)


def statistics(strategy: Any) -> tuple[np.ndarray, np.ndarray]:
    module = Normed(rngs=nnx.Rngs(0))
    jl.Trainer(strategy=strategy, max_epochs=1, **QUIET).fit(module, [arrays(32)])
    return np.asarray(module.norm.mean[...]), np.asarray(module.norm.var[...])


@pytest.mark.parametrize("strategy", PER_REPLICA)
def test_batchnorm_statistics_are_those_of_all_rows(strategy: str) -> None:
    x = arrays(32)["x"]
    mean, var = statistics(strategy)
    np.testing.assert_allclose(mean, 0.01 * x.mean(0), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(var, 0.99 + 0.01 * x.var(0), rtol=1e-5)


@pytest.mark.parametrize(
    "strategy",
    [
        jl.strategies.ShardMapDDP(sync_batchnorm=False),
        jl.strategies.PMap(sync_batchnorm=False),
        jl.strategies.Simulated(8, sync_batchnorm=False),
    ],
    ids=PER_REPLICA,
)
def test_without_sync_the_replicas_statistics_are_averaged(strategy: jl.Strategy) -> None:
    x = arrays(32)["x"].reshape(8, 4, 4)
    mean, var = statistics(strategy)
    np.testing.assert_allclose(mean, 0.01 * x.mean((0, 1)), rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(var, 0.99 + 0.01 * x.var(1).mean(0), rtol=1e-5)


class Counting(Linear):
    """Keeps an integer that depends on the rows it saw."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        self.seen[...] += (batch["x"] > 0).sum().astype(jnp.int32)
        return super().training_step(batch)


@pytest.mark.parametrize("strategy", PER_REPLICA)
def test_an_integer_that_counts_rows_counts_those_of_all_replicas(strategy: str) -> None:
    module, batches = Counting(rngs=nnx.Rngs(0)), [arrays(32), arrays(13)]
    jl.Trainer(strategy=strategy, max_epochs=1, **QUIET).fit(module, batches)
    assert int(module.seen[...]) == sum(int((batch["x"] > 0).sum()) for batch in batches)


def test_a_tail_counts_once_in_metric_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mean(Linear):
        def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
            self.log("x", batch["x"].mean(), on_step=False, on_epoch=True)
            return super().training_step(batch)

    data = arrays(33)
    data["x"][32] = 1000
    loader = jl.ArrayLoader(data, 32)

    def epoch_mean() -> float:
        trainer = jl.Trainer(strategy="shard_map", max_epochs=1, accumulate_grad_batches=2, **QUIET)
        trainer.fit(Mean(rngs=nnx.Rngs(0)), loader)
        return trainer.callback_metrics["x"]

    assert epoch_mean() == pytest.approx(data["x"].mean(), rel=1e-5)
    monkeypatch.setattr(Replica, "share", 1.0)
    rows = data["x"].mean(1)
    assert epoch_mean() == pytest.approx((rows[:32].sum() + 8 * rows[32]) / 40, rel=1e-5)


def test_meshes_have_auto_axes() -> None:
    for name in ("single", "ddp", "fsdp", "shard_map", "pmap", "simulate:2"):
        mesh = jl.Trainer(strategy=name, max_epochs=1, **QUIET).strategy.mesh
        assert set(mesh.axis_types) == {AxisType.Auto}


def test_explicit_axes_break_an_ordinary_layer() -> None:
    mesh = jax.make_mesh((8,), ("data",))
    kernel = jax.device_put(np.ones((16, 16), np.float32), NamedSharding(mesh, P(None, "data")))
    x = jax.device_put(np.ones((16, 16), np.float32), NamedSharding(mesh, P("data")))
    with pytest.raises(Exception, match="(?i)shard"):
        jax.jit(lambda x, kernel: x @ kernel)(x, kernel)


@pytest.mark.parametrize("strategy", PER_REPLICA)
@pytest.mark.parametrize("devices", (1, 2, 8))
def test_losses_that_couple_rows_see_one_replicas_rows(strategy: str, devices: int) -> None:
    class Coupled(Linear):
        def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
            return self.linear(batch["x"]).mean() ** 2

    batch = arrays(16)
    module = Coupled(rngs=nnx.Rngs(0))
    outputs = np.asarray(module.linear(batch["x"])).reshape(devices, -1)
    name = strategy.partition(":")[0]
    training = jl.testing.train(lambda: Coupled(rngs=nnx.Rngs(0)), [batch], strategy=name, devices=devices, steps=1)
    assert training.loss[0] == pytest.approx((outputs.mean(1) ** 2).mean(), rel=1e-5)


def test_a_replica_has_one_body_for_each_of_its_two_programs() -> None:
    replica = Replica(axis="data", count=8)
    assert replica.splits and replica.share == 1.0
    whole = replace(replica, whole=True)
    assert not whole.splits and whole.share == 1 / 8
