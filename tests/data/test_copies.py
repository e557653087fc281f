"""Memory that someone else fills again is trained on, evaluated and seen by hooks as it was when it came."""

import itertools
import mmap
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit import by_hand
from kit.journal import hooks
from kit.modules import Mean, module
from kit.trainers import BARE, STRATEGIES, fit, make_trainer, thinned

import jaxlit as jl

ROWS, COLUMNS = 16, 4
BYTES = ROWS * COLUMNS * 4


def aligned(rows=ROWS):
    """Return memory at an address that a CPU device takes as its own."""
    raw = np.empty(rows * COLUMNS * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + rows * COLUMNS * 4].view(np.float32).reshape(rows, COLUMNS)


def ring(count):
    memory = aligned(count * ROWS).reshape(count, ROWS, COLUMNS)
    return lambda k: memory[k % count]


def shared_memory():
    memory = mmap.mmap(-1, BYTES)  # each array is another object, and the memory belongs to no array
    return lambda k: np.ndarray((ROWS, COLUMNS), np.float32, buffer=memory)


MEMORY = {"one array": lambda: ring(1), "a ring": lambda: ring(3), "shared memory": shared_memory}


def content(k):
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) / 8 + k % 31


def contents(count=20):
    """Return the batches; the last is of fewer rows."""
    return [content(k)[: ROWS if k < count - 1 else ROWS - 3] for k in range(count)]


class Refilling:
    """Writes each batch over an earlier one; the last is a view of the same memory."""

    def __init__(self, memory):
        self.memory, self.drawn = memory, 0

    def __iter__(self):
        for x in contents():
            memory = self.memory(self.drawn)
            self.drawn += 1
            memory[: len(x)] = x
            yield {"x": memory[: len(x)]}


def step(self, batch):
    return {"loss": jnp.mean(self.error(batch) ** 2), "seen": batch["x"] + 0}


def slow_step(self, batch):
    """Take so long that steps are in flight when the next batch is prepared."""
    x = batch["x"]
    slow = jax.lax.fori_loop(0, 200, lambda _, y: jnp.tanh(y @ (x.T @ x)), x)
    return {"loss": jnp.mean(self.error(batch) ** 2), "seen": x + 0 * slow.sum()}


def assert_same(result, expected):
    assert len(result) == len(expected)
    assert [k for k, (a, b) in enumerate(zip(result, expected, strict=True)) if not np.array_equal(a, b)] == []


def assert_trained(made, batches):
    np.testing.assert_allclose(made.w[...], by_hand.mean([[x.mean(dtype=np.float64)] for x in batches]), rtol=1e-6)


CASES = [("single", "one array", 0), ("single", "shared memory", "auto"), ("single", "a ring", 2)]
CASES += [("fsdp", "shared memory", 0), *[(strategy, "one array", 2) for strategy in STRATEGIES[1:]]]


@pytest.mark.parametrize(
    ("strategy", "memory", "prefetch"), thinned(CASES, *CASES[1:3], ("shard_map", "one array", 2), full=CASES[::2])
)
def test_memory_that_a_loader_refills_is_copied(strategy, memory, prefetch, monkeypatch):
    # Every draw takes seconds, for which "auto" starts a thread.
    monkeypatch.setattr("jaxlit.data.prefetcher.time", SimpleNamespace(perf_counter=itertools.count().__next__))
    steps, starts, kept, made = [], [], [], module(step)
    watch = hooks(
        on_train_batch_start=lambda t, m, batch, idx: (starts.append(np.array(batch["x"])), kept.append(batch["x"])),
        on_train_batch_end=lambda t, m, outputs, batch, idx: steps.append(outputs["seen"]),  # read when all is over
    )
    fit(made, Refilling(MEMORY[memory]()), None, watch, strategy=strategy, prefetch=prefetch, max_epochs=2, **BARE)
    for result in (steps, starts, kept):
        assert_same(result, contents() * 2)
    assert_trained(made, contents() * 2)


@pytest.mark.parametrize(("memory", "prefetch"), [("one array", 0), ("shared memory", 2)])
def test_memory_that_a_loader_fills_again_is_evaluated_as_it_was(memory, prefetch):
    made = module(predict=lambda self, batch: batch["x"])  # what is predicted may alias what came
    trainer = make_trainer(prefetch=prefetch)
    assert_same(trainer.predict(made, Refilling(MEMORY[memory]())), contents())
    (metrics,) = trainer.validate(made, Refilling(MEMORY[memory]()))
    np.testing.assert_allclose(metrics["val"], np.concatenate(contents()).mean(dtype=np.float64), rtol=1e-6)


CASES = [("single", 0), ("single", 2), ("ddp", 2), ("pmap", 0)]


@pytest.mark.parametrize(("strategy", "prefetch"), thinned(CASES, ("single", 0), ("ddp", 2)))
def test_memory_that_a_transfer_hook_refills_is_copied(strategy, prefetch):
    memory, steps, batches = aligned(64 * ROWS), [], contents(12)[:11]

    def prepare(self, batch, dataloader_idx):
        memory[...] = np.tile(batch["x"], (64, 1))
        return {"x": memory}

    made = module(slow_step, on_before_batch_transfer=prepare)
    watch = hooks(on_train_batch_end=lambda t, m, outputs, batch, idx: steps.append(outputs["seen"]))
    fit(made, [{"x": x} for x in batches], None, watch, strategy=strategy, prefetch=prefetch)
    assert_same([np.asarray(x)[:ROWS] for x in steps], batches)
    assert_trained(made, batches)


@pytest.mark.parametrize("strategy", thinned(["single", "shard_map"], "single"))
def test_a_callers_arrays_are_never_changed(strategy):
    batches, whole = [{"x": ring(1)(0)} for _ in range(6)], aligned(6 * ROWS)
    for k, batch in enumerate(batches):
        batch["x"][...] = content(k)
    whole[...] = np.concatenate([content(k) for k in range(6)])
    trainer = make_trainer(strategy=strategy, max_epochs=2)
    trainer.fit(Mean(), batches, jl.ArrayLoader({"x": whole}, ROWS))
    trainer.fit(Mean(), jl.ArrayLoader({"x": whole}, ROWS), batches)
    assert_same(
        [*[b["x"] for b in batches], whole], [*map(content, range(6)), np.concatenate([*map(content, range(6))])]
    )


class Tensor:
    """Another library's: numpy sees its memory, which is filled again for each batch."""

    def __init__(self, memory):
        self.memory = memory

    def __array__(self, dtype=None, copy=None):
        return self.memory


class Tensors:
    def __iter__(self):
        memory = np.zeros((4, 1), np.float32)
        for k in range(6):
            memory[:] = k
            yield {"x": Tensor(memory)}


@pytest.mark.parametrize(("make", "prefetch"), [(Tensors, 0), (Tensors, 2)])
def test_memory_of_other_libraries_is_copied(make, prefetch):
    seen, made = [], Mean()
    watch = hooks(on_train_batch_end=lambda t, m, outputs, batch, idx: seen.append(float(batch["x"][0, 0])))
    fit(made, make(), None, watch, prefetch=prefetch)
    assert seen == [0, 1, 2, 3, 4, 5]
    assert float(made.w[0]) == pytest.approx(by_hand.mean([[k] for k in range(6)]), rel=1e-6)
