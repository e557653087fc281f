"""`trainer.follow` validates the checkpoints of a run that trains in another process."""

import itertools
import json
import os
import re
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import numbered
from kit.buckets import URL, Bucket, make_machine
from kit.journal import Rows, hooks
from kit.modules import Mean, module
from kit.processes import launch
from kit.refusals import refuses
from kit.trainers import BARE, fit, make_trainer

import jaxlit as jl
from jaxlit.checkpoints import files
from jaxlit.checkpoints.places import place_of
from jaxlit.errors import ArgumentError, CheckpointError
from jaxlit.testing import Line, line_data
from jaxlit.trainer import follow

EVERY = {"save_top_k": -1, "every_n_epochs": 1}


def train_until_killed() -> None:
    kill = lambda trainer, _: os.kill(os.getpid(), signal.SIGKILL) if trainer.current_epoch == 3 else None  # noqa: E731
    callbacks = [jl.callbacks.ModelCheckpoint(**EVERY), hooks(on_train_epoch_start=kill)]
    jl.Trainer(max_epochs=5, default_root_dir="run", resume="auto", callbacks=callbacks).fit(Line(), line_data(16))


def train_on() -> None:
    saves = jl.callbacks.ModelCheckpoint(**EVERY)
    jl.Trainer(max_epochs=5, default_root_dir="run", resume="auto", callbacks=saves).fit(Line(), line_data(16))


def follow_together() -> None:
    watcher = jl.Trainer(strategy="ddp", logger=False, enable_progress_bar=False)
    rows = watcher.follow("run", Line(), line_data(16), monitor="val/loss", every=0)
    Path(f"rows{jax.process_index()}.json").write_text(json.dumps(rows))


@pytest.mark.full
def test_two_processes_follow_together(tmp_path: Path) -> None:
    saves = jl.callbacks.ModelCheckpoint(**EVERY)
    fit(Line(), line_data(16), None, saves, max_epochs=3, default_root_dir=tmp_path / "run")
    launch(follow_together, tmp_path, count=2, devices=1)
    both = [json.loads((tmp_path / f"rows{i}.json").read_text()) for i in range(2)]
    assert both[0] == both[1] and [row["step"] for row in both[0]] == [4, 8, 12]
    alone = make_trainer(**BARE).validate(Line(), line_data(16), ckpt_path=tmp_path / "run/best")[0]
    assert alone["val/loss"] == pytest.approx(both[0][-1]["val/loss"])


def test_each_checkpoint_is_validated_at_its_step_also_of_a_run_that_is_killed_and_resumed(tmp_path: Path) -> None:
    codes, rows = list[Any](), Rows()

    def train() -> None:
        for work in (train_until_killed, train_on):
            codes.extend(ended.code for ended in launch(work, tmp_path, count=1, devices=1, join=False))

    thread = threading.Thread(target=train)
    thread.start()
    try:
        followed = make_trainer(rows).follow(tmp_path / "run", Line(), line_data(16), monitor="val/loss", every=0.1)
    finally:
        thread.join()
    assert codes == [-signal.SIGKILL, 0]
    paths = sorted((tmp_path / "run/checkpoints").glob("step_*"))
    assert [int(path.name[5:]) for path in paths] == [4, 8, 12, 16, 20] == [row["step"] for row in followed]
    by_itself = [make_trainer().validate(Line(), line_data(16), ckpt_path=path)[0] for path in paths]
    assert by_itself == [{"val/loss": row["val/loss"]} for row in followed]
    assert [(step, values["val/loss"]) for step, values in rows.rows] == [
        (row["step"] - 1, row["val/loss"])
        for row in followed  # as rows of a fit, by the index of the step
    ]
    assert make_trainer().validate(Line(), line_data(16), ckpt_path=tmp_path / "run/best") == [by_itself[-1]]


@pytest.mark.parametrize(("mode", "best"), [("min", 2), ("max", 3)])
@pytest.mark.parametrize("root", ["run", "memory://{}/run"])
def test_the_best_is_kept_whatever_training_deletes(
    root: str, mode: Any, best: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    scores = {1: 5.0, 2: 4.0, 3: 9.0, 4: 8.0}
    score = module(validation_step=lambda self, batch: self.log("score", self.w[0]))
    folder = root.format(tmp_path.name)

    def set_score(trainer: Any, model: Any) -> None:
        model.w[...] = model.w[...] * 0 + scores[trainer.current_epoch + 1]

    saves = jl.callbacks.ModelCheckpoint(save_top_k=-1)
    fit(score, numbered(1), None, hooks(on_train_epoch_end=set_score), saves, max_epochs=4, default_root_dir=folder)
    rows = make_trainer().follow(folder, score, numbered(1), monitor="score", mode=mode)
    assert [row["score"] for row in rows] == [*scores.values()]
    kept = make_trainer(logger=False)
    assert kept.validate(score, numbered(1), ckpt_path=f"{folder}/best") == [{"score": scores[best]}]
    # A second look finds the same, and leaves no file of the copy before; also if the training has deleted it.
    for name in ("MANIFEST.json", "data-*/*"):
        for path in Path(folder, f"checkpoints/step_0000000{best}").glob(name):
            path.unlink()
    make_trainer().follow(folder, score, numbered(1), monitor="score", mode=mode)
    assert kept.validate(score, numbered(1), ckpt_path=f"{folder}/best") == [{"score": scores[best]}]
    of_run = make_trainer(default_root_dir=folder, resume="auto", enable_checkpointing=True)
    assert of_run.validate(score, numbered(1), ckpt_path="best") == [{"score": scores[best]}]
    if root == "run":
        assert len(list(Path(folder, "best").iterdir())) == 2


def test_a_callback_that_ranks_by_itself_has_its_own_best() -> None:
    scores = hooks(on_train_epoch_end=lambda t, m: scores.log("score", [1.0, 2.0, 3.0][t.current_epoch]))
    saves = lambda: jl.callbacks.ModelCheckpoint(monitor="score", save_top_k=-1)  # noqa: E731
    fit(Line(), line_data(16), None, scores, saves(), max_epochs=3, default_root_dir="run")
    rows = make_trainer(**BARE).follow("run", Line(), line_data(16), monitor="val/loss")
    of_run = make_trainer(saves(), default_root_dir="run", resume="auto")
    assert rows[0]["val/loss"] > rows[2]["val/loss"]
    for path, row in (("best", rows[0]), ("run/best", rows[2])):
        assert of_run.validate(Line(), line_data(16), ckpt_path=path) == [{"val/loss": row["val/loss"]}]


@pytest.mark.parametrize("name", ["MANIFEST.json", "data-*/state.json", "data-*/0.safetensors"])
def test_a_best_that_is_damaged_stops_nothing(name: str, caplog: pytest.LogCaptureFixture) -> None:
    fit(Line(), line_data(16), None, jl.callbacks.ModelCheckpoint(**EVERY), max_epochs=3, default_root_dir="run")
    look = lambda: make_trainer(**BARE).follow("run", Line(), line_data(16), monitor="val/loss", every=0)  # noqa: E731
    steps = [row["step"] for row in look()]
    shutil.rmtree(f"run/checkpoints/step_{steps[-1]:08}")  # of which the best is a copy
    (path,) = Path("run/best").glob(name)
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert [row["step"] for row in look()] == steps[:-1]
    assert "run/best could not be read (try 2 of 2)" in caplog.text
    assert make_trainer(**BARE).validate(Line(), line_data(16), ckpt_path="run/best")


def test_a_score_that_is_no_number_is_never_best() -> None:
    scores = iter([np.nan, 3.0, 2.0, np.nan])
    score = module(validation_step=lambda self, batch: self.log("score", self.w[0]))
    set_score = lambda trainer, model: model.w.set_value(jnp.full(1, next(scores)))  # noqa: E731
    given = {"max_epochs": 4, "default_root_dir": "run", "nan_policy": "ignore"}
    saves = jl.callbacks.ModelCheckpoint(**EVERY)
    fit(score, numbered(1), None, hooks(on_train_epoch_end=set_score), saves, **given)
    make_trainer().follow("run", score, numbered(1), monitor="score")
    assert make_trainer().validate(score, numbered(1), ckpt_path="run/best") == [{"score": 2.0}]


@pytest.mark.parametrize("again", [2, 3])
def test_a_run_that_has_ended_is_not_waited_for_though_it_was_started_again(
    again: int, caplog: pytest.LogCaptureFixture
) -> None:
    for epochs in (2, again):
        fit(Line(), line_data(16), None, max_epochs=epochs, default_root_dir="run", resume="auto")
    assert len(make_trainer(**BARE).follow("run", Line(), line_data(16), every=0.01, timeout=1)) >= 1
    assert "has not ended" not in caplog.text


def test_a_run_that_pauses_is_followed_as_long_as_something_new_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = itertools.count(), itertools.count(1)

    def pause(trainer: Any, _: Any) -> None:
        if trainer.current_epoch < 3:
            trainer.stop("a pause", final=False)

    def train(every: float) -> None:
        if next(looks) % 2:  # every other look finds nothing new
            saves = jl.callbacks.ModelCheckpoint(**EVERY)
            given = {"max_epochs": 4, "default_root_dir": "run", "resume": "auto"}
            fit(Line(), line_data(16), None, saves, hooks(on_train_epoch_end=pause), **given)

    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=train))
    rows = make_trainer(**BARE).follow("run", Line(), line_data(16), timeout=6)
    assert [row["step"] for row in rows] == [4, 8, 12, 16]


def test_a_checkpoint_that_is_written_again_counts_as_it_is_then() -> None:
    stop = hooks(on_train_epoch_end=lambda trainer, _: trainer.stop("a pause", final=False))
    for _ in range(2):
        given = {"max_epochs": 9, "default_root_dir": "run", "resume": "auto"}
        fit(Line(), line_data(16), None, jl.callbacks.ModelCheckpoint(**EVERY), stop, **given)
    paths = [Path(f"run/checkpoints/step_{step:08}") for step in (4, 8)]
    again = hooks(on_validation_end=lambda *_: files.copy(paths[1], paths[0]))
    follower = make_trainer(again, **BARE)
    rows = follower.follow("run", Line(), line_data(16), monitor="val/loss", every=0.01, timeout=0.1)
    (expected,) = make_trainer(**BARE).validate(Line(), line_data(16), ckpt_path=paths[1])
    assert rows == [{"step": step} | expected for step in (4, 8)]


def test_a_store_that_once_does_not_answer_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever request it is: each checkpoint gets its row, in their order, and the best is kept."""
    make_machine(tmp_path, monkeypatch)
    fit(Line(), line_data(16), None, jl.callbacks.ModelCheckpoint(**EVERY), max_epochs=2, default_root_dir=URL)
    trainer, count, rows = make_trainer(**BARE), 0, list[Any]()

    def requests(fails: int | None) -> int:
        numbers = itertools.count()

        def meet(operation: str, path: str) -> None:
            if operation == "get" and next(numbers) == fails:
                raise ConnectionError(f"503 {path}")

        monkeypatch.setattr(Bucket, "meet", staticmethod(meet))
        result = trainer.follow(URL, trainer.module or Line(), line_data(16), monitor="val/loss", every=0)
        rows.append(result)
        return next(numbers)

    count = requests(None)
    assert count > 10 and [row["step"] for row in rows[0]] == [4, 8]
    for i in range(count):
        files.remove(place_of(f"{URL}/best"))
        requests(i)
        assert rows[-1] == rows[0], i
        assert trainer.validate(trainer.module, line_data(16), ckpt_path=f"{URL}/best") == [
            {"val/loss": rows[0][-1]["val/loss"]}
        ]


@pytest.mark.parametrize("logger", [False, True])
def test_a_run_in_a_bucket_notes_its_end(logger: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_machine(tmp_path, monkeypatch)
    given: Any = BARE | {"logger": logger, "default_root_dir": URL, "max_epochs": 2}
    fit(Line(), line_data(16), None, OwnCheckpoints(), **given)
    assert [row["step"] for row in make_trainer(**BARE).follow(URL, Line(), line_data(16), every=0)] == [4, 8]


def ends(at: int, **stop: Any) -> bool:
    """Return whether a run of two epochs has ended that is stopped at the end of one."""
    end = hooks(on_train_epoch_end=lambda t, _: t.stop("why", **stop) if t.current_epoch + 1 == at else None)
    fit(Line(), line_data(16), None, end, max_epochs=2, default_root_dir="run", resume="auto")
    return Path("run/.ended").exists()


def test_a_run_has_ended_at_its_limit_or_by_a_stop_that_a_resume_keeps() -> None:
    assert not ends(1, final=False)
    assert ends(2, final=False)  # it had come to its limit
    shutil.rmtree("run")
    assert ends(1, final=True)


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_interruption_is_no_end_but_at_the_limit(epoch: int) -> None:
    end = lambda t, _: os.kill(os.getpid(), signal.SIGTERM) if t.current_epoch == epoch else None  # noqa: E731
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        fit(Line(), line_data(16), None, hooks(on_train_epoch_end=end), max_epochs=2, default_root_dir="run")
    assert Path("run/.ended").exists() == (epoch == 1)


def test_the_end_is_taken_back_as_soon_as_training_goes_on() -> None:
    seen = list[bool]()
    see = hooks(on_train_start=lambda *_: seen.append(Path("run/.ended").exists()))
    for epochs in (1, 2):
        fit(Line(), line_data(16), None, see, max_epochs=epochs, default_root_dir="run", resume="auto")
        assert Path("run/.ended").exists()
    assert seen == [False, False]


def test_a_lazy_module_is_built_and_compiled_once_for_all_checkpoints() -> None:
    fit(Line(), line_data(16), None, jl.callbacks.ModelCheckpoint(**EVERY), max_epochs=3, default_root_dir="run")
    built = list[int]()

    class Counted(Line):
        def __init__(self) -> None:
            super().__init__()
            built.append(1)

        def validation_step(self, batch: Any) -> None:
            built.append(2)
            super().validation_step(batch)

    first = make_trainer(**BARE)
    first.validate(jl.lazy(Counted), line_data(16), ckpt_path="run/checkpoints/step_00000004")
    traces, rows = built.copy(), make_trainer(**BARE).follow("run", jl.lazy(Counted), line_data(16))
    assert len(rows) == 3 and built == traces * 2  # as many as for one


class OwnCheckpoints(jl.Callback):
    """What a third party writes instead of a ModelCheckpoint."""

    def on_safe_point(self, trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
        if epoch_over:
            trainer.saver.begin(trainer.saver.root / "checkpoints" / f"step_{trainer.global_step:08}").wait()


def test_checkpoints_of_another_callback_are_followed_to_the_end_of_a_run_in_a_fresh_folder() -> None:
    given = {"max_epochs": 2, "enable_checkpointing": False, "logger": True}
    trainer = fit(Line(), line_data(16), None, OwnCheckpoints(), **given)
    assert [row["step"] for row in make_trainer(**BARE).follow(trainer.run_dir, Line(), line_data(16))] == [4, 8]


def test_a_trial_of_a_few_batches_notes_no_end() -> None:
    Path("run").mkdir()
    fit(Line(), line_data(16), None, fast_dev_run=True, default_root_dir="run")
    assert not [*Path("run").iterdir()]


def test_a_damaged_checkpoint_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    fit(Line(), line_data(16), None, jl.callbacks.ModelCheckpoint(**EVERY), max_epochs=3, default_root_dir="run")
    (path,) = Path("run/checkpoints/step_00000008").glob("data-*/0.safetensors")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    rows = make_trainer(**BARE).follow("run", Line(), line_data(16), monitor="val/loss", every=0)
    assert [row["step"] for row in rows] == [4, 12] and "step_00000008 could not be read (try 2 of 2)" in caplog.text
    with pytest.raises(CheckpointError, match="do not fit|does not fit|has no"):
        make_trainer(**BARE).follow("run", Mean(), numbered(1), every=0)


@pytest.mark.parametrize("monitor", [None, "score"])
def test_a_checkpoint_that_training_deletes_once_it_was_read_has_its_row(monitor: Any) -> None:
    fit(Mean(), numbered(1), None, jl.callbacks.ModelCheckpoint(**EVERY), max_epochs=3, default_root_dir="run")
    score = module(validation_step=lambda self, batch: self.log("score", self.w[0]))
    steps, logged = iter([1, 2, 3]), Rows()
    delete = lambda *_: shutil.rmtree(f"run/checkpoints/step_{next(steps):08}")  # noqa: E731
    trainer = make_trainer(hooks(on_validation_end=delete), logged)
    rows = trainer.follow("run", score, numbered(1), monitor=monitor, every=0)
    assert [row["step"] for row in rows] == [1, 2, 3] and [step for step, _ in logged.rows] == [0, 1, 2]


def test_a_checkpoint_that_training_deletes_before_it_is_read_has_no_row() -> None:
    fit(Mean(), numbered(1), None, jl.callbacks.ModelCheckpoint(**EVERY), max_epochs=3, default_root_dir="run")
    score, looks = module(validation_step=lambda self, batch: self.log("score", self.w[0])), itertools.count(1)
    delete = lambda *_: shutil.rmtree("run/checkpoints/step_00000002") if next(looks) == 1 else None  # noqa: E731
    rows = make_trainer(hooks(on_validation_end=delete)).follow("run", score, numbered(1), every=0)
    assert [row["step"] for row in rows] == [1, 3]


def test_a_training_that_does_not_end_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    stop = hooks(on_train_epoch_start=lambda trainer, _: 1 / (2 - trainer.current_epoch))
    with pytest.raises(ZeroDivisionError):
        fit(
            Line(),
            line_data(16),
            None,
            jl.callbacks.ModelCheckpoint(**EVERY),
            stop,
            max_epochs=9,
            default_root_dir="run",
        )
    rows = make_trainer(**BARE).follow("run", Line(), line_data(16), every=0.01, timeout=0.1)
    assert [row["step"] for row in rows] == [4, 8]
    assert re.search("run has not ended, and had no new checkpoint for 0.1 s", caplog.text)


def test_what_does_not_fit_is_refused() -> None:
    fit(Line(), line_data(16), None, max_epochs=1, default_root_dir="run", enable_checkpointing=True)
    by = lambda **given: make_trainer(**BARE).follow("run", Line(), line_data(16), **given)  # noqa: E731
    refuses(ArgumentError, lambda: by(monitor="loss"), r"monitor='loss'\): validation_step logs \['val/loss'\]")
    refuses(ArgumentError, lambda: by(mode="least"), "mode.*'least'")
    refuses(ArgumentError, lambda: by(every=-1), "every")
    refuses(ArgumentError, lambda: by(monitor=3), "monitor.*got 3")
    refuses(ArgumentError, lambda: make_trainer().follow(3, Line(), line_data(16)), "run=.*takes a folder")
    refuses(ArgumentError, lambda: make_trainer().follow("", Line(), line_data(16)), "run=.*takes a folder")
    of_run = make_trainer(default_root_dir="run", resume="auto")
    refuses(ArgumentError, lambda: of_run.follow("run", Line(), line_data(16)), "run.*other than this Trainer's")
    refuses(
        ArgumentError, lambda: of_run.follow("run/checkpoints", Line(), line_data(16)), "run.*other than this Trainer's"
    )
