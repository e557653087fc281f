"""What holds for every logger that writes rows to a file: failures, resumes, and who may write where."""

import contextlib
import csv
import json
import os
import resource
import shutil
import signal
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.batches import numbered
from kit.journal import hooks, raising
from kit.modules import Mean
from kit.processes import launch
from kit.refusals import fit_refuses, refuses
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.callbacks import CSVLogger, JSONLLogger, ModelCheckpoint, WandbLogger
from jaxlit.errors import ArgumentError, LoggerError

FILES = ("metrics.csv", "metrics.jsonl")
each_kind = pytest.mark.parametrize("kind", [CSVLogger, JSONLLogger])


def read(file):
    """Return the rows of either file as the numbers they hold."""
    with Path(file).open(newline="") as opened:
        if file.suffix == ".csv":
            return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(opened)]
        return [{k: float(v) for k, v in row.items()} for row in map(json.loads, opened) if "told" not in row]


def path_of(logger):
    return Path("run", logger.filename).absolute()


def log(logger, *steps, loss=0.5):
    for step in steps:
        logger.on_log(make_trainer(default_root_dir="run"), {"loss": loss}, step)


@contextlib.contextmanager
def file_size_limit(size):
    """Let the kernel write no file of this process beyond a size: a write that crosses it is cut."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@each_kind
def test_a_logger_makes_its_folder_with_the_first_row(kind):
    logger = kind()
    logger.setup(make_trainer(default_root_dir="run"), None, "fit")
    assert not Path("run").exists() and logger.location is None
    log(logger, 0)
    assert logger.location == str(path_of(logger)) and logger.state_dict()["rows"] == 1
    logger.teardown(None, None, "fit")


@each_kind
def test_another_process_than_the_first_writes_nothing(kind, monkeypatch):
    monkeypatch.setattr(jl.Trainer, "is_global_zero", False)
    Path("file").write_text("")
    logger, trainer = kind(), make_trainer(default_root_dir="file/run")  # a folder that it does not ask for
    logger.setup(trainer, None, "fit")
    logger.on_fit_start(trainer, None)
    logger.on_log(trainer, {"loss": 1.0}, 0)
    logger.log_hyperparams({"rate": 1})
    assert logger.location is None


@each_kind
def test_a_row_that_does_not_fit_is_dropped(kind, capsys):
    logger, raises, path = kind(), kind(on_error="raise"), path_of(kind())
    log(logger, 0, 1)
    whole = path.read_bytes()
    for _ in range(2):  # a failure of a later fit is said again
        logger.setup(make_trainer(default_root_dir="run"), None, "fit")
        with file_size_limit(len(whole) + 4):
            for step in (2, 3):
                log(logger, step)
                assert path.read_bytes() == whole
        (line,) = capsys.readouterr().out.splitlines()
        assert f"{kind.__name__} cannot write {path}" in line and "File too large" in line and "continues" in line
    with file_size_limit(len(whole) + 4):
        refuses(LoggerError, lambda: log(raises, 1), r"cannot write .*Free the disk.*logger=False")
    assert path.read_bytes() == whole and capsys.readouterr().out == ""
    log(logger, 4, loss=0.25)
    assert read(path) == [{"step": s, "loss": x} for s, x in ((0, 0.5), (1, 0.5), (4, 0.25))]
    assert logger.state_dict()["rows"] == 3
    logger.teardown(None, None, "fit")


class Disk:
    """A file opened for rows; a full disk takes all but the last byte of a write."""

    full = 0  # for so many writes
    seen: ClassVar[list[str]] = []  # after each change

    def __init__(self, file, path):
        self.file, self.path = file, path

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        if Disk.full:
            Disk.full -= 1
            self.file.write(data[:-1])
            self.file.flush()
            raise OSError(28, "No space left on device")
        return self.note(self.file.write(data))

    def truncate(self, *size):
        return self.note(self.file.truncate(*size))

    def note(self, result):
        self.file.flush()
        Disk.seen.append(self.path.read_text())
        return result


@pytest.fixture
def disk(monkeypatch):
    opened, replace = Path.open, os.replace

    def open_on(path, mode="r", *args, **named):
        file = opened(path, mode, *args, **named)
        return Disk(file, path) if mode == "r+b" else file

    monkeypatch.setattr(Path, "open", open_on)
    monkeypatch.setattr(os, "replace", lambda old, new: (replace(old, new), Disk.seen.append(Path(new).read_text())))
    Disk.full, Disk.seen = 0, []
    return Disk


@each_kind
@pytest.mark.parametrize("writes", [1, 2])
def test_a_disk_full_during_a_join_leaves_complete_rows(kind, writes, disk):
    logger, path, trainer = kind(), path_of(kind()), make_trainer(default_root_dir="run")
    logger.on_log(trainer, {"epoch": 0, "a": 0.5, "b": 0.25}, 0)
    logger.on_log(trainer, {"epoch": 0, "a": 0.5}, 1)
    disk.full = writes
    logger.on_log(trainer, {"epoch": 0, "b": 0.125}, 1)
    left = read(path)
    assert left in ([{"step": 0, "epoch": 0, "a": 0.5, "b": 0.25}], [*left[:1], {"step": 1, "epoch": 0, "a": 0.5}])
    assert len(left) == 3 - writes  # the second failure is one to put the old row back
    logger.on_log(trainer, {"epoch": 0, "a": 2.0}, 2)
    assert read(path) == [*left, {"step": 2, "epoch": 0, "a": 2.0}]
    assert logger.state_dict()["rows"] == len(left) + 1
    resumed = kind()
    resumed.load_state_dict(logger.state_dict())
    resumed.on_load_checkpoint(trainer, None, {"global_step": 3})
    assert read(path) == [*left, {"step": 2, "epoch": 0, "a": 2.0}]
    logger.finalize("success")


@each_kind
def test_no_moment_of_a_join_has_fewer_rows(kind, disk):
    logger, trainer = kind(), make_trainer(default_root_dir="run")
    for values in ({"a": 1.0, "b": 1.0}, {"a": 2.0}, {"b": 2.0}, {"c": 2.0}):  # the last is a new column
        logger.on_log(trainer, {"epoch": 0, **values}, len(values) % 2)
        rows = read(path_of(logger))
    assert rows == [{"step": 0, "epoch": 0, "a": 1, "b": 1}, {"step": 1, "epoch": 0, "a": 2, "b": 2, "c": 2}]
    held = [sum("1" in line or "2" in line for line in text.splitlines()) for text in disk.seen]
    assert held == sorted(held)
    logger.finalize("success")


@each_kind
def test_a_half_written_last_row_is_cut_by_the_next_run(kind):
    logger, path = kind(), path_of(kind())
    log(logger, 0, 1)
    logger.finalize("success")
    os.truncate(path, path.stat().st_size - 2)
    log(later := kind(), 2)
    assert [row["step"] for row in read(path)] == [0, 2] and later.state_dict()["rows"] == 2
    later.finalize("success")


@each_kind
def test_a_file_of_someone_else_or_of_another_run_is_left_alone(kind):
    path, name = path_of(kind()), kind.__name__
    path.parent.mkdir()
    for content in ("", "name,age\nada,36\n", '{"name": "ada"}\n', "[1]\n", "text"):
        path.write_text(content)
        fit_refuses(ArgumentError, f"holds {path.name} of another run", logger=kind(), default_root_dir="run")
        if content:
            refuses(LoggerError, lambda: log(kind(), 0), rf"{name} appends to files.*another {name}\(filename")
        assert path.read_text() == content


def train(folder, *more, **arguments):
    """Train 12 steps in two epochs, with a row of each and one of every validation; checkpoints stand at 5 and 10."""

    def tell(trainer, *rest):  # also after a checkpoint
        if trainer.global_step % 4 == 3:
            trainer.loggers[1].log_histogram("told", [trainer.global_step] * 3, bins=1)

    loggers = [CSVLogger(), JSONLLogger()]
    given = {"max_epochs": 2, "log_every_n_steps": 1, "resume": "auto", "num_sanity_val_steps": 0}
    callbacks = [*loggers, hooks(on_train_batch_end=tell), *more, ModelCheckpoint(every_n_train_steps=5)]
    return fit(Mean(), numbered(6), numbered(1), *callbacks, default_root_dir=folder, **(given | arguments))


def train_until_killed():
    """End the process as a power cut does, after the row of a step."""

    def kill(trainer, values, step):
        if step == 8 and "loss" in values:
            trainer.checkpoint_callback.finish(trainer)
            os.kill(os.getpid(), signal.SIGKILL)

    train("run", hooks(on_log=kill))


def rows_in(folder):
    """Return the rows of both files, which are the same but for digits."""
    actual, exact = (read(Path(folder, name)) for name in FILES)
    assert actual == [{name: pytest.approx(x, rel=1e-5) for name, x in row.items()} for row in exact]
    return actual


@pytest.mark.full
def test_a_resume_after_a_kill_makes_the_same_files(tmp_path):
    (ended,) = launch(train_until_killed, tmp_path, count=1, devices=1, join=False)
    assert ended.code == -signal.SIGKILL, ended.errors
    assert [row["step"] for row in rows_in("run")] == [*range(9)]
    assert Path("run/checkpoints/step_00000005").exists()
    train("whole")
    assert len(rows_in("whole")) == 12
    for cut in (0, 1, 9):  # what a machine that dies may leave of the last row
        shutil.copytree("run", folder := f"cut{cut}")
        for name in FILES:
            os.truncate(Path(folder, name), Path(folder, name).stat().st_size - cut)
        train(folder)
        assert [Path(folder, name).read_bytes() == Path("whole", name).read_bytes() for name in FILES] == [True] * 2
    told = [json.loads(line) for line in Path("whole/metrics.jsonl").read_text().splitlines() if "told" in line]
    assert [row["step"] for row in told] == [2, 6, 10]


@each_kind
def test_a_resume_that_cannot_drop_rows_ends(kind, monkeypatch):
    def go_on(epochs):
        given = {"log_every_n_steps": 1, "default_root_dir": "run", "resume": "auto"}
        return fit(Mean(), numbered(2), logger=kind(), max_epochs=epochs, **given).global_step

    go_on(1)
    before = path_of(kind()).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(kind, "_rewrite", raising(OSError, 28, "No space left on device"))
        refuses(LoggerError, lambda: go_on(2), f"{kind.__name__} cannot remove.*No space")
    assert path_of(kind()).read_bytes() == before
    assert go_on(2) == 4  # once there is room
    assert [row["step"] for row in read(path_of(kind()))] == [0, 1, 2, 3]


def joined(rows, row):
    """Return the rows after one more: it joins one of the last four of its step and epoch that lacks its names."""
    for k in reversed(range(max(len(rows) - 4, 0), len(rows))):
        if {name: x for name, x in rows[k].items() if name in row} == {name: row[name] for name in ("step", "epoch")}:
            return [*rows[:k], {**rows[k], **row}, *rows[k + 1 :]]
    return [*rows, row]


@each_kind
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sets(st.sampled_from("abc"), min_size=1)), min_size=1, max_size=12),
    st.integers(0, 11),
)
def test_rows_join_by_step_and_epoch_also_after_a_resume(kind, calls, at):
    shutil.rmtree("run", ignore_errors=True)
    logger, trainer, rows, saved = kind(), make_trainer(default_root_dir="run"), [], []
    for i, (step, names) in enumerate(calls):
        values = dict.fromkeys(sorted(names), i + 0.5)
        logger.on_log(trainer, {"epoch": step // 3, **values}, step)
        rows = joined(rows, {"step": step, "epoch": step // 3, **values})
        assert read(path_of(logger)) == rows
        saved.append((json.loads(json.dumps(logger.state_dict())), rows))
    state, rows = saved[at % len(saved)]
    logger.finalize("success")
    again = kind()
    again.load_state_dict(state)
    again.on_load_checkpoint(trainer, None, {"global_step": 0})
    assert read(path_of(again)) == rows
    again.on_log(trainer, {"epoch": 1, "a": 0.25}, 3)
    assert read(path_of(again)) == joined(rows, {"step": 3, "epoch": 1, "a": 0.25})
    again.finalize("success")


def test_a_resume_without_state_drops_rows_by_their_step():
    trainer = train("run", max_epochs=1)
    for logger in (CSVLogger(), JSONLLogger()):
        logger.on_load_checkpoint(trainer, trainer.module, {"global_step": 3})
    assert [row["step"] for row in rows_in("run")] == [0, 1, 2]


def kinds_of(callbacks=(), **arguments):
    trainer = make_trainer(*callbacks, enable_progress_bar=False, enable_checkpointing=False, **arguments)
    assert trainer.callbacks[: len(trainer.loggers)] == trainer.loggers
    return [type(c).__name__.removesuffix("Logger") for c in trainer.loggers]


def test_which_loggers_the_trainer_adds():
    wandb, given, rows = WandbLogger(offline=True), CSVLogger("a.csv"), JSONLLogger("b.jsonl")
    for arguments, expected in (
        ({}, ["CSV"]),
        ({"logger": False}, []),
        ({"logger": False, "callbacks": [wandb]}, ["Wandb"]),
        ({"logger": rows}, ["JSONL"]),
        ({"callbacks": [rows]}, ["JSONL", "CSV"]),
        ({"logger": False, "callbacks": [rows, given, JSONLLogger("c.jsonl")]}, ["JSONL", "CSV", "JSONL"]),
        ({"callbacks": [wandb]}, ["Wandb", "CSV", "JSONL"]),
        ({"callbacks": [given, wandb]}, ["CSV", "Wandb", "JSONL"]),
        ({"callbacks": [rows, wandb]}, ["JSONL", "Wandb", "CSV"]),
        ({"callbacks": [given, rows, wandb]}, ["CSV", "JSONL", "Wandb"]),
    ):
        assert kinds_of(**arguments) == expected, arguments
    for beside in ([], [given], [rows], [given, rows]):
        for arguments in ({"callbacks": beside, "logger": wandb}, {"logger": [wandb, *beside]}):
            assert sorted(kinds_of(**arguments)) == ["CSV", "JSONL", "Wandb"], arguments
    for two in ([CSVLogger("x.csv"), CSVLogger("x.csv")], [CSVLogger("x.csv"), JSONLLogger("x.csv")]):
        words = "two loggers that write to x.*another filename"
        refuses(ArgumentError, lambda two=two: kinds_of(callbacks=two), words)
        refuses(ArgumentError, lambda two=two: kinds_of(callbacks=two[:1], logger=two[1]), words)


@each_kind
def test_hyperparameters_are_in_hparams_json_without_secrets(kind):
    steps = {
        "on_fit_start": lambda t, m: t.logger.log_hyperparams({"rate": 0.1, "shape": (1, 2), "token": "secret"}),
        "on_train_end": lambda t, m: t.logger.log_hyperparams({"rate": 0.2, "best": np.float32(0.5)}),
    }
    fit(Mean(), numbered(1), None, hooks(**steps), logger=kind(), default_root_dir="run")
    actual = json.loads(Path("run/hparams.json").read_text())
    assert actual == {"rate": 0.2, "shape": [1, 2], "token": "<redacted>", "best": "0.5"}
    fit(Mean(), numbered(1), logger=kind(), default_root_dir="other")
    assert not Path("other/hparams.json").exists()  # unless asked for
    refuses(LoggerError, lambda: kind().log_hyperparams({}), f"{kind.__name__} has no folder yet.*from a hook")
