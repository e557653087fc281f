"""The text of a program is the same in all of its traces, and another one for another program."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlit.programs.jaxpr import described


def texts(fn: Callable[..., Any]) -> list[str]:
    return [text for text, _ in described(jax.make_jaxpr(fn)(jnp.ones(3)))]


def everything(x: jax.Array, *, rate: float = 0.1, table: Any = (1.0, 2.0, 3.0)) -> jax.Array:
    """Compute with all that has programs in it, functions among its parameters, and constants."""
    x = jax.nn.relu(x) + jax.nn.gelu(x) + np.asarray(table, np.float32)
    x = jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x)
    x, _ = jax.lax.scan(lambda carry, _: (carry * rate, None), x, None, length=2)
    x = jax.lax.while_loop(lambda x: x[0] < 1, lambda x: x + 1, x)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("one", "other"))
    summed = jax.shard_map(lambda x: jax.lax.psum(x, ("one", "other")), mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
    return jax.checkpoint(jnp.tanh)(summed(x)) + jax.random.uniform(jax.random.key(0), (3,))


def test_two_traces_have_one_text() -> None:
    first = texts(lambda x: everything(x))
    jax.clear_caches()  # which parts share a program is left to these
    assert texts(lambda x: everything(x)) == first
    assert len(first) > 50 and not any("0x" in text for text in first)


@pytest.mark.parametrize("other", [{"rate": 0.1000001}, {"table": (1.0, 2.0, 4.0)}])
def test_another_constant_anywhere_has_another_text(other: dict[str, Any]) -> None:
    pairs = zip(texts(everything), texts(lambda x: everything(x, **other)), strict=True)
    assert len([1 for one, two in pairs if one != two]) == 1


def test_operands_count() -> None:
    assert texts(lambda x: (x + 1) - (x + 2)) != texts(lambda x: (x + 2) - (x + 1))
