"""However a training ends, everything is torn down, and it continues from its last checkpoint as if it had not.

Real signals in real processes are in test_signals.py.
"""

import csv
import math
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.checkpoints import bytes_of, names
from kit.journal import HOOKS, Rows, hooks, raising
from kit.modules import Mean
from kit.trainers import fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.callbacks import ModelCheckpoint

EPOCHS, SIZE = 2, 5
X = random(1, rows=20)[0]["x"]


class Noisy(jl.TrainModule):
    """A line whose steps depend on the order of the data, on keys, on the optimizer's past and on the epoch."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.ones(3))
        self.drop = nnx.Dropout(0.3, rngs=nnx.Rngs(0))

    def training_step(self, batch: Any) -> Any:
        loss = jnp.mean((self.drop(batch["x"]) @ self.w[...] - 1.0) ** 2)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", jnp.mean((batch["x"] @ self.w[...] - 1.0) ** 2))

    def configure_optimizers(self) -> Any:
        return optax.chain(optax.adam(optax.cosine_decay_schedule(0.1, 10)), optax.ema(0.9))


def meddler(hook: str, at: int, act: Callable[[], Any]) -> jl.Callback:
    """Return a callback that does something at one call of one hook."""
    count = [0]

    def called(*_: Any) -> None:
        count[0] += 1
        if count[0] == at:
            act()

    return hooks(**{hook: called})


def train(folder: str, *callbacks: Any, loader: Any = None, **arguments: Any) -> jl.Trainer:
    given: Any = {"default_root_dir": folder, "max_epochs": EPOCHS, "log_every_n_steps": 1}
    given |= {"accumulate_grad_batches": 2, "val_check_interval": 2} | arguments
    loader = loader or jl.ArrayLoader({"x": X}, 4, shuffle=True)
    return fit(Noisy(), loader, jl.ArrayLoader({"x": X[:9]}, 3), *callbacks, **given)


def rows(folder: Any) -> list[dict[str, str]]:
    """The logged rows; the order of the columns is that in which the metrics came first."""
    with Path(folder, "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


End = tuple[list[bytes], list[dict[str, str]]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> End:
    folder = tmp_path_factory.mktemp("whole")
    return bytes_of(train(str(folder))), rows(folder)


def assert_goes_on(whole: End, folder: str = "parts", **arguments: Any) -> None:
    trainer = train(folder, resume="auto", **arguments)
    assert not trainer.interrupted and trainer.global_step == EPOCHS * math.ceil(SIZE / 2)
    assert bytes_of(trainer) == whole[0] and rows(folder) == whole[1]


class Broken:
    """Batches of which one cannot be read, once."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.drawn = at, 0

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for k in range(SIZE):
            if self.drawn == self.at:
                raise OSError("the file is gone")
            yield {"x": X[4 * k : 4 * k + 4]}
            self.drawn += 1


@pytest.mark.parametrize("prefetch", thinned([0, 2], 2))
def test_an_error_in_the_loader_loses_no_step(prefetch) -> None:
    end = bytes_of(train("whole", loader=Broken(), prefetch=prefetch)), rows("whole")
    with pytest.raises(OSError, match="the file is gone"):
        train("parts", loader=Broken(3), prefetch=prefetch)
    assert names("parts/checkpoints") == ["step_00000001"]  # three batches, of which two make a step
    assert_goes_on(end, loader=Broken(), prefetch=prefetch)


OFTEN = [
    ("on_train_batch_end", 2, signal.SIGTERM),  # after which a validation is due
    ("on_validation_batch_end", 8, None),
]
MORE = [
    ("on_train_batch_start", 4, None),
    ("on_validation_end", 3, signal.SIGINT),
    ("on_train_epoch_end", 1, signal.SIGTERM),
    ("on_train_start", 1, signal.SIGINT),  # before any step
]
OTHERS = [
    ("on_train_epoch_start", 2, signal.SIGINT),
    ("on_train_batch_end", 5, None),
    ("on_validation_batch_end", 1 + 2, signal.SIGINT),  # the sanity check has two
    ("on_validation_batch_end", 8, signal.SIGTERM),
    ("on_validation_end", 3, None),
    ("on_train_epoch_end", 2, None),
]


@pytest.mark.parametrize(("hook", "at", "number"), thinned([*OFTEN, *MORE, *OTHERS], *OFTEN, full=MORE))
def test_an_error_or_signal_saves_a_checkpoint_of_its_place(hook, at, number, signals, whole) -> None:
    callback = ModelCheckpoint()
    act = meddler(hook, at, raising(RuntimeError, "mine") if number is None else lambda: signal.raise_signal(number))
    if number == signal.SIGINT:
        trainer = train("parts", act, callback)
        assert trainer.interrupted and trainer.global_step < 6
    else:
        with pytest.raises((RuntimeError, SystemExit)) as ended:
            train("parts", act, callback)
        assert getattr(ended.value, "code", "mine") == ("mine" if number is None else 143)
    assert Path(callback.last_model_path, "MANIFEST.json").exists() == (hook != "on_train_start")
    assert_goes_on(whole)


def test_a_second_signal_leaves_whole_checkpoints_only(signals, whole) -> None:
    with pytest.raises(KeyboardInterrupt):
        train("parts", meddler("on_train_batch_end", 8, lambda: [signal.raise_signal(signal.SIGINT) for _ in range(2)]))
    assert names("parts/checkpoints") == ["step_00000003"]
    assert_goes_on(whole)


def test_interrupted_again_and_again_training_ends_the_same(signals, whole) -> None:
    for resume in (None, "auto", "auto"):
        interrupt = meddler("on_train_batch_end", 1, lambda: signal.raise_signal(signal.SIGINT))
        assert train("parts", interrupt, resume=resume).interrupted
    assert_goes_on(whole)


class Listener(Rows):
    """A logger that counts how often it was finished, and keeps what it was told."""

    exceptions, finished = (), 0

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        assert not self.finished
        self.exceptions = (*self.exceptions, exception)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.finished += 1


OF_FIT = [h for h in HOOKS if not any(w in h for w in ("test", "predict", "exception", "checkpoint", "trace"))]
IN_HOOKS = [(RuntimeError, hook, True, "fit") for hook in OF_FIT]
STEPS = ["prepare_data", "train_dataloader", "val_dataloader", "configure_optimizers", "training_step"]
STEPS += ["validation_step", "on_before_batch_transfer"]
EVALUATIONS = [("validate", "setup"), ("validate", "on_validation_batch_end"), ("test", "on_test_start")]
EVALUATIONS += [("test", "on_test_batch_start"), ("predict", "on_predict_end")]


@pytest.mark.parametrize(
    ("kind", "hook", "of_module", "verb"),
    [
        (KeyboardInterrupt, "setup", False, "fit"),
        (SystemExit, "on_train_batch_end", False, "fit"),
        (KeyboardInterrupt, "on_validation_epoch_end", False, "fit"),
        *thinned(IN_HOOKS, (RuntimeError, "teardown", True, "fit"), full=IN_HOOKS[::3]),
        *((RuntimeError, hook, True, "fit") for hook in STEPS),
        *((RuntimeError, hook, False, verb) for verb, hook in EVALUATIONS),
    ],
)
def test_any_error_finalizes_every_logger_once(kind, hook, of_module, verb) -> None:
    error, before, after = kind("the first"), Listener(), Listener()
    model = type("Fails", (Mean,), {hook: raising(error)})() if of_module else Mean()
    trainer = make_trainer(
        *(before, *([] if of_module else [hooks(**{hook: raising(error)})]), after),
        num_sanity_val_steps=int("sanity" in hook),
        log_every_n_steps=1,
        default_root_dir="run",
    )
    data = {"train_dataloader": (None, numbered(1)), "val_dataloader": (numbered(3),)}
    with pytest.raises(kind) as raised:
        getattr(trainer, verb)(model, *data.get(hook, (numbered(3), numbered(1)) if verb == "fit" else (numbered(1),)))
    assert raised.value is error
    places = [note for note in error.__notes__ if note.startswith("It was raised by ")]
    if hook.endswith("_step"):  # a step is no hook: its note says what it was traced with
        assert places == []
    else:
        (place,) = places
        assert place.startswith(f"It was raised by {'Fails' if of_module else 'Made'}.{hook}"), place
        assert hook in STEPS[:4] or " in epoch " in place
    told = () if hook == "teardown" else (error,)  # nothing was running any more
    assert [(x.finished, x.exceptions) for x in (before, after)] == [(1, told)] * 2
    if kind is RuntimeError:  # every row that the loggers were given before is in the file
        assert len(rows("run") if Path("run/metrics.csv").exists() else []) == len({step for step, _ in after.rows})


def test_later_errors_are_notes_on_the_first_in_order() -> None:
    first, listener = RuntimeError("the first"), Listener()
    one = {"on_train_start": first, "on_exception": KeyError("a"), "teardown": OSError("b")}
    other = {"on_exception": SystemExit(3), "teardown": KeyboardInterrupt("c")}
    bad = [hooks(**{hook: raising(error) for hook, error in x.items()}) for x in (one, other)]
    with pytest.raises(RuntimeError) as raised:
        fit(Mean(), numbered(1), None, *bad, listener)
    assert raised.value is first and listener.exceptions == (first,) and listener.finished == 1
    assert first.__notes__[0] == "It was raised by Made.on_train_start in epoch 0, batch 0 (global_step 0)."
    later = first.__notes__[1:]
    assert [note.split(" ")[0] for note in later] == ["Made.on_exception"] * 2 + ["Made.teardown"] * 2
    for note, part in zip(later, ("KeyError('a')", "SystemExit(3)", "OSError('b')", "'c'"), strict=True):
        assert part in note
