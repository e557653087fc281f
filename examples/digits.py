"""Handwritten digits under any strategy.

    python examples/digits.py --strategy fsdp --devices 8

Simulate eight devices on one computer with XLA_FLAGS=--xla_force_host_platform_device_count=8.
"""

import argparse

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxlit as jl


class Digits(jl.TrainModule):
    """Two layers with BatchNorm and dropout."""

    def __init__(self, width: int = 256, lr: float = 3e-3, *, rngs: nnx.Rngs) -> None:
        self.lr = lr
        self.net = nnx.Sequential(
            nnx.Linear(64, width, rngs=rngs),
            nnx.BatchNorm(width, rngs=rngs),
            nnx.relu,
            nnx.Dropout(0.2, rngs=rngs),
            nnx.Linear(width, 10, rngs=rngs),
        )

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        logits = self.net(batch["x"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        accuracy = (self.net(batch["x"]).argmax(-1) == batch["y"]).mean()
        self.log("val/accuracy", accuracy, prog_bar=True)

    def predict_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return self.net(batch["x"]).argmax(-1)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(self.lr)


def main() -> None:
    """Train, and print the validation accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto", type=lambda s: s if s == "auto" else int(s))
    parser.add_argument("--epochs", default=10, type=int)
    parser.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases as well")
    arguments = parser.parse_args()

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
    # 22 and 6 whole batches: a shorter last one would compile each step a second time.
    train = jl.ArrayLoader({"x": x[:1408], "y": y[:1408]}, batch_size=64, shuffle=True)
    val = jl.ArrayLoader({"x": x[1408:1792], "y": y[1408:1792]}, batch_size=64)

    trainer = jl.Trainer(
        strategy=arguments.strategy,
        devices=arguments.devices,
        max_epochs=arguments.epochs,
        log_every_n_steps=10,
        callbacks=[
            jl.callbacks.ModelCheckpoint(monitor="val/accuracy", mode="max"),
            *([jl.callbacks.WandbLogger(project=arguments.wandb)] if arguments.wandb else []),
        ],
    )
    trainer.fit(jl.lazy(Digits), train, val)
    print(f"validation accuracy {trainer.callback_metrics['val/accuracy']:.4f}")


if __name__ == "__main__":
    main()
