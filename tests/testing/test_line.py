"""The model of the documentation, against its formula."""

import numpy as np
import pytest
from kit.trainers import BARE

import jaxlit as jl
from jaxlit.testing import Line, line_data


def test_the_data_are_64_rows_of_a_line() -> None:
    rows = [np.concatenate(column) for column in zip(*((b["x"], b["y"]) for b in line_data(10)), strict=True)]
    x, y = rows
    np.testing.assert_allclose(np.sort(x), np.linspace(-1, 1, 64), rtol=1e-6)
    np.testing.assert_array_equal(y, 3 * x)
    assert not np.array_equal(x, np.sort(x))


def test_a_line_is_trained_as_by_hand() -> None:
    x, slope = np.linspace(-1, 1, 64), 1.0
    module, data = Line(slope=1.0, lr=0.2), line_data(64)
    trainer = jl.Trainer(**BARE, max_epochs=3)
    trainer.fit(module, data, data)
    for _ in range(3):
        loss = np.mean(((slope - 3) * x) ** 2)
        slope -= 0.2 * np.mean(2 * (slope - 3) * x * x)
    assert float(module.slope[...]) == pytest.approx(slope, rel=1e-5)
    assert trainer.callback_metrics["train/loss"] == pytest.approx(loss, rel=1e-5)
    assert trainer.callback_metrics["val/loss"] == pytest.approx(np.mean(((slope - 3) * x) ** 2), rel=1e-5)
    (predicted,) = trainer.predict(module, [{"x": np.ones(2, np.float32)}])  # type: ignore[misc]
    np.testing.assert_allclose(predicted["y"], [slope, slope], rtol=1e-5)
