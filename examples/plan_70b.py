"""Plan the training of a decoder of 70 billion parameters: what each of 64 or 512 devices would hold.

    python examples/plan_70b.py --layers 2 --devices 8    # without arguments: the table of docs/plan.md, some minutes

No weights are made: 3 GB of memory are enough. The shape is that of Llama 3 70B, on texts of 8192 tokens, one a device.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

WIDTH, HIDDEN, HEADS, GROUPS, SIZE, VOCAB, TIME, BLOCK = 8192, 28672, 64, 8, 128, 128256, 8192, 512


class Layer(nnx.Module):
    def __init__(self, rngs):
        linear = lambda width, out: nnx.Linear(width, out, use_bias=False, rngs=rngs)  # noqa: E731
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs), nnx.RMSNorm(WIDTH, rngs=rngs)])
        self.query, self.out = linear(WIDTH, HEADS * SIZE), linear(HEADS * SIZE, WIDTH)
        self.key, self.value = linear(WIDTH, GROUPS * SIZE), linear(WIDTH, GROUPS * SIZE)
        self.gate, self.up, self.down = linear(WIDTH, HIDDEN), linear(WIDTH, HIDDEN), linear(HIDDEN, WIDTH)

    def __call__(self, x):  # (rows, time, WIDTH)
        h = self.norms[0](x)
        split = lambda y: y.reshape(*y.shape[:2], -1, SIZE)  # noqa: E731
        x = x + self.out(attend(split(self.query(h)), split(self.key(h)), split(self.value(h))))
        h = self.norms[1](x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


def attend(query, key, value):
    """Return causal attention, block by block of the queries, so that the scores of a block exist at a time."""
    rows, time, heads, size = query.shape

    @jax.checkpoint
    def block(_, at):
        q = jax.lax.dynamic_slice_in_dim(query, at, BLOCK, 1)
        mask = jnp.arange(time) <= (at + jnp.arange(BLOCK))[:, None]
        return None, jax.nn.dot_product_attention(q, key, value, mask=mask[None, None])

    _, blocks = jax.lax.scan(block, None, jnp.arange(0, time, BLOCK))
    return jnp.moveaxis(blocks, 0, 1).reshape(rows, time, heads * size)


class Decoder(jl.TrainModule):
    def __init__(self, layers, *, rngs):
        self.embed = nnx.Embed(VOCAB, WIDTH, dtype=jnp.bfloat16, rngs=rngs)
        self.layers = jl.Stacked(Layer, layers, rngs=rngs)  # their weights stacked, run by a scan
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def training_step(self, batch):
        x = self.layers(self.embed(batch[:, :-1]))
        logits = self.head(self.norm(x)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    def configure_optimizers(self):
        return optax.adamw(3e-4)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--devices", type=int, nargs="+", default=[64, 512])
    args = parser.parse_args()
    strategies = ["ddp", "zero1", "fsdp", jl.strategies.FSDP(remat=True), jl.strategies.FSDP(remat=True, replicas=8)]
    trainer, texts = jl.Trainer(precision="bf16-mixed", max_steps=1, logger=False), [np.zeros((1, TIME + 1), np.int32)]
    asked = {"devices": args.devices, "strategies": strategies, "hardware": "NVIDIA A100-SXM4-80GB"}
    return trainer.plan(jl.lazy(Decoder, args.layers), texts, **asked, rows_per_device=1, timeout=1800)


if __name__ == "__main__":
    print(main())
