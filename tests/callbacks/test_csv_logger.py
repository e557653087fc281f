"""CSVLogger, read back by the csv module: rows, failures of the disk, resumes, and who may write where."""

import contextlib
import csv
import json
import logging
import math
import os
import resource
import shutil
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kit.batches import numbered
from kit.journal import hooks, raising
from kit.modules import Mean
from kit.odd_names import LOGGED, train_odd_names
from kit.refusals import fit_refuses, refuses
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.callbacks import CSVLogger, ModelCheckpoint, WandbLogger
from jaxlit.errors import ArgumentError, LoggerError

FILE = Path("run/metrics.csv")


def read(folder="run"):
    """Return the rows of a file as the numbers they hold."""
    with Path(folder, "metrics.csv").open(newline="") as opened:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(opened)]


@pytest.fixture
def begin(request):
    """Return a function that makes a logger of a run in the folder "run"."""

    def begin(**arguments):
        logger, trainer = CSVLogger(**arguments), make_trainer(default_root_dir="run")
        logger.attach(trainer, None)
        logger.setup(trainer, None, "fit")
        request.addfinalizer(lambda: logger.finalize("success"))
        return logger

    return begin


def log(logger, *steps, **values):
    for step in steps:
        logger.on_log(None, values or {"loss": 0.5}, step)


@contextlib.contextmanager
def file_size_limit(size):
    """Let the kernel write no file of this process beyond a size: a write that crosses it is cut."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_odd_names_stay_as_they_are():
    train_odd_names(CSVLogger())
    rows, columns = read(), {name: name.replace("\r", "\\r") for name in LOGGED}
    assert {name: [(row["step"], row[key]) for row in rows if key in row] for name, key in columns.items()} == LOGGED


def test_the_folder_is_made_with_the_first_row(begin):
    logger = begin()
    assert not Path("run").exists() and logger.location is None
    log(logger, 0)
    assert logger.location == str(FILE.absolute()) and logger.state_dict()["rows"] == 1


def test_another_process_than_the_first_writes_nothing(monkeypatch):
    monkeypatch.setattr(jl.Trainer, "is_global_zero", False)
    Path("file").write_text("")
    logger, trainer = CSVLogger(), make_trainer(default_root_dir="file/run")  # a folder that it does not ask for
    logger.attach(trainer, None)
    logger.setup(trainer, None, "fit")
    logger.on_fit_start(trainer, None)
    logger.on_log(trainer, {"loss": 1.0}, 0)
    logger.log_hyperparams({"rate": 1})
    assert logger.location is None


def test_columns_come_in_order_of_first_appearance(begin):
    log(begin(), 0, z=0.1 + 0.2, epoch=0)
    log(begin(), 1, a=np.float32(2.5))
    logger = begin()
    log(logger, 2, m=3.5, z="a text, with a comma", epoch=1)
    with FILE.open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["step", "epoch", "z", "a", "m"],
            ["0", "0", "0.3", "", ""],
            ["1", "", "", "2.5", ""],
            ["2", "1", "a text, with a comma", "", "3.5"],
        ]
    tail = [{"step": 2, "m": 3.5, "z": "a text, with a comma", "epoch": 1}]
    assert logger.state_dict() == {"rows": 3, "tail": tail}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1234567891, "0.123457"),
        (2.5e-8, "2.5e-08"),
        (12_345_678.0, "12345678"),
        (math.inf, "inf"),
        (math.nan, "nan"),
        (None, ""),
    ],
)
def test_numbers_have_six_digits_and_whole_ones_all(begin, value, text):
    log(begin(), 0, a=value)
    assert FILE.read_text() == f"step,epoch,a\n0,,{text}\n"


def test_a_row_that_does_not_fit_is_dropped(begin, capsys):
    logger, raises = begin(), begin(on_error="raise")
    log(logger, 0, 1)
    whole = FILE.read_bytes()
    for _ in range(2):  # a failure of a later fit is said again
        logger.setup(make_trainer(default_root_dir="run"), None, "fit")
        with file_size_limit(len(whole) + 4):
            for step in (2, 3):
                log(logger, step)
                assert FILE.read_bytes() == whole
        (line,) = capsys.readouterr().out.splitlines()
        words = f"CSVLogger cannot write {FILE.absolute()}"
        assert words in line and "File too large" in line and "continues" in line
    with file_size_limit(len(whole) + 4):
        refuses(LoggerError, lambda: log(raises, 1), r"cannot write .*Free the disk.*logger=False")
    assert FILE.read_bytes() == whole and capsys.readouterr().out == ""
    log(logger, 4, loss=0.25)
    assert read() == [{"step": s, "loss": x} for s, x in ((0, 0.5), (1, 0.5), (4, 0.25))]
    assert logger.state_dict()["rows"] == 3


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


def resume(begin, state, **checkpoint):
    """Return a logger that continues from the state of a checkpoint."""
    logger = begin()
    if state is not None:
        logger.load_state_dict(state)
    position = {"epoch": 0, "batch_idx": 0, "over": False}
    logger.on_load_checkpoint(None, None, {"global_step": 0, "position": position} | checkpoint)
    return logger


@pytest.mark.parametrize("writes", [1, 2])
def test_a_disk_full_during_a_join_leaves_complete_rows(begin, writes, disk):
    logger = begin()
    log(logger, 0, epoch=0, a=0.5, b=0.25)
    log(logger, 1, epoch=0, a=0.5)
    disk.full = writes
    log(logger, 1, epoch=0, b=0.125)
    left = [{"step": 0, "epoch": 0, "a": 0.5, "b": 0.25}, {"step": 1, "epoch": 0, "a": 0.5}]
    left = left[: 3 - writes]  # the second failure is one to put the old row back
    assert read() == left
    log(logger, 2, epoch=0, a=2.0)
    assert read() == [*left, {"step": 2, "epoch": 0, "a": 2.0}]
    assert logger.state_dict()["rows"] == len(left) + 1
    resume(begin, logger.state_dict(), global_step=3)
    assert read() == [*left, {"step": 2, "epoch": 0, "a": 2.0}]


def test_no_moment_of_a_join_has_fewer_rows(begin, disk):
    logger = begin()
    for values in ({"a": 1.0, "b": 1.0}, {"a": 2.0}, {"b": 2.0}, {"c": 2.0}):  # the last is a new column
        log(logger, len(values) % 2, epoch=0, **values)
    assert read() == [{"step": 0, "epoch": 0, "a": 1, "b": 1}, {"step": 1, "epoch": 0, "a": 2, "b": 2, "c": 2}]
    held = [len(text.splitlines()) for text in disk.seen]
    assert held == sorted(held)


def test_a_failure_while_widening_leaves_the_old_file_whole(begin, monkeypatch, capsys):
    logger = begin()
    log(logger, 0, a=1.0)
    before = FILE.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", raising(OSError, 28, "No space left on device"))
        log(logger, 1, 2, b=1.0)
    assert FILE.read_bytes() == before and capsys.readouterr().out.count("No space left") == 1
    log(logger, 3, b=3.0)
    assert FILE.read_text() == "step,epoch,a,b\n0,,1,\n3,,,3\n"


def test_a_half_written_last_row_is_cut_by_the_next_run(begin):
    logger = begin()
    log(logger, 0, 1)
    logger.finalize("success")
    os.truncate(FILE, FILE.stat().st_size - 2)
    log(later := begin(), 2)
    assert [row["step"] for row in read()] == [0, 2] and later.state_dict()["rows"] == 2


def test_a_file_of_someone_else_or_of_another_run_is_left_alone(begin):
    FILE.parent.mkdir()
    for content in ("", "name,age\nada,36\n", "text"):
        FILE.write_text(content)
        fit_refuses(ArgumentError, "holds metrics.csv of another run", default_root_dir="run")
        if content:
            refuses(LoggerError, lambda: log(begin(), 0), r"CSVLogger appends to files.*another CSVLogger\(filename")
        assert FILE.read_text() == content


def train(folder, *more, **arguments):
    """Train 12 steps in two epochs, with a row of each and one of every validation; checkpoints are at 5 and 10."""
    defaults = {"max_epochs": 2, "log_every_n_steps": 1, "resume": "auto", "num_sanity_val_steps": 0}
    callbacks = [*more, ModelCheckpoint(every_n_train_steps=5)]
    return fit(Mean(), numbered(6), numbered(1), *callbacks, default_root_dir=folder, **(defaults | arguments))


@pytest.mark.parametrize("max_steps", [-1, 9])  # the end of an epoch, and a cut in the second one
def test_rows_of_a_test_after_a_fit_survive_an_extension(max_steps):
    given = {"log_every_n_steps": 3, "resume": "auto", "num_sanity_val_steps": 0}
    for folder, epochs, steps in (("run", 2, max_steps), ("run", 3, -1), ("whole", 3, -1)):
        trainer = fit(
            Mean(), numbered(6), numbered(1), default_root_dir=folder, max_epochs=epochs, max_steps=steps, **given
        )
        if epochs == 2:
            trainer.test(None, numbered(1))
    (tested,) = [row for row in read() if "test" in row]
    assert tested["step"] == (8 if max_steps > 0 else 11)
    assert [row for row in read() if row != tested] == read("whole")


def test_a_resume_that_cannot_drop_rows_ends(monkeypatch):
    train("run", max_epochs=1)
    before = FILE.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(CSVLogger, "_rewrite", raising(OSError, 28, "No space left on device"))
        refuses(LoggerError, lambda: train("run"), "CSVLogger cannot remove.*No space")
    assert FILE.read_bytes() == before
    assert train("run").global_step == 12  # once there is room
    assert [row["step"] for row in read()] == [*range(12)]


def joined(rows, row):
    """Return the rows after one more: it joins one of the last four of its step and epoch that lacks its names."""
    for k in reversed(range(max(len(rows) - 4, 0), len(rows))):
        if {name: x for name, x in rows[k].items() if name in row} == {name: row[name] for name in ("step", "epoch")}:
            return [*rows[:k], {**rows[k], **row}, *rows[k + 1 :]]
    return [*rows, row]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sets(st.sampled_from("abc"), min_size=1)), min_size=1, max_size=12),
    st.integers(0, 11),
)
def test_rows_join_by_step_and_epoch_also_after_a_resume(begin, calls, at):
    shutil.rmtree("run", ignore_errors=True)
    logger, rows, saved = begin(), [], []
    for i, (step, names) in enumerate(calls):
        values = {"epoch": step // 3, **dict.fromkeys(sorted(names), i + 0.5)}
        log(logger, step, **values)
        rows = joined(rows, {"step": step, **values})
        assert read() == rows
        saved.append((json.loads(json.dumps(logger.state_dict())), rows))
    state, rows = saved[at % len(saved)]
    logger.finalize("success")
    again = resume(begin, state)
    assert read() == rows
    log(again, 3, epoch=1, a=0.25)
    assert read() == joined(rows, {"step": 3, "epoch": 1, "a": 0.25})
    again.finalize("success")


def test_a_resume_without_state_drops_rows_by_their_step(begin):
    train("run", max_epochs=1)
    resume(begin, None, global_step=3)
    assert [row["step"] for row in read()] == [0, 1, 2]


def test_a_fit_says_that_rows_of_a_jsonl_file_are_not_continued(caplog):
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"step": 0}\n')
    with caplog.at_level(logging.WARNING, "jaxlit"):
        train("run", max_epochs=1)
    assert "run/metrics.jsonl, of an earlier jaxlit, is not continued: new rows are in metrics.csv only." in caplog.text


def kinds_of(callbacks=(), **arguments):
    trainer = make_trainer(*callbacks, enable_progress_bar=False, enable_checkpointing=False, **arguments)
    assert trainer.callbacks[: len(trainer.loggers)] == trainer.loggers
    return [type(c).__name__.removesuffix("Logger") for c in trainer.loggers]


def test_which_loggers_the_trainer_adds():
    wandb, rows = WandbLogger(offline=True), CSVLogger("a.csv")
    for arguments, expected in (
        ({}, ["CSV"]),
        ({"logger": False}, []),
        ({"callbacks": [rows]}, ["CSV"]),
        ({"logger": False, "callbacks": [rows, CSVLogger("c.csv")]}, ["CSV", "CSV"]),
        ({"logger": False, "callbacks": [wandb]}, ["Wandb"]),
        ({"logger": wandb}, ["Wandb", "CSV"]),
        ({"callbacks": [wandb]}, ["Wandb", "CSV"]),
        ({"callbacks": [rows], "logger": wandb}, ["CSV", "Wandb"]),
        ({"logger": [wandb, rows]}, ["Wandb", "CSV"]),
    ):
        assert kinds_of(**arguments) == expected, arguments
    two = [CSVLogger("x.csv"), CSVLogger("x.csv")]
    words = "two loggers that write to x.*another filename"
    refuses(ArgumentError, lambda: kinds_of(callbacks=two), words)
    refuses(ArgumentError, lambda: kinds_of(callbacks=two[:1], logger=two[1]), words)


def test_hyperparameters_are_in_hparams_json_without_secrets():
    steps = {
        "on_fit_start": lambda t, m: t.logger.log_hyperparams({"rate": 0.1, "shape": (1, 2), "token": "secret"}),
        "on_train_end": lambda t, m: t.logger.log_hyperparams({"rate": 0.2, "best": np.float32(0.5)}),
    }
    fit(Mean(), numbered(1), None, hooks(**steps), default_root_dir="run")
    actual = json.loads(Path("run/hparams.json").read_text())
    assert actual == {"rate": 0.2, "shape": [1, 2], "token": "<redacted>", "best": "0.5"}
    fit(Mean(), numbered(1), default_root_dir="other")
    assert not Path("other/hparams.json").exists()  # unless asked for
    refuses(LoggerError, lambda: CSVLogger().log_hyperparams({}), "CSVLogger has no run yet.*from a hook")
