"""Parts of a network that compute: each maps (rows, 8) to (rows, 8) and sees the batch."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

WIDTH = 8
Batch = dict[str, jax.Array]


class Layer(nnx.Module):
    def __init__(self, layer: nnx.Module) -> None:
        self.layer = layer

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        layer: Any = self.layer
        return jnp.tanh(layer(x))


class Norm(nnx.Module):
    """BatchNorm, of all rows or of those that the mask leaves."""

    def __init__(self, *, masked: bool = False, rngs: nnx.Rngs) -> None:
        self.norm, self.masked = nnx.BatchNorm(WIDTH, momentum=0.8, rngs=rngs), masked

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        return self.norm(x, mask=batch["m"][:, None] > 0) if self.masked else self.norm(x)


class Attention(nnx.Module):
    def __init__(self, *, rate: float = 0.0, rngs: nnx.Rngs) -> None:
        sizes = {"num_heads": 2, "in_features": 4, "qkv_features": 4}
        self.attend = nnx.MultiHeadAttention(**sizes, dropout_rate=rate, deterministic=False, decode=False, rngs=rngs)

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        return x + self.attend(x.reshape(-1, 2, 4)).reshape(-1, WIDTH)


class Recurrent(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.rnn = nnx.RNN(nnx.GRUCell(4, 4, rngs=rngs), rngs=rngs)

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        return self.rnn(x.reshape(-1, 2, 4)).reshape(-1, WIDTH)


class Block(nnx.Module):
    def __init__(self, *, rate: float = 0.0, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs) if rate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.tanh(self.linear(x))
        return x if self.dropout is None else self.dropout(x)


class Scanned(nnx.Module):
    def __init__(self, *, rate: float = 0.0, remat: bool = False, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda rngs: Block(rate=rate, rngs=rngs), in_axes=(0,), out_axes=0)
        self.blocks, self.remat = nnx.split_rngs(splits=2)(make)(rngs), remat

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block: Block, x: jax.Array) -> jax.Array:
            return nnx.remat(Block.__call__)(block, x) if self.remat else block(x)

        return run(self.blocks, x)


class Remat(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.block = Block(rate=0.3, rngs=rngs)

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        return nnx.remat(Block.__call__)(self.block, x)


class Tied(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.second = self.first

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        return self.second(jnp.tanh(self.first(x)))


class Embedding(nnx.Module):
    """An embedding that also reads out."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(5, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        return x + jnp.pad(self.embed.attend(jnp.tanh(x + self.embed(batch["ids"]))), ((0, 0), (0, 3)))


class Drop(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(0.4, rngs=rngs)

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        return self.dropout(x)


def _linear(rngs: nnx.Rngs, **arguments: Any) -> nnx.Linear:
    return nnx.Linear(WIDTH, WIDTH, rngs=rngs, **arguments)


def _partitioned(rngs: nnx.Rngs) -> nnx.Module:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    with nnx.use_eager_sharding(False):  # which would want a mesh
        return Layer(_linear(rngs, kernel_init=init))


def _evaluating(part: nnx.Module) -> nnx.Module:
    for _, node in nnx.iter_graph(part):
        if isinstance(node, nnx.BatchNorm):  # statistics that differ from those at the start, as a trained part has
            node.mean[...], node.var[...] = node.mean[...] + 0.3, node.var[...] * 2
    part.eval()
    return part


MAKERS: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "linear": lambda rngs: Layer(_linear(rngs)),
    "norm": lambda rngs: Norm(rngs=rngs),
    "masked_norm": lambda rngs: Norm(masked=True, rngs=rngs),
    "eval_norm": lambda rngs: _evaluating(Norm(rngs=rngs)),
    "eval_dropout": lambda rngs: _evaluating(Drop(rngs=rngs)),
    "attention": lambda rngs: Attention(rngs=rngs),
    "attention_dropout": lambda rngs: Attention(rate=0.3, rngs=rngs),
    "gru": lambda rngs: Recurrent(rngs=rngs),
    "scan": lambda rngs: Scanned(rngs=rngs),
    "scan_remat": lambda rngs: Scanned(remat=True, rngs=rngs),
    "scan_dropout": lambda rngs: Scanned(rate=0.3, rngs=rngs),
    "remat_dropout": lambda rngs: Remat(rngs=rngs),
    "tied": lambda rngs: Tied(rngs=rngs),
    "embed": lambda rngs: Embedding(rngs=rngs),
    "dropout": lambda rngs: Drop(rngs=rngs),
    "lora": lambda rngs: Layer(nnx.LoRALinear(WIDTH, WIDTH, lora_rank=2, rngs=rngs)),
    "lora_around": lambda rngs: Layer(nnx.LoRA(WIDTH, 2, WIDTH, base_module=_linear(rngs), rngs=rngs)),
    "weight_norm": lambda rngs: Layer(nnx.WeightNorm(_linear(rngs), rngs=rngs)),
    "spectral_norm": lambda rngs: Layer(nnx.SpectralNorm(_linear(rngs), rngs=rngs)),
    "partitioned": _partitioned,
}
