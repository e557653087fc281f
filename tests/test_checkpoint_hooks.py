"""What callbacks, modules and DataModules put into a checkpoint, and find again."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import CheckpointError, StateError


class Line(jl.TrainModule):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(1))

    def training_step(self, batch: Any) -> Any:
        return jnp.mean((self.w[...] - batch["x"]) ** 2)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.25)


class Counter(jl.Callback):
    """Count batches over all runs, and note what is called at a resume."""

    def __init__(self, kept: Any = None) -> None:
        self.count, self.kept, self.calls = 0, kept, []

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count} if self.kept is None else {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        self.count = state_dict["count"]

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.calls.append(f"on_load_checkpoint {trainer.global_step}")

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.calls.append(f"on_fit_start {self.count}")


BATCHES = [{"x": np.ones((2, 1), np.float32)}] * 3


def train(*callbacks: Any, epochs: int = 1, module: Any = None, data: Any = None, **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"strategy": "single", "enable_checkpointing": True, "default_root_dir": "run", **quiet, **arguments}
    trainer = jl.Trainer(callbacks=list(callbacks), max_epochs=epochs, **given)
    if data is None:
        trainer.fit(module or Line(), BATCHES)
    else:
        trainer.fit(module or Line(), datamodule=data)
    return trainer


def state() -> dict[str, Any]:
    (path,) = Path("run/checkpoints").glob("step_*")
    return json.loads((path / "state.json").read_text())


def test_the_state_of_a_callback_comes_back_before_training() -> None:
    train(Counter())
    again = Counter()
    train(again, epochs=2, resume="auto")
    assert again.calls == ["load_state_dict", "on_load_checkpoint 3", "on_fit_start 3"]
    assert again.count == 6
    train(fresh := Counter(), default_root_dir="other")
    assert fresh.calls == ["on_fit_start 0"]


def test_two_callbacks_of_a_class_get_each_its_own_state() -> None:
    first, second = Counter(), Counter()
    second.count = 10
    train(first, second)
    first, second = Counter(), Counter()
    train(first, second, epochs=2, resume="auto")
    assert (first.count, second.count) == (6, 16)


@pytest.mark.parametrize(
    ("kept", "match"),
    [
        (np.zeros(3), "state_dict of.*Counter.*kept.*ndarray"),
        (jnp.zeros(()), "state_dict of.*Counter.*kept.*Array"),
        ({1: "a"}, "Counter.*kept.*key 1"),
        ([Path("a")], r"Counter.*kept.*0.*PosixPath"),
        ({"a", "b"}, "Counter.*kept.*set"),
        (b"bytes", "Counter.*kept.*bytes"),
        (lambda: None, "Counter.*kept.*function"),
    ],
)
def test_a_state_that_is_no_json_is_refused_by_name_before_the_first_step(kept: Any, match: str) -> None:
    counter = Counter(kept)
    with pytest.raises(CheckpointError, match=match):
        train(counter)
    assert counter.count == 0


@pytest.mark.parametrize(
    "kept", [float("nan"), float("inf"), [1, [2.5, None, True]], {"é": "\ud7ff", "": {}}, np.float32(0.1), 2**70]
)
def test_a_json_state_comes_back_as_it_was(kept: Any) -> None:
    class Take(Counter):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.found = state_dict["kept"]

    train(Take(kept))
    train(again := Take(kept), resume="auto")
    assert json.dumps(again.found) == json.dumps(kept.item() if isinstance(kept, np.generic) else kept)


def test_callbacks_that_are_gone_are_told_and_new_ones_begin_empty(caplog: pytest.LogCaptureFixture) -> None:
    class Other(Counter):
        pass

    train(Counter())
    other = Other()
    train(other, epochs=2, resume="auto")
    (message,) = [r.getMessage() for r in caplog.records if "not among the callbacks" in r.getMessage()]
    assert "Counter" in message and "Other" not in message
    assert other.calls == ["on_load_checkpoint 3", "on_fit_start 0"] and other.count == 3


def test_hooks_of_callbacks_and_modules_put_values_in_and_find_them() -> None:
    found: list[Any] = []

    class Own(jl.Callback):
        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["own"] = {"step": checkpoint["global_step"]}

        def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            found.append(("callback", checkpoint["own"], checkpoint["words"]))

    class Module(Line):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["words"] = ["a", "b"]

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            found.append(("module", checkpoint["own"], checkpoint["words"]))

    train(Own(), module=Module())
    assert state()["own"] == {"step": 3} and state()["words"] == ["a", "b"] and not found
    train(Own(), module=Module(), epochs=2, resume="auto")
    assert found == [("callback", {"step": 3}, ["a", "b"]), ("module", {"step": 3}, ["a", "b"])]


def test_what_a_hook_puts_in_that_is_no_json_is_refused_when_it_does() -> None:
    class Module(Line):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = object()

    counter = Counter()
    with pytest.raises(CheckpointError, match="mine.*object"):
        train(counter, module=Module())
    assert counter.count == 3  # after the first epoch


def test_a_datamodule_keeps_its_state() -> None:
    class Data(jl.DataModule):
        def __init__(self, words: int = 0) -> None:
            self.words = words

        def train_dataloader(self) -> Any:
            return BATCHES

        def state_dict(self) -> dict[str, Any]:
            return {"words": self.words}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.words = state_dict["words"]

    train(data=Data(7))
    again = Data()
    train(data=again, epochs=2, resume="auto")
    assert again.words == 7


def test_an_error_in_load_state_dict_names_the_callback_and_keeps_what_it_raised() -> None:
    class Strict(Counter):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise KeyError("an older version")

    train(Strict())
    with pytest.raises(CheckpointError, match="Strict.load_state_dict") as raised:
        train(Strict(), epochs=2, resume="auto")
    assert repr(raised.value.__cause__) == "KeyError('an older version')"
    assert state()["global_step"] == 3


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
        train(Fails(), Survives(), enable_checkpointing=False)
