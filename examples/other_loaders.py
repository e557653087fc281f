"""A torch DataLoader or a Hugging Face dataset feeds `fit`: any object does that yields batches in each epoch.

python examples/other_loaders.py --loader datasets    # or torch; or numpy, by hand
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxlit as jl

BATCH_SIZE = 64


class Digits(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.net = nnx.Sequential(nnx.Linear(64, 128, rngs=rngs), nnx.relu, nnx.Linear(128, 10, rngs=rngs))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(self.net(batch["x"]), batch["y"]).mean()

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("val/accuracy", (self.net(batch["x"]).argmax(-1) == batch["y"]).mean(), prog_bar=True)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(3e-3)


class Batches:
    """Batches in an order that only the epoch decides, so that a resumed run draws the same ones."""

    def __init__(self, rows: dict[str, np.ndarray], kind: str) -> None:
        self.rows, self.kind, self.epoch = rows, kind, 0

    def set_epoch(self, epoch: int) -> None:  # called before each epoch
        self.epoch = epoch

    def __len__(self) -> int:  # may be left out: then the length is known after the first epoch
        return -(-len(self.rows["y"]) // BATCH_SIZE)

    def __iter__(self) -> Any:
        return iter(getattr(self, self.kind)())

    def numpy(self) -> Any:
        order = np.random.default_rng(self.epoch).permutation(len(self.rows["y"]))
        for start in range(0, len(order), BATCH_SIZE):
            yield {name: x[order[start : start + BATCH_SIZE]] for name, x in self.rows.items()}

    def torch(self) -> Any:
        import torch.utils.data as data

        samples: Any = [dict(zip(self.rows, row, strict=True)) for row in zip(*self.rows.values(), strict=True)]
        sampler = np.random.default_rng(self.epoch).permutation(len(samples)).tolist()
        return data.DataLoader(samples, BATCH_SIZE, sampler=sampler)  # its tensors become numpy arrays

    def datasets(self) -> Any:
        sys.path[:] = [x for x in sys.path if x != str(Path(__file__).parent)]  # which has another multiprocess.py
        import datasets

        table = datasets.Dataset.from_dict(self.rows).with_format("numpy")  # or datasets.load_dataset(...)
        return table.shuffle(seed=self.epoch).iter(batch_size=BATCH_SIZE)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", default="numpy", choices=["numpy", "torch", "datasets"])
    given = parser.parse_args()
    x, y = (a[np.random.default_rng(0).permutation(1797)] for a in load_digits(return_X_y=True))
    rows = {"x": (x / 16).astype(np.float32), "y": y.astype(np.int32)}
    train, val = ({name: column[part] for name, column in rows.items()} for part in (slice(1408), slice(1408, 1792)))
    trainer = jl.Trainer(max_epochs=5)
    trainer.fit(jl.lazy(Digits), Batches(train, given.loader), jl.ArrayLoader(val, BATCH_SIZE))
    print(f"validation accuracy {trainer.callback_metrics['val/accuracy']:.4f}")
