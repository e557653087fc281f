"""Strategies by name: one that a user registers, the names that there are, and what `auto` chooses."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kit.batches import random
from kit.inside import registered_strategies
from kit.journal import hooks
from kit.modules import Linear, Mean, Net
from kit.refusals import refuses
from kit.trainers import fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError


@pytest.fixture
def columns() -> Iterator[type[jl.Strategy]]:
    """Register a strategy for one test."""

    @jl.register_strategy("columns")
    class Columns(jl.Strategy):
        """Split every matrix along its last dim."""

        batch_axes = ("model",)

        def mesh_shape(self, device_count: int) -> dict[str, int]:
            return {"model": device_count}

        def state_sharding(self, state: Any, model: Any, example: Any) -> Any:
            def spec(x: Any) -> P:
                return P(None, "model") if len(x.shape) == 2 and x.shape[1] % self.mesh.size == 0 else P()

            return jax.tree.map(lambda x: NamedSharding(self.mesh, spec(x)), state)

    yield Columns
    del registered_strategies["columns"]


@pytest.mark.full
def test_a_users_strategy_trains_like_a_single_device(columns: Any) -> None:
    build = lambda: Net(rngs=nnx.Rngs(0))  # noqa: E731
    jl.testing.assert_same_training(build, random(), strategies=["columns"], devices=(8,))
    kernel = fit(build(), random(), strategy="columns").state.params["inner"]["kernel"]
    assert kernel.sharding.spec == P(None, "model")
    assert kernel.addressable_shards[0].data.shape == (3, 2)


def test_a_name_is_registered_once(columns: Any) -> None:
    for name in ("columns", "ddp"):
        with pytest.raises(ValueError, match="the name is taken"):
            jl.register_strategy(name)
    with pytest.raises(TypeError, match=r"takes a subclass of jaxlit\.Strategy"):
        jl.register_strategy("mine")(Mean)  # type: ignore[type-var]


@pytest.mark.parametrize(("devices", "expected"), [(1, "SingleDevice"), (2, "DDP"), ("auto", "DDP")])
def test_auto_is_single_on_one_device_and_ddp_on_more(devices: Any, expected: str) -> None:
    strategy = make_trainer(strategy="auto", devices=devices).strategy
    assert type(strategy).__name__ == expected
    assert "(auto: " in strategy.describe()


@pytest.mark.parametrize("kind", thinned(["DDP", "FSDP", "ShardMapDDP", "PMap"], full=["FSDP", "PMap"]))
def test_a_strategy_object_may_serve_two_trainers(kind: str) -> None:
    strategy, batches = getattr(jl.strategies, kind)(), random()
    trainers = {count: make_trainer(strategy=strategy, devices=count) for count in (8, 2)}
    weights = []
    for count in (8, 2, 8):
        model = Net(rngs=nnx.Rngs(0))
        trainers[count].fit(model, batches)
        weights.append(model.outer.kernel[...])
        assert weights[-1].sharding.device_set == set(jax.devices()[:count])
    np.testing.assert_array_equal(weights[0], weights[2])
    np.testing.assert_allclose(np.asarray(weights[0]), np.asarray(weights[1]), rtol=1e-4)
    # A Trainer keeps its devices when another takes its strategy object.
    assert trainers[2].apply(Net.predict_step, batches[0]).sharding.device_set == set(jax.devices()[:2])


def test_absent_devices_are_an_error_of_fit() -> None:
    trainer = make_trainer(strategy="fsdp", devices=64)
    assert trainer.settings.devices == 64
    began = []
    trainer.callbacks = [hooks(setup=lambda *_: began.append(1))]
    refuses(ArgumentError, lambda: trainer.fit(Linear(), random()), "devices=64")
    assert not began
    refuses(ArgumentError, lambda: jl.compile_step(Linear(), batch=random()[0], devices=64), "devices=64")
