"""The metrics as callbacks read them, beside what `test_results_recorded` compares with Lightning."""

from typing import Any

import jax.numpy as jnp
import pytest
from flax import nnx
from kit.batches import numbered, sized
from kit.journal import Rows, at_batch, hooks
from kit.modules import logging, module
from kit.trainers import fit

from jaxlit.core.log import Metric
from jaxlit.loop.results import Results

MAPPINGS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")


def position(module: Any, batch: Any, i: Any) -> None:
    module.log("x", i + 10.0 * module.current_epoch, on_epoch=True)


def test_the_epoch_value_stays_readable_in_the_next_epoch() -> None:
    seen: list[dict[str, float]] = []
    look = hooks(on_train_batch_end=lambda trainer, *_: seen.append(dict(trainer.callback_metrics)))
    fit(logging(position), numbered(3), None, look, max_epochs=2)
    assert seen[2] == {"x": 2.0, "x_step": 2.0}
    assert seen[3] == {"x": 10.0, "x_step": 10.0, "x_epoch": 1.0}


def test_metrics_are_cleared_by_the_next_fit_and_read_only() -> None:
    trainer = fit(logging(lambda m, batch, i: m.log("train/loss", 1.0, prog_bar=True)), numbered(1))
    for name in MAPPINGS:
        with pytest.raises(TypeError):
            getattr(trainer, name)["train/loss"] = 1.0
        assert repr(getattr(trainer, name)) == "{'train/loss': 1.0}" and len(getattr(trainer, name)) == 1
    with pytest.raises(KeyError, match=r"Did you mean 'train/loss'.*Logged: \['train/loss'\]"):
        trainer.callback_metrics["train/los"]
    trainer.fit(logging(lambda m, batch, i: m.log("other", 1.0)), numbered(1))
    assert set(trainer.callback_metrics) == {"other"}


def test_values_after_a_resume_have_new_versions() -> None:
    before, after = Results(), Results()
    for name in "ab":
        before.put_epoch(Metric(name), 1.0)
    after.load_state_dict(before.state_dict())
    after.put_epoch(Metric("c"), 1.0)
    assert len({after.callback_metrics.version(name) for name in "abc"}) == 3


# Rows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"log_every_n_steps": 2}, [1, 3, 5, 7, 9]),  # counted over epochs of 5
        ({"log_every_n_steps": 3, "accumulate_grad_batches": 2}, [2, 5]),  # of 3 optimizer steps
        ({"log_every_n_steps": 0}, []),
        ({"log_every_n_steps": 1, "max_epochs": None, "max_steps": 2}, [0, 1]),
        ({"log_every_n_steps": 50, "max_epochs": 1}, []),
    ],
)
def test_rows_come_every_n_optimizer_steps(arguments: dict[str, Any], steps: list[int]) -> None:
    rows = Rows()
    fit(logging(position), numbered(5), None, rows, **({"max_epochs": 2} | arguments))
    of_steps = [(step, row) for step, row in rows.rows if "x_step" in row]
    assert [step for step, _ in of_steps] == steps
    size = 3 if "accumulate_grad_batches" in arguments else 5
    assert [row["epoch"] for _, row in of_steps] == [step // size for step in steps]
    ends = [step for step, row in rows.rows if "x_epoch" in row]
    assert ends == ([1] if "max_steps" in arguments else [size - 1, 2 * size - 1][: arguments.get("max_epochs", 2)])


def test_rows_come_in_order_as_python_floats() -> None:
    rows = Rows()
    model = logging(position, lambda m, batch, i: m.log("v", 1.0))
    fit(model, numbered(2), numbered(2), rows, log_every_n_steps=1)
    assert [(step, *row) for step, row in rows.rows] == [
        (0, "x_step", "epoch"),
        (1, "x_step", "epoch"),
        (1, "v", "epoch"),
        (1, "x_epoch", "epoch"),
    ]
    assert {type(value) for _, row in rows.rows for name, value in row.items() if name != "epoch"} == {float}


def test_a_stop_logs_its_last_step() -> None:
    rows, stop = Rows(), at_batch(2, lambda trainer, module: trainer.stop("enough"))
    fit(logging(lambda m, batch, i: m.log("x", 1.0 * i)), numbered(4), None, rows, stop, log_every_n_steps=50)
    assert rows.rows == [(2, {"x": 2.0, "epoch": 0})]


# What hooks log --------------------------------------------------------------------------------------------


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


def test_on_step_in_validation_makes_no_row() -> None:
    shown: list[dict[str, float]] = []
    look = hooks(on_validation_batch_end=lambda trainer, *_: shown.append(dict(trainer.logged_metrics)))
    model = logging(validation=lambda m, batch, i: m.log("v", batch["x"].sum(), on_step=True, on_epoch=False))
    rows, batches = Rows(), sized(8, 3)
    fit(model, batches, batches, look, rows, num_sanity_val_steps=0)
    assert shown == [{"v": pytest.approx(float(batch["x"].sum()), rel=1e-5)} for batch in batches]
    assert not any("v" in row for _, row in rows.rows)
