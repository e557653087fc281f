"""What a device holds and sends for a transformer: read off the compiled programs, against counts of its parameters."""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from kit.notebook import LM
from kit.trainers import BARE, fit

import jaxlit as jl
from jaxlit.strategies import FSDP

LAYERS, WIDTH, VOCAB = 12, 64, 128


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.qkv, self.out = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(self.norm_1(x)).reshape(*x.shape[:2], 4, -1)
        part = heads.shape[-1] // 3
        query, key, value = (heads[..., i * part : (i + 1) * part] for i in range(3))
        x = x + self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Scanned(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Block))(rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def training_step(self, tokens: jax.Array) -> jax.Array:
        graph, blocks = nnx.split(self.blocks)
        x, _ = jax.lax.scan(lambda x, block: (nnx.merge(graph, block)(x), None), self.embed(tokens[:, :-1]), blocks)
        return optax.softmax_cross_entropy_with_integer_labels(self.head(x), tokens[:, 1:]).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


def cost_of(strategy: Any, module: Any, tokens: np.ndarray, **arguments: Any) -> Any:
    trainer = fit(module, [tokens], strategy=strategy, **BARE, **arguments)
    (cost,) = [program for program in trainer.explain().programs if program.name == "train_step"]
    return cost, {x.kind: x for x in cost.collectives}, trainer


def parameter_bytes(trainer: jl.Trainer) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(trainer.state.params) if not x.sharding.is_fully_replicated)


TOKENS = np.random.default_rng(0).integers(0, VOCAB, (16, 33)).astype(np.int32)


@pytest.mark.full
def test_scanned_layers_are_gathered_one_at_a_time() -> None:
    plain, sent, trainer = cost_of("fsdp", Scanned(rngs=nnx.Rngs(0)), TOKENS)
    assert set(sent) == {"all-gather", "all-reduce"}  # no activation is moved
    assert sent["all-gather"].bytes <= 2 * 1.1 * parameter_bytes(trainer)
    again, _, _ = cost_of(FSDP(remat=True), Scanned(rngs=nnx.Rngs(0)), TOKENS)
    assert again.memory.temporaries <= 0.45 * plain.memory.temporaries


@pytest.mark.full
def test_each_array_of_a_transformer_is_gathered_once() -> None:
    module = LM(rngs=nnx.Rngs(0))
    _, sent, trainer = cost_of("fsdp", module, np.random.default_rng(0).integers(0, 512, (16, 64)).astype(np.int32))
    assert sum(not x.sharding.is_fully_replicated for x in jax.tree.leaves(trainer.state.params)) == 27
    assert sent["all-gather"].calls <= 27 and sent["all-gather"].bytes <= 1.1 * parameter_bytes(trainer)


class Layers(jl.TrainModule):
    """A decoder whose layers no scan runs, and whose vocabulary does not divide among devices."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB - 1, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def training_step(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        return optax.softmax_cross_entropy_with_integer_labels(self.embed.attend(x), tokens[:, 1:]).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


@pytest.mark.full
def test_an_embedding_split_along_its_features_splits_no_activation() -> None:
    module = Layers(rngs=nnx.Rngs(0))
    fsdp, sent, trainer = cost_of(
        "fsdp", module, np.random.default_rng(0).integers(0, VOCAB - 1, (16, 33)).astype(np.int32)
    )
    assert trainer.state.params["embed"]["embedding"].sharding.spec == P(None, "data")
    # The all-to-all turns the rows of a batch, which are split, into features of the embedding's gradient.
    assert set(sent) <= {"all-gather", "all-reduce", "reduce-scatter", "all-to-all"}
    assert sent["all-gather"].bytes <= 1.1 * parameter_bytes(trainer)
    ddp, _, _ = cost_of("ddp", Layers(rngs=nnx.Rngs(0)), TOKENS % (VOCAB - 1))
    assert fsdp.memory.temporaries <= ddp.memory.temporaries + 2 * parameter_bytes(trainer)  # and its gathered arrays


class Counted(nnx.Module):
    """A layer with many small arrays, and state of its own."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm, self.linear = nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.count = nnx.BatchStat(np.zeros((), np.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.count[...] = self.count[...] + 1
        return x + jax.nn.tanh(self.linear(self.norm(x)))


class Stateful(jl.TrainModule):
    """Layers that are scanned over and write to their own state; all of it leaves the scan, weights too."""

    def __init__(self) -> None:
        self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(Counted))(nnx.Rngs(0))

    def training_step(self, batch: jax.Array) -> jax.Array:
        graph, blocks = nnx.split(self.blocks)

        def turn(x: jax.Array, block: Any) -> tuple[jax.Array, Any]:
            layer = nnx.merge(graph, block, copy=True)
            return layer(x), nnx.state(layer)

        x, after = jax.lax.scan(turn, batch, blocks)
        nnx.update(self.blocks, nnx.state(nnx.merge(graph, after), nnx.Not(nnx.Param)))
        return (x**2).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-2, eps=1e-3)


@pytest.mark.full
def test_layers_of_many_split_arrays_train() -> None:
    """More collectives of one layer than there are threads: run at once they would wait for each other."""
    batches = list(np.random.default_rng(0).normal(size=(3, 16, 16)).astype(np.float32))
    jl.testing.assert_same_training(Stateful, batches, strategies=[FSDP(min_size=0)], devices=(8,), steps=3)
