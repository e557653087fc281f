"""A training that ends in an error or by a signal goes on from its last checkpoint as if nothing had happened."""

import csv
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import CheckpointError, JaxlitError, NonFiniteError

EPOCHS, SIZE = 2, 5
X = np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32)


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


class Meddler(jl.Callback):
    """Do something at one call of one hook."""

    def __init__(self, hook: str = "", at: int = 0, act: Any = None) -> None:
        self.count = 0

        def called(*_: Any, **__: Any) -> None:
            self.count += 1
            if self.count == at:
                act()

        if hook:
            self.__class__ = type("Meddler", (Meddler,), {hook: lambda self, *args, **named: called()})


def fail() -> None:
    raise RuntimeError("mine")


def train(
    folder: str, meddler: Any = None, loader: Any = None, callback: Any = None, limit: int = EPOCHS, **arguments: Any
) -> jl.Trainer:
    callback = callback or jl.callbacks.ModelCheckpoint()
    trainer = jl.Trainer(
        strategy="single",
        default_root_dir=folder,
        max_epochs=limit,
        callbacks=[meddler or Meddler(), callback],
        enable_checkpointing=True,
        accumulate_grad_batches=2,
        val_check_interval=2,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    loader = loader or jl.ArrayLoader({"x": X}, 4, shuffle=True)
    trainer.fit(Noisy(), loader, jl.ArrayLoader({"x": X[:9]}, 3))
    return trainer


def numbers(trainer: jl.Trainer) -> list[np.ndarray]:
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(trainer.state)]


def rows(folder: str) -> list[dict[str, str]]:
    """The logged rows; the order of the columns is that in which the metrics came first."""
    with Path(folder, "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def assert_same_end(trainer: jl.Trainer, folder: str, whole: jl.Trainer, other: str) -> None:
    assert trainer.global_step == whole.global_step == EPOCHS * math.ceil(SIZE / 2)
    for x, y in zip(numbers(trainer), numbers(whole), strict=True):
        np.testing.assert_array_equal(x, y)
    assert rows(folder) == rows(other)


# Errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hook", "at"),
    [
        ("on_train_epoch_start", 2),
        ("on_train_batch_start", 4),
        ("on_train_batch_end", 1),
        ("on_train_batch_end", 3),
        ("on_train_batch_end", 5),
        ("on_validation_start", 3),
        ("on_validation_batch_start", 8),
        ("on_validation_batch_end", 8),
        ("on_validation_epoch_end", 3),
        ("on_validation_end", 3),
        ("on_train_epoch_end", 1),
        ("on_train_epoch_end", 2),
    ],
)
def test_an_error_in_a_hook_loses_nothing(hook: str, at: int) -> None:
    whole = train("whole")
    with pytest.raises(RuntimeError, match="mine"):
        train("parts", Meddler(hook, at, fail))
    assert_same_end(train("parts", resume="auto"), "parts", whole, "whole")


class Broken:
    """Batches of which one cannot be read, once."""

    def __init__(self, at: int) -> None:
        self.left, self.at = 1, at

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        for k in range(SIZE):
            if k == self.at and self.left:
                self.left -= 1
                raise OSError("the file is gone")
            yield {"x": X[4 * k : 4 * k + 4]}


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_the_loader_loses_no_step(prefetch: int) -> None:
    whole = train("whole", loader=Broken(SIZE), prefetch=prefetch)
    with pytest.raises(OSError, match="the file is gone"):
        train("parts", loader=Broken(3), prefetch=prefetch)
    trainer = train("parts", loader=Broken(SIZE), prefetch=prefetch, resume="auto")
    assert_same_end(trainer, "parts", whole, "whole")


def test_an_error_in_the_first_batch_leaves_no_checkpoint_of_an_untrained_model() -> None:
    with pytest.raises(RuntimeError, match="mine"):
        train("run", Meddler("on_train_batch_start", 1, fail))
    assert list(Path("run/checkpoints").glob("step_*")) == []


def test_save_on_exception_false_leaves_the_last_epochs() -> None:
    with pytest.raises(RuntimeError, match="mine"):
        train(
            "run",
            Meddler("on_train_batch_end", 7, fail),
            callback=jl.callbacks.ModelCheckpoint(save_on_exception=False),
        )
    assert [p.name for p in Path("run/checkpoints").glob("step_*")] == ["step_00000003"]


@pytest.mark.parametrize("ending", ["error", "SIGINT"])
def test_what_is_not_among_the_best_is_written_where_training_ends_early(ending: str, signals: None) -> None:
    """`save_last=False` is about checkpoints along the way; the place of an error or a Ctrl-C is always kept."""
    callback = jl.callbacks.ModelCheckpoint(monitor="val", save_top_k=1, save_last=False)
    if ending == "error":
        with pytest.raises(RuntimeError, match="mine"):
            train("parts", Meddler("on_train_batch_end", 8, fail), callback=callback)
    else:
        train("parts", Meddler("on_train_batch_end", 8, lambda: signal.raise_signal(signal.SIGINT)), callback=callback)
    assert callback.last_model_path.endswith("step_00000004")
    assert Path(callback.last_model_path, "MANIFEST.json").exists()


def test_a_step_that_was_not_finite_writes_nothing() -> None:
    class Spoilt(Broken):
        def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
            for batch in super().__iter__():
                self.left += 1
                yield {"x": np.full_like(batch["x"], np.nan)} if self.left == SIZE + 5 else batch

    with pytest.raises(NonFiniteError):
        train("run", loader=Spoilt(SIZE))
    assert [p.name for p in Path("run/checkpoints").glob("step_*")] == ["step_00000003"]


def test_an_error_keeps_its_type_when_its_checkpoint_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    class Lose(jl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.checkpoint_callback.finish(trainer)  # that of the epoch before
                fault.__enter__()
                fail()

    fault = jl.testing.faults("run/checkpoints", at=1, kind="full")
    try:
        with pytest.raises(RuntimeError, match="mine"):
            train("run", Lose())
    finally:
        fault.__exit__(None, None, None)
    assert "No checkpoint of the error's place was written" in caplog.text
    assert [p.name for p in Path("run/checkpoints").glob("step_*")] == ["step_00000003"]


# Signals ---------------------------------------------------------------------------------------------


@pytest.fixture
def signals() -> Iterator[None]:
    """Handle signals as a program does that has set up nothing."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("hook", "at"),
    [
        ("on_train_epoch_start", 2),
        ("on_train_batch_end", 2),  # behind which a validation is due
        ("on_train_batch_end", 3),
        ("on_train_batch_end", 5),
        ("on_validation_batch_end", 1 + 2),  # the sanity check has two
        ("on_validation_batch_end", 8),
        ("on_validation_end", 3),
        ("on_train_epoch_end", 1),
    ],
)
def test_a_signal_is_followed_by_a_checkpoint_of_its_place(hook: str, at: int, number: int, signals: None) -> None:
    whole = train("whole")
    callback = jl.callbacks.ModelCheckpoint()
    meddler = Meddler(hook, at, lambda: signal.raise_signal(number))
    if number == signal.SIGTERM:
        with pytest.raises(SystemExit) as ended:
            train("parts", meddler, callback=callback)
        assert ended.value.code == 143
    else:
        trainer = train("parts", meddler, callback=callback)
        assert trainer.interrupted and trainer.global_step < whole.global_step
    assert Path(callback.last_model_path, "MANIFEST.json").exists()
    resumed = train("parts", resume="auto")
    assert not resumed.interrupted
    assert_same_end(resumed, "parts", whole, "whole")


def test_a_second_signal_leaves_whole_checkpoints_only(signals: None) -> None:
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train("parts", Meddler("on_train_batch_end", 8, twice))
    whole = train("whole")
    assert [p.name for p in Path("parts/checkpoints").glob("step_*")] == ["step_00000003"]
    assert_same_end(train("parts", resume="auto"), "parts", whole, "whole")


def test_interrupted_again_and_again_training_ends_the_same(signals: None) -> None:
    whole = train("whole")
    interrupt = lambda: signal.raise_signal(signal.SIGINT)  # noqa: E731
    train("parts", Meddler("on_train_batch_end", 1, interrupt))
    for _ in range(2 * SIZE):
        trainer = train("parts", Meddler("on_train_batch_end", 1, interrupt), resume="auto")
        if not trainer.interrupted:
            break
    assert_same_end(trainer, "parts", whole, "whole")


def test_a_training_that_never_began_to_step_can_be_interrupted(signals: None) -> None:
    interrupt = Meddler("on_train_start", 1, lambda: signal.raise_signal(signal.SIGINT))
    train("parts", interrupt)
    assert_same_end(train("parts", resume="auto"), "parts", train("whole"), "whole")


def test_a_finished_training_resumed_changes_nothing() -> None:
    whole = train("run")
    before = Path("run/metrics.csv").read_text()
    again = train("run", resume="auto")
    assert Path("run/metrics.csv").read_text() == before
    assert_same_end(again, "run", whole, "run")
    with pytest.raises(JaxlitError, match=r"max_epochs=1.*2 epochs"):
        train("run", limit=1, resume="auto")


def test_more_epochs_go_on_where_fewer_ended() -> None:
    whole = train("whole")
    train("parts", limit=1)
    assert_same_end(train("parts", resume="auto"), "parts", whole, "whole")


def test_without_any_checkpoint_that_can_be_read_training_does_not_start_anew() -> None:
    train("run", limit=1)
    (path,) = Path("run/checkpoints").glob("step_*")
    (path / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match="None of the 1 checkpoints"):
        train("run", resume="auto")
