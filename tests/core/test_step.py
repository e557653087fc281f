"""What an optimizer step keeps and leaves out: steps that are not finite, windows, dtypes, writes of the step."""

import contextlib
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.by_hand import HandLoop, assert_same, mean, state_of
from kit.journal import hooks
from kit.modules import Linear, module
from kit.trainers import FOUR, fit, make_trainer, thinned

from jaxlit.errors import NonFiniteError

BAD = 2  # the batch that holds a NaN
CASES = [(policy, size, "single") for policy in ("raise", "skip", "ignore") for size in (1, 2)]
CASES += [("skip", 1, "ddp"), ("raise", 2, "fsdp"), ("skip", 1, "zero1"), ("raise", 2, "shard_map")]
CASES += [("skip", 2, "pmap"), ("skip", 1, "simulate:8"), ("ignore", 1, "shard_map")]


class Tracked(Linear):
    """Keeps running means of both sides of its batches, and counts its steps."""

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
    ("bad", "strategy"), thinned(itertools.product(range(3), FOUR), (1, "fsdp"), (2, "shard_map"), full=[(0, "pmap")])
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
