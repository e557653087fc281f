"""ReduceLROnPlateau: when it lowers which rate."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from kit.batches import numbered
from kit.journal import hooks
from kit.modules import Mean, module
from kit.refusals import refuses
from kit.trainers import THREE, fit, make_trainer

import jaxlit as jl
from jaxlit.errors import ArgumentError, LoggerError

ReduceLROnPlateau = jl.callbacks.ReduceLROnPlateau

# Worked out by hand for factor=0.5, patience=2, min_delta=0.5, cooldown=1 and min_lr=0.3: a value, the rate after it.
SEQUENCE = (
    (10.0, 1.0),  # the first is always better
    (9.6, 1.0),  # better by less than min_delta: 1 waited
    (9.4, 1.0),  # better than 10 by more
    (9.4, 1.0),  # 1 waited
    (9.3, 0.5),  # 2 waited: halved
    (9.2, 0.5),  # cools down
    (9.1, 0.5),  # 1 waited
    (9.0, 0.3),  # 2 waited: halved to the least
    (9.0, 0.3),  # cools down
    (9.0, 0.3),  # 1 waited
    (9.0, 0.3),  # 2 waited: no lower
)
VALUES, RATES = ([float(x) for x in column] for column in zip(*SEQUENCE, strict=True))
ARGUMENTS: dict[str, Any] = {"factor": 0.5, "patience": 2, "min_delta": 0.5, "cooldown": 1, "min_lr": 0.3}


def sloping(values: Any = (0.0,), tx: Any = None) -> Any:
    """Return a module whose weight has the gradient 1, and whose validation logs the next value."""
    table, first = jnp.asarray([*values] * 2, jnp.float32), optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    step = lambda self, batch: self.w.sum() * 1.0  # noqa: E731
    return module(step, tx=tx or first, validation=lambda self, batch: self.log("val", table[self.global_step - 1]))


def train(
    plateau: Any, values: list[float], *before: Any, rate: float = 1.0, **arguments: Any
) -> tuple[list[float], Any]:
    """Train an epoch of a step for each value; returns the learning rate after each, and the module."""
    rates: list[float] = []
    look = lambda trainer, module: rates.append(trainer.hyperparams["learning_rate"])  # noqa: E731
    model = sloping(values, optax.inject_hyperparams(optax.sgd)(learning_rate=rate))
    callbacks = (*before, plateau, hooks(on_train_epoch_start=look, on_train_end=look))
    arguments = {"max_epochs": len(values), "num_sanity_val_steps": 0, "enable_checkpointing": False} | arguments
    fit(model, numbered(1), numbered(1), *callbacks, **arguments)
    return rates[1:], model


@pytest.mark.parametrize("strategy", THREE)
def test_it_lowers_the_rate_as_worked_out_by_hand(strategy: str) -> None:
    plateau = ReduceLROnPlateau("val", **ARGUMENTS)
    rates, model = train(plateau, VALUES, strategy=strategy)
    assert rates == pytest.approx(RATES, rel=1e-6)
    # One step of gradient 1 an epoch, each at the rate that the epochs before it left.
    assert float(model.w[...][0]) == pytest.approx(-sum([1.0, *RATES[:-1]]), rel=1e-6)
    assert plateau.num_reductions == 2  # 0.3 is another number in float32, slightly above, and no reduction


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        # From the sequence above, one argument changed.
        ({"factor": 0.25, "min_lr": 0.01}, [1, 1, 1, 1, 0.25, 0.25, 0.25, 0.0625, 0.0625, 0.0625, 0.015625]),
        ({"patience": 1}, [1, 0.5, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]),
        ({"patience": 3}, [1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3]),
        ({"min_delta": 0.0}, [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.5, 0.5]),
        ({"cooldown": 0}, [1, 1, 1, 1, 0.5, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3]),
        ({"cooldown": 3}, [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3]),
        ({"min_lr": 2.0}, [1] * 11),
    ],
    ids=str,
)
def test_each_argument_does_what_it_says(arguments: dict[str, Any], expected: list[float]) -> None:
    rates, _ = train(ReduceLROnPlateau("val", **(ARGUMENTS | arguments)), VALUES)
    assert rates == pytest.approx(expected, rel=1e-6)


def test_mode_max_takes_the_opposite_sequence_alike() -> None:
    plateau = ReduceLROnPlateau("val", mode="max", **ARGUMENTS)
    rates, _ = train(plateau, [-value for value in VALUES])
    assert rates == pytest.approx(RATES, rel=1e-6) and plateau.best_score == pytest.approx(-9.4, rel=1e-6)


@pytest.mark.parametrize("split", [1, 4, 6, 8])
def test_it_goes_on_from_its_state_in_json(split: int) -> None:
    first, second = (ReduceLROnPlateau("val", **ARGUMENTS) for _ in range(2))
    train(first, VALUES[:split])
    text = json.dumps(first.state_dict(), allow_nan=False)
    load = hooks(on_train_start=lambda trainer, module: second.load_state_dict(json.loads(text)))
    rates, _ = train(second, VALUES[split:], load, rate=RATES[split - 1])
    assert rates == pytest.approx(RATES[split:], rel=1e-6)


def test_the_state_of_one_that_saw_nothing_survives_json() -> None:
    for mode, worst in (("min", math.inf), ("max", -math.inf)):
        plateau = ReduceLROnPlateau("val", mode=mode)
        text = json.dumps(plateau.state_dict(), allow_nan=False)
        plateau.best_score = 0.0
        plateau.load_state_dict(json.loads(text))
        assert plateau.best_score == worst


def test_a_second_fit_counts_from_zero() -> None:
    plateau = ReduceLROnPlateau("val", factor=0.5, patience=2)
    train(plateau, [1.0, 1.0])
    assert train(plateau, [5.0, 5.0, 5.0])[0] == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("interval", "weight", "rate"),
    [
        # The first validation is the best; each one behind it halves the rate.
        (1, -(1 + 1 + 0.5 + 0.25), 0.125),
        (2, -(2 * 1 + 2 * 1), 0.5),
        (0.5, -(2 * 1 + 2 * 1), 0.5),
    ],
)
def test_it_checks_after_every_validation_where_there_are_several_an_epoch(
    interval: float, weight: float, rate: float
) -> None:
    model, plateau = sloping([1.0] * 4), ReduceLROnPlateau("val", factor=0.5, patience=1)
    trainer = fit(model, numbered(4), numbered(1), plateau, val_check_interval=interval)
    assert (float(model.w[...][0]), trainer.hyperparams["learning_rate"]) == (weight, rate)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("monitor", x) for x in ("", 3)),
        ("mode", "least"),
        *(("factor", x) for x in (0, 1, 1.5, "0.1", True)),
        *(("patience", x) for x in (0, 1.5, True)),
        *(("min_delta", x) for x in (-0.1, math.inf)),
        *(("cooldown", x) for x in (-1, 0.5)),
        *(("min_lr", x) for x in (-1e-6, math.nan)),
        ("check_on_train_epoch_end", "yes"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(name: str, value: Any) -> None:
    arguments = {"monitor": "val", name: value}
    words = rf"ReduceLROnPlateau\({name}=\.\.\.\)"
    refuses(ArgumentError, lambda: ReduceLROnPlateau(arguments.pop("monitor"), **arguments), words)


MOMENTUM = {"learning_rate": 1.0, "momentum": 0.5}


@pytest.mark.parametrize(
    ("tx", "name", "known"),
    [
        (optax.sgd(0.1), "learning_rate", "none"),
        (optax.inject_hyperparams(optax.sgd)(**MOMENTUM), "learning_rat", "momentum"),
        (optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(1.0)), "learning_rate", "none"),
    ],
    ids=["plain", "other", "scheduled"],
)
def test_a_hyperparameter_that_is_not_there_is_refused_before_training(tx: Any, name: str, known: str) -> None:
    trainer = make_trainer(ReduceLROnPlateau("val", hyperparam=name))
    with pytest.raises(ArgumentError, match=rf"{name}'.*{known}.*inject_hyperparams"):
        trainer.fit(sloping(tx=tx), numbered(1), numbered(1))
    assert trainer.global_step == 0


def test_another_hyperparameter_can_be_lowered() -> None:
    plateau = ReduceLROnPlateau("val", hyperparam="momentum", factor=0.5, patience=1)
    model = sloping([1.0, 1.0], optax.inject_hyperparams(optax.sgd)(**MOMENTUM))
    trainer = fit(model, numbered(1), numbered(1), plateau, max_epochs=2)
    assert dict(trainer.hyperparams) == {"learning_rate": 1.0, "momentum": 0.25}


@pytest.mark.parametrize("val", [True, False], ids=["validated", "not"])
def test_a_metric_that_is_not_logged_is_refused_with_those_that_are(val: bool) -> None:
    def step(self: Any, batch: Any) -> jax.Array:
        self.log("loss", 1.0)
        return self.w.sum()

    model = module(step, tx=optax.inject_hyperparams(optax.sgd)(learning_rate=1.0), validation=Mean.validation_step)
    with pytest.raises(LoggerError, match="val/loss.*Logged: loss" + (", val" if val else "")):
        fit(model, numbered(1), numbered(1) if val else None, ReduceLROnPlateau("val/loss"))
