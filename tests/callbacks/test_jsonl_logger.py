"""JSONLLogger, read back by a JSON reader that takes nothing beyond the standard."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from kit.batches import numbered
from kit.journal import hooks
from kit.modules import Mean
from kit.refusals import refuses
from kit.trainers import fit, make_trainer

from jaxlit.callbacks import JSONLLogger
from jaxlit.errors import ArgumentError


def read():
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    lines = Path("run/metrics.jsonl").read_bytes().decode("ascii").split("\n")
    assert lines.pop() == ""  # the last line is whole
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_rows_hold_every_character_and_non_finite_as_text():
    logger, trainer = JSONLLogger(), make_trainer(default_root_dir="run")
    name = "verlust \u00e4\u2028\U0001f600"
    logger.on_log(trainer, {"loss": 0.1 + 0.2, name: 1e-300, "epoch": 3}, 7)
    logger.on_log(trainer, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, 8)
    logger.on_log(trainer, {"text": 'line\nline "quoted" \u2029 \ud83d'}, 9)
    assert read() == [
        {"step": 7, "loss": 0.1 + 0.2, name: 1e-300, "epoch": 3},
        {"step": 8, "a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1.0},
        {"step": 9, "text": 'line\nline "quoted" \u2029 \ud83d'},
    ]
    logger.teardown(trainer, None, "fit")
    (again := JSONLLogger()).on_log(trainer, {"loss": 1.0}, 10)  # reads what is there
    assert len(read()) == 4 and again.state_dict()["rows"] == 4
    again.teardown(trainer, None, "fit")


def test_texts_tables_and_histograms_have_rows_of_their_own():
    values = np.random.default_rng(0).normal(size=(30, 10)).astype(np.float32)
    logger = JSONLLogger()

    def begin(trainer, module):
        logger.log_text("before", "the first step")

    def end(trainer, module):
        logger.log_text("note", "the newest step")
        logger.log_text("note", "there", step=np.int64(1))
        cells = [["a", 1, 2.5, None, True], [np.float32(0.5), np.ones(2), 1 + 2j, {"deep": {1}}, math.nan]]
        logger.log_table("rows", ("v", "w", "x", "y", "z"), cells)
        for name, given in (("array", values), ("list", values.tolist())):
            logger.log_histogram(name, given, bins=5)
        logger.log_histogram("finite", [1.0, math.nan, 2.0, math.inf])

    arguments = {"logger": logger, "default_root_dir": "run", "log_every_n_steps": 0}
    fit(Mean(), numbered(3), None, hooks(on_train_start=begin, on_train_end=end), **arguments)
    before, note, there, table, *histograms, finite = read()
    assert before == {"step": 0, "epoch": 0, "before": "the first step"}
    assert note == {"step": 2, "epoch": 1, "note": "the newest step"} and there["step"] == 1
    assert table["rows"]["columns"] == ["v", "w", "x", "y", "z"]
    cells = [["a", 1, 2.5, None, True], [0.5, [1.0, 1.0], "(1+2j)", {"deep": "{1}"}, "NaN"]]
    assert table["rows"]["data"] == cells
    counts, edges = np.histogram(values.astype(np.float64), 5)
    for row, name in zip(histograms, ("array", "list"), strict=True):
        assert row[name] == {"counts": counts.tolist(), "edges": pytest.approx(edges.tolist())}
    assert len(finite["finite"]["counts"]) == 64 and sum(finite["finite"]["counts"]) == 2
    for key in ("step", "epoch", ""):
        refuses(ArgumentError, lambda key=key: logger.log_text(key, "x"), f"JSONLLogger logs under .*got {key!r}")
