"""Texts that are equal where values are, in any process. Tables stand in columns, and numbers are short. Values as
JSON's types.
"""

import enum
import json
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlit.texts import NotJSONError, array_text, count, duration, size, stable_text, table, to_json


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


def test_texts_begin_and_numbers_end_at_one_place() -> None:
    assert table([("name", "kind", "calls"), ("a", "long one", "7"), ("longer", "b", "1,000")], texts=2) == [
        "name    kind      calls",
        "a       long one      7",
        "longer  b         1,000",
    ]
    assert table([("name", "n"), ("a", "")]) == ["name  n", "a"]


@pytest.mark.parametrize(
    "shown, texts",
    [
        (size, {0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 100 * 1024: "100 KiB", 3 * 2**40: "3.0 TiB"}),
        (size, {5000 * 2**40: "5000 TiB"}),
        (count, {0: "0", 999: "999", 16_384: "16.4k", 999_499: "999k", 999_500: "1M", 3e15: "3P", 5e18: "5,000P"}),
        (duration, {2.0: "2 s", 0.0125: "12.5 ms", 0.00025: "250 us", 0: "0 us"}),
    ],
)
def test_a_number_has_three_digits_and_its_unit(shown, texts) -> None:
    assert {number: shown(number) for number in texts} == texts


class Phase(enum.IntEnum):
    ROW = 3


STRICT = [
    ({"a": (1, None)}, {"a": [1, None]}),
    (MappingProxyType({"a": np.float32(0.5)}), {"a": 0.5}),
    ([np.bool_(True), np.int64(2)], [True, 2]),
    (Phase.ROW, 3),
]
LENIENT = [
    ({1: {2}}, {"1": "{2}"}),
    (jnp.arange(2), [0, 1]),
    (np.asarray([np.inf, -np.inf, np.nan]), ["Infinity", "-Infinity", "NaN"]),
]


@pytest.mark.parametrize(("value", "expected"), STRICT)
def test_values_that_json_has_are_kept(value, expected) -> None:
    assert to_json(value) == expected
    assert json.dumps(to_json(value)) == json.dumps(expected)  # 1 is not True there


@pytest.mark.parametrize(("value", "expected"), STRICT + LENIENT)
def test_everything_has_a_lenient_form(value, expected) -> None:
    assert to_json(value, lenient=True) == expected
    json.dumps(to_json(value, lenient=True), allow_nan=False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "the value is of type object"),
        ({"a": [0, {1}]}, r"\['a'\]\[1\] is of type set"),
        ({"a": {2: 0}}, r"\['a'\] has the key 2"),
        ([np.zeros(2)], r"\[0\] is of type ndarray float64"),
    ],
)
def test_other_values_are_refused_by_path(value, message) -> None:
    with pytest.raises(NotJSONError, match=f"^{message}$"):
        to_json(value)
