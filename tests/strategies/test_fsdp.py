"""What fully sharded training holds where, and that it trains like a single device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxlit as jl

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
WIDTH, VOCAB = 64, 128


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, WIDTH, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Transformer(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def training_step(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return optax.softmax_cross_entropy_with_integer_labels(self.head(x), tokens[:, 1:]).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


def tokens() -> jl.ArrayLoader:
    return jl.ArrayLoader(np.random.default_rng(0).integers(0, VOCAB, (32, 9)).astype(np.int32), 16)


def shares(trees: Any) -> list[float]:
    """Return the part of all bytes that each device holds."""
    held: dict[Any, int] = {}
    arrays = jax.tree.leaves(trees)
    for x in arrays:
        for shard in x.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return [size / sum(x.nbytes for x in arrays) for size in held.values()]


def fitted(model: Any, data: Any, strategy: Any = "fsdp", **arguments: Any) -> jl.Trainer:
    trainer = jl.Trainer(strategy=strategy, max_epochs=1, **arguments, **QUIET)
    trainer.fit(model, data)
    return trainer


def test_each_of_8_devices_holds_at_most_14_percent_of_a_transformer() -> None:
    state = fitted(Transformer(rngs=nnx.Rngs(0)), tokens()).state
    held = shares((state.params, state.opt_state))
    assert len(held) == 8
    assert max(held) <= 0.14


def test_stage_1_splits_the_optimizer_alone() -> None:
    state = fitted(Transformer(rngs=nnx.Rngs(0)), tokens(), "zero1").state
    assert max(shares(state.opt_state)) <= 0.14
    assert shares(state.params) == [1.0] * 8


@pytest.mark.parametrize(("stage", "held"), ((1, 1.0), (2, 0.14), (3, 0.14)))
def test_gradients_in_a_window_are_split_from_stage_2_on(stage: int, held: float) -> None:
    strategy = jl.strategies.FSDP(stage=stage)
    state = fitted(Transformer(rngs=nnx.Rngs(0)), tokens(), strategy, accumulate_grad_batches=2).state
    assert max(shares(state.window.grads)) <= held
    assert max(shares(state.params)) <= (0.14 if stage == 3 else 1.0)


@pytest.mark.parametrize("stage", (1, 2, 3))
@pytest.mark.parametrize("accumulate", (1, 2))
def test_every_stage_trains_like_a_single_device(stage: int, accumulate: int) -> None:
    jl.testing.assert_same_training(
        lambda: Transformer(rngs=nnx.Rngs(0)),
        tokens(),
        strategies=[jl.strategies.FSDP(stage=stage)],
        devices=(8,),
        steps=2,
        tx=optax.adamw(1e-3, eps=1e-3),
        max_epochs=2,
        accumulate_grad_batches=accumulate,
    )


class Shapes(jl.TrainModule):
    """One parameter of each awkward shape, each in the loss."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        key = jax.random.key(0)
        self.weights = nnx.List([nnx.Param(jax.random.normal(key, shape)) for shape in shapes])

    def training_step(self, batch: jax.Array) -> jax.Array:
        return sum((jnp.mean(w[...] ** 2) for w in self.weights), jnp.zeros(())) * batch.mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


AWKWARD = ((50257, 768), (1025, 64), (10,), (7, 13))


def test_shapes_that_divide_in_one_dim_or_none_train() -> None:
    trainer = fitted(jl.lazy(Shapes, AWKWARD), [np.ones((8, 1), np.float32)])
    weights = trainer.state.params["weights"]
    assert [weights[i].sharding.spec for i in range(4)] == [P(None, "fsdp"), P(None, "fsdp"), P(), P()]
    for i, shape in enumerate(AWKWARD):
        start = jax.random.normal(jax.random.key(0), shape)
        np.testing.assert_allclose(weights[i], start - 2 * start / start.size, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "spec"),
    (
        ((64, 128), P(None, "fsdp")),
        ((128, 64), P("fsdp")),
        ((100, 64), P(None, "fsdp")),
        ((32, 32), P()),  # 1024 elements stay whole
        ((33, 31), P()),  # nothing divides
        ((), P()),
        ((4, 16, 32), P(None, None, "fsdp")),
    ),
)
def test_the_largest_dim_that_divides_is_split(shape: tuple[int, ...], spec: P) -> None:
    strategy = jl.strategies.FSDP()
    strategy.setup(jax.devices())
    assert strategy.spec(shape) == spec


@pytest.mark.parametrize(
    "tx",
    (
        optax.adamw(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
        optax.adafactor(1e-2, min_dim_size_to_factor=8),
        optax.contrib.muon(1e-2),
        optax.masked(optax.adam(1e-2), lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
        optax.partition(
            {"matrix": optax.adam(1e-2), "rest": optax.sgd(1e-2)},
            lambda params: jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "rest", params),
        ),
        optax.chain(optax.sgd(1e-2, momentum=0.9), optax.ema(0.9)),
    ),
    ids=("adamw", "clipped", "adafactor", "muon", "masked", "partition", "ema"),
)
def test_optimizer_state_is_split_as_its_parameters_are(tx: optax.GradientTransformation) -> None:
    class Tuned(Transformer):
        def configure_optimizers(self) -> optax.GradientTransformation:
            return tx

    state = fitted(Tuned(rngs=nnx.Rngs(0)), tokens()).state
    specs = {x.shape: x.sharding.spec for x in jax.tree.leaves(state.params)}
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.shape in specs and x.size > 1024]
    assert all(x.sharding.spec == specs[x.shape] for x in moments)


def test_frozen_parameters_are_split_too_and_do_not_change() -> None:
    class Finetuned(Transformer):
        def configure_optimizers(self) -> jl.Optimizer:
            return jl.Optimizer(optax.adamw(1e-2), wrt=nnx.All(nnx.Param, nnx.PathContains("head")))

    module = Finetuned(rngs=nnx.Rngs(0))
    before = np.array(module.embed.embedding[...])
    head = np.array(module.head.kernel[...])
    state = fitted(module, tokens()).state
    assert max(shares(state.frozen)) <= 0.14
    np.testing.assert_array_equal(module.embed.embedding[...], before)
    assert np.abs(head - module.head.kernel[...]).max() > 0


@pytest.mark.parametrize("arguments", ({"stage": 0}, {"stage": "3"}, {"min_size": -1}, {"min_size": 1.5}))
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(jl.errors.ArgumentError, match=rf"FSDP\({name}=...\)"):
        jl.strategies.FSDP(**arguments)
