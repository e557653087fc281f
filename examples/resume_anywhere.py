"""A training on eight devices is killed, and continues: on eight as if nothing had happened, and on four.

    python examples/resume_anywhere.py

Without an accelerator it simulates eight devices.
"""

import csv
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxlit as jl


class Digits(jl.TrainModule):
    """Two layers with dropout, whose random keys continue as well."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        first, last = nnx.Linear(64, 128, rngs=rngs), nnx.Linear(128, 10, rngs=rngs)
        self.net = nnx.Sequential(first, nnx.relu, nnx.Dropout(0.2, rngs=rngs), last)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(batch["x"]), batch["y"]).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1, momentum=0.9)


class Kill(jl.Callback):
    def on_train_batch_end(self, trainer: jl.Trainer, *_: object) -> None:
        if trainer.global_step == 75:  # of 140, in the middle of an epoch
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path, devices: int, *callbacks: jl.Callback) -> tuple[np.ndarray, list[np.ndarray]]:
    """Train, or continue; returns the losses of all steps, and the weights."""
    x, y = (a[:1792] for a in load_digits(return_X_y=True))  # whole batches, for one program
    data = {"x": (x / 16).astype(np.float32), "y": y.astype(np.int32)}
    trainer = jl.Trainer(strategy="fsdp", devices=devices, max_epochs=5, log_every_n_steps=1,
                         callbacks=[jl.callbacks.ModelCheckpoint(every_n_train_steps=20), *callbacks],
                         enable_model_summary=False, default_root_dir=folder, resume="auto")  # fmt: skip
    trainer.fit(jl.lazy(Digits), jl.ArrayLoader(data, batch_size=64, shuffle=True))
    with (folder / "metrics.csv").open() as file:
        losses = np.array([float(row["loss"]) for row in csv.DictReader(file)])
    return losses, [np.asarray(x) for x in jax.tree.leaves(nnx.state(trainer.module, nnx.Param))]


def main(folder: Path) -> None:
    child = subprocess.run([sys.executable, __file__, folder / "killed"])
    print(f"exit code {child.returncode}, left is", *(x.name for x in (folder / "killed/checkpoints").iterdir()))
    whole, weights = train(folder / "whole", 8)
    for devices in (8, 4):
        shutil.copytree(folder / "killed", folder / f"on {devices}")
        losses, others = train(folder / f"on {devices}", devices)
        apart = max(abs(a - b).max() for a, b in zip(weights, others, strict=True))
        print(f"resumed on {devices}: {len(losses)} losses, the largest difference {abs(losses - whole).max():.1e}; "
              f"weights {apart:.1e}")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:]:
        train(Path(sys.argv[1]), 8, Kill())
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
