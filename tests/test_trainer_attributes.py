"""What can be set on a Trainer holds from then on, and what a user writes between runs is used where it should be."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.loop.settings import Settings

FIELDS = [field.name for field in dataclasses.fields(Settings)]
QUIET = {"strategy": "single", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
BATCHES = [{"x": np.full((2, 3), k, np.float32)} for k in range(4)]


class Line(jl.TrainModule):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean((self.w[...] - batch["x"]) ** 2)

    def validation_step(self, batch: Any) -> None:
        self.log("limit", jnp.float32(self.trainer.max_epochs))

    def predict_step(self, batch: Any) -> jax.Array:
        return batch["x"] * self.w[...]

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def make_trainer(**arguments: Any) -> jl.Trainer:
    return jl.Trainer(**({"max_epochs": 1, "enable_checkpointing": False} | QUIET | arguments))


def test_arguments_can_be_set_after_a_trial_run() -> None:
    trainer = make_trainer(fast_dev_run=2)
    trainer.fit(Line(), BATCHES)
    assert (trainer.max_epochs, trainer.max_steps, trainer.global_step) == (1, 2, 2)
    trainer.fast_dev_run, trainer.max_steps, trainer.max_epochs = 0, -1, 3
    trainer.fit(Line(), BATCHES)
    assert trainer.global_step == 12


@pytest.mark.parametrize(
    ("name", "value"), [("prefetch", 0), ("max_in_flight", 1), ("data_timeout", 3.0), ("min_steps", 2), ("seed", 5)]
)
def test_an_argument_that_is_set_is_one_of_the_settings(name: str, value: Any) -> None:
    trainer = make_trainer()
    setattr(trainer, name, value)
    assert getattr(trainer, name) == getattr(trainer.settings, name) == value


def test_a_wrong_value_is_refused_when_it_is_set() -> None:
    trainer = make_trainer()
    with pytest.raises(jl.errors.ArgumentError, match=r"Trainer\(max_steps=\.\.\.\) takes an int of at least -1"):
        trainer.max_steps = -2
    with pytest.raises(AttributeError, match=r"Trainer\.strategy is fixed when a Trainer is made.*Trainer\(strategy="):
        trainer.strategy = "ddp"  # type: ignore[assignment]


@pytest.mark.parametrize("field", dataclasses.fields(Settings), ids=lambda field: field.name)
def test_every_argument_can_be_set_or_says_that_it_is_fixed(field: Any) -> None:
    """None of them is taken in silence."""
    name, trainer = field.name, make_trainer(gradient_clip_val=1.0)
    value = {"gradient_clip_algorithm": "value", "max_recompiles": 3, "limit_val_batches": 0}.get(name, field.default)
    fixed = {"strategy", "devices", "logger", "default_root_dir"} | {x for x in FIELDS if x.startswith("enable_")}
    if name in fixed:
        with pytest.raises(AttributeError, match=rf"^Trainer\.{name} is fixed when.*set to .*with Trainer\({name}="):
            setattr(trainer, name, value)
        return
    setattr(trainer, name, value)
    assert getattr(trainer.settings, name) == value
    if name not in ("callbacks", "min_epochs", "min_steps"):  # which say what follows from them
        assert getattr(trainer, name) == value


def test_a_limit_that_is_set_holds_for_the_next_run() -> None:
    trainer, module = make_trainer(), Line()
    assert len(trainer.predict(module, BATCHES) or []) == 4
    trainer.limit_predict_batches = 3
    assert len(trainer.predict(module, BATCHES) or []) == 3
    trainer.limit_train_batches = 0.5
    trainer.fit(module, BATCHES)
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "max_epoch",
            r"Trainer has no attribute 'max_epoch'.*set to 3\. Did you mean 'max_epochs'\? Keep what is your",
        ),
        ("global_step", r"Trainer\.global_step tells of the runs, and would be set to 3\. Set an argument"),
        ("logger", r"Trainer\.logger is fixed when a Trainer is made, and would be set to 3\. Make another one"),
    ],
)
def test_what_nobody_would_read_is_refused(name: str, message: str) -> None:
    with pytest.raises(AttributeError, match=f"^{message}"):
        setattr(make_trainer(), name, 3)


def test_callbacks_are_checked_when_they_are_set() -> None:
    trainer, one = make_trainer(), jl.Callback()
    trainer.callbacks = one  # type: ignore[assignment]
    assert trainer.callbacks == [one]
    trainer.callbacks = None  # type: ignore[assignment]
    assert trainer.callbacks == []
    for wrong, message in (
        ([one, one], "the same Callback object twice"),
        (jl.Callback, r"takes callbacks, got <class"),
        ([3], r"takes jaxlit\.Callback objects, got 3"),
    ):
        with pytest.raises((jl.errors.ArgumentError, jl.errors.ArgumentTypeError), match=message):
            trainer.callbacks = wrong  # type: ignore[assignment]
    assert trainer.callbacks == []


class Windows(jl.Callback):
    """Sets the batches of a step at the start of each epoch."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        trainer.accumulate_grad_batches = self.counts[trainer.current_epoch]  # holds from the next epoch on


def test_windows_cannot_begin_in_the_middle_of_a_fit() -> None:
    trainer = make_trainer(max_epochs=3, callbacks=Windows(1, 2, 2))
    message = r"is set to 2 in a fit that began with 1, whose state.*Begin with Trainer\(accumulate_grad_batches=2\)"
    with pytest.raises(jl.errors.ArgumentError, match=message):
        trainer.fit(Line(), BATCHES)
    assert (trainer.accumulate_grad_batches, trainer.global_step) == (1, 4)
    trainer.callbacks = None  # type: ignore[assignment]
    trainer.accumulate_grad_batches, trainer.max_epochs = 2, 1
    trainer.fit(Line(), BATCHES)
    assert trainer.global_step == 2


def test_windows_can_be_left_out_for_some_epochs() -> None:
    trainer, module = make_trainer(max_epochs=3, accumulate_grad_batches=2, callbacks=Windows(1, 2, 2)), Line()
    trainer.fit(module, BATCHES)
    w = np.ones(3)
    for windows in ([BATCHES[:2], BATCHES[2:]], [[b] for b in BATCHES], [BATCHES[:2], BATCHES[2:]]):
        for window in windows:
            w = w - 0.1 * np.mean([2 * (w - b["x"][0]) / 3 for b in window], 0)
    assert trainer.global_step == 8
    np.testing.assert_allclose(module.w[...], w, rtol=1e-5)


def test_callbacks_can_be_replaced_between_runs() -> None:
    ran: list[str] = []

    class Tells(jl.Callback):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            ran.append("told")

    trainer = make_trainer()
    trainer.callbacks = [Tells()]
    trainer.fit(Line(), BATCHES)
    assert ran == ["told"]


def test_a_checkpoint_after_fit_is_of_the_training_whatever_is_written_to_the_module(tmp_path: Any) -> None:
    trainer, module = make_trainer(), Line()
    trainer.fit(module, BATCHES)
    trained = np.asarray(module.w[...])
    module.w[...] = jnp.zeros(3)
    trainer.save_checkpoint(tmp_path / "after")
    assert not np.asarray(module.w[...]).any()
    np.testing.assert_array_equal(Line.load_from_checkpoint(tmp_path / "after").w[...], trained)


def test_a_step_that_reads_an_argument_sees_the_one_that_holds() -> None:
    trainer, module = make_trainer(), Line()
    assert trainer.validate(module, BATCHES) == [{"limit": 1.0}]
    trainer.max_epochs = 7
    assert trainer.validate(module, BATCHES) == [{"limit": 7.0}]


def test_an_attribute_that_cannot_be_compared_costs_a_compile_and_nothing_else() -> None:
    class Odd:
        def __eq__(self, other: object) -> Any:
            return np.ones(2) == np.ones(2)

        def __hash__(self) -> int:
            return 1

    trainer, module = make_trainer(), Line()
    module.odd = Odd()
    trainer.fit(module, BATCHES)
    for _ in range(2):
        module.odd = Odd()
        found = trainer.predict(module, BATCHES)
        assert found is not None and len(found) == 4


def test_a_write_of_a_hook_is_its_own_and_not_that_of_the_next() -> None:
    class Halves(jl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            module.w[...] = jnp.full(3, 0.5)

    class Rows(jl.Callback):
        def on_log(self, trainer: Any, values: Any, step: int) -> None:
            rows.append(values)

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            seen.append(float(module.w[0]))

    class Logs(Line):
        def training_step(self, batch: Any) -> jax.Array:
            loss = super().training_step(batch)
            self.log("loss", loss, on_step=False, on_epoch=True)
            return loss

    rows: list[Any] = []
    seen: list[float] = []
    make_trainer(max_epochs=2, callbacks=[Halves(), Rows()]).fit(Logs(), BATCHES)
    assert len(rows) == 2
    assert seen[4] == 0.5


def test_a_name_of_ones_own_may_be_set() -> None:
    class Mine(jl.Trainer):
        def __init__(self) -> None:
            super().__init__(max_epochs=1)
            self.notebook_cells = 3

    trainer = Mine()
    trainer.scratch = trainer.notebook_cells + 1  # type: ignore[attr-defined]
    assert trainer.scratch == 4  # type: ignore[attr-defined]
