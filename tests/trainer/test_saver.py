"""A checkpoint written now: `Trainer.save_checkpoint`, and what `trainer.saver` gives callbacks."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.checkpoints import names, state_of
from kit.inside import files
from kit.journal import hooks
from kit.modules import Mean
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError, StateError
from jaxlit.testing import faults


def weight_in(path: Any) -> float:
    return float(Mean.load_from_checkpoint(path).w[...][0])


@pytest.fixture
def trained() -> jl.Trainer:
    """One step has been taken, and nothing is on the disk but the run's own folder."""
    return fit(Mean(), numbered(1), default_root_dir="run")


def test_a_checkpoint_can_be_saved_in_hooks_and_after_fit() -> None:
    save = hooks(
        on_train_batch_end=lambda t, m, *_: t.save_checkpoint(f"kept/batch_{t.global_step}"),
        on_train_epoch_end=lambda t, m: t.save_checkpoint(Path("kept") / f"epoch_{t.current_epoch}"),
    )
    given: Any = {"max_epochs": 2, "enable_checkpointing": False}
    fit(Mean(), numbered(2), None, save, default_root_dir="run", **given).save_checkpoint("kept/end_4")
    steps = {f"batch_{k}": k for k in range(1, 5)} | {"epoch_0": 2, "epoch_1": 4, "end_4": 4}
    assert names("kept") == sorted(steps)
    for name, step in steps.items():
        assert weight_in(f"kept/{name}") == mean([[1.0], [2.0], [1.0], [2.0]][:step]), name
        again = fit(Mean(), numbered(2), default_root_dir=f"again/{name}", ckpt_path=f"kept/{name}", **given)
        assert again.global_step == 4 and float(again.module.w[...][0]) == mean([[1.0], [2.0]] * 2), name


def test_there_is_nothing_to_save_before_fit() -> None:
    trainer = make_trainer()
    for _ in range(2):
        with pytest.raises(CheckpointError, match="no training to save.*hook of fit, or after it"):
            trainer.save_checkpoint("end")
        trainer.validate(Mean(), numbered(1))
    assert not Path("end").exists()


def test_after_a_second_fit_that_failed_in_its_setup_the_state_of_the_first_can_be_saved(trained: jl.Trainer) -> None:
    class Bad(jl.DataModule):
        def setup(self, stage: str) -> None:
            raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        trained.fit(Mean(), datamodule=Bad())
    trained.save_checkpoint("kept")
    assert state_of("kept")["global_step"] == 1 and weight_in("kept") == 0.5


def test_a_folder_that_is_no_checkpoint_is_not_overwritten(trained: jl.Trainer) -> None:
    Path("mine").mkdir()
    Path("mine/thesis.txt").write_text("years")
    for path in ("mine", ".", "run", "run/checkpoints"):
        with pytest.raises(ArgumentError, match="no checkpoint, and would be overwritten"):
            trained.save_checkpoint(path)
    assert Path("mine/thesis.txt").read_text() == "years" and names() == ["step_00000001"]


def test_a_checkpoint_that_is_there_is_replaced_by_a_whole_one(trained: jl.Trainer) -> None:
    trained.save_checkpoint("mine")
    again = fit(Mean(), numbered(1), default_root_dir="other", max_epochs=2, ckpt_path="mine")
    full = pytest.raises(CheckpointError, match="mine could not be written: .*No space left")
    with faults(".", at=1, kind="full"), full:
        again.save_checkpoint("mine")
    assert weight_in("mine") == 0.5
    again.save_checkpoint("mine")
    assert weight_in("mine") == 0.75 and names(".") == ["mine", "other", "run"]


@pytest.mark.parametrize("path", [3, "", None])
def test_a_path_that_is_none_is_refused(path: Any, trained: jl.Trainer) -> None:
    with pytest.raises(ArgumentTypeError, match=r"save_checkpoint\(path\) takes a path, got"):
        trained.save_checkpoint(path)


def test_a_checkpoint_taken_in_a_hook_has_what_the_hook_has_just_written_to_the_module() -> None:
    def write(trainer: Any, module: Any) -> None:
        module.w[...] = jnp.full(1, 7.0)
        trainer.save_checkpoint("mine")

    fit(Mean(), numbered(1), None, hooks(on_train_epoch_start=write))
    assert weight_in("mine") == 7.0


def test_a_hook_that_survives_an_error_inside_it_goes_on_as_itself() -> None:
    """A save in it fails in a hook of another name; what it writes and logs then is still its own."""

    class Fails(jl.Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            raise OSError("no room")

    class Survives(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            with pytest.raises(OSError, match="no room"):
                trainer.save_checkpoint("mine")
            module.w[...] = jnp.ones(1)

    with pytest.raises(StateError, match=r"Survives\.on_train_batch_end wrote to w\."):
        fit(Mean(), numbered(1), None, Fails(), Survives(), enable_checkpointing=False)


def test_orders_go_on_behind_those_of_the_folder_and_the_parts_write_in_the_background() -> None:
    saved: list[tuple[Any, Any]] = []

    def begin(trainer: Any, module: Any, *_: Any) -> None:
        trainer.saver.check()
        saving = trainer.saver.begin(f"kept/step_0000000{9 - trainer.global_step}")
        saving.wait()
        trainer.saver.announce(writer, saving.path)

    writer = hooks(on_train_batch_end=begin)
    heard = hooks(on_checkpoint_saved=lambda t, m, callback, path: saved.append((callback, path)))
    fit(Mean(), numbered(3), None, writer, heard, enable_checkpointing=False)
    assert [files.manifest.order_of(Path(f"kept/step_0000000{k}")) for k in (8, 7, 6)] == [1, 2, 3]
    assert saved == [(writer, Path(f"kept/step_0000000{k}").absolute()) for k in (8, 7, 6)]
    assert files.newest(Path("kept"))[0].state["global_step"] == 3  # type: ignore[union-attr]
