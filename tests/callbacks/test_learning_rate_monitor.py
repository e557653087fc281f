"""Which rows the learning rate is in."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest
from kit.batches import numbered
from kit.journal import Rows
from kit.modules import module
from kit.refusals import fit_refuses
from kit.trainers import BARE, fit

from jaxlit.callbacks import LearningRateMonitor
from jaxlit.errors import ArgumentError

SCHEDULE = optax.linear_schedule(0.2, 0.0, 10)


def silent(tx: Any) -> Any:
    return module(lambda self, batch: jnp.mean(self.error(batch) ** 2), tx=tx)


ROWS = [
    (module(tx=optax.sgd(SCHEDULE)), [], 1, {0: 0.2, 1: 0.18, 2: 0.16, 3: 0.14}),
    (silent(optax.sgd(SCHEDULE)), [], 1, {}),
    (silent(optax.sgd(SCHEDULE)), [LearningRateMonitor()], 1, {0: 0.2, 1: 0.18, 2: 0.16, 3: 0.14}),
    *[(module(tx=optax.sgd(SCHEDULE)), [LearningRateMonitor("epoch")], n, {1: 0.18, 3: 0.14}) for n in (1, 0)],
]


@pytest.mark.parametrize(("model", "monitors", "every", "expected"), ROWS)
def test_the_rate_is_in_the_rows_of_steps_or_of_epochs(model: Any, monitors: Any, every: int, expected: Any) -> None:
    rows = Rows(rates=True)
    fit(model, numbered(2), None, rows, *monitors, max_epochs=2, log_every_n_steps=every, **BARE)
    assert {step: row["lr"] for step, row in rows.rows if "lr" in row} == pytest.approx(expected)


def test_an_unreadable_rate_is_a_warning_with_a_cure(caplog: pytest.LogCaptureFixture) -> None:
    for monitors, told in (([], 0), ([LearningRateMonitor()], 1)):
        caplog.clear()
        fit(module(tx=optax.lars(0.1)), numbered(2), None, *monitors, max_epochs=2, **BARE)
        result = [x.getMessage() for x in caplog.records if "LearningRateMonitor" in x.getMessage()]
        assert len(result) == told
        assert all("Made.configure_optimizers" in x and "lr_schedule=" in x and "inject_hyper" in x for x in result)


def test_a_second_monitor_and_missing_rows_are_refused() -> None:
    both = [LearningRateMonitor(), LearningRateMonitor("epoch")]
    fit_refuses(ArgumentError, "two LearningRateMonitors.*Leave one", callbacks=both)
    for monitor in (LearningRateMonitor(), LearningRateMonitor("step")):
        words = r"log_every_n_steps=0.*Pass log_every_n_steps=50.*LearningRateMonitor\(\"epoch\"\)"
        fit_refuses(ArgumentError, words, callbacks=monitor, log_every_n_steps=0)
