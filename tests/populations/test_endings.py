"""How members end: by a rule, by a step that is not finite, or with all others."""

import logging
import math
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kit.batches import numbered
from kit.by_hand import mean
from kit.modules import Mean
from kit.pages import blocks, recipe
from kit.refusals import refuses
from kit.trainers import fit

import jaxlit as jl
from jaxlit.errors import ArgumentError, LoggerError


class Paced(Mean):
    """A `Mean` whose loss is not finite at one step, and whose rate is an argument."""

    def __init__(self, lr: float = 0.25, bad_step: int = -1) -> None:
        super().__init__()
        self.lr, self.bad_step = lr, bad_step

    def training_step(self, batch: Any) -> jax.Array:
        loss = super().training_step(batch)
        return jnp.where(self.global_step == self.bad_step, jnp.nan, loss)

    def validation_step(self, batch: Any) -> None:
        self.log("val", jnp.mean(self.error(batch) ** 2))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(self.lr)


def weight(population: Any, index: int) -> float:
    return float(population.module(index).w[...][0])


def test_a_bad_step_ends_its_member_alone(caplog: pytest.LogCaptureFixture) -> None:
    variations = [{"lr": 0.25}, {"lr": 0.25, "bad_step": 3}, {"lr": 0.4}]
    population = jl.fit_many(Paced, variations, numbered(2), numbered(1), max_epochs=3, log_every_n_steps=1)
    assert weight(population, 0) == pytest.approx(mean([[1], [2]] * 3))
    assert weight(population, 1) == pytest.approx(mean([[1], [2], [1]]))  # what three steps have made of it
    assert population.ended == [None, "step 3 was not finite", None]
    assert "member 1 (lr=0.25, bad_step=3): step 3 was not finite" in caplog.text
    steps = [row["step"] for row in population.rows() if row["member"] == 1 and "loss" in row]
    assert steps == [0, 1, 2, 3]
    assert [row["step"] for row in population.rows() if row["member"] == 1 and "val" in row] == [1]
    assert np.argmin([x["val"] for x in population.metrics]) == 1  # of weights that it no longer has
    assert population.best_index("val") == 0


def test_early_stopping_ends_each_member_by_its_own_metric() -> None:
    """The rates make one member improve to the end, and others not: each stops where its own Trainer would."""
    rates, rule = (0.01, 0.6, 0.9), {"monitor": "val", "patience": 2, "min_delta": 1e-3}
    stop = jl.callbacks.EarlyStopping(**rule)
    data, variations = (numbered(4), numbered(1, first=3)), [{"lr": lr} for lr in rates]
    population = jl.fit_many(Paced, variations, *data, max_epochs=8, early_stopping=stop)
    stopped = []
    for i, lr in enumerate(rates):
        module = Paced(lr=lr)
        alone = jl.callbacks.EarlyStopping(**rule)
        trainer = fit(module, *data, alone, max_epochs=8, logger=False)
        np.testing.assert_allclose(weight(population, i), module.w[...][0], rtol=1e-5)
        assert population.ended[i] == alone.stopping_reason_message
        stopped.append(trainer.global_step)
    assert stopped[0] == 32
    assert stopped[1] < 32
    line = str(population).splitlines()[2].split()
    assert int(line[2]) == stopped[1]


def test_early_stopping_is_verbose_and_not_strict_where_asked(capsys: pytest.CaptureFixture[str]) -> None:
    def train(val: Any, **rule: Any) -> Any:
        stop = jl.callbacks.EarlyStopping("val", verbose=True, **rule)
        return jl.fit_many(Paced, [{"lr": 0.1}], numbered(2), val, max_epochs=2, early_stopping=stop)

    population = train(numbered(1, first=3))
    first = next(row["val"] for row in population.rows() if "val" in row)
    assert f"member 0 (lr=0.1): val improved to {first:.4g}." in capsys.readouterr().out.splitlines()
    refuses(LoggerError, lambda: train(None), "no such metric")
    assert train(None, strict=False).ended == [None]


def test_training_ends_when_every_member_has_ended() -> None:
    seen: list[int] = []
    stop = jl.callbacks.EarlyStopping("val", patience=1, min_delta=1e6)
    given = {"max_epochs": 100, "early_stopping": stop, "log_every_n_steps": 1}
    log = lambda member, step, metrics: seen.append(step)  # noqa: E731
    population = jl.fit_many(Paced, [{"lr": 0.1}, {"lr": 0.2}], numbered(2), numbered(1), log=log, **given)
    assert max(seen) == 3  # the first check sets the best value, the second one ends
    assert all(population.ended)
    assert stop.wait_count == 0


def test_a_rule_that_was_used_before_begins_again() -> None:
    stop = jl.callbacks.EarlyStopping("val", patience=1)
    fit(Paced(), numbered(2), numbered(1), stop, max_epochs=4, logger=False)
    assert math.isfinite(stop.best_score)
    population = jl.fit_many(Paced, [{"lr": 0.01}], numbered(2), numbered(1), max_epochs=3, early_stopping=stop)
    assert population.ended == [None]


def test_rows_reach_log_as_they_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    rows: list[Any] = []
    given = {"max_epochs": 2, "log_every_n_steps": 2, "log": lambda *row: rows.append(row)}
    with caplog.at_level(logging.WARNING):
        population = jl.fit_many(Paced, [{"lr": 0.1}, {"lr": 0.2}], numbered(5), numbered(2), **given)
    kept = [{k: x for k, x in row.items() if k not in ("epoch",)} for row in population.rows()]
    assert kept == [{"member": i, "lr": (0.1, 0.2)[i], "step": step, **metrics} for i, step, metrics in rows]
    assert [step for i, step, metrics in rows if i == 0 and "loss" in metrics] == [1, 3, 5, 7, 9]
    assert [step for i, step, metrics in rows if i == 0 and "val" in metrics] == [4, 9]
    assert caplog.text == ""


def test_the_best_member_is_an_ordinary_module(capsys: pytest.CaptureFixture[str]) -> None:
    variations = [{"lr": lr} for lr in (0.01, 0.4, 0.1)]
    population = jl.fit_many(Paced, variations, numbered(3), numbered(1, first=3), max_epochs=4)
    assert population.best_index("val") == 1
    assert population.best_index("val", mode="max") == 0
    best = population.best("val")
    assert best.lr == 0.4
    assert best.hparams.lr == 0.4
    (found,) = jl.Trainer(max_epochs=1, strategy="single", logger=False).validate(best, numbered(1, first=3))
    assert found["val"] == pytest.approx(population.metrics[1]["val"])
    capsys.readouterr()
    print(population)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["member", "lr", "steps", "val", "ended"]
    assert [line.split()[:3] for line in lines] == [["0", "0.01", "12"], ["1", "0.4", "12"], ["2", "0.1", "12"]]


@pytest.mark.full
def test_the_recipe_for_wandb_gives_each_member_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for `wandb.init`, as twelve real runs would each start a process."""
    runs: list[Any] = []

    def init(config: Any, **more: Any) -> Any:
        run = SimpleNamespace(config=config, rows=[], ended=False)
        run.log = lambda metrics, step: run.rows.append((step, *metrics))
        run.finish = lambda: setattr(run, "ended", True)
        runs.append(run)
        return run

    monkeypatch.setattr("wandb.init", init)
    exec("\n".join([blocks("populations.md")[0], recipe("populations.md", "wandb")]), {})
    assert [run.config for run in runs] == [{"seed": s, "lr": lr} for lr in (1e-4, 1e-3, 1e-2) for s in range(4)]
    assert [run.rows for run in runs] == [[(3, "val/loss"), (7, "val/loss")]] * 12
    assert all(run.ended for run in runs)


def test_a_population_is_a_table_and_a_picture() -> None:
    rates = (0.25, 0.125)
    population = jl.fit_many(
        Paced, [{"lr": lr} for lr in rates], numbered(3), numbered(1), max_epochs=2, log_every_n_steps=1
    )
    trained = []
    for lr in rates:
        model = Paced(lr)
        trained.append(fit(model, numbered(3), numbered(1), max_epochs=2, log_every_n_steps=1).history)
    for i, (row, history) in enumerate(zip(population.table(), trained, strict=True)):
        assert (row["member"], row["lr"], row["steps"], row["ended"]) == (i, rates[i], 6, None)
        assert row["val"] == pytest.approx(history["val"][1][-1], rel=1e-6)
    figure = population.plot(["loss", "val"])
    for axes, name in zip(figure.axes, ("loss", "val"), strict=True):
        assert [line.get_label() for line in axes.lines] == ["lr=0.25", "lr=0.125"]
        for line, history in zip(axes.lines, trained, strict=True):
            np.testing.assert_allclose(line.get_xydata(), np.stack(history[name], axis=1), rtol=1e-6)
    refuses(ArgumentError, lambda: population.plot(["nothing"]), r"takes names of .*'loss'")
