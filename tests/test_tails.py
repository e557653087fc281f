"""A batch that does not divide among the devices is exact: gradients, metrics and predictions equal numpy's."""

from typing import Any

import numpy as np
import pytest
from scale import Scale

import jaxlit as jl

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8")
TAILS = (1, 7, 57, 63)
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


def rows(count: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(count).normal(size=(count, 3)).astype(np.float32)
    x[-1] = 1000.0  # a tail that is left out, doubled or padded shows
    return {"x": x, "row": np.arange(count, dtype=np.int32)}


def expected_metrics(x: np.ndarray) -> dict[str, float]:
    exact = x.astype(np.float64)
    return {"mean": exact.mean(), "sum": exact.sum(), "min": exact.min(), "max": exact.max()}


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_gradient_of_a_tail_equals_numpys(strategy: str, tail: int) -> None:
    data = rows(tail)
    module = Scale()
    jl.Trainer(strategy=strategy, max_epochs=1, **QUIET).fit(module, jl.ArrayLoader(data, 64))
    gradient = data["x"].astype(np.float64).mean(0) / 3
    np.testing.assert_allclose(module.w[...], np.arange(1.0, 4.0) - gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epoch_metrics_with_a_tail_equal_numpys(strategy: str, tail: int) -> None:
    data = rows(64 + tail)
    loader = jl.ArrayLoader(data, 64)
    trainer = jl.Trainer(strategy=strategy, max_epochs=1, num_sanity_val_steps=0, **QUIET)
    trainer.fit(Scale(), loader)
    expected = expected_metrics(data["x"])
    assert dict(trainer.callback_metrics) == pytest.approx(expected, rel=1e-6)
    assert trainer.validate(Scale(), loader) == [pytest.approx(expected, rel=1e-6)]


@pytest.mark.parametrize("accumulate", (2, 3))
@pytest.mark.parametrize("strategy", ("ddp", "shard_map", "pmap", "simulate:8"))
def test_epoch_metrics_of_accumulated_windows_equal_numpys(strategy: str, accumulate: int) -> None:
    data = rows(4 * 64 + 7)
    trainer = jl.Trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate, **QUIET)
    trainer.fit(Scale(), jl.ArrayLoader(data, 64))
    assert dict(trainer.callback_metrics) == pytest.approx(expected_metrics(data["x"]), rel=1e-6)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_predictions_are_exactly_the_real_rows_in_loader_order(strategy: str, tail: int) -> None:
    data = rows(64 + tail)
    trainer = jl.Trainer(strategy=strategy, max_epochs=1, **QUIET)
    predictions: Any = trainer.predict(Scale(), jl.ArrayLoader(data, 64))
    assert [batch["y"].shape[0] for batch in predictions] == [64, tail]
    assert all(type(x) is np.ndarray for batch in predictions for x in batch.values())
    np.testing.assert_array_equal(np.concatenate([batch["row"] for batch in predictions]), data["row"])
    y = np.concatenate([batch["y"] for batch in predictions])
    np.testing.assert_allclose(y, np.arange(1.0, 4.0, dtype=np.float32) * data["x"], rtol=1e-6)
