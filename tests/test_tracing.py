"""What callbacks see of an optimizer step is what a loop written by hand has, and other steps pay nothing for it."""

import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.compiles import compiles

import jaxlit as jl
from jaxlit.leaf_names import leaf_name

STRATEGIES = ("single", "ddp", "fsdp", "shard_map", "pmap", "simulate:8", "zero1")
TRAINS = ("train_step", "train_step_traced", "micro_step")
CLIP = 0.25


class Line(jl.TrainModule):
    """Linear regression with Adam."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.kernel = nnx.Param(jnp.asarray(rng.normal(size=(8, 16)), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(16))

    def training_step(self, batch: Any) -> jax.Array:
        loss = loss_of({"kernel": self.kernel[...], "bias": self.bias[...]}, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.05, eps=1e-3)


def loss_of(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["kernel"] + params["bias"] - batch["y"]) ** 2)


class Looks(jl.Callback):
    """Keeps all that a step shows."""

    def __init__(self, every: int | None = None) -> None:
        self.trace_every_n_steps = every
        self.seen: dict[int, dict[str, np.ndarray]] = {}

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        return named(grads=grads, updates=updates, params=params, opt_state=opt_state)

    def on_trace(self, trainer: Any, values: dict[str, np.ndarray], step: int) -> None:
        assert step not in self.seen and all(isinstance(x, np.ndarray) for x in values.values())
        self.seen[step] = values


class Norm(jl.Callback):
    """Shows a scalar."""

    def __init__(self, every: int | None = None, name: str = "norm") -> None:
        self.trace_every_n_steps, self.name = every, name

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        return {self.name: optax.tree.norm(grads)}


def named(**trees: Any) -> dict[str, Any]:
    found = {}
    for tree, leaves in trees.items():
        for path, x in jax.tree_util.tree_leaves_with_path(leaves):
            found[f"{tree}/{leaf_name(path)}"] = x
    return found


def batches(rows: int, size: int = 16) -> jl.ArrayLoader:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 8)).astype(np.float32)
    return jl.ArrayLoader({"x": x, "y": rng.normal(size=(rows, 16)).astype(np.float32)}, size)


def strategy_of(name: str) -> Any:
    # No least size, so that arrays as small as these are split.
    sharded = {"fsdp": {"min_size": 0}, "zero1": {"min_size": 0, "stage": 1}}.get(name)
    return name if sharded is None else jl.strategies.FSDP(**sharded)


def train(callbacks: Any, data: Any, strategy: str = "single", **arguments: Any) -> tuple[jl.Trainer, Line]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"max_epochs": 2, "num_sanity_val_steps": 0, **quiet, **arguments}
    trainer, module = jl.Trainer(strategy=strategy_of(strategy), callbacks=callbacks, **given), Line()
    trainer.fit(module, data)
    return trainer, module


@functools.cache
def looked(strategy: str, accumulate: int) -> tuple[dict[int, dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Train and look at every second step; returns what was seen, and the weights."""
    looks = Looks(2)
    callbacks = [looks, Norm(3), jl.callbacks.GradientNorm(every_n_steps=1)]
    data = batches(77)  # the last batch does not divide among 8 devices
    _, module = train(callbacks, data, strategy, accumulate_grad_batches=accumulate, gradient_clip_val=CLIP)
    return looks.seen, weights_of(module)


def weights_of(module: Line) -> dict[str, np.ndarray]:
    return {"kernel": np.asarray(module.kernel[...]), "bias": np.asarray(module.bias[...])}


def by_hand(windows: list[Any], clip: bool = False, low: Any = jnp.float32, scale: float = 1.0) -> list[dict[str, Any]]:
    """Train in plain JAX and optax; returns what each step has."""
    module, tx = Line(), Line().configure_optimizers()
    params = {"kernel": jnp.copy(module.kernel[...]), "bias": jnp.copy(module.bias[...])}
    opt_state, found = tx.init(params), []

    def low_loss(params: Any, batch: Any) -> jax.Array:
        return loss_of(*jax.tree.map(lambda x: x.astype(low), (params, batch))).astype(jnp.float32) * scale

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        grads = jax.tree.map(lambda g: g / scale, jax.grad(low_loss)(params, batch))
        norm = jnp.sqrt(sum((g**2).sum() for g in grads.values()))
        clipped = {k: g * jnp.minimum(1, CLIP / norm) for k, g in grads.items()} if clip else grads
        updates, opt_state = tx.update(clipped, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, grads, updates

    for window in windows:
        after, opt_state, grads, updates = step(params, opt_state, window)
        found.append(named(grads=grads, updates=updates, params=params, opt_state=opt_state))
        params = after
    return found


def assert_seen(seen: dict[int, Any], expected: list[dict[str, Any]], steps: list[int], rtol: float = 2e-5) -> None:
    assert list(seen) == steps
    for step in steps:
        assert seen[step].keys() == expected[step].keys()
        for name, x in expected[step].items():
            x = np.asarray(x)
            assert seen[step][name].shape == x.shape and seen[step][name].dtype == x.dtype, name
            np.testing.assert_allclose(seen[step][name], x, rtol=rtol, atol=rtol * np.abs(x).max(), err_msg=name)


def windows_of(data: jl.ArrayLoader, size: int, epochs: int = 2) -> list[Any]:
    rows = len(data.arrays["x"])
    one = [{k: x[i : i + size] for k, x in data.arrays.items()} for i in range(0, rows, size)]
    return one * epochs


# Values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_is_seen_is_what_a_hand_written_loop_has(strategy: str, accumulate: int) -> None:
    expected = by_hand(windows_of(batches(77), 16 * accumulate), clip=True)
    norms = [np.linalg.norm(found["grads/kernel"]) for found in expected]
    assert min(norms) > 2 * CLIP  # so that clipping matters
    assert_seen(looked(strategy, accumulate)[0], expected, list(range(1, len(expected), 2)))


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_mixed_precision_shows_gradients_without_their_scale(strategy: str, precision: str) -> None:
    data, looks = batches(64), Looks(1)
    train(looks, data, strategy, precision=precision, max_steps=4)
    low, scale = (jnp.bfloat16, 1.0) if precision == "bf16-mixed" else (jnp.float16, 2.0**15)
    expected = by_hand(windows_of(data, 16, 1), low=low, scale=scale)
    if strategy == "single":
        assert_seen(looks.seen, expected, [0, 1, 2, 3])
        return
    # Several devices add halves up in another order, and Adam makes more of it from step to step.
    first = [{0: {k: x for k, x in seen.items() if k.startswith("grads/")}} for seen in (looks.seen[0], expected[0])]
    assert_seen(first[0], [first[1][0]], [0], 4 * float(jnp.finfo(low).eps))


def test_without_clipping_updates_are_those_of_the_whole_gradients() -> None:
    data, looks = batches(64), Looks(1)
    train(looks, data, max_epochs=1)
    assert_seen(looks.seen, by_hand(windows_of(data, 16, 1)), [0, 1, 2, 3])


@pytest.mark.parametrize("policy", ["skip", "ignore"])
def test_a_step_that_is_left_out_shows_zero_updates(policy: str) -> None:
    data = batches(64)
    data.arrays["x"][20, 0] = np.nan  # in the second batch
    looks, whole = Looks(1), windows_of(batches(64), 16, 1)
    train(looks, data, nan_policy=policy, max_epochs=1)
    bad, after = looks.seen[1], looks.seen[2]
    assert np.isnan(bad["grads/kernel"]).any()
    if policy == "ignore":
        assert np.isnan(bad["updates/kernel"]).any() and np.isnan(after["params/kernel"]).any()
        return
    assert not bad["updates/kernel"].any() and not bad["updates/bias"].any()
    # The others go on as if it had not been.
    expected = by_hand([whole[0], *whole[2:]])
    assert_seen({i: looks.seen[k] for i, k in enumerate((0, 2, 3))}, expected, [0, 1, 2])
    for name, x in bad.items():
        if name.startswith("opt_state/"):
            np.testing.assert_array_equal(x, looks.seen[0][name])


def test_what_is_seen_of_sharded_arrays_need_not_leave_the_devices() -> None:
    class Shards(jl.Callback):
        trace_every_n_steps = 1

        def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
            return {"largest": jnp.max(jnp.abs(grads["kernel"][...]))}

    trainer, _ = train(Shards(), batches(64), "fsdp", max_steps=2)
    assert "all-gather" in compiled(trainer, "train_step")  # of the parameters
    extra = compiled(trainer, "traced").count("all-gather") - compiled(trainer, "train_step").count("all-gather")
    assert extra == 0


# Programs --------------------------------------------------------------------------------------------


def program(trainer: jl.Trainer, name: str) -> Any:
    """Lower a program of a training that is over."""
    engine: Any = trainer._session.engine
    found = [fn for key, fn in engine._programs.items() if (key == name if name != "traced" else type(key) is tuple)]
    assert len(found) == 1
    return getattr(found[0], "split", found[0]).lower(
        engine.state.leaves, engine.strategy.shard_batch(next(iter(batches(16))))
    )


def compiled(trainer: jl.Trainer, name: str) -> str:
    return program(trainer, name).compile().as_text()


def count(found: list[str]) -> dict[str, int]:
    names = [name.removeprefix("jit(").removesuffix(")") for name in found]
    return dict(Counter(name for name in names if name in TRAINS))


@pytest.mark.parametrize(
    ("intervals", "traced"),
    [((2, 2, 2), 1), ((2, 2, 3), 3), ((3, 6), 2), ((0, 0), 0), ((1,), 1), ((2, None), 1), ((100,), 0)],
)
def test_each_set_of_callbacks_that_fire_together_is_one_program(intervals: Any, traced: int) -> None:
    callbacks = [Norm(every, f"norm{i}") for i, every in enumerate(intervals)]
    with compiles() as found:
        train(callbacks, batches(96), log_every_n_steps=2)  # 12 steps
    expected = {"train_step": int(intervals != (1,)), "train_step_traced": traced}
    assert count(found) == {name: number for name, number in expected.items() if number}


def test_a_callback_without_a_trace_step_compiles_nothing_more() -> None:
    with compiles() as found:
        train([jl.Callback(), jl.callbacks.EarlyStopping("loss", check_on_train_epoch_end=True)], batches(64))
    assert count(found) == {"train_step": 1}


@pytest.mark.parametrize("strategy", ["single", "fsdp", "shard_map"])
def test_steps_that_do_not_fire_run_the_program_without_callbacks(strategy: str) -> None:
    plain, _ = train(None, batches(64), strategy)
    looked, _ = train([Looks(2), Norm(2)], batches(64), strategy)
    expected = program(plain, "train_step").as_text()
    assert program(looked, "train_step").as_text() == expected
    assert program(looked, "traced").as_text() != expected


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_looking_changes_no_bit_of_the_weights(strategy: str, accumulate: int) -> None:
    _, module = train(None, batches(77), strategy, accumulate_grad_batches=accumulate, gradient_clip_val=CLIP)
    for name, x in looked(strategy, accumulate)[1].items():
        np.testing.assert_array_equal(x, weights_of(module)[name])


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "shard_map", "pmap"])
def test_a_traced_step_overwrites_the_old_state(strategy: str) -> None:
    class Holds(Norm):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.held = list(trainer._session.engine.state.leaves)

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            assert batch_idx not in gone
            gone[batch_idx] = {x.is_deleted() for x in self.held if x.size > 8}

    gone: dict[int, set[bool]] = {}
    train(Holds(2), batches(64), strategy, max_epochs=1)
    assert gone == {i: {True} for i in range(4)}
