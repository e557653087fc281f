"""Profiler: the steps that stand in the written trace, whatever ends the window."""

import contextlib
import gzip
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
from kit.batches import numbered
from kit.journal import hooks
from kit.modules import Mean
from kit.refusals import warnings_of
from kit.trainers import BARE, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.callbacks import Profiler


def steps_in(folder: str | Path) -> list[int]:
    assert len([*Path(folder).rglob("*.xplane.pb")]) == 1
    (file,) = Path(folder).rglob("*.trace.json.gz")
    with gzip.open(file, "rt") as text:
        events = [event for event in json.load(text)["traceEvents"] if event.get("name") == "train"]
    return [int(event["args"]["step_num"]) for event in sorted(events, key=lambda event: event["ts"])]


def after(step: int, do: Any) -> jl.Callback:
    return hooks(on_train_batch_end=lambda trainer, *_: do() if trainer.global_step == step else None)


# What is traced, of two epochs of eight batches: (arguments of the Profiler, of the Trainer, what happens, the steps).
CASES = {
    "over an epoch's end": ((6, 4), {}, None, [6, 7, 8, 9]),
    "from the first step": ((0, 2), {}, None, [0, 1]),
    "windows of batches": ((1, 4), {"accumulate_grad_batches": 3}, None, [1, 2, 3, 4]),
    "a validation between": ((2, 3), {"val_check_interval": 3}, None, [2, 3, 4]),
    "the end": ((14, 5), {}, None, [14, 15]),
    "a stop": ((3, 5), {"max_epochs": None, "max_steps": 5}, None, [3, 4]),
    "an error": ((3, 5), {}, after(5, lambda: {}[0]), [3, 4]),
    "Ctrl-C": ((3, 5), {}, after(5, lambda: signal.raise_signal(signal.SIGINT)), [3, 4]),
    "looked into": ((2, 2), {"log_every_n_steps": 1}, jl.callbacks.GradientNorm(), [2, 3]),
}


@pytest.mark.parametrize("case", thinned(CASES, *[*CASES][::3]))
def test_the_trace_marks_the_steps_of_the_window(case: str) -> None:
    window, arguments, happens, steps = CASES[case]
    profiler, callbacks = Profiler(*window), [happens] if happens else []
    given = BARE | {"max_epochs": 2, "default_root_dir": "run", "num_sanity_val_steps": 0} | arguments
    trainer = make_trainer(profiler, *callbacks, **given)
    with pytest.raises(KeyError) if case == "an error" else contextlib.nullcontext():
        trainer.fit(Mean(), numbered(8), numbered(1))
    assert profiler.location == str(Path.cwd() / "run" / "profile")
    assert steps_in(profiler.location) == steps


@pytest.mark.full
def test_a_resumed_training_traces_what_is_left_of_the_window(caplog: pytest.LogCaptureFixture) -> None:
    def run(epochs: int, profiler: Profiler) -> Profiler:
        arguments = {"logger": False, "default_root_dir": "run", "resume": "auto", "max_epochs": epochs}
        fit(Mean(), numbered(4), None, profiler, **arguments)
        return profiler

    assert steps_in(str(run(1, Profiler(2, 4, "first")).location)) == [2, 3]
    assert steps_in(str(run(2, Profiler(2, 4, "second")).location)) == [4, 5]
    assert not warnings_of(caplog)
    assert run(3, Profiler(4, 4)).location is None
    assert run(4, Profiler(99)).location is None
    after, never = (text for text in warnings_of(caplog) if "Profiler" in text)
    assert "ended after step 11" in after
    assert "ended after step 15" in never


def test_the_closing_lines_name_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    fit(Mean(), numbered(4), None, Profiler(1, 1), logger=False, default_root_dir="run")
    assert "trace       run/profile" in capsys.readouterr().out


def test_each_of_several_processes_has_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax.profiler, "start_trace", begun.append)
    trainer: Any = SimpleNamespace(run_dir=Path("run"), state=SimpleNamespace(step=0))
    Profiler()._start(trainer)
    Profiler(dirpath="kept")._start(trainer)
    assert begun == [str(Path.cwd() / folder / "process_1") for folder in ("run/profile", "kept")]
