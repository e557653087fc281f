"""What people coming from Lightning are used to: it works here, or it is refused by name and never ignored."""

import datetime
import itertools
import logging
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

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError, LoggerError, ModuleError, StateError


class Line(jl.TrainModule):
    """y = x w."""

    def __init__(self, start: float = 0.0) -> None:
        self.w = nnx.Param(jnp.full((2,), start))

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ self.w - batch["y"]) ** 2)

    def training_step(self, batch: Any) -> Any:
        self.log("flat", 1.0, on_step=False, on_epoch=True)
        return self.loss(batch)

    def validation_step(self, batch: Any) -> None:
        self.log("loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def line(**members: Any) -> Line:
    """Return a line with other members of its class."""
    return type("Made", (Line,), members)()


def make_batches(count: int = 3) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(4, 2), "y": draw(4)} for _ in range(count)]


def make_trainer(*callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "strategy": "single"}
    return jl.Trainer(callbacks=list(callbacks), **(quiet | {"max_epochs": 1, "log_every_n_steps": 1} | arguments))


def on(**hooks: Callable[..., Any]) -> jl.Callback:
    """Return a callback with these functions of (self, trainer, module, ...) as its hooks."""
    return type("Made", (jl.Callback,), hooks)()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "jaxlit" and r.levelno >= logging.WARNING]


# Inside a step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
def test_the_trainers_counters_are_live_inside_a_step(strategy: str) -> None:
    def training_step(self: Any, batch: Any) -> Any:
        self.log("at", 10.0 * self.trainer.current_epoch)
        self.log("count", 1.0 * self.trainer.global_step)
        return self.loss(batch)

    rows: list[dict[str, float]] = []
    keep = on(on_log=lambda self, trainer, values, step: rows.append(values))
    make_trainer(keep, max_epochs=2, strategy=strategy).fit(line(training_step=training_step), make_batches(2))
    assert [(row["count"], row["at"]) for row in rows] == [(0, 0), (1, 0), (2, 10), (3, 10)]


def test_a_metric_read_inside_a_step_is_refused() -> None:
    step = lambda self, batch: self.loss(batch) * self.trainer.callback_metrics["flat"]  # noqa: E731
    with pytest.raises(StateError, match="'flat' is read inside a step"):
        make_trainer().fit(line(training_step=step), make_batches())


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_validation_batch_end"])
def test_an_attribute_set_in_a_batch_hook_is_refused_by_both_names(hook: str) -> None:
    def write(self: Any, *_: Any) -> None:
        self.weight = 2.0

    with pytest.raises(StateError, match=rf"weight was set in {hook}"):
        make_trainer().fit(line(**{hook: write}), make_batches(), make_batches())


@pytest.mark.parametrize(
    "step",
    [
        lambda self, batch: self.loss(batch) if self.loss(batch) > 1 else 0 * self.loss(batch),
        lambda self, batch: jnp.float32(float(self.loss(batch))),
        lambda self, batch: jnp.log(np.log(self.loss(batch))),
        lambda self, batch: batch["x"][batch["y"] > 0].mean(),
    ],
    ids=["if", "float", "numpy", "mask"],
)
def test_python_on_traced_values_comes_with_a_note_on_the_step_the_batch_and_what_to_do(step: Any) -> None:
    with pytest.raises(Exception) as caught:
        make_trainer().fit(line(training_step=step), make_batches())
    notes = "\n".join(caught.value.__notes__)
    assert "Made.training_step" in notes and "float32[4, 2]" in notes and "jnp.where" in notes


def test_any_error_in_a_step_tells_what_the_batch_was() -> None:
    with pytest.raises(KeyError) as caught:
        make_trainer().fit(line(training_step=lambda self, batch: batch["z"].mean()), make_batches())
    assert "'y': 'float32[4]'" in "\n".join(caught.value.__notes__)


# Data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple])
def test_arrays_in_a_list_are_no_loader(kind: Any) -> None:
    columns = kind((np.ones((8, 2), np.float32), np.ones(8, np.float32)))
    with pytest.raises(ArgumentTypeError, match=r"train_dataloaders.*float32\[8, 2\].*jl.ArrayLoader\(\(x, y\)"):
        make_trainer().fit(Line(), columns)


@pytest.mark.parametrize("bad", [5, None, "mnist"])
def test_a_list_of_validation_loaders_names_the_one_that_is_none(bad: Any) -> None:
    good = jl.ArrayLoader(make_batches(1)[0], 2)
    with pytest.raises(ArgumentTypeError, match=r"val_dataloaders=\.\.\.\)\[1\] is no loader"):
        make_trainer().fit(Line(), make_batches(), [good, bad])


def test_a_batch_without_a_row_is_refused() -> None:
    with pytest.raises(DataError, match="no array with rows"):
        make_trainer().fit(Line(), [5, 6])


def test_an_endless_validation_loader_is_refused() -> None:
    endless = grain.MapDataset.source(make_batches(1)).repeat()
    with pytest.raises(ArgumentError, match="val_dataloaders.*without end.*limit_val_batches"):
        make_trainer().fit(Line(), make_batches(), endless)


def test_overfit_batches_takes_the_same_batches_of_a_loader_that_shuffles_itself() -> None:
    class Shuffled:
        count = itertools.count()

        def __iter__(self) -> Iterator[Any]:
            return ({"x": np.full((2, 2), n, np.float32), "y": np.ones(2, np.float32)} for n in self.count)

    seen: list[float] = []
    keep = on(on_train_batch_end=lambda self, t, m, outputs, batch, i: seen.append(float(batch["x"][0, 0])))
    make_trainer(keep, overfit_batches=2, max_epochs=3).fit(Line(), Shuffled())
    assert seen == [0, 1] * 3


def test_a_later_batch_of_another_structure_is_refused_by_its_leaf() -> None:
    batches = make_batches(2)
    batches[1].pop("y")
    with pytest.raises(DataError, match=r"structure of the batch changed: missing batch\['y'\]"):
        make_trainer().fit(Line(), batches)


def test_a_data_module_knows_its_trainer() -> None:
    class Growing(jl.DataModule):
        def train_dataloader(self) -> Any:
            return make_batches(1 + self.trainer.current_epoch)  # type: ignore[union-attr]

    lengths: list[int] = []
    keep = on(on_train_epoch_start=lambda self, trainer, module: lengths.append(trainer.num_training_batches))
    make_trainer(keep, max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(Line(), datamodule=Growing())
    assert lengths == [1, 2, 3]


# Hooks and callbacks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["callback", "module"])
def test_a_batch_hook_may_leave_out_dataloader_idx(owner: str) -> None:
    called: list[int] = []
    if owner == "callback":
        hook: Any = lambda self, trainer, module, outputs, batch, batch_idx: called.append(batch_idx)  # noqa: E731
        make_trainer(on(on_validation_batch_end=hook)).validate(Line(), make_batches(2))
    else:
        hook = lambda self, outputs, batch, batch_idx: called.append(batch_idx)  # noqa: E731
        make_trainer().validate(line(on_validation_batch_end=hook), make_batches(2))
    assert called == [0, 1]


def test_a_hook_with_a_wrong_signature_is_refused_before_anything_runs() -> None:
    started: list[str] = []
    wrong = on(
        setup=lambda self, trainer, module, stage: started.append(stage),
        on_train_batch_end=lambda self, trainer, module, outputs: None,
    )
    with pytest.raises(ModuleError, match=r"on_train_batch_end\(trainer, module, outputs\) is called with .*batch_idx"):
        make_trainer(wrong).fit(Line(), make_batches())
    assert started == []


def test_a_callback_appended_to_the_trainer_is_called() -> None:
    called: list[str] = []
    trainer = make_trainer()
    trainer.callbacks.append(on(on_fit_start=lambda self, trainer, module: called.append("fit")))
    trainer.fit(line(configure_callbacks=lambda self: [jl.Callback()]), make_batches())
    trainer.fit(Line(), make_batches())
    assert called == ["fit", "fit"] and len(trainer.callbacks) == 1


def test_the_same_callback_twice_and_two_writers_of_one_file_are_refused() -> None:
    same = jl.Callback()
    with pytest.raises(ArgumentError, match="the same Callback object twice"):
        make_trainer(same, same)
    added = line(configure_callbacks=lambda self: jl.callbacks.CSVLogger())
    with pytest.raises(ArgumentError, match="two loggers that write to metrics.csv"):
        make_trainer(logger=True).fit(added, make_batches())


def test_fast_dev_run_leaves_out_loggers_of_ones_own_and_those_that_a_module_adds() -> None:
    rows: list[int] = []
    logger = on(on_log=lambda self, trainer, values, step: rows.append(step))
    module = line(configure_callbacks=lambda self: [jl.callbacks.EarlyStopping("nope")])
    make_trainer(logger=logger, fast_dev_run=1).fit(module, make_batches())
    assert rows == []


def test_max_time_ends_a_training_whose_epochs_are_all_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    skip = on(on_train_batch_start=lambda self, trainer, module, batch, i: np.int64(-1))
    trainer = make_trainer(skip, max_epochs=None, max_time=datetime.timedelta(seconds=5))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    trainer.fit(Line(), make_batches())
    assert trainer.global_step == 0 and trainer.stop_reason.startswith("max_time")


def test_a_skipped_last_batch_is_not_told_as_short(caplog: pytest.LogCaptureFixture) -> None:
    skip = on(on_train_batch_start=lambda self, trainer, module, batch, i: -1 if i == 2 else None)
    make_trainer(skip).fit(Line(), make_batches(3))
    assert warnings_of(caplog) == []


# Monitors ---------------------------------------------------------------------------------------------


def test_without_validation_early_stopping_watches_the_epochs_whatever_the_interval() -> None:
    stop = jl.callbacks.EarlyStopping("flat", patience=1)
    trainer = make_trainer(stop, max_epochs=5, val_check_interval=2)
    trainer.fit(Line(), make_batches())
    assert trainer.current_epoch == 2


def test_a_value_of_single_validation_steps_is_nothing_to_monitor() -> None:
    validation_step = lambda self, batch: self.log("v", 1.0, on_step=True, on_epoch=False)  # noqa: E731
    with pytest.raises(LoggerError, match="EarlyStopping.*'v'"):
        make_trainer(jl.callbacks.EarlyStopping("v")).fit(
            line(validation_step=validation_step), make_batches(), make_batches()
        )


def test_a_monitor_that_no_check_has_reached_is_told(caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(jl.callbacks.EarlyStopping("nope"), max_steps=2).fit(Line(), make_batches(3), make_batches(1))
    (message,) = warnings_of(caplog)
    assert "monitor='nope'" in message


# Optimizers and apply ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tx",
    [
        optax.multi_transform({"a": optax.sgd(0.1)}, {"w": "a"}),
        optax.masked(optax.sgd(0.1), {"w": True}),
        optax.multi_transform({"a": optax.sgd(0.1)}, lambda params: jax.tree.map(lambda _: "b", params)),
    ],
    ids=["labels", "mask", "unknown label"],
)
def test_labels_that_do_not_fit_the_parameters_are_refused_with_the_form_that_does(tx: Any) -> None:
    with pytest.raises(ModuleError, match=r"Made\.configure_optimizers.*lambda params"):
        make_trainer().fit(line(configure_optimizers=lambda self: tx), make_batches())


class Two(Line):
    """A line and an offset, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nnx.Param(jnp.zeros(()))

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ self.w + self.offset - batch["y"]) ** 2)

    def configure_optimizers(self) -> Any:
        labels = lambda params: jax.tree_util.tree_map_with_path(  # noqa: E731
            lambda path, _: "line" if path[0].key == "w" else "rest", params
        )
        rates = {"line": optax.inject_hyperparams(optax.sgd)(0.1), "rest": optax.inject_hyperparams(optax.sgd)(0.2)}
        return optax.multi_transform(rates, labels)


def test_hyperparameters_of_several_optimizers_are_told_apart_by_their_labels() -> None:
    names: list[str] = []

    def stop_the_line(self: Any, trainer: jl.Trainer, module: Any) -> None:
        names.extend(trainer.hyperparams)
        trainer.hyperparams["learning_rate/line"] = 0.0

    module = Two()
    make_trainer(on(on_train_start=stop_the_line)).fit(module, make_batches())
    assert names == ["learning_rate/line", "learning_rate/rest"]
    assert (np.asarray(module.w[...]) == 0).all() and float(module.offset[...]) != 0


def test_a_plateau_lowers_the_rate_of_every_optimizer() -> None:
    plateau = jl.callbacks.ReduceLROnPlateau("flat", factor=0.5, patience=1)
    trainer = make_trainer(plateau, max_epochs=2)
    trainer.fit(Two(), make_batches())
    assert list(trainer.hyperparams.values()) == pytest.approx([0.05, 0.1])
    assert plateau.num_reductions == 1


def test_apply_sees_the_hyperparameters_and_the_precision_of_the_module() -> None:
    trainer = make_trainer(precision="bf16-mixed")
    trainer.fit(Line(3.0), make_batches())
    found: list[Any] = []
    out = trainer.apply(lambda module, x: found.append(module.hparams) or x @ module.w, make_batches(1)[0]["x"])
    assert found == [{"start": 3.0}] and out.dtype == jnp.bfloat16
    with pytest.raises(ArgumentTypeError, match="takes a function of a module, got None"):
        trainer.apply(None)  # type: ignore[arg-type]


def test_a_state_that_a_compiled_step_has_overwritten_is_refused() -> None:
    batch = make_batches(1)[0]
    state, step = jl.compile_step(Line(), batch=batch, strategy="single")
    step(state, batch)
    with pytest.raises(StateError, match="overwritten.*the one that it returned"):
        step(state, batch)
    with pytest.raises(ArgumentTypeError, match="takes the state of compile_step, got NoneType"):
        step(None, batch)


def test_one_strategy_object_serves_two_compiled_steps() -> None:
    batch, strategy = make_batches(1)[0], jl.strategies.DDP()
    runs = [jl.compile_step(Line(), batch=batch, strategy=strategy, devices=n) for n in (4, 2)]
    losses = [float(step(state, batch)[1]["loss"]) for state, step in runs]
    assert losses == pytest.approx([float(np.mean(batch["y"] ** 2))] * 2, rel=1e-6)
