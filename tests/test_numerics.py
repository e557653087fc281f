"""Precision, clipping, accumulation and metrics that add up: the numbers are those of plain JAX."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn.datasets import load_digits

import jaxlit as jl
from jaxlit.core.precision import Precision
from jaxlit.errors import NonFiniteError, StateError

STRATEGIES = ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8")
FEW = ("single", "fsdp", "shard_map")  # where the others would only repeat them
UNSHARDED = ("single", "ddp", "shard_map", "pmap", "simulate:8")  # a single weight cannot be split
MIXED = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}


def make_trainer(*callbacks: jl.Callback, strategy: str = "single", **arguments: Any) -> jl.Trainer:
    # No least size, so that arrays as small as these are split.
    sharded = {"fsdp": {"min_size": 0}, "zero1": {"min_size": 0, "stage": 1}}.get(strategy)
    chosen = strategy if sharded is None else jl.strategies.FSDP(**sharded)
    defaults = {"max_epochs": 1, "log_every_n_steps": 1, "num_sanity_val_steps": 0}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return jl.Trainer(strategy=chosen, callbacks=list(callbacks), **(defaults | quiet | arguments))


def make_callback(**hooks: Any) -> jl.Callback:
    """Return a callback with these functions of (trainer, module, ...) as its hooks."""
    return type("Made", (jl.Callback,), {k: staticmethod(v) for k, v in hooks.items()})()


def scalar(loss: Callable[..., jax.Array], tx: optax.GradientTransformation, start: float = 0.0) -> jl.TrainModule:
    """Return a module of one weight `w`, whose loss is `loss(w, batch)`."""

    class Scalar(jl.TrainModule):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.full((), start, jnp.float32))

        def training_step(self, batch: Any) -> jax.Array:
            return loss(self.w[...], batch)

        def configure_optimizers(self) -> optax.GradientTransformation:
            return tx

    return Scalar()


def constant(*values: float, rows: int = 8) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full(rows, value, np.float32)} for value in values]


def floats(tree: Any) -> list[Any]:
    """Return the dtypes of the floating leaves."""
    return [x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]


class Noting(jl.TrainModule):
    """Has a parameter and a statistic, and notes the dtypes that a step sees."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.linspace(-1.0, 1.0, 8)[:, None])
        self.mean = nnx.BatchStat(jnp.zeros(8))

    def training_step(self, batch: Any) -> dict[str, jax.Array]:
        seen.append({name: x.dtype for name, x in batch.items()})
        # The step's own dtype: what is written is held in that of the variable.
        self.mean[...] = batch["x"].mean(0)
        out = batch["x"] @ self.kernel[...]
        loss = jnp.mean(out)
        # Of eight rows: 256, 1 and 1.
        low = jnp.where(self.global_step == 0, 32, 0.125).astype(loss.dtype)
        self.log("low", jnp.sum(jnp.broadcast_to(low, out.shape)), on_epoch=True, reduce_fx="sum")
        self.log("high", 257.0 + self.global_step, on_epoch=True)
        seen[-1] |= {"kernel": self.kernel[...].dtype, "loss": loss.dtype}
        return {"loss": loss, "out": out}

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


seen: list[dict[str, Any]] = []


def noting_batches(count: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(8, 8)).astype(np.float32),
            "label": np.arange(8, dtype=np.int32),
            "byte": np.arange(8, dtype=np.uint8),
            "mask": np.ones(8, bool),
        }
        for _ in range(count)
    ]


# Precision: what has which dtype ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "precision"), [*((s, "bf16-mixed") for s in STRATEGIES), *((s, "16-mixed") for s in FEW)]
)
def test_a_mixed_step_computes_low_and_everything_that_is_kept_is_float32(strategy: str, precision: str) -> None:
    seen.clear()
    rows: list[dict[str, float]] = []
    outputs: list[Any] = []
    recorder = make_callback(
        on_log=lambda trainer, values, step: rows.append(values),
        on_train_batch_end=lambda trainer, module, out, batch, i: outputs.append((out["loss"].dtype, out["out"].dtype)),
    )
    module = Noting()
    trainer = make_trainer(recorder, strategy=strategy, precision=precision)
    trainer.fit(module, noting_batches(3))

    low = MIXED[precision]
    for dtypes in seen:
        assert dtypes == {
            "x": low,
            "kernel": low,
            "loss": low,
            "label": jnp.int32,
            "byte": jnp.uint8,
            "mask": jnp.bool_,
        }
    state = trainer.state
    for part in (state.params, state.opt_state, state.model_state, nnx.state(module)):
        assert set(floats(part)) == {jnp.dtype(jnp.float32)}
    assert outputs == [(jnp.float32, low)] * 3
    # bfloat16 holds neither 257 nor 256 + 1 + 1, float16 not the mean.
    assert [row["high_step"] for row in rows[:3]] == [257.0, 258.0, 259.0]
    assert (rows[3]["high_epoch"], rows[3]["low_epoch"]) == (258.0, 258.0)


@pytest.mark.parametrize("strategy", FEW)
def test_bf16_true_holds_bfloat16_parameters_and_float32_statistics(strategy: str) -> None:
    seen.clear()
    module = Noting()
    trainer = make_trainer(strategy=strategy, precision="bf16-true")
    trainer.fit(module, noting_batches(2))
    for dtypes in seen:
        assert (dtypes["x"], dtypes["kernel"]) == (jnp.bfloat16, jnp.bfloat16)
    assert set(floats(trainer.state.params)) == {jnp.dtype(jnp.bfloat16)}
    assert set(floats(trainer.state.opt_state)) == {jnp.dtype(jnp.bfloat16)}
    assert set(floats(trainer.state.model_state)) == {jnp.dtype(jnp.float32)}
    assert module.kernel[...].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("single", "32-true"),
        *((s, "bf16-mixed") for s in UNSHARDED),
        *((s, precision) for s in ("single", "shard_map") for precision in ("16-mixed", "bf16-true")),
    ],
)
def test_updates_too_small_for_16_bits_add_up_only_in_float32_parameters(strategy: str, precision: str) -> None:
    # 256 d loss/dw = -(1 + 256 (w - 1)): a step that sees w rounded to 1 has the same gradient whatever w is.
    # Divided by 256 the loss and what is computed on the way fit float16 at the first scale.
    def loss(w: jax.Array, batch: Any) -> jax.Array:
        return jnp.mean(-(w + 128 * (w - 1) ** 2) * batch["x"]) / 256

    rate, w = 2.0**-13, 1.0
    module = scalar(loss, optax.sgd(256 * rate), start=1.0)
    make_trainer(strategy=strategy, precision=precision).fit(module, constant(1, 1, 1))
    for _ in range(3):
        w = w + rate * (1 + 256 * (w - 1))
    expected = {"32-true": w, "bf16-true": 1.0}.get(precision, 1 + 3 * rate)
    # Only the powers of (w - 1) are rounded, in float32.
    assert float(module.w[...]) == pytest.approx(expected, abs=1e-7 if precision == "32-true" else 0)


@pytest.mark.parametrize(("strategy", "precision"), [*((s, "bf16-mixed") for s in UNSHARDED), ("single", "16-mixed")])
def test_gradients_accumulate_in_float32(strategy: str, precision: str) -> None:
    # 2048 + 1 + 1 is 2048 in either 16-bit type.
    dtypes: list[Any] = []
    keep = make_callback(on_train_batch_end=lambda trainer, *_: dtypes.extend(floats(trainer.state.window.grads)))
    module = scalar(lambda w, batch: jnp.mean(w * batch["x"]) / 4096, optax.sgd(1.0))
    trainer = make_trainer(keep, strategy=strategy, precision=precision, accumulate_grad_batches=3)
    trainer.fit(module, constant(2048, 1, 1))
    assert float(module.w[...]) == pytest.approx(-2050 / 3 / 4096, rel=1e-6)
    assert set(dtypes) == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("precision", ("bf16-mixed", "16-mixed", "bf16-true"))
def test_a_low_precision_step_is_that_of_a_loop_that_casts_by_hand(precision: str) -> None:
    low = {**MIXED, "bf16-true": jnp.bfloat16}[precision]
    # So small a loss does not overflow at the first scale; a power of two rounds nothing.
    factor = 2.0**-6
    module = make_line(factor)
    batches = make_batches(8, 8, 5)
    trainer = make_trainer(precision=precision)
    trainer.fit(module, batches)

    params = jax.tree.map(lambda x: x.astype(low) if precision == "bf16-true" else x, line_params())
    tx = make_tx()
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            p, b = jax.tree.map(lambda x: x.astype(low), (params, batch))
            return (line_loss(p, b) * factor).astype(jnp.float32)

        updates, opt_state = tx.update(jax.grad(loss_of)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    assert_line(module, params)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixed_precision_does_not_round_frozen_parameters(strategy: str) -> None:
    fine = 1 + 2.0**-20

    class HalfFrozen(jl.TrainModule):
        def __init__(self) -> None:
            self.body = nnx.Param(jnp.full(8, fine, jnp.float32))
            self.head = nnx.Param(jnp.zeros(8))

        def training_step(self, batch: Any) -> jax.Array:
            dtypes.append(self.body[...].dtype)
            return jnp.mean(batch["x"]) * jnp.sum(self.body * self.head)

        def configure_optimizers(self) -> jl.Optimizer:
            return jl.Optimizer(optax.sgd(1.0), wrt=nnx.PathContains("head"))

    dtypes: list[Any] = []
    module = HalfFrozen()
    make_trainer(strategy=strategy, precision="bf16-mixed").fit(module, constant(1, 1))
    assert set(dtypes) == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(module.body[...], np.full(8, fine, np.float32))
    np.testing.assert_array_equal(module.head[...], np.full(8, -2, np.float32))  # of a body rounded to 1


# Loss scaling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_halves_the_scale_and_changes_nothing_else(strategy: str) -> None:
    # A gradient of 4 overflows float16 at scales 2^15 and 2^14: 2^13 is the first that holds it.
    scales, weights, traces = [], [], []

    def note(trainer: jl.Trainer, module: Any, *_: Any) -> None:
        scales.append(float(trainer.state.loss_scale[0]))
        weights.append(float(module.w[...]))
        traces.append(float(trainer.state.opt_state[0].trace["w"]))

    module = scalar(lambda w, batch: jnp.mean(w * batch["x"]), optax.sgd(0.125, momentum=0.5))
    trainer = make_trainer(make_callback(on_train_batch_end=note), strategy=strategy, precision="16-mixed")
    trainer.fit(module, constant(4, 4, 4, 4))
    assert scales == [2.0**14, 2.0**13, 2.0**13, 2.0**13]
    assert traces == [0, 0, 4, 6]
    assert weights == [0, 0, -0.5, -1.25]
    assert trainer.global_step == 4


@pytest.mark.parametrize("strategy", UNSHARDED)
def test_scaling_keeps_gradients_that_float16_alone_would_lose(strategy: str) -> None:
    # 2^-30 is below the least float16, which is 2^-24.
    module = scalar(lambda w, batch: jnp.mean(w * batch["x"]).astype(jnp.float32) * 2.0**-30, optax.sgd(2.0**30))
    make_trainer(strategy=strategy, precision="16-mixed").fit(module, constant(1, 1))
    assert float(module.w[...]) == -2.0


def test_the_scale_doubles_after_2000_finite_steps_and_counts_again_from_an_overflow() -> None:
    next_scale = jax.jit(Precision("16-mixed").next_scale)
    fine, overflow = jnp.zeros((), bool), jnp.ones((), bool)
    scale_after = lambda scale, steps, flag: next_scale(jnp.array([scale, steps], jnp.float32), flag).tolist()  # noqa: E731
    assert Precision("16-mixed").first_scale().tolist() == [2.0**15, 0]  # type: ignore[union-attr]
    assert scale_after(8, 0, fine) == [8, 1]
    assert scale_after(8, 1998, fine) == [8, 1999]
    assert scale_after(8, 1999, fine) == [16, 0]
    assert scale_after(8, 1999, overflow) == [4, 0]
    assert scale_after(8, 5, overflow) == [4, 0]


def test_a_gradient_that_no_scale_makes_finite_raises() -> None:
    # After 15 halvings the scale is 1, and the infinite slope of a root at 0 is no overflow of it.
    module = scalar(lambda w, batch: jnp.mean(jnp.sqrt(w) * batch["x"]), optax.sgd(1.0))
    with pytest.raises(NonFiniteError, match="at optimizer step 15 "):
        make_trainer(precision="16-mixed").fit(module, constant(*[1] * 20))
    assert float(module.w[...]) == 0


def test_a_loss_that_is_not_finite_is_no_overflow() -> None:
    module = scalar(lambda w, batch: jnp.mean(w * batch["x"]), optax.sgd(1.0))
    with pytest.raises(NonFiniteError, match="at optimizer step 1 "):
        make_trainer(precision="16-mixed").fit(module, constant(1, np.nan, 1))
    assert float(module.w[...]) == -1


# A real data set -------------------------------------------------------------------------------------


class Digits(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 64, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def training_step(self, batch: Any) -> jax.Array:
        logits = self.out(nnx.relu(self.hidden(batch["image"])))
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def validation_step(self, batch: Any) -> None:
        logits = self.out(nnx.relu(self.hidden(batch["image"])))
        self.log("accuracy", jnp.mean(logits.argmax(-1) == batch["label"]))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


@pytest.mark.parametrize(
    ("strategy", "precision"), (("single", "bf16-mixed"), ("fsdp", "16-mixed"), ("shard_map", "bf16-mixed"))
)
def test_mixed_precision_learns_the_digits(strategy: str, precision: str) -> None:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    images, labels = images[order], labels[order]
    data = {"image": (images / 16).astype(np.float32), "label": labels.astype(np.int32)}
    train = jl.ArrayLoader({k: v[:1440] for k, v in data.items()}, 144, shuffle=True)
    val = jl.ArrayLoader({k: v[1440:] for k, v in data.items()}, 119)
    module = Digits(rngs=nnx.Rngs(0))
    trainer = make_trainer(strategy=strategy, precision=precision, max_epochs=12, check_val_every_n_epoch=12)
    trainer.fit(module, train, val)
    held = {k: v[1440:] for k, v in data.items()}
    hidden = np.maximum(held["image"] @ np.asarray(module.hidden.kernel[...]) + module.hidden.bias[...], 0)
    logits = hidden @ np.asarray(module.out.kernel[...]) + module.out.bias[...]
    accuracy = float(np.mean(np.argmax(logits, -1) == held["label"]))
    assert trainer.callback_metrics["accuracy"] >= 0.95
    assert accuracy >= 0.95
    assert set(floats(nnx.state(module))) == {jnp.dtype(jnp.float32)}


# Clipping and accumulation ---------------------------------------------------------------------------


def make_batches(*rows: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(n, 8), "y": draw(n, 1)} for n in rows]


def make_tx() -> optax.GradientTransformation:
    return optax.sgd(0.05, momentum=0.9)


def line_params() -> dict[str, jax.Array]:
    return {"kernel": jnp.linspace(-1.0, 1.0, 8)[:, None], "bias": jnp.zeros(1)}


def line_loss(params: dict[str, jax.Array], batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["kernel"] + params["bias"] - batch["y"]) ** 2)


def make_line(factor: float = 1.0) -> Any:
    class Line(jl.TrainModule):
        def __init__(self) -> None:
            self.kernel, self.bias = (nnx.Param(line_params()[k]) for k in ("kernel", "bias"))

        def training_step(self, batch: Any) -> jax.Array:
            return line_loss({"kernel": self.kernel[...], "bias": self.bias[...]}, batch) * factor

        def validation_step(self, batch: Any) -> None:
            self.log("val", jnp.mean(batch["x"]))

        def configure_optimizers(self) -> optax.GradientTransformation:
            return make_tx()

    return Line()


def assert_line(module: Any, expected: dict[str, Any], atol: float = 1e-6) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(
            np.asarray(getattr(module, name)[...], np.float32), np.asarray(value, np.float32), rtol=0, atol=atol
        )


def train_by_hand(windows: list[list[Any]], clip: optax.GradientTransformation) -> tuple[dict[str, Any], list[bool]]:
    """Take one clipped optax step a window, on the mean over its rows; returns also where clipping did something."""
    params, tx, clipped = line_params(), optax.chain(clip, make_tx()), []
    opt_state = tx.init(params)
    for window in windows:
        rows = {k: np.concatenate([batch[k] for batch in window]) for k in ("x", "y")}
        grads = jax.grad(line_loss)(params, rows)
        after, _ = clip.update(grads, clip.init(params))
        clipped.append(
            any(bool((a != b).any()) for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(after), strict=True))
        )
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params, clipped


@pytest.mark.parametrize(
    ("strategy", "algorithm"),
    [*((s, "norm") for s in STRATEGIES), *((s, "value") for s in FEW), *((s, None) for s in FEW)],
)
def test_clipping_and_accumulation_are_those_of_an_optax_loop(strategy: str, algorithm: str | None) -> None:
    # Windows of 3, 3 and 2 batches, the last of which has 5 rows: it neither fills its window nor divides by 8.
    batches = make_batches(8, 8, 8, 8, 8, 8, 8, 5)
    windows = ([batches[:3], batches[3:6], batches[6:]] * 4)[:10]
    most = {None: None, "norm": 2.5, "value": 1.5}[algorithm]
    clip = {None: optax.identity(), "norm": optax.clip_by_global_norm(2.5), "value": optax.clip(1.5)}[algorithm]
    expected, clipped = train_by_hand(windows, clip)
    assert algorithm is None or (any(clipped) and not all(clipped))

    module = make_line()
    trainer = make_trainer(
        strategy=strategy,
        max_epochs=4,
        max_steps=10,
        accumulate_grad_batches=3,
        gradient_clip_val=most,
        gradient_clip_algorithm=algorithm,
    )
    trainer.fit(module, batches)
    assert trainer.global_step == 10
    assert_line(module, expected)


def test_norm_is_the_algorithm_when_none_is_named() -> None:
    batches = make_batches(8, 8, 8)
    expected, clipped = train_by_hand([[batch] for batch in batches], optax.clip_by_global_norm(0.5))
    assert any(clipped)
    module = make_line()
    make_trainer(gradient_clip_val=0.5).fit(module, batches)
    assert_line(module, expected)


@pytest.mark.parametrize("precision", ("32-true", "16-mixed"))
def test_gradients_are_clipped_after_accumulation_and_without_the_loss_scale(precision: str) -> None:
    # The mean of 6, -2 and -2 is 2/3, within the bound; clipped one by one they would give -1/3.
    module = scalar(lambda w, batch: jnp.mean(w * batch["x"]) / 4, optax.sgd(1.0))
    trainer = make_trainer(
        precision=precision, accumulate_grad_batches=3, gradient_clip_val=0.25, gradient_clip_algorithm="value"
    )
    trainer.fit(module, constant(6, -2, -2))
    assert float(module.w[...]) == pytest.approx(-1 / 6, rel=1e-6)


class Noisy(jl.TrainModule):
    """Has what a validation could disturb: statistics, counts of random numbers, and metrics."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.linspace(-1.0, 1.0, 8)[:, None])
        self.mean = nnx.BatchStat(jnp.zeros(8))
        self.rngs = nnx.Rngs(0)

    def loss(self, batch: Any) -> jax.Array:
        self.rngs()  # counts, and that is all that could change
        return jnp.mean(((batch["x"] - self.mean[...]) @ self.kernel - batch["y"]) ** 2)

    def training_step(self, batch: Any) -> jax.Array:
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * batch["x"].mean(0)
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_validation_inside_an_accumulation_window_leaves_training_as_it_is(strategy: str) -> None:
    batches = make_batches(8, 8, 8, 8)
    found, rows, validated = [], [[], []], []
    count = make_callback(on_validation_end=lambda trainer, module: validated.append(trainer.global_step))
    for val in ([], [make_batches(8, seed=1)]):
        module = Noisy()
        to = rows[len(val)]
        log = make_callback(on_log=lambda trainer, values, step, to=to: to.append((step, values)))
        interval = 1 if val else 1.0
        trainer = make_trainer(count, log, strategy=strategy, accumulate_grad_batches=3, val_check_interval=interval)
        trainer.fit(module, batches, *val)
        found.append([module.kernel[...], module.mean[...], module.rngs.default.count[...]])
    assert validated == [0, 0, 1, 2]
    for without, with_validation in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(without), np.asarray(with_validation))
    assert [row for row in rows[1] if "val" not in row[1]] == rows[0]


# Metrics of nnx --------------------------------------------------------------------------------------


def gathered(values: Any, logits: Any, labels: Any) -> dict[str, float]:
    """Return the mean of `values` and the accuracy, by numpy."""
    right = np.argmax(np.asarray(logits), -1) == np.asarray(labels)
    return {"average": float(np.mean(values, dtype=np.float64)), "accuracy": float(np.mean(right, dtype=np.float64))}


class Measured(jl.TrainModule):
    """Logs nnx metrics of the batch itself, held by the module or made in the step."""

    def __init__(self, held: bool) -> None:
        self.w = nnx.Param(jnp.zeros(()))
        self.held = held
        self.train_metrics, self.val_metrics = (self.make(), self.make()) if held else (None, None)

    def make(self) -> nnx.MultiMetric:
        return nnx.MultiMetric(average=nnx.metrics.Average(), accuracy=nnx.metrics.Accuracy())

    def measure(self, batch: Any, metrics: Any, prefix: str) -> None:
        metrics = self.make() if metrics is None else metrics
        metrics.update(values=batch["values"], logits=batch["logits"], labels=batch["label"])
        self.log_dict(metrics, on_step=prefix == "train", on_epoch=True)
        # Twice as many numbers as rows: the weight is the metric's own count.
        single = nnx.metrics.Average()
        single.update(values=batch["logits"])
        self.log("single", single, on_step=False, on_epoch=True)

    def training_step(self, batch: Any) -> jax.Array:
        self.measure(batch, self.train_metrics, "train")
        return self.w * jnp.mean(batch["values"])

    def validation_step(self, batch: Any) -> None:
        self.measure(batch, self.val_metrics, "val")

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def measured_batches(*rows: int, seed: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            "values": rng.integers(-8, 8, size=(n, 3)).astype(np.float32),
            "logits": rng.integers(-8, 8, size=(n, 4)).astype(np.float32) + np.arange(4, dtype=np.float32) / 8,
            "label": rng.integers(0, 4, size=n).astype(np.int32),
        }
        for n in rows
    ]


def merged(batches: list[dict[str, np.ndarray]]) -> dict[str, float]:
    whole = {k: np.concatenate([batch[k] for batch in batches]) for k in batches[0]}
    single = float(np.mean(whole["logits"], dtype=np.float64))
    return gathered(whole["values"], whole["logits"], whole["label"]) | {"single": single}


@pytest.mark.parametrize(
    ("strategy", "held"), [*((s, False) for s in STRATEGIES), *((s, True) for s in ("single", "shard_map", "pmap"))]
)
def test_nnx_metrics_equal_numpy_over_replicas_and_uneven_batches(strategy: str, held: bool) -> None:
    train, val = measured_batches(8, 16, 5, seed=0), measured_batches(16, 3, 8, seed=1)
    rows: list[dict[str, float]] = []
    recorder = make_callback(on_log=lambda trainer, values, step: rows.append(values))
    trainer = make_trainer(recorder, strategy=strategy, max_epochs=2)
    trainer.fit(Measured(held), train, val)

    of_steps = [{f"{k}_step": v for k, v in merged([b]).items() if k != "single"} for b in train]
    of_epoch = {k if k == "single" else f"{k}_epoch": v for k, v in merged(train).items()}
    expected = []
    for epoch in range(2):
        expected += [row | {"epoch": epoch} for row in [*of_steps, merged(val), of_epoch]]
    assert len(rows) == len(expected)
    # All sums are of small integers and eighths, so float32 rounds only the quotients.
    for row, wanted in zip(rows, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("strategy", FEW)
def test_nnx_metrics_of_an_accumulation_window_are_those_of_its_rows(strategy: str) -> None:
    train = measured_batches(8, 16, 5, seed=0)
    rows: list[dict[str, float]] = []
    recorder = make_callback(on_log=lambda trainer, values, step: rows.append(values))
    make_trainer(recorder, strategy=strategy, accumulate_grad_batches=2).fit(Measured(False), train)
    expected = [{f"{k}_step": v for k, v in merged(w).items() if k != "single"} for w in (train[:2], train[2:])]
    for row, wanted in zip(rows[:2], expected, strict=True):
        assert row == pytest.approx(wanted | {"epoch": 0}, rel=1e-6)


# Writes in a lower precision -------------------------------------------------------------------------


class Writes(jl.TrainModule):
    """Writes to its kernel, or to a frozen copy of it that trails behind."""

    def __init__(self, target: str) -> None:
        self.kernel = nnx.Param(jnp.linspace(-1.0, 1.0, 8)[:, None])
        self.trail = nnx.Param(jnp.zeros((8, 1)))
        self.target = target

    def training_step(self, batch: Any) -> jax.Array:
        variable = getattr(self, self.target)
        variable[...] = 0.999 * variable[...] + 0.001 * self.kernel[...]
        return jnp.mean((batch["x"] @ self.kernel[...] - batch["y"]) ** 2)

    def configure_optimizers(self) -> Any:
        return jl.Optimizer(optax.sgd(0.1), wrt=nnx.All(nnx.Param, nnx.PathContains("kernel")))


def test_a_write_that_would_round_trained_weights_is_refused() -> None:
    with pytest.raises(StateError, match="writes to kernel, which is trained, and under precision='bf16-mixed'"):
        make_trainer(strategy="single", precision="bf16-mixed").fit(Writes("kernel"), make_batches(8))
    make_trainer(strategy="single", precision="bf16-true").fit(Writes("kernel"), make_batches(8))


def test_a_write_that_rounds_a_frozen_parameter_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    make_trainer(strategy="single", precision="bf16-mixed").fit(Writes("trail"), make_batches(8))
    assert "writes to trail, an nnx.Param that it sees as bfloat16" in caplog.text
