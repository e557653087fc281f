"""Under a mixed precision a layer that makes products float32 is named."""

import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.refusals import warnings_of
from kit.trainers import fit

import jaxlit as jl


class Words(jl.TrainModule):
    def __init__(self, dtype: Any) -> None:
        rngs = nnx.Rngs(0)
        self.embed, self.head = nnx.Embed(8, 4, dtype=dtype, rngs=rngs), nnx.Linear(4, 8, rngs=rngs)

    def training_step(self, batch: jax.Array) -> jax.Array:
        return jnp.mean(self.head(self.embed(batch)) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


PRODUCTS = [("bf16-mixed", None, "bfloat16"), ("bf16-true", None, "bfloat16"), ("16-mixed", None, "float16")]
PRODUCTS += [("bf16-mixed", jnp.bfloat16, None), ("32-true", None, None)]


@pytest.mark.parametrize(("precision", "dtype", "advice"), PRODUCTS)
def test_products_that_a_layer_made_float32_are_warned_of(precision: str, dtype: Any, advice: Any, caplog: Any) -> None:
    fit(Words(dtype), [np.zeros((2, 3), np.int32)] * 2, precision=precision)
    messages = [m for m in warnings_of(caplog) if "matrix products" in m]
    assert len(messages) == (advice is not None)
    for message in messages:
        assert "embed (Embed) gives float32, and so does what comes after it" in message
        assert "100% of the matrix products of Words.training_step take float32" in message
        assert f"dtype=jnp.{advice}" in message


class Layered(jl.TrainModule):
    def __init__(self, cause: str) -> None:
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.blocks = nnx.List(
            [nnx.Sequential(nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 16, rngs=rngs)) for _ in "ab"]
        )
        if cause == "norm":
            self.blocks[0].layers[0] = nnx.BatchNorm(8, rngs=rngs)
        self.scale = jnp.float32(2) if cause == "constant" else 1.0

    def training_step(self, batch: jax.Array) -> jax.Array:
        return jnp.mean(self.last(self.blocks[0](self.first(batch) * self.scale)) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def test_a_profiler_that_runs_goes_on_and_is_not_disturbed(caplog: Any) -> None:
    seen = set[str]()
    watch = lambda frame, event, argument: seen.add(frame.f_code.co_name)  # noqa: E731
    sys.setprofile(watch)
    try:
        fit(Layered("norm"), [np.ones((2, 4), np.float32)] * 2, precision="bf16-mixed")
        assert sys.getprofile() is watch
    finally:
        sys.setprofile(None)
    assert {"training_step", "on_fit_end"} & seen
    (message,) = [m for m in warnings_of(caplog) if "matrix products" in m]
    assert "blocks" not in message  # which only a profiler of its own can say
    fit(Layered("constant"), [np.ones((2, 4), np.float32)] * 2, precision="bf16-mixed")
    assert sys.getprofile() is None


@pytest.mark.parametrize(
    ("cause", "words"),
    [
        ("norm", r"blocks\[0\].layers\[0\] \(BatchNorm\) gives float32"),
        ("constant", "a constant of float32, or a layer"),
    ],
)
def test_the_first_layer_that_makes_products_float32_is_named(cause: str, words: str, caplog: Any) -> None:
    fit(Layered(cause), [np.ones((2, 4), np.float32)] * 2, precision="bf16-mixed")
    (message,) = [m for m in warnings_of(caplog) if "matrix products" in m]
    assert re.search(words, message) and message.endswith("dtype=jnp.bfloat16.")
