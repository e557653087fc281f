"""GradientNorm against optax, a formula, and the collectives of the compiled step."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.trainers import thinned

import jaxlit as jl
from jaxlit.callbacks import GradientNorm
from jaxlit.errors import ArgumentError

STRATEGIES = ("single", "ddp", "fsdp", "shard_map", "pmap", "simulate:8", "zero1")
QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
INF = float("inf")


class Two(jl.TrainModule):
    """Two layers, one of them inside a list."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(8, 16, rngs=rngs)
        self.rest = nnx.List([nnx.Linear(16, 8, rngs=rngs)])

    def losses(self, batch: Any) -> jax.Array:
        return jnp.mean((self.rest[0](jnp.tanh(self.first(batch["x"]))) - batch["y"]) ** 2)

    def training_step(self, batch: Any) -> jax.Array:
        return self.losses(batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


class Rows(jl.Callback):
    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_log(self, trainer: Any, values: dict[str, float], step: int) -> None:
        self.rows[step] = {k: v for k, v in values.items() if k.startswith("grad_norm")}


def data(rows: int = 48) -> jl.ArrayLoader:
    rng = np.random.default_rng(0)
    return jl.ArrayLoader({k: rng.normal(size=(rows, 8)).astype(np.float32) for k in ("x", "y")}, 16)


def train(norm: Any, strategy: str = "single", **arguments: Any) -> tuple[dict[int, dict[str, float]], jl.Trainer]:
    rows, given = Rows(), {"max_epochs": 1, **QUIET, **arguments}
    sharded = {"fsdp": {"min_size": 0}, "zero1": {"min_size": 0, "stage": 1}}.get(strategy)
    chosen = strategy if sharded is None else jl.strategies.FSDP(**sharded)
    trainer = jl.Trainer(strategy=chosen, callbacks=[norm, rows], **given)
    trainer.fit(Two(), data())
    return rows.rows, trainer


def gradients() -> list[Any]:
    """Return the gradients of each step of plain SGD."""
    graphdef, params = nnx.split(Two())
    found = []
    for batch in data():
        found.append(jax.grad(lambda p, b=batch: nnx.merge(graphdef, p).losses(b))(params))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, found[-1])
    return found


NAMES = {
    "first.kernel": lambda g: g["first"]["kernel"],
    "first.bias": lambda g: g["first"]["bias"],
    "rest[0].kernel": lambda g: g["rest"][0]["kernel"],
    "rest[0].bias": lambda g: g["rest"][0]["bias"],
}


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "single", "fsdp", "pmap"))
def test_it_is_the_norm_of_all_gradients_before_clipping(strategy: str) -> None:
    rows, _ = train(GradientNorm(every_n_steps=1), strategy)
    expected = [float(optax.tree.norm(g)) for g in gradients()]
    assert [row["grad_norm"] for row in rows.values()] == pytest.approx(expected, rel=1e-5)
    assert list(rows) == [0, 1, 2] and {len(row) for row in rows.values()} == {1}
    clipped, _ = train(GradientNorm(every_n_steps=1), strategy, gradient_clip_val=1e-3)
    assert clipped[0]["grad_norm"] == pytest.approx(expected[0], rel=1e-5)


@pytest.mark.parametrize("p", [1, 2.0, 3, 0.5, 4.5, INF])
def test_it_follows_the_formula_for_every_p(p: float) -> None:
    rows, _ = train(GradientNorm(p, every_n_steps=1, per_parameter=True))
    for row, grads in zip(rows.values(), gradients(), strict=True):
        each = {name: np.abs(np.asarray(get(grads)[...], np.float64)).ravel() for name, get in NAMES.items()}
        norm = lambda x: x.max() if p == INF else (x**p).sum() ** (1 / p)  # noqa: E731
        expected = {f"grad_norm/{name}": norm(x) for name, x in each.items()}
        expected["grad_norm"] = norm(np.concatenate(list(each.values())))
        assert row == pytest.approx(expected, rel=1e-5)


def test_very_small_and_large_gradients_have_a_norm() -> None:
    class Scaled(Two):
        def training_step(self, batch: Any) -> jax.Array:
            return self.losses(batch) * scale

    for scale in (1e-15, 1e15):
        rows = Rows()
        trainer = jl.Trainer(strategy="single", callbacks=[GradientNorm(every_n_steps=1), rows], max_steps=1, **QUIET)
        trainer.fit(Scaled(), data())
        assert rows.rows[0]["grad_norm"] == pytest.approx(scale * float(optax.tree.norm(gradients()[0])), rel=1e-4)


@pytest.mark.parametrize("p", [1, 2.0, INF])
def test_a_parameter_without_entries_adds_nothing(p: float) -> None:
    class Empty(Two):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nnx.Param(jnp.zeros((0, 3)))

    found = {}
    for module in (Two(), Empty()):
        rows = Rows()
        norm = GradientNorm(p, every_n_steps=1, per_parameter=True)
        jl.Trainer(strategy="single", callbacks=[norm, rows], max_steps=1, **QUIET).fit(module, data())
        found[type(module)] = rows.rows[0]
    assert found[Empty] == pytest.approx(found[Two] | {"grad_norm/empty": 0.0}) and found[Two]["grad_norm"] > 0


@pytest.mark.parametrize(
    ("interval", "log_every", "expected"), [(None, 2, [1]), (None, 0, []), (3, 0, [2]), (1, 3, [0, 1, 2])]
)
def test_it_comes_every_n_steps_or_with_the_rows(interval: Any, log_every: int, expected: list[int]) -> None:
    rows, _ = train(GradientNorm(every_n_steps=interval), log_every_n_steps=log_every)
    assert [step for step, row in rows.items() if row] == expected


@pytest.mark.parametrize("per_parameter", [False, True])
def test_sharded_gradients_are_not_gathered_for_it(per_parameter: bool) -> None:
    _, trainer = train(GradientNorm(every_n_steps=2, per_parameter=per_parameter), "fsdp")
    engine: Any = trainer._session.engine
    batch, found = engine.strategy.shard_batch(next(iter(data()))), []
    assert any(not x.is_fully_replicated for x in engine.state.leaves)
    for program in engine._programs.values():
        text = program.lower(engine.state.leaves, batch).compile().as_text()
        found.append([text.count(f" {kind}(") for kind in ("all-gather", "all-to-all", "collective-permute")])
    plain, traced = found
    assert plain[0] > 0 and traced == plain


def test_a_bfloat16_gradient_is_added_up_in_float32() -> None:
    norm = GradientNorm()
    x = jnp.full(4096, 0.01, jnp.bfloat16)  # in bfloat16 the sum of squares would stop growing
    found = norm.trace_step({"w": x}, None, None, None)["grad_norm"]
    assert found.dtype == jnp.float32
    assert float(found) == pytest.approx(float(np.linalg.norm(np.asarray(x, np.float64))), rel=1e-5)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        *(({"norm_type": x}, "norm_type") for x in (0, -1, "2", None, True, float("nan"))),
        *(({"every_n_steps": x}, "every_n_steps") for x in (0, -1, 2.0, True, "2")),
        *(({"per_parameter": x}, "per_parameter") for x in (1, None, "yes")),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], name: str) -> None:
    value = re.escape(repr(arguments[name]))
    with pytest.raises(ArgumentError, match=rf"GradientNorm\({name}=\.\.\.\) takes .*got {value}"):
        GradientNorm(**arguments)
