"""`trainer.saver`: what a checkpoint writer of one's own may rely on."""

import json
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import CheckpointError
from jaxlit.trainer.saver import Saver

BATCHES = [{"x": np.full((2, 1), k, np.float32)} for k in range(6)]
QUIET = {"strategy": "single", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Line(jl.TrainModule):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean((self.w[...] - batch["x"]) ** 2)

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.w[0] + 0 * batch["x"].mean())

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.25)


def make_trainer(*callbacks: Any, **arguments: Any) -> jl.Trainer:
    given = {"max_epochs": 1, "enable_checkpointing": False, **QUIET, **arguments}
    return jl.Trainer(callbacks=list(callbacks), **given)


def trained(*callbacks: Any) -> jl.Trainer:
    trainer = make_trainer(*callbacks)
    trainer.fit(Line(), BATCHES)
    return trainer


def state_at(path: str) -> dict[str, Any]:
    return json.loads(Path(path, "state.json").read_text())


def order_of(path: str) -> int:
    return json.loads(Path(path, "MANIFEST.json").read_text())["order"]


class Hears(jl.Callback):
    """Notes which checkpoints were announced, and whether they were there."""

    def __init__(self) -> None:
        self.heard: dict[str, bool] = {}

    def on_checkpoint_saved(self, trainer: Any, module: Any, callback: Any, path: Path) -> None:
        self.heard[path.name] = (path / "MANIFEST.json").exists()


def in_background(trainer: jl.Trainer) -> int:
    """Return the operation at which a full disk is met only once `begin` has returned."""
    with jl.testing.faults("counted") as seen:
        trainer.saver.begin("counted/a").wait()
    return next(i for i, (_, name) in enumerate(seen.operations, 1) if name.endswith("state.json"))


def test_every_wait_for_a_checkpoint_that_could_not_be_written_raises() -> None:
    trainer = trained()
    with jl.testing.faults("kept", at=in_background(trainer), kind="full"):
        saving = trainer.saver.begin("kept/a")
        for _ in range(3):
            with pytest.raises(CheckpointError, match="kept/a could not be written"):
                saving.wait()
    assert not Path("kept/a").exists()


def of_the_docstring() -> Any:
    """Return the writer that the docstring of `Saver` shows, saving at every second step."""
    lines = [line.strip() for line in (Saver.__doc__ or "").splitlines()]
    code = "\n".join(line[4:] for line in lines if line.startswith((">>>", "...")))
    found: dict[str, Any] = {}
    exec(code.replace("% 100", "% 2"), found)
    return found["EveryHundred"]()


@pytest.mark.parametrize("at", [1, 10, 20, 30])
def test_the_writer_of_the_docstring_announces_what_is_there_and_nothing_else(at: int) -> None:
    hears = Hears()
    with jl.testing.faults("kept", at=at, kind="full"), pytest.raises(CheckpointError, match="could not be written"):
        make_trainer(of_the_docstring(), hears).fit(Line(), BATCHES)
    assert all(hears.heard.values())
    left = {path.parent.name for path in Path().glob("kept/*/MANIFEST.json")}
    assert hears.heard.keys() == left


def test_the_writer_of_the_docstring_writes() -> None:
    hears = Hears()
    make_trainer(of_the_docstring(), hears).fit(Line(), BATCHES)
    assert hears.heard == {"at_2": True, "at_4": True, "at_6": True}
