"""Callbacks that say when they act next are called in those steps, and in no others."""

from typing import Any

import pytest
from kit.batches import numbered
from kit.journal import Rows, at_batch, hooks
from kit.modules import Mean
from kit.refusals import refuses
from kit.trainers import BARE, fit

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint
from jaxlit.errors import ArgumentError, ModuleError


class Every(jl.Callback):
    def __init__(self, steps: int | None) -> None:
        self.steps, self.calls, self.asked = steps, list[Any](), list[int]()

    def due_in(self, step: int) -> int | None:
        self.asked.append(step)
        return None if self.steps is None else self.steps - step % self.steps

    def on_train_batch_start(self, trainer: jl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(("start", batch_idx))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.calls.append(("end", trainer.global_step))

    def on_safe_point(self, trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
        self.calls.append(("over" if epoch_over or training_over else "safe", trainer.global_step))


def called(callback: Every, name: str) -> list[int]:
    return [number for kind, number in callback.calls if kind == name]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_callback_is_called_in_the_steps_that_it_names(accumulate: int) -> None:
    three, five, never = Every(3), Every(5), Every(None)
    given = {"max_epochs": 2, "accumulate_grad_batches": accumulate, **BARE}
    fit(Mean(), numbered(11 * accumulate), None, three, five, never, **given)
    n = accumulate
    starts = {steps: [i for i in range(11 * n) if (i // n + 1) % steps == 0] for steps in (3, 5)}
    again = {steps: [i for i in range(11 * n) if (i // n + 12) % steps == 0] for steps in (3, 5)}
    for callback in (three, five):
        due = [step for step in range(1, 23) if step % callback.steps == 0]
        assert called(callback, "start") == starts[callback.steps] + again[callback.steps]
        assert called(callback, "end")[n - 1 :: n] == due
        # The last batch of an epoch has no safe point of its own.
        assert called(callback, "safe")[n - 1 :: n] == [step for step in due if step not in (11, 22)]
        assert called(callback, "over") == [11, 22]
    assert never.calls == [("over", 11), ("over", 22)]
    # Where an epoch begins, where one of them has acted, and after the steps of the first two batches compiled.
    assert {*never.asked} - {1} == {0, 11, *range(3, 22, 3), *range(5, 22, 5)}
    assert len(never.asked) <= 14


def test_a_subclass_hook_runs_in_each_step() -> None:
    class Counting(Every):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.calls.append(("end", trainer.global_step))

    callback = Counting(4)
    fit(Mean(), numbered(8), None, callback, **BARE)
    assert called(callback, "end") == [*range(1, 9)]
    assert called(callback, "start") == [3, 7]


@pytest.mark.parametrize("stop", [3, 4])
def test_a_resumed_training_calls_what_is_left(stop: int) -> None:
    saves = at_batch(stop - 1, lambda trainer, module: trainer.save_checkpoint("saved"))
    first, second = Every(4), Every(4)
    fit(Mean(), numbered(10), None, first, saves, **BARE)
    fit(Mean(), numbered(10), None, second, ckpt_path="saved", **BARE)
    # The checkpoint is of the next safe point.
    assert called(second, "end") == [step for step in called(first, "end") if step > stop]
    assert called(second, "safe") == [step for step in called(first, "safe") if step > stop]


def test_steps_that_are_undone_are_asked_for_again() -> None:
    callback = Every(4)
    batches = numbered(9)
    batches[4]["x"] = batches[4]["x"] * float("nan")
    given = {"nan_policy": "rollback", "log_every_n_steps": 1, "default_root_dir": "run"}
    # The bad fifth step is known of in the sixth: training goes back to 3, and has three batches left.
    assert fit(Mean(), batches, None, callback, ModelCheckpoint(every_n_train_steps=3), **given).global_step == 6
    assert called(callback, "end") == [4, 4]


@pytest.mark.parametrize(
    ("hook", "expected"), [("on_train_batch_end", [2, 3, 4, 5, 6, 7]), ("on_log", [0, *range(1, 8)])]
)
def test_an_interval_that_a_hook_sets_counts_from_the_step_at_hand(hook: str, expected: list[int]) -> None:
    def faster(trainer: jl.Trainer, *_: Any) -> None:
        if trainer.global_step == 3:
            trainer.log_every_n_steps = 1

    rows = Rows()
    every = 1 if hook == "on_log" else 8
    fit(Mean(), numbered(8), None, rows, hooks(**{hook: faster}), log_every_n_steps=every, **BARE)
    assert [step for step, values in rows.rows if "loss_epoch" not in values][: len(expected)] == expected


def test_hooks_of_another_base_and_of_the_object_run_in_each_step() -> None:
    class Counting(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            ends.append(trainer.global_step)

    class Saving(ModelCheckpoint, Counting):
        def on_fit_start(self, trainer: Any, module: Any) -> None:
            super().on_fit_start(trainer, module)
            self.on_train_batch_start = lambda trainer, module, batch, batch_idx: starts.append(batch_idx)

    ends, starts = list[int](), list[int]()
    fit(Mean(), numbered(6), None, Saving(every_n_train_steps=4), default_root_dir="run")
    assert ends == [*range(1, 7)]
    assert starts == [*range(6)]


@pytest.mark.parametrize("wait", [0, 2.5, "4"])
def test_due_in_returns_a_number_of_steps(wait: Any) -> None:
    callback = hooks("Every", due_in=lambda step: wait)
    refuses(
        ArgumentError, lambda: fit(Mean(), numbered(2), None, callback, **BARE), rf"Every.due_in\(0\) returned .*{wait}"
    )
    refuses(ModuleError, lambda: fit(Mean(), numbered(2), None, hooks(due_in=lambda: 1), **BARE), r"due_in.*\(step\)")
