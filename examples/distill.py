"""A small network learns from the outputs of a large one, without a label: distillation.

    python examples/distill.py --strategy fsdp --devices 8

The teacher is a part of the student's module. `jl.Optimizer(wrt=...)` leaves it frozen: it has no optimizer state.
"""

import argparse
from functools import partial

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxlit as jl

TEMPERATURE = 3.0  # above 1, the loss also counts which of the wrong digits the teacher finds likely


class Digits(jl.TrainModule):
    """Two layers."""

    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.net = nnx.Sequential(nnx.Linear(64, width, rngs=rngs), nnx.relu, nnx.Linear(width, 10, rngs=rngs))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(self.net(batch["x"]), batch["y"]).mean()

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("val/accuracy", (self.net(batch["x"]).argmax(-1) == batch["y"]).mean(), prog_bar=True)

    def configure_optimizers(self) -> optax.GradientTransformation | jl.Optimizer:
        return optax.adam(3e-3)


class Student(Digits):
    """The same, narrower, and a teacher of which only the outputs are used."""

    def __init__(self, width: int, teacher: Digits, *, rngs: nnx.Rngs) -> None:
        super().__init__(width, rngs=rngs)
        self.teacher = teacher.net

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        target = jax.nn.log_softmax(self.teacher(batch["x"]) / TEMPERATURE)
        own = jax.nn.log_softmax(self.net(batch["x"]) / TEMPERATURE)
        return TEMPERATURE**2 * optax.losses.kl_divergence_with_log_targets(own, target).mean()

    def configure_optimizers(self) -> jl.Optimizer:
        return jl.Optimizer(optax.adam(1e-2), wrt=nnx.All(nnx.Param, nnx.PathContains("net")))


def main() -> tuple[Digits, Student]:
    """Train both, and print their accuracies and sizes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--epochs", default=20, type=int)
    given = parser.parse_args()
    make_trainer = partial(jl.Trainer, strategy=given.strategy, devices=given.devices, max_epochs=given.epochs)

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
    train = jl.ArrayLoader({"x": x[:1408], "y": y[:1408]}, batch_size=64, shuffle=True)
    unlabelled = jl.ArrayLoader({"x": x[:1408]}, batch_size=64, shuffle=True)
    val = jl.ArrayLoader({"x": x[1408:1792], "y": y[1408:1792]}, batch_size=64)

    teacher = Digits(256, rngs=nnx.Rngs(0))
    student = Student(12, teacher, rngs=nnx.Rngs(1))
    for name, model, data in (("teacher", teacher, train), ("student", student, unlabelled)):
        (trainer := make_trainer()).fit(model, data, val)
        size = sum(x.size for x in jax.tree.leaves(nnx.state(model.net, nnx.Param)))
        print(f"{name}: {size:,} parameters, accuracy {trainer.callback_metrics['val/accuracy']:.4f}")
    return teacher, student


if __name__ == "__main__":
    main()
