"""A small transformer language model: its dims may have names, and its layers may be scanned over."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxlit as jl


def linear(ins: int, outs: int, names: Any, rngs: nnx.Rngs) -> nnx.Linear:
    init = nnx.initializers.lecun_normal()
    return nnx.Linear(ins, outs, kernel_init=nnx.with_partitioning(init, names) if names else init, rngs=rngs)


class Block(nnx.Module):
    """Attention of four heads and a perceptron."""

    def __init__(self, width: int, up: Any, down: Any, rngs: nnx.Rngs) -> None:
        self.norm_1, self.norm_2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.qkv, self.out = linear(width, 3 * width, up, rngs), linear(width, width, down, rngs)
        self.up, self.down = linear(width, 4 * width, up, rngs), linear(4 * width, width, down, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = jnp.split(self.qkv(self.norm_1(x)).reshape(*x.shape[:2], 4, -1), 3, -1)
        x = x + self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Transformer(jl.TrainModule):
    """Predicts the next of the tokens, (rows, length) int32; `up` and `down` name the dims of its kernels."""

    def __init__(
        self,
        up: Any = None,
        down: Any = None,
        *,
        vocab: int = 64,
        width: int = 16,
        layers: int = 2,
        scanned: bool = False,
        tied: bool = False,
        rngs: nnx.Rngs,
    ) -> None:
        self.scanned, self.tied = scanned, tied
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        make = lambda rngs: Block(width, up, down, rngs)  # noqa: E731
        if scanned:
            stack = {nnx.PARTITION_NAME: "layers"}
            self.blocks = nnx.split_rngs(splits=layers)(nnx.vmap(make, transform_metadata=stack))(rngs)
        else:
            self.blocks = nnx.List([make(rngs) for _ in range(layers)])
        if not tied:
            self.head = nnx.Linear(width, vocab, rngs=rngs)

    def training_step(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens[:, :-1])
        if self.scanned:
            graph, blocks = nnx.split(self.blocks)
            x, _ = jax.lax.scan(lambda x, block: (nnx.merge(graph, block)(x), None), x, blocks)
        else:
            for block in self.blocks:
                x = block(x)
        logits = self.embed.attend(x) if self.tied else self.head(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-2, eps=1e-3)
