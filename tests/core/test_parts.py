"""Learning rates that are read off an optimizer's update, and that stand in the row of each step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.checkpoints import keep_all
from kit.inside import rates_along
from kit.journal import Rows, hooks
from kit.modules import Linear, Mean, Net, module
from kit.trainers import BARE, STRATEGIES, fit, splitting, thinned

import jaxlit as jl

SCHEDULE = optax.linear_schedule(0.2, 0.0, 10)
PLATEAU = optax.contrib.reduce_on_plateau

# Of each optimizer the transform with a rate, and with a rate of 1.
READ: dict[str, Any] = {
    "sgd": optax.sgd,
    "momentum": lambda lr: optax.sgd(lr, momentum=0.9, nesterov=True),
    "adam": optax.adam,
    "adamw": lambda lr: optax.adamw(lr, weight_decay=0.1, mask=jl.decay_mask),
    "lion": optax.lion,
    "rmsprop": optax.rmsprop,
    "adafactor": optax.adafactor,
    "muon": optax.contrib.muon,
    "clipped": lambda lr: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(lr)),
    "scaled": lambda lr: optax.chain(optax.scale(3.0), optax.adam(lr)),
    "injected": lambda lr: optax.inject_hyperparams(optax.adamw)(learning_rate=lr),
    "by hand": lambda lr: optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(lr)),
    "jitted": lambda lr: optax.GradientTransformation(optax.adam(lr).init, jax.jit(optax.adam(lr).update)),
    "frozen in part": lambda lr: optax.partition(
        {"train": optax.adam(lr), "keep": optax.set_to_zero()}, {"a": {"kernel": "train"}, "bias": "keep"}
    ),
}
UNREAD: dict[str, Any] = {
    "lars": optax.lars,  # its momentum comes after the rate
    "rmsprop, momentum": lambda lr: optax.rmsprop(lr, momentum=0.9),
    "apply_if_finite": lambda lr: optax.apply_if_finite(optax.adam(lr), 3),
    "polyak": lambda lr: optax.polyak_sgd(),
    "what fails": lambda lr: optax.GradientTransformation(lambda params: (), lambda *_: 1 / 0),
}
PARAMS = {"a": {"kernel": jnp.linspace(-1.0, 1.0, 12).reshape(4, 3)}, "bias": jnp.ones(())}


def updates(tx: Any) -> list[Any]:
    """Return the updates of three steps, by optax alone, on parameters that stay."""
    state, result = tx.init(PARAMS), []
    for k in range(3):
        grads = jax.tree.map(lambda x, k=k: jnp.cos(x + k), PARAMS)
        made, state = optax.with_extra_args_support(tx).update(grads, state, PARAMS, value=1.0, grad=grads)
        result.append(np.asarray(made["a"]["kernel"]))
    return result


@pytest.mark.parametrize("lr", [0.01, SCHEDULE], ids=["number", "schedule"])
@pytest.mark.parametrize("name", thinned(READ, "adamw", "frozen in part", full=[*READ][::3]))
def test_a_rate_is_the_factor_of_the_updates_of_rate_1(name: str, lr: Any) -> None:
    make = READ[name]
    rates, *others = rates_along(jl.Optimizer(make(lr)), PARAMS, steps=3).values()
    assert all(other == rates for other in others)  # of muon's two transforms
    ratios = [made / unit for made, unit in zip(updates(make(lr)), updates(make(1.0)), strict=True)]
    np.testing.assert_allclose(ratios, np.broadcast_to(np.reshape(rates, (3, 1, 1)), (3, 4, 3)), rtol=1e-5)
    assert rates == pytest.approx([float(lr(k)) if callable(lr) else lr for k in range(3)])


@pytest.mark.parametrize("name", UNREAD)
def test_a_rate_that_cannot_be_read_is_in_no_row_unless_it_is_told(name: str) -> None:
    assert rates_along(jl.Optimizer(UNREAD[name](SCHEDULE)), PARAMS, steps=0) == {}
    if name == "lars":
        told = rates_along(jl.Optimizer(optax.lars(SCHEDULE), lr_schedule=SCHEDULE), PARAMS, steps=3)
        assert told == {"lr": pytest.approx([0.2, 0.18, 0.16])}


@pytest.mark.parametrize(
    ("tx", "expected"),
    [
        (optax.chain(optax.adam(SCHEDULE), optax.scale(0.5)), {"lr": 0.1}),
        (optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(SCHEDULE), optax.scale(-1.0)), {"lr": 0.2}),
        (optax.chain(optax.adam(0.2), optax.scale(0.5)), {"lr": 0.1}),
        (optax.sgd(1.0), {}),  # a sign alone is no rate, as in optax.rprop
        (optax.chain(optax.scale(-1.0), optax.sgd(0.1)), {"lr": 0.1}),
        (optax.contrib.muon(SCHEDULE, adam_learning_rate=0.1), {"lr/pg1": 0.2, "lr/pg2": 0.1}),
        (
            optax.partition({"a": optax.sgd(SCHEDULE), "b": optax.adam(SCHEDULE)}, {"a": "a", "bias": "b"}),
            {"lr/pg1": 0.2, "lr/pg2": 0.2},  # each has a count of its own
        ),
        (
            optax.partition({k: optax.inject_hyperparams(optax.sgd)(0.1) for k in "ab"}, {"a": "a", "bias": "b"}),
            {"lr/pg1": 0.1, "lr/pg2": 0.1},  # each can be set
        ),
    ],
)
def test_several_rates_have_numbers_and_factors_count_together(tx: Any, expected: dict[str, float]) -> None:
    result = rates_along(jl.Optimizer(tx), PARAMS, steps=1)
    assert {name: rate for name, (rate,) in result.items()} == pytest.approx(expected)


class Groups(Net):
    def configure_optimizers(self) -> jl.Optimizer:  # type: ignore[override]
        state = optax.inject_hyperparams(optax.adam)(learning_rate=0.01)
        return jl.Optimizer(by={"outer": optax.sgd(SCHEDULE, momentum=0.9), ...: state})


CASES = [(name, size, policy) for name in STRATEGIES for size in (1, 2) for policy in ("raise", "skip", "ignore")]
OFTEN = [("single", 1, "raise"), ("fsdp", 2, "skip")]


@pytest.mark.parametrize(("strategy", "accumulate", "policy"), thinned(CASES, *OFTEN, full=CASES[::7]))
def test_rows_have_the_rate_of_each_group(strategy: str, accumulate: int, policy: str) -> None:
    rows, halve = Rows(rates=True), hooks(on_train_epoch_end=lambda t, m: t.hyperparams.update(learning_rate=0.005))
    arguments = {"accumulate_grad_batches": accumulate, "nan_policy": policy, "log_every_n_steps": 1, "max_epochs": 2}
    fit(Groups(rngs=nnx.Rngs(0)), random(4), None, rows, halve, strategy=splitting(strategy), **arguments, **BARE)
    steps = 4 // accumulate
    expected = {k: {"lr/outer": float(SCHEDULE(k)), "lr/rest": 0.01 if k < steps else 0.005} for k in range(2 * steps)}
    result = {step: {k: v for k, v in row.items() if k.startswith("lr")} for step, row in rows.rows}
    assert result == {k: pytest.approx(v) for k, v in expected.items()}
    assert list(rows.rows[0][1]) == ["loss", "lr/outer", "lr/rest", "epoch"]


def test_the_rate_of_a_skipped_step_is_that_of_the_next() -> None:
    batches, rows = numbered(4), Rows(rates=True)
    batches[1]["x"][0] = np.nan
    fit(module(tx=optax.sgd(SCHEDULE)), batches, None, rows, nan_policy="skip", log_every_n_steps=1, **BARE)
    assert rows.of("lr") == pytest.approx([0.2, 0.18, 0.18, 0.16])


def test_the_loss_in_a_chain_lowers_the_rate_in_the_row() -> None:
    rows = Rows(rates=True)
    constant = lambda self, batch: self.w.sum() - jax.lax.stop_gradient(self.w.sum())  # noqa: E731
    made = module(constant, tx=optax.chain(optax.sgd(0.5), PLATEAU(0.5, patience=2, accumulation_size=1)))
    fit(made, numbered(5), None, jl.callbacks.LearningRateMonitor(), rows, log_every_n_steps=1, **BARE)
    tx = PLATEAU(0.5, patience=2, accumulation_size=1)
    state, expected = tx.init(jnp.zeros(1)), []
    for _ in range(5):
        scaled, state = tx.update(jnp.ones(1), state, jnp.zeros(1), value=jnp.zeros(()))
        expected.append(0.5 * float(scaled[0]))
    assert rows.of("lr") == pytest.approx(expected) and expected[-1] < 0.5


def test_a_reset_optimizer_restarts_its_schedule() -> None:
    def lars(lr: Any) -> jl.Optimizer:
        return jl.Optimizer(optax.lars(lr), lr_schedule=lr)

    result = []
    for epochs, resume in ((1, {}), (2, {"ckpt_path": "last", "reset_optimizer": True})):
        rows, model = Rows(rates=True), module(base=Linear, configure_optimizers=lambda self: lars(SCHEDULE))
        given = {"max_epochs": epochs, "default_root_dir": "run", "log_every_n_steps": 1} | resume
        fit(model, random(2), None, rows, keep_all(), **given)
        result.append(rows.of("lr"))
    assert result == [pytest.approx([0.2, 0.18]), pytest.approx([0.2, 0.18])]


def test_a_pipeline_shows_the_rates_of_all_its_ranks() -> None:
    rows = Rows(rates=True)
    strategy = jl.strategies.Pipeline(stages=2, microbatches=2, layers="blocks")
    fit(Groups(depth=2, rngs=nnx.Rngs(0)), random(3), None, rows, strategy=strategy, log_every_n_steps=1, **BARE)
    assert rows.of("lr/outer") == pytest.approx([0.2, 0.18, 0.16]) and rows.of("lr/rest") == pytest.approx([0.01] * 3)


@pytest.mark.parametrize(
    ("arguments", "monitors", "expected"),
    [
        ({}, [], [7.0, 7.0]),
        ({"on_step": False, "on_epoch": True}, [], [7.0]),
        ({}, [jl.callbacks.LearningRateMonitor("epoch")], [7.0, 7.0]),
        (None, [hooks(on_train_batch_end=lambda t, m, *_: m.log("lr", 7.0))], [7.0, 7.0]),
    ],
)
def test_what_a_module_or_hook_logs_itself_is_left_alone(arguments: Any, monitors: Any, expected: list[float]) -> None:
    def step(self: Any, batch: Any) -> jax.Array:
        if arguments is not None:
            self.log("lr", 7.0, **arguments)
        return Mean.training_step(self, batch)

    fit(module(step), numbered(2), None, rows := Rows(rates=True), *monitors, log_every_n_steps=1, **BARE)
    assert rows.of("lr") == expected
