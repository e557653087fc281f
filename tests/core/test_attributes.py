"""Plain attributes of a module: what a step leaves in them, and functions that hold weights."""

import functools
import types
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.by_hand import HandLoop, assert_same, mean
from kit.modules import Linear, Mean, module
from kit.refusals import fit_refuses, warnings_of
from kit.trainers import STRATEGIES, fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import ModuleError, StateError


class Noting(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.seen, self.last, self.kinds, self.latest = 0, [], {}, {"a"}, None
        self.part = nnx.Dropout(0.5)  # a sub-module with plain attributes
        self.queue, self.several = deque([1]), {"a": [[1]]}
        self.aux = jnp.zeros(())


VALUES: dict[str, tuple[Callable[..., Any], str]] = {
    "count": (lambda self, loss: setattr(self, "n", self.n + 1), "n"),
    "append a shape": (lambda self, loss: self.seen.append(loss.shape), "seen"),
    "add to a set": (lambda self, loss: self.kinds.add("b"), "kinds"),
    "count in a part": (lambda self, loss: setattr(self.part, "rate", 0.1), "part.rate"),
}
ARRAYS: dict[str, tuple[Callable[..., Any], str]] = {
    "append": (lambda self, loss: self.seen.append(loss), "seen"),
    "set an item": (lambda self, loss: self.last.update(loss=loss), "last"),
    "set": (lambda self, loss: setattr(self, "latest", loss), "latest"),
    "append to a deque": (lambda self, loss: self.queue.append(loss), "queue"),
    "append in a list of a dict": (lambda self, loss: self.several["a"][0].append(loss), "several"),
    "set a new one": (lambda self, loss: setattr(self, "fresh", loss), "fresh"),
    "a dict in place of an array": (lambda self, loss: setattr(self, "aux", nnx.data({"y": loss})), "aux"),
    "an array of another shape": (lambda self, loss: setattr(self, "aux", jnp.stack([loss])), "aux"),
    "a pytree": (lambda self, loss: setattr(self, "latest", nnx.data(Scale(loss))), "latest"),
    "what nnx sows": (lambda self, loss: setattr(self, "sown", nnx.Intermediate((loss,))), "sown[0]"),
}


def writes(do: Callable[..., Any], stage: str) -> Any:
    """Return a module that does this with the loss in the step of a stage."""

    def step(self: Any, batch: Any) -> Any:
        loss = jnp.mean(self.error(batch) ** 2)
        do(self, loss)
        return loss if stage in ("training", "predict") else None

    return module(base=Noting, **{stage: step})


def is_untouched(model: Any) -> bool:
    """Return whether no traced value, and no other, is left in the module."""
    values = model.n, model.seen, model.last, model.kinds, model.latest, model.queue, model.several, float(model.aux)
    first = 0, [], {}, {"a"}, None, deque([1]), {"a": [[1]]}, 0.0
    return values == first and not hasattr(model, "fresh") and not hasattr(model, "sown")


@pytest.mark.parametrize("write", VALUES)
def test_another_value_that_a_training_step_sets_is_refused(write: str) -> None:
    do, attribute = VALUES[write]
    model = writes(do, "training")
    words = (rf"Made\.training_step changed the attribute {attribute} to ", "nnx.Variable", r"self\.log")
    fit_refuses(StateError, *words, model=model, val=numbered(1))
    assert is_untouched(model)


@pytest.mark.parametrize("write", ARRAYS)
def test_arrays_that_a_step_leaves_in_attributes_are_dropped(write: str, caplog: pytest.LogCaptureFixture) -> None:
    do, attribute = ARRAYS[write]
    model = writes(do, "training")
    fit(model, numbered(4), max_epochs=2)
    assert is_untouched(model) and float(model.w[...][0]) == mean([[1], [2], [3], [4]] * 2)
    (text,) = warnings_of(caplog)
    assert text.startswith(f"Made.training_step left arrays or the like in {attribute}, where")


@pytest.mark.parametrize("stage", ["validation", "predict"])
@pytest.mark.parametrize("write", thinned([*VALUES, *ARRAYS], "count", "set", "what nnx sows"))
def test_an_evaluation_drops_what_it_leaves_in_attributes(write: str, stage: str, caplog: Any) -> None:
    model = writes((VALUES | ARRAYS)[write][0], stage)
    trainer = make_trainer()
    (trainer.validate if stage == "validation" else trainer.predict)(model, numbered(2))
    assert is_untouched(model)
    assert len([text for text in warnings_of(caplog) if "They are dropped when the step ends" in text]) == 1


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "single", "fsdp"))
def test_an_array_attribute_that_a_step_sets_is_state(strategy: str) -> None:
    model = writes(lambda self, loss: setattr(self, "aux", self.aux + 1), "training")
    fit(model, numbered(4), strategy=strategy)
    assert float(model.aux) == 4.0


def test_plain_attributes_that_a_step_only_reads_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    def init(self: Any) -> None:
        Mean.__init__(self)
        self.names = {1: "one", 2: float("nan")}
        self.kinds, self.scale, self.tx = {"a", 1}, np.float32(2), optax.sgd(0.1)
        self.act, self.sizes = jax.nn.relu, [3, None, (1, (2,)), "x"]
        self.queue, self.again = deque([1]), [self.kinds]
        self.again.append(self.again)

    shapes: list[Any] = []

    def step(self: Any, batch: Any) -> jax.Array:
        assert self.names[1] == "one" and "a" in self.kinds and self.sizes[0] == 3
        shapes.append(batch["x"].shape)
        return self.act(jnp.mean(self.error(batch) ** 2)) * self.scale

    assert fit(module(step, init=init), numbered(2)).global_step == 2
    assert warnings_of(caplog) == []


class Held(Linear):
    """A `Linear` with a layer, and an attribute that is a function."""

    def __init__(self, attribute: Callable[..., Any]) -> None:
        super().__init__()
        self.layer = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
        self.f = attribute(self)

    def __call__(self, x: jax.Array) -> jax.Array:
        f: Any = self.f
        return super().__call__((f if callable(f) else f[0] if isinstance(f, list) else f.run)(self.layer(x)))

    def use_layer(self, x: jax.Array) -> jax.Array:
        return self.layer(x)


def merged(layer: Any) -> Callable[..., Any]:
    graphdef, state = nnx.split(layer)
    return lambda x: nnx.merge(graphdef, state)(x)


def of_layer(layer: Any) -> Callable[..., Any]:
    return lambda x: jax.nn.relu(layer(x))


class Scale(NamedTuple):
    factor: Any

    def of(self, x: jax.Array) -> jax.Array:
        return self.factor * x


def unfilled() -> Callable[..., Any]:
    if False:
        later = jnp.tanh
    return lambda x: x if x.ndim else later(x)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "closure": (lambda m: of_layer(m.layer), "Linear"),
    "self": (lambda m: lambda x: m.layer(x), "Held"),
    "bound method": (lambda m: m.use_layer, "Held"),
    "bound method of a layer": (lambda m: m.layer.__call__, "Linear"),
    "partial": (lambda m: functools.partial(nnx.Linear.__call__, m.layer), "Linear"),
    "default": (lambda m: lambda x, layer=m.layer: layer(x), "Linear"),
    "list": (lambda m: [of_layer(m.layer)], "Linear"),
    "state that was split": (lambda m: merged(m.layer), "nnx.Param"),
    "plain object": (lambda m: types.SimpleNamespace(run=m.layer), "Linear"),
    "jit": (lambda m: nnx.jit(of_layer(m.layer)), "Linear"),
    "variable": (lambda m: (lambda v: lambda x: x * v[...])(nnx.Param(jnp.ones(3))), "nnx.Param"),
    "numpy": (lambda m: (lambda v: lambda x: x * jnp.asarray(v[...]))(nnx.Param(np.ones(3, np.float32))), "nnx.Param"),
    "pytree": (lambda m: (lambda v: lambda x: x * v.get_value()[0])(nnx.Param([jnp.ones(3)])), "nnx.Param"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_function_that_holds_weights_is_refused(case: str) -> None:
    attribute, held = REFUSED[case]
    with pytest.raises(ModuleError, match=rf"training_step uses Held\.f, a \w+ that holds .*{held}, .* write a method"):
        fit(Held(attribute), random(1))


def test_so_is_one_that_a_later_run_uses() -> None:
    model = Held(lambda m: jnp.tanh)
    fit(model, random(1))
    model.f = of_layer(model.layer)
    with pytest.raises(ModuleError, match=r"training_step uses Held\.f, a function"):
        fit(model, random(1))


@pytest.mark.parametrize("case", thinned(REFUSED, "closure", "plain object", "jit"))
def test_it_trains_if_the_step_does_not_use_them(case: str) -> None:
    models = []
    for attribute in (REFUSED[case][0], lambda m: None):
        model: Any = Held(lambda m: jnp.tanh)
        model.unused = attribute(model)
        fit(model, random(2))
        models.append(model)
    assert_same(models[0], models[1])


def test_so_is_one_of_a_lazy_module_and_in_a_sequential() -> None:
    with pytest.raises(ModuleError, match=r"uses Held\.f, a function"):
        fit(jl.lazy(Held, lambda m: of_layer(m.layer)), random(1))
    with pytest.raises(ModuleError, match=r"uses Held\.f\.layers"):
        fit(Held(lambda m: nnx.Sequential(jnp.tanh, of_layer(m.layer))), random(1))


TRAINED: dict[str, Callable[..., Any]] = {
    "a function": lambda m: jnp.tanh,
    "partial of plain values": lambda m: functools.partial(jnp.clip, min=-1.0),
    "method of a tuple": lambda m: Scale(1.0).of,
    "closure that is not filled yet": lambda m: unfilled(),
    "sequential": lambda m: nnx.Sequential(nnx.Linear(3, 3, rngs=nnx.Rngs(2)), jnp.tanh),
}


@pytest.mark.parametrize("case", thinned(TRAINED, *[*TRAINED][::2]))
def test_a_function_without_weights_trains_as_by_hand(case: str) -> None:
    models = [Held(TRAINED[case]), Held(TRAINED[case])]
    models[0].make = functools.partial(nnx.Linear, 4, 4, rngs=nnx.Rngs(0))  # makes layers, and is none
    batches = [*random(3), {name: x[:3] for name, x in random(1)[0].items()}]  # a tail traces the step again
    fit(models[0], batches)
    assert_same(models[0], HandLoop(models[1])(*batches).module)
