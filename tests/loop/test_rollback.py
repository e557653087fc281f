"""`nan_policy="rollback"` goes back to the last checkpoint and leaves the batches since then out."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kit.batches import Stream, numbered
from kit.by_hand import mean
from kit.checkpoints import names
from kit.journal import Rows, at_batch, hooks
from kit.modules import Mean, module
from kit.trainers import fit, thinned

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint
from jaxlit.errors import NonFiniteError

BAD = float("nan")
RATE = optax.polynomial_schedule(0.25, 0.01, 1, 20)  # the rate tells the optimizer's step


def batches(values: list[float]) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((8, 1), value, np.float32)} for value in values]


def by_hand(windows: list[list[float]]) -> float:
    w = np.float32(0)
    for step, window in enumerate(windows):
        w = w - np.float32(RATE(step)) * 2 * (w - np.float32(np.mean(window)))
    return float(w)


def train(values: list[float], *callbacks: Any, made: Any = None, **arguments: Any) -> tuple[jl.Trainer, Any]:
    callbacks = callbacks or (ModelCheckpoint(every_n_train_steps=2),)
    given = {"default_root_dir": "run", "nan_policy": "rollback", "log_every_n_steps": 1} | arguments
    made = made or module(tx=optax.sgd(RATE))
    return fit(made, batches(values), None, *callbacks, **given), made


@pytest.mark.parametrize(
    ("strategy", "bad"), thinned([("single", 2), ("single", 3), ("fsdp", 3), ("pmap", 2)], ("single", 2), ("fsdp", 3))
)  # right after the checkpoint, or a step later
def test_training_goes_back_and_on_without_the_bad_batch(bad: int, strategy: str) -> None:
    steps: list[int] = []
    note = hooks(on_train_batch_end=lambda t, *_: steps.append(t.global_step))
    values = [BAD if k == bad else k + 1.0 for k in range(8)]
    trainer, made = train(values, note, ModelCheckpoint(every_n_train_steps=2), strategy=strategy)
    # After the fall-back the count continues from 2: what the last run of 3, 4, ... belongs to was learnt from.
    back = max(k for k in range(1, len(steps)) if steps[k] <= steps[k - 1])
    assert steps[back] == 3 and len(steps) == len(values)
    left = values[:2] + values[back:]
    assert not np.isnan(left).any()
    assert (trainer.global_step, trainer.current_epoch) == (len(left), 1)
    assert float(made.w[...][0]) == pytest.approx(by_hand([[x] for x in left]), abs=1e-6)


def probe(batch_idx: int, seen: list[float]) -> jl.Callback:
    """Return a callback whose save is the first to look whether every step was finite, and what the module is then."""
    look = lambda trainer, module: (trainer.save_checkpoint("probe"), seen.append(float(module.w[...][0])))  # noqa: E731
    return at_batch(batch_idx, look)


def test_a_rollback_drops_half_a_window_and_resets_the_module() -> None:
    seen, values = list[float](), [1.0, 2.0, 3.0, 4.0, BAD, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0]
    given = {"accumulate_grad_batches": 2, "log_every_n_steps": 50}
    trainer, made = train(values, probe(6, seen), ModelCheckpoint(every_n_train_steps=2), **given)
    before = [[1.0, 2.0], [3.0, 4.0]]
    assert seen == [pytest.approx(by_hand(before), abs=1e-6)]
    assert trainer.global_step == 4
    assert float(made.w[...][0]) == pytest.approx(by_hand([*before, [8.0, 9.0], [10.0, 11.0]]), abs=1e-6)


def epoch_mean(self: Any, batch: Any) -> Any:
    self.log("seen", jnp.mean(batch["x"]), on_step=False, on_epoch=True)
    return jnp.mean(self.error(batch) ** 2)


def test_epoch_metrics_are_of_the_steps_that_count() -> None:
    rows, given = Rows(), {"log_every_n_steps": 50, "made": module(epoch_mean)}
    train([1.0, 2.0, BAD, 4.0, 5.0, 6.0], rows, probe(2, []), ModelCheckpoint(every_n_train_steps=2), **given)
    assert rows.of("seen") == [pytest.approx(3.6, rel=1e-6)]  # of all but the bad one


def test_metrics_of_a_later_epoch_start_again() -> None:
    rows = Rows()
    loader = Stream(batches([1.0, 2.0, 3.0]), batches([BAD, 5.0, 6.0, 8.0]))
    given: Any = {"nan_policy": "rollback", "max_epochs": 2, "log_every_n_steps": 50, "default_root_dir": "run"}
    saver = ModelCheckpoint(every_n_train_steps=2)
    trainer = fit(module(epoch_mean), loader, None, rows, saver, **given)
    assert rows.of("seen") == [2.0, pytest.approx((5 + 6 + 8) / 3, rel=1e-6)]
    assert trainer.global_step == 2 + 3  # the third step of the first epoch has gone as well


def test_what_diverges_again_and_again_is_an_error() -> None:
    with pytest.raises(NonFiniteError, match="went back to .*step_00000002 3 times.*Lower the learning rate"):
        train([1.0, 2.0, *[BAD] * 40])


def test_rollback_ignores_later_steps_of_earlier_trainings() -> None:
    given: Any = {"default_root_dir": "run", "nan_policy": "rollback"}
    fit(Mean(), numbered(6), None, at_batch(1, lambda t, m: t.save_checkpoint("run/early")), **given)
    assert names() == ["step_00000006"]
    made = Mean()
    given["log_every_n_steps"] = 0
    # Looked at when the epoch was over: all batches since then are left out.
    assert fit(made, batches([1.0, 2.0, 3.0, BAD, 5.0, 6.0]), ckpt_path="run/early", **given).global_step == 2
    assert float(made.w[...][0]) == mean([[1], [2]])


def test_rollback_uses_the_resumed_checkpoint_not_the_newest() -> None:
    saver = lambda: ModelCheckpoint(every_n_train_steps=2, save_top_k=-1)  # noqa: E731
    train([1.0] * 32, saver(), max_steps=8)
    assert names() == [f"step_0000000{k}" for k in (2, 4, 6, 8)]
    resumed: Any = {"ckpt_path": "run/checkpoints/step_00000002"}
    with pytest.raises(NonFiniteError, match="went back to .*step_00000002 3 times"):
        train([1.0, 1.0] + [BAD] * 30, saver(), **resumed)


def test_it_goes_back_to_a_checkpoint_of_a_writer_of_ones_own() -> None:
    def save(trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
        if trainer.global_step % 2 == 0 and not epoch_over:
            trainer.saver.begin(f"own/at_{trainer.global_step}")  # not waited for: rollback does

    trainer, made = train([1, 2, 3, BAD, 5, 6], hooks(on_safe_point=save), enable_checkpointing=False)
    assert trainer.global_step == 4
    assert float(made.w[...][0]) == pytest.approx(by_hand([[1], [2], [5], [6]]), rel=1e-6)


def test_a_rollback_of_the_last_step_continues_its_epoch() -> None:
    begun, rows = list[int](), Rows()
    begins = hooks(on_train_epoch_start=lambda trainer, module: begun.append(trainer.current_epoch))
    given: Any = {"max_epochs": 1, "max_steps": 5, "log_every_n_steps": 0, "made": module(epoch_mean)}
    train([1.0, 2.0, 3.0, 4.0, BAD, 6.0, 7.0], begins, rows, ModelCheckpoint(every_n_train_steps=2), **given)
    assert begun == [0]
    assert (rows.of("seen")[-1], {*rows.of("epoch")}) == (pytest.approx(3.2), {0})
    resumed = fit(module(epoch_mean), batches([0.0] * 7), ckpt_path="run/checkpoints/step_00000005", max_steps=6)
    assert resumed.global_step == 6


def test_on_load_checkpoint_sees_the_restored_module() -> None:
    result: list[float] = []
    read = lambda module: float(module.w[...][0])  # noqa: E731
    watch = hooks(
        on_train_batch_end=lambda trainer, module, *_: read(module),
        on_load_checkpoint=lambda trainer, module, checkpoint: result.append(read(module)),
    )
    train([1.0, 2.0, 3.0, BAD, 5.0, 6.0], watch, ModelCheckpoint(every_n_train_steps=2))
    assert result == [pytest.approx(by_hand([[1.0], [2.0]]), abs=1e-6)]


def test_what_hooks_log_before_a_rollback_is_in_no_row() -> None:
    rows = Rows()
    log = hooks(on_train_batch_start=lambda t, m, batch, idx: m.log("batch", float(idx), on_step=True, on_epoch=False))
    train([1.0, 2.0, 3.0, BAD, *range(5, 9)], rows, log, ModelCheckpoint(every_n_train_steps=3))
    logged = rows.of("batch")
    assert len(logged) > 4 and logged == [int(x) for x in logged]  # a mean over an undone batch would be a fraction
    assert len({*logged}) == len(logged)


def test_a_rollback_does_not_bring_a_reset_optimizer_back() -> None:
    made = lambda: module(tx=optax.adam(0.1))  # noqa: E731
    trainer, _ = train([1.0, 2.0, 3.0], made=made())
    trainer.save_checkpoint("kept")
    with pytest.raises(NonFiniteError, match="no checkpoint yet to go back to"):
        resets = {"ckpt_path": "kept", "reset_optimizer": True}
        fit(made(), batches([1.0, 2.0, 3.0, BAD]), nan_policy="rollback", max_epochs=2, **resets)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_rollback_to_before_the_first_step_can_be_resumed(accumulate: int) -> None:
    saves = hooks(on_fit_start=lambda trainer, module: trainer.save_checkpoint("saved"))
    train([1.0] * 4, saves, accumulate_grad_batches=accumulate)
    values = [1.0] * 2 + [BAD] + [1.0] * 13  # the checkpoint has no metrics, as the step was not traced
    given = {"accumulate_grad_batches": accumulate, "default_root_dir": "second"}
    first, _ = train(values, ModelCheckpoint(), ckpt_path="saved", max_epochs=1, **given)
    again, _ = train([1.0] * 16, ModelCheckpoint(), ckpt_path="last", max_epochs=2, **given)
    assert 16 // accumulate > first.global_step > 0
    assert again.global_step == first.global_step + 16 // accumulate


def test_a_rollback_of_the_last_step_continues_the_data() -> None:
    used: list[int] = []
    note = hooks(on_train_batch_end=lambda t, m, outputs, batch, idx: used.append(idx))
    values = [1.0, 2.0, BAD, 4.0, 5.0]
    trainer, made = train(values, note, ModelCheckpoint(every_n_train_steps=1), max_steps=3, max_epochs=2)
    assert used == [0, 1, 2, 3]
    assert trainer.global_step == 3
    assert float(made.w[...][0]) == pytest.approx(by_hand([[1.0], [2.0], [4.0]]), abs=1e-6)


@pytest.mark.parametrize("bad", [0, 1])
def test_each_epoch_has_its_mean_also_after_a_rollback_to_an_earlier_one(bad: int) -> None:
    values = [BAD if k == bad else k + 5.0 for k in range(3)]
    loader, rows = Stream(batches([1.0, 2.0, 3.0, 4.0]), batches(values)), Rows()
    save = ModelCheckpoint(every_n_train_steps=3)
    fit(module(epoch_mean), loader, None, rows, save, nan_policy="rollback", max_epochs=2, log_every_n_steps=1)
    assert len(rows.of("seen")) == 2
