"""Data of every awkward size under every strategy: training, metrics and predictions equal numpy's.

    python tests/sweeps/data_matrix.py

Prints the largest error, relative for numbers above 1, of each strategy and device count, and fails above 1e-6.
"""

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROWS, BATCHES = (1, 7, 63, 65, 1797), (8, 64)
LAYOUTS = (
    ("single", 1),
    *itertools.product(("ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate"), (1, 3, 8)),
)
LR = 0.5


def make_rows(count: int) -> dict[str, np.ndarray]:
    """Return rows whose last one outweighs the others: left out, doubled or padded, it shows."""
    x = np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)
    x[-1] = 1000.0
    return {"x": x, "row": np.arange(count, dtype=np.int32)}


def trained_by_numpy(w: np.ndarray, data: dict[str, np.ndarray], batch_size: int) -> np.ndarray:
    """Take an epoch of gradient descent on the mean of w * x."""
    for start in range(0, len(data["x"]), batch_size):
        gradient = data["x"][start : start + batch_size].astype(np.float64).mean(0) / 3
        w = (w - np.float32(LR) * gradient).astype(np.float32)
    return w


def largest_error(strategy: str, devices: int, rows: int, batch_size: int) -> float:
    """Train, validate and predict, and return the largest error, relative for numbers above 1."""
    from kit.scale import Scale

    import jaxlit as jl

    data, module = make_rows(rows), Scale(lr=LR)
    loader = jl.ArrayLoader(data, batch_size)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = jl.Trainer(strategy=strategy, devices=devices, max_epochs=1, num_sanity_val_steps=0, **quiet)
    trainer.fit(module, loader)
    trained = dict(trainer.callback_metrics)
    (validated,) = trainer.validate(Scale(), loader)
    predicted: Any = trainer.predict(Scale(), loader)
    x = data["x"].astype(np.float64)
    exact = {"mean": x.mean(), "sum": x.sum(), "min": x.min(), "max": x.max()}
    assert trained.keys() == validated.keys() == exact.keys()
    sizes = [len(batch["row"]) for batch in predicted]
    assert sizes == [min(batch_size, rows - start) for start in range(0, rows, batch_size)]
    assert (np.concatenate([batch["row"] for batch in predicted]) == data["row"]).all()
    pairs = [
        (np.asarray(module.w[...]), trained_by_numpy(np.arange(1.0, 4.0, dtype=np.float32), data, batch_size)),
        (np.concatenate([batch["y"] for batch in predicted]), np.arange(1.0, 4.0) * x),
        *(
            (np.array(result[name]), np.array(value))
            for result in (trained, validated)
            for name, value in exact.items()
        ),
    ]
    return max(float((np.abs(a - b) / np.maximum(np.abs(b), 1)).max()) for a, b in pairs)


def main() -> None:
    """Run everything."""
    from jaxlit.testing import fake_devices

    sys.path.append(str(Path(__file__).parent.parent))  # the suite has it there already
    fake_devices(8)
    worst = 0.0
    for strategy, devices in LAYOUTS:
        errors = {case: largest_error(strategy, devices, *case) for case in itertools.product(ROWS, BATCHES)}
        case = max(errors, key=errors.__getitem__)
        rows, batch_size = case
        print(
            f"{strategy:<10} {devices} devices  {errors[case]:.1e} at {rows} rows in batches of {batch_size}",
            flush=True,
        )
        worst = max(worst, errors[case])
    print(f"{len(LAYOUTS) * len(ROWS) * len(BATCHES)} cases, largest error {worst:.1e}")
    sys.exit(worst > 1e-6)


if __name__ == "__main__":
    main()
