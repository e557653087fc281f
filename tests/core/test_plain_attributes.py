"""A step's changes to plain attributes of its module are refused: no compiled step repeats them."""

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


class Noting(Mean):
    """Plain attributes that a step may be tempted to write to."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.seen, self.last, self.kinds, self.latest = 0, [], {}, {"a"}, None
        self.part = nnx.Dropout(0.5)  # a sub-module with plain attributes
        self.queue, self.several = deque([1]), {"a": [[1]]}


WRITES: dict[str, tuple[Callable[..., Any], str]] = {
    "count": (lambda self, loss: setattr(self, "n", self.n + 1), "n"),
    "append": (lambda self, loss: self.seen.append(loss), "seen"),
    "append a shape": (lambda self, loss: self.seen.append(loss.shape), "seen"),
    "set an item": (lambda self, loss: self.last.update(loss=loss), "last"),
    "add to a set": (lambda self, loss: self.kinds.add("b"), "kinds"),
    "set": (lambda self, loss: setattr(self, "latest", loss), "latest"),
    "count in a part": (lambda self, loss: setattr(self.part, "rate", 0.1), "part.rate"),
    "append to a deque": (lambda self, loss: self.queue.append(loss), "queue"),
    "append in a list of a dict": (lambda self, loss: self.several["a"][0].append(loss), "several"),
    "set a new one": (lambda self, loss: setattr(self, "fresh", loss), "fresh"),
}


@pytest.mark.parametrize("stage", thinned(["training", "validation"], "training"))
@pytest.mark.parametrize("write", WRITES)
def test_a_side_effect_is_refused_by_its_attribute(write: str, stage: str) -> None:
    do, attribute = WRITES[write]

    def step(self: Any, batch: Any) -> Any:
        loss = jnp.mean(self.error(batch) ** 2)
        do(self, loss)
        return loss if stage == "training" else None

    model = module(base=Noting, **{stage: step})
    words = (rf"Made\.{stage}_step changed the attribute {attribute}\.", "nnx.Variable", r"self\.log")
    fit_refuses(StateError, *words, model=model, val=numbered(1))
    assert (model.n, model.seen, model.last, model.kinds, model.latest) == (0, [], {}, {"a"}, None)
    assert (model.queue, model.several) == (deque([1]), {"a": [[1]]})
    assert not hasattr(model, "fresh")  # no traced value is left in the module


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
