"""Accumulation windows that an epoch does not fill."""

from typing import Any

import numpy as np
import pytest
from kit.journal import Rows
from kit.line import (
    START,
    Line,
    Outputs,
    assert_weights,
    by_hand,
    losses_by_hand,
    make_batches,
)
from kit.trainers import make_trainer

import jaxlit as jl


class End(jl.Callback):
    """Stops, or skips the rest of the epoch, at a batch."""

    def __init__(self, how: str, at: int) -> None:
        self.how, self.at = how, at

    def on_train_batch_start(self, trainer: jl.Trainer, module: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.how == "skip" and batch_idx == self.at and trainer.current_epoch == 0 else None

    def on_train_batch_end(self, trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.how == "stop" and batch_idx == self.at - 1:
            trainer.stop("enough")


@pytest.mark.parametrize(
    ("how", "at", "strategy"),
    [("stop", 1, "single"), ("stop", 3, "pmap"), ("skip", 1, "shard_map"), ("skip", 3, "single")],
)
def test_an_epoch_that_ends_in_its_first_window_takes_no_step_and_logs_no_row(strategy: str, how: str, at: int) -> None:
    keep, rows, module = Outputs(), Rows(), Line()
    trainer = make_trainer(keep, rows, End(how, at), strategy=strategy, accumulate_grad_batches=4, log_every_n_steps=1)
    trainer.fit(module, make_batches(*[8] * 8))
    assert trainer.global_step == 0
    assert rows.rows == []
    assert len(keep.outputs) == at
    assert_weights(module, START)
    assert all(np.isfinite(float(x)) for x in dict(trainer.callback_metrics).values())


@pytest.mark.parametrize(
    ("how", "strategy"), [("stop", "single"), ("stop", "pmap"), ("skip", "single"), ("skip", "ddp")]
)
def test_an_epoch_that_ends_in_its_second_window_logs_the_first(strategy: str, how: str) -> None:
    rows, module, batches = Rows(), Line(), make_batches(*[8] * 8)
    trainer = make_trainer(rows, End(how, 5), strategy=strategy, accumulate_grad_batches=4, log_every_n_steps=1)
    trainer.fit(module, batches)
    assert trainer.global_step == 1
    assert_weights(module, by_hand(START, [batches[:4]]))
    loss = np.mean(losses_by_hand(START, batches[:4]))
    near = pytest.approx(loss, rel=1e-6)
    assert rows.rows == [(0, {"loss_step": near, "epoch": 0}), (0, {"loss_epoch": near, "epoch": 0})]


@pytest.mark.parametrize("strategy", ["single", "fsdp", "pmap"])
def test_the_rest_of_a_skipped_window_is_in_no_window_of_the_next_epoch(strategy: str) -> None:
    module, batches = Line(), make_batches(*[8] * 4)
    trainer = make_trainer(End("skip", 3), strategy=strategy, accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(module, batches)
    assert trainer.global_step == 3
    assert_weights(module, by_hand(START, [batches[:2], batches[:2], batches[2:]]))
