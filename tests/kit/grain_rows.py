"""Grain's loaders of numbered rows."""

import os
from typing import Any

import grain
import numpy as np

ROWS, BATCH = 20, 4


def records(count: int = ROWS, first: int = 0) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full(1, first + i, np.float32)} for i in range(count)]


def shuffled(seed: int = 1, count: int = ROWS, first: int = 0) -> grain.MapDataset:
    return grain.MapDataset.source(records(count, first)).seed(seed).shuffle()


def data_loader(
    count: int = ROWS, batch_size: int = BATCH, seed: int = 3, drop: bool = False, first: int = 0, num_epochs: Any = 1
) -> grain.DataLoader:
    sampler = grain.samplers.IndexSampler(num_records=count, shuffle=True, num_epochs=num_epochs, seed=seed)
    batch = grain.transforms.Batch(batch_size=batch_size, drop_remainder=drop)
    return grain.DataLoader(data_source=records(count, first), sampler=sampler, operations=[batch], worker_count=0)


def add_noise(record: Any, rng: np.random.Generator) -> Any:
    return {**record, "noise": np.int32(rng.integers(10**6))}


def double(record: Any) -> Any:
    return {**record, "twice": 2 * record["x"]}


def is_no_fifth(record: Any) -> bool:
    return bool(record["x"][0] % 5)


def everything(batch: Any) -> dict[str, Any]:
    """Return a batch as lists."""
    return {key: np.asarray(x).tolist() for key, x in batch.items()}


def with_pid(record: Any) -> Any:
    """Return a record with the process that maps it."""
    return {**record, "pid": np.int32(os.getpid())}


def nothing(record: Any) -> bool:
    return False


def first_of(pair: Any) -> Any:
    return pair[0]


def lengthened(batch: Any) -> Any:
    """Return the batch's numbers in a sequence of another length each."""
    x = np.ravel(batch["x"])
    return {"x": np.tile(x, 3)[: 2 + int(x[0]) % 7]}


def only_x(batch: Any) -> Any:
    return {"x": batch["x"]}
