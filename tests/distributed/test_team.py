"""What processes decide together: the time is over for all at the same step, and an error is that of all."""

import time
from pathlib import Path
from typing import Any

import jax
import pytest
from kit.batches import random
from kit.journal import hooks
from kit.modules import Linear
from kit.processes import launch, say
from kit.threads import as_processes
from kit.trainers import BARE, fit

import jaxlit as jl
from jaxlit.callbacks import Timer
from jaxlit.distributed.team import Several, team
from jaxlit.errors import CheckpointError, DataError


def decided(monkeypatch: pytest.MonkeyPatch, due: float, paces: list[Any], steps: int) -> list[Any]:
    """Return of each process the look that found the time over, its clock's time there, and how often it asked.

    Args:
        monkeypatch: Of the test.
        due: The time.
        paces: Of each process, the seconds that step k takes by its clock.
        steps: The most looks.
    """
    now, asks, ask = [100.0 * k for k in range(len(paces))], [0] * len(paces), Several.agree

    def asking(*args: Any, **named: Any) -> Any:
        asks[jax.process_index()] += 1
        return ask(*args, **named)

    def work(index: int) -> tuple[int, float, int]:
        clock, first = Several(), now[index]
        end = clock.elapsed(ask=True) + due
        for k in range(steps):
            now[index] += paces[index](k)
            if clock.elapsed(end) >= end:
                return k, now[index] - first, asks[index]
        return steps, now[index] - first, asks[index]

    monkeypatch.setattr(Several, "agree", asking)
    monkeypatch.setattr(time, "monotonic", lambda: now[jax.process_index()])
    return as_processes(monkeypatch, work, len(paces))


@pytest.mark.parametrize(
    ("due", "paces", "latest"),
    [
        # One that is slower in each step is the one that counts: 100 s are over in its step 199.
        (100.0, [lambda k: 0.4, lambda k: 0.5], 199),
        (100.0, [lambda k: 0.5, lambda k: 0.1 if k % 2 else 0.7], 199),
        # A first step that compiles.
        (100.0, [lambda k: 0.25 if k else 50.0, lambda k: 0.25], 200),
        # It is over in the first.
        (1.0, [lambda k: 2.0, lambda k: 0.0], 0),
    ],
)
def test_all_processes_find_the_time_over_at_one_step(
    monkeypatch: pytest.MonkeyPatch, due: float, paces: list[Any], latest: int
) -> None:
    result = decided(monkeypatch, due, paces, 1000)
    assert len({(step, asks) for step, _, asks in result}) == 1
    assert result[0][0] == latest


def test_exchanges_are_rare_and_follow_the_pace_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    # 20 000 steps of 10 ms, 200 s: an exchange each 10 s and at each halving of the last 20.
    (step, seconds, asks), other = decided(monkeypatch, 200.0, [lambda k: 0.01, lambda k: 0.01], 30_000)
    assert (step, asks) == (other[0], other[2]) and 200.0 <= seconds + 1e-6 < 200.1 and asks < 50
    (_, seconds, _), _ = decided(monkeypatch, 200.0, [lambda k: 0.01 if k < 100 else 0.1] * 2, 30_000)
    assert 200.0 <= seconds + 1e-6 < 210.0


def train_in_a_process() -> None:
    """Train with a clock of this process's own: a batch takes 3 s in the first process and 1 s in the other."""
    now, seconds = [1000.0 * jax.process_index()], 3.0 - 2.0 * jax.process_index()
    real, validated = time.monotonic, list[int]()
    time.monotonic = lambda: now[0]

    def tick(*_: Any) -> None:
        now[0] += seconds

    watch = hooks(
        on_train_batch_end=tick, on_validation_start=lambda trainer, module: validated.append(trainer.global_step)
    )
    (rows,) = random(1, rows=32)
    loader = jl.ArrayLoader(rows, 8)
    by_timer = Timer({"seconds": 20})
    given = {
        "strategy": "ddp",
        "max_epochs": None,
        "num_sanity_val_steps": 0,
        "val_check_interval": {"seconds": 10},
    } | BARE
    for name, callbacks, more in (("max_time", [], {"max_time": {"seconds": 20}}), ("Timer", [by_timer], {})):
        validated.clear()
        trainer = fit(Linear(), loader, loader, watch, *callbacks, **given, **more)
        say(name, [trainer.global_step, validated, trainer.stop_reason.split("=")[0].split("(")[0]])
    time.monotonic = real


@pytest.mark.full
def test_processes_with_other_clocks_stop_at_one_step(tmp_path: Path) -> None:
    ended = launch(train_in_a_process, tmp_path)
    assert [one.code for one in ended] == [0, 0], ended[0].errors + ended[1].errors
    # 3 s a batch, by the slower: 10 s are over in the fourth and the eighth; 20 s in the seventh, which validates.
    for name in ("max_time", "Timer"):
        assert [one.said[name] for one in ended] == [[7, [4, 7], name]] * 2


def test_an_error_of_one_process_is_raised_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [None, CheckpointError("the disk is full"), DataError("no rows")]
    result = as_processes(monkeypatch, lambda index: team().same_error("writing", errors[index]), 3)
    assert result[1] is errors[1]
    assert [(type(error), str(error)) for error in result] == [(CheckpointError, "the disk is full")] * 3
    with pytest.raises(DataError, match="no rows"):
        team().same_error("writing", errors[2])
    assert team().same_error("writing", None) is None
