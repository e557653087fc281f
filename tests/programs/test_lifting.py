"""Programs that differ in numbers become one, whose inputs the numbers are."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlit.programs.lifting import DifferentError, is_same, lift

X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)


def traced(fn: Callable[..., Any]) -> tuple[Any, Any]:
    return jax.make_jaxpr(fn, return_shape=True)(X)


def scanned(a: float) -> Callable[..., Any]:
    return lambda x: jax.lax.scan(lambda c, y: (c * a + y.sum(), c), 0.0, x, reverse=True)


def chosen(a: float) -> Callable[..., Any]:
    return lambda x: jax.lax.switch(jnp.int32(1), [lambda y: y * 3, lambda y: y * a, lambda y: y - a], x)


def arrays(a: float) -> Callable[..., Any]:
    table = np.full((3,), a, np.float32)
    return lambda x: {"sum": x + table, "table": jnp.asarray(table), "number": a}


def called(a: float) -> Callable[..., Any]:
    inner = jax.jit(lambda x: jax.nn.silu(x) * a)
    return lambda x: inner(x) + jax.checkpoint(lambda y: jnp.sin(y) * a)(x)


def twice(a: float) -> Callable[..., Any]:
    """One function is called with numbers that are the same in one program only."""
    scale = jax.jit(lambda x, by: x * by, static_argnums=1)
    return lambda x: scale(x, 2.0) + scale(x, a)


@pytest.mark.parametrize("make", [scanned, chosen, arrays, called, twice])
def test_one_program_computes_what_each_does(make: Any) -> None:
    values = (2.0, 0.5, 2.0, -3.0)
    lifted = lift(lambda i: traced(make(values[i])), [0, 1, 0, 3])
    assert [column.shape[0] for column in lifted.numbers] == [4] * len(lifted.numbers)
    for i, value in enumerate(values):
        made = lifted([column[i] for column in lifted.numbers], X)
        wanted = make(value)(X)
        assert jax.tree.structure(made) == jax.tree.structure(wanted)
        jax.tree.map(np.testing.assert_array_equal, made, wanted)


def test_a_number_that_occurs_often_is_one_input() -> None:
    many = lambda a: lambda x: [x * a, x + a, jnp.sin(x) * a, x - 2 * a]  # noqa: E731
    lifted = lift(lambda i: traced(many(0.5 + i)), [0, 1])
    assert sorted(column.tolist() for column in lifted.numbers) == [[0.5, 1.5], [1.0, 3.0]]


def test_an_error_has_the_index_of_the_program_that_differs() -> None:
    other = lambda x: jnp.sin(x) + x  # noqa: E731
    with pytest.raises(DifferentError, match="has 2 operations, and not 1") as caught:
        lift(lambda i: traced(jnp.sin if i < 2 else other), [0, 0, 2])
    assert caught.value.index == 2


def test_operands_and_parameters_of_operations_count() -> None:
    first, other = (traced(fn)[0] for fn in (lambda x: x - jnp.sin(x), lambda x: jnp.sin(x) - x))
    assert not is_same(first, other)
    assert is_same(first, traced(lambda y: y - jnp.sin(y))[0])
    assert not is_same(traced(lambda x: x.sum(0))[0], traced(lambda x: x.sum(1))[0])
    assert not is_same(traced(lambda x: x**2)[0], traced(lambda x: x**3)[0])
