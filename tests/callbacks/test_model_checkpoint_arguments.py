"""When checkpoints are written at all, and which arguments of ModelCheckpoint are refused."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import ArgumentError, CheckpointError


class Line(jl.TrainModule):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))

    def training_step(self, batch: Any) -> Any:
        return jnp.mean((self.w[...] - batch["x"]) ** 2)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.25)


def batches(count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full((2, 1), k, np.float32)} for k in range(1, count + 1)]


def trainer_of(callbacks: Any, **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"strategy": "single", "enable_checkpointing": True, "default_root_dir": "run", **quiet, **arguments}
    return jl.Trainer(callbacks=callbacks, **given)


def test_by_default_the_newest_is_kept_behind_each_epoch() -> None:
    trainer = trainer_of(None, max_epochs=2)
    trainer.fit(Line(), batches(2))
    assert isinstance(trainer.checkpoint_callback, jl.callbacks.ModelCheckpoint)
    assert [p.name for p in Path("run/checkpoints").glob("*") if p.name != ".lock"] == ["step_00000004"]


@pytest.mark.parametrize(
    ("callbacks", "off"),
    [([], {"enable_checkpointing": False}), ([], {"fast_dev_run": 2}), (["own"], {"fast_dev_run": True})],
)
def test_switched_off_nothing_is_written(callbacks: list[str], off: dict[str, Any]) -> None:
    own: list[Any] = [jl.callbacks.ModelCheckpoint("own") for _ in callbacks]
    trainer = trainer_of(own, **{"max_epochs": 2, **off})
    trainer.fit(Line(), batches(2))
    assert trainer.checkpoint_callback is None
    assert list(Path().glob("**/step_*")) == [] and not Path("run/checkpoints").exists()


def refused(make: Callable[[], Any], match: str) -> None:
    with pytest.raises((ArgumentError, TypeError), match=match):
        make()


def test_callbacks_that_cannot_go_together_are_refused() -> None:
    one, other = jl.callbacks.ModelCheckpoint, jl.callbacks.ModelCheckpoint
    refused(lambda: trainer_of(one(), enable_checkpointing=False), "enable_checkpointing=False.*ModelCheckpoint")
    refused(lambda: trainer_of([one(), other()]), "two ModelCheckpoints that write to one folder")
    refused(lambda: trainer_of([one("a"), other("b/../a")]), "two ModelCheckpoints that write to one folder")


def test_a_folder_that_is_also_the_default_one_is_refused_before_the_first_step() -> None:
    trainer = trainer_of(
        [jl.callbacks.ModelCheckpoint(), jl.callbacks.ModelCheckpoint("run/checkpoints")], max_epochs=1
    )
    with pytest.raises((ArgumentError, CheckpointError), match="checkpoints"):
        trainer.fit(Line(), batches(1))
    assert trainer.global_step == 0


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"dirpath": 3}, "dirpath.*path, got 3"),
        ({"dirpath": ""}, "dirpath"),
        ({"filename": 3}, "filename.*got 3"),
        ({"filename": ""}, "filename"),
        ({"monitor": 3}, "monitor.*got 3"),
        ({"monitor": ""}, "monitor.*got ''"),
        ({"mode": "auto"}, "mode.*'min' or 'max', got 'auto'"),
        ({"save_top_k": -2}, "save_top_k.*at least -1, got -2"),
        ({"save_top_k": True}, "save_top_k.*got True"),
        ({"save_top_k": 1.0}, r"save_top_k.*got 1\.0"),
        ({"save_top_k": 2}, "save_top_k=2.*without monitor"),
        ({"save_top_k": 0, "save_last": False}, "keeps nothing"),
        ({"save_last": "link"}, "save_last.*got 'link'"),
        ({"every_n_train_steps": 0}, "every_n_train_steps.*at least 1, got 0"),
        ({"every_n_train_steps": 2.5}, r"every_n_train_steps.*got 2\.5"),
        ({"every_n_epochs": 0}, "every_n_epochs.*at least 1, got 0"),
        ({"every_n_epochs": "1"}, "every_n_epochs.*got '1'"),
        ({"train_time_interval": 5}, "ModelCheckpoint.*train_time_interval"),
        ({"train_time_interval": timedelta(seconds=-1)}, "ModelCheckpoint.*train_time_interval"),
        ({"train_time_interval": "soon"}, "ModelCheckpoint.*train_time_interval"),
        ({"save_on_exception": 1}, "save_on_exception.*got 1"),
        ({"on_save_error": "ignore"}, "on_save_error.*'raise' or 'warn', got 'ignore'"),
    ],
)
def test_an_argument_out_of_its_set_is_refused_by_name(arguments: dict[str, Any], match: str) -> None:
    refused(lambda: jl.callbacks.ModelCheckpoint(**arguments), match)


@pytest.mark.parametrize("filename", ["{epoch:.3q}", "{epoch:d", "{}"])
def test_a_filename_that_is_no_format_is_refused_at_once(filename: str) -> None:
    with pytest.raises(ArgumentError, match="filename"):
        jl.callbacks.ModelCheckpoint(filename=filename)
