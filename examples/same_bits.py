"""One training on 1, 2, 4 and 8 devices whose weights are the same bits, and a resume on another number of them.

    python examples/same_bits.py    # eight devices are simulated on this computer's CPU

Under `strategy="ddp"` each number of devices adds up the rows in an order of its own; `"replicas:8"` adds up eight
replicas in one order, wherever they are computed.
"""

import hashlib
import tempfile
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxlit as jl


class Digits(jl.TrainModule):
    """Classifies 8x8 digits, with what is hard to repeat: batch statistics and dropout."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        hidden, out = nnx.Linear(64, 64, use_bias=False, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)
        self.net = nnx.Sequential(hidden, nnx.BatchNorm(64, rngs=rngs), nnx.relu, nnx.Dropout(0.2, rngs=rngs), out)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(self.net(batch["x"]), batch["y"]).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(3e-3)


def weights_after(folder: Path, strategy: str, devices: int, epochs: int = 2) -> str:
    """Train, or continue in the folder, and return a hash of all weights."""
    x, y = (a[:1792] for a in load_digits(return_X_y=True))
    data = {"x": (x / 16).astype(np.float32), "y": y.astype(np.int32)}
    given = {"strategy": strategy, "devices": devices, "max_epochs": epochs, "gradient_clip_val": 1.0}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = jl.Trainer(**given, **quiet, default_root_dir=folder, resume="auto")
    trainer.fit(jl.lazy(Digits), jl.ArrayLoader(data, batch_size=64, shuffle=True))
    digest = hashlib.sha256()
    for array in jax.tree.leaves(nnx.state(trainer.module, nnx.Param)):
        digest.update(np.asarray(array).tobytes())
    return digest.hexdigest()[:6]


def main() -> dict[str, list[str]]:
    """Print and return the hashes of each strategy, and those of runs that were resumed on other devices."""
    jl.testing.fake_devices(8)
    hashes = {}
    with tempfile.TemporaryDirectory() as root:
        for strategy in ("ddp", "replicas:8"):
            hashes[strategy] = [weights_after(Path(root, f"{strategy}_{n}"), strategy, n) for n in (1, 2, 4, 8)]
        for before, after in ((8, 2), (1, 4)):
            folder = Path(root, f"resumed_{before}_{after}")
            weights_after(folder, "replicas:8", before, epochs=1)
            hashes[f"replicas:8, {before} then {after}"] = [weights_after(folder, "replicas:8", after)]
    for name, each in hashes.items():
        print(f"{name:<21} {' '.join(each)}")
    return hashes


if __name__ == "__main__":
    main()
