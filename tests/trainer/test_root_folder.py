"""Whose a run folder is."""

from pathlib import Path

import pytest
from kit.line import (
    Line,
    make_batches,
)
from kit.trainers import make_trainer

import jaxlit as jl
from jaxlit.errors import ArgumentError


def test_a_trainer_may_validate_and_then_fit_in_its_root_folder(tmp_path: Path) -> None:
    trainer, batches, module = make_trainer(default_root_dir=tmp_path, logger=True), make_batches(8), Line()
    trainer.validate(module, batches)
    for _ in range(2):
        trainer.fit(module, batches)
    trainer.validate(module, batches)
    assert (tmp_path / "metrics.csv").exists()


@pytest.mark.parametrize("validates_first", [False, True])
@pytest.mark.parametrize("filename", ["metrics.csv", "other.csv"])
def test_the_root_folder_of_another_trainer_is_refused_by_its_file(
    tmp_path: Path, filename: str, validates_first: bool
) -> None:
    def make() -> jl.Trainer:
        # Without checkpoints, which would be found first.
        arguments = {"log_every_n_steps": 1, "enable_checkpointing": False}
        return make_trainer(jl.callbacks.CSVLogger(filename), default_root_dir=tmp_path, **arguments)

    make().fit(Line(), make_batches(8))
    second = make()
    if validates_first:  # which claims nothing that is another's
        second.validate(Line(), make_batches(8))
    before = (tmp_path / filename).read_text()
    with pytest.raises(ArgumentError, match=f"holds {filename} of another run"):
        second.fit(Line(), make_batches(8))
    assert (tmp_path / filename).read_text() == before
