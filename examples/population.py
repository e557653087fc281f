"""Four rates and four seeds each learn digits in one program; the best member is tested like any other module.

    python examples/population.py --epochs 10

The rates are read in `configure_optimizers`, the smoothing of the labels in the loss: both are each member's own.
"""

import argparse
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxlit as jl


class Digits(jl.TrainModule):
    """Two layers with dropout."""

    def __init__(self, lr: float = 1e-3, smoothing: float = 0.0, *, rngs: nnx.Rngs) -> None:
        self.lr, self.smoothing = lr, smoothing
        self.inner, self.outer = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(nnx.relu(self.inner(x))))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        labels = optax.smooth_labels(jax.nn.one_hot(batch["y"], 10), self.smoothing)
        loss = optax.softmax_cross_entropy(self(batch["x"]), labels).mean()
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("val/accuracy", (self(batch["x"]).argmax(-1) == batch["y"]).mean())

    def test_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("test/accuracy", (self(batch["x"]).argmax(-1) == batch["y"]).mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(self.lr)


def main() -> tuple[Any, float]:
    """Train all; returns the population and the accuracy of its best member on images that none has seen."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=10, type=int)
    parser.add_argument("--root", help="the folder of checkpoints, from which a second call continues")
    given = parser.parse_args()

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    data = {"x": (x[order] / 16).astype(np.float32), "y": y[order].astype(np.int32)}
    parts = (slice(1200), slice(1200, 1500), slice(1500, None))
    train, val, test = (
        jl.ArrayLoader({key: array[part] for key, array in data.items()}, 60, shuffle=part.start is None)
        for part in parts
    )
    rates = (1e-4, 1e-3, 3e-3, 1e-2)
    variations = [{"seed": seed, "lr": lr, "smoothing": seed / 20} for lr in rates for seed in range(4)]
    resume = {"default_root_dir": given.root, "resume": "auto"} if given.root else {}
    population = jl.fit_many(Digits, variations, train, val, max_epochs=given.epochs, **resume)
    print(population)

    best = population.best("val/accuracy", mode="max")
    (found,) = jl.Trainer(logger=False, max_epochs=1).test(best, test)
    print(f"test accuracy of the best member, lr={best.lr}: {found['test/accuracy']:.3f}")
    return population, found["test/accuracy"]


if __name__ == "__main__":
    main()
