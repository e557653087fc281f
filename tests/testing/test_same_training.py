"""The proofs that users can run: what they compare, with whom, and what they say of a strategy that is wrong."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.by_hand import HandLoop
from kit.trainers import thinned

import jaxlit as jl
from jaxlit.core.replica import Replica
from jaxlit.errors import ArgumentError
from jaxlit.testing.same_training import keep_first_grads

ROWS = 32


class Rows(jl.TrainModule):
    """A loss that is a mean over rows."""

    def __init__(self, *, rngs):
        self.hidden = nnx.Linear(12, 12, rngs=rngs)

    def training_step(self, batch):
        return jnp.mean((self.hidden(batch["x"]) - batch["y"]) ** 2)

    def configure_optimizers(self):
        return optax.sgd(1e-2)


class Counting(Rows):
    """Counts its rows, its batches and those of an odd number of rows."""

    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.counts = nnx.Variable(jnp.zeros(3, jnp.int32))

    def training_step(self, batch):
        rows = len(batch["x"])
        self.counts[...] += jnp.array([rows, 1, rows % 2])
        return super().training_step(batch)


class Random(Rows):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.rngs = rngs.fork()

    def training_step(self, batch):
        noise = jax.random.normal(self.rngs.noise(), batch["x"].shape)
        return super().training_step(batch | {"x": batch["x"] + noise})


class Named:
    def __str__(self):
        return "wrong"


@dataclass(frozen=True)
class Scaling(Replica):
    factor: int = 1

    def pmean(self, tree):
        return jax.tree.map(lambda x: self.factor * x, super().pmean(tree))


class Doubled(Named, jl.strategies.DDP):
    @property
    def replica(self):
        return Scaling(**vars(super().replica), factor=2)


class Miscounting(Named, jl.strategies.DDP):
    def create_state(self, init, shardings, *inputs, donate=False):
        leaves = super().create_state(init, shardings, *inputs, donate=donate)
        return jax.tree.map(lambda x: x + (x.shape == (3,) and x.dtype == jnp.int32), leaves)


class Forgetful(Replica):
    """Keeps the gradients of a replica to itself."""

    def pmean(self, tree):
        return tree


def forgetful(base):
    replica = property(lambda self: Forgetful(**vars(base.replica.fget(self))))
    return type("Forgets", (Named, base), {"replica": replica})()


def compare(*strategies, module=Rows, devices=(2,), rows=2 * ROWS, **arguments):
    rng = np.random.default_rng(0)
    loader = jl.ArrayLoader({key: rng.normal(size=(rows, 12)).astype(np.float32) for key in ("x", "y")}, ROWS)
    make = lambda: module(rngs=nnx.Rngs(0))  # noqa: E731
    return jl.testing.assert_same_training(make, loader, strategies=[*strategies], devices=devices, **arguments)


FIRST = "the gradient of the first step under "


WRONG = [
    (["ddp", Doubled()], "grads", "grads .* and wrong on 2 differ"),
    ([forgetful(jl.strategies.ShardMapDDP)], "grads", f"{FIRST}single on auto and wrong on 2"),
    ([Miscounting()], "params", r"params counts: single on auto has \[.*\], wrong on 2 has"),
    ([forgetful(jl.strategies.PMap)], "grads", f"{FIRST}single on auto and wrong on 2"),
    ([forgetful(jl.strategies.Replicas)], "grads", f"{FIRST}single on auto and wrong on 2"),
]


@pytest.mark.parametrize(("strategies", "part", "words"), thinned(WRONG, WRONG[1]))
def test_the_strategy_that_is_wrong_is_named_with_what_differs(strategies, part, words):
    with pytest.raises(AssertionError, match=words):
        compare(*strategies, module=Counting if part == "params" else Rows, compare=(part,), steps=1)


def train_rows(module, batches):
    """Train as anyone would: nnx and optax, no Trainer."""
    return HandLoop(module, loss=lambda module, batch: module.training_step(batch))(*batches).losses


def test_a_reference_loop_is_compared_on_a_tail_too():
    sizes = []

    def reference(module, batches):
        sizes.extend(len(batch["x"]) for batch in batches)
        losses = train_rows(module, batches)
        module.hidden.kernel[...] *= factor
        return losses

    factor = 1.0
    compare("ddp", module=Counting, devices=(8,), steps=2, reference=reference)
    assert sizes == [32, 32, 31]
    factor = 1.01
    with pytest.raises(AssertionError, match=r"params hidden\.kernel: the reference and single on auto differ"):
        compare("ddp", module=Counting, devices=(8,), steps=2, reference=reference)


@pytest.mark.full
def test_random_models_are_compared_with_a_kin_strategy():
    wrong = forgetful(jl.strategies.ShardMapDDP)  # the right one before it is passed over
    with pytest.raises(AssertionError, match=f"{FIRST}Replicas on 2 and wrong on 2"):
        compare("shard_map", wrong, module=Random, steps=1, compare=("grads",))


@pytest.mark.full
def test_each_value_of_a_factor_is_trained_under_and_told_of():
    precisions, given = ("32-true", "bf16-mixed"), []

    def reference(module, batches, **values):
        given.append(values)
        return train_rows(module, batches)

    result = compare("ddp", steps=2, factors={"precision": precisions}, reference=reference)
    assert list(result) == [f"{name}, precision={p}" for p in precisions for name in ("single on auto", "ddp on 2")]
    assert given == [{"precision": p} for p in precisions]
    exact, rounded = (max(result[name] for name in result if precision in name) for precision in precisions)
    assert exact <= 1e-5 < rounded <= 2e-2


def test_factors_and_a_comparison_of_nothing_are_refused():
    for wrong in ((), "bf16-mixed"):
        with pytest.raises(ArgumentError, match="takes a sequence of values of 'precision'"):
            compare("ddp", factors={"precision": wrong})
    with pytest.raises(ArgumentError, match="has nothing to compare 'single' with"):
        compare("single")


def test_the_first_gradients_are_kept_and_later_ones_are_not():
    tx = keep_first_grads()
    state = tx.init({"w": jnp.zeros(2)})
    for i in (1.0, 2.0, 3.0):
        updates, state = tx.update({"w": jnp.full(2, i)}, state)
        np.testing.assert_array_equal(updates["w"], [i, i])
    np.testing.assert_array_equal(state.grads["w"], [1.0, 1.0])
