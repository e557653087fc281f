"""The arguments that limit a loop, callbacks that say when they act next, and those that look into the step."""

import datetime
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import ROWS, numbered
from kit.by_hand import mean
from kit.compiles import compiles
from kit.inside import Clock, stop_clocks
from kit.journal import Journal, Rows, at_batch, hooks, without_rates
from kit.modules import Mean, module
from kit.refusals import fit_refuses, refuses
from kit.trainers import BARE, STRATEGIES, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint
from jaxlit.errors import ArgumentError, ArgumentTypeError, LogError, ModuleError


def weight(model: Any) -> float:
    return float(model.w[...][0])


@pytest.mark.parametrize(("limit", "of_5", "of_3"), [(1, 1, 1), (4, 4, 3), (0.4, 2, 1), (1.0, 5, 3)])
def test_a_limit_is_a_count_or_a_floored_fraction(limit: float, of_5: int, of_3: int) -> None:
    journal, model = Journal(), Mean()
    limits = {f"limit_{stage}_batches": limit for stage in ("train", "val", "test", "predict")}
    trainer = make_trainer(journal, max_epochs=2, num_sanity_val_steps=0, **limits)
    loaders = [numbered(5, 11), numbered(3, 21)]
    trainer.fit(model, numbered(5), loaders)
    tested, predicted = trainer.test(model, loaders), trainer.predict(model, loaders)
    trained, both = list(range(1, 1 + of_5)), [*range(11, 11 + of_5), *range(21, 21 + of_3)]
    stages = {"train": trained * 2, "validation": both * 2, "test": both, "predict": both, "sanity": []}
    assert journal.batches == stages
    w = mean([[k] for k in trained * 2])
    assert weight(model) == pytest.approx(w, rel=1e-6)
    means = [11 + (of_5 - 1) / 2 - w, 21 + (of_3 - 1) / 2 - w]
    assert tested == [{f"test/dataloader_idx_{i}": pytest.approx(x, rel=1e-6)} for i, x in enumerate(means)]
    result = [[float(x[0, 0] + w) for x in outputs] for outputs in predicted]
    assert result == [pytest.approx(range(11, 11 + of_5)), pytest.approx(range(21, 21 + of_3))]


@pytest.mark.parametrize(("overfit", "count"), [(2, 2), (0.5, 3)])
def test_overfit_batches_repeats_the_same_batches(overfit: float, count: int) -> None:
    journal, model = Journal(), Mean()
    rows = {"x": np.repeat(np.arange(1, 7, dtype=np.float32), ROWS)[:, None]}
    loader = jl.ArrayLoader(rows, ROWS, shuffle=True, seed=3)
    before = [batch["x"].tolist() for batch in loader]
    arguments = {"max_epochs": 3, "overfit_batches": overfit, "num_sanity_val_steps": 0}
    fit(model, loader, numbered(6, 31), journal, **arguments)
    assert journal.batches["train"] == list(range(1, 1 + count)) * 3
    assert journal.batches["validation"] == list(range(31, 31 + count)) * 3
    assert weight(model) == pytest.approx(mean([[k] for k in range(1, 1 + count)] * 3), rel=1e-6)
    assert [batch["x"].tolist() for batch in loader] == before  # the caller's loader still shuffles


@pytest.mark.parametrize(("given", "count"), [(True, 1), (3, 3)])
def test_fast_dev_run_takes_that_many_batches_of_everything_once(given: int, count: int) -> None:
    journal, model = Journal(), Mean()
    once = {"max_epochs": 7, "val_check_interval": 0.25, "check_val_every_n_epoch": 5, "min_epochs": 3}
    trainer = make_trainer(journal, fast_dev_run=given, **once)
    trainer.fit(model, numbered(5), [numbered(5, 11), numbered(2, 21)])
    for first, verb in zip((31, 41, 51), ("validate", "test", "predict"), strict=True):
        getattr(trainer, verb)(model, numbered(5, first))
    train, first, validated, test, predict = ([*range(x, x + count)] for x in (1, 11, 31, 41, 51))
    validation = [*first, *range(21, 21 + min(count, 2)), *validated]
    stages = {"train": train, "validation": validation, "test": test, "predict": predict, "sanity": []}
    assert journal.batches == stages
    assert (trainer.current_epoch, trainer.global_step) == (1, count)


def test_fast_dev_run_has_no_loggers_stopping_or_files(tmp_path: Any) -> None:
    rows: list[int] = []
    own = hooks(on_log=lambda trainer, values, step: rows.append(step))
    brings = module(configure_callbacks=lambda self: [jl.callbacks.EarlyStopping("no such metric")])
    for logger in (jl.callbacks.CSVLogger(), own):
        stopping, journal = jl.callbacks.EarlyStopping("no such metric"), Journal()
        folder = tmp_path / "run"
        arguments = {"fast_dev_run": True, "logger": logger, "log_every_n_steps": 1, "default_root_dir": folder}
        trainer = fit(brings, numbered(3), numbered(3), stopping, journal, **arguments)
        assert trainer.loggers == [] and trainer.early_stopping_callback is None and journal.names
        assert not folder.exists()
    assert rows == []


def ticking(clock: Clock, seconds: float) -> Callable[..., None]:
    return lambda *_: setattr(clock, "now", clock.now + seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return stop_clocks(monkeypatch)


# How long a batch and a validation take, the interval and other arguments, and at which steps it validates.
BY_CLOCK = [
    # 2 seconds are over at 2.4; each validation begins them again: 4.8, 7.2.
    *((0.8, 0, x, {}, 5, [3, 6, 9]) for x in ("00:00:00:02", {"seconds": 2}, datetime.timedelta(seconds=2))),
    (3, 0, {"seconds": 2}, {"max_epochs": 4, "check_val_every_n_epoch": 2}, 2, [3, 4, 7, 8]),
    (1, 10, {"seconds": 3}, {"max_epochs": 1}, 7, [3, 6]),  # one longer than it does not come after every batch
]


@pytest.mark.parametrize(("batch", "validation", "interval", "arguments", "count", "at"), BY_CLOCK)
def test_a_validation_interval_may_be_a_duration(
    clock: Clock, batch: float, validation: float, interval: Any, arguments: Any, count: int, at: list[int]
) -> None:
    journal = Journal()
    tick = hooks(on_train_batch_end=ticking(clock, batch), on_validation_batch_end=ticking(clock, validation))
    arguments = {"max_epochs": 2, "num_sanity_val_steps": 0, "val_check_interval": interval} | arguments
    fit(Mean(), numbered(count), numbered(1), tick, journal, **BARE, **arguments)
    assert [step for *_, step in journal.named("on_validation_start")] == at


MINUTE = datetime.timedelta(seconds=60)


@pytest.mark.parametrize(
    ("max_time", "seconds"),
    [("00:00:01:00", 25), ({"hours": 1, "seconds": 30}, 1500), ("01:00:00:00", 40_000), (MINUTE, 20)],
)
def test_max_time_ends_after_the_batch_and_a_validation(clock: Clock, max_time: Any, seconds: float) -> None:
    journal = Journal()
    tick = hooks(on_train_batch_end=ticking(clock, seconds))
    arguments = {"max_epochs": None, "max_time": max_time, "num_sanity_val_steps": 0} | BARE
    trainer = fit(Mean(), numbered(2), numbered(1), tick, journal, **arguments)
    # Every case is over in the third batch: the first of the second epoch.
    assert journal.named("on_validation_start") == [(None, None, 0, 2), (None, None, 1, 3)]
    assert (trainer.current_epoch, trainer.global_step, trainer.should_stop) == (2, 3, True)
    assert trainer.stop_reason.startswith("max_time")


STOPPED = [
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
]


@pytest.mark.parametrize(("arguments", "epochs", "steps"), thinned(STOPPED, *STOPPED[::3]))
def test_a_stop_waits_for_min_epochs_and_min_steps(arguments: dict[str, Any], epochs: int, steps: int) -> None:
    asked = at_batch(1, lambda trainer, module: trainer.stop("early"))
    trainer = fit(Mean(), numbered(3), None, asked, **({"max_epochs": 9} | arguments))
    assert (trainer.current_epoch, trainer.global_step) == (epochs, steps)


@pytest.mark.parametrize("owner", thinned(["module", "datamodule"], "module"))
@pytest.mark.parametrize(("every", "at"), thinned([(0, [0]), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])], (2, [0, 2, 4])))
def test_loader_hooks_are_asked_again_every_n_epochs(every: int, at: list[int], owner: str) -> None:
    asked: dict[str, list[int]] = {"train": [], "val": []}

    def loader(stage: str, first: int) -> Callable[[Any], Any]:
        def load(self: Any) -> Any:
            asked[stage].append(self.trainer.current_epoch)
            return numbered(1, first + self.trainer.current_epoch)

        return load

    loads = {"train_dataloader": loader("train", 1), "val_dataloader": loader("val", 11)}
    journal, model = Journal(), module(**(loads if owner == "module" else {}))
    given = {"datamodule": type("Data", (jl.DataModule,), loads)()} if owner == "datamodule" else {}
    arguments = {"reload_dataloaders_every_n_epochs": every, "num_sanity_val_steps": 0, "max_epochs": 5}
    fit(model, None, None, journal, **arguments, **given)
    assert asked == {"train": at, "val": at}
    loaded = [max(epoch for epoch in at if epoch <= e) for e in range(5)]
    assert journal.batches["train"] == [1 + epoch for epoch in loaded]
    assert journal.batches["validation"] == [11 + epoch for epoch in loaded]
    assert weight(model) == pytest.approx(mean([[1 + epoch] for epoch in loaded]), rel=1e-6)


ESTIMATED = [
    ({"max_epochs": 3}, 15, 3),
    ({"max_epochs": 3, "accumulate_grad_batches": 2}, 9, 3),
    ({"max_epochs": 3, "max_steps": 4}, 4, 1),
    ({"max_epochs": 1, "max_steps": 40}, 5, 1),
    ({"max_epochs": 3, "limit_train_batches": 0.5}, 6, 3),
    ({"max_epochs": 3, "limit_train_batches": 3, "accumulate_grad_batches": 2}, 6, 3),
    ({"max_epochs": None, "max_steps": 7}, 7, 2),
    ({"max_epochs": -1, "max_steps": 4, "accumulate_grad_batches": 2}, 4, 2),
    ({"max_epochs": 2, "overfit_batches": 3}, 6, 2),
    ({"fast_dev_run": 2}, 2, 1),
]


@pytest.mark.parametrize(("arguments", "steps", "epochs"), thinned(ESTIMATED, *ESTIMATED[1::3]))
def test_estimated_stepping_batches_match_the_fit(arguments: dict[str, Any], steps: int, epochs: int) -> None:
    asked: list[Any] = []

    def configure(self: Any) -> Any:
        asked.append(self.trainer.estimated_stepping_batches)
        return Mean.configure_optimizers(self)

    trainer = fit(module(configure_optimizers=configure), numbered(5), **arguments)
    assert asked == [steps] and (trainer.global_step, trainer.current_epoch) == (steps, epochs)


# Not eagerly a per-replica body: operation by operation that takes half a minute even on one device.
EAGER = [(name, False, True) for name in ("single", "fsdp", "replicas:2")] + [("single", True, True)]
DEBUGGED = [*((name, True, False) for name in STRATEGIES), *EAGER]


@pytest.mark.parametrize(("strategy", "debug", "eager"), thinned(DEBUGGED, ("pmap", True, False), full=EAGER[:1]))
def test_debug_and_disable_jit_give_the_numbers_of_a_normal_run(strategy: str, debug: bool, eager: bool) -> None:
    rows: list[Any] = []
    watch = hooks(on_log=lambda trainer, values, step: rows.append((step, values)))
    model, batches = Mean(), [*numbered(2), {"x": np.arange(5, dtype=np.float32)[:, None]}]
    arguments = {"accumulate_grad_batches": 2, "log_every_n_steps": 1, "num_sanity_val_steps": 0, "debug": debug}
    with jax.disable_jit(eager):
        trainer = fit(model, batches, numbered(2, 3), watch, strategy=strategy, **arguments)
    # A window of two batches, a window of the short one, and a validation, whose row comes beside that of its step.
    w = 0.5 * (0.75 + 2.0)
    expected = [
        (0, pytest.approx({"loss": 2.5, "lr": 0.25, "epoch": 0}, rel=1e-6)),
        (1, pytest.approx({"val": 3.5 - w, "epoch": 0}, rel=1e-6)),
        (1, pytest.approx({"loss": 2.0 + (2.0 - 0.75) ** 2, "lr": 0.25, "epoch": 0}, rel=1e-6)),
    ]
    assert sorted(rows, key=lambda row: (row[0], "loss" in row[1])) == expected
    assert weight(model) == pytest.approx(w, rel=1e-6) and trainer.global_step == 2


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
    run = lambda: fit(Mean(), numbered(2), None, callback, **BARE)  # noqa: E731
    refuses(ArgumentError, run, rf"Every.due_in\(0\) returned .*{wait}")
    refuses(ModuleError, lambda: fit(Mean(), numbered(2), None, hooks(due_in=lambda: 1), **BARE), r"due_in.*\(step\)")


class Sees(jl.Callback):
    """Shows the gradient as a scalar and as an array, and keeps in order all that it is told."""

    def __init__(self, every: int | None = None, *, scalar: str = "grad") -> None:
        self.trace_every_n_steps, self.scalar, self.told = every, scalar, list[Any]()

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        result = {"array": jnp.stack([grads["w"][0], params["w"][0]])}
        return result | ({self.scalar: grads["w"][0]} if self.scalar else {})

    def on_trace(self, trainer: jl.Trainer, values: dict[str, np.ndarray], step: int) -> None:
        self.told.append(("trace", step, *np.round(values["array"].astype(float), 4).tolist()))

    def on_log(self, trainer: jl.Trainer, values: dict[str, float], step: int) -> None:
        self.told.append(("log", step, {k: round(v, 4) for k, v in without_rates(values).items()}))

    def on_train_batch_end(self, trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.told.append(("end", trainer.global_step - 1))

    def steps(self, kind: str) -> list[int]:
        return [event[1] for event in self.told if event[0] == kind]

    def traces(self) -> list[Any]:
        return [event[1:] for event in self.told if event[0] == "trace"]

    def rows(self) -> dict[int, dict[str, float]]:
        result: dict[int, dict[str, float]] = {}
        for event in self.told:
            if event[0] == "log":
                assert event[1] not in result
                result[event[1]] = {k: v for k, v in event[2].items() if k != "epoch"}
        return result


def fit_traced(callbacks: Any, values: Sequence[float] = range(1, 6), **arguments: Any) -> jl.Trainer:
    """Train on batches of these values for two epochs, whose mean the step logs."""

    def step(self: Any, batch: Any) -> jax.Array:
        self.log("value", batch["x"].mean())
        return jnp.mean(self.error(batch) ** 2)

    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    batches = [{"x": np.full((8, 1), value, np.float32)} for value in values]
    arguments = {"max_epochs": 2, "log_every_n_steps": 50} | arguments
    return fit(module(step), batches, None, *callbacks, **arguments)


def walk(values: Sequence[float]) -> list[list[float]]:
    """Return (gradient, weight before) of each step."""
    before = [mean([[x] for x in values[:k]]) for k in range(len(values))]
    return [[round(2 * (w - x), 4), round(w, 4)] for w, x in zip(before, values, strict=True)]


KNOWN = walk(range(1, 6))


FIRES = [(1, 1), (1, 2), (2, 2), (3, 1), (3, 2), (7, 1), (10, 1), (11, 1), (11, 2), (0, 1)]


@pytest.mark.parametrize(("every", "accumulate"), thinned(FIRES, (1, 2), (3, 1), (0, 1)))
def test_it_fires_on_the_last_step_of_each_n_across_epochs(every: int, accumulate: int) -> None:
    sees = Sees(every)
    trainer = fit_traced(sees, range(1, 6), accumulate_grad_batches=accumulate)
    count = {1: 10, 2: 6}[accumulate]  # with 2: 2, 2 and 1 batches an epoch
    assert trainer.global_step == count
    expected = list(range(every - 1, count, every)) if every else []
    known = walk({1: [1, 2, 3, 4, 5], 2: [1.5, 3.5, 5]}[accumulate] * 2)
    assert sees.traces() == [(step, *known[step]) for step in expected]
    assert sees.rows() == {step: {"grad": known[step][0]} for step in expected}


@pytest.mark.parametrize(
    ("every", "log_every", "prefetch"), [(1, 1, 0), (1, 2, 2), (2, 1, 2), (2, 2, 0), (1, 0, 0), (2, 0, 2)]
)
def test_what_was_seen_arrives_one_step_late_and_before_its_row(every: int, log_every: int, prefetch: int) -> None:
    sees, count = Sees(every), 5
    fit_traced(sees, max_epochs=1, log_every_n_steps=log_every, prefetch=prefetch)
    expected: list[Any] = []
    for step in range(count + 1):
        expected += [("end", step)] if step < count else []
        if (late := step - 1) >= 0:
            fired, logged = (late + 1) % every == 0, log_every and (late + 1) % log_every == 0
            row = ({"value": late + 1.0} if logged else {}) | ({"grad": KNOWN[late][0]} if fired else {})
            expected += [("trace", late, *KNOWN[late])] if fired else []
            expected += [("log", late, row | {"epoch": 0.0})] if row else []
    assert sees.told == expected


def test_only_traced_scalars_make_rows() -> None:
    sees = Sees(2, scalar="")
    fit_traced(sees, max_epochs=1, log_every_n_steps=0)
    assert sees.steps("trace") == [1, 3] and sees.steps("log") == []
    sees = Sees(2)
    logs = hooks(on_train_batch_end=lambda t, module, o, b, i: module.log("batch", i))
    trainer = fit_traced([sees, logs], range(1, 7), max_epochs=1, log_every_n_steps=3)
    names = {1: {"grad"}, 2: {"value", "batch"}, 3: {"grad"}, 5: {"grad", "value", "batch"}}
    assert {step: set(row) for step, row in sees.rows().items()} == names
    assert trainer.callback_metrics["grad"] == pytest.approx(walk(range(1, 7))[5][0], abs=1e-4)


def shows(value: Any, every: Any = 100) -> jl.Callback:
    """Return a callback whose `trace_step` returns a value, or a function's of the gradients."""
    seen = lambda grads, updates, params, opt_state: value(grads) if callable(value) else value  # noqa: E731
    result = hooks("Shows", trace_step=seen)
    result.trace_every_n_steps = every
    return result


REFUSED: dict[str, tuple[type[Exception], str, Any]] = {
    "no dict": (ModuleError, r"Shows\.trace_step must return a dict of names and arrays, got", lambda: [shows(1.0)]),
    "a step's name": (LogError, "trace_step returns 'loss'", lambda: [Sees(50, scalar="loss")]),
    "another's": (LogError, "'grad'", lambda: [Sees(50), shows({"grad": jnp.zeros(())}, 70)]),
    "an error": (KeyError, "'gone'", lambda: [shows(lambda grads: grads["gone"])]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shown_is_refused_before_the_first_step(case: str) -> None:
    kind, words, made = REFUSED[case]
    with compiles() as result:
        fit_refuses(kind, words, callbacks=made())
    assert not any("train_step" in name for name in result)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_the_name_that_a_hook_logs_is_refused(hook: str) -> None:
    logs = hooks(**{hook: lambda trainer, module, *_: module.log("grad", 1.0)})
    with pytest.raises(LogError, match=r"'grad'.*trace_step|trace_step.*'grad'"):
        fit_traced([Sees(1), logs])


@pytest.mark.parametrize(("bad", "log_every"), thinned([(4, 0), (5, 1), (4, 2), (5, 2)], (5, 1), (4, 2)))
def test_steps_behind_a_rollback_fire_by_their_new_numbers(bad: int, log_every: int) -> None:
    values, learnt = [math.nan if i == bad else i + 1.0 for i in range(12)], []

    def note(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        del learnt[trainer.global_step - 1 :]
        learnt.append(values[batch_idx])

    sees = Sees(2)
    callbacks = [sees, hooks(on_train_batch_end=note), jl.callbacks.ModelCheckpoint(every_n_train_steps=3)]
    trainer = fit_traced(callbacks, values, max_epochs=1, nan_policy="rollback", log_every_n_steps=log_every)
    assert trainer.global_step == len(learnt) < len(values) and not np.isnan(learnt).any()
    known = walk(learnt)
    last = {step: list(seen) for step, *seen in sees.traces()}
    assert last == {s: known[s] for s in range(1, len(learnt), 2)}
    rows = {event[1]: event[2] for event in sees.told if event[0] == "log"}
    assert {s: row["grad"] for s, row in rows.items() if "grad" in row} == {s: known[s][0] for s in last}
    logged = range(log_every - 1, len(learnt), log_every) if log_every else []
    assert {s: row["value"] for s, row in rows.items() if "value" in row} == {s: learnt[s] for s in logged}


@pytest.mark.parametrize("every", [-1, 2.5, True, "2"])
def test_an_interval_that_is_no_number_of_steps_is_refused(every: Any) -> None:
    fit_refuses((ArgumentError, ArgumentTypeError), r"Sees\(trace_every_n_steps=", callbacks=Sees(every))
