"""Steps in which nothing acts are taken without a look at anything else, as many as a few milliseconds have."""

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.inside import leaves_of
from kit.journal import Rows, hooks
from kit.modules import Mean, Net
from kit.trainers import BARE, fit, make_trainer

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint
from jaxlit.loop import dispatch
from jaxlit.loop.dispatch import Dispatch


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many batches each look ahead has taken; steps of any length are taken ahead."""
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
    monkeypatch.setattr(dispatch, "_AHEAD_S", 1e9)
    return counts


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
        given |= {"log_every_n_steps": 10, "accumulate_grad_batches": accumulate, "max_epochs": 1}
        trainer = fit(Net(rngs=nnx.Rngs(0)), data, random(2), rows, saver, note, limit_train_batches=61, **given)
        return trainer.global_step, rows.rows, places, [*leaves_of(trainer)]

    step, rows, places, leaves = train_once()
    assert sum(taken) > 20
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


def test_long_steps_are_taken_one_by_one(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one(monkeypatch)
    fit(Mean(), numbered(40), None, **BARE)
    assert taken == []


def test_what_comes_by_the_clock_ends_what_is_taken_ahead(taken: list[int]) -> None:
    class Clock(jl.Callback):
        """Acts by the clock, from the 50th batch that is drawn on in each step."""

        def due_in_seconds(self) -> float:
            return 1e-9 if drawn > 50 else 1e-3 * (50 - drawn)

        def on_safe_point(self, trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
            seen.append(trainer.global_step)

    drawn, seen = 0, list[int]()

    def draw() -> Iterator[Any]:
        nonlocal drawn
        for drawn, batch in enumerate(numbered(80)):  # noqa: B007
            yield batch

    fit(Mean(), draw(), None, Clock(), log_every_n_steps=0, **BARE)
    assert set(range(60, 80)) <= {*seen}
