"""Marks in a model where a pipeline's stages may end."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

T = TypeVar("T")

_PREFIX = "jaxlit.pipeline_yield:"
_calls: ContextVar[list[int] | None] = ContextVar("pipeline_yield", default=None)  # marks of this trace


def pipeline_yield(x: T) -> T:
    """Return `x`, and mark that a stage of a pipeline may end here: what is computed from it belongs to the next one.

    It does nothing but under `strategy="pipeline"`. Call it between layers, as often as you like: more marks than the
    strategy has stages are grouped.

    Args:
        x: An array or a pytree of arrays, of any shape and dtype.

    Example:
        >>> import jax.numpy as jnp, jaxlit as jl
        >>> jl.pipeline_yield(jnp.ones(3))
        Array([1., 1., 1.], dtype=float32)
    """
    if (calls := _calls.get()) is None:
        return x
    calls[0] += 1
    name = f"{_PREFIX}{calls[0]}"
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, name) if isinstance(leaf, jax.Array) else leaf, x)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """Let `pipeline_yield` leave marks in what is traced."""
    token = _calls.set([0])
    try:
        yield
    finally:
        _calls.reset(token)


def restart() -> None:
    """Number the marks from one again, so that two traces of one step are equal."""
    if (calls := _calls.get()) is not None:
        calls[0] = 0


def mark_of(eqn: Any) -> str | None:
    """Return the name of the mark that an equation is, None if it is none."""
    if eqn.primitive.name != "name":
        return None
    return eqn.params["name"] if eqn.params["name"].startswith(_PREFIX) else None
