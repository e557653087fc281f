"""Fully sharded training with collectives of its own: how many there are, and what it writes back."""

import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from kit.batches import sized
from kit.inside import lowered
from kit.modules import Net
from kit.refusals import fit_refuses, refuses
from kit.trainers import fit, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError
from jaxlit.strategies import FSDP


class Wide(jl.TrainModule):
    """Two matrices that are split, a bias that is not, and a matrix that the step writes to itself."""

    def __init__(self) -> None:
        self.layers = nnx.List([nnx.Linear(16, 16, use_bias=bias, rngs=nnx.Rngs(bias)) for bias in (True, False)])
        self.scale = nnx.Param(jnp.ones((16, 16)))

    def training_step(self, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        self.scale[...] = self.scale[...] * 0.5
        return jnp.mean((x.sum(-1, keepdims=True) - batch["y"]) ** 2)

    def configure_optimizers(self) -> jl.Optimizer:
        return jl.Optimizer(optax.adamw(1e-2), wrt=nnx.PathContains("layers"))


def collectives(trainer: jl.Trainer, program: str, batch: Any) -> Counter[str]:
    text = lowered(trainer, program, batch).as_text()
    return Counter(re.findall(r"stablehlo\.(all_gather|all_reduce|reduce_scatter)", text))


def test_explicit_reduces_once_a_window() -> None:
    batches = sized(16, 16, features=16)
    strategy = FSDP(min_size=100, body="explicit")
    trainer = fit(Wide(), batches, strategy=strategy, accumulate_grad_batches=2)
    # Two weights, and the matrix that is written to; neither moments nor the bias.
    assert collectives(trainer, "micro_step", batches[0]) == {"all_gather": 3}
    update = collectives(trainer, "train_step", batches[0])
    assert (update["all_gather"], update["reduce_scatter"]) == (3, 2)
    assert "explicit: all parameters and gradients on each device" in trainer.strategy.describe()


@pytest.mark.parametrize("stage", thinned([1, 2, 3], 3))
def test_a_write_to_a_split_array_writes_its_shards(stage: int) -> None:
    module = Wide()
    module.scale[...] = jnp.arange(256.0).reshape(16, 16)
    fit(module, sized(16, 16, features=16), strategy=FSDP(stage=stage, min_size=100, body="explicit"))
    np.testing.assert_array_equal(module.scale[...], np.arange(256.0).reshape(16, 16) / 4)


class Target(nnx.Variable):
    """State that is no parameter."""


@pytest.mark.parametrize("rule", [None, P(None, "data")])
def test_a_copy_of_a_split_parameter_follows_its_own_rule(rule: P | None) -> None:
    class Copies(jl.TrainModule):
        def __init__(self) -> None:
            self.weight = nnx.Param(jnp.arange(64.0).reshape(16, 4) / 64)
            self.target = Target(jnp.zeros((16, 4)))

        def training_step(self, batch: Any) -> jax.Array:
            self.target[...] = self.weight[...]
            return jnp.mean((batch["x"] @ self.weight[...]) ** 2)

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.0)

    rules = {"weight": P("data")} | ({} if rule is None else {"target": P("data", None)})
    module = Copies()
    trainer = fit(module, sized(16, 16, features=16), strategy=FSDP(min_size=0, body="explicit", rules=rules))
    np.testing.assert_array_equal(module.target[...], np.arange(64.0).reshape(16, 4) / 64)
    assert trainer.state.model_state["target"].sharding.is_fully_replicated == (rule is None)


def test_a_batch_spec_of_a_subclass_is_refused() -> None:
    class Mine(FSDP):
        def batch_spec(self, x: Any) -> P:
            return P()

    refuses(ArgumentError, lambda: Mine(body="explicit").setup(), r"Mine\.batch_spec splits a batch.*body='auto'")


@pytest.mark.parametrize("where", [{"replicas": 2}, {"mesh": {"other": 2, "data": 4}}])
def test_a_mesh_of_several_axes_is_refused(where: dict[str, Any]) -> None:
    strategy = FSDP(body="explicit", **where)
    words = r"FSDP\(body='explicit'\) takes a mesh of one axis"
    fit_refuses(ArgumentError, words, model=Net(rngs=nnx.Rngs(0)), strategy=strategy)
