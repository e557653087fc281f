"""JSONLLogger, read back by a JSON reader that takes nothing beyond the standard."""

import errno
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from wandb_model import Line, data

import jaxlit as jl
from jaxlit.callbacks import CSVLogger, JSONLLogger, ModelCheckpoint
from jaxlit.errors import ArgumentError, LoggerError


def read(trainer, name="metrics.jsonl"):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    lines = (trainer.run_dir / name).read_bytes().decode("ascii").split("\n")
    assert lines.pop() == ""  # the last line is whole
    return [json.loads(line, parse_constant=refuse) for line in lines]


@pytest.fixture
def logger(make_trainer):
    """Return a logger, whose file is closed after the test."""
    made = JSONLLogger()
    yield made
    made.teardown(make_trainer(), None, "fit")


def test_a_row_holds_its_step_its_epoch_and_what_was_logged(make_trainer, logger):
    trainer = make_trainer(current_epoch=3)
    trainer.log(logger, {"loss": 0.1 + 0.2, "val/acc": 1.0}, 7)
    trainer.log(logger, {"other": 1e-300}, 8)
    assert read(trainer) == [
        {"step": 7, "loss": 0.1 + 0.2, "val/acc": 1.0, "epoch": 3},
        {"step": 8, "other": 1e-300, "epoch": 3},
    ]


def test_a_row_is_in_the_file_at_once(make_trainer, logger):
    trainer = make_trainer()
    for step in range(3):
        trainer.log(logger, {"loss": 0.5}, step)
        assert [row["step"] for row in read(trainer)] == list(range(step + 1))


def test_what_is_not_finite_is_text_that_float_takes(make_trainer, logger):
    trainer = make_trainer()
    trainer.log(logger, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, 0)
    (row,) = read(trainer)
    assert [row[name] for name in "abcd"] == ["NaN", "Infinity", "-Infinity", 1.0]
    assert math.isnan(float(row["a"])) and float(row["b"]) == math.inf and float(row["c"]) == -math.inf


def test_names_and_texts_of_any_language_come_back(make_trainer, logger):
    trainer = make_trainer()
    trainer.start(logger)
    name, text = "verlust \u00e4\u2028\U0001f600", 'line\nline "quoted" \u2029 \ud83d'
    trainer.log(logger, {name: 1.0}, 0)
    logger.log_text("text", text)
    assert read(trainer)[0][name] == 1.0 and read(trainer)[1]["text"] == text
    trainer.end(logger)
    again = JSONLLogger()
    trainer.start(again)
    trainer.log(again, {"loss": 1.0}, 1)  # reads what is there
    trainer.end(again)
    assert len(read(trainer)) == 3


def test_nothing_is_made_before_the_first_row(make_trainer, logger):
    trainer = make_trainer()
    trainer.start(logger)
    trainer.end(logger)
    assert not trainer.run_dir.exists() and logger.location is None
    trainer.log(logger, {"loss": 1.0}, 0)
    assert logger.location == str(trainer.run_dir / "metrics.jsonl")


def test_a_later_fit_and_a_second_logger_append(make_trainer):
    trainer = make_trainer()
    for step, logger in enumerate([first := JSONLLogger("rows.jsonl"), first, JSONLLogger("rows.jsonl")]):
        trainer.start(logger)
        trainer.log(logger, {"loss": step}, step)
        trainer.end(logger)
    assert [row["step"] for row in read(trainer, "rows.jsonl")] == [0, 1, 2]
    assert logger.state_dict() == {"rows": 3}


def test_only_the_first_process_writes(make_trainer, logger):
    trainer = make_trainer(is_global_zero=False)
    trainer.start(logger)
    trainer.log(logger, {"a": 1.0}, 0)
    logger.log_text("text", "hello")
    assert not trainer.run_dir.exists()


@pytest.mark.parametrize("cut", [1, 2, 10])
def test_a_torn_last_line_is_dropped_before_the_next_row(cut, make_trainer, logger):
    trainer = make_trainer()
    for step in range(3):
        trainer.log(logger, {"loss": 0.5}, step)
    path = trainer.run_dir / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    again = JSONLLogger()
    trainer.log(again, {"loss": 0.25}, 9)
    again.teardown(trainer, None, "fit")
    assert [row["step"] for row in read(trainer)] == [0, 1, 9]
    assert again.state_dict() == {"rows": 3}


# What is no number -----------------------------------------------------------------------------------


@pytest.fixture
def running(make_trainer, logger):
    """Return a trainer in its seventh step and epoch 2, in which the logger is set up."""
    trainer = make_trainer(global_step=7, current_epoch=2)
    trainer.start(logger)
    return trainer


def test_texts_have_rows_of_their_own(running, logger):
    logger.log_text("note", "hello")
    logger.log_text("note", "there", step=3)
    assert read(running) == [
        {"step": 6, "epoch": 2, "note": "hello"},
        {"step": 3, "epoch": 2, "note": "there"},
    ]


def test_before_the_first_step_the_step_is_0(make_trainer, logger):
    trainer = make_trainer()
    trainer.start(logger)
    logger.log_text("note", "hello")
    assert read(trainer)[0]["step"] == 0


def test_tables_keep_their_cells(running, logger):
    cells = [["a", 1, 2.5, None, True], [np.float32(0.5), np.int64(3), jnp.ones(2), np.bool_(False), math.nan]]
    logger.log_table("rows", ("v", "w", "x", "y", "z"), cells, step=np.int64(5))
    assert read(running) == [
        {
            "step": 5,
            "epoch": 2,
            "rows": {
                "columns": ["v", "w", "x", "y", "z"],
                "data": [["a", 1, 2.5, None, True], [0.5, 3, [1.0, 1.0], False, "NaN"]],
            },
        }
    ]


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray, np.ndarray.tolist])
def test_histograms_are_those_of_numpy(make, running, logger):
    values = np.random.default_rng(0).normal(size=(30, 10)).astype(np.float32)
    logger.log_histogram("weights", make(values), bins=5)
    counts, edges = np.histogram(values.astype(np.float64), 5)
    (row,) = read(running)
    assert row["weights"]["counts"] == counts.tolist()
    np.testing.assert_allclose(row["weights"]["edges"], edges)


def test_a_histogram_leaves_out_what_is_not_finite(running, logger):
    logger.log_histogram("weights", [1.0, math.nan, 2.0, math.inf])
    (row,) = read(running)
    assert len(row["weights"]["counts"]) == 64 and sum(row["weights"]["counts"]) == 2


def test_a_row_that_holds_what_json_cannot_is_text(running, logger):
    logger.log_table("rows", ["x"], [[1 + 2j], [{"nested": {1}}]])
    assert read(running)[0]["rows"]["data"] == [["(1+2j)"], [{"nested": "{1}"}]]


def test_before_a_run_there_is_nothing_to_log_to():
    with pytest.raises(LoggerError, match="no file yet.*from a hook"):
        JSONLLogger().log_text("note", "hello")


@pytest.mark.parametrize(
    ("kind", "method", "arguments", "what"),
    [
        (JSONLLogger, "log_image", ([[0.0]],), "an image"),
        (JSONLLogger, "log_figure", (None,), "a figure"),
        (CSVLogger, "log_text", ("hello",), "a text"),
        (CSVLogger, "log_table", (["x"], [[1]]), "a table"),
        (CSVLogger, "log_histogram", ([1.0],), "a histogram"),
    ],
)
def test_what_a_file_cannot_hold_is_refused_by_name(kind, method, arguments, what):
    with pytest.raises(LoggerError, match=f"{kind.__name__} cannot hold {what}.*WandbLogger"):
        getattr(kind(), method)("key", *arguments)


@pytest.mark.parametrize("key", ["step", "epoch", "", 3])
def test_a_name_that_every_row_has_is_refused(key, running, logger):
    calls = {"log_text": ["hello"], "log_table": [["x"], [[1]]], "log_histogram": [[1.0]]}
    for method, arguments in calls.items():
        with pytest.raises(ArgumentError, match=f"^JSONLLogger logs under a name .*got {key!r}"):
            getattr(logger, method)(key, *arguments)


@pytest.mark.parametrize("kind", [JSONLLogger, CSVLogger])
def test_a_resume_that_cannot_drop_rows_ends_before_the_first_step(kind, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    class Steps(jl.Callback):
        def on_train_batch_end(self, *args):
            raise AssertionError("a step was taken")

    def fit(epochs, *callbacks):
        given = {
            "log_every_n_steps": 1,
            "default_root_dir": "run",
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
        callbacks = [ModelCheckpoint(), *callbacks]
        jl.Trainer(max_epochs=epochs, resume="auto", logger=kind(), callbacks=callbacks, **given).fit(
            Line(rngs=nnx.Rngs(0)), data()
        )

    fit(1)
    file = Path("run", kind().filename)
    before = file.read_bytes()
    with monkeypatch.context() as patch, pytest.raises(LoggerError, match=f"{kind.__name__} cannot drop.*No space"):
        patch.setattr(kind, "_rewrite", full)
        fit(2, Steps())
    assert file.read_bytes() == before
    fit(2)  # once there is room
    assert file.read_bytes().startswith(before) and len(file.read_bytes()) > len(before)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "./a", 3, None])
def test_a_wrong_filename_is_refused(name):
    with pytest.raises(ArgumentError, match=r"JSONLLogger\(filename=...\)"):
        JSONLLogger(name)
