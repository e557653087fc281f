"""What is state of a module is what nnx splits: any Variable, attribute and pytree trains as under `nnx.jit`."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.journal import hooks
from kit.refusals import refuses, warnings_of
from kit.trainers import STRATEGIES, fit, thinned

import jaxlit as jl
from jaxlit.errors import StateError
from jaxlit.texts import is_key

DATA = [{"x": x} for x in np.random.default_rng(0).normal(size=(6, 8, 4)).astype(np.float32)]


@flax.struct.dataclass
class Stats:
    """A pytree that is no module: of flax, with a leaf that is no array."""

    mean: Any
    power: float = flax.struct.field(pytree_node=False, default=2.0)


class Plain(nnx.Module, pytree=False):
    def __init__(self) -> None:
        self.scales, self.bias = [jnp.ones(4), jnp.full(2, 2.0)], nnx.Param(jnp.zeros(()))
        self.shift = jnp.arange(4.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x * self.scales[0] + self.bias[...] + self.shift


def counts(m: Any, x: jax.Array) -> jax.Array:
    m.extra = m.extra.replace(mean=m.extra.mean + 1)
    return x * m.extra.mean.sum()


def counts_in_a_dict(m: Any, x: jax.Array) -> jax.Array:
    value = m.extra.get_value()
    m.extra.set_value(value | {"a": value["a"] + 1})
    return x * value["a"] * value["b"]["c"]


def draws(m: Any, x: jax.Array) -> jax.Array:
    key, m.extra["k"] = jax.random.split(m.extra["k"])
    return x + jax.random.normal(key, (4,))


# What an attribute holds, and what the model does with it.
KINDS: dict[str, tuple[Any, Any]] = {
    "None": (lambda: nnx.Variable(None), lambda m, x: x),
    "a number": (lambda: nnx.Variable(0.5), lambda m, x: x * m.extra.get_value()),
    "a tuple": (lambda: nnx.Cache((2, 2)), lambda m, x: x.reshape(-1, *m.extra.get_value()).reshape(x.shape)),
    "a number as data": (lambda: nnx.data(3), lambda m, x: x * m.extra),
    "a text": (lambda: nnx.Variable("relu"), lambda m, x: getattr(jax.nn, m.extra.get_value())(x)),
    "a dataclass": (lambda: nnx.data(Stats(jnp.arange(4.0))), lambda m, x: x + m.extra.mean**m.extra.power),
    "a dataclass that steps write": (lambda: nnx.data(Stats(jnp.ones(4))), counts),
    "a dict of lists": (
        lambda: nnx.data({"a": [jnp.ones(4)], "b": 2.0}),
        lambda m, x: x * m.extra["a"][0] * m.extra["b"],
    ),
    "a Param of a pytree": (lambda: nnx.Param(Stats(jnp.ones(4))), lambda m, x: x * m.extra.get_value().mean),
    "a dict in a Variable": (lambda: nnx.Variable({"a": jnp.ones(4), "b": {"c": 2.0}}), counts_in_a_dict),
    "a Param of a dict": (lambda: nnx.Param({"a": jnp.ones(4)}), lambda m, x: x * m.extra.get_value()["a"]),
    "a Param in a pytree": (lambda: nnx.data(Stats(nnx.Param(jnp.ones(4)))), lambda m, x: x * m.extra.mean[...]),
    "no pytree": (Plain, lambda m, x: m.extra(x)),
    "a key in a dict that steps split": (lambda: nnx.data({"k": jax.random.key(1)}), draws),
}


class Model(jl.TrainModule):
    def __init__(self, kind: str) -> None:
        self.kind, self.layer = kind, nnx.Linear(4, 4, rngs=nnx.Rngs(0))
        self.extra: Any = KINDS[kind][0]()

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layer(KINDS[self.kind][1](self, x))

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean((self(batch["x"]) - 1) ** 2)

    def predict_step(self, batch: Any) -> jax.Array:
        return self(batch["x"])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.05)


def leaves(model: Any) -> dict[str, Any]:
    state = jax.tree_util.tree_leaves_with_path(nnx.as_pure(nnx.state(model, graph=True)))
    return {jax.tree_util.keystr(path): x for path, x in state}


def assert_alike(model: Any, expected: Any) -> None:
    found, wanted = leaves(model), leaves(expected)
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        if isinstance(x, str):
            assert found[name] == x
        elif is_key(x):
            assert (jax.random.key_data(found[name]) == jax.random.key_data(x)).all()
        else:
            np.testing.assert_allclose(found[name], x, rtol=2e-5, atol=1e-6, err_msg=name)


def by_hand(model: Any, batches: Any) -> Any:
    # Not jit: under nnx.jit a number in a Variable comes as an array, which is no shape.
    graphdef, params, rest = nnx.split(model, nnx.Param, ..., graph=True)
    tx = model.configure_optimizers()
    opt_state = tx.init(params)
    for batch in batches:

        def loss(params: Any, rest: Any = rest, batch: Any = batch) -> Any:
            merged = nnx.merge(graphdef, params, rest, copy=True)
            return merged.training_step(batch), nnx.split(merged, nnx.Param, ..., graph=True)[2]

        grads, rest = jax.grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    return nnx.merge(graphdef, params, rest)


EVERY = [(kind, strategy) for kind in KINDS for strategy in STRATEGIES]


@pytest.mark.parametrize(
    ("kind", "strategy"),
    thinned(EVERY, *((kind, "fsdp" if i % 2 else "single") for i, kind in enumerate(KINDS)), full=EVERY[::4]),
)
def test_any_state_trains_as_by_hand(kind: str, strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Model(kind)
    fit(model, DATA, strategy=strategy)
    assert_alike(model, by_hand(Model(kind), DATA))
    # An array attribute has a gradient, and is trained by no one: one warning says so.
    assert [text for text in warnings_of(caplog) if "by arrays that are in no nnx.Variable" not in text] == []


@pytest.mark.parametrize(
    "kind",
    thinned(
        KINDS, "a number", "a dataclass that steps write", "a dict in a Variable", "a Param in a pytree", "no pytree"
    ),
)
def test_it_is_saved_restored_and_resumed(kind: str) -> None:
    whole = Model(kind)
    fit(whole, DATA, max_epochs=2)
    given: Any = {"default_root_dir": "run", "resume": "auto"}
    first = Model(kind)
    fit(first, DATA, max_epochs=1, **given)
    assert_alike(Model.load_from_checkpoint("run"), first)
    resumed = Model(kind)
    fit(resumed, DATA, max_epochs=2, **given)
    assert_alike(resumed, whole)
    jl.save_weights(resumed, "x.safetensors")
    loaded = Model(kind)
    jl.load_weights(loaded, "x.safetensors", strict=False)
    names = {name for name, x in leaves(loaded).items() if not (isinstance(x, str) or is_key(x) or "rngs" in name)}
    for name in names if kind != "a number as data" else ():
        np.testing.assert_allclose(leaves(loaded)[name], leaves(resumed)[name], err_msg=name)


def test_a_number_is_that_of_the_checkpoint() -> None:
    model = Model("a number")
    model.extra.set_value(0.75)
    fit(model, DATA, default_root_dir="run")
    assert Model.load_from_checkpoint("run").extra.get_value() == 0.75
    other = Model("a number")
    predicted = jl.Trainer(logger=False).predict(other, DATA[:1], ckpt_path="run")
    np.testing.assert_allclose(predicted[0], model(DATA[0]["x"]), rtol=1e-5)
    assert other.extra.get_value() == 0.5
    resumed = Model("a number")
    fit(resumed, DATA, default_root_dir="run", resume="auto", max_epochs=2)
    assert resumed.extra.get_value() == 0.75
    again = Model("a number")
    again.extra.set_value(0.75)
    assert_alike(resumed, by_hand(again, DATA * 2))


def test_a_step_or_hook_that_changes_a_number_is_told_what_to_do() -> None:
    class Counting(Model):
        def training_step(self, batch: Any) -> jax.Array:
            self.extra.set_value(self.extra.get_value() + 1)
            return super().training_step(batch)

    refuses(StateError, lambda: fit(Counting("a number"), DATA), r"changed extra from 0\.5 to 1\.5")
    change = hooks("Changes", on_train_epoch_start=lambda trainer, module: module.extra.set_value(0.1))
    refuses(
        StateError, lambda: fit(Model("a number"), DATA, None, change), r"Changes\.on_train_epoch_start .*: set extra\."
    )


@pytest.mark.parametrize("kind", ["a number", "a dataclass", "None"])
def test_own_loops_and_populations_take_it(kind: str) -> None:
    state, step = jl.compile_step(Model(kind), batch=DATA[0], strategy="fsdp")
    for batch in DATA:
        state, _ = step(state, batch)
    expected = by_hand(Model(kind), DATA)
    np.testing.assert_allclose(state.params["layer"]["kernel"], expected.layer.kernel[...], rtol=2e-5, atol=1e-6)
    best = jl.fit_many(Model, [{"kind": kind}, {"kind": kind}], DATA, max_epochs=1).module(1)
    assert_alike(best, expected)


def test_members_of_a_population_have_numbers_and_metrics_of_their_own() -> None:
    class Scaled(Model):
        def __init__(self, scale: float) -> None:
            super().__init__("None")
            self.scale, self.metric = nnx.Variable(scale), Precision()

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.layer(x * self.scale.get_value())

        def validation_step(self, batch: Any) -> None:
            self.metric.update(self(batch["x"]) > 0)
            self.log("so_far", self.metric.compute(), reduce_fx="max")

    found = jl.fit_many(Scaled, [{"scale": 0.5}, {"scale": 2.0}], DATA, DATA[:3], max_epochs=1)
    for i, scale in enumerate((0.5, 2.0)):
        trainer = fit(alone := Scaled(scale), DATA, DATA[:3], num_sanity_val_steps=0)
        assert_alike(found.module(i).layer, alone.layer)
        assert found.metrics[i]["so_far"] == pytest.approx(trainer.callback_metrics["so_far"])


@pytest.mark.parametrize("kind", thinned(KINDS, "a dataclass", "a number as data", "no pytree"))
def test_it_is_planned_and_built_lazily(kind: str) -> None:
    plan = jl.Trainer(logger=False).plan(jl.lazy(Model, kind), DATA, devices=8, strategies=["fsdp"])
    assert plan.plans[0].total > 0
    trainer = fit(jl.lazy(Model, kind), DATA, strategy="fsdp")
    assert_alike(trainer.module, by_hand(Model(kind), DATA))


class Precision(nnx.Module, pytree=False):
    """A metric as metrax has them: a dataclass that each update replaces."""

    def __init__(self) -> None:
        self.counts = Counts(jnp.zeros(()), jnp.zeros(()))

    def update(self, right: jax.Array) -> None:
        self.counts = Counts(self.counts.right + right.sum(), self.counts.all + right.size)

    def compute(self) -> jax.Array:
        return self.counts.right / self.counts.all

    def reset(self) -> None:
        self.__init__()


@flax.struct.dataclass
class Counts:
    right: Any
    all: Any


class Measured(Model):
    def __init__(self) -> None:
        super().__init__("None")
        self.metric, self.average = Precision(), nnx.metrics.Average("right")

    def validation_step(self, batch: Any) -> None:
        right = (self(batch["x"]) > 0).mean(1)
        self.metric.update(right)
        self.average.update(right=right)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"metric": self.metric.compute(), "average": self.average.compute()})


@pytest.mark.parametrize("strategy", thinned(["single", "ddp", "fsdp"], "single", "fsdp"))
def test_metrics_that_a_module_holds_are_of_each_validation(strategy: str) -> None:
    model, seen = Measured(), list[Any]()

    def look(trainer: jl.Trainer, module: Any) -> None:
        kernel, bias = np.asarray(module.layer.kernel[...]), np.asarray(module.layer.bias[...])
        expected = np.mean(np.concatenate([batch["x"] for batch in val]) @ kernel + bias > 0)
        seen.append((expected, trainer.callback_metrics["metric"], trainer.callback_metrics["average"]))

    given: Any = {"strategy": strategy, "max_epochs": 2, "num_sanity_val_steps": 0}
    val = [*DATA[:3], {"x": DATA[3]["x"][:5]}]  # the last of which traces the step again
    trainer = fit(model, DATA, val, hooks(on_validation_end=look), **given)
    assert len(seen) == 2
    for expected, *found in seen:
        assert found == [pytest.approx(expected, rel=1e-5)] * 2
    assert trainer.validate(model, val)[0]["metric"] == pytest.approx(seen[-1][0], rel=1e-5)
    assert float(model.metric.counts.all) == 0.0
