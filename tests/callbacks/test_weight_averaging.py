"""Averages of the weights are those of numpy, evaluations see them, and training never does."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import Stream, numbered, random
from kit.journal import Rows, at_batch
from kit.modules import Linear, Mean
from kit.refusals import fit_refuses
from kit.trainers import BARE, STRATEGIES, fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.callbacks import EMA, WeightAveraging
from jaxlit.errors import ArgumentError, ModuleError

BATCHES, RATE = random(10), 0.1


class Validated(Linear):
    """A linear model by SGD, whose validation tells its loss."""

    def validation_step(self, batch: Any) -> None:
        self.log("val", jnp.mean((batch["x"] @ self.kernel[...] + self.bias[...] - batch["y"]) ** 2))

    def configure_optimizers(self) -> Any:
        return optax.sgd(RATE)


def by_hand(steps: int) -> list[list[np.ndarray]]:
    """Return the weights after each step of plain SGD, in float64."""
    start = Linear()
    params, result = [np.asarray(start.kernel[...], np.float64), np.zeros(1)], []
    for k in range(steps):
        x, y = (np.asarray(BATCHES[k % len(BATCHES)][name], np.float64) for name in "xy")
        error = x @ params[0] + params[1] - y
        params = [params[0] - RATE * 2 * x.T @ error / len(x), params[1] - RATE * 2 * error.mean(0)]
        result.append(params)
    return result


def ema(weights: list[Any], decay: float) -> list[np.ndarray]:
    average = weights[0]
    for w in weights[1:]:
        average = [decay * a + (1 - decay) * b for a, b in zip(average, w, strict=True)]
    return average


def mean(weights: list[Any]) -> list[np.ndarray]:
    return [np.mean(w, axis=0) for w in zip(*weights, strict=True)]


def loss(params: list[np.ndarray]) -> float:
    return float(np.mean([np.mean((b["x"] @ params[0] + params[1] - b["y"]) ** 2) for b in BATCHES]))


AVERAGES: dict[str, Any] = {
    "ema": (lambda: EMA(0.9), lambda w: ema(w, 0.9)),
    "seldom": (lambda: EMA(0.5, update_every_n_steps=3, update_starting_at_step=6), lambda w: ema(w[6::3], 0.5)),
    "mean": (lambda: WeightAveraging(update_starting_at_epoch=2), lambda w: mean(w[20:])),
}
OFTEN = [("ema", "fsdp"), ("mean", "single")]


@pytest.mark.parametrize(
    ("name", "strategy"),
    thinned(
        [(name, strategy) for name in AVERAGES for strategy in STRATEGIES],
        *OFTEN,
        full=[("seldom", "single"), ("ema", "pmap"), ("mean", "shard_map")],
    ),
)
def test_an_average_is_that_of_numpy_everywhere(name: str, strategy: str) -> None:
    make, expected = AVERAGES[name]
    weights, model, rows = by_hand(50), Validated(), Rows()
    callback = make()
    trainer = fit(model, BATCHES, BATCHES, rows, callback, strategy=splitting(strategy), max_epochs=5, **BARE)
    average = expected(weights)
    for mine, theirs in zip((model.kernel[...], model.bias[...]), average, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    began = 20 if name == "mean" else 0
    seen = [loss(expected(weights[: 10 * k]) if 10 * k > began else weights[10 * k - 1]) for k in range(1, 6)]
    np.testing.assert_allclose(rows.of("val"), seen, rtol=1e-5)
    assert seen[-1] != pytest.approx(loss(weights[-1]), rel=1e-4)  # what is trained has another one
    (later,) = trainer.validate(model, BATCHES)
    assert later["val"] == pytest.approx(loss(average), rel=1e-5)


def test_an_average_of_16_bit_weights_has_32_bits() -> None:
    callback = EMA(0.999)
    seen: list[Any] = []
    apply = at_batch(
        8, lambda trainer, module: seen.append(trainer.apply(lambda m: m.kernel[...].dtype.itemsize * m.kernel[...]))
    )
    trainer = fit(Validated(), BATCHES, BATCHES, callback, apply, precision="bf16-true", **BARE)
    arrays = trainer.callback_arrays(callback)
    assert {x.dtype for x in jax.tree.leaves(arrays["average"])} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(arrays["rounded"])} == {jnp.dtype("bfloat16")}
    assert seen[0].dtype == jnp.bfloat16 and trainer.callback_metrics["val"] > 0


class Chooses(jl.Callback):
    """Says what evaluations see."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose

    def init_arrays(self, params: Any) -> Any:
        return {"a": params, "n": jnp.zeros(())}

    def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: Any) -> Any:
        return arrays, params

    def eval_params(self, arrays: Any) -> Any:
        return self.choose(arrays)


CHOICES: dict[str, Any] = {
    "what is computed": (lambda a: jax.tree.map(lambda x: 2.5 * x, a["a"]), "leaves of its arrays unchanged"),
    "another tree": (lambda a: a["n"], "in a pytree with the parameters"),
}


@pytest.mark.parametrize("case", CHOICES)
def test_a_choice_that_does_not_match_parameters_is_refused(case: str) -> None:
    choose, words = CHOICES[case]
    fit_refuses(
        ModuleError, "Chooses.eval_params", words, model=Validated(), train=BATCHES, callbacks=[Chooses(choose)]
    )


def test_two_that_choose_are_refused() -> None:
    both = [EMA(0.9), WeightAveraging()]
    fit_refuses(ModuleError, "EMA and WeightAveraging both", model=Validated(), train=BATCHES, callbacks=both)


def test_an_epoch_of_a_loader_without_a_length_is_refused() -> None:
    callback = WeightAveraging(update_starting_at_epoch=1)
    with pytest.raises(ArgumentError, match="Give update_starting_at_step"):
        make_trainer(callback, max_epochs=2, **BARE).fit(Validated(), Stream(BATCHES))


def test_a_module_keeps_its_other_variables() -> None:
    class Counted(Validated):
        def __init__(self) -> None:
            super().__init__()
            self.seen = nnx.BatchStat(jnp.zeros(()))

        def training_step(self, batch: Any) -> jax.Array:
            self.seen[...] += 1
            return super().training_step(batch)

    model = Counted()
    fit(model, BATCHES, None, EMA(0.9), **BARE)
    assert float(model.seen[...]) == 10


def test_weights_that_the_user_sets_after_a_fit_are_evaluated() -> None:
    model = Mean()
    trainer = fit(model, numbered(4), None, EMA(0.5))
    model.w[...] = jnp.full(1, 100.0)
    assert trainer.validate(model, numbered(1)) == [{"val": 1.0 - 100.0}]
