"""Averages of the weights are those of numpy, evaluations see them, and training never does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import Stream, numbered, random
from kit.journal import Rows, at_batch, hooks
from kit.modules import Linear, Mean, Net, module
from kit.refusals import fit_refuses, warnings_of
from kit.trainers import BARE, STRATEGIES, fit, make_trainer, splitting, thinned

from jaxlit.callbacks import EMA, LambdaCallback, ModelCheckpoint, WeightAveraging
from jaxlit.errors import ArgumentError, ModuleError

BATCHES, RATE = random(10), 0.1


def linear() -> Any:
    return module(base=Linear, tx=optax.sgd(RATE))


def by_hand(steps: int) -> list[list[np.ndarray]]:
    """Return the weights after each step of plain SGD, in float64."""
    params, result = [np.asarray(Linear().kernel[...], np.float64), np.zeros(1)], []
    for k in range(steps):
        x, y = (np.asarray(BATCHES[k % len(BATCHES)][name], np.float64) for name in "xy")
        error = x @ params[0] + params[1] - y
        params = [params[0] - RATE * 2 * x.T @ error / len(x), params[1] - RATE * 2 * error.mean(0)]
        result.append(params)
    return result


def ema(weights: list[Any], decay: Any, initial: Any = None) -> list[np.ndarray]:
    average, weights = (weights[0], weights[1:]) if initial is None else (initial, weights)
    for n, w in enumerate(weights, initial is None):
        share = decay(n) if callable(decay) else decay
        average = [share * a + (1 - share) * b for a, b in zip(average, w, strict=True)]
    return average


def warm_up(n: Any) -> Any:
    return (1 + n) / (10 + n)


INITIAL = [np.asarray(Linear().kernel[...], np.float64), np.zeros(1)]


def mean(weights: list[Any]) -> list[np.ndarray]:
    return [np.mean(w, axis=0) for w in zip(*weights, strict=True)]


def loss(params: list[np.ndarray]) -> float:
    return float(np.mean([np.mean((b["x"] @ params[0] + params[1] - b["y"]) ** 2) for b in BATCHES]))


AVERAGES: dict[str, Any] = {
    "ema": (lambda: EMA(0.9), lambda w: ema(w, 0.9)),
    "seldom": (lambda: EMA(0.5, update_every_n_steps=3, update_starting_at_step=6), lambda w: ema(w[6::3], 0.5)),
    "initial": (lambda: EMA(0.9, from_initial=True), lambda w: ema(w, 0.9, INITIAL)),
    "late": (lambda: EMA(0.9, from_initial=True, update_starting_at_step=6), lambda w: ema(w[6:], 0.9, w[5])),
    "warm-up": (lambda: EMA(warm_up), lambda w: ema(w, warm_up)),
    "initial warm-up": (lambda: EMA(warm_up, from_initial=True), lambda w: ema(w, warm_up, INITIAL)),
    "mean": (lambda: WeightAveraging(update_starting_at_epoch=2), lambda w: mean(w[20:])),
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    thinned(
        [(name, strategy) for name in AVERAGES for strategy in STRATEGIES],
        ("ema", "fsdp"),
        ("mean", "single"),
        *((name, "single") for name in ("initial", "late", "warm-up", "initial warm-up")),
        full=[("seldom", "single"), ("ema", "pmap"), ("mean", "shard_map")],
    ),
)
def test_an_average_is_that_of_numpy_everywhere(name: str, strategy: str) -> None:
    make, expected = AVERAGES[name]
    weights, model, rows = by_hand(50), linear(), Rows()
    trainer = fit(model, BATCHES, BATCHES, rows, make(), strategy=splitting(strategy), max_epochs=5, **BARE)
    average = expected(weights)
    for mine, theirs in zip((model.kernel[...], model.bias[...]), average, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    began = 20 if name == "mean" else 0
    seen = [loss(expected(weights[: 10 * k]) if 10 * k > began else weights[10 * k - 1]) for k in range(1, 6)]
    np.testing.assert_allclose(rows.of("val"), seen, rtol=1e-5)
    assert seen[-1] != pytest.approx(loss(weights[-1]), rel=1e-4)  # what is trained has another one
    (later,) = trainer.validate(model, BATCHES)
    assert later["val"] == pytest.approx(loss(average), rel=1e-5)


@pytest.mark.parametrize(
    ("every", "start", "steps", "warned"),
    [(20, 0, 10, "step 1 of 10"), (5, 4, 10, "step 6 of 10"), (5, 0, 10, None), (20, 0, 1, None), (9, 1, 10, None)],
)
def test_an_average_of_one_early_step_is_told(every: int, start: int, steps: int, warned: Any, caplog: Any) -> None:
    average = WeightAveraging(update_every_n_steps=every, update_starting_at_step=start)
    fit(model := linear(), BATCHES, None, average, max_epochs=1, limit_train_batches=steps, **BARE)
    np.testing.assert_allclose(
        model.kernel[...], mean(by_hand(steps)[-(-start // every) * every :: every])[0], rtol=1e-5
    )
    messages = [m for m in warnings_of(caplog) if "WeightAveraging" in m]
    assert [warned in m for m in messages] == ([True] if warned else [])


@pytest.mark.parametrize(
    ("strategy", "alone"),
    thinned([(s, x) for s in ("fsdp", "single") for x in (False, True)], ("fsdp", False), ("single", True)),
)
def test_a_checkpoint_is_evaluated_and_loaded_with_the_average(strategy: str, alone: bool) -> None:
    make, weights, saves = linear, by_hand(20), ModelCheckpoint(save_weights_only=alone, save_top_k=-1)
    fit(make(), BATCHES, None, EMA(0.9), saves, strategy=splitting(strategy), max_epochs=2, default_root_dir="run")
    for steps in (10, 20):
        path, average = f"run/checkpoints/step_{steps:08d}", ema(weights[:steps], 0.9)
        (seen,) = make_trainer(strategy=splitting(strategy), **BARE).validate(make(), BATCHES, ckpt_path=path)
        assert seen["val"] == pytest.approx(loss(average), rel=1e-5)
        loaded = type(make()).load_from_checkpoint(path)
        np.testing.assert_allclose(loaded.kernel[...], average[0], rtol=1e-5, atol=1e-6)


def test_a_checkpoint_after_an_error_has_the_average_too() -> None:
    fail = hooks(on_train_batch_end=lambda trainer, *_: trainer.global_step == 7 and 1 / 0)
    trainer = make_trainer(EMA(0.5), fail, **BARE | {"max_epochs": 1})
    with pytest.raises(ZeroDivisionError):
        trainer.fit(linear(), BATCHES)
    trainer.save_checkpoint("failed")
    loaded = type(linear()).load_from_checkpoint("failed")
    np.testing.assert_allclose(loaded.kernel[...], ema(by_hand(7), 0.5)[0], rtol=1e-5, atol=1e-6)


def test_an_average_of_16_bit_weights_has_32_bits() -> None:
    callback = EMA(0.999)
    seen: list[Any] = []
    apply = at_batch(
        8, lambda trainer, module: seen.append(trainer.apply(lambda m: m.kernel[...].dtype.itemsize * m.kernel[...]))
    )
    trainer = fit(linear(), BATCHES, BATCHES, callback, apply, precision="bf16-true", **BARE)
    arrays = trainer.callback_arrays(callback)
    assert {x.dtype for x in jax.tree.leaves(arrays["average"])} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(arrays["rounded"])} == {jnp.dtype("bfloat16")}
    assert seen[0].dtype == jnp.bfloat16 and trainer.callback_metrics["val"] > 0


@pytest.mark.parametrize(
    ("choose", "words"),
    [
        (lambda a: jax.tree.map(lambda x: 2.5 * x, a["a"]), "leaves of its arrays unchanged"),
        (lambda a: a["n"], "in a pytree with the parameters"),
    ],
)
def test_a_choice_that_does_not_match_parameters_is_refused(choose: Any, words: str) -> None:
    chooses = LambdaCallback(
        init_arrays=lambda params: {"a": params, "n": jnp.zeros(())},
        update_arrays=lambda arrays, params, grads, global_step: (arrays, params),
        eval_params=choose,
    )
    fit_refuses(ModuleError, "LambdaCallback.eval_params", words, train=BATCHES, model=linear(), callbacks=chooses)


def test_two_that_choose_are_refused() -> None:
    both = [EMA(0.9), WeightAveraging()]
    fit_refuses(ModuleError, "EMA and WeightAveraging both", model=linear(), train=BATCHES, callbacks=both)


def test_an_epoch_of_a_loader_without_a_length_is_refused() -> None:
    callback = WeightAveraging(update_starting_at_epoch=1)
    with pytest.raises(ArgumentError, match="Give update_starting_at_step"):
        make_trainer(callback, max_epochs=2, **BARE).fit(linear(), Stream(BATCHES))


def test_weights_that_the_user_sets_after_a_fit_are_saved_and_evaluated() -> None:
    model = Mean()
    trainer = fit(model, numbered(4), None, EMA(0.5))
    model.w[...] = jnp.full(1, 100.0)
    trainer.save_checkpoint("written")
    assert Mean.load_from_checkpoint("written").w[...].tolist() == [100.0]
    assert trainer.validate(model, numbered(1)) == [{"val": 1.0 - 100.0}]


def test_a_module_keeps_its_other_variables() -> None:
    model = Net(rngs=nnx.Rngs(0))
    fit(model, BATCHES, None, EMA(0.9), **BARE)
    assert int(model.count[...]) == 10
