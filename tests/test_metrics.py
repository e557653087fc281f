"""`self.log`: names, rows, values and mistakes, as Lightning has them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.core.device_sums import Table
from jaxlit.core.log import Metric
from jaxlit.errors import LogError

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8")
MAPPINGS = ("callback_metrics", "logged_metrics", "progress_bar_metrics")

Log = Callable[[jl.TrainModule, Any, Any], None]  # (module, batch, batch_idx): what a step logs


def nothing(module: jl.TrainModule, batch: Any, batch_idx: Any) -> None:
    """Log nothing."""


def make_module(training: Log = nothing, validation: Log = nothing) -> jl.TrainModule:
    """Return a module whose steps log what the given functions log."""

    class Logs(jl.TrainModule):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(()))

        def training_step(self, batch: Any, batch_idx: Any) -> jax.Array:
            training(self, batch, batch_idx)
            return jnp.mean(batch["x"]) * self.w[...]

        def validation_step(self, batch: Any, batch_idx: Any) -> None:
            validation(self, batch, batch_idx)

        def test_step(self, batch: Any, batch_idx: Any) -> None:
            validation(self, batch, batch_idx)

        def predict_step(self, batch: Any, batch_idx: Any) -> Any:
            validation(self, batch, batch_idx)
            return batch["x"]

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.1)

    return Logs()


def log_position(**arguments: Any) -> Log:
    """Log x = batch_idx + 10 * epoch."""
    return lambda module, batch, i: module.log("x", i + 10.0 * module.current_epoch, **arguments)


class Recorder(jl.Callback):
    """Keeps the rows, and the three mappings at the hooks where they are read."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.seen: dict[str, list[dict[str, dict[str, float]]]] = {"batch": [], "train": [], "validation": []}

    def on_log(self, trainer: jl.Trainer, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))

    def note(self, where: str, trainer: jl.Trainer) -> None:
        if not trainer.sanity_checking:
            self.seen[where].append({name: dict(getattr(trainer, name)) for name in MAPPINGS})

    def on_train_batch_end(self, trainer: jl.Trainer, *_: Any) -> None:
        self.note("batch", trainer)

    def on_train_epoch_end(self, trainer: jl.Trainer, *_: Any) -> None:
        self.note("train", trainer)

    def on_validation_epoch_end(self, trainer: jl.Trainer, *_: Any) -> None:
        self.note("validation", trainer)


def batches_of(*rows: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [{"x": rng.normal(size=n).astype(np.float32)} for n in rows]


def fit(module: jl.TrainModule, *loaders: Any, **arguments: Any) -> Recorder:
    """Fit for two epochs, logging every step, unless said otherwise, and return what was recorded."""
    recorder = Recorder()
    defaults = {"strategy": "single", "max_epochs": 2, "log_every_n_steps": 1, "callbacks": [recorder]}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    recorder.trainer = jl.Trainer(**(defaults | quiet | arguments))
    recorder.trainer.fit(module, *loaders)
    return recorder


# Names and rows --------------------------------------------------------------------------------------


def test_a_training_metric_is_logged_by_step_under_its_own_name() -> None:
    recorder = fit(make_module(log_position()), batches_of(2, 2, 2))
    values = [0.0, 1.0, 2.0, 10.0, 11.0, 12.0]
    assert recorder.rows == [(step, {"x": v, "epoch": step // 3}) for step, v in enumerate(values)]
    assert [seen["callback_metrics"] for seen in recorder.seen["batch"]] == [{"x": v} for v in values]
    assert [seen["logged_metrics"] for seen in recorder.seen["train"]] == [{"x": 2.0}, {"x": 12.0}]


def test_a_metric_of_step_and_epoch_gets_suffixes() -> None:
    recorder = fit(make_module(log_position(on_step=True, on_epoch=True)), batches_of(2, 2, 2))
    rows = [(0, "x_step", 0.0), (1, "x_step", 1.0), (2, "x_step", 2.0), (2, "x_epoch", 1.0)]
    rows += [(step + 3, name, value + 10) for step, name, value in rows]
    assert recorder.rows == [(step, {name: value, "epoch": step // 3}) for step, name, value in rows]


def test_the_bare_name_is_the_step_value_during_the_epoch_and_the_epoch_value_after() -> None:
    recorder = fit(make_module(log_position(on_step=True, on_epoch=True)), batches_of(2, 2, 2), max_epochs=1)
    during, after = (
        recorder.seen["batch"][-1]["callback_metrics"],
        recorder.seen["train"][0]["callback_metrics"],
    )
    assert during == {"x": 2.0, "x_step": 2.0}
    assert after == {"x": 1.0, "x_step": 2.0, "x_epoch": 1.0}


def test_the_epoch_value_stays_readable_in_the_next_epoch() -> None:
    recorder = fit(make_module(log_position(on_step=True, on_epoch=True)), batches_of(2, 2, 2))
    assert recorder.seen["batch"][3]["callback_metrics"] == {"x": 10.0, "x_step": 10.0, "x_epoch": 1.0}


def test_logged_metrics_hold_suffixed_names_only() -> None:
    recorder = fit(make_module(log_position(on_step=True, on_epoch=True)), batches_of(2, 2, 2), max_epochs=1)
    assert recorder.seen["train"][0]["logged_metrics"] == {"x_step": 2.0, "x_epoch": 1.0}


def test_a_training_metric_of_the_epoch_alone_keeps_its_name_and_the_last_step() -> None:
    recorder = fit(make_module(log_position(on_step=False, on_epoch=True)), batches_of(2, 2, 2))
    assert recorder.rows == [(2, {"x": 1.0, "epoch": 0}), (5, {"x": 11.0, "epoch": 1})]
    assert recorder.seen["batch"][0]["callback_metrics"] == {}
    assert recorder.seen["train"][0]["callback_metrics"] == {"x": 1.0}


def test_prog_bar_shows_a_metric_in_the_progress_bar() -> None:
    recorder = fit(make_module(log_position(prog_bar=True, on_epoch=True)), batches_of(2, 2, 2), max_epochs=1)
    assert recorder.seen["batch"][1]["progress_bar_metrics"] == {"x_step": 1.0}
    assert recorder.seen["train"][0]["progress_bar_metrics"] == {"x_step": 2.0, "x_epoch": 1.0}


def test_without_prog_bar_the_progress_bar_shows_nothing() -> None:
    recorder = fit(make_module(log_position()), batches_of(2))
    assert all(seen["progress_bar_metrics"] == {} for seen in recorder.seen["batch"])


def test_logger_false_keeps_a_metric_from_rows_and_logged_metrics() -> None:
    module = make_module(log_position(logger=False, on_step=True, on_epoch=True), log_position(logger=False))
    recorder = fit(module, batches_of(2, 2), batches_of(2))
    assert recorder.rows == []
    assert recorder.seen["train"][0]["logged_metrics"] == {}
    assert set(recorder.seen["train"][0]["callback_metrics"]) == {"x", "x_step", "x_epoch"}


def test_a_validation_metric_is_logged_by_epoch_at_the_last_training_step() -> None:
    module = make_module(validation=lambda m, batch, i: m.log("v", i + 10.0 * m.current_epoch))
    recorder = fit(module, batches_of(2, 2, 2), batches_of(2, 2, 2))
    assert recorder.rows == [(2, {"v": 1.0, "epoch": 0}), (5, {"v": 11.0, "epoch": 1})]
    assert [seen["callback_metrics"] for seen in recorder.seen["validation"]] == [{"v": 1.0}, {"v": 11.0}]


def test_log_dict_logs_each_of_its_entries() -> None:
    module = make_module(lambda m, batch, i: m.log_dict({"a": i, "b": 2.0 * i}, prog_bar=True))
    recorder = fit(module, batches_of(2, 2), max_epochs=1)
    assert [values for _, values in recorder.rows] == [{"a": i, "b": 2.0 * i, "epoch": 0} for i in range(2)]
    assert recorder.seen["batch"][1]["progress_bar_metrics"] == {"a": 1.0, "b": 2.0}


def test_what_a_metric_may_be() -> None:
    values = {
        "int": 3,
        "float": 0.5,
        "bool": True,
        "numpy": np.float64(2.5),
        "int32": jnp.int32(4),
        "nan": np.nan,
    }
    recorder = fit(make_module(lambda m, batch, i: m.log_dict(values)), batches_of(2), max_epochs=1)
    expected = {name: float(value) for name, value in values.items()}
    assert recorder.rows == [(0, pytest.approx(expected | {"epoch": 0}, nan_ok=True))]


def test_rows_hold_python_floats() -> None:
    recorder = fit(make_module(log_position(on_epoch=True), log_position()), batches_of(2), batches_of(2))
    assert {type(v) for _, values in recorder.rows for name, v in values.items() if name != "epoch"} == {float}


def test_the_last_steps_before_a_training_end_are_logged() -> None:
    recorder = fit(make_module(log_position()), batches_of(2, 2, 2), max_epochs=-1, max_steps=2)
    assert recorder.rows == [(0, {"x": 0.0, "epoch": 0}), (1, {"x": 1.0, "epoch": 0})]


# When ------------------------------------------------------------------------------------------------


def test_log_every_n_steps_counts_over_epochs() -> None:
    recorder = fit(make_module(log_position()), batches_of(2, 2, 2, 2, 2), log_every_n_steps=2)
    assert recorder.rows == [(s, {"x": s % 5 + 10.0 * (s // 5), "epoch": s // 5}) for s in (1, 3, 5, 7, 9)]


def test_log_every_0_steps_logs_epoch_rows_only() -> None:
    module = make_module(log_position(on_step=True, on_epoch=True))
    assert fit(module, batches_of(2, 2), log_every_n_steps=0).rows == [
        (1, {"x_epoch": 0.5, "epoch": 0}),
        (3, {"x_epoch": 10.5, "epoch": 1}),
    ]


def test_log_every_n_steps_counts_optimizer_steps() -> None:
    module = make_module(lambda m, batch, i: m.log("x", jnp.mean(batch["x"])))
    batches = batches_of(2, 2, 2, 2, 2, 2, 2, 2)
    recorder = fit(module, batches, max_epochs=1, log_every_n_steps=2, accumulate_grad_batches=2)
    assert [step for step, _ in recorder.rows] == [1, 3]


def test_a_stop_logs_its_last_step() -> None:
    class Stop(jl.Callback):
        def on_train_batch_end(self, trainer: jl.Trainer, *args: Any) -> None:
            if args[-1] == 2:
                trainer.stop("enough")

    recorder = Recorder()
    callbacks = [recorder, Stop()]
    fit(make_module(log_position()), batches_of(2, 2, 2, 2), callbacks=callbacks, log_every_n_steps=50)
    assert recorder.rows == [(2, {"x": 2.0, "epoch": 0})]


def test_a_row_of_a_step_comes_before_the_row_of_its_epoch() -> None:
    module = make_module(log_position(on_epoch=True), log_position())
    recorder = fit(module, batches_of(2, 2), batches_of(2), max_epochs=1)
    assert [set(values) - {"epoch"} for _, values in recorder.rows] == [
        {"x_step"},
        {"x_step"},
        {"x"},
        {"x_epoch"},
    ]


def test_metrics_of_the_sanity_check_are_dropped() -> None:
    seen: list[dict[str, float]] = []

    class Look(jl.Callback):
        def on_train_start(self, trainer: jl.Trainer, module: Any) -> None:
            seen.append(dict(trainer.callback_metrics))

    recorder = Recorder()
    module = make_module(validation=log_position())
    fit(module, batches_of(2, 2), batches_of(2, 2), callbacks=[recorder, Look()], max_epochs=1)
    assert seen == [{}]
    assert [step for step, _ in recorder.rows] == [1]


def test_the_metrics_of_a_fit_do_not_outlive_the_start_of_the_next() -> None:
    trainer = fit(make_module(log_position()), batches_of(2)).trainer
    trainer.fit(make_module(lambda m, batch, i: m.log("other", 1.0)), batches_of(2))
    assert set(trainer.callback_metrics) == {"other"}


# Values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_epoch_mean_weighs_batches_by_their_rows(strategy: str) -> None:
    log = lambda m, batch, i: m.log("mean", jnp.mean(batch["x"]), on_step=False, on_epoch=True)  # noqa: E731
    train, val = batches_of(8, 16, 3), batches_of(16, 5)
    recorder = fit(make_module(log, lambda m, b, i: m.log("v", jnp.mean(b["x"]))), train, val, strategy=strategy)
    for name, batches in (("mean", train), ("v", val)):
        expected = np.concatenate([batch["x"] for batch in batches]).mean()
        assert recorder.seen["train"][1]["callback_metrics"][name] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_value_of_a_step_is_that_of_the_global_batch(strategy: str) -> None:
    batches = batches_of(8, 16, 3)
    module = make_module(lambda m, batch, i: m.log("mean", jnp.mean(batch["x"])))
    recorder = fit(module, batches, strategy=strategy, max_epochs=1)
    logged = [values["mean"] for _, values in recorder.rows]
    np.testing.assert_allclose(logged, [batch["x"].mean() for batch in batches], rtol=1e-5)


@pytest.mark.parametrize("value", [0.1, 1e-3, 3.0])
def test_the_epoch_mean_of_a_million_batches_is_as_exact_as_that_of_one(value: float) -> None:
    table = Table([Metric("x"), Metric("total", reduce_fx="sum"), Metric("most", reduce_fx="max")])
    entry = table.entry([jnp.float32(value)] * 3, [jnp.float32(7)] * 3)
    sums = jax.jit(lambda s: jax.lax.fori_loop(0, 10**6, lambda _, s: table.add(s, entry), s))(table.empty_sums())
    x = float(np.float32(value))
    # A batch's own entry is rounded to float32; what a million of them add up to is not rounded any further.
    assert table.read(np.asarray(sums)) == pytest.approx([x, x * 10**6, x], rel=1e-7)


def test_an_explicit_batch_size_is_the_weight() -> None:
    def log(module: jl.TrainModule, batch: Any, i: Any) -> None:
        module.log("x", i.astype(jnp.float32), on_step=False, on_epoch=True, batch_size=10 * (i + 1))

    recorder = fit(make_module(log), batches_of(2, 2, 2), max_epochs=1)
    expected = np.average([0, 1, 2], weights=[10, 20, 30])
    assert recorder.trainer.callback_metrics["x"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_traced_batch_size_is_the_weight(strategy: str) -> None:
    rng = np.random.default_rng(1)
    batches = [batch | {"mask": rng.random(batch["x"].size) < 0.5} for batch in batches_of(16, 32, 5)]
    batches[0]["mask"][:8] = False  # replicas without any weight
    batches[0]["mask"][8:] = True
    batches.append(batches[0] | {"mask": np.zeros(16, bool)})  # and a batch

    def log(module: jl.TrainModule, batch: Any, i: Any) -> None:
        count = jnp.sum(batch["mask"])
        mean = jnp.sum(batch["x"] * batch["mask"]) / count
        module.log("x", mean, on_step=True, on_epoch=True, batch_size=count)

    recorder = fit(make_module(log), batches, strategy=strategy, max_epochs=1)
    x, mask = (np.concatenate([batch[key] for batch in batches]) for key in ("x", "mask"))
    assert recorder.trainer.callback_metrics["x_epoch"] == pytest.approx(float(x[mask].mean()), rel=1e-5)
    steps = [values["x_step"] for _, values in recorder.rows if "x_step" in values]
    np.testing.assert_allclose(steps[:3], [batch["x"][batch["mask"]].mean() for batch in batches[:3]], rtol=1e-5)
    assert np.isnan(steps[3])  # a row of nothing has no mean, and the epoch's is not lost with it


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reduce_fx", ["sum", "min", "max"])
def test_sum_min_and_max_are_those_of_all_rows(reduce_fx: str, strategy: str, accumulate: int) -> None:
    def log(module: jl.TrainModule, batch: Any, i: Any) -> None:
        value = getattr(jnp, reduce_fx)(batch["x"])
        module.log("x", value, on_step=True, on_epoch=True, reduce_fx=reduce_fx)

    batches = batches_of(8, 16, 3)
    recorder = fit(make_module(log), batches, strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate)
    of = getattr(np, reduce_fx)
    windows = [batches[i : i + accumulate] for i in range(0, 3, accumulate)]
    steps = [values["x_step"] for _, values in recorder.rows if "x_step" in values]
    expected = [of(np.concatenate([batch["x"] for batch in window])) for window in windows]
    np.testing.assert_allclose(steps, expected, rtol=1e-5)
    total = float(of(np.concatenate([batch["x"] for batch in batches])))
    assert recorder.trainer.callback_metrics["x_epoch"] == pytest.approx(total, rel=1e-5)


@pytest.mark.parametrize("reduce_fx", ["sum", "min", "max"])
def test_validation_reduces_as_asked(reduce_fx: str) -> None:
    def log(module: jl.TrainModule, batch: Any, i: Any) -> None:
        module.log("x", getattr(jnp, reduce_fx)(batch["x"]), reduce_fx=reduce_fx)

    val = batches_of(8, 16, 3)
    recorder = fit(make_module(validation=log), batches_of(8), val, max_epochs=1)
    expected = getattr(np, reduce_fx)(np.concatenate([batch["x"] for batch in val]))
    assert recorder.trainer.callback_metrics["x"] == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_accumulation_window_logs_its_mean_weighted_by_rows(strategy: str) -> None:
    batches = batches_of(16, 8, 3)
    module = make_module(lambda m, batch, i: m.log("x", jnp.mean(batch["x"]), on_step=True, on_epoch=True))
    recorder = fit(module, batches, strategy=strategy, max_epochs=1, accumulate_grad_batches=2)
    windows = [np.concatenate([batches[0]["x"], batches[1]["x"]]), batches[2]["x"]]
    steps = [(step, values["x_step"]) for step, values in recorder.rows if "x_step" in values]
    assert [step for step, _ in steps] == [0, 1]
    np.testing.assert_allclose([value for _, value in steps], [window.mean() for window in windows], rtol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_epoch_mean_is_the_same_under_accumulation(strategy: str) -> None:
    batches = batches_of(16, 8, 3)
    module = make_module(lambda m, batch, i: m.log("x", jnp.mean(batch["x"]), on_step=False, on_epoch=True))
    recorder = fit(module, batches, strategy=strategy, accumulate_grad_batches=2)
    expected = float(np.concatenate([batch["x"] for batch in batches]).mean())
    assert recorder.trainer.callback_metrics["x"] == pytest.approx(expected, rel=1e-5)


# Several validation loaders --------------------------------------------------------------------------


def test_several_validation_loaders_give_names_with_their_index() -> None:
    module = make_module(validation=lambda m, batch, i: m.log("v", jnp.mean(batch["x"])))
    first, second = batches_of(2, 2, 1), [{"x": np.ones(3, np.float32)}]
    recorder = fit(module, batches_of(2), [first, second], max_epochs=1)
    mean = float(np.concatenate([batch["x"] for batch in first]).mean())
    values = pytest.approx({"v/dataloader_idx_0": mean, "v/dataloader_idx_1": 1.0}, rel=1e-5)
    assert recorder.seen["validation"][0]["callback_metrics"] == values
    assert recorder.rows == [(0, pytest.approx(dict(values.expected) | {"epoch": 0}, rel=1e-5))]


@pytest.mark.parametrize("method", ["validate", "test"])
def test_evaluation_returns_one_dict_a_loader(method: str) -> None:
    module = make_module(validation=lambda m, batch, i: m.log("v", jnp.mean(batch["x"])))
    trainer = jl.Trainer(strategy="single", logger=False, enable_progress_bar=False, enable_model_summary=False)
    ones, twos = ([{"x": np.full(3, value, np.float32)}] for value in (1, 2))
    assert getattr(trainer, method)(module, ones) == [{"v": 1.0}]
    assert getattr(trainer, method)(module, [ones, twos]) == [
        {"v/dataloader_idx_0": 1.0},
        {"v/dataloader_idx_1": 2.0},
    ]


def test_one_name_for_several_loaders_is_refused() -> None:
    module = make_module(validation=lambda m, batch, i: m.log("v", 1.0, add_dataloader_idx=False))
    with pytest.raises(LogError, match="add_dataloader_idx"):
        fit(module, batches_of(2), [batches_of(2), batches_of(2)])


# The mappings ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAPPINGS)
def test_the_mappings_are_read_only(name: str) -> None:
    trainer = fit(make_module(log_position(prog_bar=True)), batches_of(2)).trainer
    with pytest.raises(TypeError):
        getattr(trainer, name)["x"] = 1.0


def test_an_unknown_metric_names_the_nearest() -> None:
    trainer = fit(make_module(lambda m, batch, i: m.log("train/loss", 1.0)), batches_of(2)).trainer
    with pytest.raises(KeyError, match=r"Did you mean 'train/loss'"):
        trainer.callback_metrics["train/los"]


# Mistakes --------------------------------------------------------------------------------------------


def in_scan(module: jl.TrainModule, x: jax.Array) -> None:
    jax.lax.scan(lambda carry, v: (module.log("x", v), (carry, v))[1], 0.0, x)


def in_vmap(module: jl.TrainModule, x: jax.Array) -> None:
    jax.vmap(lambda v: (module.log("x", v), v)[1])(x)


def in_grad(module: jl.TrainModule, x: jax.Array) -> None:
    jax.grad(lambda v: (module.log("x", v), v)[1])(x[0])


def in_jit(module: jl.TrainModule, x: jax.Array) -> None:
    jax.jit(lambda v: (module.log("x", v), v)[1])(x[0])


def in_cond(module: jl.TrainModule, x: jax.Array) -> None:
    jax.lax.cond(x[0] > 0, lambda v: (module.log("x", v), v)[1], lambda v: v, x[0])


def in_remat(module: jl.TrainModule, x: jax.Array) -> None:
    nnx.remat(lambda m, v: (m.log("x", v), v)[1])(module, x[0])


@pytest.mark.parametrize("strategy", ["single", "ddp", "shard_map", "pmap", "simulate:8"])
@pytest.mark.parametrize("misplaced", [in_scan, in_vmap, in_grad, in_jit, in_cond, in_remat])
def test_log_inside_a_transformed_function_is_refused(misplaced: Any, strategy: str) -> None:
    module = make_module(lambda m, batch, i: misplaced(m, batch["x"]))
    with pytest.raises(LogError, match=r"self\.log\('x', \.\.\.\).*training_step"):
        fit(module, batches_of(16), strategy=strategy)


def test_log_beside_a_transformed_function_is_allowed() -> None:
    def log(module: jl.TrainModule, batch: Any, i: Any) -> None:
        total, _ = jax.lax.scan(lambda carry, v: (carry + v, None), 0.0, batch["x"])
        module.log("x", total)

    batches = batches_of(4)
    recorder = fit(make_module(log), batches, max_epochs=1)
    assert recorder.rows[0][1]["x"] == pytest.approx(float(batches[0]["x"].sum()), rel=1e-5)


def test_log_outside_of_a_step_is_refused() -> None:
    with pytest.raises(LogError, match=r"self\.log\('x', \.\.\.\) is called outside of the steps and hooks"):
        make_module().log("x", 1.0)


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_end", "on_validation_end", "on_fit_end"])
def test_log_in_a_hook_with_nothing_to_log_to_is_refused(hook: str) -> None:
    logs = type("Logs", (jl.Callback,), {hook: lambda self, trainer, module, *_: module.log("x", 1.0)})
    with pytest.raises(LogError, match=f"{hook}, where nothing can be logged"):
        fit(make_module(), batches_of(2), batches_of(2), callbacks=[logs()])


def test_log_in_predict_step_is_refused() -> None:
    module = make_module(validation=lambda m, batch, i: m.log("x", 1.0))
    trainer = jl.Trainer(strategy="single", logger=False, enable_progress_bar=False, enable_model_summary=False)
    with pytest.raises(LogError, match="predict_step"):
        trainer.predict(module, batches_of(2))


def test_a_vector_is_refused_with_its_shape_and_what_to_do() -> None:
    with pytest.raises(LogError, match=r"shape \(2,\).*\.mean\(\)"):
        fit(make_module(lambda m, batch, i: m.log("x", batch["x"])), batches_of(2))


@pytest.mark.parametrize("value", ["high", None, [1.0, 2.0], {"a": 1.0}, 1j, jnp.complex64(1)])
def test_what_is_no_real_number_is_refused(value: Any) -> None:
    with pytest.raises(LogError, match=r"self\.log\('x', value\) in training_step"):
        fit(make_module(lambda m, batch, i: m.log("x", value)), batches_of(2))


@pytest.mark.parametrize("name", [1, None, ("a", "b")])
def test_a_name_that_is_no_string_is_refused(name: Any) -> None:
    with pytest.raises(LogError, match="takes a str as name"):
        fit(make_module(lambda m, batch, i: m.log(name, 1.0)), batches_of(2))


@pytest.mark.parametrize("second", [{}, {"prog_bar": True}])
def test_a_name_logged_twice_is_refused(second: dict[str, Any]) -> None:
    def log(module: jl.TrainModule, batch: Any, i: Any) -> None:
        module.log("x", 1.0)
        module.log("x", 1.0, **second)

    with pytest.raises(LogError, match=r"'x'.*twice in training_step"):
        fit(make_module(log), batches_of(2))


@pytest.mark.parametrize(
    "hooks",
    [
        {"on_train_batch_end": 2},
        {"on_train_epoch_end": 2},
        {"on_train_batch_start": 1, "on_train_batch_end": 1},
        {"on_validation_start": 1, "on_validation_epoch_end": 1},
    ],
)
def test_a_name_logged_twice_in_hooks_is_refused(hooks: dict[str, int]) -> None:
    def log(times: int) -> Any:
        return lambda self, *_: [self.log("twice", 1.0, on_step=False, on_epoch=True) for _ in range(times)] and None

    logs = type("Logs", (jl.Callback,), {hook: log(times) for hook, times in hooks.items()})()
    with pytest.raises(LogError, match="'twice'.*(Log a name once|Use another)"):
        fit(make_module(), batches_of(2), batches_of(2), callbacks=[logs])


def test_a_name_of_the_validation_step_is_refused_in_the_hook_after_it() -> None:
    module = make_module(validation=lambda m, batch, i: m.log("v", 1.0))
    logs = type("Logs", (jl.Callback,), {"on_validation_epoch_end": lambda self, *_: self.log("v", 100.0)})()
    with pytest.raises(LogError, match="'v'.*validation step"):
        fit(module, batches_of(2), batches_of(2), callbacks=[logs])


def test_a_parameter_logged_in_a_hook_is_the_one_of_that_step() -> None:
    logs = type("Logs", (jl.Callback,), {"on_train_batch_end": lambda self, t, m, *_: self.log("w", m.w[...])})()
    recorder = Recorder()
    seen: list[float] = []
    keep = type("Keep", (jl.Callback,), {"on_train_batch_end": lambda self, t, m, *_: seen.append(float(m.w[...]))})()
    fit(make_module(), batches_of(2, 2, 2), callbacks=[logs, keep, recorder])
    assert [row["w"] for _, row in recorder.rows] == seen


def test_an_average_of_nothing_is_nan() -> None:
    logs = type("Logs", (jl.Callback,), {"on_train_epoch_end": lambda self, *_: self.log("a", nnx.metrics.Average())})()
    recorder = Recorder()
    fit(make_module(), batches_of(2), callbacks=[logs, recorder], max_epochs=1)
    assert np.isnan(recorder.rows[-1][1]["a"])


@pytest.mark.parametrize("batch_size", [0, -1, "8", np.ones(2), np.int32(0)])
def test_a_batch_size_that_is_no_positive_number_is_refused(batch_size: Any) -> None:
    with pytest.raises(LogError, match="batch_size"):
        fit(make_module(lambda m, batch, i: m.log("x", 1.0, batch_size=batch_size)), batches_of(2))


@pytest.mark.parametrize("reduce_fx", ["median", jnp.mean, None])
def test_an_unknown_reduce_fx_lists_the_known(reduce_fx: Any) -> None:
    with pytest.raises(LogError, match=r"reduce_fx.*'mean', 'sum', 'min', 'max'"):
        fit(make_module(lambda m, batch, i: m.log("x", 1.0, reduce_fx=reduce_fx)), batches_of(2))


def test_on_step_in_a_validation_step_shows_each_batch_and_makes_no_row() -> None:
    shown = []

    class Show(Recorder):
        def on_validation_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            shown.append(dict(trainer.logged_metrics))

    module = make_module(validation=lambda m, batch, i: m.log("v", batch["x"].sum(), on_step=True, on_epoch=False))
    show, batches = Show(), batches_of(2, 3)
    fit(module, batches_of(2), batches, callbacks=[show], num_sanity_val_steps=0, max_epochs=1)
    assert shown == [{"v": pytest.approx(float(batch["x"].sum()))} for batch in batches]
    assert not any("v" in row for _, row in show.rows)


def test_neither_step_nor_epoch_is_refused() -> None:
    with pytest.raises(LogError, match="on_step=False, on_epoch=False"):
        fit(make_module(lambda m, batch, i: m.log("x", 1.0, on_step=False)), batches_of(2))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_logging_leaves_the_training_as_it_is(strategy: str) -> None:
    logs, silent, batches = make_module(log_position(on_epoch=True)), make_module(), batches_of(8, 8)
    fit(logs, batches, strategy=strategy)
    fit(silent, batches, strategy=strategy)
    assert np.asarray(logs.w[...]) == np.asarray(silent.w[...])


@pytest.mark.parametrize("name", ["step", "epoch"])
def test_the_names_of_a_rows_own_columns_are_refused(name: str) -> None:
    with pytest.raises(LogError, match=f"'{name}'.*of its own"):
        fit(make_module(lambda module, batch, i: module.log(name, 1.0)), batches_of(2))
