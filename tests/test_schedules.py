"""Learning rates that change: by step, by epoch, on a plateau, and from a callback."""

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import ArgumentError, LoggerError

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8")


def make_trainer(*callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return jl.Trainer(callbacks=list(callbacks), **({"strategy": "single"} | quiet | arguments))


def make_callback(**hooks: Any) -> jl.Callback:
    """Return a callback with these functions of (trainer, module, ...) as its hooks."""
    return type("Made", (jl.Callback,), {k: staticmethod(v) for k, v in hooks.items()})()


def make_module(configure: Callable[[jl.Trainer], Any], values: list[float] = (0.0,)) -> Any:  # type: ignore[assignment]
    """Return a module whose weight `w` has the gradient mean(x), and whose validation logs a value an epoch."""

    class Module(jl.TrainModule):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.zeros(()))

        def training_step(self, batch: Any) -> jax.Array:
            loss = self.w * jnp.mean(batch["x"])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any) -> None:
            self.log("val", jnp.asarray(values, jnp.float32)[self.current_epoch])

        def configure_optimizers(self) -> Any:
            return configure(self.trainer)

    return Module()


def ones(count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.ones(8, np.float32)}] * count


def injected(rate: float = 1.0) -> Callable[[jl.Trainer], Any]:
    return lambda trainer: optax.inject_hyperparams(optax.sgd)(learning_rate=rate)


class Unsized:
    """A loader that does not say how long it is."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return iter(ones(self.count))


# Schedules of optax ----------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("accumulate", "steps"), ((1, 8), (3, 4)))
def test_a_schedule_counts_optimizer_steps_across_epochs(strategy: str, accumulate: int, steps: int) -> None:
    # Rates 1, 2, 4, ...: their sum tells which were used, and how often.
    module = make_module(lambda trainer: optax.sgd(lambda count: 2.0**count))
    trainer = make_trainer(strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate)
    trainer.fit(module, ones(4))
    assert float(module.w[...]) == -(2.0**steps - 1)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    (
        ({"max_epochs": 3}, 12),
        ({"max_epochs": 3, "accumulate_grad_batches": 3}, 6),
        ({"max_epochs": 3, "limit_train_batches": 3}, 9),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 6),
        ({"max_epochs": 3, "limit_train_batches": 3, "accumulate_grad_batches": 2}, 6),
        ({"max_epochs": 3, "max_steps": 5}, 5),
        ({"max_epochs": 3, "max_steps": 99}, 12),
        ({"max_steps": 5}, 5),
        ({"max_steps": 5, "max_epochs": -1, "accumulate_grad_batches": 2}, 5),
        ({"max_epochs": 3, "overfit_batches": 2}, 6),
        ({"fast_dev_run": 2}, 2),
    ),
    ids=str,
)
def test_estimated_stepping_batches_in_configure_optimizers_are_the_steps_of_the_fit(
    arguments: dict[str, Any], expected: int
) -> None:
    told: list[float] = []

    def configure(trainer: jl.Trainer) -> Any:
        told.append(trainer.estimated_stepping_batches)
        return optax.sgd(0.1)

    trainer = make_trainer(**arguments)
    trainer.fit(make_module(configure), ones(4))
    assert told == [expected]
    assert trainer.global_step == expected


@pytest.mark.parametrize(
    ("loader", "arguments", "expected"),
    (
        (Unsized(4), {"max_epochs": 2}, math.inf),
        (Unsized(4), {"max_epochs": 2, "max_steps": 3}, 3),
        (Unsized(4), {"max_epochs": 2, "limit_train_batches": 3}, 6),
        (ones(4), {"max_time": "00:00:00:00"}, math.inf),
    ),
    ids=("unknown", "max_steps", "limit", "max_time"),
)
def test_estimated_stepping_batches_are_infinite_where_nothing_bounds_them(
    loader: Any, arguments: dict[str, Any], expected: float
) -> None:
    told: list[float] = []

    def configure(trainer: jl.Trainer) -> Any:
        told.append(trainer.estimated_stepping_batches)
        return optax.sgd(0.1)

    make_trainer(**arguments).fit(make_module(configure), loader)
    assert told == [expected]


def test_a_schedule_by_epoch_is_built_from_the_estimated_steps() -> None:
    def configure(trainer: jl.Trainer) -> Any:
        an_epoch = int(trainer.estimated_stepping_batches) // 3
        return optax.sgd(optax.exponential_decay(1.0, an_epoch, 0.5, staircase=True))

    module = make_module(configure)
    seen: list[float] = []
    note = make_callback(on_train_epoch_end=lambda trainer, module: seen.append(float(module.w[...])))
    make_trainer(note, max_epochs=3, accumulate_grad_batches=2).fit(module, ones(5))
    # Three steps an epoch, at rates 1, 1/2 and 1/4.
    assert seen == [-3.0, -4.5, -5.25]


@pytest.mark.parametrize("accumulate", (1, 2))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reduce_on_plateau_in_a_chain_gets_the_loss(strategy: str, accumulate: int) -> None:
    losses = [4.0, 2.0, 3.0, 3.0, 3.0, 3.0, 1.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    batches = [{"x": np.full(8, x, np.float32)} for x in losses]
    make_tx = lambda: optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(factor=0.5, patience=2))  # noqa: E731

    class Plateau(jl.TrainModule):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.zeros(()))

        def training_step(self, batch: Any) -> jax.Array:
            # Its value is that of the rows, its gradient 1.
            return jnp.mean(batch["x"]) + self.w - jax.lax.stop_gradient(self.w[...])

        def configure_optimizers(self) -> Any:
            return make_tx()

    module = Plateau()
    trainer = make_trainer(strategy=strategy, max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(module, batches)

    windows = np.mean(np.reshape(losses, (-1, accumulate)), axis=1)
    tx, w = make_tx(), jnp.zeros(())
    opt_state = tx.init(w)
    for loss in windows:
        updates, opt_state = tx.update(jnp.ones(()), opt_state, w, value=jnp.float32(loss))
        w = optax.apply_updates(w, updates)
    assert float(w) > -0.5 * len(windows), "the scale was never reduced"
    assert float(module.w[...]) == pytest.approx(float(w), abs=1e-6)


# Hyperparameters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_hyperparameter_set_in_a_hook_holds_from_the_next_step_on(strategy: str) -> None:
    read: list[float] = []
    weights: list[float] = []

    def on_train_epoch_start(trainer: jl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.hyperparams["learning_rate"] = 8

    def on_train_batch_end(trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, i: int) -> None:
        read.append(trainer.hyperparams["learning_rate"])
        weights.append(float(module.w[...]))
        trainer.hyperparams["learning_rate"] *= 0.5

    def on_fit_start(trainer: jl.Trainer, module: Any) -> None:
        assert dict(trainer.hyperparams) == {"learning_rate": 1.0, "momentum": 0.5}
        trainer.hyperparams["momentum"] = 0.25

    hooks = make_callback(
        on_train_epoch_start=on_train_epoch_start, on_train_batch_end=on_train_batch_end, on_fit_start=on_fit_start
    )
    make_tx = optax.inject_hyperparams(optax.sgd, static_args=("nesterov",))
    module = make_module(lambda trainer: make_tx(learning_rate=1.0, momentum=0.5))
    trainer = make_trainer(hooks, strategy=strategy, max_epochs=2)
    trainer.fit(module, ones(3))

    rates = [1.0, 0.5, 0.25, 8.0, 4.0, 2.0]
    w = trace = 0.0
    expected = []
    for rate in rates:
        trace = 1 + 0.25 * trace
        w -= rate * trace
        expected.append(w)
    assert read == rates
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert dict(trainer.hyperparams) == {"learning_rate": 1.0, "momentum": 0.25}  # also after fit


def test_a_hyperparameter_set_inside_a_window_holds_for_its_step() -> None:
    def halve(trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, i: int) -> None:
        trainer.hyperparams["learning_rate"] = {0: 2.0, 1: 4.0, 2: 8.0, 3: 0.0}[i]

    module = make_module(injected())
    make_trainer(make_callback(on_train_batch_end=halve), max_epochs=1, accumulate_grad_batches=2).fit(module, ones(4))
    assert float(module.w[...]) == -(2.0 + 8.0)


def test_an_unknown_hyperparameter_is_refused_with_the_known_ones() -> None:
    module = make_module(lambda trainer: optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.5))
    trainer = make_trainer(max_epochs=1)
    trainer.fit(module, ones(1))
    with pytest.raises(KeyError, match=r"'learning_rat'.*learning_rate.*momentum"):
        trainer.hyperparams["learning_rat"]
    with pytest.raises(KeyError, match=r"'lr'.*learning_rate.*momentum"):
        trainer.hyperparams["lr"] = 1.0
    assert sorted(trainer.hyperparams) == ["learning_rate", "momentum"]
    assert len(trainer.hyperparams) == 2
    with pytest.raises(TypeError, match="deleted"):
        del trainer.hyperparams["momentum"]


def test_a_scheduled_hyperparameter_cannot_be_set() -> None:
    # The schedule would overwrite it in the next step.
    def configure(trainer: jl.Trainer) -> Any:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(2.0), momentum=0.5)

    trainer = make_trainer(max_epochs=1)
    trainer.fit(module := make_module(configure), ones(1))
    assert float(module.w[...]) == -2.0
    assert list(trainer.hyperparams) == ["momentum"]
    with pytest.raises(KeyError, match=r"'learning_rate'.*momentum"):
        trainer.hyperparams["learning_rate"] = 1.0


def test_an_optimizer_without_injection_has_no_hyperparameters() -> None:
    trainer = make_trainer(max_epochs=1)
    with pytest.raises(AttributeError, match="fit"):
        _ = trainer.hyperparams
    trainer.fit(make_module(lambda trainer: optax.sgd(0.1)), ones(1))
    assert dict(trainer.hyperparams) == {}
    with pytest.raises(KeyError, match="inject_hyperparams"):
        trainer.hyperparams["learning_rate"] = 1.0


def test_hyperparameters_are_found_inside_a_chain() -> None:
    def configure(trainer: jl.Trainer) -> Any:
        return optax.chain(optax.clip_by_global_norm(10.0), injected(0.5)(trainer))

    trainer = make_trainer(max_epochs=1)
    trainer.fit(make_module(configure), ones(1))
    assert dict(trainer.hyperparams) == {"learning_rate": 0.5}


# ReduceLROnPlateau -----------------------------------------------------------------------------------

# Worked out by hand for factor=0.5, patience=2, min_delta=0.5, cooldown=1 and min_lr=0.3.
SEQUENCE = (
    # value, the rate after it
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
ARGUMENTS: dict[str, Any] = {"factor": 0.5, "patience": 2, "min_delta": 0.5, "cooldown": 1, "min_lr": 0.3}


def fit_with_plateau(plateau: Any, values: list[float], **arguments: Any) -> tuple[list[float], Any]:
    """Train an epoch for each value; returns the learning rate after each, and the module."""
    rates: list[float] = []
    note = make_callback(
        on_train_epoch_start=lambda trainer, module: rates.append(trainer.hyperparams["learning_rate"]),
        on_train_end=lambda trainer, module: rates.append(trainer.hyperparams["learning_rate"]),
    )
    module = make_module(injected(arguments.pop("rate", 1.0)), values)
    before = arguments.pop("callbacks", [])
    trainer = make_trainer(*before, plateau, note, max_epochs=len(values), **arguments)
    trainer.fit(module, ones(1), ones(1))
    return rates[1:], module


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plateau_lowers_the_rate_as_worked_out_by_hand(strategy: str) -> None:
    values, expected = ([float(x) for x in column] for column in zip(*SEQUENCE, strict=True))
    plateau = jl.callbacks.ReduceLROnPlateau("val", **ARGUMENTS)
    rates, module = fit_with_plateau(plateau, values, strategy=strategy)
    assert rates == pytest.approx(expected, rel=1e-6)
    # One step of gradient 1 an epoch, each at the rate that the epochs before it left.
    assert float(module.w[...]) == pytest.approx(-sum([1.0, *expected[:-1]]), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    (
        # From the sequence above, one argument changed.
        ({"factor": 0.25, "min_lr": 0.01}, [1, 1, 1, 1, 0.25, 0.25, 0.25, 0.0625, 0.0625, 0.0625, 0.015625]),
        ({"patience": 1}, [1, 0.5, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3, 0.3]),
        ({"patience": 3}, [1, 1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3]),
        ({"min_delta": 0.0}, [1, 1, 1, 1, 1, 1, 1, 1, 1, 0.5, 0.5]),
        ({"cooldown": 0}, [1, 1, 1, 1, 0.5, 0.5, 0.3, 0.3, 0.3, 0.3, 0.3]),
        ({"cooldown": 3}, [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.3, 0.3]),
        ({"min_lr": 2.0}, [1] * 11),
    ),
    ids=str,
)
def test_each_argument_of_a_plateau_does_what_it_says(arguments: dict[str, Any], expected: list[float]) -> None:
    values = [value for value, _ in SEQUENCE]
    rates, _ = fit_with_plateau(jl.callbacks.ReduceLROnPlateau("val", **(ARGUMENTS | arguments)), values)
    assert rates == pytest.approx(expected, rel=1e-6)


def test_mode_max_takes_the_opposite_sequence_alike() -> None:
    values, expected = [-value for value, _ in SEQUENCE], [rate for _, rate in SEQUENCE]
    plateau = jl.callbacks.ReduceLROnPlateau("val", mode="max", **ARGUMENTS)
    rates, _ = fit_with_plateau(plateau, values)
    assert rates == pytest.approx(expected, rel=1e-6)
    assert plateau.best_score == pytest.approx(-9.4, rel=1e-6)


def test_a_rate_at_its_least_is_not_reduced_again() -> None:
    # 0.3 is another number in float32, slightly above.
    plateau = jl.callbacks.ReduceLROnPlateau("val", **ARGUMENTS)
    fit_with_plateau(plateau, [value for value, _ in SEQUENCE])
    assert plateau.num_reductions == 2


@pytest.mark.parametrize("split", (1, 4, 6, 8))
def test_a_plateau_goes_on_from_its_state_in_json(split: int) -> None:
    values, expected = [value for value, _ in SEQUENCE], [rate for _, rate in SEQUENCE]
    first = jl.callbacks.ReduceLROnPlateau("val", **ARGUMENTS)
    fit_with_plateau(first, values[:split])
    text = json.dumps(first.state_dict(), allow_nan=False)

    second = jl.callbacks.ReduceLROnPlateau("val", **ARGUMENTS)
    load = make_callback(on_train_start=lambda trainer, module: second.load_state_dict(json.loads(text)))
    rates, _ = fit_with_plateau(second, values[split:], rate=expected[split - 1], callbacks=[load])
    assert rates == pytest.approx(expected[split:], rel=1e-6)


def test_the_state_of_a_plateau_that_saw_nothing_survives_json() -> None:
    for mode, worst in (("min", math.inf), ("max", -math.inf)):
        plateau = jl.callbacks.ReduceLROnPlateau("val", mode=mode)
        text = json.dumps(plateau.state_dict(), allow_nan=False)
        plateau.best_score = 0.0
        plateau.load_state_dict(json.loads(text))
        assert plateau.best_score == worst


def test_a_second_fit_counts_from_zero() -> None:
    plateau = jl.callbacks.ReduceLROnPlateau("val", factor=0.5, patience=2)
    fit_with_plateau(plateau, [1.0, 1.0])
    rates, _ = fit_with_plateau(plateau, [5.0, 5.0, 5.0])
    assert rates == [1.0, 1.0, 0.5]


@pytest.mark.parametrize(
    ("interval", "weight", "rate"),
    (
        # The first validation is the best; each one behind it halves the rate.
        (1, -(1 + 1 + 0.5 + 0.25), 0.125),
        (2, -(2 * 1 + 2 * 1), 0.5),
        (0.5, -(2 * 1 + 2 * 1), 0.5),
    ),
)
def test_a_plateau_checks_after_every_validation_where_there_are_several_an_epoch(
    interval: int | float, weight: float, rate: float
) -> None:
    plateau = jl.callbacks.ReduceLROnPlateau("val", factor=0.5, patience=1)
    module = make_module(injected(), [1.0])
    trainer = make_trainer(plateau, max_epochs=1, val_check_interval=interval)
    trainer.fit(module, ones(4), ones(1))
    assert (float(module.w[...]), trainer.hyperparams["learning_rate"]) == (weight, rate)


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("monitor", ""),
        ("monitor", 3),
        ("mode", "least"),
        ("factor", 0),
        ("factor", 1),
        ("factor", 1.5),
        ("factor", "0.1"),
        ("factor", True),
        ("patience", 0),
        ("patience", 1.5),
        ("patience", True),
        ("min_delta", -0.1),
        ("min_delta", math.inf),
        ("cooldown", -1),
        ("cooldown", 0.5),
        ("min_lr", -1e-6),
        ("min_lr", math.nan),
        ("check_on_train_epoch_end", "yes"),
    ),
)
def test_a_wrong_argument_of_a_plateau_is_refused_by_name(name: str, value: Any) -> None:
    arguments = {"monitor": "val", name: value}
    with pytest.raises(ArgumentError, match=rf"ReduceLROnPlateau\({name}=\.\.\.\)"):
        jl.callbacks.ReduceLROnPlateau(arguments.pop("monitor"), **arguments)


@pytest.mark.parametrize(
    ("configure", "known"),
    (
        (lambda trainer: optax.sgd(0.1), "none"),
        (lambda trainer: optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.5), "momentum"),
        (lambda trainer: optax.inject_hyperparams(optax.sgd)(learning_rate=optax.constant_schedule(1.0)), "none"),
    ),
    ids=("plain", "other", "scheduled"),
)
def test_a_hyperparameter_that_is_not_there_is_refused_before_training(configure: Any, known: str) -> None:
    name = "learning_rat" if known == "momentum" else "learning_rate"
    trainer = make_trainer(jl.callbacks.ReduceLROnPlateau("val", hyperparam=name), max_epochs=1)
    with pytest.raises(ArgumentError, match=rf"{name}'.*{known}.*inject_hyperparams"):
        trainer.fit(make_module(configure), ones(1), ones(1))
    assert trainer.global_step == 0


def test_another_hyperparameter_can_be_lowered() -> None:
    configure = lambda trainer: optax.inject_hyperparams(optax.sgd)(learning_rate=1.0, momentum=0.5)  # noqa: E731
    plateau = jl.callbacks.ReduceLROnPlateau("val", hyperparam="momentum", factor=0.5, patience=1)
    trainer = make_trainer(plateau, max_epochs=2)
    trainer.fit(make_module(configure, [1.0, 1.0]), ones(1), ones(1))
    assert dict(trainer.hyperparams) == {"learning_rate": 1.0, "momentum": 0.25}


@pytest.mark.parametrize("val", (True, False), ids=("validated", "not"))
def test_a_metric_that_is_not_logged_is_refused_with_those_that_are(val: bool) -> None:
    trainer = make_trainer(jl.callbacks.ReduceLROnPlateau("val/loss"), max_epochs=1)
    with pytest.raises(LoggerError, match="val/loss.*Logged: loss" + (", val" if val else "")):
        trainer.fit(make_module(injected()), ones(1), *[ones(1)] * val)
