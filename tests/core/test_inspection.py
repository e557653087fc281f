"""What a step's program tells besides its numbers, and what replicas write and return, or are refused."""

from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random
from kit.by_hand import assert_same
from kit.journal import Losses, hooks
from kit.modules import Linear, Net, module
from kit.refusals import warnings_of
from kit.trainers import THREE, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError, JaxlitError, ModuleError, StateError


@pytest.mark.parametrize(
    ("loss", "strategy"),
    [
        *((jax.lax.stop_gradient, name) for name in THREE[1:]),
        (lambda loss: jnp.ones(()), "single"),
        (lambda loss: (loss < 1).astype(jnp.float32), "single"),
    ],
)
def test_a_loss_of_no_parameter_is_warned_of_once(loss: Any, strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    fit(module(lambda self, batch: loss(self.loss(batch)), base=Linear), random(2), strategy=strategy, max_epochs=2)
    (message,) = [m for m in warnings_of(caplog) if "depend" in m]
    assert all(word in message for word in ("Made.training_step", "kernel", "bias")), message


class Branches(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.detached = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.Linear(3, 1, rngs=nnx.Rngs(1))
        self.stacked, self.written = nnx.Param(jnp.ones((2, 3))), nnx.Param(jnp.zeros(()))

    def __call__(self, x: jax.Array) -> jax.Array:
        idle = jnp.ones(()) + jax.lax.stop_gradient(self.detached(x))
        pairs = (self.stacked[...], self.unused.kernel[...].T.repeat(2, 0))
        x, _ = jax.lax.scan(lambda x, pair: (x * pair[0], x * pair[1]), x, pairs)
        self.written[...] = x.mean()
        return super().__call__(jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x)) + 0 * idle


def test_trained_parameters_that_the_loss_ignores_are_named(caplog: pytest.LogCaptureFixture) -> None:
    fit(Branches(), random(2), max_epochs=2)
    (message,) = warnings_of(caplog)
    names = "detached.bias, detached.kernel, unused.bias, unused.kernel"
    assert f"does not depend on 4 of 8 parameters. The gradient is zero: {names}." in message
    caplog.clear()
    fit(Branches(), random(2), max_epochs=1)
    assert warnings_of(caplog) == [], "once, as a public model may have some"
    frozen = (nnx.Not(nnx.PathContains(name)) for name in ("unused", "detached"))
    fit(module(base=Branches, tx=jl.Optimizer(optax.sgd(0.1), wrt=nnx.All(nnx.Param, *frozen))), random(1))
    assert warnings_of(caplog) == []


def test_a_loss_of_the_parameters_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def through(loss: jax.Array) -> jax.Array:
        loss = jax.lax.cond(loss < 1, jnp.sin, jnp.cos, loss + jax.lax.stop_gradient(loss))
        loss = jax.checkpoint(jnp.tanh)(jax.jit(jax.nn.relu)(jnp.where(loss < 1, loss, 2 * loss)))
        return jax.lax.scan(lambda carry, _: (carry * 0.5, None), loss, None, length=2)[0]

    fit(module(lambda self, batch: through(self.loss(batch)), base=Linear), random(1))
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("shape", [(), (1,)], ids=["a number", "an array"])
def test_debug_warns_of_numpys_random_numbers(shape: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    mine = np.random.default_rng()
    step = lambda self, batch: self.loss(batch) + (mine.normal(size=shape) * self.bias).sum()  # noqa: E731
    fit(module(step, base=Linear), random(2), debug=True)
    (message,) = warnings_of(caplog)
    assert "Made.training_step" in message and "numpy" in message and "nnx.Rngs" in message


@pytest.mark.parametrize("debug", [True, False])
def test_a_step_without_side_effects_is_not_warned_about(debug: bool, caplog: pytest.LogCaptureFixture) -> None:
    fit(Net(rate=0.5, rngs=nnx.Rngs(0)), random(2), debug=debug)
    assert warnings_of(caplog) == []


def test_a_step_may_train_its_parameters_itself(caplog: pytest.LogCaptureFixture) -> None:
    def init(self: Any) -> None:
        self.layer = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.optimizer = nnx.Optimizer(self.layer, optax.adam(0.1), wrt=nnx.Param)

    def step(self: Any, batch: Any) -> jax.Array:
        loss = lambda layer: jnp.mean((layer(batch["x"]) - batch["y"]) ** 2)  # noqa: E731
        value, grads = nnx.value_and_grad(loss)(self.layer)
        self.optimizer.update(self.layer, grads)
        return jax.lax.stop_gradient(value)

    model, by_hand = (module(step, base=jl.TrainModule, init=init, tx=optax.set_to_zero()) for _ in range(2))
    fit(model, random(3))
    assert warnings_of(caplog) == []
    for batch in random(3):
        by_hand.training_step(batch)
    assert_same(model, by_hand)


STRATEGIES = ("shard_map", "pmap", "replicas:4")
SIZES = (8, 8, 7, 3)


class Line(jl.TrainModule):
    def __init__(self, step: Callable[[Any, Any], Any], held: Any = 0.0) -> None:
        self.w = nnx.Param(jnp.array([1.0, -1.0, 0.5]))
        self.held = nnx.Variable(jnp.asarray(held))
        self.average = nnx.metrics.Average()
        self.step = step

    def errors(self, batch: Any) -> jax.Array:
        return (batch["x"] @ self.w[...] - batch["y"]) ** 2

    def training_step(self, batch: Any) -> Any:
        return self.step(self, batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def make_batches(*sizes: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(n, 3), "y": draw(n), "label": rng.integers(0, 4, size=n)} for n in sizes]


def fit_replicas(module: Any, strategy: Any, *callbacks: jl.Callback, sizes: Any = SIZES) -> jl.Trainer:
    devices = 1 if strategy == "single" else 4
    trainer = make_trainer(*callbacks, strategy=strategy, devices=devices)
    trainer.fit(module, make_batches(*sizes))
    return trainer


def also(do: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a step that does this with the module and the batch, and returns the mean of the errors."""
    return lambda module, batch: (do(module, batch), module.errors(batch).mean())[1]


def writing(value: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a step that writes this function of the held value and the batch."""
    return also(lambda module, batch: module.held.set_value(value(module.held[...], batch)))


def counting(module: Any, batch: Any) -> None:
    module.held[...] += (batch["x"] > 0).sum()


WRITES: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "a count of batches": (lambda old, b: old + 1, 0),
    "a count of rows": (lambda old, b: old + b["x"].shape[0], 0),
    "the rows of the last batch": (lambda old, b: jnp.asarray(b["x"].shape[0], jnp.int32), 0),
    "a float sum": (lambda old, b: old + (b["x"] > 0).sum(), 0.0),
    "decayed counts by label": (lambda old, b: 0.9 * old + jax.nn.one_hot(b["label"], 4).sum(0), [1.0] * 4),
    "whole counts by label": (lambda old, b: old.at[b["label"]].add(1), [0] * 4),
    "a running mean": (lambda old, b: 0.9 * old + 0.1 * b["x"].mean(0), [0.0] * 3),
    "a mean without a gradient": (lambda old, b: 0.5 * old + jax.lax.stop_gradient(b["x"].mean(0)), [0.0] * 3),
    "a mean that the rows' number divides": (lambda old, b: b["x"].sum(0) / b["x"].shape[0], [0.0] * 3),
    "what the rows do not touch": (lambda old, b: jnp.sort(old)[::-1] * 0.5, [3.0, 1.0, 2.0]),
}


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "shard_map", full=["pmap"]))
def test_what_a_step_writes_is_that_of_one_device(strategy: str) -> None:
    def write(module: Any, batch: Any) -> None:
        for name, (value, _) in WRITES.items():
            module.all[name][...] = value(module.all[name][...], batch)

    module: Any = Line(also(write))
    module.all = nnx.Dict({name: nnx.Variable(jnp.asarray(held)) for name, (_, held) in WRITES.items()})
    fit_replicas(module, strategy)
    for name, (value, held) in WRITES.items():
        expected = jnp.asarray(held)
        for batch in make_batches(*SIZES):
            expected = value(expected, jax.tree.map(jnp.asarray, batch))
        got = np.asarray(module.all[name][...])
        assert got.dtype == expected.dtype, name
        np.testing.assert_allclose(got, np.asarray(expected), rtol=1e-6, err_msg=name)


def test_a_statistic_that_replicas_cannot_merge_is_refused() -> None:
    module: Any = Line(also(lambda module, batch: module.spread.update(values=batch["x"])))
    module.spread = nnx.metrics.Welford()
    with pytest.raises(StateError, match=r"writes a value to spread\.m"):
        fit_replicas(module, "shard_map")


REFUSED: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
    "a sum that its own value resets": (
        lambda old, b: jax.lax.cond(old > 10, lambda: jnp.zeros(()), lambda: old) + (b["x"] ** 0).sum(),
        0.0,
    ),
    "a maximum": (lambda old, b: jnp.maximum(old, b["x"].max()), 0.0),
    "a variance": (lambda old, b: b["x"].var(0), [0.0] * 3),
    "a ratio of sums": (lambda old, b: (b["x"][:, 0] * b["label"]).sum() / b["label"].sum(), 0.0),
    "a queue of rows": (lambda old, b: jnp.concatenate([b["x"][:1, 0], old[1:]]), [0.0] * 3),
    "a sum and a constant": (lambda old, b: old + 1 + b["x"].sum(), 0.0),
    "an integer of a mean": (lambda old, b: b["label"].mean().astype(jnp.int32), 0),
    # What the first batch does not show:
    "a sum that resets above 1e6": (lambda old, b: jnp.where(old > 1e6, 0.0, old) + (b["x"] ** 0).sum(), 0.0),
    "a maximum of what is 0 so far": (lambda old, b: jnp.maximum(old, jnp.maximum(b["x"] - 50, 0).max()), 0.0),
    "a count that is 0 so far": (lambda old, b: old + (b["x"] > 50).sum(), 0.0),
}


@pytest.mark.parametrize(("case", "strategy"), [*zip(REFUSED, STRATEGIES * 4, strict=False)])
def test_what_differs_from_one_device_is_refused_by_name(case: str, strategy: str) -> None:
    value, held = REFUSED[case]
    module = Line(writing(value), held)
    with pytest.raises(StateError, match=r"Line\.training_step writes a value to held .* 4 replicas .*strategy='ddp'"):
        fit_replicas(module, strategy)
    np.testing.assert_array_equal(np.asarray(module.held[...]), np.asarray(held))
    if case == "a maximum":  # one replica sees the whole batch: there is nothing to refuse
        make_trainer(strategy=strategy.replace("4", "1"), devices=1).fit(module, make_batches(8))


DECLARED: dict[str, tuple[str, Callable[[Any, Any], Any], Any]] = {
    "a maximum": ("max", lambda old, b: jnp.maximum(old, b["x"].max()), 0.0),
    "a minimum": ("min", lambda old, b: jnp.minimum(old, b["label"].min()), 9),
    "a count that is 0 so far": ("sum", lambda old, b: old + (b["x"] > 2).sum(), 0.0),
    "a mean unless it is large": ("mean", lambda old, b: jnp.where(abs(m := b["x"].mean(0)) < 9, m, old), [0.0] * 3),
}


def test_what_is_declared_is_that_of_one_device() -> None:
    def write(module: Any, batch: Any) -> None:
        for name, (_, value, _) in DECLARED.items():
            module.all[name][...] = value(module.all[name][...], batch)

    module: Any = Line(also(write))
    held = {name: nnx.Variable(jnp.asarray(x), reduce_fx=how) for name, (how, _, x) in DECLARED.items()}
    module.all = nnx.Dict(held)
    fit_replicas(module, "shard_map")
    for name, (_, value, x) in DECLARED.items():
        expected = jnp.asarray(x)
        for batch in make_batches(*SIZES):
            expected = value(expected, jax.tree.map(jnp.asarray, batch))
        np.testing.assert_allclose(module.all[name][...], expected, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("reduce_fx", ["max", "mean", "meen"])
def test_a_declaration_that_the_first_batch_belies_is_refused(reduce_fx: str) -> None:
    module = Line(also(counting))
    module.held.set_metadata(reduce_fx=reduce_fx)
    with pytest.raises(
        StateError, match=rf"writes a value to held .* it is declared by reduce_fx='{reduce_fx}', which"
    ):
        fit_replicas(module, "shard_map")


@pytest.mark.parametrize("reset", [False, True])
def test_a_metric_reset_in_each_step_holds_the_last_batch(reset: bool) -> None:
    def update(module: Line, batch: Any) -> None:
        if reset:
            module.average.reset()
        module.average.update(values=batch["x"])

    module = Line(also(update))
    fit_replicas(module, "shard_map", sizes=(8, 4))
    x = np.concatenate([batch["x"] for batch in make_batches(8, 4)[reset:]])
    assert int(module.average.count[...]) == x.size
    assert float(module.average.compute()) == pytest.approx(x.mean(), rel=1e-5, abs=1e-6)


def test_a_step_of_one_size_writes_nothing_unclear() -> None:
    def add(module: Line, batch: Any) -> None:
        assert len(batch["x"]) == 2
        module.held[...] += len(batch["x"])

    with pytest.raises(StateError, match="could not be traced with more rows"):
        fit_replicas(Line(also(add), 0), "shard_map", sizes=(8,))


READS: dict[str, Callable[[Any, Any], Any]] = {
    "in the loss": lambda m, b: m.errors(b).mean() / jnp.maximum(m.held[...], 1),
    "in a metric": lambda m, b: (m.log("x", 1 / m.held[...]), m.errors(b).mean())[1],
    "in an output": lambda m, b: {"loss": m.errors(b).mean(), "out": b["x"] / m.held[...]},
}


@pytest.mark.parametrize("case", thinned(READS, "in a metric"))
def test_reading_what_replicas_count_in_parts_is_refused(case: str) -> None:
    with pytest.raises(StateError, match=r"training_step reads held, which adds up over the rows"):
        fit_replicas(Line(lambda module, batch: (counting(module, batch), READS[case](module, batch))[1]), "shard_map")


def test_a_count_that_is_logged_itself_is_that_of_one_device() -> None:
    log = also(lambda module, batch: (counting(module, batch), module.log("count", module.held[...])))
    trainer = fit_replicas(Line(log), "shard_map")
    expected = sum(int((batch["x"] > 0).sum()) for batch in make_batches(*SIZES))
    assert trainer.callback_metrics["count"] == pytest.approx(expected)


def sum_of_errors(module: Line, batch: Any) -> jax.Array:
    return module.errors(batch).sum() / 10


LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a sum": (sum_of_errors, "mean"),
    "a mean": (lambda m, b: m.errors(b).mean(), "sum"),
    "a sum and another term": (lambda m, b: m.errors(b).sum() + 0.1 * (m.w[...] ** 2).sum(), "mean"),
    "a sum and another term ": (lambda m, b: m.errors(b).sum() + 0.1 * (m.w[...] ** 2).sum(), "sum"),
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("cls", thinned([jl.strategies.ShardMapDDP, jl.strategies.PMap], jl.strategies.PMap))
def test_a_loss_of_another_reduction_is_refused(kind: str, cls: Any) -> None:
    step, reduction = LOSSES[kind]
    words = rf"Line\.training_step returns {kind.strip()} over the rows .*loss_reduction='{reduction}'.*strategies"
    with pytest.raises(ModuleError, match=words):
        fit_replicas(Line(step), cls(loss_reduction=reduction))


def test_a_sum_and_another_term_are_told_apart_under_batch_norm() -> None:
    class Normed(Line):
        def __init__(self) -> None:
            super().__init__(lambda m, b: m.errors(b | {"x": m.norm(b["x"])}).sum() + 9 * (m.w[...] ** 2).sum())
            self.norm = nnx.BatchNorm(3, rngs=nnx.Rngs(0))

    with pytest.raises(ModuleError, match="returns a sum and another term over the rows"):
        fit_replicas(Normed(), "shard_map")


SUMMED = [(jl.strategies.ShardMapDDP, 1), (jl.strategies.PMap, 3), (jl.strategies.Replicas, 1)]


@pytest.mark.parametrize(("cls", "accumulate"), thinned(SUMMED, SUMMED[1]))
def test_a_sum_trains_as_on_one_device_under_loss_reduction_sum(cls: Any, accumulate: int) -> None:
    result = []
    for strategy, devices in (("single", 1), (cls(loss_reduction="sum"), 4)):
        module, losses = Line(sum_of_errors), Losses()
        arguments = {"strategy": strategy, "devices": devices, "accumulate_grad_batches": accumulate}
        make_trainer(losses, max_epochs=2, **arguments).fit(module, make_batches(*SIZES))
        result.append((np.asarray(module.w[...]), losses.losses))
    np.testing.assert_allclose(result[1][0], result[0][0], rtol=1e-5)
    np.testing.assert_allclose(result[1][1], result[0][1], rtol=1e-5)


def test_a_loss_that_may_not_be_a_mean_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fit_replicas(Line(lambda m, b: (m.errors(b) * b["label"]).sum() / b["label"].sum()), "shard_map")
    assert "Line.training_step: the loss may differ from one device" in caplog.text
    caplog.clear()
    fit_replicas(Line(lambda m, b: m.errors(b).mean()), "shard_map")
    assert "may differ" not in caplog.text
    with pytest.raises(ArgumentError, match=r"PMap\(loss_reduction=\.\.\.\) takes one of 'mean', 'sum', got 'max'"):
        jl.strategies.PMap(loss_reduction="max")


LATER: dict[str, Callable[[Any, Any], Any]] = {
    "a weight that grows": lambda m, b: m.errors(b).mean() + jnp.minimum(m.global_step / 100, 1) * m.errors(b).sum(),
    "a later epoch": lambda m, b: jnp.where(m.current_epoch > 0, m.errors(b).sum(), m.errors(b).mean()),
    "a head that begins at 0": lambda m, b: m.errors(b).mean() + (jnp.exp(b["x"] @ m.head) - 1).sum(),
}


@pytest.mark.parametrize("case", LATER)
def test_a_loss_that_is_a_mean_in_the_first_step_only_is_not_silent(case: str, caplog: Any) -> None:
    module = Line(LATER[case])
    module.head = nnx.Param(jnp.zeros(3))
    try:
        fit_replicas(module, "shard_map")
    except ModuleError as error:
        assert "over the rows" in str(error)
    else:
        assert "the loss may differ from one device" in caplog.text


BY_ROWS: dict[str, Callable[[Any, Any], Any]] = {
    "a floor": lambda x, n: x.sum() / max(n, 4),
    "a branch": lambda x, n: x.mean() if n >= 8 else 2 * x.mean(),
    "a slice": lambda x, n: x[: min(n, 4)].mean(),
}


@pytest.mark.parametrize("case", BY_ROWS)
@pytest.mark.parametrize("rows", thinned([8, 16], 8, full=()))
def test_no_loss_that_branches_on_its_rows_is_silently_wrong(case: str, rows: int, caplog: Any) -> None:
    step = lambda m, b: BY_ROWS[case](m.errors(b), len(b["x"]))  # noqa: E731
    modules = [Line(step), Line(step)]
    fit_replicas(modules[0], "single", sizes=(rows,))
    try:
        fit_replicas(modules[1], "shard_map", sizes=(rows,))
    except ModuleError as error:
        assert "returns a sum over the rows" in str(error)
    else:
        assert np.allclose(modules[0].w[...], modules[1].w[...], rtol=1e-5) or "the loss may differ" in caplog.text


@pytest.mark.parametrize("case", BY_ROWS)
def test_a_write_that_branches_on_its_rows_is_refused(case: str) -> None:
    with pytest.raises(StateError, match=r"writes a value to held that depends on the rows of a batch"):
        fit_replicas(Line(writing(lambda old, b: BY_ROWS[case](b["y"], len(b["y"])))), "shard_map", sizes=(8,))


def logging_step(m: Any, b: Any) -> jax.Array:
    errors, n = m.errors(b), len(b["y"])
    m.log("floor", errors.sum() / max(n, 4))
    m.log("root", jnp.sqrt(errors.mean()))
    m.log("mean", errors.mean())
    m.log("sum", errors.sum(), reduce_fx="sum")
    m.log("max", errors.max(), reduce_fx="max")
    m.log("masked", (errors * b["label"]).sum() / b["label"].sum(), batch_size=b["label"].sum())
    return errors.mean()


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "replicas:4"))
def test_logged_values_that_replicas_may_change_are_named(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    fit_replicas(Line(logging_step), strategy, sizes=(8,))
    (message,) = [m for m in warnings_of(caplog) if "may differ" in m]
    assert "the logged 'floor', the logged 'root' may differ from one device" in message


COUPLED: dict[str, Callable[[jax.Array], jax.Array]] = {
    "softmax over the batch": lambda x: jax.nn.softmax(x, 0),
    "ranks": lambda x: x.argsort(0).argsort(0),
    "centred": lambda x: x - x.mean(0),
    "cumulative": lambda x: jnp.cumsum(x, 0),
    "reversed": lambda x: x[::-1],
}


@pytest.mark.parametrize("case", COUPLED)
@pytest.mark.parametrize("stage", ["predict", "training"])
def test_outputs_whose_rows_depend_on_others_are_named(case: str, stage: str, caplog: pytest.LogCaptureFixture) -> None:
    def step(module: Any, batch: Any) -> Any:
        x = batch["x"] @ module.w[...]
        outputs = {"own": jax.nn.softmax(batch["x"]) * x[:, None], "coupled": COUPLED[case](x)}
        return outputs if stage == "predict" else {"loss": module.errors(batch).mean(), **outputs}

    class Predicts(Line):
        predict_step = Line.training_step

    trainer = make_trainer(strategy="shard_map", devices=4)
    (trainer.predict if stage == "predict" else trainer.fit)(Predicts(step), make_batches(8))
    (message,) = warnings_of(caplog)
    assert f"Predicts.{stage}_step: the output 'coupled' may differ from one device" in message


@pytest.mark.parametrize("rows", thinned([4, 8], full=[4]))
def test_a_transformer_a_cnn_and_an_rnn_are_not_warned_of(rows: int, caplog: pytest.LogCaptureFixture) -> None:
    class Layers(jl.TrainModule):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.attend = nnx.MultiHeadAttention(2, 4, dropout_rate=0.1, decode=False, rngs=rngs)
            self.conv, self.norm = nnx.Conv(4, 4, (3,), rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
            self.rnn, self.first = nnx.RNN(nnx.LSTMCell(4, 4, rngs=rngs)), nnx.Param(jnp.zeros((1, 1, 4)))

        def predict_step(self, batch: Any) -> Any:
            x = jnp.repeat(batch["x"][..., None], 4, -1)
            x = jnp.concatenate([jnp.tile(self.first[...], (len(x), 1, 1)), x], 1)
            x = self.rnn(self.norm(self.conv(x + self.attend(x))))[:, -1]
            turned, ordered = jnp.real(jnp.fft.fft(x) * 1j), jax.vmap(jnp.sort)(x)
            return {"x": jax.nn.log_softmax(x), "class": x.argmax(-1), "sorted": ordered, "fft": turned}

        def training_step(self, batch: Any) -> Any:
            x = self.predict_step(batch)["x"]
            self.log("accuracy", (x.argmax(-1) == batch["label"]).mean())
            return -jnp.take_along_axis(x, batch["label"][:, None], 1).mean()

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(0.1)

    trainer = make_trainer(strategy="shard_map", devices=4)
    module = Layers(nnx.Rngs(0))
    trainer.fit(module, make_batches(rows, 12))
    trainer.predict(module, make_batches(rows, 12))
    assert warnings_of(caplog) == []


class Draws(jl.TrainModule):
    """Steps that draw, slice, and write to caches and to running means, as other people write them."""

    def __init__(self, step: Callable[[Any, Any], Any]) -> None:
        self.layer, self.drop = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        self.rngs, self.mean = nnx.Rngs(2), nnx.BatchStat(jnp.zeros(4, jnp.complex64))
        self.step = step

    def training_step(self, batch: Any) -> Any:
        return self.step(self, self.layer(batch["x"]))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def vae(m: Draws, z: jax.Array) -> jax.Array:
    return ((z + m.rngs.normal(z.shape) * jax.nn.sigmoid(z) - m.rngs.uniform((len(z), 1))) ** 2).mean()


def running_mean(m: Draws, z: jax.Array) -> jax.Array:
    m.mean[...] = 0.9 * m.mean[...] + 0.1 * (z + 1j * z**2).mean(0)
    return jnp.mean(abs(z) ** 2)


def mixture(m: Draws, z: jax.Array) -> jax.Array:
    share, order = jax.random.beta(m.rngs(), 0.4, 0.4), jax.random.permutation(m.rngs(), len(z))
    return ((share * z + (1 - share) * z[order] - jax.random.poisson(m.rngs(), 9.0, (len(z), 1))) ** 2).mean()


FOREIGN: dict[str, Callable[[Any, jax.Array], jax.Array]] = {
    "mixtures and counts": mixture,
    "a variational autoencoder": vae,
    "dropout": lambda m, z: (m.drop(z) ** 2).mean(),
    "a column set": lambda m, z: (m.drop(jnp.zeros_like(z).at[:, 1].set(z[:, 0])) ** 2).mean(),
    "a cache": lambda m, z: (jax.lax.dynamic_update_slice(jnp.zeros((len(z), 8)), z, (0, 2)) ** 2).mean(),
    "two views": lambda m, z: (m.drop(jnp.concatenate([z, z[:, ::-1]])) ** 2).mean(),
    "chunks": lambda m, z: (m.drop(jnp.concatenate([z[i : i + 2] for i in range(0, len(z), 2)])) ** 2).mean(),
    "a complex running mean": running_mean,
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_is_that_of_one_device_is_not_warned_of(case: str, caplog: pytest.LogCaptureFixture) -> None:
    fit_replicas(Draws(FOREIGN[case]), "shard_map", sizes=(16,))
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("case", ["first rows", "a sum"])
def test_a_step_that_draws_is_compared_all_the_same(case: str, caplog: pytest.LogCaptureFixture) -> None:
    if case == "a sum":
        with pytest.raises(ModuleError, match="returns a sum over the rows"):
            fit_replicas(Draws(lambda m, z: vae(m, z) * len(z)), "shard_map", sizes=(16,))
        return
    # Its program differs for more rows, by more than their number, and still its counts of draws are written.
    fit_replicas(Draws(lambda m, z: (m.drop(z)[:4] ** 2).mean()), "shard_map", sizes=(16,))
    assert "Draws.training_step: the loss may differ from one device" in caplog.text


def test_a_step_is_run_for_the_comparison_without_its_side_effects() -> None:
    seen = list[float]()

    def step(m: Line, b: Any) -> jax.Array:
        jax.debug.callback(lambda x: seen.append(float(x)), b["x"].sum())
        return m.errors(b).mean()

    fit_replicas(Line(step), "shard_map", sizes=(8, 8))
    jax.effects_barrier()
    assert len(seen) == 2 * 4


def test_a_step_that_cannot_be_run_elsewhere_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    def step(m: Line, b: Any) -> jax.Array:
        doubled = jax.pure_callback(lambda x: 2 * x, jax.ShapeDtypeStruct(b["x"].shape, np.float32), b["x"])
        return (m.errors(b) + 0 * doubled.sum(1)).mean()

    fit_replicas(Line(step), "shard_map", sizes=(8, 8))
    (message,) = warnings_of(caplog)
    assert "Line.training_step: what 4 replicas compute is not checked" in message


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "shard_map", full=["pmap"]))
def test_logged_sums_and_means_are_those_of_the_batch(strategy: str) -> None:
    of: dict[str, Callable[[Any], Any]] = {
        "sum": lambda x: x.sum(),
        "mean": lambda x: x.mean(),
        "rows": lambda x: x.shape[0],
        "one": lambda x: 1.0,
    }
    of_epoch = {"on_step": False, "on_epoch": True}
    names = [(name, fx) for name in of for fx in ("mean", "sum", "min", "max")]

    def log(module: Line, batch: Any) -> None:
        for name, fx in names:
            module.log(f"{name} {fx}", of[name](batch["x"]), reduce_fx=fx, batch_size=2, **of_epoch)
        module.log("weighted", batch["x"].mean(), batch_size=batch["label"].sum(), **of_epoch)

    trainer = fit_replicas(Line(also(log)), strategy)
    x = [batch["x"].astype(np.float64) for batch in make_batches(*SIZES)]
    weights = [batch["label"].sum() for batch in make_batches(*SIZES)]
    expected = {f"{name} {fx}": getattr(np, fx)([of[name](part) for part in x]) for name, fx in names}
    expected["weighted"] = np.average([part.mean() for part in x], weights=weights)
    assert dict(trainer.callback_metrics) == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("strategy", thinned(STRATEGIES[:2], "pmap"))
def test_returned_sums_are_those_of_the_batch(strategy: str) -> None:
    def step(module: Line, batch: Any) -> Any:
        count = (batch["x"] > 0).sum()
        return {"loss": module.errors(batch).mean(), "count": count, "sums": batch["x"].sum(0)}

    seen = []
    keep = hooks(on_train_batch_end=lambda t, m, o, b, i: seen.append((dict(o), b)))
    fit_replicas(Line(step), strategy, keep)
    for outputs, batch in seen:
        assert int(outputs["count"]) == (batch["x"] > 0).sum()
        np.testing.assert_allclose(np.asarray(outputs["sums"]), batch["x"].sum(0), rtol=1e-5, atol=1e-6)


def noise(key: Any, batch: Any) -> jax.Array:
    return jax.random.normal(key, batch["x"].shape)


def noisy(module: Line, batch: Any) -> Any:
    """Return the loss under noise from a raw key that the module holds, or from a constant one."""
    if module.held[...].ndim:
        module.held[...], key = jax.random.split(module.held[...])
    else:
        key = jax.random.fold_in(jax.random.key(0), module.global_step)
    return (module.errors(batch | {"x": batch["x"] + noise(key, batch)})).mean()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_noise_for_the_rows_of_each_replica_is_refused(strategy: str) -> None:
    held = jax.random.PRNGKey(0) if strategy == "shard_map" else 0.0
    with pytest.raises(StateError, match="draws random numbers for its rows from a key that is the same on every"):
        fit_replicas(Line(noisy, held), strategy)


@pytest.mark.parametrize("strategy", thinned(STRATEGIES[:2], "pmap"))
def test_a_users_key_differs_between_replicas_and_continues(strategy: str) -> None:
    def step(module: Line, batch: Any) -> Any:
        key, sub = jax.random.split(module.held[...])
        module.held[...] = key
        return {"loss": module.errors(batch).mean(), "noise": noise(sub, batch)}

    seen = []
    keep = hooks(on_train_batch_end=lambda t, m, o, b, i: seen.append(np.asarray(o["noise"])))
    module = Line(step, jax.random.key(3))
    fit_replicas(module, strategy, keep)
    assert len({row.tobytes() for part in seen for row in part}) == sum(SIZES)
    key = jax.random.key(3)
    for _ in SIZES:
        key, _ = jax.random.split(key)
    for held in jax.random.key_data(module.held[...]).addressable_shards:  # on every device, not on the first alone
        np.testing.assert_array_equal(held.data, jax.random.key_data(key))


def test_a_validation_that_draws_alike_everywhere_is_refused() -> None:
    class Validated(Line):
        def validation_step(self, batch: Any) -> None:
            self.log("val", noise(jax.random.key(0), batch).mean())

    module = Validated(lambda m, b: m.errors(b).mean())
    trainer = jl.Trainer(strategy="shard_map", devices=4, max_epochs=1, logger=False)
    with pytest.raises(JaxlitError, match=r"Validated\.validation_step draws random numbers for its rows"):
        trainer.fit(module, make_batches(8), make_batches(8))


class Tables(jl.TrainModule):
    """Has arrays in no Variable: one of a layer of flax, one that is read, one that no gradient reaches."""

    def __init__(self) -> None:
        self.layer = nnx.WeightNorm(nnx.Linear(3, 3, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
        self.bias, self.limit, self.spare = jnp.zeros(3), jnp.ones(3), nnx.Param(jnp.zeros(2))

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean((self.layer(batch["x"]) + self.bias) ** 2 * (batch["x"] < self.limit))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def test_arrays_that_no_optimizer_reaches_are_named_once_a_run(caplog: pytest.LogCaptureFixture) -> None:
    given: Any = {"default_root_dir": "run", "resume": "auto"}
    fit(Tables(), make_batches(8), max_epochs=1, **given)
    unused, plain = warnings_of(caplog)
    assert "The gradient is zero: spare." in unused and "PathContains('spare')" in unused
    names = "bias"
    if not isinstance(Tables().layer.scales[("kernel",)], nnx.Param):  # before flax 0.12.12
        names += f", layer.scales.('kernel',) (nnx.WeightNorm holds its scale so in flax {flax.__version__})"
    assert f"and stay as they are: {names}." in plain
    caplog.clear()
    fit(Tables(), make_batches(8), max_epochs=2, **given)
    assert warnings_of(caplog) == []
