"""ReduceLROnPlateau: when it lowers which rate."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest
from kit.batches import numbered
from kit.journal import hooks
from kit.modules import module
from kit.refusals import fit_refuses
from kit.trainers import THREE, fit, thinned

from jaxlit.callbacks import ReduceLROnPlateau
from jaxlit.errors import ArgumentError

VALUES = [10.0, 9.6, 9.4, 9.4, 9.3, 9.2, 9.1, 9.0, 9.0, 9.0, 9.0]
RATES = [1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.3, 0.3, 0.3, 0.3]  # worked out by hand, by the arguments below
ARGUMENTS: dict[str, Any] = {"factor": 0.5, "patience": 2, "min_delta": 0.5, "cooldown": 1, "min_lr": 0.3}
MOMENTUM = {"learning_rate": 1.0, "momentum": 0.5}


def rule(
    values: list[float], *, factor: float, patience: int, min_delta: float, cooldown: int, min_lr: float
) -> list[float]:
    """Return the rate after each value, of which a lower one is better."""
    rate, best, waited, cools, rates = 1.0, float("inf"), 0, 0, []
    for value in values:
        better = value < best - min_delta
        best, waited, cools = (
            min(best, value) if better else best,
            0 if better or cools else waited + 1,
            max(cools - 1, 0),
        )
        if waited >= patience:
            waited, cools, rate = 0, cooldown, min(rate, max(rate * factor, min_lr))
        rates.append(rate)
    return rates


def sgd(**hyperparams: Any) -> Any:
    return optax.inject_hyperparams(optax.sgd)(**hyperparams)


def sloping(tx: Any) -> Any:
    """Return a module whose weight has the gradient 1, and which validates to the mean of the batch."""
    validate = lambda self, batch: self.log("val", jnp.mean(batch["x"]))  # noqa: E731
    return module(lambda self, batch: self.w.sum() * 1.0, tx=tx, validation=validate)


def train(plateau: Any, values: Any, *before: Any, rate: float = 1.0, **arguments: Any) -> tuple[list[float], Any]:
    """Train an epoch of a step for each value; returns the learning rate after each, and the module."""
    rates: list[float] = []
    look = lambda trainer, module: rates.append(trainer.hyperparams["learning_rate"])  # noqa: E731
    model = sloping(sgd(learning_rate=rate))
    arguments = {"max_epochs": len(values), "enable_checkpointing": False} | arguments
    watch = hooks(on_train_epoch_start=look, on_train_end=look)
    scores = hooks(on_train_epoch_end=lambda t, m: scores.log("score", values[t.current_epoch]))
    fit(model, numbered(1), None, *before, scores, plateau, watch, **arguments)
    return rates[1:], model


def make(mode: str = "min", **changed: Any) -> ReduceLROnPlateau:
    return ReduceLROnPlateau("score", mode=mode, **(ARGUMENTS | changed))


@pytest.mark.parametrize("strategy", thinned(THREE, "single"))
def test_it_lowers_the_rate_as_worked_out_by_hand(strategy) -> None:
    plateau = make()
    rates, model = train(plateau, VALUES, strategy=strategy)
    assert rates == pytest.approx(RATES, rel=1e-6)
    # One step of gradient 1 an epoch, each at the rate that the epochs before it left.
    assert float(model.w[...][0]) == pytest.approx(-sum([1.0, *RATES[:-1]]), rel=1e-6)
    assert plateau.num_reductions == 2  # 0.3 is another number in float32, slightly above, and no reduction
    assert train(plateau, [5.0] * 3)[0] == [1.0, 1.0, 0.5], "a second fit counts from zero"


@pytest.mark.parametrize(
    "changed",
    [
        {"factor": 0.25, "min_lr": 0.01},
        *[{"patience": patience} for patience in (1, 3)],
        {"min_delta": 0.0},
        *[{"cooldown": cooldown} for cooldown in (0, 3)],
        {"min_lr": 2.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("mode", ["min", "max"])
def test_each_argument_does_what_it_says(changed, mode) -> None:
    assert rule(VALUES, **ARGUMENTS) == RATES
    rates, _ = train(plateau := make(mode, **changed), [value if mode == "min" else -value for value in VALUES])
    assert rates == pytest.approx(rule(VALUES, **ARGUMENTS | changed), rel=1e-6)
    assert mode == "min" or plateau.best_score < -8.9


@pytest.mark.parametrize(
    ("interval", "weight", "rate"),
    [
        # The first validation is the best; each one after it halves the rate.
        (1, -(1 + 1 + 0.5 + 0.25), 0.125),
        (2, -(2 * 1 + 2 * 1), 0.5),
        (0.5, -(2 * 1 + 2 * 1), 0.5),
    ],
)
def test_it_checks_after_every_validation_of_an_epoch(interval, weight, rate) -> None:
    model, plateau = sloping(sgd(learning_rate=1.0)), ReduceLROnPlateau("val", factor=0.5, patience=1)
    trainer = fit(model, numbered(4), numbered(1), plateau, val_check_interval=interval)
    assert (float(model.w[...][0]), trainer.hyperparams["learning_rate"]) == (weight, rate)


def test_another_hyperparameter_can_be_lowered() -> None:
    plateau = ReduceLROnPlateau("val", hyperparam="momentum", factor=0.5, patience=1)
    trainer = fit(sloping(sgd(**MOMENTUM)), numbered(1), numbered(1), plateau, max_epochs=2)
    assert dict(trainer.hyperparams) == {"learning_rate": 1.0, "momentum": 0.25}


@pytest.mark.parametrize(
    ("tx", "name", "known"),
    [
        (optax.sgd(0.1), "learning_rate", "none"),
        (sgd(**MOMENTUM), "learning_rat", "momentum"),
        (sgd(learning_rate=optax.constant_schedule(1.0)), "learning_rate", "none"),
    ],
    ids=["plain", "other", "scheduled"],
)
def test_an_unknown_hyperparameter_is_refused(tx, name, known) -> None:
    words = rf"{name}'.*{known}.*inject_hyperparams"
    fit_refuses(ArgumentError, words, model=sloping(tx), callbacks=[ReduceLROnPlateau("val", hyperparam=name)])


def test_a_group_at_its_least_rate_holds_no_other_back() -> None:
    tx = optax.chain(sgd(learning_rate=0.1), sgd(learning_rate=1.0))  # two hyperparameters of one name
    model, plateau = sloping(tx), ReduceLROnPlateau("val", factor=0.5, patience=1, min_lr=0.1)
    trainer = fit(model, numbered(1), numbered(1), plateau, max_epochs=2)
    assert sorted(trainer.hyperparams.values()) == pytest.approx([0.1, 0.5])
