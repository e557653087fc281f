"""Loaders that give their batches once, and evaluations that count on from a fit."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kit.line import (
    START,
    Line,
    by_hand,
    losses_by_hand,
    make_batches,
)
from kit.trainers import make_trainer

from jaxlit.errors import DataError


@pytest.mark.parametrize(("strategy", "verb"), [("single", "validate"), ("ddp", "test"), ("pmap", "validate")])
def test_an_evaluation_after_fit_counts_on_from_it(strategy: str, verb: str) -> None:
    class Reads(Line):
        def validation_step(self, batch: Any) -> None:
            self.log("at_step", self.global_step + 0.0)
            self.log("at_epoch", self.current_epoch + 0.0)

    batches, trainer = make_batches(8, 8, 8), make_trainer(strategy=strategy, max_epochs=2)
    assert getattr(trainer, verb)(Reads(), batches) == [{"at_step": 0.0, "at_epoch": 0.0}]
    trainer.fit(Reads(), batches)
    assert getattr(trainer, verb)(None, batches) == [{"at_step": 6.0, "at_epoch": 2.0}]


def once(*rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Return a generator, which gives its batches once."""
    yield from make_batches(*rows)


def test_a_validation_generator_that_is_used_up_is_refused() -> None:
    with pytest.raises(DataError, match=r"val_dataloaders.*used up"):
        make_trainer(max_epochs=2).fit(Line(), make_batches(8), once(8, 8))


def test_a_training_generator_that_is_used_up_is_refused() -> None:
    with pytest.raises(DataError, match=r"train_dataloaders.*used up"):
        make_trainer(max_epochs=2).fit(Line(), once(8, 8))


def test_a_generator_that_is_opened_once_is_validated_whole() -> None:
    module, batches = Line(), make_batches(8, 8)
    trainer = make_trainer()
    trainer.fit(module, batches, itertools.chain(batches))
    trained = by_hand(START, [[b] for b in batches])
    assert trainer.validate(module, once(8, 8))[0]["loss"] == pytest.approx(
        np.mean(losses_by_hand(trained, batches)), rel=1e-6
    )
