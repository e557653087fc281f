"""`nan_policy="rollback"` goes back to the last checkpoint and leaves the batches since then out."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import ArgumentError, NonFiniteError

RATE = 0.25


class Line(jl.TrainModule):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))

    def training_step(self, batch: Any) -> Any:
        loss = jnp.mean((self.w[...] - batch["x"]) ** 2)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return optax.sgd(optax.polynomial_schedule(RATE, 0.01, 1, 20))  # the rate tells the optimizer's step


def batches(values: list[float]) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((2, 1), value, np.float32)} for value in values]


def by_hand(values: list[float]) -> float:
    w, rate = np.float32(0), optax.polynomial_schedule(RATE, 0.01, 1, 20)
    for step, value in enumerate(values):
        w = w - np.float32(rate(step)) * 2 * (w - np.float32(value))
    return float(w)


def train(values: list[float], callbacks: Any = None, **arguments: Any) -> tuple[jl.Trainer, Any]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    callbacks = callbacks or [jl.callbacks.ModelCheckpoint(every_n_train_steps=2)]
    given = {"strategy": "single", "enable_checkpointing": True, "max_epochs": 1, **quiet, **arguments}
    trainer = jl.Trainer(
        default_root_dir="run", callbacks=callbacks, nan_policy="rollback", log_every_n_steps=1, **given
    )
    module = Line()
    trainer.fit(module, batches(values))
    return trainer, module


BAD = float("nan")


@pytest.mark.parametrize("strategy", ["single", "fsdp", "pmap"])
@pytest.mark.parametrize("bad", [2, 3])  # right behind the checkpoint, or a step later
def test_training_goes_back_and_on_without_the_bad_batch(bad: int, strategy: str) -> None:
    class Note(jl.Callback):
        """The steps as the Trainer counts them, by batch."""

        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.steps.append(trainer.global_step)

    note = Note()
    values = [BAD if k == bad else k + 1.0 for k in range(8)]
    callbacks = [note, jl.callbacks.ModelCheckpoint(every_n_train_steps=2)]
    trainer, module = train(values, callbacks, strategy=strategy)
    # Behind the fall-back the count goes on from 2: what the last run of 3, 4, ... belongs to was learnt from.
    back = max(k for k in range(1, len(note.steps)) if note.steps[k] <= note.steps[k - 1])
    assert note.steps[back] == 3 and len(note.steps) == len(values)
    kept = values[:2] + values[back:]
    assert not np.isnan(kept).any()
    assert trainer.global_step == len(kept)
    assert float(module.w[...][0]) == pytest.approx(by_hand(kept), abs=1e-6)
    assert trainer.current_epoch == 1


def test_the_fall_back_is_told(caplog: pytest.LogCaptureFixture) -> None:
    train([1.0, 2.0, BAD, 4.0, 5.0, 6.0])
    (message,) = [r.getMessage() for r in caplog.records if "Back to step" in r.getMessage()]
    assert "optimizer step 2 (epoch 0)" in message and "Back to step 2" in message and "left out" in message


def test_a_bad_batch_at_the_end_of_an_epoch_is_left_out_too() -> None:
    trainer, module = train([1.0, 2.0, 3.0, BAD], max_epochs=1)
    assert trainer.global_step == 2
    assert float(module.w[...][0]) == pytest.approx(by_hand([1.0, 2.0]), abs=1e-6)


def test_without_a_checkpoint_there_is_nothing_to_go_back_to() -> None:
    with pytest.raises(NonFiniteError, match="no checkpoint yet to go back to.*every_n_train_steps"):
        train([1.0, BAD, 3.0, 4.0])
    assert list(Path("run/checkpoints").glob("step_*")) == []


def test_what_diverges_again_and_again_is_an_error() -> None:
    with pytest.raises(NonFiniteError, match="went back to .*step_00000002 3 times.*Lower the learning rate"):
        train([1.0, 2.0, *[BAD] * 40])


def test_a_checkpoint_behind_each_fall_back_counts_anew() -> None:
    values = [1.0, 2.0] + [BAD, BAD, BAD, BAD, 1.0, 2.0, 3.0, 4.0] * 5
    _, module = train(values)
    assert np.isfinite(float(module.w[...][0]))


def test_it_is_refused_without_checkpoints() -> None:
    with pytest.raises(
        ArgumentError, match=r"nan_policy='rollback', enable_checkpointing=False.*nothing to go back to"
    ):
        train([1.0], callbacks=[jl.Callback()], enable_checkpointing=False)


def test_it_goes_back_to_a_checkpoint_of_a_writer_of_ones_own() -> None:
    class Every2(jl.Callback):
        runs_last = True

        def on_safe_point(self, trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
            if trainer.global_step % 2 == 0 and not epoch_over:
                trainer.saver.begin(f"own/at_{trainer.global_step}")  # not waited for: rollback does

    trainer, module = train([1, 2, 3, np.nan, 5, 6], [Every2()], enable_checkpointing=False)
    assert trainer.global_step == 4
    assert float(module.w[...][0]) == pytest.approx(by_hand([1, 2, 5, 6]), rel=1e-6)
