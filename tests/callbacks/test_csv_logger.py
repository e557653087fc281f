"""CSVLogger, read back by the csv module."""

import csv
import os

import pytest

from jaxlit.callbacks import CSVLogger
from jaxlit.errors import ArgumentError, JaxlitError


@pytest.fixture
def make_logger(make_trainer):
    """Return a function that makes a logger, whose file is closed after the test."""
    made = []

    def make(*arguments):
        made.append(CSVLogger(*arguments))
        return made[-1]

    yield make
    for logger in made:
        logger.teardown(make_trainer(), None, "fit")


def read(trainer, name="metrics.csv"):
    with (trainer.run_dir / name).open(newline="") as file:
        return list(csv.reader(file))


def test_columns_come_in_order_of_first_appearance(make_trainer, make_logger):
    logger, trainer = make_logger(), make_trainer()
    trainer.log(logger, {"z": 1.5}, 0)
    trainer.log(logger, {"a": 2.5}, 1)
    trainer.log(logger, {"m": 3.5, "z": 4.5}, 2)
    assert read(trainer) == [
        ["step", "epoch", "z", "a", "m"],
        ["0", "0", "1.5", "", ""],
        ["1", "0", "", "2.5", ""],
        ["2", "0", "4.5", "", "3.5"],
    ]


def test_a_row_is_in_the_file_at_once(make_trainer, make_logger):
    logger, trainer = make_logger(), make_trainer()
    for step in range(3):
        trainer.log(logger, {"loss": 0.5}, step)
        assert len(read(trainer)) == step + 2


def test_a_float_comes_back_exactly(make_trainer, make_logger):
    logger, trainer = make_logger(), make_trainer()
    trainer.log(logger, {"loss": 0.1 + 0.2}, 0)
    assert float(read(trainer)[1][2]) == 0.1 + 0.2


def test_nothing_is_made_before_the_first_row(make_trainer, make_logger):
    logger, trainer = make_logger(), make_trainer()
    trainer.start(logger)
    trainer.end(logger)
    assert not trainer.run_dir.exists()


def test_a_later_fit_appends_and_may_add_columns(make_trainer, make_logger):
    logger, trainer = make_logger(), make_trainer()
    for fit, values in enumerate([{"a": 1.0}, {"b": 2.0}, {"a": 3.0}]):
        trainer.start(logger)
        trainer.log(logger, values, fit)
        trainer.end(logger)
    assert read(trainer) == [
        ["step", "epoch", "a", "b"],
        ["0", "0", "1.0", ""],
        ["1", "0", "", "2.0"],
        ["2", "0", "3.0", ""],
    ]


def test_a_second_logger_keeps_the_rows_that_are_there(make_trainer, make_logger):
    trainer = make_trainer()
    for step in range(2):
        trainer.log(make_logger("rows.csv"), {"loss": 1.0}, step)
    assert [row[0] for row in read(trainer, "rows.csv")] == ["step", "0", "1"]


def test_a_failure_while_widening_leaves_the_old_file_whole(make_trainer, make_logger, monkeypatch, capsys):
    logger, trainer = make_logger(), make_trainer()
    trainer.log(logger, {"a": 1.0}, 0)
    before = read(trainer)

    def fail(*paths):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        for step in (1, 2):
            trainer.log(logger, {"b": 1.0}, step)
            assert read(trainer) == before
    assert capsys.readouterr().out.count("No space left") == 1
    trainer.log(logger, {"b": 3.0}, 3)
    assert read(trainer) == [["step", "epoch", "a", "b"], ["0", "0", "1.0", ""], ["3", "0", "", "3.0"]]


def test_a_disk_that_is_full_from_the_beginning_is_said_once(make_trainer, make_logger, capsys):
    logger, trainer = make_logger(), make_trainer()
    trainer.run_dir.mkdir()
    path = trainer.run_dir / "metrics.csv"
    path.symlink_to("/dev/full")  # the kernel's own full disk
    for step in range(3):
        trainer.log(logger, {"a": 1.0}, step)
    (line,) = capsys.readouterr().out.splitlines()
    assert str(path) in line and "No space left on device" in line and "Training goes on" in line
    path.unlink()
    trainer.log(logger, {"a": 1.0}, 3)
    assert read(trainer) == [["step", "epoch", "a"], ["3", "0", "1.0"]]


def test_only_the_first_process_writes(make_trainer, make_logger):
    logger, trainer = make_logger(), make_trainer(is_global_zero=False)
    trainer.log(logger, {"a": 1.0}, 0)
    assert not trainer.run_dir.exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b.csv", "/a.csv", "./a.csv", 3, None])
def test_a_wrong_filename_is_refused(name):
    with pytest.raises(ArgumentError, match=r"CSVLogger\(filename=...\)"):
        CSVLogger(name)


def test_a_file_of_someone_else_is_left_alone(make_trainer, make_logger):
    trainer = make_trainer()
    trainer.run_dir.mkdir()
    (trainer.run_dir / "data.csv").write_text("name,age\nada,36\n")
    with pytest.raises(JaxlitError, match=r"data\.csv has name,age"):
        trainer.log(make_logger("data.csv"), {"loss": 1.0}, 0)
    assert read(trainer, "data.csv") == [["name", "age"], ["ada", "36"]]
