"""What leaves a step under strategies that split it: outputs, predictions, statistics, and the run's counts."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import ArgumentError, DataError, ModuleError, NonFiniteError

SPLIT = ("shard_map", "pmap", "simulate:8")  # their steps see the rows of one of 8 replicas
START = np.array([1.0, -1.0])

Step = Callable[[Any, Any], Any]  # (module, batch): what a step returns beside the loss


class Line(jl.TrainModule):
    """y = x w: small enough to train by hand."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.asarray(START, jnp.float32))

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ self.w - batch["y"]) ** 2)

    def training_step(self, batch: Any) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> Any:
        self.log("loss", self.loss(batch))

    def test_step(self, batch: Any) -> Any:
        return self.validation_step(batch)

    def predict_step(self, batch: Any) -> Any:
        return batch["x"] @ self.w

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def returning(step: Step) -> Line:
    """Return a line each of whose steps returns what a function of (module, batch) does."""

    class Returns(Line):
        def training_step(self, batch: Any) -> Any:
            return {"loss": self.loss(batch), **step(self, batch)}

        def validation_step(self, batch: Any) -> Any:
            return step(self, batch)

        def predict_step(self, batch: Any) -> Any:
            return step(self, batch)

    return Returns()


def make_batches(*rows: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(n, 2), "y": draw(n)} for n in rows]


def by_hand(w: Any, windows: Any) -> np.ndarray:
    """Train `Line` by its formula in float64: a step a window, on the mean over its rows."""
    w = np.asarray(w, np.float64)
    for window in windows:
        x, y = (np.concatenate([b[key] for b in window]).astype(np.float64) for key in ("x", "y"))
        w = w - 0.1 * 2 * x.T @ (x @ w - y) / len(y)
    return w


def losses_by_hand(w: Any, batches: list[dict[str, np.ndarray]]) -> list[float]:
    return [float(np.mean((b["x"].astype(np.float64) @ np.asarray(w) - b["y"]) ** 2)) for b in batches]


def make_trainer(*callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    return jl.Trainer(**({"strategy": "single", "max_epochs": 1} | quiet | arguments), callbacks=list(callbacks))


def assert_weights(module: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(module.w[...]), expected, rtol=1e-6, atol=1e-6)


class Keep(jl.Callback):
    """Keeps the outputs of each batch, as numpy, and the rows."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, np.ndarray]] = []
        self.rows: list[tuple[int, dict[str, float]]] = []

    def on_train_batch_end(self, trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append({k: np.asarray(v) for k, v in outputs.items() if k != "loss"})

    def on_validation_batch_end(
        self, trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.outputs.append({k: np.asarray(v) for k, v in (outputs or {}).items()})

    def on_log(self, trainer: jl.Trainer, values: dict[str, float], step: int) -> None:
        self.rows.append((step, dict(values)))


def run(verb: str, module: Any, batches: Any, strategy: str, **arguments: Any) -> list[dict[str, np.ndarray]]:
    """Return the outputs of each batch of a run."""
    keep = Keep()
    trainer = make_trainer(keep, strategy=strategy, **arguments)
    found = getattr(trainer, verb)(module, batches)
    return found if verb == "predict" else keep.outputs


# Outputs ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["fit", "validate"])
@pytest.mark.parametrize("strategy", SPLIT)
def test_an_output_is_averaged_although_a_later_batch_has_as_many_rows_a_replica(strategy: str, verb: str) -> None:
    # 10 values; the second batch has 80 rows and so 10 a replica, the third has 10 in all.
    scale = lambda module, batch: {"ten": jnp.arange(10.0) * batch["x"].mean(), "row": batch["x"].sum(1)}  # noqa: E731
    batches = make_batches(208, 80, 10)
    for found, batch in zip(run(verb, returning(scale), batches, strategy), batches, strict=True):
        np.testing.assert_allclose(found["ten"], np.arange(10.0) * batch["x"].mean(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["row"], batch["x"].sum(1), rtol=1e-6, atol=1e-6)


def count_positive(module: Any, batch: Any) -> dict[str, jax.Array]:
    return {"correct": (batch["x"][:, 0] > 0).sum()}


@pytest.mark.parametrize(("verb", "rows"), [("fit", 16), ("validate", 23), ("predict", 23)])
@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
def test_a_count_is_that_of_the_whole_batch(strategy: str, rows: int, verb: str) -> None:
    batches = make_batches(rows)
    (found,) = run(verb, returning(count_positive), batches, strategy)
    assert found["correct"] == (batches[0]["x"][:, 0] > 0).sum() > 2


def most_positive(module: Any, batch: Any) -> dict[str, jax.Array]:
    return {"largest": batch["x"][:, 0].argmax()}


@pytest.mark.parametrize(("verb", "rows"), [("fit", 16), ("fit", 23), ("validate", 16), ("predict", 23)])
@pytest.mark.parametrize("strategy", SPLIT)
def test_an_int_that_is_another_on_each_replica_is_refused_by_its_name(strategy: str, rows: int, verb: str) -> None:
    with pytest.raises(ModuleError, match=r"largest, int32\[\].*another on each replica"):
        run(verb, returning(most_positive), make_batches(rows), strategy)


@pytest.mark.parametrize(
    ("strategy", "verb"), [("ddp", "fit"), *((name, "validate") for name in SPLIT), ("pmap", "fit")]
)
def test_ints_that_are_rows_or_the_same_everywhere_leave_every_strategy(strategy: str, verb: str) -> None:
    step = lambda module, batch: {"above": (batch["x"][:, 0] > 0).astype(jnp.int32), "same": jnp.int32(7)}  # noqa: E731
    batches = make_batches(16, 23, 16)
    for found, batch in zip(run(verb, returning(step), batches, strategy), batches, strict=True):
        np.testing.assert_array_equal(found["above"], batch["x"][:, 0] > 0)
        assert found["same"] == 7


# Predictions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", SPLIT)
def test_predictions_are_rows_in_order_also_if_the_first_batch_does_not_divide(strategy: str) -> None:
    step = lambda module, batch: {"sum": batch["x"] @ module.w, "id": jnp.rint(batch["y"]).astype(jnp.int32)}  # noqa: E731
    batches = make_batches(7, 16, 5)
    for found, batch in zip(run("predict", returning(step), batches, strategy), batches, strict=True):
        np.testing.assert_allclose(found["sum"], batch["x"] @ START, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found["id"], np.rint(batch["y"]))


PREDICTIONS: dict[str, Step] = {
    "transposed": lambda module, batch: {"transposed": batch["x"].T},
    "spread": lambda module, batch: {"rows": batch["x"], "spread": batch["x"].std()},
}


@pytest.mark.parametrize("name", PREDICTIONS)
@pytest.mark.parametrize("strategy", SPLIT)
def test_predictions_that_are_no_rows_are_refused_by_their_name(strategy: str, name: str) -> None:
    with pytest.raises(ModuleError, match=f"predict_step returned {name}, float32"):
        run("predict", returning(PREDICTIONS[name]), make_batches(32), strategy)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_transposed_predictions_leave_a_strategy_whose_step_sees_the_whole_batch(strategy: str) -> None:
    batches = make_batches(32)
    (found,) = run("predict", returning(PREDICTIONS["transposed"]), batches, strategy)
    np.testing.assert_array_equal(found["transposed"], batches[0]["x"].T)


# Several loaders --------------------------------------------------------------------------------------


def two_loaders() -> list[list[dict[str, np.ndarray]]]:
    first, second = make_batches(8, 16)
    return [[first], [{**second, "z": 2 * second["x"]}]]


@pytest.mark.parametrize("strategy", ["single", *SPLIT])
def test_loaders_with_other_outputs_are_refused_by_name_and_told_the_remedy(strategy: str) -> None:
    with pytest.raises(ModuleError, match="validation_step returned .*'z'.* take dataloader_idx as an argument"):
        make_trainer(strategy=strategy).validate(returning(lambda module, batch: dict(batch)), two_loaders())


@pytest.mark.parametrize("strategy", ["single", *SPLIT])
def test_a_step_that_takes_dataloader_idx_may_return_other_outputs_for_each_loader(strategy: str) -> None:
    class Both(Line):
        def validation_step(self, batch: Any, batch_idx: Any, dataloader_idx: int = 0) -> Any:
            self.log("which", 10.0 + dataloader_idx + 0 * self.loss(batch))
            return {"z": batch["z"]} if dataloader_idx else {"x": batch["x"], "mean": batch["x"].mean()}

    keep, loaders = Keep(), two_loaders()
    found = make_trainer(keep, strategy=strategy).validate(Both(), loaders)
    assert found == [{"which/dataloader_idx_0": 10.0}, {"which/dataloader_idx_1": 11.0}]
    first, second = keep.outputs
    assert (set(first), set(second)) == ({"x", "mean"}, {"z"})
    np.testing.assert_array_equal(first["x"], loaders[0][0]["x"])
    np.testing.assert_allclose(first["mean"], loaders[0][0]["x"].mean(), rtol=1e-5)
    np.testing.assert_array_equal(second["z"], loaders[1][0]["z"])


# Random numbers ---------------------------------------------------------------------------------------


class Stacked(Line):
    """Three dropouts that nnx.vmap has built, and so one stack of three keys."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__()

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def build(rngs: nnx.Rngs) -> nnx.Dropout:
            return nnx.Dropout(0.5, rngs=rngs)

        self.drop = build(rngs)

    def masks(self, x: jax.Array) -> jax.Array:
        """Return the three masks of a batch, rows first."""
        apply = nnx.vmap(lambda drop, x: drop(x), in_axes=(0, None), out_axes=0)
        return jnp.swapaxes(apply(self.drop, jnp.ones((x.shape[0], 16))), 0, 1)

    def training_step(self, batch: Any) -> Any:
        return {"loss": self.loss(batch), "masks": self.masks(batch["x"])}

    def validation_step(self, batch: Any) -> Any:
        return {"masks": self.masks(batch["x"])}


def keys_of(module: Any) -> list[np.ndarray]:
    return [np.asarray(jax.random.key_data(x[...])) for _, x in nnx.iter_graph(module) if isinstance(x, nnx.RngKey)]


@pytest.mark.parametrize("strategy", ["shard_map", "pmap"])
def test_stacked_dropouts_draw_their_own_masks_on_each_replica_and_keep_their_keys(strategy: str) -> None:
    module, batches = Stacked(rngs=nnx.Rngs(0)), make_batches(16, 16)
    keys = keys_of(module)
    assert [x.shape[0] for x in keys] == [3]
    masks = np.stack([found["masks"] for found in run("fit", module, batches, strategy)])  # (batch, row, layer, 16)
    assert set(np.unique(masks)) == {0.0, 2.0}
    # 96 draws of 16 bits each: equal ones would be a key that was used twice.
    assert len(np.unique(masks.reshape(-1, 16), axis=0)) > 90
    assert_weights(module, by_hand(START, [[b] for b in batches]))
    np.testing.assert_array_equal(keys_of(module), keys)
    (count,) = [x[...] for _, x in nnx.iter_graph(module) if isinstance(x, nnx.RngCount)]
    np.testing.assert_array_equal(np.asarray(count), [2, 2, 2])


@pytest.mark.parametrize("strategy", ["single", "pmap", "simulate:8"])
def test_stacked_dropouts_are_evaluated_without_dropping(strategy: str) -> None:
    for found in run("validate", Stacked(rngs=nnx.Rngs(0)), make_batches(16, 5), strategy):
        np.testing.assert_array_equal(found["masks"], 1.0)


class Dropped(Line):
    """A line behind a dropout, which one of nnx's transforms may run."""

    def __init__(self, transform: Any, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.transform = transform

    def loss(self, batch: Any) -> jax.Array:
        x = self.transform(lambda drop, x: drop(x))(self.drop, batch["x"])
        return jnp.mean((x @ self.w - batch["y"]) ** 2)


def plainly(fn: Any) -> Any:
    return fn


@pytest.mark.parametrize("strategy", SPLIT)
def test_a_dropout_under_remat_or_jit_drops_what_it_drops_without(strategy: str) -> None:
    weights, batches = {}, make_batches(16, 16)
    for transform in (plainly, nnx.remat, nnx.jit):
        module = Dropped(transform, rngs=nnx.Rngs(0))
        keys = keys_of(module)
        make_trainer(strategy=strategy).fit(module, batches)
        weights[transform] = np.asarray(module.w[...])
        np.testing.assert_array_equal(keys_of(module), keys)
    np.testing.assert_allclose(weights[nnx.remat], weights[plainly], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(weights[nnx.jit], weights[plainly], rtol=1e-6, atol=1e-6)
    assert np.abs(weights[plainly] - by_hand(START, [[b] for b in batches])).max() > 1e-3  # it has dropped


# Batches that do not divide ---------------------------------------------------------------------------


class Counts(Line):
    """Counts the rows with a positive first column, as state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = nnx.Variable(jnp.zeros((), jnp.int32))

    def training_step(self, batch: Any) -> Any:
        self.seen[...] = self.seen[...] + (batch["x"][:, 0] > 0).sum().astype(jnp.int32)
        return self.loss(batch)


@pytest.mark.parametrize("strategy", ["ddp", *SPLIT])
def test_counting_state_is_exact_also_if_the_first_batch_does_not_divide(strategy: str) -> None:
    batches, module = make_batches(7, 16), Counts()
    make_trainer(strategy=strategy).fit(module, batches)
    assert module.seen[...] == sum((b["x"][:, 0] > 0).sum() for b in batches)


@pytest.mark.parametrize("strategy", ["ddp", "pmap"])
def test_training_that_begins_with_a_batch_that_does_not_divide_is_that_by_hand(strategy: str) -> None:
    batches, module = make_batches(7, 16, 5), Line()
    make_trainer(strategy=strategy).fit(module, batches)
    assert_weights(module, by_hand(START, [[b] for b in batches]))


# Numbers that are not finite --------------------------------------------------------------------------


class Huge(Line):
    """Has gradients that are finite, and whose squares are not."""

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean(batch["x"] @ self.w) * 1e25

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-25)


@pytest.mark.parametrize(("strategy", "accumulate"), [("single", 1), ("shard_map", 1), ("ddp", 2), ("pmap", 2)])
def test_finite_gradients_whose_norm_overflows_are_trained_on(strategy: str, accumulate: int) -> None:
    batches, module = make_batches(16, 16), Huge()
    make_trainer(strategy=strategy, accumulate_grad_batches=accumulate, nan_policy="raise").fit(module, batches)
    steps = np.mean([b["x"].mean(0) for b in batches], axis=0) * (3 - accumulate)
    assert_weights(module, START - steps)


def test_finite_gradients_in_float16_whose_norm_overflows_are_trained_on() -> None:
    class Half(Line):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.ones(2, jnp.float16))

        def loss(self, batch: Any) -> jax.Array:
            return (self.w[...] * jnp.array([300.0, 400.0], jnp.float16)).sum().astype(jnp.float32)

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(2.0**-10)

    module = Half()
    make_trainer(nan_policy="raise").fit(module, make_batches(8))
    # Exact: the steps are multiples of the spacing of float16 below 1.
    np.testing.assert_array_equal(np.asarray(module.w[...], np.float32), 1 - np.array([300, 400]) / 1024)


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
def test_one_infinite_gradient_under_a_finite_loss_is_seen(strategy: str) -> None:
    class Infinite(Line):
        def loss(self, batch: Any) -> jax.Array:
            # The derivative of sqrt is infinite at 0, in the second weight alone.
            return (self.w[0] * batch["x"][:, 0]).mean() + jnp.sqrt(self.w[1] + 1.0)

    module = Infinite()
    with pytest.raises(NonFiniteError, match="step 0"):
        make_trainer(strategy=strategy).fit(module, make_batches(16))
    assert_weights(module, START)


class Tracking(Line):
    """Keeps a running mean of its input: momentum 0.5."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nnx.BatchStat(jnp.zeros(()))

    def training_step(self, batch: Any) -> Any:
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * batch["x"].mean()
        return self.loss(batch)


def steady(bad: int, count: int = 6) -> list[dict[str, np.ndarray]]:
    """Return batches of constant x = 8**i, one with targets that are NaN."""
    fill = lambda i: np.full(8, np.nan if i == bad else 0.0, np.float32)  # noqa: E731
    return [{"x": np.full((8, 2), 8.0**i, np.float32), "y": fill(i)} for i in range(count)]


@pytest.mark.parametrize("strategy", ["single", "fsdp", "pmap"])
def test_no_statistic_is_of_the_bad_batch_or_of_one_after_it(strategy: str) -> None:
    module = Tracking()
    with pytest.raises(NonFiniteError, match="step 2"):
        make_trainer(strategy=strategy, nan_policy="raise").fit(module, steady(bad=2))
    assert float(module.mean[...]) == 0.25 * 1 + 0.5 * 8  # exact in binary


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
def test_no_statistic_is_of_a_batch_behind_the_bad_window(strategy: str) -> None:
    means = []
    for count in (4, 6):  # the second window is bad, and the last
        module = Tracking()
        with pytest.raises(NonFiniteError, match="step 1"):
            make_trainer(strategy=strategy, nan_policy="raise", accumulate_grad_batches=2).fit(
                module, steady(bad=3, count=count)
            )
        means.append(float(module.mean[...]))
    assert means[0] == means[1] <= 0.125 * 1 + 0.25 * 8 + 0.5 * 64


@pytest.mark.parametrize("strategy", ["ddp", "pmap"])
def test_a_skipped_step_leaves_no_statistic_and_the_next_one_does(strategy: str) -> None:
    module = Tracking()
    make_trainer(strategy=strategy, nan_policy="skip").fit(module, steady(bad=1, count=3))
    assert float(module.mean[...]) == 0.25 * 1 + 0.5 * 64


# Unfinished windows -----------------------------------------------------------------------------------


class End(jl.Callback):
    """Stops, or skips the rest of the epoch, at a batch."""

    def __init__(self, how: str, at: int) -> None:
        self.how, self.at = how, at

    def on_train_batch_start(self, trainer: jl.Trainer, module: Any, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.how == "skip" and batch_idx == self.at and trainer.current_epoch == 0 else None

    def on_train_batch_end(self, trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.how == "stop" and batch_idx == self.at - 1:
            trainer.stop("enough")


@pytest.mark.parametrize(
    ("how", "at", "strategy"),
    [("stop", 1, "single"), ("stop", 3, "pmap"), ("skip", 1, "shard_map"), ("skip", 3, "single")],
)
def test_an_epoch_that_ends_in_its_first_window_takes_no_step_and_logs_no_row(strategy: str, how: str, at: int) -> None:
    keep, module = Keep(), Line()
    trainer = make_trainer(keep, End(how, at), strategy=strategy, accumulate_grad_batches=4, log_every_n_steps=1)
    trainer.fit(module, make_batches(*[8] * 8))
    assert trainer.global_step == 0
    assert keep.rows == []
    assert len(keep.outputs) == at
    assert_weights(module, START)
    assert all(np.isfinite(float(x)) for x in dict(trainer.callback_metrics).values())


@pytest.mark.parametrize(
    ("how", "strategy"), [("stop", "single"), ("stop", "pmap"), ("skip", "single"), ("skip", "ddp")]
)
def test_an_epoch_that_ends_in_its_second_window_logs_the_first(strategy: str, how: str) -> None:
    keep, module, batches = Keep(), Line(), make_batches(*[8] * 8)
    trainer = make_trainer(keep, End(how, 5), strategy=strategy, accumulate_grad_batches=4, log_every_n_steps=1)
    trainer.fit(module, batches)
    assert trainer.global_step == 1
    assert_weights(module, by_hand(START, [batches[:4]]))
    loss = np.mean(losses_by_hand(START, batches[:4]))
    near = pytest.approx(loss, rel=1e-6)
    assert keep.rows == [(0, {"loss_step": near, "epoch": 0}), (0, {"loss_epoch": near, "epoch": 0})]


@pytest.mark.parametrize("strategy", ["single", "fsdp", "pmap"])
def test_the_rest_of_a_skipped_window_is_in_no_window_of_the_next_epoch(strategy: str) -> None:
    module, batches = Line(), make_batches(*[8] * 4)
    trainer = make_trainer(End("skip", 3), strategy=strategy, accumulate_grad_batches=2, max_epochs=2)
    trainer.fit(module, batches)
    assert trainer.global_step == 3
    assert_weights(module, by_hand(START, [batches[:2], batches[:2], batches[2:]]))


# Counts and loaders -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "verb"), [("single", "validate"), ("ddp", "test"), ("pmap", "validate")])
def test_an_evaluation_after_fit_counts_on_from_it(strategy: str, verb: str) -> None:
    class Reads(Line):
        def validation_step(self, batch: Any) -> None:
            self.log("at_step", self.global_step + 0.0)
            self.log("at_epoch", self.current_epoch + 0.0)

    batches, trainer = make_batches(8, 8, 8), make_trainer(strategy=strategy, max_epochs=2)
    assert getattr(trainer, verb)(Reads(), batches) == [{"at_step": 0.0, "at_epoch": 0.0}]
    trainer.fit(Reads(), batches)
    assert getattr(trainer, verb)(None, batches) == [{"at_step": 6.0, "at_epoch": 2.0}]


def once(*rows: int) -> Iterator[dict[str, np.ndarray]]:
    """Return a generator, which gives its batches once."""
    yield from make_batches(*rows)


def test_a_validation_generator_that_is_used_up_is_refused() -> None:
    with pytest.raises(DataError, match=r"val_dataloaders.*used up"):
        make_trainer(max_epochs=2).fit(Line(), make_batches(8), once(8, 8))


def test_a_training_generator_that_is_used_up_is_refused() -> None:
    with pytest.raises(DataError, match=r"train_dataloaders.*used up"):
        make_trainer(max_epochs=2).fit(Line(), once(8, 8))


def test_a_generator_that_is_opened_once_is_validated_whole() -> None:
    module, batches = Line(), make_batches(8, 8)
    trainer = make_trainer()
    trainer.fit(module, batches, itertools.chain(batches))
    trained = by_hand(START, [[b] for b in batches])
    assert trainer.validate(module, once(8, 8))[0]["loss"] == pytest.approx(
        np.mean(losses_by_hand(trained, batches)), rel=1e-6
    )


# The root folder --------------------------------------------------------------------------------------


def test_a_trainer_may_validate_and_then_fit_in_its_root_folder(tmp_path: Path) -> None:
    trainer, batches, module = make_trainer(default_root_dir=tmp_path, logger=True), make_batches(8), Line()
    trainer.validate(module, batches)
    for _ in range(2):
        trainer.fit(module, batches)
    trainer.validate(module, batches)
    assert (tmp_path / "metrics.csv").exists()


@pytest.mark.parametrize("validates_first", [False, True])
@pytest.mark.parametrize("filename", ["metrics.csv", "other.csv"])
def test_the_root_folder_of_another_trainer_is_refused_by_its_file(
    tmp_path: Path, filename: str, validates_first: bool
) -> None:
    def make() -> jl.Trainer:
        return make_trainer(jl.callbacks.CSVLogger(filename), default_root_dir=tmp_path, log_every_n_steps=1)

    make().fit(Line(), make_batches(8))
    second = make()
    if validates_first:  # which claims nothing that is another's
        second.validate(Line(), make_batches(8))
    before = (tmp_path / filename).read_text()
    with pytest.raises(ArgumentError, match=f"holds {filename} of another run"):
        second.fit(Line(), make_batches(8))
    assert (tmp_path / filename).read_text() == before


# Chance sizes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["single", "ddp", *SPLIT])
def test_an_output_as_long_as_a_replica_has_rows_by_chance_stays_whole(strategy: str) -> None:
    module = returning(lambda m, batch: m.w * 2.0)
    (found,) = make_trainer(strategy=strategy).predict(module, make_batches(16))
    np.testing.assert_array_equal(found, START * 2)


@pytest.mark.parametrize("strategy", SPLIT)
@pytest.mark.parametrize("step", [lambda m, batch: batch["x"].T, lambda m, batch: jnp.ones(2) * batch["x"].std()])
def test_a_prediction_that_is_as_long_as_a_replica_has_rows_by_chance_is_refused(step: Step, strategy: str) -> None:
    with pytest.raises(ModuleError, match=r"predict_step returned .*no row for each row"):
        make_trainer(strategy=strategy).predict(returning(step), make_batches(16))
