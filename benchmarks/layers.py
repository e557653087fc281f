"""What a scan over layers saves: seconds to compile a step, and its temporary memory on a device, under fsdp.

XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/layers.py [--layers 4 16 64] [--width 64]
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl
from jaxlit.strategies import FSDP

VOCAB, LENGTH, ROWS = 256, 64, 16


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.qkv, self.out = nnx.Linear(width, 3 * width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        query, key, value = jnp.split(self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 4, -1), 3, -1)
        x = x + self.out(jax.nn.dot_product_attention(query, key, value, is_causal=True).reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class LM(jl.TrainModule):
    """Predicts the next token; `kind` is "list", "remat" for a list with `nnx.remat`, or "stacked"."""

    def __init__(self, width: int, layers: int, kind: str, *, rngs: nnx.Rngs) -> None:
        self.kind, self.embed = kind, nnx.Embed(VOCAB, width, rngs=rngs)
        make = lambda rngs: Block(width, rngs=rngs)  # noqa: E731
        is_stacked = kind == "stacked"
        self.blocks: Any = jl.Stacked(make, layers, rngs=rngs) if is_stacked else nnx.List(map(make, [rngs] * layers))

    def training_step(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens[:, :-1])
        if self.kind == "stacked":
            x = self.blocks(x)
        else:
            for block in self.blocks:
                x = nnx.remat(Block.__call__)(block, x) if self.kind == "remat" else block(x)
        return optax.softmax_cross_entropy_with_integer_labels(self.embed.attend(x), tokens[:, 1:]).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3)


def measure(width: int, layers: int, kind: str, strategy: Any) -> str:
    """Train a step; return how long it took to compile, and its temporaries."""
    silent = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = jl.Trainer(strategy=strategy, max_steps=1, compile_cache=False, log_every_n_steps=0, **silent)  # type: ignore[arg-type]
    tokens = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH + 1)).astype(np.int32)
    trainer.fit(jl.lazy(LM, width, layers, kind), [tokens])
    (cost,) = [program for program in trainer.explain().programs if program.name == "train_step"]
    assert cost.memory is not None
    return f"{trainer.compile_seconds['train_step']:.1f} s, {cost.memory.temporaries / 2**20:.1f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[4, 16, 64])
    parser.add_argument("--width", type=int, default=64)
    given = parser.parse_args()
    print(
        "| layers | nnx.List | nnx.List, nnx.remat | jl.Stacked | jl.Stacked, FSDP(remat=True) |\n|---|---|---|---|---|"
    )
    for layers in given.layers:
        kinds = [("list", "fsdp"), ("remat", "fsdp"), ("stacked", "fsdp"), ("stacked", FSDP(remat=True))]
        each = [measure(given.width, layers, *kind) for kind in kinds]
        print(f"| {layers} | {' | '.join(each)} |", flush=True)


if __name__ == "__main__":
    main()
