"""Digits from an ArrayRecord file that the example writes, read by grain and exact to the batch.

    python examples/records.py --strategy ddp --devices 8

A file of records is for data that does not fit into memory. Data that does is faster through `jl.ArrayLoader`.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import optax
from array_record.python.array_record_module import ArrayRecordWriter
from flax import nnx
from sklearn.datasets import load_digits

import jaxlit as jl


class Records(jl.DataModule):
    """Writes the digits once, and reads them as records of 64 pixels and a label, one byte each."""

    def __init__(self, folder: Path, batch_size: int = 64) -> None:
        self.folder, self.batch_size = folder, batch_size

    def prepare_data(self) -> None:
        x, y = load_digits(return_X_y=True)
        rows = np.random.default_rng(0).permutation(np.concatenate([x, y[:, None]], axis=1).astype(np.uint8))
        for name, part in (("train", rows[:1400]), ("val", rows[1400:])):
            writer = ArrayRecordWriter(str(self.folder / name), "group_size:1")
            for row in part:
                writer.write(row.tobytes())
            writer.close()

    def read(self, name: str) -> grain.MapDataset:
        # Each process takes every n-th record: its share of the global batch.
        records = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(str(self.folder / name)))
        records = records[jax.process_index() :: jax.process_count()]
        return records.seed(0).shuffle().map(decode) if name == "train" else records.map(decode)

    def train_dataloader(self) -> grain.MapDataset:
        return self.read("train").batch(self.batch_size // jax.process_count(), drop_remainder=True)

    def val_dataloader(self) -> grain.MapDataset:
        return self.read("val").batch(self.batch_size // jax.process_count())


def decode(record: bytes) -> dict[str, Any]:
    row = np.frombuffer(record, np.uint8)
    return {"x": row[:64].astype(np.float32) / 16, "y": row[64].astype(np.int32)}


class Digits(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.net = nnx.Sequential(nnx.Linear(64, 256, rngs=rngs), nnx.relu, nnx.Linear(256, 10, rngs=rngs))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(self.net(batch["x"]), batch["y"]).mean()

    def validation_step(self, batch: dict[str, jax.Array]) -> None:
        self.log("val/accuracy", (self.net(batch["x"]).argmax(-1) == batch["y"]).mean(), prog_bar=True)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto", type=lambda s: s if s == "auto" else int(s))
    parser.add_argument("--epochs", default=10, type=int)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = jl.Trainer(strategy=given.strategy, devices=given.devices, max_epochs=given.epochs)
        trainer.fit(jl.lazy(Digits), datamodule=Records(Path(folder)))
    print(f"validation accuracy {trainer.callback_metrics['val/accuracy']:.4f}")
