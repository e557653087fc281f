"""Two workers of Ray train as one job; one of them is killed, and Ray starts both again from the newest checkpoint.

    pip install "ray[train]" scikit-learn
    python examples/ray_train.py [folder]

Each worker simulates four devices. In a cluster, RAY_ADDRESS is its address, and all machines share the folder.
"""

import csv
import os
import signal
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxlit as jl


class Digits(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.net = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        loss = optax.softmax_cross_entropy_with_integer_labels(self.net(batch["x"]), batch["y"]).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1, momentum=0.9)


class Kill(jl.Callback):
    """Kills the second process once, in step 35."""

    def on_train_start(self, trainer: jl.Trainer, *_: object) -> None:
        print(
            f"process {jax.process_index()} of {jax.process_count()} starts at step {trainer.global_step}", flush=True
        )

    def on_train_batch_end(self, trainer: jl.Trainer, *_: object) -> None:
        killed = trainer.run_dir / "killed"
        if trainer.global_step == 35 and jax.process_index() == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: Path) -> None:
    """Train, or continue; Ray calls this in each worker."""
    jl.testing.fake_devices(4)
    x, y = (a[:1280] for a in load_digits(return_X_y=True))
    data = {"x": (x / 16).astype(np.float32), "y": y.astype(np.int32)}
    trainer = jl.Trainer(strategy="ddp", max_epochs=3, log_every_n_steps=1, default_root_dir=folder, resume="auto",
                         callbacks=[jl.callbacks.ModelCheckpoint(every_n_train_steps=10), Kill(),
                                    jl.integrations.ray.RayReport()],
                         enable_progress_bar=False, enable_model_summary=False)  # fmt: skip
    trainer.fit(jl.lazy(Digits), jl.ArrayLoader(data, batch_size=64, shuffle=True))


def main(storage: Path) -> None:
    job = jl.integrations.ray.RayTrainer(train, num_workers=2, storage_path=storage, name="digits", max_failures=2)
    result = job.fit()
    print(f"reported: step {result.metrics['global_step']}, loss {result.metrics['loss']:.4f}, {result.checkpoint}")
    with (storage / "digits/metrics.csv").open() as file:
        steps = [int(row["step"]) for row in csv.DictReader(file)]
    print(f"{len(steps)} rows, {len(set(steps))} different steps, the last is {steps[-1]}")


if __name__ == "__main__":
    if sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
