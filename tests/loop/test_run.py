"""Every argument that limits a loop, alone and together, against a model of the loop in plain Python."""

import datetime
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from kit.batches import ROWS, numbered
from kit.by_hand import mean
from kit.inside import Clock
from kit.journal import Journal, at_batch, hooks
from kit.modules import Mean, module
from kit.trainers import BARE, STRATEGIES, fit, make_trainer, thinned

import jaxlit as jl


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
    in_fit = [*range(11, 11 + count), *range(21, 21 + min(count, 2))]
    assert journal.batches == {
        "train": list(range(1, 1 + count)),
        "validation": [*in_fit, *range(31, 31 + count)],
        "test": list(range(41, 41 + count)),
        "predict": list(range(51, 51 + count)),
        "sanity": [],
    }
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
    fake = Clock()
    monkeypatch.setattr(time, "monotonic", fake)
    monkeypatch.setattr(time, "perf_counter", fake)
    return fake


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


@pytest.mark.parametrize(
    ("max_time", "seconds"),
    [
        ("00:00:01:00", 25),
        ({"hours": 1, "seconds": 30}, 1500),
        ("01:00:00:00", 40_000),
        (datetime.timedelta(seconds=60), 20),
    ],
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
EAGER = [(name, False, True) for name in ("single", "fsdp", "simulate:2")] + [("single", True, True)]
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
