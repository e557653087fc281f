"""Values as JSON's types."""

import enum
import json
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlit.texts import NotJSONError, to_json


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
        ([np.zeros(2)], r"\[0\] is of type ndarray"),
    ],
)
def test_other_values_are_refused_by_path(value, message) -> None:
    with pytest.raises(NotJSONError, match=f"^{message}$"):
        to_json(value)
