"""Strategies by name: one that a user registers, the names that there are, and what `auto` chooses."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from kit.batches import random
from kit.inside import registered_strategies
from kit.journal import hooks
from kit.modules import Linear, Mean, Net
from kit.refusals import refuses
from kit.trainers import make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError


def test_a_registered_name_is_a_strategy_and_taken() -> None:
    class Columns(jl.strategies.DDP):
        """Stands for one that splits in its own way."""

    try:
        jl.register_strategy("columns")(Columns)
        assert type(make_trainer(strategy="columns").strategy) is Columns
        for name in ("columns", "ddp"):
            with pytest.raises(ValueError, match="the name is taken"):
                jl.register_strategy(name)
    finally:
        del registered_strategies["columns"]
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


@pytest.mark.parametrize(
    "text",
    [
        "TensorParallel(tp=2, fsdp=2)",
        "TensorParallel(rules={'dim': 'tp'}, tp=4)",
        "SequenceParallel(seq=2, data=2)",
        "FSDP(min_size=4)",
        "DDP()",
    ],
)
def test_a_strategy_shows_the_arguments_that_make_it_again(text: str) -> None:
    assert repr(eval(f"jl.strategies.{text}")) == text


def test_a_policy_of_what_is_kept_is_shown_by_name() -> None:
    policies = jax.checkpoint_policies
    assert repr(jl.strategies.FSDP(remat=policies.everything_saveable)) == "FSDP(remat=everything_saveable)"
    assert repr(jl.strategies.FSDP(remat=policies.dots_saveable)) != "FSDP()"
