"""The proofs that users can run: what they compare, with whom, and what they say of a strategy that is wrong."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.core.replica import Replica
from jaxlit.errors import ArgumentError
from jaxlit.testing import KeepFirstGrads, keep_first_grads

ROWS = 32


def loader(rows: int = 2 * ROWS) -> jl.ArrayLoader:
    rng = np.random.default_rng(0)
    return jl.ArrayLoader({k: rng.normal(size=(rows, 12)).astype(np.float32) for k in ("x", "y")}, ROWS)


class Rows(jl.TrainModule):
    """A loss that is a mean over rows."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(12, 16, rngs=rngs)
        self.out = nnx.Linear(16, 12, rngs=rngs)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((self.out(nnx.tanh(self.hidden(batch["x"]))) - batch["y"]) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-2, eps=1e-3)


def test_the_kit_names_the_strategy_that_is_wrong() -> None:
    class Doubled(jl.strategies.DDP):
        def constrain_grads(self, grads: Any) -> Any:
            return jax.tree.map(lambda g: 2 * g, grads)

        def __str__(self) -> str:
            return "doubled"

    with pytest.raises(AssertionError, match="grads .* and doubled on 2 differ"):
        jl.testing.assert_same_training(
            lambda: Rows(rngs=nnx.Rngs(0)), loader(), strategies=["ddp", Doubled()], devices=(2,), compare=("grads",)
        )


class Forgetful(Replica):
    """Keeps the gradients of a replica to itself."""

    def pmean(self, tree: Any) -> Any:
        return tree


def make_forgetful(made: jl.strategies.PerReplica) -> jl.strategies.PerReplica:
    cls: Any = type(made)
    forgets = property(lambda self: Forgetful(**vars(cls.replica.fget(self))))
    made.__class__ = type("Forgets", (cls,), {"replica": forgets, "__str__": lambda self: "forgetful"})
    return made


@pytest.mark.parametrize("strategy", [jl.strategies.ShardMapDDP, jl.strategies.PMap, jl.strategies.Simulated])
def test_the_kit_says_of_a_strategy_that_forgets_its_mean_that_the_gradient_is_another(strategy: Any) -> None:
    with pytest.raises(AssertionError, match="the gradient of the first step under single on auto and forgetful on 2"):
        jl.testing.assert_same_training(
            lambda: Rows(rngs=nnx.Rngs(0)),
            loader(),
            strategies=[make_forgetful(strategy())],
            devices=(2,),
            compare=("grads",),
        )


class Tailed(Rows):
    """Counts its rows, its batches and those of an odd number of rows."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)
        self.counts = nnx.Variable(jnp.zeros(3, jnp.int32))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        rows = len(batch["x"])
        self.counts[...] += jnp.array([rows, 1, rows % 2])
        return super().training_step(batch)


def train_rows(module: Any, batches: list[Any]) -> list[jax.Array]:
    """Train `Rows` as anyone would: nnx and optax, no Trainer."""
    optimizer = nnx.Optimizer(module, optax.adamw(1e-2, eps=1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(module: Any, optimizer: Any, batch: Any) -> jax.Array:
        loss, grads = nnx.value_and_grad(lambda module: module.training_step(batch))(module)
        optimizer.update(module, grads)
        return loss

    return [step(module, optimizer, batch) for batch in batches]


def test_the_kit_compares_with_a_loop_of_the_users_own_on_batches_with_a_tail() -> None:
    sizes = []

    def reference(module: Any, batches: list[Any]) -> list[jax.Array]:
        sizes.extend(len(batch["x"]) for batch in batches)
        return train_rows(module, batches)

    jl.testing.assert_same_training(
        lambda: Tailed(rngs=nnx.Rngs(0)), loader(), strategies=["ddp"], devices=(8,), steps=3, reference=reference
    )
    assert sizes == [32, 32, 32, 31]


def test_the_kit_says_that_all_strategies_differ_from_the_users_loop() -> None:
    def reference(module: Any, batches: list[Any]) -> list[jax.Array]:
        losses = train_rows(module, batches)
        module.hidden.kernel[...] *= 1.01
        return losses

    with pytest.raises(AssertionError, match=r"params hidden\.kernel: the reference and single on auto differ"):
        jl.testing.assert_same_training(
            lambda: Rows(rngs=nnx.Rngs(0)), loader(), strategies=["ddp"], devices=(2,), reference=reference
        )


def test_the_kit_compares_whole_numbers() -> None:
    class Miscounting(jl.strategies.DDP):
        def canonical(self, state: Any) -> Any:
            return state

        def __str__(self) -> str:
            return "miscounting"

        def create_state(self, init: Any, shardings: Any, *inputs: Any, donate: bool = False) -> Any:
            leaves = super().create_state(init, shardings, *inputs, donate=donate)
            one_more = lambda x: x + (x.shape == (3,) and x.dtype == jnp.int32)  # noqa: E731
            return jax.tree.map(one_more, leaves)

    with pytest.raises(AssertionError, match=r"params counts: single on auto has \[.*\], miscounting on 2 has"):
        jl.testing.assert_same_training(
            lambda: Tailed(rngs=nnx.Rngs(0)), loader(), strategies=[Miscounting()], devices=(2,)
        )


def test_the_kit_compares_random_models_with_another_strategy_never_with_themselves() -> None:
    class Random(Rows):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            super().__init__(rngs=rngs)
            self.rngs = rngs.fork()

        def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
            noise = jax.random.normal(self.rngs.noise(), batch["x"].shape)
            return super().training_step(batch | {"x": batch["x"] + noise})

    make = lambda: Random(rngs=nnx.Rngs(0))  # noqa: E731
    jl.testing.assert_same_training(make, loader(), strategies=["shard_map"], devices=(2,), steps=2)
    with pytest.raises(AssertionError, match="the gradient of the first step under Simulated on 2 and forgetful on 2"):
        jl.testing.assert_same_training(
            make,
            loader(),
            strategies=[make_forgetful(jl.strategies.ShardMapDDP())],
            devices=(2,),
            steps=2,
            compare=("grads",),
        )


def test_the_kit_refuses_to_compare_with_nothing() -> None:
    with pytest.raises(ArgumentError, match="has nothing to compare 'single' with"):
        jl.testing.assert_same_training(lambda: Rows(rngs=nnx.Rngs(0)), loader(), strategies=["single"])


def test_the_kit_refuses_an_unknown_part() -> None:
    with pytest.raises(ValueError, match="compare"):
        jl.testing.assert_same_training(lambda: Rows(rngs=nnx.Rngs(0)), loader(), strategies=["ddp"], compare=("x",))


def test_the_first_gradients_are_kept_and_later_ones_are_not() -> None:
    tx = keep_first_grads()
    state: KeepFirstGrads = tx.init({"w": jnp.zeros(2)})
    for i in (1.0, 2.0, 3.0):
        updates, state = tx.update({"w": jnp.full(2, i)}, state)
        np.testing.assert_array_equal(updates["w"], [i, i])
    np.testing.assert_array_equal(state.grads["w"], [1.0, 1.0])
