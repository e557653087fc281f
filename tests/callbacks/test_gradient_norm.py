"""GradientNorm against optax, a formula, and the collectives of the compiled step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random
from kit.inside import lowered
from kit.journal import Rows
from kit.modules import Linear, module
from kit.trainers import FOUR, STRATEGIES, fit, splitting, thinned

from jaxlit.callbacks import GradientNorm

INF, RATE = float("inf"), 0.1
BATCHES = random(3)
# Two layers, one of them inside a list.
NAMES = {
    "first.kernel": lambda g: g["first"]["kernel"],
    "first.bias": lambda g: g["first"]["bias"],
    "rest[0].kernel": lambda g: g["rest"][0]["kernel"],
    "rest[0].bias": lambda g: g["rest"][0]["bias"],
}


def make(empty: bool = False) -> Any:
    def init(self: Any) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.rest = nnx.Linear(3, 16, rngs=rngs), nnx.List([nnx.Linear(16, 1, rngs=rngs)])
        if empty:
            self.empty = nnx.Param(jnp.zeros((0, 3)))

    call = lambda self, x: self.rest[0](jnp.tanh(self.first(x)))  # noqa: E731
    return module(base=Linear, tx=optax.sgd(RATE), init=init, __call__=call)


def train(norm: Any, strategy: str = "single", model: Any = None, **arguments: Any) -> tuple[dict[int, Any], Any]:
    """Return what was logged of gradients, by step, and the Trainer."""
    rows = Rows()
    trainer = fit(model or make(), BATCHES, None, norm, rows, strategy=splitting(strategy), **arguments)
    own = {step: {k: v for k, v in row.items() if k.startswith("grad_norm")} for step, row in rows.rows}
    return {step: row for step, row in own.items() if row}, trainer


@pytest.fixture(scope="module")
def gradients() -> list[dict[str, np.ndarray]]:
    """The gradients of each step of plain SGD, by the parameter's name."""
    graphdef, params = nnx.split(make())
    grad, result = jax.jit(jax.grad(lambda params, batch: nnx.merge(graphdef, params).loss(batch))), []
    for batch in BATCHES:
        grads = grad(params, batch)
        params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
        result.append({name: np.asarray(get(grads)[...], np.float64).ravel() for name, get in NAMES.items()})
    return result


def norm_of(x: np.ndarray, p: float = 2.0) -> float:
    size = np.abs(x)
    return float(size.max() if p == INF else (size**p).sum() ** (1 / p))


def total(grads: dict[str, np.ndarray], p: float = 2.0) -> float:
    return norm_of(np.concatenate(list(grads.values())), p)


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "pmap", full=FOUR))
def test_it_is_the_norm_of_all_gradients_before_clipping(strategy, gradients) -> None:
    rows, _ = train(GradientNorm(every_n_steps=1), strategy)
    expected = [total(grads) for grads in gradients]
    assert [row["grad_norm"] for row in rows.values()] == pytest.approx(expected, rel=1e-5)
    assert list(rows) == [0, 1, 2] and {len(row) for row in rows.values()} == {1}
    clipped, _ = train(GradientNorm(every_n_steps=1), strategy, gradient_clip_val=1e-3, max_steps=1)
    assert clipped[0]["grad_norm"] == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("p", thinned([1, 2.0, 0.5, 4.5, INF], 0.5, INF))
def test_it_follows_the_formula_for_every_p(p, gradients) -> None:
    rows, _ = train(GradientNorm(p, every_n_steps=1, per_parameter=True), model=make(empty=p >= 1))
    for row, grads in zip(rows.values(), gradients, strict=True):
        assert row.pop("grad_norm/empty", 0.0) == 0.0
        expected = {f"grad_norm/{name}": norm_of(x, p) for name, x in grads.items()} | {"grad_norm": total(grads, p)}
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("interval", "log_every", "expected"), [(None, 2, [1]), (None, 0, []), (3, 0, [2]), (1, 3, [0, 1, 2])]
)
def test_it_comes_every_n_steps_or_with_the_rows(interval, log_every, expected) -> None:
    assert list(train(GradientNorm(every_n_steps=interval), log_every_n_steps=log_every)[0]) == expected


def test_sharded_gradients_are_not_gathered_for_it() -> None:
    _, trainer = train(GradientNorm(every_n_steps=2, per_parameter=True), "fsdp")
    texts = [lowered(trainer, name, BATCHES[0]).compile().as_text() for name in ("train_step", "traced")]
    kinds = ("all-gather", "all-to-all", "collective-permute")
    plain, traced = ([text.count(f" {kind}(") for kind in kinds] for text in texts)
    assert plain[0] > 0 and traced == plain


def test_a_bfloat16_gradient_is_added_up_in_float32() -> None:
    x = jnp.full(4096, 0.01, jnp.bfloat16)  # in bfloat16 the sum of squares would stop growing
    result = GradientNorm().trace_step({"w": x}, None, None, None)["grad_norm"]
    assert result.dtype == jnp.float32
    assert float(result) == pytest.approx(float(np.linalg.norm(np.asarray(x, np.float64))), rel=1e-5)
