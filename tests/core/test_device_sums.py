"""What metrics add up to, over batches of several sizes, windows, epochs and replicas, against numpy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kit.batches import sized
from kit.inside import Metric
from kit.journal import Rows
from kit.modules import logging
from kit.trainers import fit, thinned

from jaxlit.core.log import StepTable, Table

BATCHES = sized(16, 8, 3)
FOLDED = {"mean": np.mean, "sum": np.sum, "min": np.min, "max": np.max}


def log_all(module: Any, batch: Any, i: Any) -> None:
    x = batch["x"]
    for name, value in {"mean": x.mean(), "sum": x.sum(), "min": x.min(), "max": x.max()}.items():
        module.log(name, value, on_step=True, on_epoch=True, reduce_fx=name)
    masked = batch["y"][:, 0] > 0
    module.log("masked", (x[:, 0] * masked).sum() / masked.sum(), on_epoch=True, batch_size=masked.sum())


def masked_mean(batches: Any) -> float:
    x, y = (np.concatenate([batch[key] for batch in batches]) for key in ("x", "y"))
    return float(x[y[:, 0] > 0, 0].mean())


REDUCED = [("single", 1), ("fsdp", 2), ("shard_map", 2), ("single", 2), ("pmap", 1)]
REDUCED += [("ddp", 1), ("zero1", 2), ("simulate:8", 1)]


@pytest.mark.parametrize(("strategy", "accumulate"), thinned(REDUCED, REDUCED[0], full=REDUCED[1:4]))
def test_each_reduction_is_that_of_all_rows(strategy: str, accumulate: int) -> None:
    rows, batches = Rows(), [dict(batch) for batch in BATCHES]
    batches[0]["x"] = 3 * batches[0]["x"]  # the extremes of its window are not those of the last batch
    # Replicas without any weight, and a batch.
    batches[0]["y"] = np.where(np.arange(16)[:, None] < 8, -1.0, 1.0).astype(np.float32)
    batches.append(batches[1] | {"y": np.full((8, 1), -1, np.float32)})
    model = logging(log_all, log_all)
    arguments = {"accumulate_grad_batches": accumulate, "log_every_n_steps": 1, "max_epochs": 2}
    trainer = fit(model, batches, batches, rows, strategy=strategy, **arguments)
    windows = [batches[i : i + accumulate] for i in range(0, 4, accumulate)] * 2
    for name in ("mean", "sum", "min", "max"):
        steps = [FOLDED[name](np.concatenate([batch["x"] for batch in window])) for window in windows]
        np.testing.assert_allclose(rows.of(f"{name}_step"), steps, rtol=1e-5, atol=1e-6, err_msg=name)
        total = float(FOLDED[name](np.concatenate([batch["x"] for batch in batches])))
        # Validation's comes last under the bare name.
        assert rows.of(f"{name}_epoch") == pytest.approx([total] * 4, rel=1e-5), name
    assert trainer.callback_metrics["masked_epoch"] == pytest.approx(masked_mean(batches), rel=1e-5)
    expected = [masked_mean(window) if window[0] is not batches[3] else np.nan for window in windows]
    # A row of nothing has no mean, and the epoch's is not lost with it.
    np.testing.assert_allclose(rows.of("masked_step"), expected, rtol=1e-5)


@pytest.mark.parametrize("value", [0.1, 1e-3, 3.0])
def test_the_mean_of_a_million_batches_is_exact(value: float) -> None:
    table = Table([Metric("x"), Metric("total", reduce_fx="sum"), Metric("most", reduce_fx="max")])
    entry = table.entry([jnp.float32(value)] * 3, [jnp.float32(7)] * 3)
    sums = jax.jit(lambda s: jax.lax.fori_loop(0, 10**6, lambda _, s: table.add(s, entry), s))(table.empty_sums())
    x = float(np.float32(value))
    # A batch's own entry is rounded to float32; what a million of them add up to is not rounded any further.
    assert table.read(np.asarray(sums)) == pytest.approx([x, x * 10**6, x], rel=1e-7)


def test_an_infinity_among_the_values_spoils_no_other_metric() -> None:
    table = Table([Metric("x"), Metric("most", reduce_fx="max"), Metric("y")])
    sums = jnp.asarray(table.empty_sums())
    for x in (1.0, np.inf, 2.0):
        sums = table.add(sums, table.entry([jnp.float32(x), jnp.float32(x), jnp.float32(3)], [jnp.float32(2)] * 3))
    assert table.read(np.asarray(sums)) == [np.inf, np.inf, 3.0]


@pytest.mark.parametrize("replicas", [None, 1, 4])
def test_tables_are_refit_for_another_number_of_replicas(replicas: int | None) -> None:
    table = Table([Metric("x"), Metric("least", reduce_fx="min"), Metric("total", reduce_fx="sum")])
    parts = [np.asarray(table.entry([jnp.float32(v)] * 3, [jnp.float32(w)] * 3)) for v, w in ((1, 1), (4, 3))]
    result = table.refit(np.stack(parts), replicas)
    assert result.shape == (*([] if replicas is None else [replicas]), 2, 3)
    assert table.read(result) == [13 / 4, 1.0, 5.0]


def test_steps_that_log_nothing_have_no_metrics() -> None:
    trainer = fit(logging(), BATCHES, BATCHES, strategy="shard_map", log_every_n_steps=1)
    assert trainer.validate(logging(), BATCHES) == [{}]
    assert Table([]).read(np.zeros((4, 0))) == []


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("rates", [[], [0.25, 0.5]])
def test_a_step_is_read_as_it_was_encoded(rates: list[float], guarded: bool):
    metrics = [Metric("loss", on_step=True, logger=False), Metric("n", on_step=True, reduce_fx="sum")]
    layout = StepTable(Table(metrics), ("lr", None), guarded)
    table = layout.metrics.entry([jnp.float32(3), jnp.float32(5)], [jnp.float32(4), jnp.float32(1)])
    arrays = [layout.encode(table * k, jnp.array(rates), jnp.int32(7)) for k in (1, 2)]
    one, two = [layout.decode(np.asarray(array)) for array in arrays]
    assert layout.decode(np.asarray(arrays[0])) == one
    assert one.values == [3.0, 5.0]
    assert two.values == [3.0, 10.0]
    assert one.row == {"n": 5.0}
    assert one.rates == ({"lr": 0.25} if rates else {})
    assert one.bad_step == (7 if guarded else -1)
    # A checkpoint's array is read by a training that has a guard, or none.
    assert StepTable(layout.metrics, layout.rates, not guarded).decode(np.asarray(arrays[0])) == one
