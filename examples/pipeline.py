"""A transformer trained by fsdp with accumulation, in a pipeline, and in an interleaved one: the same losses.

    python examples/pipeline.py

Without an accelerator it simulates eight devices, which share the cores: the times are no measure of pipelines.
"""

import os
import time
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

RANKS, MICROBATCHES, ROWS, LAYERS, WIDTH, STEPS = 4, 4, 16, 8, 32, 6


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.attention = nnx.MultiHeadAttention(4, WIDTH, use_bias=False, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(x)
        return jax.nn.standardize(x + self.down(nnx.relu(self.up(x))))


class Transformer(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(LAYERS)])

    def training_step(self, batch: jax.Array) -> jax.Array:
        x = batch
        for block in self.blocks:
            x = jl.pipeline_yield(block(x))  # a stage may end here
        loss = jnp.mean((x - batch) ** 2)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3, eps=1e-3)


class Steps(jl.Callback):
    def __init__(self) -> None:
        self.losses, self.times = [], []

    def on_log(self, trainer: jl.Trainer, values: dict[str, float], step: int) -> None:
        self.losses.append(values["loss"])
        self.times.append(time.perf_counter())


def train(strategy: Any, windows: int = 1) -> Steps:
    seen, shape = Steps(), (STEPS * windows, ROWS // windows, 16, WIDTH)
    quiet: Any = {"enable_checkpointing": False, "enable_model_summary": False, "enable_progress_bar": False}
    trainer = jl.Trainer(strategy=strategy, devices=RANKS, max_epochs=1, log_every_n_steps=1, callbacks=seen,
                         accumulate_grad_batches=windows, logger=False, **quiet)  # fmt: skip
    trainer.fit(Transformer(rngs=nnx.Rngs(0)), list(np.random.default_rng(0).normal(size=shape).astype(np.float32)))
    print(trainer.strategy.describe())
    return seen


if __name__ == "__main__":
    found = {"fsdp": train("fsdp", windows=MICROBATCHES)}
    found |= {name: train(jl.strategies.Pipeline(RANKS, name, MICROBATCHES)) for name in ("1f1b", "interleaved_1f1b")}
    for stages, rank in ((4, 2), (4, 3), (8, 0), (8, 3)):
        tasks = jl.strategies.Interleaved1F1B(stages, RANKS).tasks(MICROBATCHES)[rank]
        print(f"rank {rank} of {RANKS}, {stages} stages:", [str(task) for task in tasks])
    for step, losses in enumerate(zip(*(seen.losses for seen in found.values()), strict=True)):
        print(f"step {step}", *(f"{loss:.6f}" for loss in losses))
    print(*(f"{name}: {np.median(np.diff(seen.times)) * 1e3:.1f} ms a step" for name, seen in found.items()), sep="\n")
