"""A callback of a user can answer what the loop and the Trainer ask their own callbacks. What callbacks measure
stands in the rows of steps, beside what the module logs and never in its place.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kit.batches import numbered
from kit.journal import Rows
from kit.modules import Mean
from kit.refusals import refuses, warnings_of
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.errors import ArgumentError, LogError


def made(**members: Any) -> Any:
    return type("Mine", (jl.Callback,), members)()


@pytest.mark.parametrize(
    ("role", "default"),
    [("progress_bar", "ProgressBar"), ("model_summary", "ModelSummary"), ("csv_logger", "CSVLogger")],
)
def test_a_role_replaces_the_default_callback(role: str, default: str) -> None:
    def names(*callbacks: jl.Callback) -> list[str]:
        return [type(c).__name__ for c in make_trainer(*callbacks).callbacks]

    assert default in names()
    assert default not in names(made(role=role, max_depth=0))


def test_a_checkpoint_callback_comes_after_all_others() -> None:
    saver, late = made(role="checkpoint", monitor=None), jl.callbacks.EMA(0.5)
    trainer = make_trainer(saver, late)
    assert trainer.callbacks[-1] is saver
    assert trainer.checkpoint_callback is saver


def test_is_logger_puts_a_callback_among_the_loggers() -> None:
    class Mine(jl.callbacks.Logger):
        """Only `is_logger` counts."""

    mine = Mine()
    assert make_trainer(mine, logger=False).loggers == [mine]
    mine.is_logger = False
    assert make_trainer(mine, logger=False).loggers == []


def test_training_continues_without_a_callback_that_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def fail(self: Any, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        calls.append(batch_idx)
        raise ConnectionError("gone")

    assert fit(Mean(), numbered(3), None, made(may_fail=True, on_train_batch_end=fail)).global_step == 3
    assert calls == [0]
    assert sum("Mine.on_train_batch_end failed" in text for text in warnings_of(caplog)) == 1


@pytest.mark.parametrize(
    ("callbacks", "words"),
    [
        ([made(row_files=("rows.txt",)) for _ in range(2)], r"write to rows\.txt.*Leave one"),
        (
            [
                jl.callbacks.EMA(0.5),
                made(conflict_with=lambda self, other: "Not both. Leave one out." if other.role == "" else None),
            ],
            "^Not both",
        ),
        ([made(exclusive=("port", 1)) for _ in range(2)], "two Mines of one port. Leave one of them out"),
        ([made(role="progress_bar"), jl.callbacks.ProgressBar()], "two progress bars, Mine and ProgressBar"),
    ],
)
def test_callbacks_that_exclude_each_other_are_refused(callbacks: list[Any], words: str) -> None:
    refuses(ArgumentError, lambda: make_trainer(*callbacks), words)
    make_trainer(*(made(exclusive=("port", port)) for port in (1, 2)))


def test_a_checkpoint_role_needs_the_paths_and_no_more() -> None:
    members = {"monitor": None, "best_model_path": "", "last_model_path": "", "best_model_score": None}
    mine = made(role="checkpoint", folder=lambda self, run_dir: run_dir, **members)
    assert fit(Mean(), numbered(1), None, mine, jl.callbacks.RunReport()).checkpoint_callbacks == [mine]


class Adds(jl.callbacks.Measure):
    def __init__(self, add: Callable[[Any, int], Any]) -> None:
        self.add = add

    def fill_row(self, trainer: jl.Trainer, module: Any, row: Any, step: int) -> None:
        self.add(row, step) if callable(self.add) else row.put(self, self.add)


def test_its_values_stand_in_the_row_of_their_step() -> None:
    mine = Adds(lambda row, step: row.put(mine, {"waiting": np.float32(step + 1)}))
    fit(Mean(), numbered(5), None, mine, rows := Rows(), log_every_n_steps=2)
    assert [(step, values["waiting"]) for step, values in rows.rows if "waiting" in values] == [(1, 2.0), (3, 4.0)]


@pytest.mark.parametrize(
    ("add", "words"),
    [
        ({"loss": 1.0}, "Adds adds 'loss' to rows, which is logged already. Rename yours"),
        ({"step": 1.0}, "Adds adds 'step' to rows"),
        ({"epoch": 1.0}, "Adds adds 'epoch' to rows"),
        ({"text": "high"}, "Adds adds 'text' to rows, which takes a number, got 'high'"),
        ({"array": np.zeros(3)}, "Adds adds 'array' to rows, which takes a number, got array"),
        (lambda row, step: row.__setitem__("mine", 1.0), r"could overwrite a value.*row\.put\(self, \{'mine'"),
    ],
)
def test_a_taken_name_or_no_number_is_refused(add: Any, words: str) -> None:
    refuses(LogError, lambda: fit(Mean(), numbered(2), None, Adds(add), log_every_n_steps=1), words)
