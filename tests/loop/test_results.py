"""The metrics as callbacks read them, and the rows that a Trainer keeps; test_results_recorded.py has Lightning's."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import Stream, numbered, sized
from kit.by_hand import mean
from kit.journal import Rows, at_batch, hooks
from kit.modules import Mean, logging, module
from kit.refusals import refuses
from kit.trainers import BARE, fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError, LogError, LoggerError
from jaxlit.loop.results import MOST, History


def test_metrics_are_cleared_by_the_next_fit_and_read_only() -> None:
    trainer = fit(logging(lambda m, batch, i: m.log("train/loss", 1.0, prog_bar=True)), numbered(1))
    for name in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
        with pytest.raises(TypeError):
            getattr(trainer, name)["train/loss"] = 1.0
        assert repr(getattr(trainer, name)) == "{'train/loss': 1.0}" and len(getattr(trainer, name)) == 1
    with pytest.raises(KeyError, match=r"Did you mean 'train/loss'.*Logged: \['train/loss'\]"):
        trainer.callback_metrics["train/los"]
    trainer.fit(logging(lambda m, batch, i: m.log("other", 1.0)), numbered(1))
    assert set(trainer.callback_metrics) == {"other"}


def test_a_stop_logs_its_last_step() -> None:
    rows, stop = Rows(), at_batch(2, lambda trainer, module: trainer.stop("enough"))
    fit(logging(lambda m, batch, i: m.log("x", 1.0 * i)), numbered(4), None, rows, stop, log_every_n_steps=50)
    assert rows.rows == [(2, {"x": 2.0, "epoch": 0})]


def test_a_parameter_logged_in_a_hook_is_the_one_of_that_step() -> None:
    # Nobody reads the value before the next step has overwritten the array.
    logs = hooks(on_train_batch_end=lambda t, m, *_: m.log("w", m.scalar.get_value()))

    def init(self: Any) -> None:
        self.scalar = nnx.Param(jnp.zeros(()))

    rows, model = Rows(), module(init=init, error=lambda self, batch: batch["x"] - self.scalar[...])
    fit(model, numbered(4), None, logs, rows, log_every_n_steps=1)
    w, expected = 0.0, []
    for number in range(1, 5):
        w += 0.5 * (number - w)
        expected.append(w)
    assert rows.of("w") == expected


@pytest.mark.parametrize(("reduce_fx", "expected"), [("mean", 54 / 26), ("sum", 6), ("min", 1), ("max", 3)])
def test_values_of_batch_hooks_are_weighted_by_rows(reduce_fx: str, expected: float) -> None:
    def log(trainer: Any, module: Any, outputs: Any, batch: Any, i: int) -> None:
        module.log("x", i + 1, on_step=False, on_epoch=True, reduce_fx=reduce_fx)

    trainer = fit(logging(), sized(8, 8, 10), None, hooks(on_train_batch_end=log))
    assert trainer.callback_metrics["x"] == pytest.approx(expected)


def test_an_epoch_whose_steps_were_all_left_out_has_no_value_in_rows() -> None:
    def training(self: Any, batch: Any, batch_idx: Any) -> None:
        for reduce_fx in ("mean", "sum", "min", "max"):
            self.log(reduce_fx, batch["x"].mean(), on_step=False, on_epoch=True, reduce_fx=reduce_fx)

    bad = [{"x": np.full((8, 1), np.nan, np.float32)}] * 2
    rows, read = Rows(), list[list[float]]()
    names = ("mean", "sum", "min", "max")
    metrics = hooks(on_train_epoch_end=lambda t, m: read.append([t.callback_metrics[name] for name in names]))
    fit(logging(training), Stream(bad, numbered(2)), None, rows, metrics, max_epochs=2, nan_policy="skip")
    assert [[row[name] for name in names] for _, row in rows.rows if {*names} & {*row}] == [[1.5, 3.0, 1.0, 2.0]]
    assert np.isnan(read[0]).all()  # a monitor finds no number to be the best
    assert read[1] == [1.5, 3.0, 1.0, 2.0]
    trainer = fit(logging(lambda m, batch, i: m.log("x", 1.0)), numbered(1))
    other = logging()
    type(other).on_train_start = lambda self: self.log("x", 2.0)
    trainer.fit(other, numbered(1))
    assert trainer.callback_metrics["x"] == 2.0


def test_a_name_that_a_hook_logs_before_the_step_is_refused() -> None:
    made = logging(lambda m, batch, i: m.log("x", 1.0, on_epoch=True))
    early = hooks(on_train_start=lambda trainer, module: module.log("x", 42.0))
    with pytest.raises(LogError, match=r"'x', \.\.\.\) in on_train_start: training_step logs this name"):
        fit(made, numbered(1), None, early)


def test_what_hooks_log_for_a_dropped_window_is_in_no_row() -> None:
    rows = Rows()

    def start(trainer: Any, module: Any, batch: Any, idx: int) -> int | None:
        module.log("seen", float(idx), on_step=True, on_epoch=False)
        return -1 if idx == 3 else None  # in the middle of a window of two batches

    given = {"accumulate_grad_batches": 2, "max_epochs": 2, "log_every_n_steps": 1}
    fit(logging(), numbered(4), None, hooks(on_train_batch_start=start), rows, **given)
    assert rows.of("seen") == [0.5, 0.5]


def test_it_has_every_row_of_the_newest_fit_and_fit_returns_none():
    trainer = make_trainer(**BARE, log_every_n_steps=1, max_epochs=2)
    assert len(trainer.history) == 0
    assert trainer.fit(Mean(), numbered(2), numbered(1)) is None
    steps = {"loss": [0, 1, 2, 3], "lr": [0, 1, 2, 3], "val": [1, 3]}
    assert {name: [*result] for name, (result, _) in trainer.history.items()} == steps
    losses = [(n - mean([[k] for k in (1, 2, 1, 2)[:i]])) ** 2 for i, n in enumerate((1, 2, 1, 2))]
    assert trainer.history["loss"][1].tolist() == losses
    weights = [mean([[1], [2]] * epochs) for epochs in (1, 2)]
    assert trainer.history["val"][1].tolist() == [1 - w for w in weights]
    trainer.validate(Mean(), numbered(1))  # of another module, after the fit
    assert trainer.history["val"][1].tolist() == [1 - w for w in weights]
    trainer.max_epochs = 1
    trainer.fit(Mean(), numbered(1))
    assert [*trainer.history] == ["loss", "lr"] and trainer.history["loss"][0].tolist() == [0]
    with pytest.raises(KeyError, match="Did you mean 'loss'"):
        trainer.history["los"]


def filled(steps, history=None):
    history = history or History()
    for step in steps:
        history.add({"x": step}, step)
    return history


def test_history_thins_out_when_it_has_too_many_rows():
    history = filled(range(4 * MOST))
    steps, values = history["x"]
    assert MOST / 2 < len(steps) <= MOST and {*np.diff(steps)} == {4} and steps[0] == 0
    assert (values == steps).all() and steps[-1] >= 4 * MOST - 4


def test_what_is_undone_is_forgotten():
    history = filled(range(5))
    history.add({"y": 9}, 4)
    history.clear(3)
    assert [*history] == ["x"] and history["x"][0].tolist() == [0, 1, 2]
    history.add({"x": 7}, 3)
    assert history["x"][1].tolist() == [0, 1, 2, 7]
    filled(range(4, MOST + 1), history)  # from now on every second is kept
    history.clear(6)
    filled(range(6, 11), history)
    assert history["x"][0].tolist() == [0, 2, 4, 6, 8, 10]


def test_curves_whose_names_end_alike_share_a_picture(monkeypatch):
    history = History()
    refuses(ArgumentError, history.plot, "There is none: call self.log in a step")
    for step in range(3):
        history.add({"train/loss": 2.0 * step, "val/loss": 5.0, "accuracy": 0.5}, step)
    figure = history.plot()
    drawn = [[(line.get_label(), line.get_xydata().tolist()) for line in axes.lines] for axes in figure.axes]
    curve = [[[k, y(k)] for k in range(3)] for y in (lambda k: 2.0 * k, lambda k: 5.0, lambda k: 0.5)]
    assert drawn == [[("train/loss", curve[0]), ("val/loss", curve[1])], [("accuracy", curve[2])]]
    assert len(history.plot(["accuracy"]).axes) == 1
    refuses(KeyError, lambda: history.plot(["gone"]), "No row has 'gone'")
    assert history._repr_png_().startswith(b"\x89PNG")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert history._repr_png_() is None
    refuses(LoggerError, history.plot, r"pip install matplotlib")


@pytest.mark.parametrize(
    ("batches", "arguments", "steps"),
    [
        (16, {}, [1, 3, 5, 7, 9, 11, 13, 15]),
        (16, {"accumulate_grad_batches": 2}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, {}, [0, 1, 2]),
        (450, {"max_steps": 120}, [49, 99]),
        (450, {}, [49, 99, 149, 199, 249, 299, 349, 399, 449]),
    ],
)
def test_by_default_an_epoch_has_eight_rows_or_more(batches, arguments, steps):
    assert fit(Mean(), numbered(batches), **BARE, **arguments).history["loss"][0].tolist() == steps


@pytest.mark.parametrize("k", [1, 2])
def test_the_outputs_of_a_step_are_a_dict_whose_loss_is_read_when_asked_for(k: int) -> None:
    seen = list[Any]()
    unread: Any = [dict, lambda x: x | {}, lambda x: jax.tree.map(lambda y: y, x), lambda x: {**x.copy()}]

    def look(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        whole = jax.tree.map(float, unread[batch_idx % 4](outputs))  # before anything has asked for the loss
        loss = float(outputs["loss"])
        assert whole == {"loss": loss, "twice": 2 * loss}
        assert isinstance(outputs, dict) and list(outputs) == ["loss", "twice"] and len(outputs) == 2
        for other in (dict(outputs), {**outputs}, outputs.copy(), outputs | {}, dict(outputs.items())):
            assert {name: float(x) for name, x in other.items()} == {"loss": loss, "twice": 2 * loss}
        outputs["mine"] = 3
        assert outputs.pop("mine") == 3 and "mine" not in outputs and outputs.get("mine") is None
        assert float(outputs.pop("loss")) == loss and "loss" not in outputs
        seen.append(loss)

    def step(self: Any, batch: Any) -> Any:
        loss = jnp.mean(self.error(batch) ** 2)
        return {"loss": loss, "twice": 2 * loss}

    fit(module(step), numbered(4), None, hooks(on_train_batch_end=look), steps_per_execution=k, **BARE)
    assert len(seen) == 4


def test_a_prediction_leaves_the_metrics_of_the_fit() -> None:
    made = module(predict_step=lambda self, batch: self.w[...])
    trainer = fit(made, numbered(3), numbered(2), **BARE)
    before = dict(trainer.callback_metrics)
    trainer.predict(made, numbered(2))
    assert dict(trainer.callback_metrics) == before and {"loss", "val"} <= before.keys()


def mean_since_row(self: Any, batch: Any) -> Any:
    self.log("last", batch["x"].mean())
    self.log("mean", batch["x"].mean(), on_step="mean")
    self.log("both", batch["x"].mean(), on_step="mean", on_epoch=True)
    self.log("tokens", jnp.sum(batch["x"]).astype(jnp.int32), on_step="mean")
    return jnp.mean(self.error(batch) ** 2)


@pytest.mark.parametrize(
    ("strategy", "accumulate", "k"),
    thinned(list(itertools.product(["single", "fsdp", "shard_map"], [1, 2], [1, 3])), ("single", 1, 1), ("fsdp", 2, 1)),
)
def test_a_row_has_the_mean_of_the_steps_since_the_last(strategy: str, accumulate: int, k: int) -> None:
    """Weighted by rows, whatever epochs the steps belong to."""
    batches = sized(*[8, 16, 8, 8, 24, 8, 16, 8] * 2)
    for i, batch in enumerate(batches):
        batch["x"] = np.full_like(batch["x"], float(i))
    rows, given = Rows(), {"log_every_n_steps": 3, "max_epochs": 2, "accumulate_grad_batches": accumulate}
    given |= {"steps_per_execution": k * accumulate if k > 1 else 1, "strategy": splitting(strategy)}
    fit(module(mean_since_row), batches, None, rows, **given, **BARE)
    values = [(x["x"][0, 0], len(x["x"]), x["x"].sum()) for x in batches]
    steps = [values[i : i + accumulate] for i in range(0, len(values), accumulate)]
    each = len(steps)
    expected = []
    for step in range(3, 2 * each + 1, 3):
        seen = [x for i in range(step - 3, step) for x in steps[i % each]]
        weights = [n for _, n, _ in seen]
        expected.append([np.average([x[j] for x in seen], weights=weights) for j in (0, 2)])
    # Under shard_map each replica logs the sum of its own rows.
    for name, column in (("mean", 0), ("both_step", 0), *[("tokens", 1)] * (strategy != "shard_map")):
        np.testing.assert_allclose(rows.of(name), [x[column] for x in expected], rtol=1e-6)
    last = [np.average([x for x, *_ in s], weights=[n for _, n, _ in s]) for s in [*steps, *steps][2::3]]
    np.testing.assert_allclose(rows.of("last"), last, rtol=1e-6)
    whole = np.average([x for x, *_ in values], weights=[n for _, n, _ in values])
    np.testing.assert_allclose(rows.of("both_epoch"), [whole, whole], rtol=1e-6)


@pytest.mark.parametrize("strategies", [("single", "fsdp"), ("shard_map", "single")])
def test_a_resume_continues_the_mean_of_a_row(strategies: tuple[str, str]) -> None:
    rows, save = Rows(), at_batch(6, lambda t, m: t.save_checkpoint("kept"))
    given: Any = {"log_every_n_steps": 9, "limit_train_batches": 9} | BARE
    fit(module(mean_since_row), numbered(9), None, save, **given | {"strategy": strategies[0]})
    fit(module(mean_since_row), numbered(9), None, rows, ckpt_path="kept", **given | {"strategy": strategies[1]})
    assert rows.of("mean") == [pytest.approx(5.0)]  # of 1 to 9, not of 8 and 9


def row_means(*callbacks: Any, batches: Any = None, **given: Any) -> list[float]:
    rows = Rows()
    given = {"log_every_n_steps": 3} | given
    fit(module(mean_since_row), batches or numbered(9), None, rows, *callbacks, **given, **BARE)
    return rows.of("mean")


@pytest.mark.parametrize(("at", "expected"), [(8, [9.5]), (6, [7.5, 10.5]), (4, [6.0, 10.5])])
def test_a_resume_with_another_interval_continues_the_mean_of_a_row(at: int, expected: list[float]) -> None:
    """Rows were every 3 steps, and are every 4: the first one has the steps since the last of the rows before."""
    rows, save = Rows(), at_batch(at - 1, lambda t, m: t.save_checkpoint("kept"))
    fit(module(mean_since_row), numbered(12), None, save, log_every_n_steps=3, **BARE)
    fit(module(mean_since_row), numbered(12), None, rows, ckpt_path="kept", log_every_n_steps=4, **BARE)
    assert rows.of("mean") == expected


@pytest.mark.parametrize(
    ("resumed", "saved", "bad", "every", "change", "expected"),
    [
        # Back to step 4, which has a row: the row of step 8 has batches 10 to 13, and none of 1 to 4.
        (4, None, 6, 4, None, [11.5, 15.5]),
        (None, 4, 6, 4, None, [11.5, 15.5]),
        # Back to step 3, before the interval was another one: steps 1 to 4 have batches 1 to 3 and 10.
        (None, 3, 7, 4, (6, 2), [4.0, 11.5, 13.5]),
    ],
)
def test_means_of_rows_go_back_with_training(
    resumed: Any, saved: Any, bad: int, every: int, change: Any, expected: list[float]
) -> None:
    def at_step(step: Any, do: Any) -> jl.Callback:
        return hooks(on_safe_point=lambda trainer, module, *_: do(trainer) if trainer.global_step == step else None)

    save = lambda trainer: trainer.save_checkpoint(f"kept{trainer.global_step}")  # noqa: E731
    given: Any = {"log_every_n_steps": every} | BARE
    if resumed:
        fit(module(mean_since_row), numbered(24), None, at_step(resumed, save), **given)
        given |= {"ckpt_path": f"kept{resumed}"}
    batches, rows = numbered(24), Rows()
    batches[bad - 1]["x"][:] = np.nan
    back = hooks(on_load_checkpoint=lambda *_: rows.rows.clear())
    change_at, other = change or (None, None)
    set_interval = lambda trainer: setattr(trainer, "log_every_n_steps", other)  # noqa: E731
    callbacks = [rows, back, at_step(saved, save), at_step(change_at, set_interval)]
    fit(module(mean_since_row), batches, None, *callbacks, nan_policy="rollback", **given)
    assert rows.of("mean")[: len(expected)] == expected


class BadInSecondEpoch:
    """Batches 1 to 6, of which the second has no number in the second epoch."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Any:
        self.epochs += 1
        batches = numbered(6)
        batches[1]["x"][:] = np.nan if self.epochs == 2 else batches[1]["x"]
        return iter(batches)


def test_the_mean_of_a_row_goes_back_to_the_end_of_an_epoch() -> None:
    rows, saves, seen = Rows(), jl.callbacks.ModelCheckpoint(every_n_epochs=1), list[float]()

    def forget(*_: Any) -> None:
        rows.rows.clear()
        seen.clear()

    see = hooks(on_train_batch_end=lambda t, m, o, batch, i: seen.append(batch["x"][0, 0]), on_load_checkpoint=forget)
    given: Any = {"log_every_n_steps": 4, "max_epochs": 3, "default_root_dir": "run"}
    fit(module(mean_since_row), BadInSecondEpoch(), None, rows, saves, see, nan_policy="rollback", **given)
    assert rows.of("mean") == [np.mean([5, 6, *seen[:2]]), np.mean(seen[2:6])]  # 5 and 6 since the row of step 4


def test_a_resume_between_two_epochs_continues_the_mean_of_a_row() -> None:
    rows = Rows()
    given: Any = {"log_every_n_steps": 4, "resume": "auto", "default_root_dir": "run"}
    for epochs in (1, 2):
        saves = jl.callbacks.ModelCheckpoint(every_n_epochs=1)
        fit(module(mean_since_row), numbered(6), None, rows, saves, max_epochs=epochs, **given)
    assert rows.of("mean") == [2.5, 3.5, 4.5]  # of 1 to 4, of 5, 6, 1 and 2, and of 3 to 6


def test_the_mean_of_a_row_has_the_steps_while_there_were_no_rows() -> None:
    def change(trainer: Any, *_: Any) -> None:
        if (every := {3: 0, 9: 5}.get(trainer.global_step)) is not None:
            trainer.log_every_n_steps = every

    means = row_means(hooks(on_train_batch_end=change), batches=numbered(15), log_every_n_steps=2)
    assert means == [1.5, 6.5, 13.0]  # of 1 and 2, 3 to 10, 11 to 15


def test_a_step_that_is_left_out_after_a_row_is_in_no_mean() -> None:
    batches = numbered(9)
    batches[3]["x"][:] = np.nan
    assert row_means(batches=batches, nan_policy="skip") == [2.0, 5.5, 8.0]  # of 1 to 3, 5 and 6, 7 to 9


@pytest.mark.parametrize(
    ("hook", "step", "expected"),
    [
        ("on_train_batch_end", 7, [2.0, 5.0, 7.5, 10.5]),  # of 1 to 3, 4 to 6, 7 and 8, 9 to 12
        ("on_train_batch_end", 6, [2.0, 6.0, 10.5]),  # step 6 has no row any more
        ("on_safe_point", 6, [2.0, 5.0, 7.5, 10.5]),  # it has one already
        ("on_safe_point", 4, [2.0, 6.0, 10.5]),  # step 4 has none, though it would have by the new interval
    ],
)
@pytest.mark.parametrize("epochs", [1, 2])
def test_means_follow_another_interval(hook: str, step: int, expected: list[float], epochs: int) -> None:
    def change(trainer: Any, *_: Any) -> None:
        if trainer.global_step == step:
            trainer.log_every_n_steps = 4

    each = 12 // epochs
    stream = Stream(numbered(each), numbered(each, first=each + 1))
    assert row_means(hooks(**{hook: change}), batches=stream, max_epochs=epochs) == expected


def test_means_follow_the_length_of_an_epoch() -> None:
    """By default a row is an eighth of an epoch, and another epoch may have another loader."""

    class Data(jl.DataModule):
        def train_dataloader(self) -> Any:
            return numbered(16 if self.trainer.current_epoch == 0 else 32)

    rows = Rows()
    given = {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    make_trainer(rows, **given, **BARE).fit(module(mean_since_row), datamodule=Data())
    expected = [1.5 + i for i in range(0, 16, 2)] + [2.5 + i for i in range(0, 32, 4)]
    assert rows.of("mean") == expected


def test_members_of_a_population_have_means_since_the_last_row() -> None:
    class Member(Mean):
        def __init__(self, lr: float) -> None:
            super().__init__()
            self.lr = lr

        training_step = mean_since_row

        def configure_optimizers(self) -> Any:
            return optax.sgd(self.lr)

    rows = list[Any]()
    log = lambda member, step, metrics: rows.append((member, step, metrics.get("mean")))  # noqa: E731
    jl.fit_many(Member, [{"lr": 0.1}, {"lr": 0.2}], numbered(6), log=log, log_every_n_steps=3, max_epochs=1)
    seen = [row for row in rows if row[2] is not None]
    assert sorted(seen) == [(0, 2, 2.0), (0, 5, 5.0), (1, 2, 2.0), (1, 5, 5.0)]  # by index, as in `rows()`


def test_only_mean_is_a_word_for_on_step() -> None:
    step = lambda self, batch: self.log("x", 1.0, on_step="avg")  # noqa: E731
    words = r"self.log\('x', on_step='avg'\) takes a bool or 'mean'"
    refuses(LogError, lambda: fit(module(step), numbered(2), **BARE), words)


def test_a_mean_of_rows_is_for_training_steps() -> None:
    step = lambda self, batch: self.log("x", 1.0, on_step="mean")  # noqa: E731
    words = r"self.log\('x', on_step='mean'\) in validation_step: log it in training_step"
    refuses(LogError, lambda: fit(module(validation_step=step), numbered(2), numbered(2), **BARE), words)
