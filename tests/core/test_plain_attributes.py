"""A step's changes to plain attributes of its module are refused: no compiled step repeats them."""

import dataclasses
import functools
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered
from kit.modules import Mean, module
from kit.refusals import fit_refuses, warnings_of
from kit.trainers import fit, thinned

from jaxlit.errors import StateError


class Stats:
    """An object of the author's own."""

    def __init__(self) -> None:
        self.n, self.seen, self._seen, self._cache = 0, list[Any](), list[Any](), dict[str, Any]()

    @functools.cached_property
    def table(self) -> np.ndarray:
        return np.ones(3)

    def computed_once(self) -> np.ndarray:
        self._cache["ones"] = self._ones = np.ones(3)
        return self._ones


@dataclasses.dataclass(slots=True)
class Slots:
    n: int = 0


class Part(nnx.Module):
    """A sub-module with a plain attribute."""

    def __init__(self) -> None:
        self.calls = 0


class Noting(Mean):
    """Plain attributes that a step may be tempted to write to."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.seen, self.last, self.kinds, self.latest = 0, [], {}, {"a"}, None
        self.part = Part()
        self.queue, self.space, self.slots = deque([1]), types.SimpleNamespace(n=0), Slots()
        self.stats, self.several = Stats(), {"a": [Stats()]}


WRITES: dict[str, tuple[Callable[..., Any], str]] = {
    "count": (lambda self, loss: setattr(self, "n", self.n + 1), "n"),
    "append": (lambda self, loss: self.seen.append(loss), "seen"),
    "append a shape": (lambda self, loss: self.seen.append(loss.shape), "seen"),
    "set an item": (lambda self, loss: self.last.update(loss=loss), "last"),
    "add to a set": (lambda self, loss: self.kinds.add("b"), "kinds"),
    "set": (lambda self, loss: setattr(self, "latest", loss), "latest"),
    "count in a part": (lambda self, loss: setattr(self.part, "calls", 1), "part.calls"),
    "append to a deque": (lambda self, loss: self.queue.append(loss), "queue"),
    "count in a namespace": (lambda self, loss: setattr(self.space, "n", 1), "space.n"),
    "count in slots": (lambda self, loss: setattr(self.slots, "n", 1), "slots.n"),
    "count in an object": (lambda self, loss: setattr(self.stats, "n", 1), "stats.n"),
    "set a new one of an object": (lambda self, loss: setattr(self.stats, "fresh", 1), "stats.fresh"),
    "append in an object": (lambda self, loss: self.stats.seen.append(loss), "stats.seen"),
    "append to what an object keeps to itself": (lambda self, loss: self.stats._seen.append(loss), "stats._seen"),
    "count in an object of a list of a dict": (lambda self, loss: setattr(self.several["a"][0], "n", 1), "several.n"),
    "put another object there": (lambda self, loss: self.several["a"].__setitem__(0, Stats()), "several"),
    "set a new one": (lambda self, loss: setattr(self, "fresh", loss), "fresh"),
}


@pytest.mark.parametrize("stage", thinned(["training", "validation"], "training"))
@pytest.mark.parametrize("write", WRITES)
def test_a_side_effect_of_a_step_is_refused_by_its_attribute_and_taken_back(write: str, stage: str) -> None:
    do, attribute = WRITES[write]

    def step(self: Any, batch: Any) -> Any:
        loss = jnp.mean(self.error(batch) ** 2)
        do(self, loss)
        return loss if stage == "training" else None

    model = module(base=Noting, **{stage: step})
    words = (rf"Made\.{stage}_step changed the attribute {attribute}\.", "nnx.Variable", r"self\.log")
    fit_refuses(StateError, *words, model=model, val=numbered(1))
    assert (model.n, model.seen, model.last, model.kinds, model.latest) == (0, [], {}, {"a"}, None)
    for stats in (model.stats, model.several["a"][0]):
        assert vars(stats) == {"n": 0, "seen": [], "_seen": [], "_cache": {}}
    assert (model.queue, model.space.n, model.slots.n) == (deque([1]), 0, 0)
    assert not hasattr(model, "fresh")  # no traced value is left in the module


COLLECTED: list[Any] = []
HOLDER = Stats()


def collect(loss: jax.Array) -> None:
    COLLECTED.append(loss)


INTO: dict[str, Callable[[jax.Array], Any]] = {
    "COLLECTED, by a helper": collect,
    "COLLECTED, by a comprehension": lambda loss: [COLLECTED.append(x) for x in (loss, loss)],
    "HOLDER.seen": lambda loss: HOLDER.seen.append(loss),
    "HOLDER.last": lambda loss: setattr(HOLDER, "last", loss),
}


@pytest.mark.parametrize("where", INTO)
def test_so_is_one_that_comes_there_by_a_helper_a_comprehension_or_an_object(where: str) -> None:
    def step(self: Any, batch: Any) -> jax.Array:
        do(loss := jnp.mean(self.error(batch) ** 2))
        return loss

    do = INTO[where]
    words = rf"Made\.training_step put a traced array into {where.partition(',')[0]}, which lies outside"
    fit_refuses(StateError, words, model=module(step))
    assert COLLECTED == [] and vars(HOLDER) == {"n": 0, "seen": [], "_seen": [], "_cache": {}}


@pytest.mark.parametrize("where", ["a global", "a variable around it"])
def test_a_traced_array_that_a_step_puts_outside_of_its_module_is_refused_by_name(where: str) -> None:
    collected: dict[str, Any] = {"kept": 1}

    def into_global(self: Any, batch: Any) -> jax.Array:
        COLLECTED.append(loss := jnp.mean(self.error(batch) ** 2))
        return loss

    def around(self: Any, batch: Any) -> jax.Array:
        collected["loss"] = loss = jnp.mean(self.error(batch) ** 2)
        return loss

    step, name = (into_global, "COLLECTED") if where == "a global" else (around, "collected")
    words = (rf"Made\.training_step put a traced array into {name}, which lies outside", r"self\.log")
    fit_refuses(StateError, *words, model=module(step))
    assert COLLECTED == [] and collected == {"kept": 1}


def test_plain_attributes_that_a_step_only_reads_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    def init(self: Any) -> None:
        Mean.__init__(self)
        self.names = {1: "one", 2: float("nan")}
        self.kinds, self.scale, self.tx = {"a", 1}, np.float32(2), optax.sgd(0.1)
        self.act, self.sizes = jax.nn.relu, [3, None, (1, (2,)), "x"]
        self.stats, self.queue, self.again = Stats(), deque([1]), [self.kinds]
        self.stats.me = self.stats  # type: ignore[attr-defined]

    shapes: list[Any] = []

    def step(self: Any, batch: Any) -> jax.Array:
        assert self.names[1] == "one" and "a" in self.kinds and self.sizes[0] == 3
        assert self.stats.table.shape == self.stats.computed_once().shape  # right in every step
        shapes.append(batch["x"].shape)
        return self.act(jnp.mean(self.error(batch) ** 2)) * self.scale

    assert fit(module(step, init=init), numbered(2)).global_step == 2
    assert warnings_of(caplog) == []


def test_objects_that_refer_to_each_other_are_looked_at_once() -> None:
    class Cell:
        def __init__(self) -> None:
            self.near: list[Any] = []

    cells = [Cell() for _ in range(64)]
    for cell in cells:
        cell.near += cells
    model = module(init=lambda self: (Mean.__init__(self), setattr(self, "cell", cells[0]))[0])
    assert fit(model, numbered(1)).global_step == 1
