"""What every strategy promises, on one training each: numpy's numbers, one compile, everything donated."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import sized
from kit.by_hand import assert_same
from kit.compiles import compiles
from kit.inside import leaves_of
from kit.journal import Rows, hooks
from kit.modules import Linear
from kit.scale import Scale
from kit.trainers import BARE, REPLICAS, STRATEGIES, THREE, fit, make_trainer, splitting, thinned

import jaxlit as jl

# Full batches, one of a single row, and one that does not divide among eight devices: it comes first.
SIZES = (7, 16, 1, 16)
REDUCED = ("mean", "sum", "min", "max")


class Counting(Scale):
    """Counts its rows, and how often it is traced."""

    traces = 0

    def __init__(self) -> None:
        super().__init__(8)
        self.rows = nnx.Variable(jnp.zeros((), jnp.int32))

    def training_step(self, batch: Any) -> dict[str, jax.Array]:
        Counting.traces += 1
        self.rows[...] += batch["x"].shape[0]
        return {"loss": super().training_step(batch), "sum": batch["x"].sum(1)}


def batches() -> list[dict[str, np.ndarray]]:
    result = sized(*SIZES, features=8)
    for k, batch in enumerate(result):
        batch["x"][-1] = 100.0 + k  # a row that is left out, doubled or padded shows; the largest is on the last device
        batch["row"] = batch["x"][:, 0]
    return result


def whole(key: str = "x") -> np.ndarray:
    return np.concatenate([batch[key] for batch in batches()]).astype(np.float64)


def reduced(x: np.ndarray) -> Any:
    return pytest.approx({name: getattr(x, name)() for name in REDUCED}, rel=1e-6)


@pytest.fixture(scope="module", params=thinned(STRATEGIES, "single", "fsdp", "shard_map"))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Train two epochs, validate, test and predict; nothing of it may be changed."""
    kept = SimpleNamespace(strategy=request.param, losses=[], outputs=[], alive=[], module=Counting())
    held: list[Any] = []

    def keep(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        kept.losses.append(float(outputs["loss"]))
        kept.outputs.append(np.asarray(outputs["sum"]))
        kept.alive.append([i for i, x in enumerate(held) if not x.is_deleted()])

    watch = hooks(on_train_batch_start=lambda trainer, *_: held.__setitem__(slice(None), leaves_of(trainer)))
    watch.on_train_batch_end = keep
    Counting.traces = 0
    with compiles() as result:
        root = tmp_path_factory.mktemp("run")
        trainer = make_trainer(watch, strategy=splitting(request.param), max_epochs=2, default_root_dir=root)
        trainer.fit(kept.module, batches(), batches())
        kept.traces, kept.metrics = Counting.traces, dict(trainer.callback_metrics)
        kept.validated = trainer.validate(kept.module, batches())
        kept.predicted = trainer.predict(kept.module, batches())
    kept.compiles, kept.trainer = Counter(result), trainer
    return kept


def test_the_weights_are_those_of_the_formula_whatever_the_rows(run: Any) -> None:
    gradients = [batch["x"].astype(np.float64).mean(0) / 8 for batch in batches()]
    np.testing.assert_allclose(run.module.w[...], np.arange(1.0, 9.0) - 2 * np.sum(gradients, 0), rtol=1e-5)
    assert int(run.module.rows[...]) == 2 * sum(SIZES)
    assert run.trainer.global_step == int(run.trainer.state.step) == 2 * len(SIZES)


def test_each_loss_and_output_is_that_of_its_batch(run: Any) -> None:
    w, losses = np.arange(1.0, 9.0), []
    for batch in batches() * 2:
        x = batch["x"].astype(np.float64)
        losses.append((w * x).mean())
        w = w - x.mean(0) / 8
    np.testing.assert_allclose(run.losses, losses, rtol=1e-5)
    for result, batch in zip(run.outputs, batches() * 2, strict=True):
        np.testing.assert_allclose(result, batch["x"].sum(1), rtol=1e-5)


def test_metrics_are_those_of_all_rows(run: Any) -> None:
    assert run.metrics == reduced(whole())
    assert run.validated == [reduced(whole())]


def test_predictions_are_exactly_the_real_rows_in_loader_order(run: Any) -> None:
    assert [type(x) for batch in run.predicted for x in batch.values()] == [np.ndarray] * 2 * len(SIZES)
    for result, batch in zip(run.predicted, batches(), strict=True):
        np.testing.assert_array_equal(result["row"], batch["row"])
        np.testing.assert_allclose(result["y"], np.asarray(run.module.w[...]) * batch["x"], rtol=1e-6)


def test_each_kind_of_step_compiles_once_for_each_number_of_rows(run: Any) -> None:
    steps = {name: count for name, count in run.compiles.items() if "_step" in name}
    # `validate` compiles nothing that the fit has not compiled.
    assert steps == {"jit(train_step)": 3, "jit(eval_step)": 3, "jit(predict_step)": 3}


@pytest.mark.smoke
def test_the_training_step_is_traced_once(run: Any) -> None:
    # For each of three numbers of rows. Where replicas split the rows it is traced with more of them too, to see what
    # depends on their number.
    assert run.traces == (5 if run.strategy in REPLICAS else 3)


@pytest.mark.smoke
def test_a_step_donates_the_whole_state(run: Any) -> None:
    # But for the first of an epoch: the sums of its metrics start again, and a checkpoint may be written meanwhile.
    assert [run.alive[i] for i in range(2 * len(SIZES)) if i % len(SIZES)] == [[]] * 2 * (len(SIZES) - 1)


WINDOWED = (8, 8, 8, 8, 8, 8, 8, 5)  # windows of 3, 3 and 2; the last batch neither fills its window nor divides by 8
START = {"kernel": np.linspace(-1.0, 1.0, 8)[:, None], "bias": np.zeros(1)}


class Line(Linear):
    """A linear regression, which counts and averages as it learns."""

    def __init__(self) -> None:
        super().__init__(8)
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    def training_step(self, batch: Any) -> jax.Array:
        self.seen[...] += (batch["y"] > 0).sum()
        self.log("y", batch["y"].mean(), on_epoch=True)
        return self.loss(batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.05, momentum=0.9)


def line_by_hand(windows: list[list[Any]], most: float) -> tuple[dict[str, np.ndarray], list[bool]]:
    """Take a clipped step with momentum for each window, in float64; returns also where clipping did something."""
    params = dict(START)
    momentum, clipped = {k: np.zeros_like(v) for k, v in params.items()}, []
    for window in windows:
        x, y = (np.concatenate([batch[key] for batch in window]).astype(np.float64) for key in ("x", "y"))
        error = 2 * (x @ params["kernel"] + params["bias"] - y) / len(y)
        grads = {"kernel": x.T @ error, "bias": error.sum(0)}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        clipped.append(bool(norm > most))
        for name, g in grads.items():
            momentum[name] = 0.9 * momentum[name] + g * min(1.0, most / norm)
            params[name] = params[name] - 0.05 * momentum[name]
    return params, clipped


@pytest.mark.parametrize(
    "strategy",
    thinned([*STRATEGIES, "zero2", "hsdp"], "shard_map", "replicas:8", full=["single", "zero2", "hsdp", "pmap"]),
)
def test_windows_are_clipped_steps_on_all_their_rows(strategy: str) -> None:
    data, rows = sized(*WINDOWED, features=8), Rows()
    windows = [data[:3], data[3:6], data[6:]]
    expected, clipped = line_by_hand([*windows, *windows], 2.5)
    assert any(clipped) and not all(clipped)
    module, validated = Line(), []
    count = hooks(on_validation_end=lambda trainer, module: validated.append(trainer.global_step))
    trainer = fit(
        module,
        data,
        sized(8, features=8, seed=1),
        rows,
        count,
        strategy=splitting(strategy),
        max_epochs=2,
        accumulate_grad_batches=3,
        gradient_clip_val=2.5,
        log_every_n_steps=1,
        val_check_interval=4,  # in the middle of a window
        num_sanity_val_steps=0,
    )
    assert trainer.global_step == 6 and validated == [1, 3, 4, 6]
    assert_same({k: getattr(module, k)[...] for k in START}, expected)
    y = [np.concatenate([batch["y"] for batch in window]) for window in windows]
    assert int(module.seen[...]) == 2 * sum(int((part > 0).sum()) for part in y)
    np.testing.assert_allclose(rows.of("y_step"), [part.mean() for part in y] * 2, rtol=1e-5)
    np.testing.assert_allclose(rows.of("y_epoch"), [np.concatenate(y).mean()] * 2, rtol=1e-5)


class Noting(jl.TrainModule):
    """Notes the dtypes that a step sees; has a parameter, a frozen one and a statistic."""

    seen: list[dict[str, Any]]

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.linspace(-1.0, 1.0, 8)[:, None])
        self.frozen = nnx.Param(jnp.full(8, 1 + 2.0**-20))
        self.mean = nnx.BatchStat(jnp.zeros(8))

    def training_step(self, batch: Any) -> dict[str, jax.Array]:
        self.mean[...] = batch["x"].mean(0)  # the step's own dtype: it is held in that of the variable
        out = batch["x"] @ self.kernel[...] + 0 * self.frozen[...].sum()
        loss = jnp.mean(out)
        # Of eight rows 256, 1 and 1: bfloat16 holds neither 257 nor 256 + 1 + 1, float16 not the mean.
        low = jnp.where(self.global_step == 0, 32, 0.125).astype(loss.dtype)
        self.log("low", jnp.sum(jnp.broadcast_to(low, out.shape)), on_epoch=True, reduce_fx="sum")
        self.log("high", 257.0 + self.global_step, on_epoch=True)
        result = {**batch, "kernel": self.kernel[...], "frozen": self.frozen[...], "loss": loss}
        self.seen.append({name: x.dtype for name, x in result.items()})
        return {"loss": loss, "out": out}

    def configure_optimizers(self) -> jl.Optimizer:
        return jl.Optimizer(optax.adam(1e-3), wrt=nnx.PathContains("kernel"))


PRECISE = [*((name, "bf16-mixed") for name in STRATEGIES), ("single", "16-mixed"), ("pmap", "16-mixed")]


@pytest.mark.parametrize(
    ("strategy", "precision"), thinned(PRECISE, ("fsdp", "bf16-mixed"), ("pmap", "16-mixed"), full=[*PRECISE][::3])
)
def test_a_mixed_step_keeps_float32_state(strategy: str, precision: str) -> None:
    rows, outputs, module = Rows(), [], Noting()
    Noting.seen = []
    watch = hooks(on_train_batch_end=lambda t, m, out, *_: outputs.append((out["loss"].dtype, out["out"].dtype)))
    arguments = {"strategy": splitting(strategy), "precision": precision, "log_every_n_steps": 1}
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    batch = {"x": x, "label": np.arange(8, dtype=np.int32), "mask": np.ones(8, bool)}
    trainer = fit(module, [batch] * 3, None, rows, watch, **arguments)
    low = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}[precision]
    computed = dict.fromkeys(("x", "kernel", "frozen", "loss"), low)
    assert module.seen
    for dtypes in module.seen:
        assert dtypes == {**computed, "label": jnp.int32, "mask": jnp.bool_}
    state = trainer.state
    for part in (state.params, state.frozen, state.opt_state, state.model_state, nnx.state(module)):
        kept = {x.dtype for x in jax.tree.leaves(part) if jnp.issubdtype(x.dtype, jnp.floating)}
        assert kept == {jnp.dtype(jnp.float32)}
    assert outputs == [(jnp.float32, low)] * 3
    assert rows.of("high_step") == [257.0, 258.0, 259.0]
    assert (rows.of("high_epoch"), rows.of("low_epoch")) == ([258.0], [258.0])
    np.testing.assert_array_equal(module.frozen[...], np.full(8, 1 + 2.0**-20, np.float32))  # not rounded


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, *THREE[1:]))
def test_an_overflow_halves_the_scale_and_changes_nothing_else(strategy: str) -> None:
    # A gradient of 4 overflows float16 at scales 2^15 and 2^14: 2^13 is the first that holds it.
    result: list[tuple[float, ...]] = []

    class One(jl.TrainModule):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.zeros(8))

        def training_step(self, batch: Any) -> jax.Array:
            return jnp.sum(jnp.mean(self.w * batch["x"], 0))

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.125, momentum=0.5)

    def note(trainer: jl.Trainer, module: Any, *_: Any) -> None:
        state = trainer.state
        result.append((float(state.loss_scale[0]), float(state.opt_state[0].trace["w"][0]), float(module.w[...][7])))

    data = [{"x": np.full((8, 8), 4, np.float32)}] * 4
    trainer = fit(
        One(), data, None, hooks(on_train_batch_end=note), strategy=splitting(strategy), precision="16-mixed", **BARE
    )
    assert result == [(2.0**14, 0, 0), (2.0**13, 0, 0), (2.0**13, 4, -0.5), (2.0**13, 6, -1.25)]
    assert trainer.global_step == 4


class Layers(jl.TrainModule):
    """A scan over layers, each in `nnx.remat`, and a place where a pipeline may cut."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        keys = jax.random.split(rngs(), 8)
        self.layers = nnx.vmap(lambda key: nnx.Linear(8, 8, rngs=nnx.Rngs(key)))(keys)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def training_step(self, batch: Any) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(layer, x)

        return jnp.mean((self.out(jl.pipeline_yield(run(batch["x"], self.layers))) - 1.0) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


REMATTED = {"fsdp": splitting("fsdp"), "shard_map": "shard_map", "pipeline": jl.strategies.Pipeline(2, microbatches=2)}


@pytest.mark.parametrize("strategy", thinned(REMATTED, "fsdp", "shard_map", full=["pipeline"]))
def test_a_checkpoint_is_entered_whatever_its_primitive_is_called(strategy: str) -> None:
    modules = []
    for is_new in (False, True):
        jax.config.update("jax_remat3", is_new)
        try:
            modules.append(Layers(rngs=nnx.Rngs(0)))
            fit(modules[-1], sized(16, 16, features=8), strategy=REMATTED[strategy], **BARE)
        finally:
            jax.config.update("jax_remat3", False)
    assert_same(*modules, rtol=1e-6)
