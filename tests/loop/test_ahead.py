"""Steps in which nothing acts are taken without a look at anything else, as many as a few milliseconds have."""

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.inside import leaves_of, stop_clocks
from kit.journal import Rows, hooks
from kit.modules import Mean, Net, module
from kit.trainers import BARE, fit, make_trainer

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint
from jaxlit.engine.compiled_program import Bound
from jaxlit.errors import DataError
from jaxlit.loop import dispatch
from jaxlit.loop.dispatch import Dispatch


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many batches were taken ahead each time."""
    counts: list[int] = []
    take_ahead = Dispatch.take_ahead

    def noted(self: Dispatch, batches: Any, batch: Any) -> Any:
        position = self._run.position
        before = position.total_batch_idx
        try:
            return take_ahead(self, batches, batch)
        finally:
            if ahead := position.total_batch_idx - before:
                counts.append(ahead)

    monkeypatch.setattr(Dispatch, "take_ahead", noted)
    return counts


@pytest.fixture
def taken(counted: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The same; steps of any length are taken ahead."""
    monkeypatch.setattr(dispatch, "_AHEAD_S", 1e9)
    return counted


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_AHEAD_S", 0.0)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", ["arrays", "list", "generator"])
def test_rows_and_weights_are_those_of_single_steps(
    kind: str, accumulate: int, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_once() -> tuple[Any, ...]:
        batches = random(61)
        data: Any = batches if kind == "list" else (x for x in itertools.cycle(batches))
        if kind == "arrays":
            data = jl.ArrayLoader(jax.tree.map(lambda *x: np.concatenate(x), *batches), len(batches[0]["x"]))
        rows, places = Rows(rates=True), []
        saver = ModelCheckpoint(every_n_train_steps=7, save_top_k=-1)
        note = hooks(on_checkpoint_saved=lambda trainer, module, callback, path: places.append(path.name))
        given = {k: x for k, x in BARE.items() if k != "enable_checkpointing"} | {
            "default_root_dir": f"run{len(taken)}"
        }
        given |= {
            "log_every_n_steps": 10,
            "accumulate_grad_batches": accumulate,
            "max_epochs": 1,
            "val_check_interval": 20,
        }
        trainer = fit(Net(rngs=nnx.Rngs(0)), data, random(2), rows, saver, note, limit_train_batches=61, **given)
        return trainer.global_step, rows.rows, places, [*leaves_of(trainer)]

    step, rows, places, leaves = train_once()
    assert sum(taken) > 0  # as many as the prefetcher has drawn by then
    assert max(taken) <= 15
    one_by_one(monkeypatch)
    count = len(taken)
    step_of_one, rows_of_one, places_of_one, leaves_of_one = train_once()
    assert len(taken) == count
    assert (step, rows, places) == (step_of_one, rows_of_one, places_of_one)
    for a, b in zip(leaves, leaves_of_one, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_loader_sees_each_step_of_the_training(taken: list[int]) -> None:
    seen: list[int] = []

    def draw() -> Iterator[Any]:
        for batch in numbered(40):
            seen.append(trainer.global_step)
            yield batch

    trainer = make_trainer(max_epochs=1, prefetch=0, **BARE)
    trainer.fit(Mean(), draw())
    # The batch after the newest step is drawn before the next step.
    assert seen[5:] == list(range(4, 39))
    assert sum(taken) > 20


def test_an_error_of_the_loader_comes_after_the_steps_before_it(taken: list[int]) -> None:
    def draw() -> Iterator[Any]:
        yield from numbered(29)
        raise OSError("the disk is gone")

    rows = Rows()
    trainer = make_trainer(rows, max_epochs=1, log_every_n_steps=1000, **BARE)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        trainer.fit(Mean(), draw())
    assert "batch 29" in "".join(caught.value.__notes__)
    assert trainer.global_step == 29
    assert sum(taken) > 15


def test_a_stop_by_a_signal_is_seen_after_what_was_taken_ahead(taken: list[int]) -> None:
    def draw() -> Iterator[Any]:
        for k, batch in enumerate(numbered(400)):
            if k == 100:
                signal.raise_signal(signal.SIGTERM)
            yield batch

    trainer = make_trainer(max_epochs=1, log_every_n_steps=0, prefetch=0, **BARE)
    with pytest.raises(SystemExit):
        trainer.fit(Mean(), draw())
    assert 99 <= trainer.global_step <= 116


@pytest.mark.parametrize("what", ["a hook of each batch", "debug", "a row a step", "steps_per_execution"])
def test_where_something_acts_in_each_step_none_is_taken_ahead(what: str, taken: list[int]) -> None:
    callbacks = [hooks(on_train_batch_end=lambda *_: None)] if what == "a hook of each batch" else []
    given: dict[str, Any] = {
        "debug": {"debug": True},
        "a row a step": {"log_every_n_steps": 1},
        "steps_per_execution": {"steps_per_execution": 4},
    }.get(what, {})
    fit(Mean(), numbered(40), None, *callbacks, **BARE, **given)
    assert taken == []


@pytest.mark.parametrize(("seconds", "most"), [(1e-6, 15), (0.9e-3, 5), (1.0, 0)])
def test_the_time_of_a_step_sets_how_many_are_taken_ahead(
    seconds: float, most: int, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = stop_clocks(monkeypatch)

    def draw() -> Iterator[Any]:
        for batch in numbered(200):
            clock.now += seconds
            yield batch

    fit(Mean(), draw(), None, log_every_n_steps=0, prefetch=0, **BARE)
    assert max([0, *counted]) == most


def test_steps_that_become_long_are_taken_one_by_one_at_once(
    counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = stop_clocks(monkeypatch)

    def draw() -> Iterator[Any]:
        for k, batch in enumerate(numbered(200)):
            clock.now += 1e-6 if k < 100 else 1.0
            yield batch

    fit(Mean(), draw(), None, log_every_n_steps=0, prefetch=0, **BARE)
    assert 84 <= sum(counted) <= 100


def test_no_more_steps_are_in_flight_than_one_by_one(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def waited(limit: int) -> list[int]:
        steps: list[int] = []
        wait = Bound.wait
        with monkeypatch.context() as patch:
            patch.setattr(Bound, "wait", lambda self, token: (steps.append(trainer.global_step), wait(self, token))[1])
            trainer = make_trainer(max_in_flight=limit, log_every_n_steps=47, max_epochs=1, prefetch=0, **BARE)
            trainer.fit(Mean(), numbered(200))
        return steps

    ahead = [waited(limit) for limit in (1, 4, 8, 32)]
    assert sum(taken) > 200
    one_by_one(monkeypatch)
    assert ahead == [waited(limit) for limit in (1, 4, 8, 32)]


ACTS = [
    "stops in on_log",
    "saves in on_log",
    "sets the rate in on_log",
    "stops in the loader",
    "goes back",
    "by the clock",
]


@pytest.mark.parametrize("what", ACTS)
def test_what_acts_between_steps_acts_where_it_does_one_by_one(
    what: str, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_once() -> Any:
        seen: list[int] = []

        def log(trainer: jl.Trainer, values: Any, step: int) -> None:
            seen.append(trainer.global_step)
            if step != 79:
                return
            if what == "stops in on_log":
                trainer.stop("enough")
            elif what == "saves in on_log":
                trainer.save_checkpoint(f"run{len(taken)}/mine")
            elif what == "sets the rate in on_log":
                trainer.hyperparams["learning_rate"] = 0.125

        def draw() -> Iterator[Any]:
            for k, batch in enumerate(numbered(130)):
                if k == 65 and what == "stops in the loader":
                    trainer.stop("enough")
                if k == 90 and what == "goes back":
                    batch = {"x": np.full_like(batch["x"], np.nan)}
                clock.now += 100.0 if k == 70 else 1e-6
                yield batch

        class Clock(jl.Callback):
            def due_in(self, step: int) -> int | None:
                return None

            def due_in_seconds(self) -> float:
                return 50.0

            def on_safe_point(self, trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
                seen.append(-trainer.global_step)

        given: dict[str, Any] = {k: x for k, x in BARE.items() if k != "enable_checkpointing"}
        given |= {"nan_policy": "rollback", "default_root_dir": f"run{len(taken)}", "log_every_n_steps": 20}
        saver = ModelCheckpoint(every_n_train_steps=30)
        by_clock = [Clock()] if what == "by the clock" else []
        trainer = make_trainer(hooks(on_log=log), saver, *by_clock, max_epochs=1, prefetch=0, **given)
        model = module(tx=optax.inject_hyperparams(optax.sgd)(0.25))
        trainer.fit(model, draw())
        return trainer.global_step, seen, float(model.w[0])

    clock = stop_clocks(monkeypatch)
    ahead = train_once()
    assert sum(taken) > 20
    one_by_one(monkeypatch)
    assert ahead == train_once()


@pytest.mark.parametrize("drop_remainder", [False, True])
def test_the_last_batch_of_arrays_is_checked(drop_remainder: bool) -> None:
    loader = jl.ArrayLoader({"x": np.ones((10, 1), np.float32)}, 4, drop_remainder=drop_remainder)
    train_once = lambda: fit(Mean(), loader, None, max_recompiles=0, **BARE)  # noqa: E731
    if drop_remainder:
        assert train_once().global_step == 2
    else:
        with pytest.raises(DataError, match="max_recompiles=0"):
            train_once()
