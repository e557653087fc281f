"""A checkpoint written now: `Trainer.save_checkpoint`, and what `trainer.saver` gives a writer of one's own."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.checkpoints import names, state_of
from kit.faults import faults
from kit.inside import files
from kit.journal import hooks
from kit.modules import Mean
from kit.refusals import refuses
from kit.trainers import BARE, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError, CheckpointError, DataError
from jaxlit.trainer.saver import Saver


def weight_in(path: Any) -> float:
    return float(Mean.load_from_checkpoint(path).w[...][0])


def written(folder: str = "kept") -> set[str]:
    return {path.parent.name for path in Path(folder).glob("*/MANIFEST.json")}


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
    trainer = fit(Mean(), numbered(2), None, save, default_root_dir="run", **given)
    trainer.save_checkpoint("kept/end_4")
    steps = {f"batch_{k}": k for k in range(1, 5)} | {"epoch_0": 2, "epoch_1": 4, "end_4": 4}
    assert names("kept") == sorted(steps)
    for name, step in steps.items():
        assert weight_in(f"kept/{name}") == mean([[1.0], [2.0], [1.0], [2.0]][:step]), name
    for name in ("batch_1", "epoch_0"):
        again = fit(Mean(), numbered(2), default_root_dir=f"again/{name}", ckpt_path=f"kept/{name}", **given)
        assert again.global_step == 4 and float(again.module.w[...][0]) == mean([[1.0], [2.0]] * 2), name
    # Whatever is written to the module after the fit, what is saved is the training; a validation changes nothing.
    trainer.module.w[...] = jnp.zeros(1)
    trainer.callbacks = [hooks(on_validation_end=lambda t, m: t.saver.begin("kept/validated").wait())]
    trainer.validate(trainer.module, numbered(1))
    assert state_of("kept/validated")["global_step"] == 4 and weight_in("kept/validated") == weight_in("kept/end_4")
    assert not trainer.module.w[...].any()


def test_there_is_nothing_to_save_before_a_fit() -> None:
    told: list[Any] = []

    def ask(trainer: jl.Trainer, module: Any, stage: str) -> None:
        told.append((trainer.global_step, trainer.current_epoch, trainer.saver.has_trained))
        with pytest.raises(AttributeError, match=r"trainer\.state is there from fit on"):
            _ = trainer.state
        refuses(CheckpointError, lambda: trainer.saver.begin("kept/a"), "no training to save")
        words = r"callback of the newest fit that keeps arrays, got"
        refuses(ArgumentError, lambda: trainer.callback_arrays(asks), words)

    asks = hooks(
        setup=ask,
        init_arrays=lambda params: {"count": jnp.zeros(())},
        update_arrays=lambda arrays, params, grads, global_step: ({"count": arrays["count"] + 1}, params),
    )
    trainer = make_trainer()
    trainer.validate(Mean(), numbered(1))
    refuses(CheckpointError, lambda: trainer.save_checkpoint("end"), "no training to save.*hook of fit, or after")
    assert not Path("end").exists()
    trainer.callbacks.append(asks)
    for _ in range(2):
        trainer.fit(Mean(), numbered(3))
        counts = (trainer.global_step, int(trainer.state.step), float(trainer.callback_arrays(asks)["count"]))
        assert counts == (3, 3, 3)
    assert told == [(0, 0, False)] * 2 and not Path("kept").exists()


def test_a_fit_that_could_not_begin_keeps_the_one_before(trained) -> None:
    class Bad(jl.DataModule):
        def setup(self, stage: str) -> None:
            raise ValueError("no data")

    told: list[Any] = []
    trained.callbacks = [hooks(on_exception=lambda t, m, error: told.append((t.global_step, t.saver.has_trained)))]
    module = trained.module
    for kind, given in ((DataError, {"train_dataloaders": []}), (ValueError, {"datamodule": Bad()})):
        with pytest.raises(kind):
            trained.fit(Mean(), **given)
    assert told == [(0, False)] * 2
    assert (trained.global_step, trained.current_epoch, trained.saver.has_trained) == (1, 1, True)
    assert trained.module is module
    trained.save_checkpoint("kept")
    assert state_of("kept")["global_step"] == 1 and weight_in("kept") == 0.5


def test_a_checkpoint_has_what_its_hook_wrote_to_the_module() -> None:
    def write(trainer: Any, module: Any, *_: Any) -> None:
        module.w[...] = jnp.full(1, 7.0)
        trainer.save_checkpoint("mine")

    fit(Mean(), numbered(1), None, hooks(on_safe_point=write))
    assert weight_in("mine") == 7.0


@pytest.mark.parametrize("at", thinned([0, 1, 10, 30], 0, 10))
def test_the_writer_of_the_docstring_announces_what_it_saved(at) -> None:
    lines = [line.strip() for line in (Saver.__doc__ or "").splitlines()]
    code = "\n".join(line[4:] for line in lines if line.startswith((">>>", "...")))
    exec(code.replace("% 100", "% 2"), scope := dict[str, Any]())
    heard: dict[str, bool] = {}
    hears = hooks(on_checkpoint_saved=lambda t, m, c, path: heard.update({path.name: path.name in written()}))
    with contextlib.ExitStack() as stack:
        if at:
            stack.enter_context(pytest.raises(CheckpointError, match="could not be written"))
            stack.enter_context(faults("kept", at=at, kind="full"))
        fit(Mean(), numbered(6), None, scope["EveryHundred"](), hears, enable_checkpointing=False)
    assert all(heard.values()) and heard.keys() == written()
    assert at or heard.keys() == {"at_2", "at_4", "at_6"}


def test_the_end_of_a_run_waits_for_open_checkpoints(monkeypatch) -> None:
    seal, torn_down = files.seal, threading.Event()

    def late(*arguments: Any) -> None:
        assert torn_down.wait(60)
        seal(*arguments)

    monkeypatch.setattr(files, "seal", late)
    leaves = hooks(on_fit_end=lambda t, m: t.saver.begin("kept/end"), teardown=lambda t, m, stage: torn_down.set())
    fit(Mean(), numbered(2), None, leaves, enable_checkpointing=False)
    assert written() == {"end"}


@pytest.mark.parametrize("other", [None, RuntimeError("the first")])
def test_a_failed_save_is_raised_or_noted_after_teardown(other) -> None:
    torn: list[str] = []
    stack = contextlib.ExitStack()

    def leave(trainer: jl.Trainer, module: Any) -> None:
        with faults("counted") as seen:
            trainer.saver.begin("counted/a").wait()
        # The disk is full from where only the background writes.
        at = next(i for i, (_, name) in enumerate(seen.operations, 1) if "state.json" in name)
        stack.enter_context(faults("kept", at=at, kind="full"))
        trainer.saver.begin("kept/a")
        if other is not None:
            raise other

    last = hooks(on_fit_end=leave, teardown=lambda t, m, stage: torn.append(stage))
    with stack, pytest.raises((CheckpointError, RuntimeError)) as raised:
        fit(Mean(), numbered(1), None, last, enable_checkpointing=False)
    assert torn == ["fit"]
    if other is None:
        assert "kept/a could not be written" in str(raised.value)
    else:
        place, note = raised.value.__notes__
        assert raised.value is other and place.startswith("It was raised by Made.on_fit_end ")
        assert "begun before failed as well: CheckpointError(" in note


def test_an_order_follows_those_of_the_folder() -> None:
    saved: list[tuple[Any, Any]] = []
    writer = hooks(on_checkpoint_saved=lambda t, m, callback, path: saved.append((callback, path)))
    trained = fit(Mean(), numbered(1), None, writer, enable_checkpointing=False)
    trained.saver.check()
    trained.saver.begin("kept/step_00000006", 7).wait()
    trained.saver.begin("other/step_00000006").wait()  # the one before is not among those that are being written
    savings = [trained.saver.begin(f"{folder}/step_0000000{k}") for folder, k in (("kept", 3), ("kept", 2), ("b", 1))]
    for saving in savings:
        saving.wait()
        trained.saver.announce(writer, saving.path)
    names = [f"{folder}/step_0000000{k}" for folder, k in (("kept", 6), ("kept", 3), ("kept", 2), ("b", 1))]
    assert [files.order_of(Path(name)) for name in names] == [7, 8, 9, 1]
    assert files.newest(Path("kept"))[0].path.name == "step_00000002"
    trained.saver.announce(writer, "kept/a")  # named as begin would name it
    assert saved == [(writer, path) for path in (*[x.path for x in savings], Path.cwd() / "kept" / "a")]


def test_of_two_saves_to_one_path_the_second_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ends before the second begins, and deletes nothing of it."""
    goes_on, real = threading.Event(), files.seal

    def seal(*arguments: Any) -> None:
        assert goes_on.wait(60)
        real(*arguments)

    monkeypatch.setattr(files, "seal", seal)

    def save_twice(trainer: Any, module: Any) -> None:
        first = trainer.saver.begin("kept")
        threading.Timer(0.2, goes_on.set).start()
        second = trainer.saver.begin("kept")
        assert first.is_done
        first.wait()
        second.wait()

    fit(Mean(), numbered(1), None, hooks(on_train_end=save_twice), **BARE)
    assert files.read(Path("kept").absolute()).state["global_step"] == 1
