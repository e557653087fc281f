"""Schedule-free optimizers: evaluations, the module after a fit and weight files have the evaluation weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from kit.batches import random
from kit.checkpoints import bytes_of
from kit.journal import Rows, at_batch
from kit.modules import Linear, module
from kit.trainers import BARE, STRATEGIES, fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.callbacks import EMA, ModelCheckpoint

BATCHES = random(10)
FREE: Any = optax.contrib.schedule_free_adamw


def is_kernel(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: "kernel" in str(path), params)


def is_bias(params: Any) -> Any:
    return jax.tree.map(lambda kernel: not kernel, is_kernel(params))


OPTIMIZERS: dict[str, tuple[Any, Any]] = {  # and the one that a loop by hand takes, if it is another one
    "plain": (lambda: FREE(0.1), None),
    "sgd": (lambda: optax.contrib.schedule_free_sgd(0.1), None),
    "chain": (lambda: optax.chain(optax.clip_by_global_norm(1.0), FREE(0.1)), None),
    "injected": (lambda: optax.inject_hyperparams(FREE)(0.1), None),
    "masked": (
        lambda: optax.chain(optax.masked(FREE(0.1), is_kernel), optax.masked(optax.set_to_zero(), is_bias)),
        None,
    ),
    "groups": (
        lambda: jl.Optimizer(by={"kernel": FREE(0.1), ...: optax.sgd(0.05)}),
        lambda: optax.partition({"a": FREE(0.1), "b": optax.sgd(0.05)}, {"kernel": "a", "bias": "b"}),
    ),
}


def linear(name: str) -> Any:
    return module(base=Linear, tx=OPTIMIZERS[name][0]())


def free_state(state: Any) -> Any:
    is_free = lambda x: isinstance(x, optax.contrib.ScheduleFreeState)  # noqa: E731
    (found,) = [x for x in jax.tree.leaves(state, is_leaf=is_free) if is_free(x)]
    return found


def by_hand(name: str, steps: int, window: int = 1, begins: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters after a loop of optax alone, and what `schedule_free_eval_params` makes of them."""
    make, plain = OPTIMIZERS[name]
    tx = (plain or make)()
    model = begins or Linear()
    params: Any = {"kernel": model.kernel[...], "bias": model.bias[...]}

    def loss(params: Any, x: Any, y: Any) -> jax.Array:
        return jnp.mean((x @ params["kernel"] + params["bias"] - y) ** 2)

    @jax.jit
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for k in range(steps):
        batches = [BATCHES[(k * window + i) % len(BATCHES)] for i in range(window)]
        params, state = step(params, state, *(np.concatenate([batch[key] for batch in batches]) for key in "xy"))
    free = free_state(state)
    has_z = {key: isinstance(free.z[key], jax.Array) for key in params}
    part = {key: x for key, x in params.items() if has_z[key]}
    seen = optax.contrib.schedule_free_eval_params(free._replace(z={key: free.z[key] for key in part}), part)
    return params, {**params, **seen}


def loss(params: dict[str, Any]) -> float:
    return float(np.mean([np.mean((b["x"] @ params["kernel"] + params["bias"] - b["y"]) ** 2) for b in BATCHES]))


def assert_has(model: Any, expected: dict[str, Any]) -> None:
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(getattr(model, name)[...], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "strategy", "window"),
    thinned(
        [(name, "single", 1) for name in OPTIMIZERS] + [("plain", strategy, 2) for strategy in STRATEGIES],
        *[("plain", "single", 1), ("groups", "single", 1), ("plain", "fsdp", 2)],
        full=[(name, "single", 1) for name in OPTIMIZERS],
    ),
)
def test_evaluations_and_the_module_have_the_weights_of_optax(name: str, strategy: str, window: int) -> None:
    model, rows = linear(name), Rows()
    given = {"strategy": splitting(strategy), "accumulate_grad_batches": window, "max_epochs": 3}
    trainer = fit(model, BATCHES, BATCHES, rows, **BARE | given)
    per_epoch = len(BATCHES) // window
    seen = [by_hand(name, per_epoch * k, window) for k in (1, 2, 3)]
    np.testing.assert_allclose(rows.of("val"), [loss(average) for _, average in seen], rtol=1e-5)
    assert loss(seen[0][0]) != pytest.approx(loss(seen[0][1]), rel=1e-3)  # what is trained has another loss
    assert_has(model, seen[-1][1])
    (later,) = trainer.validate(model, BATCHES)
    assert later["val"] == pytest.approx(loss(seen[-1][1]), rel=1e-5)


@pytest.mark.parametrize("alone", [False, True])
def test_a_checkpoint_is_evaluated_and_loaded_with_these_weights(alone: bool) -> None:
    fit(linear("plain"), BATCHES, None, ModelCheckpoint(save_weights_only=alone), default_root_dir="run")
    path, (_, average) = "run/checkpoints/step_00000010", by_hand("plain", 10)
    assert_has(type(linear("plain")).load_from_checkpoint(path), average)
    (seen,) = make_trainer(**BARE).validate(linear("plain"), BATCHES, ckpt_path=path)
    assert seen["val"] == pytest.approx(loss(average), rel=1e-5)


@pytest.mark.parametrize("name", ["plain", "injected"])
def test_a_resume_continues_from_the_weights_that_are_trained(name: str) -> None:
    states = list[Any]()
    keep = lambda: at_batch(9, lambda trainer, module: states.append(bytes_of(trainer)))  # noqa: E731
    fit(linear(name), BATCHES, BATCHES, keep(), max_epochs=2, default_root_dir="once")
    fit(linear(name), BATCHES, BATCHES, max_epochs=1, default_root_dir="run")
    fit(linear(name), BATCHES, BATCHES, keep(), max_epochs=2, default_root_dir="run", ckpt_path="last")
    assert states[-1] == states[1]


@pytest.mark.parametrize(
    ("strategy", "how"),
    [("single", {"reset_optimizer": True}), ("fsdp", {"reset_optimizer": True}), ("single", {"strict": False})],
)
def test_another_optimizer_begins_with_the_restored_weights(strategy: str, how: dict[str, bool]) -> None:
    given: Any = {"strategy": splitting(strategy), "default_root_dir": "run"}
    first = fit(module(base=Linear, tx=optax.sgd(0.1)), BATCHES, **given).module
    resumed = fit(linear("plain"), BATCHES, max_epochs=2, ckpt_path="last", **how, **given)
    assert_has(resumed.module, by_hand("plain", 10, begins=first)[1])


def test_apply_has_these_weights_during_a_fit() -> None:
    seen = list[Any]()
    reads = at_batch(6, lambda trainer, _: seen.append(trainer.apply(lambda m: (m.kernel[...], m.bias[...]))))
    fit(linear("plain"), BATCHES, None, reads, **BARE)
    _, average = by_hand("plain", 7)
    for x, name in zip(seen[0], ("kernel", "bias"), strict=True):
        np.testing.assert_allclose(x, average[name], rtol=1e-5, atol=1e-6)


def test_an_average_of_a_callback_comes_first() -> None:
    model = linear("plain")
    fit(model, BATCHES[:1], None, EMA(0.9), **BARE)
    assert_has(model, by_hand("plain", 1)[0])  # an average begins with the first weights


def test_a_population_has_these_weights() -> None:
    make = lambda rate: module(base=Linear, tx=FREE(rate))  # noqa: E731
    population = jl.fit_many(make, [{"rate": 0.2}, {"rate": 0.1}], BATCHES, BATCHES, max_epochs=1)
    _, average = by_hand("plain", 10)
    assert_has(population.module(1), average)
    assert population.metrics[1]["val"] == pytest.approx(loss(average), rel=1e-5)
