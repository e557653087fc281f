"""A callback shows the digits that the model misreads after each validation, and keeps the fewest in checkpoints.

python examples/custom_callback.py                # images in runs/<time>-<id>/media
python examples/custom_callback.py --wandb digits # or to Weights & Biases
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
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.net = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 10, rngs=rngs))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(self.net(batch["x"]), batch["y"]).mean()

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("val/accuracy", (self.net(batch["x"]).argmax(-1) == batch["y"]).mean(), prog_bar=True)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(3e-3)


def read(module: Digits, x: jax.Array) -> jax.Array:
    """Return the digits that are read."""
    return module.net(x).argmax(-1)  # a function of the file: `trainer.apply` compiles it once


class Mistakes(jl.Callback):
    """Log rows that are misread, as an image with a caption."""

    def __init__(self, x: np.ndarray, y: np.ndarray, most: int = 8) -> None:
        self.x, self.y, self.most, self.fewest = x, y, most, len(x)

    def on_validation_end(self, trainer: jl.Trainer, module: Any) -> None:
        if trainer.sanity_checking:
            return
        found = np.asarray(trainer.apply(read, self.x))
        wrong = np.flatnonzero(found != self.y)
        self.fewest = min(self.fewest, len(wrong))
        if len(shown := wrong[: self.most]):
            # Side by side, enlarged; the first logger that takes images gets it, or else it becomes a file.
            image = np.concatenate([self.x[i].reshape(8, 8).repeat(8, axis=0).repeat(8, axis=1) for i in shown], axis=1)
            caption = ", ".join(f"{self.y[i]} as {found[i]}" for i in shown)
            trainer.logger.log_image("val/mistakes", [image], caption=[caption])
        print(f"{len(wrong)} of {len(self.y)} misread, {self.fewest} at best")

    def state_dict(self) -> dict[str, Any]:  # in each checkpoint, so that a resumed run goes on counting
        return {"fewest": self.fewest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.fewest = state_dict["fewest"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", default=5, type=int)
    parser.add_argument("--wandb", metavar="PROJECT")
    given = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16).astype(np.float32), y[order].astype(np.int32)
    data = jl.ArrayLoader({"x": x[:1408], "y": y[:1408]}, batch_size=64, shuffle=True)
    val = jl.ArrayLoader({"x": x[1408:1792], "y": y[1408:1792]}, batch_size=64)
    loggers = [jl.callbacks.WandbLogger(project=given.wandb)] if given.wandb else []
    mistakes = Mistakes(x[1408:1792], y[1408:1792])
    trainer = jl.Trainer(max_epochs=given.epochs, callbacks=[mistakes, *loggers])
    trainer.fit(jl.lazy(Digits), data, val)
