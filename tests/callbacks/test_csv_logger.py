"""CSVLogger, read back by the csv module."""

import csv
import math
import os
from pathlib import Path

import pytest
from kit.journal import raising
from kit.trainers import make_trainer

from jaxlit.callbacks import CSVLogger


def log(logger, values, step):
    """Log a row in the folder "run", and return the file."""
    logger.on_log(make_trainer(default_root_dir="run"), values, step)
    with Path("run", logger.filename).open(newline="") as file:
        return list(csv.reader(file))


def test_columns_come_in_order_of_first_appearance():
    logger = CSVLogger()
    log(logger, {"z": 0.1 + 0.2, "epoch": 0}, 0)
    logger.teardown(None, None, "fit")
    log(logger, {"a": 2.5}, 1)
    logger.teardown(None, None, "fit")
    logger = CSVLogger()
    assert log(logger, {"m": 3.5, "z": 4.5, "epoch": 1}, 2) == [
        ["step", "epoch", "z", "a", "m"],
        ["0", "0", "0.3", "", ""],
        ["1", "", "", "2.5", ""],
        ["2", "1", "4.5", "", "3.5"],
    ]
    assert logger.state_dict() == {"rows": 3, "tail": [{"step": 2, "m": 3.5, "z": 4.5, "epoch": 1}]}
    logger.teardown(None, None, "fit")


def test_a_failure_while_widening_leaves_the_old_file_whole(monkeypatch, capsys):
    logger = CSVLogger()
    before = log(logger, {"a": 1.0}, 0)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", raising(OSError, 28, "No space left on device"))
        assert [log(logger, {"b": 1.0}, step) for step in (1, 2)] == [before] * 2
    assert capsys.readouterr().out.count("No space left") == 1
    assert log(logger, {"b": 3.0}, 3) == [["step", "epoch", "a", "b"], ["0", "", "1", ""], ["3", "", "", "3"]]
    logger.teardown(None, None, "fit")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1234567891, "0.123457"),
        (2.5e-8, "2.5e-08"),
        (3.0, "3"),
        (12_345_678.0, "12345678"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_numbers_have_six_digits_and_whole_ones_all(value, text):
    logger = CSVLogger()
    assert log(logger, {"a": value}, 0)[1] == ["0", "", text]
    logger.teardown(None, None, "fit")
