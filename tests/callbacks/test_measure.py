"""What callbacks measure stands in the rows of steps, beside what the module logs and never in its place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from kit.batches import numbered
from kit.journal import Rows
from kit.modules import Mean
from kit.refusals import refuses
from kit.trainers import fit

import jaxlit as jl
from jaxlit.errors import LogError


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
