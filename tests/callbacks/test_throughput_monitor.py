"""ThroughputMonitor against formulas, the rows of the data, and a clock that the test turns."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import sized
from kit.inside import Clock
from kit.journal import Rows, hooks
from kit.modules import Linear
from kit.refusals import fit_refuses
from kit.threads import as_processes
from kit.trainers import BARE, fit, thinned

import jaxlit as jl
from jaxlit.callbacks import ThroughputMonitor, throughput_monitor
from jaxlit.callbacks.base import Measured
from jaxlit.errors import ArgumentError
from jaxlit.loop import run_data
from jaxlit.programs.costs import peak_flops

ROWS, INSIDE, WIDTH, OUT = 16, 3, 8, 1


class MLP(Linear):
    """Three layers, whose first sees the data: it has no gradient by its input."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        sizes = [(INSIDE, WIDTH), (WIDTH, WIDTH), (WIDTH, OUT)]
        self.layers = nnx.List([nnx.Linear(*pair, rngs=rngs) for pair in sizes])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


# Two for each triple of a product; as many for the gradient of its kernel, and of its input unless that is the data.
FIRST, INNER, LAST = (2 * ROWS * a * b for a, b in ((INSIDE, WIDTH), (WIDTH, WIDTH), (WIDTH, OUT)))
FLOPS = 2 * FIRST + 3 * INNER + 3 * LAST


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput_monitor, "perf_counter", clock)
    monkeypatch.setattr(run_data, "_EVENTS", ())  # one that is counted begins the rates again
    return clock


def turns(clock: Clock) -> jl.Callback:
    """Return what turns a clock, in front of the monitor: a second for each step, ten for a validation."""
    tick = lambda seconds: lambda *_: setattr(clock, "now", clock.now + seconds)  # noqa: E731
    return hooks(on_train_batch_end=tick(1.0), on_validation_batch_end=tick(10.0))


def rows_of(trainer: jl.Trainer, name: str) -> dict[int, float]:
    steps, values = trainer.history.get(name, ((), ()))
    return dict(zip(map(int, steps), map(float, values), strict=True))


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp", "shard_map"], "single", "fsdp"))
def test_operations_are_those_of_a_formula(strategy: str, clock: Clock) -> None:
    monitor = ThroughputMonitor(available_flops=1e6)
    given = BARE | {"strategy": strategy, "log_every_n_steps": 1}
    trainer = fit(MLP(), sized(*[ROWS] * 4), None, turns(clock), monitor, **given)
    result = trainer.step_flops["train_step"]
    assert (result.count, result.exact, result.by_dtype) == (FLOPS, True, {"float32 fast": FLOPS})
    # A row is read after the next step's hook, that of the last step alone at the end of the epoch.
    assert rows_of(trainer, "train/flops_per_sec") == pytest.approx({1: FLOPS / 2, 2: FLOPS * 2 / 3, 3: FLOPS})
    for step, rate in rows_of(trainer, "train/flops_per_sec").items():
        assert rows_of(trainer, "train/mfu")[step] == pytest.approx(rate / 1e6 / trainer.strategy.mesh.size)


CASES = {
    "rows": ({}, [16] * 6, 1, 1),
    "accumulated": ({"accumulate_grad_batches": 2}, [16] * 6, 1, 1),
    "a short batch": ({}, [16] * 5 + [8], 2, 1),
    "functions": ({}, [16] * 6, 3, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_rates_do_not_count_validations(case: str, clock: Clock) -> None:
    arguments, sizes, every, scale = CASES[case]
    batches, window = sized(*sizes), arguments.get("accumulate_grad_batches", 1)
    of = {"batch_size_fn": lambda batch: 2 * len(batch["y"])} if scale == 2 else {}
    monitor = ThroughputMonitor(length_fn=lambda batch: batch["x"].size, window_size=2, **of)
    given = BARE | arguments | {"max_epochs": 2, "log_every_n_steps": every, "num_sanity_val_steps": 0}
    trainer = fit(Linear(), batches, batches[:1], turns(clock), monitor, Rows(), **given)
    taken = np.cumsum([0, *sizes * 2])  # rows after each batch
    steps = [step for step in range(len(sizes) * 2 // window) if (step + 1) % every == 0]
    assert rows_of(trainer, "train/samples") == {s: scale * taken[(s + 1) * window] for s in steps}
    assert rows_of(trainer, "train/lengths") == {s: 3 * taken[(s + 1) * window] for s in steps}
    # One second a batch, ten a validation that do not count; a row comes a batch late but at the end of an epoch.
    late = lambda s: (s + 1) * window + (0 if (s + 1) * window % len(sizes) == 0 else 1)  # noqa: E731
    points = [(1, 1), *(((s + 1) * window, late(s)) for s in steps)]
    result = rows_of(trainer, "train/samples_per_sec")
    for at, (batch, second) in enumerate(points[1:], 1):
        if (step := batch // window - 1) == 0 and batch == 1:  # the clock begins here
            continue
        begins = [i for i in range(at) if batch - points[i][0] >= 2] or [0]
        since, then = points[begins[-1]]
        assert result[step] == pytest.approx(scale * (taken[batch] - taken[since]) / (second - then)), (step, points)
        assert rows_of(trainer, "train/batches_per_sec")[step] == pytest.approx((batch - since) / (second - then))
    assert len(result) == len(steps) - (steps[0] == 0 and window == 1)


def test_the_seconds_of_a_compile_are_in_no_rate(clock: Clock) -> None:
    seconds, rates = {"train_step": 1.0}, []
    monitor, trainer = ThroughputMonitor(), stand_in(compile_seconds=seconds)
    for step in range(6):
        clock.now += 1.0 if step != 3 else 100.0
        trainer.compile_seconds = seconds | ({"train_step_traced": 99.0} if step >= 3 else {})
        monitor.on_train_batch_end(trainer, trainer.module, {}, sized(ROWS)[0], step)
        monitor.begin_row(trainer, trainer.module, step)
        monitor.fill_row(trainer, trainer.module, row := Measured({}), step)
        rates.append(row.get("train/samples_per_sec"))
    assert rates == [None, ROWS, ROWS, None, ROWS, ROWS]


def test_in_several_processes_counts_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [throughput_monitor._Point(4, 8, 100, 300, 2.5), throughput_monitor._Point(4, 8, 90, 270, 7.0)]
    results = as_processes(monkeypatch, lambda index: throughput_monitor._of_all(points[index], index == 1))
    assert results == [(throughput_monitor._Point(4, 8, 190, 570, 2.5), True)] * 2


def stand_in(**attributes: Any) -> Any:
    """Return what the monitor asks of a Trainer."""
    device = SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")
    mesh = SimpleNamespace(size=2, devices=np.array([device]))
    of_trainer = {"strategy": SimpleNamespace(mesh=mesh), "step_flops": {}, "module": None, "global_step": 1}
    return SimpleNamespace(**(of_trainer | attributes))


def test_a_monitor_works_with_callbacks_that_trace() -> None:
    given = BARE | {"log_every_n_steps": 1}
    trainer = fit(MLP(), sized(*[ROWS] * 4), None, ThroughputMonitor(), jl.callbacks.GradientNorm(), **given)
    assert trainer.step_flops["train_step_traced"].count == FLOPS
    assert [*rows_of(trainer, "train/flops_per_sec")][-1] == 3 and "train/mfu" not in trainer.history


def test_missing_rows_are_refused() -> None:
    fit_refuses(ArgumentError, "log_every_n_steps", callbacks=ThroughputMonitor(), log_every_n_steps=0)


@pytest.mark.parametrize(
    "kind, dtype, peak",
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989e12),
        ("NVIDIA A100-SXM4-80GB", "float32 fast", 156e12),
        ("NVIDIA L40S", "bfloat16", 362e12),
        ("TPU v5", "bfloat16", 459e12),
        ("TPU v4", "float32", None),
        ("NVIDIA H200", "int8", None),
        ("cpu", "bfloat16", None),
    ],
)
def test_the_peak_of_a_device_is_that_of_its_data_sheet(kind: str, dtype: str, peak: float | None) -> None:
    assert peak_flops(kind, dtype) == peak


def test_the_dtypes_of_products_are_told_apart() -> None:
    class Mixed(Linear):
        def loss(self, batch: Any) -> jax.Array:
            low = (batch["x"].astype(jnp.bfloat16) @ self.kernel[...].astype(jnp.bfloat16)).astype(jnp.float32)
            exact = jax.lax.dot(batch["x"], self.kernel[...], precision=jax.lax.Precision.HIGHEST)
            return jnp.mean((low + exact - batch["y"]) ** 2)

        def configure_optimizers(self) -> Any:
            return optax.sgd(0.1)

    trainer = fit(Mixed(), sized(ROWS, ROWS), None, **BARE)
    one = 2 * ROWS * INSIDE
    assert trainer.step_flops["train_step"].by_dtype == {"bfloat16": 2 * one, "float32": 2 * one}
    seconds = ThroughputMonitor()._least_seconds(stand_in(), trainer.step_flops["train_step"])
    assert seconds == pytest.approx((2 * one / 989e12 + 2 * one / 67e12) / 2)
