"""Metrics of nnx that a step logs: the numbers of all rows, by numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.journal import Rows
from kit.trainers import STRATEGIES, fit, thinned

import jaxlit as jl


class Measured(jl.TrainModule):
    def __init__(self, held: bool) -> None:
        self.w = nnx.Param(jnp.zeros(()))
        self.train_metrics, self.val_metrics = (self.make(), self.make()) if held else (None, None)

    def make(self) -> nnx.MultiMetric:
        return nnx.MultiMetric(average=nnx.metrics.Average(), accuracy=nnx.metrics.Accuracy())

    def measure(self, batch: Any, metrics: Any, prefix: str) -> None:
        metrics = self.make() if metrics is None else metrics
        metrics.update(values=batch["values"], logits=batch["logits"], labels=batch["label"])
        self.log_dict(metrics, on_step=prefix == "train", on_epoch=True)
        # Twice as many numbers as rows: the weight is the metric's own count.
        single = nnx.metrics.Average()
        single.update(values=batch["logits"])
        self.log("single", single, on_step=False, on_epoch=True)

    def training_step(self, batch: Any) -> jax.Array:
        self.measure(batch, self.train_metrics, "train")
        return self.w * jnp.mean(batch["values"])

    def validation_step(self, batch: Any) -> None:
        self.measure(batch, self.val_metrics, "val")

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def batches(*rows: int, seed: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "values": rng.integers(-8, 8, size=(n, 3)).astype(np.float32),
            "logits": rng.integers(-8, 8, size=(n, 4)).astype(np.float32) + np.arange(4, dtype=np.float32) / 8,
            "label": rng.integers(0, 4, size=n).astype(np.int32),
        }
        for n in rows
    ]


def merged(batches: list[dict[str, np.ndarray]], suffix: str = "") -> dict[str, float]:
    whole = {k: np.concatenate([batch[k] for batch in batches]).astype(np.float64) for k in batches[0]}
    right = np.argmax(whole["logits"], -1) == whole["label"]
    result = {f"average{suffix}": whole["values"].mean(), f"accuracy{suffix}": right.mean()}
    return result if suffix == "_step" else result | {"single": whole["logits"].mean()}


HELD = [*((s, False) for s in STRATEGIES), ("single", True), ("pmap", True)]


@pytest.mark.parametrize(("strategy", "held"), thinned(HELD, ("fsdp", False), ("pmap", True), full=HELD[4:5]))
def test_nnx_metrics_equal_numpy_over_replicas(strategy: str, held: bool) -> None:
    train, val, rows = batches(8, 16, 5, seed=0), batches(16, 5, 8, seed=1), Rows()
    arguments = {"log_every_n_steps": 1, "num_sanity_val_steps": 0}
    fit(Measured(held), train, val, rows, strategy=strategy, max_epochs=2, **arguments)
    expected = [*(merged([batch], "_step") for batch in train), merged(val), merged(train, "_epoch")]
    result = [row for _, row in rows.rows]
    assert [row.pop("epoch") for row in result] == [0] * 5 + [1] * 5
    # All sums are of small integers and eighths, so float32 rounds only the quotients.
    assert result == [pytest.approx(wanted, rel=1e-6) for wanted in expected * 2]
