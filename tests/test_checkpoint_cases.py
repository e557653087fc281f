"""Rolling back and going on from checkpoints: single cases, each with its own way to go wrong."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.callbacks import EarlyStopping, ModelCheckpoint
from jaxlit.errors import CheckpointError, NonFiniteError

BATCHES = 8  # an epoch of `data()`


class Line(jl.TrainModule):
    """A weight that fits a line, and one beside it that shrinks.

    Args:
        width: The size of the first weight.
        bad_step: The optimizer step whose loss is NaN.
    """

    def __init__(self, width: int = 2, bad_step: int = -1) -> None:
        self.w, self.n = nnx.Param(jnp.ones(width)), nnx.Param(jnp.ones(3))
        self.bad_step = bad_step

    def training_step(self, batch: Any) -> Any:
        loss = jnp.mean((batch["x"] * jnp.sum(self.w[...]) - batch["y"]) ** 2) + jnp.sum(self.n[...] ** 2) * 0.01
        loss = jnp.where(self.global_step == self.bad_step, jnp.nan, loss)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val/loss", jnp.mean(batch["y"]) + self.w[...][0])

    def configure_optimizers(self) -> Any:
        return optax.adam(0.01)


class Rising(Line):
    """Its best step is the first."""

    def validation_step(self, batch: Any) -> None:
        self.log("val/loss", jnp.float32(self.global_step))


class Guard(jl.Callback):
    """Note the batches of a training, as (epoch, batch), and end one that does not end."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, int]] = []
        self.epochs = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append((trainer.current_epoch, batch_idx))
        assert len(self.batches) < 100

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.epochs += 1
        assert self.epochs < 20


class SaveAt(jl.Callback):
    """Write a checkpoint behind a batch."""

    def __init__(self, path: str, step: int) -> None:
        self.path, self.step = path, step

    def on_safe_point(self, trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def data(count: int = BATCHES, bad: int | None = None) -> jl.ArrayLoader:
    """Return batches of 4 rows, one of them with a NaN."""
    x = np.arange(count * 4, dtype=np.float32)[:, None] / 10
    y = x.copy()
    if bad is not None:
        y[bad * 4] = np.nan
    return jl.ArrayLoader({"x": x, "y": y}, 4)


def trainer_of(root: str | None = "run", **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"strategy": "single", "max_epochs": 2, "enable_checkpointing": True, **quiet, **arguments}
    return jl.Trainer(default_root_dir=root, **given)


def fit(module: Any = None, root: str | None = "run", **arguments: Any) -> jl.Trainer:
    """Train with a validation behind each epoch."""
    named = {k: arguments.pop(k) for k in ("ckpt_path", "strict", "reset_optimizer") if k in arguments}
    trainer = trainer_of(root, **arguments)
    trainer.fit(Line() if module is None else module, data(), data(2), **named)
    return trainer


def names(folder: str | Path = "run/checkpoints") -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir() if not path.name.startswith("."))


def state_of(path: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(path) / "state.json").read_text())
    return found


# Rolling back ------------------------------------------------------------------------------------------


def test_a_rollback_takes_no_checkpoint_of_an_earlier_fit() -> None:
    trainer = trainer_of(nan_policy="rollback", max_epochs=1)
    trainer.fit(Line(), data())
    assert names() == ["step_00000008"]
    with pytest.raises(NonFiniteError, match="no checkpoint yet"):
        trainer.fit(Line(), data(bad=2))


def test_a_rollback_takes_no_checkpoint_of_a_later_step_that_an_earlier_training_left() -> None:
    fit(callbacks=SaveAt("run/early", 2), nan_policy="rollback")
    assert names() == ["step_00000016"]
    with pytest.raises(NonFiniteError, match="no checkpoint yet"):
        fit(Line(bad_step=4), nan_policy="rollback", ckpt_path="run/early")


def test_a_rollback_takes_the_checkpoint_that_training_was_resumed_from_and_not_the_newest_in_the_folder() -> None:
    every = {"every_n_train_steps": 2, "save_top_k": -1}
    fit(callbacks=ModelCheckpoint(**every), nan_policy="rollback", max_epochs=1)
    assert names() == [f"step_0000000{k}" for k in (2, 4, 6, 8)]
    with pytest.raises(NonFiniteError, match="went back to .*step_00000002 3 times"):  # it meets that step each time
        fit(
            Line(bad_step=3),
            callbacks=ModelCheckpoint(**every),
            nan_policy="rollback",
            max_epochs=4,
            log_every_n_steps=1,
            ckpt_path="run/checkpoints/step_00000002",
        )


@pytest.fixture
def back_in_a_save() -> dict[str, int]:
    """The step that each checkpoint holds, where the eighth of 20 steps was bad and its checkpoint due."""
    callback = ModelCheckpoint(every_n_train_steps=4, save_top_k=-1)
    trainer = trainer_of(callbacks=callback, nan_policy="rollback", max_epochs=1)
    trainer.fit(Line(), data(20, bad=7))
    assert trainer.global_step == 20 - 4
    return {name: state_of(f"run/checkpoints/{name}")["global_step"] for name in names()}


def test_a_rollback_inside_a_save_puts_no_state_under_the_name_of_another_step(back_in_a_save: dict[str, int]) -> None:
    assert back_in_a_save == {name: int(name.removeprefix("step_")) for name in back_in_a_save}


def test_a_step_that_was_bad_has_its_checkpoint_when_it_is_reached_again(back_in_a_save: dict[str, int]) -> None:
    assert [*back_in_a_save.values()] == [4, 8, 12, 16]


def test_a_nan_in_a_trial_of_a_few_batches_is_told_though_nothing_can_be_gone_back_to() -> None:
    trainer = trainer_of(None, nan_policy="rollback", fast_dev_run=True)
    with pytest.raises(NonFiniteError, match="no checkpoint yet"):
        trainer.fit(Line(), data(bad=0))


# Which checkpoint --------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["one", "two"])
@pytest.mark.parametrize("gone", ["all", "newest"])
def test_auto_takes_the_checkpoint_that_has_seen_most_of_all_folders(gone: str, first: str) -> None:
    every = {"one": 3, "two": 4}
    order = [first, *({*every} - {first})]

    def callbacks() -> list[Any]:
        return [ModelCheckpoint(dirpath=k, every_n_train_steps=every[k], save_top_k=-1) for k in order]

    fit(callbacks=callbacks(), max_epochs=1)
    assert names("one") == [f"step_0000000{k}" for k in (3, 6, 8)]
    shutil.rmtree("one/step_00000008")
    if gone == "all":
        shutil.rmtree("one")
    guard = Guard()
    trainer = fit(callbacks=[*callbacks(), guard], resume="auto")
    assert guard.batches == [(1, k) for k in range(BATCHES)] and trainer.global_step == 16


def test_best_is_the_word_though_a_folder_has_that_name() -> None:
    callback = ModelCheckpoint(dirpath="best", monitor="val/loss", save_top_k=2)
    trainer = fit(Rising(), callbacks=callback)
    assert names("best") == ["step_00000008", "step_00000016"]
    assert trainer.validate(Rising(), data(2), ckpt_path="best") == [{"val/loss": 8.0}]


def test_best_is_found_in_a_fresh_process_for_a_subclass() -> None:
    class Mine(ModelCheckpoint):
        pass

    fit(Rising(), callbacks=Mine(monitor="val/loss"))
    again = trainer_of(callbacks=Mine(monitor="val/loss"))
    assert again.validate(Rising(), data(2), ckpt_path="best") == [{"val/loss": 8.0}]


# Other arguments ---------------------------------------------------------------------------------------


def test_an_epoch_that_is_longer_than_it_may_be_now_ends_and_training_goes_on() -> None:
    fit(root="whole", callbacks=SaveAt("at", 5))
    guard = Guard()
    trainer = fit(callbacks=guard, limit_train_batches=3, ckpt_path="at")
    assert guard.batches == [(1, 0), (1, 1), (1, 2)]
    assert (trainer.global_step, trainer.current_epoch) == (5 + 3, 2)


@pytest.mark.parametrize("count", [4, 5])  # less than what was seen, and just that
def test_a_loader_that_has_become_shorter_ends_the_epoch_and_training_goes_on(count: int) -> None:
    class Plain:
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Any:
            yield from list(data(self.count))

    trainer_of("whole", callbacks=SaveAt("at", 5)).fit(Line(), Plain(8))
    guard = Guard()
    trainer = trainer_of(callbacks=guard)
    trainer.fit(Line(), Plain(count), ckpt_path="at")
    assert guard.batches == [(1, k) for k in range(count)]
    assert (trainer.global_step, trainer.current_epoch) == (5 + count, 2)


def test_a_training_that_stopped_early_does_nothing_when_resumed_and_goes_on_with_more_patience() -> None:
    class Constant(Line):
        def validation_step(self, batch: Any) -> None:
            self.log("val/loss", jnp.float32(1.0))

    def ended(patience: int) -> tuple[int, int]:
        stop = EarlyStopping("val/loss", patience=patience)
        trainer = fit(Constant(), callbacks=stop, max_epochs=20, resume="auto")
        return trainer.current_epoch, trainer.global_step

    # The first value improves, and each of the others is one check.
    assert [ended(k) for k in (2, 2, 2, 4, 4)] == [(3, 24), (3, 24), (3, 24), (5, 40), (5, 40)]


def test_two_early_stoppings_in_another_order_keep_each_its_own_state() -> None:
    def pair() -> tuple[Any, Any]:
        return EarlyStopping("val/loss", patience=50), EarlyStopping("train/loss", patience=50)

    validation, training = pair()
    fit(callbacks=[validation, training])
    assert validation.best_score != training.best_score
    resumed, swapped = pair()
    fit(callbacks=[swapped, resumed], resume="auto")
    assert (resumed.best_score, swapped.best_score) == (validation.best_score, training.best_score)


def test_another_monitor_begins_without_the_scores_of_the_one_before() -> None:
    class Two(Line):
        def validation_step(self, batch: Any) -> None:
            self.log("val/loss", 0.5 - self.global_step * 0.001)
            self.log("val/err", jnp.float32(0.05))  # less than any loss

    fit(Two(), callbacks=ModelCheckpoint(monitor="val/err"))
    callback = ModelCheckpoint(monitor="val/loss")
    fit(Two(), callbacks=callback, resume="auto", max_epochs=4)
    ((path, score),) = callback.best_k_models.items()
    assert Path(path).name == "step_00000032" and score == pytest.approx(0.5 - 0.032, abs=1e-6)


def test_a_layer_of_another_size_with_a_new_optimizer_begins_with_an_empty_window() -> None:
    first = fit(root="first", accumulate_grad_batches=3)
    resumed, fresh = Line(4), Line(4)
    path = first.checkpoint_callback.last_model_path
    fit(resumed, accumulate_grad_batches=3, max_epochs=3, ckpt_path=path, strict=False, reset_optimizer=True)
    fresh.n[...] = first.module.n[...]  # all that fits
    fit(fresh, root="fresh", accumulate_grad_batches=3, max_epochs=1)
    for name in ("w", "n"):
        assert np.asarray(getattr(resumed, name)[...]).tobytes() == np.asarray(getattr(fresh, name)[...]).tobytes()


def test_another_accumulation_is_refused_in_the_middle_of_a_window_and_taken_behind_one() -> None:
    class Save(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.current_epoch == 0 and batch_idx == 4:
                trainer.save_checkpoint("inside")

    path = fit(root="three", callbacks=Save(), accumulate_grad_batches=3).checkpoint_callback.last_model_path
    with pytest.raises(CheckpointError, match="2 of 3 batches.*accumulate_grad_batches=2. Resume with 3"):
        fit(accumulate_grad_batches=2, ckpt_path="inside")
    assert fit(accumulate_grad_batches=2, max_epochs=3, ckpt_path=path).global_step == 3 + 3 + 4


def test_a_relative_folder_stays_where_it_was_when_the_working_directory_changes() -> None:
    home = os.getcwd()

    class Move(jl.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            os.makedirs(f"{home}/sub", exist_ok=True)
            os.chdir(f"{home}/sub")

    fit(callbacks=Move(), max_epochs=3, logger=True, log_every_n_steps=1)
    os.chdir(home)
    assert list(Path("sub").iterdir()) == []
    assert names() == ["step_00000024"] and len(Path("run/metrics.csv").read_text().splitlines()) > 24
