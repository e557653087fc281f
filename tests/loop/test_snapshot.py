"""What callbacks, modules and DataModules put into a checkpoint, and find again."""

import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import numbered
from kit.checkpoints import state_of
from kit.journal import hooks
from kit.modules import Mean, module
from kit.trainers import fit

import jaxlit as jl
from jaxlit.callbacks import EarlyStopping
from jaxlit.errors import CheckpointError


class Counter(jl.Callback):
    """Count batches over all runs, and note what is called at a resume."""

    def __init__(self, kept: Any = None) -> None:
        self.count, self.kept, self.calls = 0, kept, list[str]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count} if self.kept is None else {"kept": self.kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append("load_state_dict")
        self.count, self.found = state_dict.get("count", 0), state_dict.get("kept")

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.calls.append(f"on_load_checkpoint {trainer.global_step}")

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.calls.append(f"on_fit_start {self.count}")


def train(*callbacks: Any, epochs: int = 1, module: Any = None, data: Any = None, **arguments: Any) -> jl.Trainer:
    given = {"default_root_dir": "run", "max_epochs": epochs} | arguments
    batches = numbered(3) if data is None else data
    return fit(module or Mean(), batches, None, *callbacks, **given)


def state() -> dict[str, Any]:
    (path,) = Path("run/checkpoints").glob("step_*")
    return state_of(path)


def test_the_state_of_a_callback_comes_back_before_training() -> None:
    train(Counter())
    again = Counter()
    train(again, epochs=2, resume="auto")
    assert again.calls == ["load_state_dict", "on_load_checkpoint 3", "on_fit_start 3"] and again.count == 6
    train(fresh := Counter(), default_root_dir="other")
    assert fresh.calls == ["on_fit_start 0"]


def test_two_callbacks_of_a_class_get_each_its_own_state() -> None:
    first, second = Counter(), Counter()
    second.count = 10
    train(first, second)
    assert [key for key in state()["callbacks"] if "Counter" in key] == ["Counter", "Counter:1"]
    first, second = Counter(), Counter()
    train(first, second, epochs=2, resume="auto")
    assert (first.count, second.count) == (6, 16)


def test_two_early_stoppings_keep_their_states() -> None:
    pair = lambda: (EarlyStopping("val", patience=50), EarlyStopping("loss", patience=50))  # noqa: E731
    validation, training = pair()
    run = lambda *c, **given: fit(Mean(), numbered(3), numbered(1), *c, default_root_dir="run", **given)  # noqa: E731
    run(validation, training)
    assert validation.best_score != training.best_score
    resumed, swapped = pair()
    run(swapped, resumed, resume="auto")
    assert (resumed.best_score, swapped.best_score) == (validation.best_score, training.best_score)


@pytest.mark.parametrize(
    ("kept", "match"),
    [
        (np.array([object()]), "the state_dict of.*Counter.*kept.*ndarray.*init_arrays"),
        (jax.random.key(0), "state_dict of.*Counter.*kept.*PRNGKeyArray"),
        ([Path("a")], r"Counter.*kept.*0.*PosixPath"),
        (lambda: None, "Counter.*kept.*function"),
    ],
)
def test_a_state_that_is_no_json_is_refused_before_training(kept: Any, match: str) -> None:
    counter = Counter(kept)
    with pytest.raises(CheckpointError, match=match):
        train(counter)
    assert counter.count == 0


def test_states_come_back_as_they_were() -> None:
    torch = pytest.importorskip("torch")
    kept = {
        **{"array": np.arange(6, dtype=">i2").reshape(2, 3), "jax": jax.numpy.ones(2), "tensor": torch.get_rng_state()},
        **{"set": {1, "a"}, "frozen": frozenset({(1, 2)}), "bytes": b"\x00\xff", "random": random.Random(3).getstate()},
        **{"keys": {0: 1, (1, 2): [3], None: ()}, "jaxlit value": 4, "numpy": np.random.RandomState(0).get_state()},
    }
    train(Counter(kept))
    train(counter := Counter(), epochs=2, resume="auto")
    assert counter.found.keys() == kept.keys()
    for key in ("set", "frozen", "bytes", "random", "keys", "jaxlit value"):
        assert counter.found[key] == kept[key]
    for key in ("array", "jax"):
        assert counter.found[key].dtype == kept[key].dtype
        np.testing.assert_array_equal(counter.found[key], kept[key])
    assert torch.equal(counter.found["tensor"], kept["tensor"])
    state = np.random.RandomState(1)
    state.set_state(counter.found["numpy"])
    assert state.rand() == np.random.RandomState(0).rand()


@pytest.mark.parametrize("stops", [False, True])
def test_a_state_that_is_an_array_is_resumed(stops: bool) -> None:
    stop = hooks(on_train_batch_end=lambda t, m, *_: stops and t.stop("here"))
    train(Counter(np.arange(3)), stop)
    train(counter := Counter(), epochs=2, resume="auto")
    np.testing.assert_array_equal(counter.found, np.arange(3))


def test_missing_callbacks_are_named_and_new_ones_are_empty(caplog: pytest.LogCaptureFixture) -> None:
    class Other(Counter):
        pass

    train(Counter())
    other = Other()
    # Files are not part of training, and a bar without a state loses nothing.
    train(other, epochs=2, resume="auto", logger=False, enable_progress_bar=False)
    (message,) = [r.getMessage() for r in caplog.records if "not among the callbacks" in r.getMessage()]
    assert "has the state of Counter, which" in message
    assert other.calls == ["on_load_checkpoint 3", "on_fit_start 0"] and other.count == 3


def test_values_that_hooks_save_are_there_on_load() -> None:
    result: list[Any] = []
    own = hooks(
        on_save_checkpoint=lambda t, m, c: c.update(own={"step": c["global_step"], "val": t.callback_metrics["loss"]}),
        on_load_checkpoint=lambda t, m, c: result.append(("callback", c["own"]["step"], c["words"])),
    )
    mine = module(
        on_save_checkpoint=lambda self, c: c.update(words=["a", "b"]),
        on_load_checkpoint=lambda self, c: result.append(("module", c["own"]["step"], c["words"])),
    )
    train(own, module=mine)
    w = 1.25  # before the third batch
    assert state()["own"] == {"step": 3, "val": (3 - w) ** 2} and state()["words"] == ["a", "b"] and not result
    train(own, module=mine, epochs=2, resume="auto")
    assert result == [("callback", 3, ["a", "b"]), ("module", 3, ["a", "b"])]


def test_values_that_hooks_save_must_be_json() -> None:
    counter = Counter()
    with pytest.raises(CheckpointError, match="mine.*object"):
        train(counter, module=module(on_save_checkpoint=lambda self, c: c.update(mine=object())))
    assert counter.count == 3  # after the first epoch


def test_a_datamodule_keeps_its_state() -> None:
    class Data(jl.DataModule):
        def __init__(self, words: int = 0) -> None:
            self.words = words

        def train_dataloader(self) -> Any:
            return numbered(3)

        def state_dict(self) -> dict[str, Any]:
            return {"words": self.words}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.words = state_dict["words"]

    train(data=Data(7))
    again = Data()
    train(data=again, epochs=2, resume="auto")
    assert again.words == 7


def test_a_checkpoint_of_a_sanity_check_holds_no_validation() -> None:
    save = hooks(on_validation_epoch_end=lambda t, m: t.save_checkpoint("sanity") if t.sanity_checking else None)
    fit(Mean(), numbered(2), numbered(3), save, default_root_dir="whole")
    ends: list[int] = []
    watch = hooks(on_validation_end=lambda t, m: ends.append(t.global_step))
    fit(Mean(), numbered(2), numbered(3), watch, ckpt_path="sanity", max_epochs=2, default_root_dir="run")
    assert ends == [2, 4]


def test_a_stopped_training_resumes_with_more_patience() -> None:
    constant = module(validation=lambda self, batch: self.log("val", jnp.float32(1.0)))

    def ended(patience: int) -> tuple[int, int]:
        stop = EarlyStopping("val", patience=patience)
        given: Any = {"max_epochs": 20, "resume": "auto", "default_root_dir": "run"}
        trainer = fit(constant, numbered(3), numbered(1), stop, **given)
        return trainer.current_epoch, trainer.global_step

    # The first value improves, and each of the others is one check.
    assert [ended(k) for k in (2, 2, 4, 4)] == [(3, 9), (3, 9), (5, 15), (5, 15)]
