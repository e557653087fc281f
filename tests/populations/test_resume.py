"""A population that is cut and resumed is the one that was not, bit by bit."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from kit.batches import numbered, random
from kit.checkpoints import data_of
from kit.compiles import compiles
from kit.modules import module
from kit.processes import launch
from kit.refusals import refuses
from kit.resume_model import Stopped
from kit.swept import Swept
from kit.trainers import thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError, CheckpointError

VARIATIONS = [{"seed": i, "lr": 0.02 * (i + 1)} for i in range(2)]


def loader() -> jl.ArrayLoader:
    x = {key: np.concatenate([batch[key] for batch in random(7)]) for key in ("x", "y")}
    return jl.ArrayLoader(x, 10, shuffle=True)


def population(**arguments: Any) -> Any:
    stop = jl.callbacks.EarlyStopping("val", patience=1, min_delta=0.05)
    given = {"variations": VARIATIONS, "max_epochs": 3, "log_every_n_steps": 1, "early_stopping": stop}
    return jl.fit_many(Swept, train_dataloaders=loader(), val_dataloaders=random(7)[:2], **given | arguments)


def assert_same_bits(a: Any, b: Any) -> None:
    for x, y in zip(a._leaves, b._leaves, strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    assert a.rows() == b.rows()
    assert a.ended == b.ended
    assert str(a) == str(b)


def cut_after(rows: int) -> Any:
    left = iter(range(rows - 1))

    def log(*_: Any) -> None:
        if next(left, None) is None:
            raise Stopped

    return log


@pytest.fixture(scope="module")
def whole() -> Any:
    result = population()
    assert {x.steps for x in result._statuses} == {12, 18}  # members that ended are in the checkpoints
    return result


@pytest.fixture(scope="module")
def two_epochs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a population that was trained for two epochs, with a checkpoint of each."""
    folder = tmp_path_factory.mktemp("two_epochs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxlit.checkpoints.files.remove", lambda path: None)
        population(default_root_dir=folder, max_epochs=2)
    return folder


@pytest.fixture
def run_dir(two_epochs: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(two_epochs, tmp_path / "run"))


@pytest.mark.parametrize("rows", thinned([7, 22, 32], full=[22, 32]))
def test_resume_in_an_epoch_gives_the_same_bits(rows: int, whole: Any, tmp_path: Path) -> None:
    """An epoch has 6 batches, the last one shorter, and a checkpoint after every second one."""
    with pytest.raises(Stopped):
        population(default_root_dir=tmp_path, every_n_train_steps=2, log=cut_after(rows))
    assert_same_bits(population(default_root_dir=tmp_path, every_n_train_steps=2, resume="auto"), whole)


@pytest.mark.full
def test_a_finished_population_is_read_and_not_trained(whole: Any, run_dir: Path) -> None:
    assert_same_bits(population(default_root_dir=run_dir, resume="auto"), whole)
    with compiles() as programs:
        assert_same_bits(population(default_root_dir=run_dir, resume="auto"), whole)
    assert "jit(train_step)" not in programs


@pytest.mark.full
def test_resume_on_other_devices_continues(whole: Any, run_dir: Path) -> None:
    again = population(default_root_dir=run_dir, resume="auto", devices=1)
    assert len(whole._leaves[0].sharding.device_set) == 2
    for x, y in zip(again._leaves, whole._leaves, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_the_newest_checkpoint_is_kept(tmp_path: Path) -> None:
    population(default_root_dir="other/../run", every_n_train_steps=2, max_epochs=1)
    assert [path.name for path in (tmp_path / "run" / "population").glob("step_*")] == ["step_00000006"]


@pytest.mark.full
def test_a_damaged_checkpoint_is_passed_over(whole: Any, run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    damaged = run_dir / "population" / "step_00000012"
    later = Path(shutil.copytree(damaged, damaged.with_name("step_00000099")))  # which no later one replaces
    (later / "MANIFEST.json").write_text("{}")
    state = data_of(damaged) / "state.json"
    state.write_text(state.read_text().replace("0.0", "0.1", 1))
    assert_same_bits(population(default_root_dir=run_dir, resume="auto"), whole)
    assert later.name in caplog.text
    assert damaged.name in caplog.text
    (last,) = (run_dir / "population").glob("step_*")
    assert last.name == "step_00000018"
    (last / "MANIFEST.json").write_text("{}")
    refuses(CheckpointError, lambda: population(default_root_dir=run_dir, resume="auto"), "can be used")


def test_what_cannot_be_resumed_is_refused(run_dir: Path) -> None:
    again = {"default_root_dir": run_dir, "max_epochs": 3}
    refuses(ArgumentError, lambda: population(**again), "resume='auto'", str(run_dir))
    other = [{**x, "lr": x["lr"] * 2} for x in VARIATIONS]
    refuses(CheckpointError, lambda: population(**again, resume="auto", variations=other), "'lr': '0.02'", "'0.04'")
    fewer = VARIATIONS[:1]
    refuses(CheckpointError, lambda: population(**again, resume="auto", variations=fewer), "'seed': '1'", "None")
    refuses(ArgumentError, lambda: population(resume="auto"), "needs default_root_dir")
    refuses(ArgumentError, lambda: population(every_n_train_steps=3), "needs default_root_dir")
    refuses(ArgumentError, lambda: population(resume="yes", default_root_dir=run_dir), "takes None or 'auto'")


def test_other_contents_of_the_same_text_are_not_resumed(tmp_path: Path) -> None:
    def train(rate: float) -> None:
        variations = [{"tx": optax.sgd(rate)}, {"tx": optax.sgd(0.2)}]
        jl.fit_many(
            lambda tx: module(tx=tx), variations, numbered(1), max_epochs=1, default_root_dir=tmp_path, resume="auto"
        )

    train(0.1)
    train(0.1)
    refuses(CheckpointError, lambda: train(0.3), "its variations one is .'tx'", "checksum")


def train_until_killed() -> None:
    """End the process as a power cut does, in the second epoch, while or after a checkpoint is written."""

    def kill(member: int, step: int, metrics: dict[str, float]) -> None:
        if step == 9:
            os.kill(os.getpid(), signal.SIGKILL)

    population(default_root_dir="run", every_n_train_steps=2, log=kill)


@pytest.mark.full
def test_a_population_that_was_killed_continues_with_the_same_bits(whole: Any, tmp_path: Path) -> None:
    (ended,) = launch(train_until_killed, tmp_path, count=1, devices=4, join=False)
    assert ended.code == -signal.SIGKILL, ended.errors
    (newest, *_) = sorted((tmp_path / "run" / "population").glob("step_*"), reverse=True)
    assert newest.name in ("step_00000006", "step_00000008")
    again = population(default_root_dir=tmp_path / "run", every_n_train_steps=2, resume="auto")
    assert_same_bits(again, whole)
