"""Loaders that reuse memory, raise, run dry or never end: what is trained on, and what is refused."""

import csv
import itertools
import logging
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.compiles import compiles
from kit.trainers import BARE, STRATEGIES, THREE

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError


class Follow(jl.TrainModule):
    """Moves half of the way to the mean of each batch, so that the order of the batches shows."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(()))

    def training_step(self, batch: Any) -> Any:
        self.log("mean", jnp.mean(batch["x"]))
        return {"loss": 0.5 * jnp.mean((self.w[...] - batch["x"]) ** 2), "seen": batch["x"] + 0}

    def validation_step(self, batch: Any) -> None:
        self.log("val_mean", jnp.mean(batch["x"]))

    test_step = validation_step

    def predict_step(self, batch: Any) -> Any:
        return batch["x"]  # as it came: what is predicted may alias what came

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.5)


def followed(batches: Any) -> float:
    """Return what `Follow` comes to, by numpy."""
    w = 0.0
    for batch in batches:
        w += 0.5 * (np.mean(np.asarray(batch["x"], np.float64)) - w)
    return w


class Seen(jl.Callback):
    """Keeps the rows that steps saw, and those that hooks saw, as they were then."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.starts: list[np.ndarray] = []
        self.ends: list[np.ndarray] = []
        self.kept: list[np.ndarray] = []
        self.exceptions: list[BaseException] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.starts.append(np.array(batch["x"]))
        self.kept.append(batch["x"])

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.ends.append(np.array(batch["x"]))
        self.steps.append(outputs["seen"])  # read when all is over, so that steps are in flight

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.exceptions.append(exception)


def make_trainer(**arguments: Any) -> jl.Trainer:
    return jl.Trainer(**(BARE | {"strategy": "single", "max_epochs": 1, "num_sanity_val_steps": 0} | arguments))


def batches_of(count: int, rows: int = 8, first: int = 0) -> list[dict[str, Any]]:
    return [{"x": np.arange(rows, dtype=np.float32) + 10 * k} for k in range(first, first + count)]


def firsts(arrays: Any) -> list[float]:
    return [float(np.asarray(x).ravel()[0]) for x in arrays]


# Memory that is used again ---------------------------------------------------------------------------

ROWS, COLUMNS = 16, 4
BYTES = ROWS * COLUMNS * 4


def aligned(size: int) -> np.ndarray:
    """Return bytes at an address that a CPU device takes as its own memory."""
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def one() -> Callable[[int], np.ndarray]:
    buffer = aligned(BYTES).view(np.float32).reshape(ROWS, COLUMNS)
    return lambda k: buffer


def ring(count: int) -> Callable[[], Callable[[int], np.ndarray]]:
    def make() -> Callable[[int], np.ndarray]:
        buffers = aligned(count * BYTES).view(np.float32).reshape(count, ROWS, COLUMNS)
        return lambda k: buffers[k % count]

    return make


def separate(count: int) -> Callable[[], Callable[[int], np.ndarray]]:
    def make() -> Callable[[int], np.ndarray]:
        buffers = [aligned(BYTES).view(np.float32).reshape(ROWS, COLUMNS) for _ in range(count)]
        return lambda k: buffers[k % count]

    return make


def wrapped_anew() -> Callable[[int], np.ndarray]:
    # As shared memory is used: each array is another object, and the memory belongs to no array.
    memory = mmap.mmap(-1, BYTES)
    return lambda k: np.ndarray((ROWS, COLUMNS), np.float32, buffer=memory)


def late() -> Callable[[int], np.ndarray]:
    buffer = one()(0)
    return lambda k: buffer if k >= 64 else np.empty_like(buffer)


MEMORY: dict[str, Callable[[], Callable[[int], np.ndarray]]] = {
    "the same array": one,
    "a ring of 2": ring(2),
    "a ring of 3": ring(3),
    "a ring of 5": ring(5),
    "5 arrays in turn": separate(5),
    "shared memory": wrapped_anew,
    "the same array from the 65th batch on": late,
}
DEEP = {"a ring of 70": ring(70)}  # slots for as many batches as a loader's workers make ahead


class Refilling:
    """Writes each batch over an earlier one; the last is of fewer rows, and a view of the same memory.

    Args:
        memory: The memory, by the batch's number.
        count: Batches an epoch; more than a hundred, since what is seen of a loader at first may not hold later.
        pause: Seconds to wait for each batch.
    """

    def __init__(self, memory: Callable[[int], np.ndarray], count: int, pause: float = 0.0) -> None:
        self.memory, self.count, self.pause, self.drawn = memory, count, pause, 0

    def __iter__(self) -> Iterator[Any]:
        for k in range(self.count):
            time.sleep(self.pause)
            rows = ROWS if k < self.count - 1 else ROWS - 3
            buffer = self.memory(self.drawn)
            self.drawn += 1
            buffer[...] = content(k)
            yield {"x": buffer[:rows]}


def content(k: int) -> np.ndarray:
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) / 8 + k % 31


def contents(count: int) -> list[dict[str, Any]]:
    return [{"x": content(k)[: ROWS if k < count - 1 else ROWS - 3]} for k in range(count)]


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    wrong = [k for k, (a, b) in enumerate(zip(found, expected, strict=True)) if not np.array_equal(a, b["x"])]
    assert wrong == []


# Each memory, each way to draw and each strategy, not all of them with each other.
CASES = [
    ("single", "a ring of 70", 80),
    *[("single", memory, (0, 2, "auto")[k % 3]) for k, memory in enumerate(MEMORY)],
    *[(strategy, ("the same array", "a ring of 3")[k % 2], 2) for k, strategy in enumerate(STRATEGIES[1:])],
    *[("fsdp", "shared memory", 0), ("shard_map", "a ring of 2", "auto"), ("pmap", "shared memory", 0)],
]


@pytest.mark.parametrize(("strategy", "memory", "prefetch"), CASES)
def test_memory_that_a_loader_fills_again_is_trained_on_as_it_was(
    strategy: str, memory: str, prefetch: int | str
) -> None:
    count, seen, module = 120, Seen(), Follow()
    loader = Refilling((MEMORY | DEEP)[memory](), count, pause=1e-3 if prefetch == "auto" else 0.0)
    trainer = make_trainer(strategy=strategy, prefetch=prefetch, callbacks=[seen], max_epochs=2)
    trainer.fit(module, loader)
    expected = contents(count) * 2
    for found in (seen.steps, seen.starts, seen.ends, seen.kept):
        assert_same(found, expected)
    np.testing.assert_allclose(module.w[...], followed(expected), rtol=1e-6)


@pytest.mark.parametrize(("memory", "prefetch"), [("the same array", 0), ("a ring of 3", 2), ("shared memory", 2)])
def test_memory_that_a_loader_fills_again_is_evaluated_as_it_was(memory: str, prefetch: int) -> None:
    count, trainer = 120, make_trainer(prefetch=prefetch)
    found: Any = trainer.predict(Follow(), Refilling(MEMORY[memory](), count))
    assert_same(found, contents(count))
    (metrics,) = trainer.validate(Follow(), Refilling(MEMORY[memory](), count))
    mean = np.concatenate([b["x"] for b in contents(count)]).mean(dtype=np.float64)
    np.testing.assert_allclose(metrics["val_mean"], mean, rtol=1e-6)


class InPlace(jl.DataModule):
    """Prepares every batch in the same memory."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.memory = batches, aligned(64 * BYTES).view(np.float32).reshape(64 * ROWS, COLUMNS)

    def train_dataloader(self) -> Any:
        return self.batches

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.memory[...] = np.tile(batch["x"], (64, 1))
        return {"x": self.memory}


class Slow(Follow):
    """Takes so long that steps are in flight when the next batch is prepared."""

    def training_step(self, batch: Any) -> Any:
        x = batch["x"]
        slow = jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ (x.T @ x)), x)
        return {"loss": 0.5 * jnp.mean((self.w[...] - x) ** 2), "seen": x + 0 * slow.sum()}


@pytest.mark.parametrize(("strategy", "prefetch"), [("single", 0), ("single", 2), ("ddp", 2), ("pmap", 0)])
def test_memory_that_on_before_batch_transfer_fills_again_is_trained_on_as_it_was(strategy: str, prefetch: int) -> None:
    seen, module, batches = Seen(), Slow(), contents(12)[:11]
    make_trainer(strategy=strategy, callbacks=[seen], prefetch=prefetch).fit(module, datamodule=InPlace(batches))
    assert_same([np.asarray(x)[:ROWS] for x in seen.steps], batches)
    np.testing.assert_allclose(module.w[...], followed(batches), rtol=1e-6)


@pytest.mark.parametrize("strategy", THREE)
def test_a_callers_arrays_are_never_changed(strategy: str) -> None:
    batches = [{"x": separate(1)()(0)} for _ in range(6)]
    for k, batch in enumerate(batches):
        batch["x"][...] = content(k)
    whole = aligned(6 * BYTES).view(np.float32).reshape(6 * ROWS, COLUMNS)
    whole[...] = np.concatenate([content(k) for k in range(6)])
    trainer = make_trainer(strategy=strategy, max_epochs=2)
    trainer.fit(Follow(), batches, jl.ArrayLoader({"x": whole}, ROWS))
    trainer.fit(Follow(), jl.ArrayLoader({"x": whole}, ROWS), batches)
    assert_same([b["x"] for b in batches], [{"x": content(k)} for k in range(6)])
    assert_same([whole], [{"x": np.concatenate([content(k) for k in range(6)])}])


# A loader that raises --------------------------------------------------------------------------------


class DiskError(Exception):
    """An error of the loader's own."""


class Failing:
    """Raises at one batch of one epoch."""

    def __init__(self, epoch: int, batch: int, count: int = 4) -> None:
        self.epoch, self.batch, self.count, self.opened = epoch, batch, count, -1

    def __iter__(self) -> Iterator[Any]:
        self.opened += 1
        for k, batch in enumerate(batches_of(self.count)):
            if (self.opened, k) == (self.epoch, self.batch):
                raise DiskError(f"batch {k} cannot be read")
            yield batch


def rows_of(path: Any) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("epoch", "batch", "prefetch"), [(0, 1, 0), (0, 3, 2), (1, 0, "auto"), (1, 2, 2), (1, 9, 0), (1, 9, "auto")]
)
def test_a_loader_that_raises_is_trained_on_up_to_there(
    epoch: int, batch: int, prefetch: int | str, tmp_path: Any
) -> None:
    seen, module, count = Seen(), Follow(), 10
    trainer = make_trainer(
        prefetch=prefetch, max_epochs=3, callbacks=[seen], logger=True, log_every_n_steps=1, default_root_dir=tmp_path
    )
    with pytest.raises(DiskError, match=f"batch {batch} cannot be read") as caught:
        trainer.fit(module, Failing(epoch, batch, count))
    (note,) = caught.value.__notes__
    assert "Trainer.fit(train_dataloaders=...)" in note
    assert f"epoch {epoch}, batch {batch}" in note
    assert seen.exceptions == [caught.value]
    before = (batches_of(count) * 2)[: epoch * count + batch]
    assert_same(seen.steps, before)
    np.testing.assert_allclose(module.w[...], followed(before), rtol=1e-6)
    steps = [row for row in rows_of(tmp_path / "metrics.csv") if row["mean"]]
    assert [int(row["step"]) for row in steps] == list(range(len(before)))
    np.testing.assert_allclose([float(row["mean"]) for row in steps], [b["x"].mean() for b in before], rtol=1e-6)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_loader_that_raises_at_its_first_batch_is_noted_before_any_compile(prefetch: int) -> None:
    seen, trainer, module = Seen(), make_trainer(prefetch=prefetch), Follow()
    trainer.callbacks.append(seen)
    with compiles() as compiled, pytest.raises(DiskError) as caught:
        trainer.fit(module, Failing(0, 0))
    (note,) = caught.value.__notes__
    assert "Trainer.fit(train_dataloaders=...)" in note
    assert "epoch 0, batch 0" in note
    assert (compiled, seen.exceptions) == ([], [caught.value])


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_validation_loader_that_raises_is_noted_with_the_epoch_of_training(prefetch: int) -> None:
    seen, module = Seen(), Follow()
    trainer = make_trainer(prefetch=prefetch, max_epochs=3, callbacks=[seen])
    with pytest.raises(DiskError) as caught:
        trainer.fit(module, batches_of(3), [batches_of(2), Failing(1, 2)])
    (note,) = caught.value.__notes__
    assert "Trainer.fit(val_dataloaders=...)[1]" in note
    assert "batch 2" in note
    assert "epoch 1" in note
    assert seen.exceptions == [caught.value]
    np.testing.assert_allclose(module.w[...], followed(batches_of(3) * 2), rtol=1e-6)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
@pytest.mark.parametrize("batch", [0, 3])
def test_an_evaluations_loader_that_raises_is_named(verb: str, batch: int) -> None:
    with pytest.raises(DiskError) as caught:
        getattr(make_trainer(), verb)(Follow(), Failing(0, batch))
    (note,) = caught.value.__notes__
    assert f"Trainer.{verb}(dataloaders=...)" in note
    assert f"batch {batch}" in note


# A loader that runs dry ------------------------------------------------------------------------------

EMPTY: dict[str, Callable[[], Any]] = {
    "list": list,
    "tuple": tuple,
    "iterator": lambda: iter(()),
    "dropped": lambda: jl.ArrayLoader({"x": np.ones(3, np.float32)}, 4, drop_remainder=True),
    "no rows": lambda: jl.ArrayLoader({"x": np.ones((0, 3), np.float32)}, 4),
    "grain": lambda: grain.MapDataset.source([{"x": np.float32(1)}] * 3).batch(4, drop_remainder=True),
    "grain stream": lambda: grain.MapDataset.source([]).batch(4).to_iter_dataset(),
}


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_training_loader_is_refused_before_any_compile(name: str) -> None:
    trainer, module = make_trainer(), Follow()
    with compiles() as compiled, pytest.raises(DataError, match=r"Trainer\.fit\(train_dataloaders=\.\.\.\).*no batch"):
        trainer.fit(module, EMPTY[name]())
    assert compiled == []


@pytest.mark.parametrize("name", [n for n in EMPTY if n != "tuple"])  # which in a list is a batch
def test_an_empty_validation_loader_is_told_of_once_and_training_goes_on(name: str, caplog: Any) -> None:
    trainer, module = make_trainer(max_epochs=3, num_sanity_val_steps=2), Follow()
    with caplog.at_level(logging.WARNING, "jaxlit"):
        trainer.fit(module, batches_of(2), [EMPTY[name](), batches_of(3)])
    (message,) = [r.getMessage() for r in caplog.records]
    assert "Trainer.fit(val_dataloaders=...)[0]" in message
    assert "no batch" in message
    np.testing.assert_allclose(module.w[...], followed(batches_of(2) * 3), rtol=1e-6)
    np.testing.assert_allclose(trainer.callback_metrics["val_mean/dataloader_idx_1"], 13.5, rtol=1e-6)


@pytest.mark.parametrize("which", ["train", "val", "test", "predict"])
def test_a_limit_beyond_the_loader_is_told_of_once_with_both_numbers(which: str, caplog: Any) -> None:
    trainer = make_trainer(max_epochs=3, **{f"limit_{which}_batches": 100})
    with caplog.at_level(logging.WARNING, "jaxlit"):
        if which in ("train", "val"):
            trainer.fit(Follow(), batches_of(3 if which == "train" else 1), batches_of(3 if which == "val" else 1))
        else:
            getattr(trainer, which)(Follow(), batches_of(3))
    (message,) = [r.getMessage() for r in caplog.records]
    for word in (f"limit_{which}_batches=100", "dataloaders=...", " 3 "):
        assert word in message


def test_a_limit_beyond_what_a_loader_without_length_gives_is_told_of_with_both_numbers(caplog: Any) -> None:
    loader = Failing(-1, -1, count=3)
    with caplog.at_level(logging.WARNING, "jaxlit"):
        make_trainer(max_epochs=3, limit_train_batches=100).fit(Follow(), loader)
    (message,) = [r.getMessage() for r in caplog.records]
    assert "100" in message
    assert " 3 " in message


# A loader without end --------------------------------------------------------------------------------


def grain_dataset() -> Any:
    return grain.MapDataset.source([{"x": np.float32(10 * (i // 8) + i % 8)} for i in range(40)]).batch(8)


def generator() -> Iterator[Any]:
    for k in itertools.count():
        yield batches_of(1, first=k % 5)[0]


ENDLESS: dict[str, Callable[[], Any]] = {
    "cycle": lambda: itertools.cycle(batches_of(5)),
    "grain repeat": lambda: grain_dataset().repeat(),
    "grain stream over repeat": lambda: grain_dataset().repeat().to_iter_dataset(),
    "grain DataLoader": lambda: grain.DataLoader(
        data_source=[{"x": np.float32(10 * (i // 8) + i % 8)} for i in range(40)],
        sampler=grain.samplers.IndexSampler(num_records=40, shuffle=False, num_epochs=None),
        operations=[grain.transforms.Batch(batch_size=8)],
        worker_count=0,
    ),
    "generator": generator,
}


@pytest.mark.parametrize("name", [*(n for n in ENDLESS if n != "generator"), "repeat"])
def test_a_loader_without_end_is_refused_without_a_limit_before_any_compile(name: str) -> None:
    make, module = {**ENDLESS, "repeat": lambda: itertools.repeat(batches_of(1)[0])}[name], Follow()
    with compiles() as compiled, pytest.raises(ArgumentError) as caught:
        make_trainer(max_epochs=2).fit(module, make())
    for word in ("train_dataloaders", "without end", "max_steps", "limit_train_batches"):
        assert word in str(caught.value)
    with pytest.raises(ArgumentError, match=r"dataloaders.*without end.*limit_predict_batches"):
        make_trainer().predict(module, make())
    with pytest.raises(ArgumentError, match=r"val_dataloaders.*without end.*limit_val_batches"):
        make_trainer().fit(module, batches_of(1), make())
    assert compiled == []


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", ENDLESS)
def test_a_loader_without_end_goes_on_in_the_next_epoch(name: str, prefetch: int) -> None:
    seen, module = Seen(), Follow()
    make_trainer(callbacks=[seen], max_epochs=4, limit_train_batches=3, prefetch=prefetch).fit(module, ENDLESS[name]())
    expected = list(itertools.islice(itertools.cycle(batches_of(5)), 12))
    assert_same(seen.steps, expected)
    np.testing.assert_allclose(module.w[...], followed(expected), rtol=1e-6)


def test_a_repeat_that_ends_is_no_loader_without_end() -> None:
    trainer = make_trainer()
    trainer.fit(Follow(), itertools.repeat(batches_of(1)[0], 3))
    assert trainer.global_step == 3


# Arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value", "kind"),
    [
        *(("prefetch", value, ArgumentTypeError) for value in ("no", None, 1.5, True, [2])),
        ("prefetch", -1, ArgumentError),
        *(("max_recompiles", value, ArgumentTypeError) for value in ("3", 1.5, True)),
        ("max_recompiles", -1, ArgumentError),
        *(("data_timeout", value, ArgumentTypeError) for value in ("60", True, [1])),
        *(("data_timeout", value, ArgumentError) for value in (0, -1.0, float("inf"), float("nan"))),
    ],
)
def test_a_bad_value_is_refused_with_its_argument(argument: str, value: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        make_trainer(**{argument: value})
    assert f"Trainer({argument}=...)" in str(caught.value)
    assert repr(value) in str(caught.value)


# Waiting ---------------------------------------------------------------------------------------------


def test_data_wait_is_what_the_training_loader_took_while_the_devices_were_idle(monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Ticking:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def __iter__(self) -> Iterator[Any]:
            for batch in batches_of(4):
                now[0] += self.seconds
                yield batch

    waits: list[float] = []

    class Waits(jl.Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            waits.append(trainer.data_wait)

    # debug waits for each step, so that devices are idle whenever a batch is drawn.
    trainer = make_trainer(callbacks=[Waits()], max_epochs=3, debug=True, prefetch=0)
    trainer.fit(Follow(), Ticking(3.0), Ticking(100.0))
    assert waits[1:] == [12.0, 12.0]
    assert 9.0 <= waits[0] <= 12.0  # the first batch was drawn before training began
