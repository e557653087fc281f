"""Modules that a pipeline cuts, and the loop by hand that their training is compared with."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl
from kit.by_hand import state_of
from kit.modules import Linear

WIDTH, WORDS, LENGTH = 8, 20, 5


class Layer(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(nnx.tanh(self.linear(x)))


class Layered(Linear):
    """Layers one after the other, without a mark."""

    def __init__(self, layers: int = 4, tx: Any = None, *, rngs: nnx.Rngs) -> None:
        self.inward = nnx.Linear(3, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(WIDTH, rngs=rngs) for _ in range(layers)])
        self.outward = nnx.Linear(WIDTH, 1, rngs=rngs)
        self.tx = tx or optax.adamw(1e-2)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.inward(x)
        for layer in self.layers:
            x = layer(x)
        return self.outward(x)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return self.tx


class Block(nnx.Module):
    """Attention with dropout, batch normalisation, and a loss of its own."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = x + self.dropout(self.attention(x, mask=mask))
        added = self.linear(nnx.gelu(self.norm(x)))
        return x + added, jnp.mean(added**2)


class Language(jl.TrainModule):
    """What is hard to cut: tied weights, a skip to two stages, a mask for all, their losses, a norm of all weights.

    Batches are `(rows, LENGTH + 1)` int32 below `WORDS`, 0 where there is no word.
    """

    def __init__(self, blocks: int = 4, rate: float = 0.1, *, rngs: nnx.Rngs) -> None:
        self.rate = rate
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(blocks)])
        self.seen = nnx.BatchStat(jnp.zeros(()))

    def loss(self, batch: jax.Array) -> jax.Array:
        words, wanted = batch[:, :-1], batch[:, 1:]
        present = words != 0
        mask = nnx.combine_masks(nnx.make_causal_mask(words), nnx.make_attention_mask(present, present))
        x = first = self.embed(words)
        extra = jnp.zeros(())
        for i, block in enumerate(self.blocks):
            x, own = block((x + first) / 2 if 2 * i == len(self.blocks) else x, mask)
            extra = extra + own
            x = jl.pipeline_yield(x) if i + 1 < len(self.blocks) else x
        entropy = optax.softmax_cross_entropy_with_integer_labels(self.embed.attend(x + first), wanted).mean()
        weights = sum(jnp.sum(w**2) for w in jax.tree.leaves(nnx.state(self, nnx.Param)))
        self.seen[...] = 0.9 * self.seen[...] + entropy
        return entropy + 0.1 * extra + 1e-3 * weights

    def training_step(self, batch: jax.Array) -> jax.Array:
        return self.loss(batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(self.rate)


def sentences(rows: int, batches: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, WORDS, size=(rows, LENGTH + 1)).astype(np.int32) for _ in range(batches)]


def by_microbatches(module: Any, batches: Sequence[Any], count: int | Sequence[Sequence[int]]) -> list[float]:
    """Train a module in place by plain nnx, each batch in so many passes or of so many rows; returns its losses."""
    optimizer = nnx.Optimizer(module, module.configure_optimizers(), wrt=nnx.Param)
    gradient = nnx.jit(nnx.value_and_grad(lambda module, part: module.loss(part)))
    losses = []
    for i, batch in enumerate(batches):
        rows = len(jax.tree.leaves(batch)[0])
        even = isinstance(count, int)
        parts = [len(x) for x in np.array_split(np.arange(rows), min(count, rows))] if even else count[i]
        ends = np.cumsum([0, *parts])
        total, loss = None, 0.0
        for begin, end in itertools.pairwise(ends):
            part = jax.tree.map(lambda x, begin=begin, end=end: x[begin:end], batch)
            one, grads = gradient(module, part)
            grads = jax.tree.map(lambda g, n=end - begin: n * g, grads)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            loss += float(one) * (end - begin)
        optimizer.update(module, jax.tree.map(lambda g, rows=rows: g / rows, total))
        losses.append(loss / rows)
    return losses


numbers = state_of  # all arrays of a module by their paths
