"""A process that only trains, and one that validates each of its checkpoints meanwhile.

    python examples/follow.py [folder]

The training never waits for a validation: its checkpoints are enough. Both processes run on this computer here; on a
cluster the second one has other devices, and sees the folder, or a bucket, of the run.
"""

import subprocess
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
        return optax.softmax_cross_entropy_with_integer_labels(self.net(batch["x"]), batch["y"]).mean()

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("val/accuracy", (self.net(batch["x"]).argmax(-1) == batch["y"]).mean(), prog_bar=True)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


def loader(part: slice, shuffle: bool = False) -> jl.ArrayLoader:
    """Return batches of digits, in an order of their own."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))[part]
    return jl.ArrayLoader(
        {"x": (x[order] / 16).astype(np.float32), "y": y[order].astype(np.int32)}, 64, shuffle=shuffle
    )


def train(folder: Path) -> None:
    """Train, without a validation loader; every checkpoint stays."""
    saves = jl.callbacks.ModelCheckpoint(every_n_epochs=1, save_top_k=-1)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = jl.Trainer(max_epochs=8, default_root_dir=folder, resume="auto", callbacks=saves, **quiet)
    trainer.fit(jl.lazy(Digits), loader(slice(1408), shuffle=True))


def main(root: Path) -> list[dict[str, float]]:
    """Train in another process, and validate here what it saves."""
    training = subprocess.Popen([sys.executable, __file__, "train", str(root / "run")], stdout=subprocess.DEVNULL)
    watcher = jl.Trainer(default_root_dir=root / "validation")
    module, held_out = jl.lazy(Digits), loader(slice(1408, None))
    rows = watcher.follow(root / "run", module, held_out, monitor="val/accuracy", mode="max", every=0.5, timeout=60)
    training.wait()
    best = watcher.validate(module, held_out, ckpt_path=root / "run/best", verbose=False)[0]["val/accuracy"]
    print(f"{len(rows)} checkpoints were validated; the best has {best:.4f}, which the training has not waited for")
    return rows


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        train(Path(sys.argv[2]))
    elif sys.argv[1:]:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
