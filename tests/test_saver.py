"""`trainer.saver`: what a checkpoint writer of one's own may rely on."""

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.checkpoints import manifest
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError
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


# Where there is a fit to save ------------------------------------------------------------------------


def test_while_a_second_fit_is_set_up_there_is_nothing_of_the_first() -> None:
    told: list[Any] = []

    class Asks(jl.Callback):
        def setup(self, trainer: Any, module: Any, stage: str) -> None:
            told.append((trainer.global_step, trainer.current_epoch, trainer.saver.has_trained))
            with pytest.raises(AttributeError, match=r"trainer\.state is there from fit on"):
                _ = trainer.state
            with pytest.raises(CheckpointError, match="no training to save"):
                trainer.saver.begin("kept/a")
            with pytest.raises(ArgumentError, match=r"callback of the newest fit that keeps arrays, \[\] here"):
                trainer.callback_arrays(self)

        def init_arrays(self, params: Any) -> Any:
            return {"count": jnp.zeros(())}

        def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> Any:
            return {"count": arrays["count"] + 1}, params

    trainer, asks = make_trainer(), Asks()
    trainer.callbacks = [asks]
    for _ in range(2):
        trainer.fit(Line(), BATCHES)
        assert (trainer.global_step, int(trainer.state.step), float(trainer.callback_arrays(asks)["count"])) == (
            6,
            6,
            6,
        )
    assert told == [(0, 0, False)] * 2
    assert not Path("kept").exists()


def test_a_fit_that_could_not_begin_has_trained_nothing_and_loses_nothing_of_the_one_before() -> None:
    class Saves(jl.Callback):
        def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
            told.append((trainer.global_step, trainer.saver.has_trained))

    told: list[Any] = []
    trainer = trained(Saves())
    module, epochs = trainer.module, trainer.current_epoch
    with pytest.raises(jl.errors.DataError):
        trainer.fit(Line(), [])
    assert told == [(0, False)]
    assert (trainer.global_step, trainer.current_epoch, trainer.saver.has_trained) == (6, epochs, True)
    assert trainer.module is module
    trainer.save_checkpoint("kept/after")
    assert state_at("kept/after")["global_step"] == 6


def test_a_validation_saves_the_fit_before_it() -> None:
    class Saves(jl.Callback):
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            trainer.saver.begin("kept/a").wait()

    trainer, module = make_trainer(), Line()
    trainer.fit(module, BATCHES)
    trainer.callbacks = [Saves()]
    trainer.validate(module, BATCHES)
    assert state_at("kept/a")["global_step"] == 6


# Checkpoints that nobody waits for -------------------------------------------------------------------


class Leaves(jl.Callback):
    """Begins checkpoints and forgets them."""

    def on_safe_point(self, trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
        trainer.saver.begin(f"kept/at_{trainer.global_step}")


def test_the_end_of_a_run_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = manifest.seal
    monkeypatch.setattr(manifest, "seal", lambda *args: (time.sleep(0.3), seal(*args)))
    make_trainer(Leaves()).fit(Line(), BATCHES)
    assert {path.parent.name for path in Path().glob("kept/*/MANIFEST.json")} == {f"at_{k}" for k in range(1, 7)}


def test_one_that_could_not_be_written_is_raised_behind_teardown() -> None:
    torn: list[str] = []

    class Last(jl.Callback):
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            self.fault = jl.testing.faults("kept", at=in_background(trainer), kind="full")
            self.fault.__enter__()
            trainer.saver.begin("kept/a")

        def teardown(self, trainer: Any, module: Any, stage: str) -> None:
            torn.append(stage)

    last = Last()
    try:
        with pytest.raises(CheckpointError, match="kept/a could not be written"):
            make_trainer(last).fit(Line(), BATCHES)
    finally:
        last.fault.__exit__(None, None, None)
    assert torn == ["fit"]


def test_one_that_could_not_be_written_is_noted_on_the_error_of_the_fit() -> None:
    class Both(jl.Callback):
        def on_fit_end(self, trainer: Any, module: Any) -> None:
            self.fault = jl.testing.faults("kept", at=in_background(trainer), kind="full")
            self.fault.__enter__()
            trainer.saver.begin("kept/a")
            raise RuntimeError("the first")

    both = Both()
    try:
        with pytest.raises(RuntimeError, match="the first") as raised:
            make_trainer(both).fit(Line(), BATCHES)
    finally:
        both.fault.__exit__(None, None, None)
    (note,) = raised.value.__notes__
    assert "begun before failed as well: CheckpointError(" in note and "kept/a could not be written" in note


# Arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["x", 1.5, True, -1])
def test_an_order_that_is_no_count_is_refused(order: Any) -> None:
    trainer = trained()
    error = ArgumentError if order == -1 else ArgumentTypeError
    with pytest.raises(error, match=r"^trainer\.saver\.begin\(order=\.\.\.\) takes an int of at least 0, got "):
        trainer.saver.begin("kept/a", order)
    assert not Path("kept").exists()


def test_an_order_is_written_as_it_is_given() -> None:
    trainer = trained()
    trainer.saver.begin("kept/step_00000006", 7).wait()
    trainer.saver.begin("kept/step_00000007").wait()
    assert [order_of(f"kept/step_0000000{k}") for k in (6, 7)] == [7, 8]


def test_two_that_are_written_at_once_have_an_order() -> None:
    trainer = trained()
    savings = [trainer.saver.begin(f"kept/step_0000000{k}") for k in (1, 2, 3)]
    savings.append(trainer.saver.begin("other/step_00000001"))
    for saving in savings:
        saving.wait()
    assert [order_of(f"kept/step_0000000{k}") for k in (1, 2, 3)] == [1, 2, 3]
    assert order_of("other/step_00000001") == 1


@pytest.mark.parametrize("path", [3, "", None])
def test_a_path_that_is_none_is_refused_by_the_name_that_was_called(path: Any) -> None:
    trainer, callback = trained(), jl.Callback()
    for call, name in (
        (lambda: trainer.saver.begin(path), r"trainer\.saver\.begin"),
        (lambda: trainer.saver.announce(callback, path), r"trainer\.saver\.announce"),
        (lambda: trainer.save_checkpoint(path), r"Trainer\.save_checkpoint"),
    ):
        with pytest.raises(ArgumentTypeError, match=rf"^{name}\(path\) takes a path, got {path!r}\. Pass"):
            call()


def test_only_a_callback_announces() -> None:
    with pytest.raises(ArgumentTypeError, match=r"takes the callback that wrote the checkpoint, got 'me'\. Pass self"):
        trained().saver.announce("me", "kept/a")  # type: ignore[arg-type]


def test_a_relative_path_is_announced_as_begin_would_name_it() -> None:
    class Where(jl.Callback):
        def on_checkpoint_saved(self, trainer: Any, module: Any, callback: Any, path: Path) -> None:
            self.found = path, callback

    where = Where()
    trainer = trained(where)
    trainer.saver.announce(where, "kept/a")
    assert where.found == (Path.cwd() / "kept" / "a", where)
