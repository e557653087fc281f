"""The training state as one list of arrays; schedules of optax, and hyperparameters that hooks read and set."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.inside import engine_of
from kit.journal import hooks
from kit.modules import Net, module
from kit.refusals import fit_refuses, refuses
from kit.trainers import FOUR, STRATEGIES, THREE, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.callbacks import EMA
from jaxlit.core.parts import by_part
from jaxlit.engine.state import _is_finite, find_hyperparams
from jaxlit.errors import ArgumentTypeError, ModuleError
from jaxlit.trainer.defaults import frozen_parts


@pytest.mark.parametrize("strategy", thinned(THREE, "fsdp"))
def test_each_parameter_and_average_that_is_not_finite_is_named(strategy) -> None:
    state = engine_of(fit(Net(rngs=nnx.Rngs(0)), random(1), None, EMA(), strategy=strategy)).state
    assert state.not_finite() == []
    for place, array in enumerate(state.leaves):
        if not jnp.issubdtype(array.dtype, jnp.floating) or not array.size:
            continue
        name = state.spec.entries[place][0].removeprefix("module.")
        expected = [name] * (place in jax.tree.leaves((state.spec.index.params, state.spec.eval_params)))
        for bad in (np.nan, np.inf):
            wrong = np.array(array)
            wrong.flat[-1] = bad
            state.put(place, wrong)
            assert state.not_finite() == expected
        state.put(place, array)
    assert state.not_finite() == []


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float8_e4m3fn", "float16", "complex64"])
def test_any_dtype_is_looked_at(dtype: str) -> None:
    x = jnp.ones(3, dtype)
    assert bool(_is_finite([x]))
    assert not bool(_is_finite([x.at[1].set(jnp.nan)]))


INJECTED = optax.inject_hyperparams(optax.sgd, static_args=("nesterov",))


def sloping(tx: Any) -> Any:
    """Return a module whose weight has the gradient 1, whatever the batch, and the batch's number as loss."""
    step = lambda self, batch: jnp.mean(batch["x"]) + (self.w - jax.lax.stop_gradient(self.w[...])).sum()  # noqa: E731
    return module(step, **({"configure_optimizers": tx} if callable(tx) and not hasattr(tx, "init") else {"tx": tx}))


def weight(model: Any) -> float:
    return float(model.w[...][0])


@pytest.mark.parametrize(("strategy", "accumulate"), [("single", 1), ("fsdp", 3), ("shard_map", 3)])
def test_a_schedule_counts_optimizer_steps_across_epochs(strategy, accumulate) -> None:
    # Rates 1, 2, 4, ...: their sum tells which were used, and how often.
    model = sloping(optax.sgd(lambda count: 2.0**count))
    fit(model, numbered(4), strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate)
    assert weight(model) == -(2.0 ** {1: 8, 3: 4}[accumulate] - 1)


@pytest.mark.parametrize("strategy", thinned(THREE, "single"))
def test_reduce_on_plateau_in_a_chain_gets_the_loss_of_the_step(strategy) -> None:
    accumulate = 1 if strategy == "fsdp" else 2
    losses = [4, 2, 3, 3, 3, 3, 1, 2, 2, 2, 2, 2]
    make_tx = lambda: optax.chain(optax.sgd(0.5), optax.contrib.reduce_on_plateau(factor=0.5, patience=2))  # noqa: E731
    model = sloping(make_tx())
    fit(model, [numbered(1, x)[0] for x in losses], strategy=strategy, accumulate_grad_batches=accumulate)
    tx, w = make_tx(), 0.0
    opt_state, windows = tx.init(w), np.mean(np.reshape(losses, (-1, accumulate)), axis=1)
    update = jax.jit(lambda opt_state, w, loss: tx.update(jnp.ones(()), opt_state, w, value=loss))
    for loss in windows:
        updates, opt_state = update(opt_state, w, np.float32(loss))
        w = w + float(updates)
    assert w > -0.5 * len(windows), "the scale was never reduced"
    assert weight(model) == pytest.approx(w, abs=1e-6)


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "single", "shard_map", full=FOUR))
def test_a_hyperparameter_set_in_a_hook_holds(strategy) -> None:
    read, weights = [], []

    def begin_epoch(trainer: jl.Trainer, module: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.hyperparams["learning_rate"] = 8

    def end_batch(trainer: jl.Trainer, module: Any, *_: Any) -> None:
        read.append(trainer.hyperparams["learning_rate"])
        weights.append(weight(module))
        trainer.hyperparams["learning_rate"] *= 0.5

    def begin(trainer: jl.Trainer, module: Any) -> None:
        assert dict(trainer.hyperparams) == {"learning_rate": 1.0, "momentum": 0.5}
        trainer.hyperparams["momentum"] = 0.25

    sets = hooks(on_train_epoch_start=begin_epoch, on_train_batch_end=end_batch, on_fit_start=begin)
    model = sloping(INJECTED(learning_rate=1.0, momentum=0.5))
    trainer = fit(model, numbered(3), None, sets, strategy=strategy, max_epochs=2)
    rates, expected = [1.0, 0.5, 0.25, 8.0, 4.0, 2.0], []
    w = trace = 0.0
    for rate in rates:
        trace = 1 + 0.25 * trace
        w -= rate * trace
        expected.append(w)
    assert read == rates
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert dict(trainer.hyperparams) == {"learning_rate": 1.0, "momentum": 0.25}  # also after fit


def test_a_hyperparameter_set_inside_a_window_holds_for_its_step() -> None:
    def change(trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, i: int) -> None:
        trainer.hyperparams["learning_rate"] = {0: 2.0, 1: 4.0, 2: 8.0, 3: 0.0}[i]

    model = sloping(INJECTED(learning_rate=1.0))
    fit(model, numbered(4), None, hooks(on_train_batch_end=change), accumulate_grad_batches=2)
    assert weight(model) == -(2.0 + 8.0)


def wide(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 0, params)


WRAPPED: dict[str, Any] = {
    "plain": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "masked": lambda tx: optax.masked(tx, wide),
    "windows": lambda tx: optax.MultiSteps(tx, 2),
    "groups": lambda tx: jl.Optimizer(by={"w": tx}),
}


@pytest.mark.parametrize(("wrap", "precision"), [*((name, "bf16-true") for name in WRAPPED), ("plain", None)])
def test_a_hyperparameter_that_16_bits_change_is_refused(wrap: str, precision: str | None) -> None:
    held = lambda self: setattr(self, "w", nnx.Param(jnp.zeros(1, "float32" if precision else "bfloat16")))  # noqa: E731
    tx = WRAPPED[wrap](optax.inject_hyperparams(optax.adam)(0.5, b1=0.5))
    words = r"hyperparams\.b2 in bfloat16.* 0\.999 to 1\..*hyperparam_dtype=jnp\.float32"
    given = {"precision": precision} if precision else {}
    fit_refuses(ModuleError, words, model=module(init=held, tx=tx), train=numbered(1), **given)
    tx = WRAPPED[wrap](optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(0.5, b1=0.5))
    trainer = fit(module(init=held, tx=tx), numbered(1), **given)
    assert np.float32(0.999) in trainer.hyperparams.values()


def test_a_rate_that_16_bits_hold_is_trained_with() -> None:
    low = {"precision": "bf16-true"}
    assert dict(fit(module(tx=INJECTED(0.5)), numbered(1), **low).hyperparams) == {"learning_rate": 0.5}
    fit(module(tx=optax.contrib.prodigy()), numbered(1), **low)  # what it estimates may be rounded
    for rate in (3e-4, optax.constant_schedule(0.5)):  # one is changed, and the numbers of the other are not known
        fit_refuses(ModuleError, "learning_rate", model=module(tx=INJECTED(rate)), train=numbered(1), **low)


def test_wrong_hyperparameters_are_refused() -> None:
    result = fit(sloping(INJECTED(learning_rate=1.0, momentum=0.5)), numbered(1)).hyperparams
    words = r"'learning_rat'.*Did you mean 'learning_rate'.*learning_rate.*momentum"
    refuses(KeyError, lambda: result["learning_rat"], words)
    refuses(KeyError, lambda: result.update(lr=1.0), r"'lr'.*learning_rate.*momentum")
    refuses(TypeError, lambda: result.pop("momentum"), "deleted")
    for value in (True, "0.3"):
        words = r"hyperparams\['momentum'\] takes a number"
        refuses(ArgumentTypeError, lambda value=value: result.update(momentum=value), words)
    assert sorted(result) == ["learning_rate", "momentum"] and len(result) == 2
    # A schedule would overwrite it in the next step.
    model = sloping(INJECTED(learning_rate=optax.constant_schedule(2.0), momentum=0.5))
    result = fit(model, numbered(1)).hyperparams
    assert weight(model) == -2.0 and list(result) == ["momentum"]
    refuses(KeyError, lambda: result.update(learning_rate=1.0), r"'learning_rate'.*momentum")


def test_only_injected_hyperparameters_are_shown() -> None:
    trainer = make_trainer()
    with pytest.raises(AttributeError, match="fit"):
        _ = trainer.hyperparams
    trainer.fit(sloping(optax.sgd(0.1)), numbered(1))
    assert dict(trainer.hyperparams) == {}
    with pytest.raises(KeyError, match="inject_hyperparams"):
        trainer.hyperparams["learning_rate"] = 1.0
    trainer.fit(sloping(optax.chain(optax.clip_by_global_norm(10.0), INJECTED(learning_rate=0.5))), numbered(1))
    assert dict(trainer.hyperparams) == {"learning_rate": 0.5}


BY = {"inner": INJECTED(0.1), "outer": INJECTED(0.2), ...: INJECTED(0.3)}
KERNELS = {"*/kernel": INJECTED(0.1), ...: INJECTED(0.2)}
OF_KERNELS = {"/*/kernel": 0.1, "/*/kernel/inner": 0.1, "/rest": 0.2, "/rest/inner": 0.2, "/rest/norm": 0.2}
# An optimizer, frozen parts, and the rates by what follows "learning_rate" in their names.
NAMES: list[tuple[Any, list[str], dict[str, float]]] = [
    (optax.chain(INJECTED(0.1), INJECTED(0.2)), [], {"/0": 0.1, "/1": 0.2}),
    (INJECTED(0.1), ["inner"], {"": 0.1, "/inner": 0.1}),
    (jl.Optimizer(by=BY), ["inner"], {"/inner": 0.1, "/outer": 0.2, "/rest": 0.3}),
    (jl.Optimizer(by=KERNELS), ["inner", "norm"], OF_KERNELS),
]


@pytest.mark.parametrize(("made", "parts", "expected"), NAMES)
def test_names_of_hyperparameters_with_frozen_parts(made: Any, parts: list[str], expected: dict[str, float]) -> None:
    model = module(base=Net, init=lambda self: Net.__init__(self, rngs=nnx.Rngs(0)))
    optimizer = (made if isinstance(made, jl.Optimizer) else jl.Optimizer(made)).of(model)
    held = frozen_parts([jl.callbacks.BackboneFreeze(part) for part in parts], model, nnx.Param)
    state = by_part(optimizer, held).tx.init(nnx.as_pure(nnx.state(model, nnx.Param)))
    result: Any = find_hyperparams(state)  # with the numbers in the place of their places
    expected = {f"learning_rate{name}": rate for name, rate in expected.items()}
    assert {name: float(x) for name, x in result.items()} == pytest.approx(expected)
