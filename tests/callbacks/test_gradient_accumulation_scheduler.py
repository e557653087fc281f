"""Windows of another length from epoch to epoch, against the loop by hand."""

import math
import signal
from typing import Any

import numpy as np
import pytest
from kit.batches import numbered, random, sized
from kit.by_hand import HandLoop, assert_same, mean
from kit.checkpoints import bytes_of, keep_all
from kit.journal import at_batch, hooks
from kit.modules import Linear, Mean, module
from kit.refusals import fit_refuses, refuses
from kit.trainers import BARE, STRATEGIES, fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.callbacks import GradientAccumulationScheduler
from jaxlit.errors import ArgumentError, ArgumentTypeError

SCHEDULES: list[Any] = [  # the schedule, and the windows of four epochs of five batches
    ({0: 3, 2: 1}, (3, 3, 1, 1)),
    ({2: 4}, (1, 1, 4, 4)),
    ({0: 1, 1: 2, 3: 9}, (1, 2, 2, 9)),
    ({3: 1}, (1, 1, 1, 1)),
]


def windows(lengths: tuple[int, ...]) -> list[list[float]]:
    return [[float(k + 1) for k in range(i, min(i + n, 5))] for n in lengths for i in range(0, 5, n)]


@pytest.mark.parametrize(("schedule", "lengths"), SCHEDULES)
def test_each_epoch_has_the_windows_of_the_nearest_key_below_it(schedule: Any, lengths: tuple[int, ...]) -> None:
    steps, known = list[int](), list[int]()

    def tx(self: Any) -> Any:
        known.append(self.trainer.estimated_stepping_batches)
        return Mean.configure_optimizers(self)

    model, watch = module(configure_optimizers=tx), hooks(on_train_epoch_end=lambda t, m: steps.append(t.global_step))
    trainer = make_trainer(GradientAccumulationScheduler(schedule), watch, max_epochs=4, **BARE)
    for _ in range(2):  # a second fit starts again
        steps.clear()
        model.w[...] = np.zeros(1, np.float32)
        trainer.fit(model, numbered(5))
        assert steps == [sum(math.ceil(5 / n) for n in lengths[:k]) for k in range(1, 5)]
        assert float(model.w[...][0]) == pytest.approx(mean(windows(lengths)), rel=1e-5)
        assert trainer.accumulate_grad_batches == 1
    assert known == [steps[-1]] * 2


def test_a_users_rule_is_a_subclass() -> None:
    class Grows(GradientAccumulationScheduler):
        def get_accumulate_grad_batches(self, epoch: int) -> int:
            return 1 + epoch

    model, by_hand, batches = Linear(), HandLoop(Linear()), random(6)
    trainer = fit(model, batches, None, Grows({0: 1}), max_epochs=3)
    for size in (1, 2, 3):
        for i in range(0, 6, size):
            by_hand.window(*batches[i : i + size])
    assert_same(model, by_hand.module)
    assert trainer.global_step == 6 + 3 + 2 == trainer.estimated_stepping_batches


STOPS = [(name, stop) for name in STRATEGIES for stop in ((0, 1), (1, 3), (2, 0))]


@pytest.mark.parametrize(("strategy", "stop"), thinned(STOPS, ("fsdp", (1, 3)), full=STOPS[::10]))
def test_a_resume_in_any_window_ends_bit_by_bit_the_same(strategy: str, stop: tuple[int, int]) -> None:
    epoch, batch = stop
    end = at_batch(batch, lambda t, m: signal.raise_signal(signal.SIGINT) if t.current_epoch == epoch else None)
    batches, result = sized(8, 16, 8, 8, 16), []

    def train(folder: str, *more: Any) -> jl.Trainer:
        given = {"max_epochs": 4, "strategy": splitting(strategy), "default_root_dir": folder, "resume": "auto"}
        schedule = GradientAccumulationScheduler({0: 2, 1: 3, 2: 1, 3: 2})
        return fit(Linear(), batches, None, schedule, keep_all(), *more, **given)

    train("parts", end)
    result = [bytes_of(train(folder)) for folder in ("parts", "whole")]
    assert result[0] == result[1]


def test_two_accumulation_numbers_are_refused() -> None:
    scheduler = GradientAccumulationScheduler({0: 2})
    words = "accumulate_grad_batches=3.*with a GradientAccumulationScheduler"
    trainer = fit_refuses(ArgumentError, words, callbacks=scheduler, accumulate_grad_batches=3)
    assert trainer is not None and trainer.accumulate_grad_batches == 3
    fit_refuses(ArgumentError, "hold two", callbacks=[scheduler, GradientAccumulationScheduler({1: 2})])
    words = r"int of at least 1, got \{4: 2\}"
    refuses(ArgumentTypeError, lambda: jl.Trainer(accumulate_grad_batches={4: 2}), words)  # type: ignore[arg-type]


@pytest.mark.parametrize("limits", [{"max_epochs": 3}, {"max_steps": 100}])
def test_a_later_window_that_cuts_a_dispatch_is_refused_before_the_fit(limits: dict[str, int]) -> None:
    begun, scheduler = list[int](), GradientAccumulationScheduler({0: 2, 2: 3})
    watch = hooks(on_fit_start=lambda trainer, module: begun.append(0))
    words = r"steps_per_execution=4.*step of 3 \(GradientAccumulationScheduler in epoch 2\).*multiple of 3"
    fit_refuses(ArgumentError, words, callbacks=[scheduler, watch], steps_per_execution=4, **limits)
    assert begun == []
    trainer = fit(Mean(), numbered(4), None, scheduler, watch, steps_per_execution=4, max_epochs=2)
    assert begun == [0]
    assert trainer.global_step == 4  # the epoch whose windows do not fit is not reached
