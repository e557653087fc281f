"""The copy of the module that a step runs: its modes, its statistics, its random keys."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import random
from kit.by_hand import HandLoop, assert_same, state_of
from kit.inside import Replica
from kit.journal import hooks
from kit.modules import Linear, Net, module
from kit.refusals import warnings_of
from kit.trainers import THREE, fit, make_trainer, thinned

from jaxlit.core.pure_module import fold_keys


class Dropping(Linear):
    """Returns and logs what dropout makes of ones, and trains through it."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.dropout(x))

    def training_step(self, batch: Any) -> Any:
        return {"loss": self.loss(batch), "ones": self.dropout(jnp.ones_like(batch["x"]))}

    def validation_step(self, batch: Any) -> Any:
        self.log("mean", jnp.mean(self.dropout(jnp.ones_like(batch["x"]))))

    test_step = validation_step

    def predict_step(self, batch: Any) -> Any:
        return self.dropout(jnp.ones_like(batch["x"]))


def outputs_of(name: str, seen: list[Any]) -> Any:
    return hooks(on_train_batch_end=lambda t, m, outputs, *_: seen.append(np.array(outputs[name])))


@pytest.mark.parametrize("strategy", thinned(THREE, "shard_map"))
def test_dropout_drops_in_training_steps_only(strategy: str) -> None:
    model, batches, seen = Dropping(), random(2, rows=64), []
    trainer = fit(model, batches, batches[:1], outputs_of("ones", seen), strategy=strategy)
    assert [sorted(set(ones.ravel())) for ones in seen] == [[0.0, 2.0]] * 2
    assert (seen[0] != seen[1]).any()
    assert trainer.callback_metrics["mean"] == 1.0
    assert trainer.validate(model, batches) == trainer.test(model, batches) == [{"mean": 1.0}]
    np.testing.assert_array_equal(trainer.predict(model, batches)[0], np.ones((64, 3)))


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp"], "fsdp"))
def test_statistics_and_keys_are_those_of_a_loop_by_hand(strategy: str) -> None:
    def loss(net: Any, batch: Any) -> jax.Array:
        net.count[...] += 1
        return net.loss(batch)

    model, net = (Net(rate=0.5, rngs=nnx.Rngs(0)) for _ in range(2))
    fit(model, random(), strategy=strategy)
    net.train()
    assert_same(state_of(model), state_of(HandLoop(net, loss=loss)(*random()).module))


@pytest.mark.parametrize("evaluating", [False, True])
def test_a_module_trains_in_its_own_mode(evaluating: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, seen = Dropping(), []
    if evaluating:
        model.eval()
    fit(model, random(2, rows=64), random(1), outputs_of("ones", seen)).predict(model, random(1))
    assert model.dropout.deterministic is evaluating
    assert [(ones == 1).all() == evaluating for ones in seen] == [True] * 2
    told = [message for message in warnings_of(caplog) if "evaluation mode" in message]
    assert len(told) == evaluating
    assert all(re.match("Dropping is entirely in eval.*Call module.train.. before fit", message) for message in told)


class Probing(Linear):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.backbone = nnx.Sequential(nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
        self.head = nnx.Linear(3, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, deterministic=None, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.backbone(x))

    def training_step(self, batch: Any) -> Any:
        ones = jnp.ones_like(batch["x"])
        return {"loss": self.loss(batch), "frozen": self.backbone.layers[1](ones), "trained": self.dropout(ones)}

    def validation_step(self, batch: Any) -> Any:
        self.log("dropped", jnp.mean(self.dropout(jnp.ones_like(batch["x"])) == 0))


@pytest.mark.parametrize("strategy", thinned(THREE, "single", "shard_map"))
def test_a_part_in_eval_mode_stays_in_it_and_the_rest_trains(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    model, frozen, trained = Probing(), [], []
    model.backbone.eval()
    watches = outputs_of("frozen", frozen), outputs_of("trained", trained)
    trainer = fit(model, random(2, rows=64), random(1, rows=64), *watches, strategy=strategy)
    assert all((ones == 1).all() for ones in frozen) and all((ones == 0).any() for ones in trained)
    assert trainer.callback_metrics["dropped"] == 0  # validation is entirely in evaluation mode
    assert np.asarray(model.backbone.layers[0].mean[...]).tolist() == [0, 0, 0]
    modes = model.backbone.layers[0].use_running_average, model.backbone.layers[1].deterministic
    assert (*modes, model.dropout.deterministic) == (True, True, None)
    assert "evaluation mode" not in caplog.text


def test_a_frozen_part_that_alone_has_modes_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def init(self: Any) -> None:
        Linear.__init__(self)
        self.backbone = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))

    model = module(base=Linear, init=init, __call__=lambda self, x: Linear.__call__(self, self.backbone(x)))
    model.backbone.eval()
    fit(model, random(1))
    assert "evaluation mode" not in caplog.text


def test_the_modules_train_method_chooses_the_parts() -> None:
    def train(self: Any, **attributes: Any) -> None:
        nnx.Module.train(self, **attributes)
        self.backbone.eval()

    model = module(base=Probing, train=train)
    fit(model, random(2, rows=64))
    assert np.asarray(model.backbone.layers[0].mean[...]).tolist() == [0, 0, 0]


class Drawing(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.rngs = nnx.Rngs(3)

    def predict_step(self, batch: Any) -> jax.Array:
        return jax.random.normal(self.rngs.noise(), (len(batch["x"]),))


@pytest.mark.parametrize("strategy", thinned(THREE, "single", "shard_map"))
def test_evaluations_draw_per_batch_and_alike_in_each_run(strategy: str) -> None:
    model, trainer, batches = Drawing(), make_trainer(strategy=strategy), random(3)
    before = state_of(model)
    first, second = (np.stack(trainer.predict(model, batches)) for _ in range(2))
    np.testing.assert_array_equal(first, second)
    assert len(np.unique(first)) == first.size  # of no two batches, and of no two replicas, the same
    for name, x in state_of(model).items():
        np.testing.assert_array_equal(x, before[name], err_msg=name)


def test_keys_of_stacked_layers_are_folded_and_put_back() -> None:
    class Stacked(nnx.Module):
        def __init__(self) -> None:
            self.key = nnx.RngKey(jax.random.split(jax.random.key(0), 3), tag="noise")

    stacked = Stacked()
    before = jax.random.key_data(stacked.key[...])
    put_back = fold_keys(stacked, Replica(), jnp.int32(5))
    folded = jax.random.key_data(stacked.key[...])
    expected = [jax.random.key_data(jax.random.fold_in(key, 5)) for key in jax.random.split(jax.random.key(0), 3)]
    np.testing.assert_array_equal(folded, np.stack(expected))
    put_back()
    np.testing.assert_array_equal(jax.random.key_data(stacked.key[...]), before)
