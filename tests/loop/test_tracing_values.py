"""What callbacks see of an optimizer step is what a loop written by hand has, and other steps pay nothing for it."""

import functools
import itertools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random, sized
from kit.compiles import compiles
from kit.inside import leaf_name, lowered
from kit.modules import Linear
from kit.trainers import THREE, fit, splitting, thinned

import jaxlit as jl

CLIP = 0.25
BATCHES = [*sized(16, 16, 16, 5)]  # the last one does not divide among 8 devices


class Wide(Linear):
    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.asarray(3 * np.random.default_rng(1).normal(size=(3, 16)), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(16))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.05, eps=1e-3)


class Looks(jl.Callback):
    def __init__(self, every: int | None = None) -> None:
        self.trace_every_n_steps = every
        self.seen: dict[int, dict[str, np.ndarray]] = {}

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        return named(grads=grads, updates=updates, params=params, opt_state=opt_state)

    def on_trace(self, trainer: Any, values: dict[str, np.ndarray], step: int) -> None:
        assert step not in self.seen and all(isinstance(x, np.ndarray) for x in values.values())
        self.seen[step] = values


class Norm(jl.Callback):
    def __init__(self, every: int | None = None, name: str = "norm") -> None:
        self.trace_every_n_steps, self.name = every, name

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        return {self.name: optax.tree.norm(grads)}


def named(**trees: Any) -> dict[str, Any]:
    result = {}
    for tree, leaves in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(leaves):
            result[f"{tree}/{leaf_name(path)}"] = x
    return result


def train(callbacks: Any, batches: Any, strategy: str = "single", **arguments: Any) -> tuple[jl.Trainer, Any]:
    model = Wide()
    return fit(model, batches, None, *callbacks, strategy=splitting(strategy), **arguments), model


def weights_of(model: Any) -> dict[str, np.ndarray]:
    return {"kernel": np.asarray(model.kernel[...]), "bias": np.asarray(model.bias[...])}


def by_hand(windows: list[Any], clip: bool = False, low: Any = jnp.float32, scale: float = 1.0) -> list[dict[str, Any]]:
    """Train in plain JAX and optax; returns what each step has."""
    params, tx = {k: jnp.asarray(x) for k, x in weights_of(Wide()).items()}, Wide().configure_optimizers()
    opt_state, result = tx.init(params), []

    def low_loss(params: Any, batch: Any) -> jax.Array:
        w, b = jax.tree.map(lambda x: x.astype(low), (params, batch))
        loss = jnp.mean((b["x"] @ w["kernel"] + w["bias"] - b["y"]) ** 2)
        return loss.astype(jnp.float32) * scale

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        grads = jax.tree.map(lambda g: g / scale, jax.grad(low_loss)(params, batch))
        norm = jnp.sqrt(sum((g**2).sum() for g in grads.values()))
        clipped = {k: g * jnp.minimum(1, CLIP / norm) for k, g in grads.items()} if clip else grads
        updates, opt_state = tx.update(clipped, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, grads, updates

    for window in windows:
        after, opt_state, grads, updates = step(params, opt_state, window)
        result.append(named(grads=grads, updates=updates, params=params, opt_state=opt_state))
        params = after
    return result


def assert_seen(seen: dict[int, Any], expected: list[dict[str, Any]], steps: list[int], rtol: float = 2e-5) -> None:
    assert list(seen) == steps
    for step in steps:
        assert seen[step].keys() == expected[step].keys()
        for name, x in expected[step].items():
            x = np.asarray(x)
            assert seen[step][name].shape == x.shape and seen[step][name].dtype == x.dtype, name
            np.testing.assert_allclose(seen[step][name], x, rtol=rtol, atol=rtol * np.abs(x).max(), err_msg=name)


@functools.cache
def clipped_by_hand(accumulate: int) -> list[dict[str, Any]]:
    windows = [BATCHES[i : i + accumulate] for i in range(0, len(BATCHES), accumulate)]
    return by_hand([jax.tree.map(lambda *x: np.concatenate(x), *window) for window in windows] * 2, clip=True)


CASES = [("single", 1), ("shard_map", 2), ("ddp", 2), ("fsdp", 1), ("zero1", 2), ("pmap", 1), ("replicas:8", 2)]


@pytest.mark.parametrize(
    ("strategy", "accumulate"), thinned(CASES, CASES[1], full=[CASES[0], ("fsdp", 1), ("pmap", 1)])
)
def test_traced_values_match_a_loop_by_hand(strategy: str, accumulate: int) -> None:
    looks, expected = Looks(2), clipped_by_hand(accumulate)
    arguments = {"accumulate_grad_batches": accumulate, "gradient_clip_val": CLIP, "max_epochs": 2}
    _, looked = train([looks, Norm(3), jl.callbacks.GradientNorm(every_n_steps=1)], BATCHES, strategy, **arguments)
    assert min(np.linalg.norm(result["grads/kernel"]) for result in expected) > 2 * CLIP  # so that clipping matters
    assert_seen(looks.seen, expected, list(range(1, len(expected), 2)))
    _, plain = train([], BATCHES, strategy, **arguments)
    for name, x in weights_of(looked).items():
        np.testing.assert_array_equal(x, weights_of(plain)[name])


MIXED = itertools.product(("single", "fsdp"), ("bf16-mixed", "16-mixed"))


@pytest.mark.parametrize(("strategy", "precision"), thinned(MIXED, ("single", "16-mixed")))
def test_a_mixed_precision_shows_gradients_without_their_scale(strategy: str, precision: str) -> None:
    looks, batches = Looks(1), random(4, rows=16)
    train([looks], batches, strategy, precision=precision)
    low, scale = (jnp.bfloat16, 1.0) if precision == "bf16-mixed" else (jnp.float16, 2.0**15)
    expected = by_hand(batches, low=low, scale=scale)
    if strategy == "single":
        assert_seen(looks.seen, expected, [0, 1, 2, 3])
        return
    # Several devices add halves up in another order, and Adam makes more of it from step to step.
    first = [{0: {k: x for k, x in seen.items() if k.startswith("grads/")}} for seen in (looks.seen[0], expected[0])]
    assert_seen(first[0], [first[1][0]], [0], 4 * float(jnp.finfo(low).eps))


BATCH = random(1, rows=16)[0]


def count(result: list[str]) -> dict[str, int]:
    names = [name.removeprefix("jit(").removesuffix(")") for name in result]
    return dict(Counter(name for name in names if name in ("train_step", "train_step_traced", "micro_step")))


INTERVALS = [((2, 2, 3), 3), ((3, 6), 2), ((0, 0), 0), ((1,), 1), ((2, None), 1), ((100,), 0), ((), 0)]


@pytest.mark.parametrize(("intervals", "traced"), thinned(INTERVALS, INTERVALS[0]))
def test_each_set_of_callbacks_that_fire_together_is_one_program(intervals: Any, traced: int) -> None:
    callbacks = [Norm(every, f"norm{i}") for i, every in enumerate(intervals)] or [jl.Callback()]
    with compiles() as result:
        train(callbacks, random(6, rows=16), max_epochs=2, log_every_n_steps=2)
    expected = {"train_step": int(intervals != (1,)), "train_step_traced": traced}
    assert count(result) == {name: number for name, number in expected.items() if number}


@pytest.mark.parametrize("strategy", thinned(THREE, "single"))
def test_steps_that_do_not_fire_run_the_plain_program(strategy: str) -> None:
    plain, _ = train([], random(2, rows=16), strategy)
    looking, _ = train([Looks(2), Norm(2)], random(2, rows=16), strategy)
    expected = lowered(plain, "train_step", BATCH).as_text()
    assert lowered(looking, "train_step", BATCH).as_text() == expected
    assert lowered(looking, "traced", BATCH).as_text() != expected
