"""A Timer stops in the step in which its time is over, counts on after a resume, and tells how long stages took."""

import datetime
import itertools
from typing import Any

import pytest
from kit.batches import Stream, numbered
from kit.inside import Clock
from kit.journal import at_batch, hooks
from kit.modules import Mean
from kit.refusals import fit_refuses
from kit.trainers import BARE, THREE, fit, make_trainer, thinned

from jaxlit.callbacks import Timer
from jaxlit.errors import ArgumentError


def ticks(clock: Clock, seconds: float, hook: str = "on_train_batch_end") -> Any:
    return hooks(**{hook: lambda *_: setattr(clock, "now", clock.now + seconds)})


# Four batches of 3 s an epoch, and the steps that are taken: the first that ends after the duration is the last.
DURATIONS = [
    ("00:00:00:10", "step", 4),
    ({"seconds": 10}, "step", 4),
    (datetime.timedelta(seconds=13), "step", 5),
    (datetime.timedelta(seconds=13), "epoch", 8),
    (datetime.timedelta(seconds=12), "epoch", 4),
    (datetime.timedelta(0), "step", 0),
    (None, "step", 12),
]


@pytest.mark.parametrize(("duration", "interval", "steps"), DURATIONS)
def test_it_stops_after_the_step_or_epoch_at_the_limit(clock: Clock, duration: Any, interval: str, steps: int) -> None:
    timer = Timer(duration, interval=interval)
    trainer = fit(Mean(), numbered(4), None, timer, ticks(clock, 3), max_epochs=3, **BARE)
    assert (trainer.global_step, timer.time_elapsed()) == (steps, 3 * steps)
    assert timer.time_remaining() == (None if timer.duration is None else timer.duration - 3 * steps)
    assert (trainer.stop_reason or "Timer").startswith("Timer") and (trainer.stop_reason is None) == (steps == 12)


def test_a_second_fit_counts_anew_and_min_steps_keep_it_going(clock: Clock) -> None:
    timer = Timer({"seconds": 5})
    trainer = make_trainer(timer, ticks(clock, 3), max_epochs=9, min_steps=3, min_epochs=0, **BARE)
    for _ in range(2):
        trainer.fit(Mean(), numbered(4))
        assert (trainer.global_step, timer.time_elapsed()) == (3, 9)
        clock.now += 1000


@pytest.mark.parametrize("strategy", thinned(THREE, "single"))
def test_a_resumed_training_has_the_rest_of_the_time(clock: Clock, strategy: str) -> None:
    def train(timer: Timer, *more: Any, **given: Any) -> Any:
        return fit(Mean(), numbered(4), None, timer, ticks(clock, 3), *more, strategy=strategy, max_epochs=9, **given)

    save = at_batch(1, lambda trainer, module: trainer.save_checkpoint("at"))
    train(Timer({"seconds": 20}), save, **BARE)  # the last that it writes is of step 6, 18 s
    clock.now += 1000
    timer = Timer({"seconds": 20})
    trainer = train(timer, ckpt_path="at", **BARE)
    assert (trainer.global_step, timer.time_elapsed(), timer.time_remaining()) == (7, 21, -1)
    used = Timer({"seconds": 18})
    trainer = train(used, ckpt_path="at", **BARE)
    assert trainer.global_step == 6 and used.time_elapsed() == 18 and "0:00:18" in trainer.stop_reason


def test_it_is_limit_enough_also_for_a_loader_without_end(clock: Clock) -> None:
    endless = Stream(itertools.cycle(numbered(2)))  # type: ignore[arg-type]
    for limit in (1.0, 2):
        given = BARE | {"max_epochs": None, "limit_train_batches": limit}
        assert fit(Mean(), endless, None, Timer({"seconds": 8}), ticks(clock, 3), **given).global_step == 3
    fit_refuses(ArgumentError, "has no limit.*Timer.*limits_time = True", max_epochs=None, callbacks=Timer())


@pytest.mark.parametrize("loader", ["epochs", "endless"])
def test_a_callback_of_ones_own_that_says_so_is_limit_enough(clock: Clock, loader: str) -> None:
    mine = hooks(on_train_start=lambda trainer, module: trainer.stop_after(5, "mine is over"))
    mine.limits_time = True
    data: Any = numbered(2) if loader == "epochs" else itertools.cycle(numbered(2))
    trainer = fit(Mean(), data, None, mine, ticks(clock, 2), max_epochs=None, **BARE)
    assert (trainer.global_step, trainer.stop_reason) == (3, "mine is over")


def test_it_tells_how_long_each_stage_took(clock: Clock) -> None:
    timer, seen = Timer(), list[Any]()
    stages = ("train", "validation", "test", "predict")
    tick = [ticks(clock, k, f"on_{stage}_batch_end") for k, stage in enumerate(stages, 1)]
    look = hooks(on_validation_batch_end=lambda *_: seen.append(timer.end_time("validate")))
    trainer = make_trainer(timer, *tick, look, max_epochs=2, num_sanity_val_steps=0, **BARE)
    trainer.fit(Mean(), numbered(3), numbered(2))
    trainer.test(None, numbered(5))
    trainer.predict(None, numbered(7))
    names = ("train", "validate", "test", "predict")
    assert [timer.time_elapsed(stage) for stage in names] == [2 * (3 * 1 + 2 * 2), 4, 15, 28]
    assert seen == [None] * 4 and timer.end_time("test") == timer.start_time("test") + 15  # type: ignore[operator]
    fresh = Timer()
    assert [fresh.time_elapsed(stage) for stage in names] == [0] * 4 and fresh.start_time() is None
