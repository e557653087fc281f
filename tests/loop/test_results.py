"""The metrics as callbacks read them, beside what `test_results_recorded` compares with Lightning."""

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from kit.batches import numbered, sized
from kit.journal import Rows, at_batch, hooks
from kit.modules import logging, module
from kit.trainers import fit

from jaxlit.errors import LogError


def test_metrics_are_cleared_by_the_next_fit_and_read_only() -> None:
    trainer = fit(logging(lambda m, batch, i: m.log("train/loss", 1.0, prog_bar=True)), numbered(1))
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        with pytest.raises(TypeError):
            getattr(trainer, name)["train/loss"] = 1.0
        assert repr(getattr(trainer, name)) == "{'train/loss': 1.0}" and len(getattr(trainer, name)) == 1
    with pytest.raises(KeyError, match=r"Did you mean 'train/loss'.*Logged: \['train/loss'\]"):
        trainer.callback_metrics["train/los"]
    trainer.fit(logging(lambda m, batch, i: m.log("other", 1.0)), numbered(1))
    assert set(trainer.callback_metrics) == {"other"}


def test_a_stop_logs_its_last_step() -> None:
    rows, stop = Rows(), at_batch(2, lambda trainer, module: trainer.stop("enough"))
    fit(logging(lambda m, batch, i: m.log("x", 1.0 * i)), numbered(4), None, rows, stop, log_every_n_steps=50)
    assert rows.rows == [(2, {"x": 2.0, "epoch": 0})]


def test_a_parameter_logged_in_a_hook_is_the_one_of_that_step() -> None:
    # Nobody reads the value before the next step has overwritten the array.
    logs = hooks(on_train_batch_end=lambda t, m, *_: m.log("w", m.scalar.get_value()))

    def init(self: Any) -> None:
        self.scalar = nnx.Param(jnp.zeros(()))

    rows, model = Rows(), module(init=init, error=lambda self, batch: batch["x"] - self.scalar[...])
    fit(model, numbered(4), None, logs, rows, log_every_n_steps=1)
    w, expected = 0.0, []
    for number in range(1, 5):
        w += 0.5 * (number - w)
        expected.append(w)
    assert rows.of("w") == expected


@pytest.mark.parametrize(("reduce_fx", "expected"), [("mean", 54 / 26), ("sum", 6), ("min", 1), ("max", 3)])
def test_values_of_batch_hooks_are_weighted_by_rows(reduce_fx: str, expected: float) -> None:
    def log(trainer: Any, module: Any, outputs: Any, batch: Any, i: int) -> None:
        module.log("x", i + 1, on_step=False, on_epoch=True, reduce_fx=reduce_fx)

    trainer = fit(logging(), sized(8, 8, 10), None, hooks(on_train_batch_end=log))
    assert trainer.callback_metrics["x"] == pytest.approx(expected)


def test_a_second_fit_may_log_a_name_of_the_first_elsewhere() -> None:
    trainer = fit(logging(lambda m, batch, i: m.log("x", 1.0)), numbered(1))
    other = logging()
    type(other).on_train_start = lambda self: self.log("x", 2.0)
    trainer.fit(other, numbered(1))
    assert trainer.callback_metrics["x"] == 2.0


def test_a_name_that_a_hook_logs_before_the_step_is_refused() -> None:
    made = logging(lambda m, batch, i: m.log("x", 1.0, on_epoch=True))
    early = hooks(on_train_start=lambda trainer, module: module.log("x", 42.0))
    with pytest.raises(LogError, match=r"'x', \.\.\.\) in on_train_start: training_step logs this name"):
        fit(made, numbered(1), None, early)


def test_what_hooks_log_for_a_dropped_window_is_in_no_row() -> None:
    rows = Rows()

    def start(trainer: Any, module: Any, batch: Any, idx: int) -> int | None:
        module.log("seen", float(idx), on_step=True, on_epoch=False)
        return -1 if idx == 3 else None  # in the middle of a window of two batches

    given = {"accumulate_grad_batches": 2, "max_epochs": 2, "log_every_n_steps": 1}
    fit(logging(), numbered(4), None, hooks(on_train_batch_start=start), rows, **given)
    assert rows.of("seen") == [0.5, 0.5]
