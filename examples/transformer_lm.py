"""A byte-level GPT learns to write Python from the standard library's own source.

    python examples/transformer_lm.py --strategy fsdp --devices 8

It computes in bfloat16, steps every second batch, and writes a line after each epoch.
"""

import argparse
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

LENGTH = 64


class Block(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        up, down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.perceptron = nnx.Sequential(nnx.LayerNorm(width, rngs=rngs), up, nnx.gelu, down)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.perceptron(x)


class GPT(jl.TrainModule):
    def __init__(self, width: int = 64, layers: int = 2, *, rngs: nnx.Rngs) -> None:
        self.embed, self.place = nnx.Embed(256, width, rngs=rngs), nnx.Embed(LENGTH, width, rngs=rngs)
        blocks = [Block(width, rngs=rngs) for _ in range(layers)]
        self.net = nnx.Sequential(*blocks, nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 256, rngs=rngs))

    def __call__(self, text: jax.Array) -> jax.Array:
        return self.net(self.embed(text) + self.place(jnp.arange(text.shape[1]))).astype(jnp.float32)

    def training_step(self, text: jax.Array, stage: str = "train") -> jax.Array:  # (rows, LENGTH + 1) uint8
        loss = optax.softmax_cross_entropy_with_integer_labels(self(text[:, :-1]), text[:, 1:]).mean()
        self.log(f"{stage}/bits_per_byte", loss / np.log(2), prog_bar=True)
        return loss

    def validation_step(self, text: jax.Array) -> None:
        self.training_step(text, "val")

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(5e-3)


def write(model: GPT, seed: jax.Array) -> jax.Array:
    def byte(i: jax.Array, text: jax.Array) -> jax.Array:  # the next one; what stands after it is not looked at
        key = jax.random.fold_in(jax.random.key(seed), i)
        return text.at[i].set(jax.random.categorical(key, model(text[None])[0, i - 1] / 0.7))

    return jax.lax.fori_loop(4, LENGTH, byte, jnp.zeros(LENGTH, jnp.int32).at[:4].set(jnp.array([*b"def "])))


class Writes(jl.Callback):
    def on_train_epoch_end(self, trainer: jl.Trainer, module: GPT) -> None:
        print("  writes", bytes(np.asarray(trainer.apply(write, np.int32(trainer.global_step)), np.uint8)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--steps", default=75, type=int, help="optimizer steps of each of four epochs")
    args = parser.parse_args()
    text = b"".join(file.read_bytes() for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    rows = np.frombuffer(text, np.uint8)[: len(text) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    val, train = np.split(np.random.default_rng(0).permutation(rows), [512])
    trainer = jl.Trainer(strategy=args.strategy, devices=args.devices, precision="bf16-mixed", max_epochs=4,
                         accumulate_grad_batches=2, limit_train_batches=2 * args.steps, callbacks=Writes())  # fmt: skip
    trainer.fit(jl.lazy(GPT), jl.ArrayLoader(train, 32, shuffle=True), jl.ArrayLoader(val, 128))
