"""strategy="auto" takes the first strategy that fits by a plan, with at most one compile more."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from kit.costs import report_memory
from kit.trainers import BARE, thinned

import jaxlit as jl
from jaxlit.engine.compiled_program import CompiledProgram
from jaxlit.errors import ArgumentError
from jaxlit.strategies import Auto

LAYERS, WIDTH = 4, 64


class Tower(jl.TrainModule):
    """Layers that a scan runs, or not: only scanned ones can be recomputed."""

    def __init__(self, *, scans: bool = True, rngs: nnx.Rngs) -> None:
        make = lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs)  # noqa: E731
        self.scans = scans
        self.layers = nnx.vmap(make)(rngs.split(LAYERS)) if scans else nnx.List([make(rngs) for _ in range(LAYERS)])

    def training_step(self, batch: jax.Array) -> jax.Array:
        x = batch
        if self.scans:
            run = lambda x, layer: jnp.tanh(layer(x))  # noqa: E731
            x = nnx.scan(run, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        else:
            for layer in self.layers:
                x = jnp.tanh(layer(x))
        return jnp.mean((x - batch) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


DATA = [np.random.default_rng(i).normal(size=(256, WIDTH)).astype(np.float32) for i in range(2)]
SAME = {"ddp": "DDP()", "zero1": "FSDP(stage=1)", "fsdp": "FSDP()", "fsdp with remat": "FSDP(remat=True)"}


def planner(strategy: Any = "auto", **arguments: Any) -> jl.Trainer:
    return jl.Trainer(strategy=strategy, **(BARE | {"max_epochs": 1, "compile_cache": False} | arguments))


def fitted(limit: int, *, scans: bool = True, **arguments: Any) -> jl.Trainer:
    trainer = planner(Auto(memory_bytes=limit), **arguments)
    trainer.fit(jl.lazy(Tower, scans=scans), DATA)
    return trainer


@pytest.mark.full
@pytest.mark.parametrize("scans", [True, False])
def test_auto_is_what_the_plan_says_fits(scans: bool) -> None:
    plan = planner().plan(jl.lazy(Tower, scans=scans), DATA, devices=8)
    rows = [row for row in plan.plans if row.cost is not None]
    assert [row.strategy for row in rows] == [*SAME][: 4 if scans else 3]
    for limit in sorted(row.total + off for row in rows for off in (0, -1)):
        trainer = fitted(limit, scans=scans)
        first = next((x for x in rows if x.total <= limit), rows[-1])
        assert repr(trainer.strategy) == SAME[first.strategy]
    trainer = fitted(rows[0].total - 1, scans=scans)
    assert trainer.strategy.reason.startswith("auto: zero1, ddp needs ")
    assert f"({trainer.strategy.reason})" in trainer.strategy.describe()


@pytest.mark.full
def test_auto_trains_as_the_strategy_that_it_is() -> None:
    ddp = planner().plan(jl.lazy(Tower), DATA, strategies=["ddp"]).plans[0]
    auto, named = fitted(ddp.total - 1), planner("zero1")
    named.fit(jl.lazy(Tower), DATA)
    for a, b in zip(jax.tree.leaves(auto.state), jax.tree.leaves(named.state), strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.sharding == b.sharding


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Path]:
    """Have compiled programs stored in a folder of their own."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@pytest.mark.parametrize("part", thinned([1.0, 0.7, 0.1], full=[0.7]))
def test_auto_compiles_one_step_more_at_most(part: float, stored: Path) -> None:
    ddp = planner().plan(jl.lazy(Tower), DATA, strategies=["ddp"]).plans[0]
    jax.clear_caches()
    for entry in stored.iterdir():
        entry.unlink()
    trainer = fitted(int(part * ddp.total))
    assert 1 <= len([*stored.glob("jit_train_step-*-cache")]) <= 2
    assert trainer.global_step == 2


def test_where_nothing_fits_the_last_one_trains() -> None:
    trainer = fitted(1)
    assert repr(trainer.strategy) == SAME["fsdp with remat"]
    assert "auto: fsdp with remat, fsdp with remat needs at least" in trainer.strategy.describe()


class Prepared(Tower):
    """Batches are twice as wide before a hook, which changes them in place, has prepared them."""

    def on_before_batch_transfer(self, batch: np.ndarray, dataloader_idx: int) -> np.ndarray:
        batch /= 2
        return batch[:, :WIDTH]


def test_auto_plans_batches_as_a_hook_prepares_them() -> None:
    data = [np.repeat(2 * x, 2, axis=1) for x in DATA]
    ddp = planner().plan(Prepared(rngs=nnx.Rngs(0)), data, strategies=["ddp"]).plans[0]
    auto, named = (planner(x) for x in (Auto(memory_bytes=ddp.total - 1), "zero1"))
    for trainer in (auto, named):
        trainer.fit(Prepared(rngs=nnx.Rngs(0)), [x.copy() for x in data])
    assert repr(auto.strategy) == SAME["zero1"]
    jax.tree.map(np.testing.assert_array_equal, auto.state.params, named.state.params)


@pytest.mark.full
def test_auto_on_one_device_is_single_or_recomputes() -> None:
    row = planner("single").plan(jl.lazy(Tower), DATA, devices=1).plans[0]
    assert repr(fitted(row.total, devices=1).strategy) == "SingleDevice()"
    assert repr(fitted(row.total - 1, devices=1).strategy) == SAME["fsdp with remat"]


def test_the_first_fit_chooses_for_all_runs() -> None:
    trainer = fitted(10**9)
    chosen = trainer.strategy
    trainer.fit(jl.lazy(Tower), DATA)
    assert trainer.strategy is chosen
    assert repr(chosen) == SAME["ddp"]


def test_a_limit_is_needed() -> None:
    with pytest.raises(ArgumentError, match=r"Auto\(memory_bytes=\.\.\.\) has to be given"):
        planner(Auto()).fit(jl.lazy(Tower), DATA)
    assert repr(planner().strategy) == SAME["ddp"]  # by name, where devices report no memory


@pytest.mark.full
def test_what_other_arrays_take_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    totals = {row.strategy: row.total for row in planner().plan(jl.lazy(Tower), DATA).plans}
    parameters = planner().plan(jl.lazy(Tower), DATA, strategies=["fsdp"]).plans[0].cost.parameters
    for others, wanted in ((0, "DDP()"), (1000, "FSDP(stage=1)")):
        limit = int(np.ceil((totals["ddp"] + 10) / 0.95))
        report_memory(monkeypatch, limit, lambda others=others: parameters + others)
        trainer = planner(Auto())
        trainer.fit(jl.lazy(Tower), DATA)
        assert repr(trainer.strategy) == wanted


def test_no_free_memory_is_shown_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    report_memory(monkeypatch, 2**20, lambda: 2**30)
    trainer = planner(Auto())
    trainer.fit(jl.lazy(Tower), DATA)
    assert trainer.strategy.reason.endswith(" of 0 B per device")


def test_a_candidate_that_cannot_be_compiled_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    given, failed = CompiledProgram.note_arguments, list[bool]()

    def fails_once(self: CompiledProgram, *args: Any) -> CompiledProgram:
        if not failed:
            failed.append(True)
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 13.43GiB.")
        return given(self, *args)

    monkeypatch.setattr(CompiledProgram, "note_arguments", fails_once)
    trainer = fitted(10**9)
    assert repr(trainer.strategy) == "FSDP(stage=1)"
    assert trainer.strategy.reason == "auto: zero1, ddp needs more than 954 MiB per device to be compiled"
