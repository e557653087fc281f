"""Every argument that limits a loop, alone and together, against a model of the loop in plain Python."""

import datetime
import gc
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import ArgumentError, LogError

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8")
ROWS = 8
NOT_HERE = ("on_log", "on_exception", "on_safe_point")  # those that Lightning does not have, or that do not come
HOOKS = [name for name in vars(jl.Callback) if name.startswith("on_") and name not in NOT_HERE]


class Mean(jl.TrainModule):
    """Learns the mean of its data: a step moves the weight half way to the mean of its rows."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))

    def training_step(self, batch: Any) -> jax.Array:
        loss = jnp.mean((self.w[...] - batch["x"]) ** 2)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", jnp.mean(batch["x"] - self.w[...]))

    def test_step(self, batch: Any) -> None:
        self.log("test", jnp.mean(batch["x"] - self.w[...]))

    def predict_step(self, batch: Any) -> jax.Array:
        return batch["x"] - self.w[...]

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.25)


def make_batches(count: int, first: int = 1) -> list[dict[str, np.ndarray]]:
    """Return batches whose rows all hold the batch's number, so that a hook knows which batch it sees."""
    return [{"x": np.full((ROWS, 1), first + k, np.float32)} for k in range(count)]


def number_of(batch: Any) -> int:
    return int(batch["x"][0, 0])


def by_hand(windows: list[list[int]], w: float = 0.0) -> float:
    """Train `Mean` on windows of equally large batches, given by their numbers."""
    for window in windows:
        w -= 0.5 * (w - sum(window) / len(window))
    return w


def assert_weight(module: Any, expected: float) -> None:
    np.testing.assert_allclose(float(module.w[...][0]), expected, rtol=1e-6, atol=1e-6)


def make_trainer(*callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "strategy": "single"}
    return jl.Trainer(callbacks=list(callbacks), **(quiet | arguments))


def make_callback(**hooks: Any) -> jl.Callback:
    """Return a callback with these functions of (trainer, module, ...) as its hooks."""
    return type("Made", (jl.Callback,), {k: staticmethod(v) for k, v in hooks.items()})()


class Recorder(jl.Callback):
    """Writes down (hook, batch_idx, dataloader_idx, epoch, global_step) of every hook, and each batch's number."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.batches: dict[str, list[int]] = {"train": [], "validation": [], "test": [], "predict": [], "sanity": []}

    def note(self, hook: str, trainer: jl.Trainer, *args: Any) -> None:
        index = loader = None
        if "_batch_" in hook:
            batch, index, *rest = args if hook.endswith("start") else args[1:]
            loader = rest[0] if rest else None
            if hook.endswith("start"):
                stage = "sanity" if trainer.sanity_checking else hook.split("_")[1]
                self.batches[stage].append(number_of(batch))
        self.events.append((hook, index, loader, trainer.current_epoch, trainer.global_step))

    def named(self, hook: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == hook]

    @property
    def names(self) -> list[str]:
        return [event[0] for event in self.events]


for _hook in HOOKS:
    setattr(Recorder, _hook, lambda self, trainer, module, *args, hook=_hook: self.note(hook, trainer, *args))


# Limits in batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "of_5", "of_3"), [(1, 1, 1), (4, 4, 3), (0.4, 2, 1), (1.0, 5, 3)])
def test_a_limit_is_a_count_or_a_floored_fraction_in_every_stage_and_of_each_loader(
    limit: float, of_5: int, of_3: int
) -> None:
    recorder, module = Recorder(), Mean()
    limits = {f"limit_{stage}_batches": limit for stage in ("train", "val", "test", "predict")}
    trainer = make_trainer(recorder, max_epochs=2, num_sanity_val_steps=0, **limits)
    loaders = [make_batches(5, 11), make_batches(3, 21)]
    trainer.fit(module, make_batches(5), loaders)
    tested = trainer.test(module, loaders)
    predicted = trainer.predict(module, loaders)
    trained, both = list(range(1, 1 + of_5)), [*range(11, 11 + of_5), *range(21, 21 + of_3)]
    assert recorder.batches == {
        "train": trained * 2,
        "validation": both * 2,
        "test": both,
        "predict": both,
        "sanity": [],
    }
    w = by_hand([[k] for k in trained * 2])
    assert_weight(module, w)
    means = [11 + (of_5 - 1) / 2 - w, 21 + (of_3 - 1) / 2 - w]
    assert tested == [{f"test/dataloader_idx_{i}": pytest.approx(mean, rel=1e-6)} for i, mean in enumerate(means)]
    assert [[float(x[0, 0] + w) for x in found] for found in predicted] == [
        pytest.approx(range(11, 11 + of_5)),
        pytest.approx(range(21, 21 + of_3)),
    ]


@pytest.mark.parametrize("stage", ["test", "predict"])
def test_a_limit_of_0_leaves_a_stage_without_batches(stage: str) -> None:
    recorder = Recorder()
    trainer = make_trainer(recorder, **{f"limit_{stage}_batches": 0})
    getattr(trainer, stage)(Mean(), make_batches(2))
    assert recorder.batches[stage] == []


def test_each_stage_has_its_own_limit() -> None:
    recorder, module = Recorder(), Mean()
    limits = {"limit_train_batches": 4, "limit_val_batches": 3, "limit_test_batches": 2, "limit_predict_batches": 1}
    trainer = make_trainer(recorder, max_epochs=1, num_sanity_val_steps=0, **limits)
    trainer.fit(module, make_batches(5), make_batches(5))
    trainer.validate(module, make_batches(5))
    trainer.test(module, make_batches(5))
    trainer.predict(module, make_batches(5))
    counts = {stage: len(found) for stage, found in recorder.batches.items()}
    assert counts == {"train": 4, "validation": 6, "test": 2, "predict": 1, "sanity": 0}


@pytest.mark.parametrize(("overfit", "count"), [(2, 2), (0.5, 3)])
def test_overfit_batches_takes_the_same_unshuffled_batches_every_epoch_and_validates_on_as_many(
    overfit: float, count: int
) -> None:
    recorder, module = Recorder(), Mean()
    rows = {"x": np.repeat(np.arange(1, 7, dtype=np.float32), ROWS)[:, None]}
    trainer = make_trainer(recorder, max_epochs=3, overfit_batches=overfit, num_sanity_val_steps=0)
    trainer.fit(module, jl.ArrayLoader(rows, ROWS, shuffle=True, seed=3), make_batches(6, 31))
    assert recorder.batches["train"] == list(range(1, 1 + count)) * 3
    assert recorder.batches["validation"] == list(range(31, 31 + count)) * 3
    assert_weight(module, by_hand([[k] for k in range(1, 1 + count)] * 3))


def test_overfit_batches_leaves_the_callers_loader_shuffled() -> None:
    rows = {"x": np.arange(1.0, 33.0, dtype=np.float32)[:, None]}
    loader = jl.ArrayLoader(rows, ROWS, shuffle=True)
    before = [batch["x"].tolist() for batch in loader]
    make_trainer(max_epochs=1, overfit_batches=2).fit(Mean(), loader)
    assert [batch["x"].tolist() for batch in loader] == before


@pytest.mark.parametrize("limit", [2, 0.5, 1, 0])
@pytest.mark.parametrize("name", ["limit_train_batches", "limit_val_batches"])
def test_overfit_batches_is_refused_together_with_a_limit_that_it_would_replace(name: str, limit: float) -> None:
    with pytest.raises(ArgumentError, match=f"overfit_batches=2, {name}={limit}"):
        make_trainer(max_epochs=1, overfit_batches=2, **{name: limit})


@pytest.mark.parametrize(("given", "count"), [(True, 1), (3, 3)])
def test_fast_dev_run_takes_that_many_batches_of_everything_once(given: int, count: int) -> None:
    recorder, module = Recorder(), Mean()
    trainer = make_trainer(
        recorder, fast_dev_run=given, max_epochs=7, val_check_interval=0.25, check_val_every_n_epoch=5, min_epochs=3
    )
    trainer.fit(module, make_batches(5), [make_batches(5, 11), make_batches(2, 21)])
    trainer.validate(module, make_batches(5, 31))
    trainer.test(module, make_batches(5, 41))
    trainer.predict(module, make_batches(5, 51))
    in_fit = [*range(11, 11 + count), *range(21, 21 + min(count, 2))]
    assert recorder.batches == {
        "train": list(range(1, 1 + count)),
        "validation": [*in_fit, *range(31, 31 + count)],
        "test": list(range(41, 41 + count)),
        "predict": list(range(51, 51 + count)),
        "sanity": [],
    }
    assert (trainer.current_epoch, trainer.global_step) == (1, count)


def test_fast_dev_run_is_a_limit_and_runs_without_loggers_and_early_stopping(tmp_path: Any) -> None:
    stopping, recorder = jl.callbacks.EarlyStopping("no such metric"), Recorder()
    trainer = jl.Trainer(
        strategy="single",
        fast_dev_run=True,
        callbacks=[stopping, recorder],
        logger=jl.callbacks.CSVLogger(),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        default_root_dir=tmp_path / "run",
    )
    trainer.fit(Mean(), make_batches(3), make_batches(3))
    assert trainer.loggers == [] and trainer.early_stopping_callback is None and recorder.names
    assert not (tmp_path / "run").exists()


def test_fast_dev_run_false_or_0_is_no_limit() -> None:
    for off in (False, 0):
        with pytest.raises(ArgumentError, match="no limit"):
            make_trainer(fast_dev_run=off).fit(Mean(), make_batches(1))


# When validation comes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "epochs", "arguments", "after"),
    [
        (6, 1, {"val_check_interval": 0.5}, [3, 6]),
        (6, 2, {"val_check_interval": 2}, [2, 4, 6, 8, 10, 12]),
        (6, 2, {"val_check_interval": 4}, [4, 10]),
        (6, 2, {"val_check_interval": 4, "check_val_every_n_epoch": None}, [4, 8, 12]),
        (3, 3, {"val_check_interval": 5, "check_val_every_n_epoch": None}, [5]),
        (3, 4, {"check_val_every_n_epoch": 2}, [6, 12]),
        (4, 4, {"check_val_every_n_epoch": 2, "val_check_interval": 0.5}, [6, 8, 14, 16]),
        (5, 1, {"val_check_interval": 0.3}, [1, 2, 3, 4, 5]),
        (5, 1, {"val_check_interval": 0.7}, [3]),
        (6, 1, {"val_check_interval": 0.5, "limit_train_batches": 4}, [2, 4]),
        (3, 2, {"val_check_interval": 1.0}, [3, 6]),
        (4, 1, {"val_check_interval": 1, "accumulate_grad_batches": 3}, [1, 2, 3, 4]),
    ],
)
def test_validation_comes_after_the_batches_that_the_interval_names(
    batches: int, epochs: int, arguments: dict[str, Any], after: list[int]
) -> None:
    done: list[int] = []
    found: list[int] = []
    watch = make_callback(
        on_train_batch_end=lambda *args: done.append(args[-1]), on_validation_start=lambda *_: found.append(len(done))
    )
    make_trainer(watch, max_epochs=epochs, num_sanity_val_steps=0, **arguments).fit(
        Mean(), make_batches(batches), make_batches(1)
    )
    assert found == after and len(done) == epochs * min(batches, arguments.get("limit_train_batches", batches))


def test_validation_inside_an_accumulation_window_leaves_the_window_alone() -> None:
    module = Mean()
    make_trainer(max_epochs=1, val_check_interval=1, accumulate_grad_batches=3).fit(
        module, make_batches(5), make_batches(2)
    )
    assert_weight(module, by_hand([[1, 2, 3], [4, 5]]))


class Clock:
    """A clock that only the test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> Callable[..., None]:
        def tick(*_: Any) -> None:
            self.now += seconds

        return tick


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(time, "monotonic", fake)
    return fake


@pytest.mark.parametrize("interval", ["00:00:00:02", {"seconds": 2}, datetime.timedelta(seconds=2)])
def test_a_duration_between_validations_is_counted_by_the_clock_across_epochs(clock: Clock, interval: Any) -> None:
    recorder = Recorder()
    tick = make_callback(on_train_batch_end=clock.advance(0.8))
    trainer = make_trainer(tick, recorder, max_epochs=2, val_check_interval=interval, num_sanity_val_steps=0)
    trainer.fit(Mean(), make_batches(5), make_batches(1))
    # 2 seconds are over at 2.4; each validation begins them anew: 4.8, 7.2.
    assert [step for *_, step in recorder.named("on_validation_start")] == [3, 6, 9]


def test_a_duration_between_validations_holds_in_the_epochs_that_validate_only(clock: Clock) -> None:
    recorder = Recorder()
    tick = make_callback(on_train_batch_end=clock.advance(3))
    arguments = {"val_check_interval": {"seconds": 2}, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    make_trainer(tick, recorder, max_epochs=4, **arguments).fit(Mean(), make_batches(2), make_batches(1))
    assert [step for *_, step in recorder.named("on_validation_start")] == [3, 4, 7, 8]


def test_a_validation_longer_than_the_duration_does_not_come_after_every_batch(clock: Clock) -> None:
    recorder = Recorder()
    tick = make_callback(on_train_batch_end=clock.advance(1), on_validation_batch_end=clock.advance(10))
    arguments = {"val_check_interval": {"seconds": 3}, "num_sanity_val_steps": 0}
    make_trainer(tick, recorder, max_epochs=1, **arguments).fit(Mean(), make_batches(7), make_batches(1))
    assert [step for *_, step in recorder.named("on_validation_start")] == [3, 6]


# max_time, min_epochs, min_steps, max_steps ----------------------------------------------------------


@pytest.mark.parametrize(
    ("max_time", "seconds"),
    [
        ("00:00:01:00", 25),
        ({"hours": 1, "seconds": 30}, 1500),
        ("01:00:00:00", 40_000),
        (datetime.timedelta(seconds=60), 20),
    ],
)
def test_max_time_ends_after_the_batch_in_which_it_is_over_and_a_last_validation(
    clock: Clock, max_time: Any, seconds: float
) -> None:
    recorder = Recorder()
    tick = make_callback(on_train_batch_end=clock.advance(seconds))
    trainer = make_trainer(tick, recorder, max_time=max_time, num_sanity_val_steps=0)
    trainer.fit(Mean(), make_batches(2), make_batches(1))
    # Every case is over in the third batch: the first of the second epoch.
    assert recorder.named("on_validation_start") == [(None, None, 0, 2), (None, None, 1, 3)]
    assert (trainer.current_epoch, trainer.global_step, trainer.should_stop) == (2, 3, True)
    assert "max_time" in trainer.stop_reason


def test_max_time_counts_from_the_start_of_each_fit(clock: Clock) -> None:
    tick = make_callback(on_train_batch_end=clock.advance(1))
    trainer = make_trainer(tick, max_time={"seconds": 2})
    for _ in range(2):
        trainer.fit(Mean(), make_batches(5))
        assert trainer.global_step == 2
        clock.now += 100


def test_max_time_of_0_ends_after_one_batch(clock: Clock) -> None:
    trainer = make_trainer(max_time={"seconds": 0})
    trainer.fit(Mean(), make_batches(5))
    assert trainer.global_step == 1


@pytest.mark.parametrize(
    ("arguments", "epochs", "steps"),
    [
        ({}, 1, 2),
        ({"min_epochs": 1}, 1, 3),
        ({"min_epochs": 2}, 2, 6),
        ({"min_steps": 5, "min_epochs": 0}, 2, 5),
        ({"min_steps": 2, "min_epochs": 0}, 1, 2),
        ({"min_steps": 2}, 1, 3),  # a least number of steps alone also keeps the first epoch going
        ({"min_steps": 4, "min_epochs": 2}, 2, 6),
        ({"min_steps": 7, "min_epochs": 2}, 3, 7),
        ({"min_epochs": 9, "max_epochs": 9, "max_steps": 4}, 2, 4),
        ({"min_steps": 4, "max_steps": 4}, 2, 4),
        ({"min_steps": 3, "min_epochs": 0, "accumulate_grad_batches": 2}, 2, 3),
    ],
)
def test_a_stop_waits_for_min_epochs_and_min_steps(arguments: dict[str, Any], epochs: int, steps: int) -> None:
    asked = make_callback(on_train_batch_end=lambda trainer, *args: trainer.stop("early") if args[-1] == 1 else None)
    trainer = make_trainer(asked, **({"max_epochs": 9} | arguments))
    trainer.fit(Mean(), make_batches(3))
    assert (trainer.current_epoch, trainer.global_step) == (epochs, steps)


@pytest.mark.parametrize(
    ("accumulate", "max_steps", "batches", "windows"),
    [
        (1, 4, [1, 2, 3, 4], [[1], [2], [3], [4]]),
        (1, 7, [1, 2, 3, 4, 5, 1, 2], [[1], [2], [3], [4], [5], [1], [2]]),
        (3, 1, [1, 2, 3], [[1, 2, 3]]),
        (3, 2, [1, 2, 3, 4, 5], [[1, 2, 3], [4, 5]]),
        (3, 3, [1, 2, 3, 4, 5, 1, 2, 3], [[1, 2, 3], [4, 5], [1, 2, 3]]),
        (9, 1, [1, 2, 3, 4, 5], [[1, 2, 3, 4, 5]]),
    ],
)
def test_max_steps_counts_optimizer_steps_and_ends_at_once(
    accumulate: int, max_steps: int, batches: list[int], windows: list[list[int]]
) -> None:
    recorder, module = Recorder(), Mean()
    trainer = make_trainer(recorder, max_steps=max_steps, accumulate_grad_batches=accumulate, num_sanity_val_steps=0)
    trainer.fit(module, make_batches(5), make_batches(1))
    assert recorder.batches["train"] == batches and trainer.global_step == max_steps
    assert_weight(module, by_hand(windows))
    # Only an epoch that ended is validated.
    assert len(recorder.named("on_validation_start")) == len(batches) // 5
    assert len(recorder.named("on_train_epoch_end")) == trainer.current_epoch == -(-len(batches) // 5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stop_inside_an_accumulation_window_drops_the_window(strategy: str) -> None:
    module = Mean()
    stop = make_callback(on_train_batch_end=lambda trainer, *args: trainer.stop("now") if args[-1] == 3 else None)
    trainer = make_trainer(stop, strategy=strategy, max_epochs=3, accumulate_grad_batches=3)
    trainer.fit(module, make_batches(6))
    assert (trainer.current_epoch, trainer.global_step) == (1, 1)
    assert_weight(module, by_hand([[1, 2, 3]]))


# The sanity check ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "limit", "batches"),
    [
        (0, 1.0, []),
        (2, 1.0, [11, 12, 21]),
        (-1, 1.0, [11, 12, 13, 21]),
        (-1, 2, [11, 12, 21]),
        (5, 2, [11, 12, 21]),
    ],
)
def test_the_sanity_check_takes_its_batches_of_each_loader_within_the_limit(
    steps: int, limit: float, batches: list[int]
) -> None:
    recorder = Recorder()
    arguments = {"num_sanity_val_steps": steps, "limit_val_batches": limit, "check_val_every_n_epoch": 5}
    make_trainer(recorder, max_epochs=1, **arguments).fit(
        Mean(), make_batches(1), [make_batches(3, 11), make_batches(1, 21)]
    )
    assert recorder.batches["sanity"] == batches and recorder.batches["validation"] == []
    assert ("on_sanity_check_start" in recorder.names) == (steps != 0)


def test_the_sanity_check_leaves_no_metric_row_or_count_behind() -> None:
    rows: list[Any] = []
    seen: list[dict[str, float]] = []
    watch = make_callback(
        on_train_start=lambda trainer, module: seen.append(dict(trainer.callback_metrics)),
        on_log=lambda trainer, values, step: rows.append(values),
    )
    module, other = Mean(), Mean()
    make_trainer(watch, max_epochs=1, num_sanity_val_steps=-1, check_val_every_n_epoch=2).fit(
        module, make_batches(3), make_batches(2)
    )
    make_trainer(max_epochs=1, num_sanity_val_steps=0).fit(other, make_batches(3))
    assert seen == [{}] and rows == []
    assert_weight(module, float(other.w[...][0]))


# Loaders that are made again -------------------------------------------------------------------------


@pytest.mark.parametrize(("every", "at"), [(0, [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (9, [0])])
def test_loader_hooks_are_asked_again_every_n_epochs(every: int, at: list[int]) -> None:
    asked: dict[str, list[int]] = {"train": [], "val": []}

    class Loads(Mean):
        def train_dataloader(self) -> Any:
            asked["train"].append(self.trainer.current_epoch)
            return make_batches(1, 1 + self.trainer.current_epoch)

        def val_dataloader(self) -> Any:
            asked["val"].append(self.trainer.current_epoch)
            return make_batches(1, 11 + self.trainer.current_epoch)

    recorder, module = Recorder(), Loads()
    arguments = {"reload_dataloaders_every_n_epochs": every, "num_sanity_val_steps": 0}
    make_trainer(recorder, max_epochs=5, **arguments).fit(module)
    assert asked == {"train": at, "val": at}
    loaded = [max(epoch for epoch in at if epoch <= e) for e in range(5)]
    assert recorder.batches["train"] == [1 + epoch for epoch in loaded]
    assert recorder.batches["validation"] == [11 + epoch for epoch in loaded]
    assert_weight(module, by_hand([[1 + epoch] for epoch in loaded]))


def test_a_reloaded_loader_may_have_another_length() -> None:
    class Loads(Mean):
        def train_dataloader(self) -> Any:
            return make_batches(2 + 2 * self.trainer.current_epoch)

    lengths: list[Any] = []
    recorder = Recorder()
    watch = make_callback(on_train_epoch_start=lambda trainer, module: lengths.append(trainer.num_training_batches))
    arguments = {"reload_dataloaders_every_n_epochs": 1, "val_check_interval": 0.5, "num_sanity_val_steps": 0}
    make_trainer(watch, recorder, max_epochs=2, **arguments).fit(Loads(), val_dataloaders=make_batches(1))
    assert lengths == [2, 4]
    assert [step for *_, step in recorder.named("on_validation_start")] == [1, 2, 4, 6]


# Stopping and skipping -------------------------------------------------------------------------------

BEFORE, ONE_BATCH, ONE_EPOCH, ALL = (0, 0), (1, 1), (1, 3), (3, 9)
STOPPED = {
    "setup": BEFORE,
    "on_fit_start": BEFORE,
    "on_sanity_check_start": BEFORE,
    "on_sanity_check_end": BEFORE,
    "on_train_start": BEFORE,
    "on_train_batch_start": ONE_BATCH,
    "on_train_batch_end": ONE_BATCH,
    "on_log": (1, 2),  # a row comes one step late
    "on_validation_start": ONE_EPOCH,
    "on_validation_epoch_start": ONE_EPOCH,
    "on_validation_batch_start": ONE_EPOCH,
    "on_validation_batch_end": ONE_EPOCH,
    "on_validation_epoch_end": ONE_EPOCH,
    "on_validation_end": ONE_EPOCH,
    "on_train_epoch_end": ONE_EPOCH,
    "on_train_end": ALL,
    "on_fit_end": ALL,
    "teardown": ALL,
}


@pytest.mark.parametrize("hook", STOPPED)
def test_stop_in_a_hook_ends_at_the_next_safe_place(hook: str) -> None:
    recorder = Recorder()

    def stop(trainer: jl.Trainer, *_: Any) -> None:
        if not trainer.sanity_checking or "sanity" in hook:
            trainer.stop(hook)

    trainer = make_trainer(make_callback(**{hook: stop}), recorder, max_epochs=3, log_every_n_steps=1)
    trainer.fit(Mean(), make_batches(3), make_batches(2))
    assert (trainer.current_epoch, trainer.global_step) == STOPPED[hook]
    assert (trainer.should_stop, trainer.stop_reason) == (True, hook)
    started = hook not in ("setup", "on_fit_start", "on_sanity_check_start", "on_sanity_check_end")
    assert ("on_train_start" in recorder.names) == ("on_train_end" in recorder.names) == started
    assert recorder.names[-1] == "on_fit_end"
    # Nothing is cut off: what has started ends, and is validated once an epoch at most.
    for what in ("train_epoch", "train_batch", "validation", "validation_batch", "sanity_check"):
        assert recorder.names.count(f"on_{what}_start") == recorder.names.count(f"on_{what}_end")
    in_fit = [event for event in recorder.named("on_validation_start") if event[-1] > 0]
    assert len(in_fit) == trainer.current_epoch


def test_stop_in_on_train_epoch_start_trains_no_batch_of_it() -> None:
    recorder = Recorder()
    stop = make_callback(on_train_epoch_start=lambda trainer, module: trainer.stop("before any batch"))
    trainer = make_trainer(stop, recorder, max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(Mean(), make_batches(3), make_batches(1))
    assert trainer.global_step == 0 and recorder.batches["train"] == []


@pytest.mark.parametrize(
    ("strategy", "owner"), [*((strategy, "callback") for strategy in STRATEGIES), ("single", "module")]
)
def test_a_skip_drops_the_accumulation_window_and_the_next_epoch_is_clean(strategy: str, owner: str) -> None:
    def skips(epoch: int, batch_idx: int) -> int | None:
        return -1 if epoch == 0 and batch_idx == 3 else None

    class Skips(Mean):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return skips(self.trainer.current_epoch, batch_idx)

    skip = make_callback(on_train_batch_start=lambda trainer, module, batch, i: skips(trainer.current_epoch, i))
    module = Mean() if owner == "callback" else Skips()
    arguments = {"max_epochs": 2, "accumulate_grad_batches": 2, "strategy": strategy}
    trainer = make_trainer(*([] if owner == "module" else [skip]), **arguments)
    trainer.fit(module, make_batches(5))
    assert (trainer.current_epoch, trainer.global_step) == (2, 4)
    assert_weight(module, by_hand([[1, 2], [1, 2], [3, 4], [5]]))


def test_a_skip_is_minus_one_only() -> None:
    for answer in (0, True, "-1"):
        trainer = make_trainer(make_callback(on_train_batch_start=lambda *_, a=answer: a), max_epochs=1)
        trainer.fit(Mean(), make_batches(2))
        assert trainer.global_step == 2


# More than one run -----------------------------------------------------------------------------------


def test_a_second_fit_of_a_trainer_is_that_of_a_fresh_one() -> None:
    def run(trainer: jl.Trainer, recorder: Recorder, rows: list[Any]) -> tuple[Any, ...]:
        recorder.events.clear()
        rows.clear()
        module = Mean()
        trainer.fit(module, make_batches(5, 2), make_batches(2))
        counts = (trainer.current_epoch, trainer.global_step, int(trainer.state.step))
        return float(module.w[...][0]), counts, list(recorder.events), list(rows), dict(trainer.callback_metrics)

    def make() -> tuple[jl.Trainer, Recorder, list[Any]]:
        rows: list[Any] = []
        watch = make_callback(on_log=lambda trainer, values, step: rows.append((values, step)))
        arguments = {"max_steps": 4, "accumulate_grad_batches": 2, "log_every_n_steps": 1, "val_check_interval": 3}
        recorder = Recorder()
        return make_trainer(recorder, watch, check_val_every_n_epoch=None, **arguments), recorder, rows

    used = make()
    used[0].fit(Mean(), make_batches(4, 70), make_batches(1))
    assert run(*used) == run(*make())


@pytest.mark.parametrize("is_lazy", [False, True])
def test_evaluation_before_fit_takes_the_first_weights_and_after_it_the_trained(is_lazy: bool) -> None:
    model: Any = jl.lazy(Mean) if is_lazy else Mean()
    trainer = make_trainer(max_epochs=1)
    batches = make_batches(2, 11)
    w = by_hand([[1], [2], [3]])
    for weight, given in ((0.0, (model,)), (w, (model,)), (w, ())):
        assert trainer.validate(*given, dataloaders=batches) == [{"val": pytest.approx(11.5 - weight, rel=1e-6)}]
        assert trainer.test(*given, dataloaders=batches) == [{"test": pytest.approx(11.5 - weight, rel=1e-6)}]
        predictions = trainer.predict(*given, dataloaders=batches)
        assert [x.shape for x in predictions] == [(ROWS, 1)] * 2 and all(type(x) is np.ndarray for x in predictions)
        assert [float(x[3, 0]) for x in predictions] == pytest.approx([11 - weight, 12 - weight], rel=1e-6)
        if weight == 0.0:
            assert (trainer.current_epoch, trainer.global_step) == (0, 0)
            trainer.fit(model, make_batches(3))
        assert (trainer.current_epoch, trainer.global_step) == (1, 3)
    assert_weight(trainer.module, w)


def test_evaluation_between_two_fits_changes_neither() -> None:
    module, other = Mean(), Mean()
    trainer, plain = make_trainer(max_epochs=2), make_trainer(max_epochs=2)
    for _ in range(2):
        trainer.fit(module, make_batches(3))
        trainer.validate(module, make_batches(2, 50))
        trainer.predict(module, make_batches(2, 50))
        plain.fit(other, make_batches(3))
        assert trainer.global_step == 6
    np.testing.assert_array_equal(module.w[...], other.w[...])


# Counts ----------------------------------------------------------------------------------------------


def test_batch_counts_are_there_before_the_first_hook_that_may_ask() -> None:
    seen: list[Any] = []
    look = make_callback(
        on_fit_start=lambda trainer, module: seen.append((trainer.num_training_batches, trainer.num_val_batches))
    )
    arguments = {"limit_train_batches": 0.5, "limit_val_batches": 2}
    trainer = make_trainer(look, max_epochs=1, **arguments)
    trainer.fit(Mean(), make_batches(5), [make_batches(3), make_batches(1)])
    trainer.fit(Mean(), make_batches(4))
    assert seen == [(2, [2, 1]), (2, [])]


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"max_epochs": 3}, 15),
        ({"max_epochs": 3, "accumulate_grad_batches": 2}, 9),
        ({"max_epochs": 3, "max_steps": 4}, 4),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 6),
        ({"max_steps": 4}, 4),
        ({"max_epochs": 2, "overfit_batches": 3}, 6),
        ({"fast_dev_run": 2}, 2),
    ],
)
def test_estimated_stepping_batches_are_the_steps_that_fit_then_takes(arguments: dict[str, Any], steps: int) -> None:
    asked: list[Any] = []

    class Asks(Mean):
        def configure_optimizers(self) -> optax.GradientTransformation:
            asked.append(self.trainer.estimated_stepping_batches)
            return super().configure_optimizers()

    trainer = make_trainer(**arguments)
    trainer.fit(Asks(), make_batches(5))
    assert asked == [steps] and trainer.global_step == steps


# Several validation loaders --------------------------------------------------------------------------


class Several(Mean):
    """Logs by loader; the loader's index is a plain int in the step."""

    def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> None:
        assert type(dataloader_idx) is int
        self.log("val", jnp.mean(batch["x"]) * (1 + dataloader_idx))
        self.log(f"own_{dataloader_idx}", jnp.mean(batch["x"]), add_dataloader_idx=False)
        self.log("index", batch_idx * 1.0, reduce_fx="max")


@pytest.mark.parametrize("strategy", ["single", "ddp", "shard_map"])
def test_each_loader_has_its_metrics_under_its_own_name(strategy: str) -> None:
    trainer = make_trainer(strategy=strategy, max_epochs=1)
    loaders = [make_batches(3, 1), make_batches(2, 10)]
    found = trainer.validate(Several(), loaders)
    expected = [
        {"val/dataloader_idx_0": 2.0, "own_0": 2.0, "index/dataloader_idx_0": 2.0},
        {"val/dataloader_idx_1": 21.0, "own_1": 10.5, "index/dataloader_idx_1": 1.0},
    ]
    assert found == expected
    trainer.fit(Several(), make_batches(2), loaders)
    metrics = dict(trainer.callback_metrics)
    assert {k: v for k, v in metrics.items() if k != "loss"} == expected[0] | expected[1]
    assert trainer.validate(Several(), loaders[0]) == [{"val": 2.0, "own_0": 2.0, "index": 2.0}]


def test_one_name_for_two_loaders_is_refused() -> None:
    class Same(Mean):
        def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> None:
            self.log("val", jnp.mean(batch["x"]), add_dataloader_idx=False)

    with pytest.raises(LogError, match="'val'"):
        make_trainer().validate(Same(), [make_batches(1), make_batches(1)])


# Callbacks of the module -----------------------------------------------------------------------------


def test_configure_callbacks_adds_behind_the_users_and_drops_none_of_the_same_class() -> None:
    called: list[str] = []

    class Named(jl.Callback):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_train_start(self, trainer: Any, module: Any) -> None:
            called.append(self.name)

    class Brings(Mean):
        def configure_callbacks(self) -> Any:
            return [Named("module 1"), Named("module 2")]

    mine = [Named("user 1"), Named("user 2")]
    trainer = make_trainer(*mine, max_epochs=1)
    trainer.fit(Brings(), make_batches(1))
    assert called == ["user 1", "user 2", "module 1", "module 2"]
    assert trainer.callbacks[:2] == mine
    trainer.fit(Brings(), make_batches(1))  # those of the first fit are gone
    trainer.fit(Mean(), make_batches(1))
    assert called[4:] == ["user 1", "user 2", "module 1", "module 2", "user 1", "user 2"]


def test_configure_callbacks_may_return_one() -> None:
    class Brings(Mean):
        def configure_callbacks(self) -> Any:
            return jl.callbacks.EarlyStopping("val", stopping_threshold=100.0)

    trainer = make_trainer(max_epochs=5)
    trainer.fit(Brings(), make_batches(2), make_batches(1))
    assert trainer.current_epoch == 1 and trainer.early_stopping_callback is not None


# Debugging -------------------------------------------------------------------------------------------


def trained(strategy: str, **arguments: Any) -> tuple[Any, ...]:
    """Return all numbers of a run with accumulation, a short last batch and validation."""
    rows: list[Any] = []
    watch = make_callback(on_log=lambda trainer, values, step: rows.append((step, values)))
    batches = [*make_batches(2), {"x": np.arange(5, dtype=np.float32)[:, None]}]
    module = Mean()
    arguments = {"max_epochs": 1, "accumulate_grad_batches": 2, "log_every_n_steps": 1} | arguments
    trainer = make_trainer(watch, strategy=strategy, num_sanity_val_steps=0, **arguments)
    trainer.fit(module, batches, make_batches(2, 3))
    return float(module.w[...][0]), trainer.global_step, rows


# What the run above is: one window of two batches, a window of the short one, and a validation.
WEIGHT = 0.5 * (0.75 + 2.0)
BY_HAND = (
    pytest.approx(WEIGHT, rel=1e-6),
    2,
    [
        (0, pytest.approx({"loss": 2.5, "epoch": 0}, rel=1e-6)),
        (1, pytest.approx({"val": 3.5 - WEIGHT, "epoch": 0}, rel=1e-6)),
        (1, pytest.approx({"loss": 2.0 + (2.0 - 0.75) ** 2, "epoch": 0}, rel=1e-6)),
    ],
)


def in_order(found: tuple[Any, ...]) -> tuple[Any, ...]:
    """Sort the rows: a validation's comes beside that of its step."""
    return (*found[:2], sorted(found[2], key=lambda row: (row[0], "loss" in row[1])))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_debug_gives_the_numbers_of_a_normal_run(strategy: str) -> None:
    assert in_order(trained(strategy, debug=True)) == BY_HAND


# Not those of a per-replica body: operation by operation they take half a minute even on one device.
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero1", "simulate:2"])
def test_disable_jit_gives_the_numbers_of_a_normal_run(strategy: str) -> None:
    with jax.disable_jit():
        assert in_order(trained(strategy)) == BY_HAND


def test_debug_under_disable_jit_gives_the_numbers_of_a_normal_run() -> None:
    with jax.disable_jit():
        assert in_order(trained("single", debug=True)) == BY_HAND


# Everything together ---------------------------------------------------------------------------------


def lightnings_order(
    train: int, val: list[int], arguments: dict[str, Any]
) -> tuple[list[tuple[Any, ...]], list[list[int]]]:
    """Say what Lightning's loop does: every hook with its counters, and the batches of each optimizer step."""
    limit, limit_val = arguments["limit_train_batches"], arguments["limit_val_batches"]
    interval, every = arguments["val_check_interval"], arguments["check_val_every_n_epoch"]
    num = min(train, limit) if isinstance(limit, int) else int(train * limit)
    nums = [min(n, limit_val) if isinstance(limit_val, int) else int(n * limit_val) for n in val]
    sanity = arguments["num_sanity_val_steps"]
    events: list[tuple[Any, ...]] = []
    windows: list[list[int]] = []
    epoch = step = total = 0

    def emit(hook: str, index: int | None = None, loader: int | None = None) -> None:
        events.append((hook, index, loader, epoch, step))

    def validate(counts: list[int]) -> None:
        emit("on_validation_start")
        emit("on_validation_epoch_start")
        for loader, count in enumerate(counts):
            for i in range(count):
                emit("on_validation_batch_start", i, loader)
                emit("on_validation_batch_end", i, loader)
        emit("on_validation_epoch_end")
        emit("on_validation_end")

    def is_over() -> bool:
        return epoch >= arguments["max_epochs"] or 0 <= arguments["max_steps"] <= step

    def is_due(i: int) -> bool:
        if not nums or (every is not None and (epoch + 1) % every):
            return False
        if interval == 1.0 and isinstance(interval, float):
            return i == num - 1
        period = interval if isinstance(interval, int) else max(1, int(num * interval))
        return (total if every is None else i + 1) % period == 0

    emit("on_fit_start")
    if nums and sanity:
        emit("on_sanity_check_start")
        validate([n if sanity < 0 else min(n, sanity) for n in nums])
        emit("on_sanity_check_end")
    if not is_over():
        emit("on_train_start")
        while not is_over():
            emit("on_train_epoch_start")
            window: list[int] = []
            for i in range(num):
                emit("on_train_batch_start", i)
                window.append(1 + i)
                total += 1
                if i == num - 1 or len(window) == arguments["accumulate_grad_batches"]:
                    windows.append(window)
                    window, step = [], step + 1
                emit("on_train_batch_end", i)
                if is_due(i):
                    validate(nums)
                if 0 <= arguments["max_steps"] <= step:
                    break
            emit("on_train_epoch_end")
            epoch += 1
        emit("on_train_end")
    emit("on_fit_end")
    return events, windows


def draw_case(seed: int) -> tuple[int, list[int], dict[str, Any]]:
    """Draw a legal combination of the arguments."""
    rng = random.Random(seed)
    train = rng.randint(1, 5)
    limit = rng.choice([1.0, 1.0, 0.5 if train > 1 else 1.0, rng.randint(1, 6)])
    num = min(train, limit) if isinstance(limit, int) else int(train * limit)
    val = [rng.randint(1, 4) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
    every = rng.choice([1, 1, 2, 3, None])
    # An interval in batches must fit into an epoch, unless it is counted across epochs; a fraction is not.
    interval = rng.randint(1, 7) if every is None else rng.choice([1.0, 0.5, 0.34, rng.randint(1, num)])
    arguments = {
        "max_epochs": rng.choice([0, 1, 2, 3, 4]),
        "max_steps": rng.choice([-1, -1, -1, 0, 1, 3, 4, 7]),
        "accumulate_grad_batches": rng.choice([1, 2, 3]),
        "val_check_interval": interval,
        "check_val_every_n_epoch": every,
        "limit_train_batches": limit,
        "limit_val_batches": rng.choice([1.0, 1.0, 1, 2]),
        "num_sanity_val_steps": rng.choice([-1, 0, 1, 2]),
    }
    return train, val, arguments


@pytest.mark.parametrize("seed", range(25))
def test_any_combination_runs_in_lightnings_order_and_trains_on_its_windows(seed: int) -> None:
    train, val, arguments = draw_case(seed)
    recorder, module = Recorder(), Mean()
    loaders = [make_batches(count) for count in val]
    trainer = make_trainer(recorder, **arguments)
    trainer.fit(module, make_batches(train), loaders or None)
    events, windows = lightnings_order(train, val, arguments)
    assert recorder.events == events
    assert_weight(module, by_hand(windows))
    assert (trainer.current_epoch, trainer.global_step) == events[-1][3:]


# What the loop costs ---------------------------------------------------------------------------------


class Profiled:
    """A loader that reads the number of Python calls at two of its batches."""

    def __init__(self, first: int, last: int, beside: str) -> None:
        self.calls, self._beside = 0, beside
        self._first, self._last, self._noted = first, last, {}

    def count(self, frame: Any, event: str, argument: Any) -> None:
        self.calls += event == "call" and not frame.f_code.co_filename.startswith(self._beside)

    def __iter__(self) -> Iterator[Any]:
        for k, batch in enumerate(make_batches(self._last + 1)):
            self._noted[k] = self.calls
            yield batch

    @property
    def per_step(self) -> float:
        return (self._noted[self._last] - self._noted[self._first]) / (self._last - self._first)


def calls_per_step(strategy: str, metrics: int, log_every: int) -> float:
    """Count the Python calls of the steps 20 to 60, also those of helper threads.

    On several devices without jax's own: to split one array over them jax alone makes more than a hundred.
    """

    class Logs(Mean):
        def training_step(self, batch: Any) -> jax.Array:
            loss = jnp.mean((self.w[...] - batch["x"]) ** 2)
            for i in range(metrics):
                self.log(f"metric_{i}", loss, on_step=True, on_epoch=True)
            return loss

    beside = "no file" if strategy == "single" else str(Path(jax.__file__).parent)
    loader = Profiled(20, 60, beside)
    trainer = make_trainer(strategy=strategy, max_epochs=1, log_every_n_steps=log_every)
    before = sys.getprofile()
    gc.collect()
    gc.disable()  # jax has a hook in the collector
    threading.setprofile(loader.count)
    sys.setprofile(loader.count)
    try:
        trainer.fit(Logs(), loader)
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
        gc.enable()
    assert trainer.global_step == 61
    return loader.per_step


@pytest.mark.parametrize(("strategy", "log_every"), [("single", 1000), ("single", 1), ("ddp", 1000)])
def test_a_step_costs_at_most_60_python_calls_whatever_it_logs(strategy: str, log_every: int) -> None:
    one, five = calls_per_step(strategy, 1, log_every), calls_per_step(strategy, 5, log_every)
    assert one == five
    assert 10 <= one <= 60  # fewer, and the counter has seen nothing
