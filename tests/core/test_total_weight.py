"""A loss that is a mean over something else than rows trains like the mean over the entire batch."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.by_hand import HandLoop, assert_same, state_of
from kit.journal import at_batch
from kit.refusals import warnings_of
from kit.trainers import fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import ModuleError

WORDS = 6


class Padded(jl.TrainModule):
    """Two layers with a loss that is a mean over words that count, next to some that are padding."""

    def __init__(self, *, returns_weight: bool = True, norm: bool = False) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs) if norm else None
        self.returns_weight = returns_weight

    def loss(self, batch: Any) -> jax.Array:
        x = self.first(batch["x"])
        x = x if self.norm is None else self.norm(x, mask=batch["mask"][..., None] > 0)
        errors = (self.last(jl.pipeline_yield(jnp.tanh(x)))[..., 0] - batch["y"]) ** 2
        words = batch["mask"].sum()
        return jnp.sum(errors * batch["mask"]) / (words if self.norm is None else jnp.maximum(words, 1))

    def training_step(self, batch: Any) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return {"loss": loss, "total_weight": batch["mask"].sum()} if self.returns_weight else loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.5)


def padded(empty: slice = slice(0)) -> dict[str, np.ndarray]:
    """Return 48 rows of 1 to 6 words, and of none in `empty`."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, WORDS + 1, 48)
    lengths[empty] = 0
    rows = {"x": rng.normal(size=(48, WORDS, 3)), "y": rng.normal(size=(48, WORDS))}
    rows["mask"] = np.arange(WORDS) < lengths[:, None]
    return {name: x.astype(np.float32) for name, x in rows.items()}


def of_16(rows: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return [{name: x[i : i + 16] for name, x in rows.items()} for i in range(0, 48, 16)]


PIPELINE = jl.strategies.Pipeline(stages=2, microbatches=4)
CASES: list[tuple[Any, int, dict[str, Any]]] = [
    *((name, 16, {}) for name in ("single", "fsdp", "shard_map", "pmap", "replicas:8", PIPELINE)),
    *((name, 8, {"accumulate_grad_batches": 2}) for name in ("single", "fsdp", "shard_map", "replicas:4", PIPELINE)),
    *((name, 4, {"accumulate_grad_batches": 4}) for name in ("single", "ddp", "pmap")),
    *((name, 16, {"steps_per_execution": 3}) for name in ("single", "shard_map")),
    ("shard_map", 8, {"accumulate_grad_batches": 2, "steps_per_execution": 6}),
]


@pytest.mark.parametrize(("strategy", "size", "arguments"), thinned(CASES, *CASES[2:6], CASES[6], CASES[8]))
@pytest.mark.parametrize("clip", [None, 0.1])
def test_parts_of_a_batch_count_by_their_total_weight(strategy: Any, size: int, arguments: Any, clip: Any) -> None:
    tx = optax.sgd(0.5) if clip is None else optax.chain(optax.clip_by_global_norm(clip), optax.sgd(0.5))
    rows, module = padded(), Padded()
    hand = HandLoop(Padded(), tx)(*of_16(rows))
    loader = jl.ArrayLoader(rows, size)
    trainer = fit(module, loader, strategy=strategy, gradient_clip_val=clip, log_every_n_steps=1, **arguments)
    assert_same(module, hand.module)
    np.testing.assert_allclose(trainer.history["loss_step"][1], hand.losses, rtol=1e-5)
    words = [batch["mask"].sum() for batch in of_16(rows)]
    epoch = np.average(np.array(hand.losses), weights=words)
    np.testing.assert_allclose(trainer.callback_metrics["loss_epoch"], epoch, rtol=1e-5)


@pytest.mark.parametrize("strategy", ["shard_map", "pmap", "replicas:4"])
@pytest.mark.parametrize("norm", [False, True])
def test_a_replica_without_weight_counts_nothing(strategy: str, norm: bool) -> None:
    """Its loss is 0 / 0, or its part of a BatchNorm's statistics, which are those of all words that count."""
    rows, module = padded(empty=slice(4, 8)), Padded(norm=norm)
    loader = jl.ArrayLoader({name: x[:16] for name, x in rows.items()}, 16)
    fit(module, loader, strategy=strategy, devices=4)
    assert_same(state_of(module), state_of(HandLoop(Padded(norm=norm))(of_16(rows)[0]).module))


def test_a_window_without_weight_changes_no_parameter() -> None:
    rows, module = padded(empty=slice(48)), Padded()
    trainer = fit(module, jl.ArrayLoader(rows, 8), accumulate_grad_batches=3)
    assert trainer.global_step == 2
    assert_same(module, Padded(), rtol=0, atol=0)


def test_a_population_counts_by_weight_as_well() -> None:
    rows = padded()
    population = jl.fit_many(Padded, [{}, {}], jl.ArrayLoader(rows, 16), max_epochs=1, log_every_n_steps=1)
    hand = HandLoop(Padded())(*of_16(rows))
    assert_same(population.module(1), hand.module)
    means: Any = [row["loss_epoch"] for row in population.rows() if "loss_epoch" in row]
    words = [batch["mask"].sum() for batch in of_16(rows)]
    np.testing.assert_allclose(means, np.average(np.array(hand.losses), weights=words), rtol=1e-5)


ACCUMULATES = {"single": {"accumulate_grad_batches": 2}, "pipeline": {"strategy": PIPELINE}, "shard_map": {}}


@pytest.mark.parametrize("strategy", ACCUMULATES)
def test_a_mean_over_something_else_is_told_how_to_return_its_weight(strategy: str, caplog: Any) -> None:
    arguments = {"strategy": strategy} | ACCUMULATES[strategy]
    fit(Padded(returns_weight=False), jl.ArrayLoader(padded(), 16), **arguments)
    (message,) = [m for m in warnings_of(caplog) if "total_weight" in m]
    assert message.startswith("Padded.training_step: ")
    assert "{'loss': loss, 'total_weight': mask.sum()}" in message
    caplog.clear()
    fit(Padded(), jl.ArrayLoader(padded(), 16), **arguments)
    assert not [m for m in warnings_of(caplog) if "training_step" in m]


class Normed(Padded):
    """Layers that draw and that look at the entire batch, and a loss of (errors, mask)."""

    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.drop, self.bn, self.reduce = nnx.Dropout(0.5, rngs=nnx.Rngs(1)), nnx.BatchNorm(4, rngs=nnx.Rngs(2)), reduce

    def training_step(self, batch: Any) -> jax.Array:
        x = self.drop(self.bn(self.first(batch["x"])))
        return self.reduce((self.last(jl.pipeline_yield(x))[..., 0] - batch["y"]) ** 2, batch["mask"])


MEANS = {"mean": lambda e, m: jnp.mean(e), "full mask": lambda e, m: (e * m**0).sum() / (m**0).sum()}


@pytest.mark.parametrize("strategy", ACCUMULATES)
@pytest.mark.parametrize("reduce", MEANS)
def test_a_mean_over_rows_is_not_warned_of(reduce: str, strategy: str, caplog: Any) -> None:
    fit(Normed(MEANS[reduce]), jl.ArrayLoader(padded(), 16), **{"strategy": strategy} | ACCUMULATES[strategy])
    assert not [m for m in warnings_of(caplog) if "training_step" in m]


@pytest.mark.parametrize("strategy", ["single", "pipeline"])
@pytest.mark.parametrize(
    "reduce", [lambda e, m: e.sum(), lambda e, m: (e * m).sum() / m.sum(), lambda e, m: jnp.sqrt(jnp.mean(e))]
)
def test_layers_that_draw_hide_no_loss_that_is_not_a_mean(strategy: str, reduce: Any, caplog: Any) -> None:
    fit(Normed(reduce), jl.ArrayLoader(padded(), 16), **{"strategy": strategy} | ACCUMULATES[strategy])
    assert [m for m in warnings_of(caplog) if "the loss is not a mean over rows" in m]


class Drawn(Padded):
    """A layer that draws, and a loss of (errors, features) of rows."""

    def __init__(self, reduce: Any) -> None:
        super().__init__()
        self.drop, self.reduce = nnx.Dropout(0.5, rngs=nnx.Rngs(1)), reduce

    def training_step(self, batch: Any) -> jax.Array:
        x = self.drop(self.first(batch["x"]))
        errors = (self.last(jl.pipeline_yield(x))[..., 0] - batch["y"]) ** 2
        return self.reduce(errors.mean(1), x.reshape(len(x), -1))


def contrast(x: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(x @ x.T, jnp.arange(len(x))).mean()


NO_MEANS = {
    "a sum": lambda e, x: e.sum(),
    "a mean and a sum": lambda e, x: e.mean() + 0.1 * jnp.square(x).sum(),
    "a sum that is added to each row": lambda e, x: (e + 0.1 * e.sum()).mean(),
    "products of rows": lambda e, x: (x @ x.T).sum() / len(x),
    "rows compared with all others": lambda e, x: contrast(x),
    "the half with the largest errors": lambda e, x: jax.lax.top_k(e, len(e) // 2)[0].mean(),
}


@pytest.mark.parametrize("strategy", ["single", "pipeline"])
@pytest.mark.parametrize("reduce", NO_MEANS)
def test_a_sum_or_a_loss_of_pairs_is_warned_of(reduce: str, strategy: str, caplog: Any) -> None:
    rows = padded() | {"x": 3 * padded()["x"]}
    fit(Drawn(NO_MEANS[reduce]), jl.ArrayLoader(rows, 16), **{"strategy": strategy} | ACCUMULATES[strategy])
    assert [m for m in warnings_of(caplog) if "the loss is not a mean over rows" in m]


@pytest.mark.parametrize("reduce", [lambda e: e.sum(), lambda e: e.sum() / 512])
def test_a_sum_in_a_window_is_warned_of(reduce: Any, caplog: Any) -> None:
    class Summed(Padded):
        def training_step(self, batch: Any) -> jax.Array:
            return reduce((self.last(self.first(batch["x"]))[..., 0] - batch["y"]) ** 2)

    fit(Summed(), jl.ArrayLoader(padded(), 16), accumulate_grad_batches=3, max_steps=1)
    assert [m for m in warnings_of(caplog) if "the loss is not a mean over rows" in m]


class Shared(Padded):
    def validation_step(self, batch: Any) -> Any:
        self.log("val", loss := self.loss(batch))
        return {"loss": loss, "total_weight": batch["mask"].sum()}


@pytest.mark.parametrize("strategy", ["single", "shard_map"])
def test_a_validation_counts_by_weight_too(strategy: str) -> None:
    rows, module = padded(), Shared()
    (result,) = make_trainer(strategy=strategy).validate(module, jl.ArrayLoader(rows, 16))
    np.testing.assert_allclose(result["val"], float(module.loss(rows)), rtol=1e-5)


def test_a_resume_in_a_window_with_other_metrics_keeps_its_weight() -> None:
    class Logs(Padded):
        def training_step(self, batch: Any) -> Any:
            self.log("words", batch["mask"].sum().astype(jnp.int32))
            return super().training_step(batch)

    loader, arguments = jl.ArrayLoader(padded(), 8), {"accumulate_grad_batches": 3}
    whole, first, resumed = Padded(), Padded(), Logs()
    fit(whole, loader, **arguments)
    fit(first, loader, None, at_batch(4, lambda trainer, _: trainer.save_checkpoint("middle")), **arguments)
    fit(resumed, loader, None, ckpt_path="middle", **arguments)
    assert_same(resumed, whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("weight", "strategy", "reason"),
    [
        (lambda mask: mask, "single", r"must return as total_weight a real \(\) number"),
        (lambda mask: mask.any() > 0, "single", r"must return as total_weight a real \(\) number"),
        (lambda mask: "words", "single", r"must return as total_weight a real \(\) number"),
        (
            lambda mask: mask.sum(),
            jl.strategies.PMap(loss_reduction="sum"),
            "the weight of a mean, under loss_reduction='sum'",
        ),
    ],
)
def test_a_weight_that_cannot_be_one_is_refused(weight: Any, strategy: Any, reason: str) -> None:
    class Given(Padded):
        def training_step(self, batch: Any) -> Any:
            return {"loss": self.loss(batch), "total_weight": weight(batch["mask"])}

    with pytest.raises(ModuleError, match=reason):
        fit(Given(), jl.ArrayLoader(padded(), 16), strategy=strategy)


def test_a_weight_that_only_some_batches_return_is_refused() -> None:
    class Sometimes(Padded):
        def training_step(self, batch: Any) -> Any:
            weight = {"total_weight": batch["mask"].sum()} if len(batch["x"]) > 8 else {}
            return {"loss": self.loss(batch)} | weight

    with pytest.raises(ModuleError, match="total_weight"):
        fit(Sometimes(), jl.ArrayLoader({name: x[:24] for name, x in padded().items()}, 16))
