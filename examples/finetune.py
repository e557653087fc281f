"""A backbone learns digits; from its checkpoint, frozen, LoRA makes it read them in the mirror.

    python examples/finetune.py --strategy fsdp --devices 8

An NNX filter says what is trained: `jl.Optimizer(..., wrt=nnx.LoRAParam)`; the other parameters are frozen.
"""

import argparse
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxlit as jl


class Digits(jl.TrainModule):
    """Three layers; `rank` is that of the matrices which LoRA adds to each, 0 for none."""

    def __init__(self, width: int = 256, rank: int = 0, *, rngs: nnx.Rngs) -> None:
        self.rank = rank
        layer: Any = partial(nnx.LoRALinear, lora_rank=rank) if rank else nnx.Linear
        sizes = (64, width, width, 10)
        self.layers = nnx.List([layer(a, b, rngs=rngs) for a, b in pairwise(sizes)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers[:-1]:
            x = nnx.relu(layer(x))
        return self.layers[-1](x)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(self(batch["x"]), batch["y"]).mean()

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("val/accuracy", (self(batch["x"]).argmax(-1) == batch["y"]).mean(), prog_bar=True)

    def configure_optimizers(self) -> jl.Optimizer:
        return jl.Optimizer(optax.adam(3e-3), wrt=nnx.LoRAParam if self.rank else nnx.Param)


def main() -> tuple[str, Digits]:
    """Train both; returns the backbone's checkpoint and what LoRA has made of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--epochs", default=10, type=int)
    given = parser.parse_args()
    make_trainer = partial(jl.Trainer, strategy=given.strategy, devices=given.devices, max_epochs=given.epochs)

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    images, y = (x[order] / 16).astype(np.float32).reshape(-1, 8, 8), y[order].astype(np.int32)
    upright, mirrored = ({"x": images[:, :, ::way].reshape(-1, 64), "y": y} for way in (1, -1))
    train, val = slice(1400), slice(1400, None)

    def loader(data: dict[str, np.ndarray], part: slice) -> jl.ArrayLoader:
        return jl.ArrayLoader(jax.tree.map(lambda x: x[part], data), batch_size=64, shuffle=True)

    trainer = make_trainer()
    trainer.fit(jl.lazy(Digits), loader(upright, train), loader(upright, val))
    checkpoint = trainer.checkpoint_callback.best_model_path

    tuned = Digits.load_from_checkpoint(checkpoint, strict=False, rank=4)  # what LoRA adds is not in it
    trainer = make_trainer()
    (before,) = trainer.validate(tuned, loader(mirrored, val))
    trainer.fit(tuned, loader(mirrored, train), loader(mirrored, val))
    lora, params = (sum(x.size for x in jax.tree.leaves(nnx.state(tuned, x))) for x in (nnx.LoRAParam, nnx.Param))
    print(f"trained {lora:,} of {params:,} parameters")
    print(f"accuracy {before['val/accuracy']:.4f} before, {trainer.callback_metrics['val/accuracy']:.4f} after")
    return checkpoint, tuned


if __name__ == "__main__":
    main()
