"""jl.scale_batch_size finds the largest batch whose compiled step fits, and takes one step with it."""

import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.trainers import BARE, thinned

import jaxlit as jl
from jaxlit.engine.compiled_program import CompiledProgram
from jaxlit.errors import ArgumentError, OutOfMemoryError
from jaxlit.trainer.tuning import _Tries


class Counts(jl.TrainModule):
    """A layer; it notes the rows of each step that runs."""

    steps: list[int] = []  # noqa: RUF012

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(16, 64, rngs=rngs)

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(self.layer(batch["x"])) ** 2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        Counts.steps.append(len(batch["x"]))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


DATA = [{"x": np.ones((8, 16), np.float32), "names": np.array(["a"] * 8, object)}]


def planner(strategy: Any = "ddp", **arguments: Any) -> jl.Trainer:
    return jl.Trainer(strategy=strategy, **(BARE | {"max_epochs": 1, "host_keys": ["names"]} | arguments))


def needs(trainer: jl.Trainer, rows: int) -> int:
    return trainer.plan(jl.lazy(Counts), DATA, batch_size=rows).plans[0].total


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp"], "fsdp", full=()))
def test_the_largest_batch_fits_and_the_next_does_not(strategy: str) -> None:
    Counts.steps.clear()
    trainer, unit = planner(strategy), 1 if strategy == "single" else 8
    found = jl.scale_batch_size(trainer, jl.lazy(Counts), DATA, memory_bytes=100_000)
    assert found.memory == needs(trainer, found.batch_size) <= 100_000
    assert needs(trainer, found.batch_size + unit) > 100_000
    assert found.batch_size % unit == 0
    assert Counts.steps == [found.batch_size]  # one real step
    assert (found.strategy, found.accumulate_grad_batches) == (strategy, 1)
    assert len(found.tried) < 12


@pytest.mark.full
def test_a_wanted_batch_is_divided_into_parts_that_fit() -> None:
    trainer = planner("fsdp")
    most = jl.scale_batch_size(trainer, jl.lazy(Counts), DATA, memory_bytes=100_000).batch_size
    wanted = 8 * (most // 8) * 3
    found = jl.scale_batch_size(trainer, jl.lazy(Counts), DATA, 100_000, effective_batch_size=wanted)
    assert found.batch_size * found.accumulate_grad_batches == wanted
    assert found.batch_size <= most
    assert found.batch_size % 8 == 0
    with pytest.raises(ArgumentError, match="does not divide"):
        jl.scale_batch_size(trainer, jl.lazy(Counts), DATA, 100_000, effective_batch_size=12_345)


@pytest.mark.parametrize("effective", thinned([None, 3072], 3072, full=()))
def test_what_is_recommended_fits_with_its_window(effective: int | None) -> None:
    given = {} if effective else {"accumulate_grad_batches": 3}
    found = jl.scale_batch_size(planner(**given), jl.lazy(Counts), DATA, 100_000, effective_batch_size=effective)
    assert found.accumulate_grad_batches == 3 if effective is None else found.accumulate_grad_batches > 1
    trainer = planner(accumulate_grad_batches=found.accumulate_grad_batches)
    assert needs(trainer, found.batch_size) == found.memory <= 100_000
    assert needs(trainer, found.batch_size + 8) > 100_000 or effective is not None


@pytest.mark.parametrize(
    "strategy", ["simulate:4", pytest.param(jl.strategies.SingleDevice(), marks=pytest.mark.sweep)]
)
def test_strategies_of_one_device_are_scaled(strategy: Any) -> None:
    found = jl.scale_batch_size(planner(strategy), jl.lazy(Counts), DATA, memory_bytes=200_000)
    assert found.memory <= 200_000
    assert found.batch_size % (4 if strategy == "simulate:4" else 1) == 0


def test_the_module_and_the_trainer_stay_as_they_were() -> None:
    module, trainer = Counts(rngs=nnx.Rngs(0)), planner()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module)))
    jl.scale_batch_size(trainer, module, DATA, memory_bytes=100_000)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(module)))
    assert (trainer.global_step, trainer.module) == (0, None)


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"8 rows, the fewest, need .* of 1000 B"):
        jl.scale_batch_size(planner(), jl.lazy(Counts), DATA, memory_bytes=1000)
    with pytest.raises(ArgumentError, match="has to be given where devices report none"):
        jl.scale_batch_size(planner(), jl.lazy(Counts), DATA)


def test_other_arrays_that_leave_no_memory_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    used = SimpleNamespace(memory_stats=lambda: {"bytes_limit": 20 * 2**30, "bytes_in_use": 24 * 2**30})
    monkeypatch.setattr(jax, "local_devices", lambda: [used])
    with pytest.raises(ArgumentError, match=r"other arrays take 5\.0 GiB more than 95 % of a device's memory"):
        jl.scale_batch_size(planner(), jl.lazy(Counts), DATA)


def compiles_up_to(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the compiler run out of memory for larger batches, as that of GPUs does, which tries kernels there."""
    given = CompiledProgram.note_arguments

    def fails(self: CompiledProgram, *args: Any) -> CompiledProgram:
        if args[1]["x"].shape[0] > rows:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 13.43GiB.")
        return given(self, *args)

    monkeypatch.setattr(CompiledProgram, "note_arguments", fails)


@pytest.mark.parametrize("most", thinned([1, 2, 77, 300], 1, 77, full=()))
def test_a_batch_that_cannot_be_compiled_does_not_fit(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_up_to(most, monkeypatch)
    found = jl.scale_batch_size(planner("single"), jl.lazy(Counts), DATA, memory_bytes=10**9)
    assert found.batch_size == most
    assert found.tried[most] == found.memory < found.tried[most + 1] == float("inf")


def test_a_single_row_that_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_up_to(0, monkeypatch)
    with pytest.raises(ArgumentError, match=r"size: 1 row, the fewest, cannot be compiled in the free memory"):
        jl.scale_batch_size(planner("single"), jl.lazy(Counts), DATA, memory_bytes=10**9)


def test_a_limit_of_the_compiler_is_bisected() -> None:
    def cost(rows: int) -> int:
        if rows > 5000:
            raise OutOfMemoryError("the compiler")
        return 1000 + 7 * rows

    tries = _Tries(cost, unit=1, limit=10**6)
    assert tries.largest() == 5000
    bisected = math.ceil(math.log2(8192 - 512))  # 512 rows fit, and 16 times as many do not
    assert len(tries.tried) <= len([1, 2, 32, 512, 8192]) + bisected


def test_a_plan_says_what_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_up_to(8, monkeypatch)
    assert planner("single").plan(jl.lazy(Counts), DATA, batch_size=8).plans[0].cost is not None
    with pytest.raises(jl.errors.OutOfMemoryError, match=r"while the step was compiled: RESOURCE_EXHAUSTED"):
        planner("single").plan(jl.lazy(Counts), DATA, batch_size=16)
