"""Checkpoints with the module's arrays alone: for evaluations and new trainings, never to continue from."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from kit.batches import random
from kit.by_hand import assert_same, params_of
from kit.checkpoints import state_of
from kit.modules import Net
from kit.trainers import fit, splitting, thinned

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint
from jaxlit.errors import ArgumentError, CheckpointError

PATH = Path("run/checkpoints/step_00000003")


def trained(*callbacks: jl.Callback, strategy: Any = "single", **given: Any) -> jl.Trainer:
    callbacks = callbacks or (ModelCheckpoint(save_weights_only=True),)
    given = {"default_root_dir": "run"} | given
    return fit(Net(rngs=nnx.Rngs(0)), random(3), random(1), *callbacks, strategy=strategy, **given)


def names(path: Path) -> list[str]:
    return [name for name, _, _ in state_of(path)["arrays"]]


def test_it_has_the_arrays_of_the_module_alone() -> None:
    trained()
    assert {name.split(".")[0] for name in names(PATH)} == {"module"}
    assert len(names(PATH)) == 13
    trained(ModelCheckpoint(), default_root_dir="full")
    full = Path("full/checkpoints/step_00000003")
    assert {name for name in names(full) if name.startswith("module.")} == {*names(PATH)}
    small, large = (sum(x.stat().st_size for x in path.rglob("*") if x.is_file()) for path in (PATH, full))
    assert small < large


def test_a_call_saves_weights_too() -> None:
    trainer = trained(ModelCheckpoint())
    trainer.save_checkpoint("one", weights_only=True)
    assert {name.split(".")[0] for name in names(Path("one"))} == {"module"}
    assert_same(params_of(Net.load_from_checkpoint("one")), params_of(trainer.module), rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="has weights only"):
        fit(Net(rngs=nnx.Rngs(0)), random(3), ckpt_path="one")


@pytest.mark.parametrize("strategy", thinned(["fsdp", "single", "shard_map", "pmap"], "single"))
def test_evaluations_modules_and_new_trainings_take_it(strategy: str) -> None:
    trainer = trained(strategy=splitting(strategy))
    expected = params_of(trainer.module)
    assert_same(params_of(Net.load_from_checkpoint(PATH, rngs=nnx.Rngs(1))), expected, rtol=0, atol=0)
    (before,) = trainer.validate(dataloaders=random(1))
    other = jl.Trainer(strategy=splitting(strategy), logger=False, enable_progress_bar=False)
    for path in (PATH, "run", "run/best"):
        (after,) = other.validate(jl.lazy(Net), random(1), ckpt_path=path)
        np.testing.assert_allclose(after["val"], before["val"], rtol=1e-6)
    start: list[Any] = []
    look = jl.callbacks.LambdaCallback(on_fit_start=lambda trainer, module: start.append(params_of(module)))
    fit(jl.lazy(Net), random(1), None, look, init_from="run", strategy=splitting(strategy))
    assert_same(start[0], expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "given",
    [{"resume": "run"}, {"resume": PATH}, {"resume": "auto", "default_root_dir": "run"}, {"ckpt_path": "run"}],
    ids=str,
)
def test_no_training_continues_from_it(given: dict[str, Any]) -> None:
    trained()
    with pytest.raises(CheckpointError, match=r"step_00000003 has weights only, .*fit\(init_from=path\)"):
        fit(Net(rngs=nnx.Rngs(0)), random(3), max_epochs=2, **given)


def test_a_run_that_is_to_be_resumed_saves_more_than_weights() -> None:
    with pytest.raises(ArgumentError, match=r"nothing to continue from .*ModelCheckpoint\(dirpath"):
        trained(resume="auto")
    both = [ModelCheckpoint(save_weights_only=True, dirpath="weights"), ModelCheckpoint()]
    trained(*both, resume="auto")
    shutil.copytree("run/checkpoints", "before")
    expected = params_of(trained(*both, resume="auto", max_epochs=2).module)
    assert_same(params_of(Net.load_from_checkpoint("weights")), expected)
    shutil.rmtree("run/checkpoints")
    shutil.move("before", "run/checkpoints")  # killed after the first of the two had written
    # The run's own folder has fewer batches: the resume takes it all the same, as nothing continues from the other.
    trainer = trained(*both, ckpt_path="last", max_epochs=2)
    assert trainer.global_step == 6
    assert_same(params_of(trainer.module), expected, rtol=0, atol=0)


def test_a_run_with_weights_but_no_full_checkpoint_yet_starts_again(capsys: pytest.CaptureFixture[str]) -> None:
    make = lambda: [ModelCheckpoint(save_weights_only=True, dirpath="weights"), ModelCheckpoint()]  # noqa: E731
    expected = params_of(trained(*make(), resume="auto").module)
    shutil.rmtree("run/checkpoints")  # killed after the first of the two had written
    capsys.readouterr()
    trainer = trained(*make(), resume="auto")
    assert "resume: no checkpoint in run/checkpoints, starting from scratch" in capsys.readouterr().out
    assert trainer.global_step == 3
    assert_same(params_of(trainer.module), expected, rtol=0, atol=0)


def test_the_last_lines_do_not_offer_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    trained()
    out = capsys.readouterr().out
    assert "  checkpoint  run/checkpoints/step_00000003" in out
    assert "  resume" not in out


def test_a_rollback_does_not_go_back_to_weights() -> None:
    class Bad(Net):
        def training_step(self, batch: Any) -> jax.Array:
            return super().training_step(batch) * jax.numpy.where(self.global_step == 2, np.nan, 1.0)

    weights = ModelCheckpoint(save_weights_only=True, every_n_train_steps=1)
    with pytest.raises(jl.errors.NonFiniteError, match="There is no checkpoint yet to go back to"):
        fit(Bad(rngs=nnx.Rngs(0)), random(3), None, weights, nan_policy="rollback")
