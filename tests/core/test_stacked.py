"""`jl.Stacked`: layers whose arrays are stacked give what the same layers one after the other give."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from kit.by_hand import GRAPH
from kit.trainers import BARE, make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError
from jaxlit.strategies import FSDP, TensorParallel

COUNT, WIDTH = 3, 16


class Layer(nnx.Module):
    """Writes statistics, draws random numbers, and takes an argument that all layers share."""

    def __init__(self, rngs: nnx.Rngs, names: Any = None) -> None:
        init = nnx.initializers.lecun_normal()
        init = nnx.with_partitioning(init, names) if names else init
        self.norm, self.linear = nnx.BatchNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, kernel_init=init, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array, scale: Any = 1.0) -> jax.Array:
        return x + scale * self.dropout(jnp.tanh(self.linear(self.norm(x))))


class Net(jl.TrainModule):
    def __init__(self, names: Any = None, *, rngs: nnx.Rngs) -> None:
        self.layers = jl.Stacked(lambda rngs: Layer(rngs, names), COUNT, rngs=rngs)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        loss = jnp.mean((self.layers(batch["x"], scale=batch["scale"].mean()) - 1) ** 2)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def data() -> jl.ArrayLoader:
    x = np.random.default_rng(0).normal(size=(48, WIDTH)).astype(np.float32)
    return jl.ArrayLoader({"x": x, "scale": np.full(48, 0.5, np.float32)}, 16)


def unstacked(stacked: jl.Stacked) -> list[Layer]:
    """Return the layers, each with its part of the arrays."""
    graph, state = nnx.split(stacked.layers)
    return [nnx.merge(graph, jax.tree.map(lambda x: x[k], state)) for k in range(COUNT)]  # noqa: B023


def test_values_gradients_and_statistics_are_those_of_the_layers_in_turn() -> None:
    stacked = jl.Stacked(Layer, COUNT, rngs=nnx.Rngs(0))
    layers = unstacked(stacked)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, WIDTH)), jnp.float32)

    def in_turn(layers: list[Layer], x: jax.Array) -> jax.Array:
        for layer in layers:
            x = layer(x, 0.5)
        return (x**2).sum()

    loss, grads = nnx.value_and_grad(in_turn, **GRAPH)(layers, x)
    result, stacked_grads = nnx.value_and_grad(lambda stacked, x: (stacked(x, 0.5) ** 2).sum(), **GRAPH)(stacked, x)
    np.testing.assert_allclose(result, loss, rtol=1e-6)
    for got, *each in zip(*map(jax.tree.leaves, (stacked_grads, *grads)), strict=True):
        each = np.stack(each)  # sums, which are exact to a part of their largest terms
        np.testing.assert_allclose(got, each, rtol=1e-5, atol=1e-6 * np.abs(each).max())
    for got, *each in zip(*(jax.tree.leaves(nnx.state(x, nnx.BatchStat)) for x in (stacked, *layers)), strict=True):
        np.testing.assert_allclose(got, jnp.stack(each), rtol=1e-6)
    masks = [layer.dropout(jnp.ones(256)) for layer in unstacked(stacked)]
    assert not np.array_equal(masks[0], masks[1])


def test_the_program_has_one_layer_whatever_their_count() -> None:
    def size(count: int) -> int:
        graph, state = nnx.split(jl.Stacked(Layer, count, rngs=nnx.Rngs(0)))
        run = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
        return len(run.lower(state, jnp.ones((2, WIDTH))).as_text().splitlines())

    assert size(2) == size(32)


SHARDED = ["ddp", "fsdp", FSDP(remat=True), "zero1"]


@pytest.mark.parametrize("strategy", thinned(SHARDED, SHARDED[2], full=SHARDED))
def test_strategies_train_it_as_one_device_does(strategy: Any) -> None:
    runs = []
    for chosen, module in (("single", Net(rngs=nnx.Rngs(0))), (strategy, jl.lazy(Net))):
        trainer = make_trainer(strategy=chosen, max_epochs=2, **BARE)
        trainer.fit(module, data())
        state = trainer.state  # not the sums of metrics, whose rounding errors are kept in them
        arrays = jax.tree.leaves((state.variables, state.opt_state))
        runs.append([x for x in arrays if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)])
    for one, many in zip(*runs, strict=True):
        np.testing.assert_allclose(many, one, rtol=2e-5, atol=1e-6)


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(ArgumentError, match="at least 1, got 0"):
        jl.Stacked(Layer, 0, rngs=nnx.Rngs(0))


def test_names_of_dims_are_those_of_a_layer() -> None:
    trainer = make_trainer(strategy=TensorParallel(tp=2, data=4, rules={"mlp": "tp"}), max_steps=1, **BARE)
    trainer.fit(jl.lazy(Net, names=(None, "mlp")), data())
    assert trainer.state.params["layers"]["layers"]["linear"]["kernel"].sharding.spec == P(None, None, "tp")
