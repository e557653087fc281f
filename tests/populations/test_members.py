"""The text of an argument says whether it is the one that a population was trained with."""

import argparse
import pathlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxlit.populations.members import argument_text, content_text


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number: float) -> None:
        self.number = number


class Cyclic:
    def __init__(self, number: float) -> None:
        self.number, self.itself = number, self

    def method(self) -> float:
        return self.number


def table(number: float) -> np.ndarray:
    """Return an array whose text shows its first and last numbers only."""
    x = np.zeros(3000, np.float32)
    x[1500] = number
    return x


@pytest.mark.parametrize(
    "make",
    [
        lambda number: number,
        np.float32,
        jnp.float32,
        np.asarray,
        table,
        lambda number: jnp.asarray(table(number)),
        lambda number: {"nested": [(table(number),)]},
        lambda number: lambda x: x * number,
        lambda number: (lambda x: x * 0.25) if number == 0.25 else (lambda x: x * 0.5),
        lambda number: (lambda x: x + 1) if number == 0.25 else (lambda x: x * 1),
        lambda number: lambda x, by=number: x * by,
        lambda number: jax.jit(lambda x: x * number),
        lambda number: partial(jnp.add, number),
        optax.adam,
        lambda number: optax.cosine_decay_schedule(number, 10),
        lambda number: argparse.Namespace(lr=number),
        Slotted,
        Cyclic,
        lambda number: Cyclic(number).method,
        lambda number: {number, "a", "b"},
        lambda number: pathlib.Path(f"data/{number}"),
        lambda number: nnx.Rngs(int(number * 4)),
        lambda number: jax.random.key(int(number * 4)),
        lambda number: np.random.default_rng(int(number * 4)),
    ],
)
def test_content_text_differs_with_what_a_value_holds(make: Callable[[float], Any]) -> None:
    assert content_text(make(0.25)) == content_text(make(0.25))
    assert content_text(make(0.25)) != content_text(make(0.5))


def test_a_number_is_shown_by_its_value_whatever_holds_it() -> None:
    for kind in (np.float32, jnp.float32, np.asarray):
        assert argument_text(kind(0.1), 20) == "0.1"
        assert content_text(kind(0.25)) == "0.25"
    assert content_text(np.int64(3)) == "3"
    assert argument_text(np.zeros(3), 20) == "float64[3]"
    assert argument_text(jax.random.key(0), 20) == "key<fry>[]"
