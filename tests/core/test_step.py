"""What an optimizer step keeps: bad steps, windows, dtypes; and what its guard leaves alone and costs."""

import contextlib
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.by_hand import HandLoop, assert_same, mean, state_of
from kit.checkpoints import state_of as saved_state
from kit.inside import engine_of, lowered
from kit.journal import hooks
from kit.modules import Linear, module
from kit.trainers import BARE, FOUR, STRATEGIES, fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.errors import NonFiniteError

BAD = 2  # the batch that holds a NaN
CASES = [(policy, size, "single") for policy in ("raise", "skip", "ignore") for size in (1, 2)]
CASES += [("skip", 1, "ddp"), ("raise", 2, "fsdp"), ("skip", 1, "zero1"), ("raise", 2, "shard_map")]
CASES += [("skip", 2, "pmap"), ("skip", 1, "replicas:8"), ("ignore", 1, "shard_map")]


class Tracked(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.of_x, self.of_y = nnx.BatchStat(jnp.zeros(())), nnx.BatchStat(jnp.zeros(()))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def training_step(self, batch: Any) -> jax.Array:
        self.of_x[...] = 0.5 * self.of_x[...] + 0.5 * jnp.mean(batch["x"])
        self.of_y[...] = 0.5 * self.of_y[...] + 0.5 * jnp.mean(batch["y"])
        self.count[...] += 1
        self.log("mean", jnp.mean(batch["x"]), on_step=False, on_epoch=True)
        return self.loss(batch)


def with_nan(count: int = 6) -> list[dict[str, np.ndarray]]:
    batches = random(count)
    batches[BAD]["x"][0, 0] = np.nan
    return batches


def running(batches: list[Any], key: str) -> float:
    return functools.reduce(lambda mean, batch: 0.5 * mean + 0.5 * float(batch[key].mean()), batches, 0.0)


@pytest.mark.parametrize(("policy", "accumulate", "strategy"), thinned(CASES, *CASES[:6:2], CASES[3]))
def test_a_step_that_is_not_finite_is_treated_as_the_policy_says(policy: str, accumulate: int, strategy: str) -> None:
    model, batches, means = Tracked(), with_nan(), list[tuple[float, float]]()
    watch = hooks(on_train_batch_end=lambda *_: means.append((float(model.of_x[...]), float(model.of_y[...]))))
    arguments = {"strategy": strategy, "nan_policy": policy, "accumulate_grad_batches": accumulate}
    trainer = make_trainer(watch, log_every_n_steps=0, **arguments)  # nothing looks at a step before the end
    windows = [batches[i : i + accumulate] for i in range(0, 6, accumulate)]
    bad = BAD // accumulate
    if policy == "raise":
        with pytest.raises(NonFiniteError, match=rf"optimizer step {bad} .*nan_policy='skip'"):
            trainer.fit(model, batches)
        kept = windows[:bad]  # the bad step stops all later ones, though they are dispatched
        assert len(means) == 6 and len(set(means[bad * accumulate + accumulate - 1 :])) == 1
    else:
        trainer.fit(model, batches)
        kept = [*windows[:bad], *windows[bad + 1 :]]
    if policy == "ignore":
        assert np.isnan(np.asarray(model.kernel[...])).all() and np.isnan(float(model.of_x[...]))
        return
    assert np.isfinite(means).all()  # between the batches of a window too
    by_hand = HandLoop(Linear())
    for window in kept:
        by_hand.window(*window)
    assert_same(model, by_hand.module)
    used = [batch for window in kept for batch in window]
    # A finite statistic of a bad batch is left out with its step, and with it all that follows under "raise".
    assert float(model.of_x[...]) == pytest.approx(running(used, "x"), rel=1e-5)
    assert float(model.of_y[...]) == pytest.approx(running(used, "y"), rel=1e-5)
    if policy == "skip":
        assert int(model.count[...]) == 6 and trainer.global_step == len(windows)  # counts, random ones too, continue
        of_epoch = np.mean([batch["x"].mean() for batch in used])
        assert trainer.callback_metrics["mean"] == pytest.approx(of_epoch, rel=1e-4)


@pytest.mark.parametrize(
    ("bad", "strategy"), thinned(itertools.product(range(3), FOUR), (1, "fsdp"), full=[(2, "shard_map"), (0, "pmap")])
)
def test_a_skipped_window_puts_back_what_it_wrote(strategy: str, bad: int) -> None:
    class Normed(Tracked):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nnx.SpectralNorm(nnx.Linear(3, 1, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))  # writes a parameter
            self.mean = nnx.metrics.Average()  # of floats, and a count of rows

        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x) + self.norm(x)

        def training_step(self, batch: Any) -> jax.Array:
            self.mean.update(values=jnp.ones(8))
            return super().training_step(batch)

    batches = random(9)
    spoilt = [batch | {"x": batch["x"] * (np.nan if i == 3 + bad else 1)} for i, batch in enumerate(batches)]
    models = [Normed(), Normed()]
    given: dict[str, Any] = {"strategy": strategy, "accumulate_grad_batches": 3, "nan_policy": "skip"}
    fit(models[0], spoilt, **given)
    fit(models[1], batches[:3] + batches[6:], **given)
    models[0].count[...] = models[1].count[...] = 0
    for name, x in state_of(models[1]).items():
        np.testing.assert_array_equal(state_of(models[0])[name], x, err_msg=name)


@pytest.mark.parametrize("policy", thinned(["raise", "skip", "ignore"], "raise"))
@pytest.mark.parametrize("strategy", thinned([*FOUR, "pipeline"], "single", full=["pipeline", "shard_map"]))
def test_a_window_that_overflows_puts_back_what_it_wrote(strategy: str, policy: str) -> None:
    class Statistic(Tracked):
        def __call__(self, x: jax.Array) -> jax.Array:
            return jl.pipeline_yield(x) @ self.kernel

        def loss(self, batch: Any) -> jax.Array:
            return super().loss(batch) / 64

    model, batches = Statistic(), random(6)
    batches[2] = {key: x * 20 for key, x in batches[2].items()}  # finite, and too large for the first scale
    pipeline = jl.strategies.Pipeline(stages=2, microbatches=1) if strategy == "pipeline" else strategy
    given: dict[str, Any] = {"precision": "16-mixed", "accumulate_grad_batches": 2, "nan_policy": policy}
    fit(model, batches, strategy=pipeline, **given)
    used = [*batches[:2], *batches[4:]]
    assert float(model.of_x[...]) == pytest.approx(running(used, "x"), rel=1e-2)  # of float16
    assert float(model.of_y[...]) == pytest.approx(running(used, "y"), rel=1e-2)


def test_a_skipped_window_is_put_back_after_a_resume_inside_it() -> None:
    batches = with_nan()
    batches[3], batches[2] = batches[2], batches[3]  # the bad batch is the last of the second window of two
    saves = hooks(on_train_batch_end=lambda t, m, outputs, batch, k: k == 2 and t.save_checkpoint("middle"))
    given: dict[str, Any] = {"nan_policy": "skip", "accumulate_grad_batches": 2}
    whole, resumed = Tracked(), Tracked()
    fit(whole, batches, None, saves, **given)
    fit(resumed, batches, ckpt_path="middle", **given)
    assert float(whole.of_y[...]) == pytest.approx(running([*batches[:2], *batches[4:]], "y"), rel=1e-5)
    for name, x in state_of(whole).items():
        np.testing.assert_array_equal(state_of(resumed)[name], x, err_msg=name)


@pytest.mark.parametrize(("policy", "strategy"), [("raise", "single"), ("skip", "single"), ("raise", "shard_map")])
def test_one_bad_gradient_of_a_finite_loss_is_noticed(policy: str, strategy: str) -> None:
    def init(self: Any) -> None:
        self.w, self.fine = nnx.Param(jnp.array([0.0, 1.0])), nnx.Param(jnp.ones(1))

    # Whose gradient by the first number of one of two parameters is NaN.
    step = lambda self, batch: (jnp.sqrt(self.w[...] ** 2).sum() + self.fine[...].sum()) * batch["x"].mean()  # noqa: E731
    model, trainer = module(step, init=init), make_trainer(nan_policy=policy, strategy=strategy)
    with pytest.raises(NonFiniteError, match="step 0 ") if policy == "raise" else contextlib.nullcontext():
        trainer.fit(model, numbered(2))
    assert (model.w[...].tolist(), model.fine[...].tolist()) == ([0.0, 1.0], [1.0])


@pytest.mark.parametrize(
    ("strategy", "accumulate"),
    thinned([("single", 1), ("shard_map", 1), ("ddp", 2), ("pmap", 2)], ("shard_map", 1), ("ddp", 2), full=()),
)
def test_finite_gradients_whose_norm_overflows_are_trained_on(strategy: str, accumulate: int) -> None:
    # Their squares are infinite.
    model = module(lambda self, batch: jnp.mean(batch["x"] * self.w[...]) * 1e25, tx=optax.sgd(1e-25))
    fit(model, numbered(2), strategy=strategy, accumulate_grad_batches=accumulate, nan_policy="raise")
    assert float(model.w[...][0]) == pytest.approx(-3 / accumulate, rel=1e-6)


@pytest.mark.parametrize("policy", ["raise", "ignore"])
def test_state_that_an_optimizer_widens_keeps_its_dtype(policy: str) -> None:
    def update(updates: Any, state: Any, params: Any) -> Any:
        return jax.tree.map(lambda g: -0.25 * g, updates), jnp.float32(state) + 1  # float16 becomes float32

    tx = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.float16), update)
    trainer = fit(module(tx=tx), numbered(3), nan_policy=policy)
    assert (trainer.state.opt_state.dtype, float(trainer.state.opt_state)) == (jnp.float16, 3.0)
    assert set(trainer.compile_seconds) == {"train_step"}
    assert_same(trainer.module, {"['w']": np.array([mean([[1], [2], [3]])])})


def test_optax_multi_steps_is_taken_as_a_transform() -> None:
    model = module(tx=optax.MultiSteps(optax.sgd(0.25), 2))
    fit(model, numbered(1))
    assert float(model.w[...][0]) == 0
    fit(model, numbered(2))
    assert float(model.w[...][0]) == mean([[1, 2]])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_variable_that_a_step_rounds_is_kept_rounded(precision: str) -> None:
    def init(self: Any) -> None:
        Linear.__init__(self)
        self.third = nnx.Variable(jnp.float32(1 / 3))

    def step(self: Any, batch: Any) -> Any:
        self.third[...] = self.third[...].astype(jnp.bfloat16).astype(jnp.float32)
        return self.loss(batch)

    model = module(step, base=Linear, init=init)
    fit(model, random(1), precision=precision)
    assert float(model.third[...]) == 0.333984375


# The optimizer, and the arrays of its state that take a step in which only the gradient of the bias is bad.
SCHEDULE, MIXED = optax.linear_schedule(0.1, 0.01, 9), {"adam": optax.adam(0.01), "sgd": optax.sgd(0.1, momentum=0.9)}
OPTIMIZERS: dict[str, tuple[Any, list[str]]] = {
    "adamw": (optax.adamw(0.01), ["[0].mu.kernel", "[0].nu.kernel"]),
    "clipped": (optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.01)), []),
    "scheduled": (optax.inject_hyperparams(optax.sgd)(SCHEDULE, momentum=0.9), [".inner_state[0].trace.kernel"]),
    "two": (
        optax.multi_transform(MIXED, lambda params: jax.tree.map(lambda x: ("sgd", "adam")[x.ndim > 1], params)),
        [f".inner_states.adam.inner_state[0].{x}.kernel" for x in ("mu", "nu")],
    ),
    "every second": (optax.MultiSteps(optax.adam(0.01), 2), [".acc_grads.kernel"]),
    "schedule-free": (optax.contrib.schedule_free_sgd(0.1), []),
    "averaged": (optax.chain(optax.trace(0.9), optax.ema(0.9)), ["[0].trace.kernel", "[1].ema.kernel"]),
    "momentum": (optax.sgd(0.1, momentum=0.9), ["[0].trace.kernel"]),
}


def finite(tree: Any) -> bool:
    return all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating))


def spoilt(self: Any, batch: Any) -> jax.Array:
    """The root of a square that is 0 if the batch says so: the loss is finite, and the gradient of the bias is not."""
    return self.loss(batch) + jnp.sqrt((self.bias[...] * jnp.max(batch["spoil"])) ** 2).sum()


def batches_of(bad: int | None = None) -> list[dict[str, np.ndarray]]:
    batches = [batch | {"spoil": np.ones((8, 1), np.float32)} for batch in random(6)]
    if bad is not None:
        batches[bad]["spoil"][:] = 0
    return batches


MANY = [(name, "single") for name in OPTIMIZERS] + [("adamw", strategy) for strategy in STRATEGIES[1:]]
FEW = [("adamw", "single"), ("schedule-free", "single"), ("clipped", "fsdp")]


@pytest.mark.parametrize(("name", "strategy"), thinned(dict.fromkeys([*MANY, *FEW]), *FEW, full=MANY[::2]))
def test_a_bad_step_changes_no_array_that_it_reaches(name, strategy) -> None:
    tx, expected = OPTIMIZERS[name]
    made, before = (module(spoilt, base=Linear, tx=tx) for _ in range(2))
    trainer = make_trainer(strategy=splitting(strategy), default_root_dir="run")
    made.bias[...] = before.bias[...] = jnp.ones(1)
    with pytest.raises(NonFiniteError):
        trainer.fit(made, batches_of(4))
    known = list[np.ndarray]()  # before a schedule-free optimizer's evaluation weights are in their place
    keep = hooks(on_train_end=lambda trainer, _: known.extend(map(np.array, engine_of(trainer).state.leaves)))
    fit(before, batches_of()[:4], None, keep, strategy=splitting(strategy), **BARE)
    held = engine_of(trainer).state
    changed = [
        spec[0]
        for spec, a, b in zip(held.spec.entries, held.leaves, known, strict=True)
        if np.asarray(a).tobytes() != np.asarray(b).tobytes() and spec[0] != "counters"
    ]
    assert finite(trainer.state.opt_state) and finite(trainer.state.params)
    recorded = saved_state("run/checkpoints/step_00000004")["not_finite"]["optimizer"]
    # The update in the cond of MultiSteps may run in any step, and did not in this one.
    assert changed == [name for name in recorded if "inner_opt_state" not in name]
    assert changed == [f"opt_state{x}" for x in expected]


def program(trainer: jl.Trainer, batch: Any) -> tuple[str, int]:
    """Return the text of the compiled step, and the bytes of its temporaries."""
    compiled = lowered(trainer, "train_step", batch).compile()
    return compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes


def copied(text: str) -> int:
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", text)
    return sum(int(np.prod([int(dim) for dim in shape.split(",")])) for shape in shapes)


class Deep(jl.TrainModule):
    def __init__(self, width: int, depth: int, tx: Any, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(depth)])
        self.make = lambda: tx

    def training_step(self, batch: Any) -> jax.Array:
        x = batch["x"]
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return jnp.mean((x - 1) ** 2)

    def configure_optimizers(self) -> Any:
        return self.make()


def programs(width: int, tx: Any) -> list[tuple[str, int]]:
    """Return of the steps of a deep model without and with the guard what `program` does."""
    batch = {"x": np.ones((16, width), np.float32)}
    policies = ("ignore", "raise")
    trainers = [fit(Deep(width, 10, tx, rngs=nnx.Rngs(0)), [batch], nan_policy=x, **BARE) for x in policies]
    return [program(trainer, batch) for trainer in trainers]


@pytest.mark.parametrize("width", thinned([128, 1024], full=[128]))
def test_the_guard_needs_no_memory_for_all_gradients(width) -> None:
    (without, least), (text, most) = programs(width, optax.adamw(1e-3))
    gradients = 10 * (width * width + width) * 4
    assert " conditional(" not in text
    assert copied(text) <= copied(without)
    assert most - least <= gradients / 6


def test_the_guard_adds_few_kernels_and_instructions() -> None:
    """A kernel that selects reads one flag: with the flags of all gradients in each, instructions grow as a square."""
    (without, _), (text, _) = programs(32, optax.adamw(1e-3))
    assert text.count(" fusion(") <= 1.3 * without.count(" fusion(")
    assert text.count(" = ") <= 1.7 * without.count(" = ")


def test_the_guard_traces_the_optimizer_no_more_often() -> None:
    (init, update), traces = optax.sgd(0.1), []
    for policy in ("ignore", "raise"):
        calls: list[Any] = []
        tx = optax.GradientTransformation(init, lambda *args, calls=calls: [calls.append(1), update(*args)][1])
        fit(Deep(4, 1, tx, rngs=nnx.Rngs(0)), [{"x": np.ones((16, 4), np.float32)}], nan_policy=policy, **BARE)
        traces.append(len(calls))
    assert traces[1] == traces[0]


@pytest.mark.parametrize(("name", "accumulate"), thinned([("adamw", 1), ("momentum", 2)], ("adamw", 1)))
@pytest.mark.parametrize("policy", thinned(["ignore", "skip"], "ignore"))
def test_the_guard_changes_no_bit_of_a_finite_step(policy, name, accumulate) -> None:
    batches = [{"x": batch["x"]} for batch in random(6, rows=64, features=64)]
    result = [Deep(64, 3, OPTIMIZERS[name][0], rngs=nnx.Rngs(0)) for _ in range(2)]
    for made, how in zip(result, (policy, "raise"), strict=True):
        fit(made, batches, nan_policy=how, accumulate_grad_batches=accumulate, **BARE)
    expected = state_of(result[0])
    for key, x in state_of(result[1]).items():
        np.testing.assert_array_equal(x, expected[key], err_msg=key)
