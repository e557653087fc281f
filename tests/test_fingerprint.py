"""Texts that are equal where values are, in any process."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlit.texts import array_text, stable_text


def test_addresses_and_the_order_of_sets_do_not_count() -> None:
    assert stable_text(object()) == stable_text(object())
    assert stable_text(lambda: 0) == stable_text(lambda: 1)
    texts = ["{frozenset({'b', 'a:1'}), {2, 1}}", "{{1, 2}, frozenset({'a:1', 'b'})}"]
    assert len({*map(stable_text, texts)}) == 1
    assert stable_text({1, 2}) != stable_text({1, 3})


@pytest.mark.parametrize(
    "other",
    [
        np.float32([1, 2, 4]),
        np.float64([1, 2, 3]),
        np.float32([[1, 2, 3]]),
        np.float32([-1, 2, 3]),
        jnp.int32([1, 2, 3]),
    ],
)
def test_another_array_has_another_text(other: Any) -> None:
    assert array_text(other) != array_text(np.float32([1, 2, 3]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float32([1, 2, 3]), jnp.float32([1, 2, 3])),
        (np.ones((3, 4), order="F"), np.ones((3, 4))),
        (jnp.ones((2, 3), jnp.bfloat16), np.ones((2, 3), jnp.bfloat16)),
        (jnp.zeros(()), np.zeros((), np.float32)),
        (jax.random.key(3), jax.random.key(3)),
        (np.zeros((2, 0)), np.zeros((2, 0))),
    ],
)
def test_equal_arrays_have_one_text(one: Any, other: Any) -> None:
    assert array_text(one) == array_text(other)


def test_keys_of_other_seeds_have_other_texts() -> None:
    assert array_text(jax.random.key(3)) != array_text(jax.random.key(4))
