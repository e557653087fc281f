"""What can be set on a Trainer holds from then on, and what a user writes between runs is used where it should be."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl

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
    with pytest.raises(AttributeError, match=r"Trainer\.strategy cannot be set"):
        trainer.strategy = "ddp"  # type: ignore[assignment]


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
