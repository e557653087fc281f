"""A callback and a strategy as a user would write them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlit as jl

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Model(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(4, 64, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        loss = jnp.mean((self.out(nnx.tanh(self.hidden(batch["x"]))) - batch["y"]) ** 2)
        self.log("train/loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.05)


def data() -> jl.ArrayLoader:
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    return jl.ArrayLoader({"x": x, "y": x.sum(1, keepdims=True)}, 16)


class StopAtLoss(jl.Callback):
    """Stop as soon as the training loss is low enough."""

    def __init__(self, target: float) -> None:
        self.target = target
        self.rows: list[tuple[int, float]] = []

    def on_log(self, trainer: jl.Trainer, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values["train/loss"]))
        if values.get("train/loss", math.inf) <= self.target:
            trainer.stop(f"train/loss reached {self.target}")


@pytest.mark.smoke
def test_a_users_callback_stops_training() -> None:
    stop = StopAtLoss(0.5)
    trainer = jl.Trainer(strategy="single", max_epochs=200, log_every_n_steps=1, callbacks=[stop], **QUIET)
    trainer.fit(Model(rngs=nnx.Rngs(0)), data())
    assert trainer.stop_reason == "train/loss reached 0.5"
    low = [step for step, loss in stop.rows if loss <= 0.5]
    # Rows come one step late, so one more step was taken, and its row is logged too.
    assert trainer.global_step == low[0] + 2
    assert trainer.current_epoch < 200


@pytest.fixture
def by_columns() -> Any:
    """Register a strategy for one test."""

    @jl.register_strategy("columns")
    class Columns(jl.Strategy):
        """Split every matrix along its last dim."""

        axis = "model"

        def state_sharding(self, state: Any) -> Any:
            def spec(x: Any) -> P:
                return P(None, self.axis) if len(x.shape) == 2 and x.shape[1] % self.mesh.size == 0 else P()

            return jax.tree.map(lambda x: NamedSharding(self.mesh, spec(x)), state)

    yield Columns
    from jaxlit.strategies import registry

    del registry._registry["columns"]


def test_a_users_strategy_trains_like_a_single_device(by_columns: Any) -> None:
    jl.testing.assert_same_training(
        lambda: Model(rngs=nnx.Rngs(0)), data(), strategies=["columns", by_columns()], devices=(1, 8), max_epochs=2
    )
    trainer = jl.Trainer(strategy="columns", max_epochs=1, **QUIET)
    trainer.fit(Model(rngs=nnx.Rngs(0)), data())
    kernel = trainer.state.params["hidden"]["kernel"]
    assert kernel.sharding.spec == P(None, "model")
    assert kernel.addressable_shards[0].data.shape == (4, 8)


def test_a_name_is_registered_once(by_columns: Any) -> None:
    with pytest.raises(ValueError, match="the name is taken"):
        jl.register_strategy("columns")
    with pytest.raises(ValueError, match="the name is taken"):
        jl.register_strategy("ddp")
    with pytest.raises(TypeError, match="takes a subclass of jaxlit.Strategy"):
        jl.register_strategy("mine")(Model)  # type: ignore[type-var]


def test_an_unknown_strategy_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"Unknown strategy 'fspd'. Did you mean 'fsdp'\? Known: auto, single, ddp, fsdp"
    ):
        jl.Trainer(strategy="fspd", max_epochs=1)


@pytest.mark.parametrize(("devices", "expected"), ((1, "SingleDevice"), (2, "DDP"), ("auto", "DDP")))
def test_auto_is_single_on_one_device_and_ddp_on_more(devices: Any, expected: str) -> None:
    strategy = jl.Trainer(devices=devices, max_epochs=1, **QUIET).strategy
    assert type(strategy).__name__ == expected
    assert "(auto: " in strategy.describe()


@pytest.mark.parametrize(
    ("arguments", "message"),
    (
        ({"devices": 9}, r"devices=9\) asks for more devices than the 8 cpu devices here. Set XLA_FLAGS="),
        ({"devices": 0}, r"devices=...\) takes an int of at least 1, got 0"),
        ({"strategy": "simulate:0"}, r"replicas=...\) must be a positive int, got 0"),
        ({"strategy": "simulate:x"}, "after the colon comes an int"),
        ({"strategy": "simulate:4", "devices": 2}, "names two numbers of replicas"),
        ({"strategy": "ddp:4"}, "takes no number"),
        ({"strategy": jl.strategies.DDP}, r"got a class. Pass DDP\(\)"),
        ({"strategy": 3}, "takes a name or a jaxlit.Strategy, got 3"),
    ),
)
def test_what_cannot_be_laid_out_is_refused_at_construction(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(jl.errors.JaxlitError, match=message):
        jl.Trainer(**arguments, max_epochs=1, **QUIET)
