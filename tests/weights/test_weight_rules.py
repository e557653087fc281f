"""Rules that rename, transpose, split, reshape and stack, against numpy by hand."""

import re
from typing import Any

import numpy as np
import pytest

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxlit.weights.weight_rules import assign

X = np.arange(24.0).reshape(4, 6)


def result(arrays: dict[str, Any], rename: dict[str, Any], **shapes: tuple[int, ...]) -> dict[str, Any]:
    return assign(arrays, rename, shapes).arrays


def test_the_first_rule_that_matches_all_of_a_name_counts() -> None:
    rename = {r"h\.(\d+)\.w": r"blocks[\1].kernel", r"h\.\d+\..*": None, "w": "no"}
    got = assign({"h.10.w": X, "h.0.b": X, "h.w": X}, rename, {})
    assert got.arrays == {"blocks.10.kernel": X, "h.w": X}
    origins = {"blocks.10.kernel": ["h.10.w: float64[4, 6]"], "h.w": ["h.w: float64[4, 6]"]}
    assert got.origins == origins
    assert got.idle == ["w"]


def test_transpose_is_that_of_numpy() -> None:
    image = np.arange(120.0).reshape(2, 3, 4, 5)
    np.testing.assert_array_equal(result({"x": X}, {"x": jl.WeightRule("y", transpose=True)})["y"], X.T)
    turned = result({"x": image}, {"x": jl.WeightRule("y", transpose=(2, 3, 1, 0))})["y"]
    assert turned.shape == (4, 5, 3, 2)
    assert turned[1, 2, 0, 1] == image[1, 0, 1, 2]


def test_several_leaves_share_an_array_in_equal_parts_or_by_sizes() -> None:
    got = result({"x": X}, {"x": jl.WeightRule(["q", "k", "v"], axis=1)})
    for i, name in enumerate("qkv"):
        np.testing.assert_array_equal(got[name], X[:, 2 * i : 2 * i + 2])
    got = result({"x": X}, {"x": jl.WeightRule(["q", "k", "v"], sizes=(4, 1, 1), transpose=True)})
    np.testing.assert_array_equal(got["q"], X[:, :4].T)
    np.testing.assert_array_equal(got["k"], X[:, 4:5].T)
    np.testing.assert_array_equal(got["v"], X[:, 5:].T)


def test_reshape_takes_the_shape_of_the_leaf() -> None:
    got = result({"x": X}, {"x": jl.WeightRule(["q", "k"], axis=1, reshape=True)}, q=(4, 3, 1), k=(7,))
    np.testing.assert_array_equal(got["q"], X[:, :3].reshape(4, 3, 1))
    assert got["k"].shape == (4, 3)  # of another size: it is refused with all others


def test_stacked_arrays_are_read_in_parts() -> None:
    layers = dict(sorted((f"h.{i}.w", X + 100 * i) for i in range(12)))  # in a file, 10 comes before 2
    rule = jl.WeightRule(["q", "k"], axis=1, stack=1)
    got = result(layers, {r"h\.(\d+)\.w": rule})
    expected = np.stack([layers[f"h.{i}.w"][:, :3] for i in range(12)])
    assert got["q"].shape == expected.shape
    assert got["q"].dtype == expected.dtype
    np.testing.assert_array_equal(got["q"][(slice(None),) * 3], expected)
    np.testing.assert_array_equal(got["q"][slice(9, 12), slice(1, 3), slice(0, 2)], expected[9:12, 1:3, :2])


STACK, BOTH = jl.WeightRule("z", stack=1), "x: float64[4, 6] and y: float64[4, 6] are both assigned to z"
REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "a number": ({"x": 3}, ArgumentTypeError, "got 'x': 3"),
    "no pattern": ({"(": "y"}, ArgumentError, "not a valid regular expression"),
    "no such group": ({"x": r"\1"}, ArgumentError, "cannot be applied to x"),
    "unequal": ({"x": jl.WeightRule(["q", "k", "v"])}, ArgumentError, "cannot be applied to x of shape [4, 6]"),
    "sizes": ({"x": jl.WeightRule(["q", "k"], sizes=(1, 2))}, ArgumentError, "their sum must be the size of the dim"),
    "too few sizes": ({"x": jl.WeightRule(["q", "k"], sizes=(4,))}, ArgumentError, "one size per leaf"),
    "axes": ({"x": jl.WeightRule("y", transpose=(0, 1, 2))}, ArgumentError, "cannot be applied"),
    "no number": ({"(x)": jl.WeightRule("y", stack=1)}, ArgumentError, "cannot be applied"),
    "two for one": ({"x": "z", "y": "z"}, CheckpointError, BOTH),
    "a stack and one": ({r"h\.(\d)": STACK, "x": "z"}, CheckpointError, "both assigned to z"),
    "a gap": ({r"h\.(\d)": STACK}, CheckpointError, "stack of 1 arrays with indices from 3 to 3, and the index 0 is"),
    "twice": ({r"[xy]": jl.WeightRule("z")}, CheckpointError, BOTH),
    "shapes": ({r"[hi]\.(\d)": STACK}, CheckpointError, "shapes or dtypes: float64[4, 6], float64[6, 4]"),
    "dtypes": ({r"[hc]\.(\d)": STACK}, CheckpointError, "complex128[4, 6], float64[4, 6]"),
    "below zero": ({r"h\.(-?\d)": STACK}, CheckpointError, "from -1 to 3, and the index 0 is"),
    "a negative size": ({"x": jl.WeightRule(["y", "z"], sizes=(-1, 5))}, ArgumentError, "must have one size per leaf"),
}


@pytest.mark.parametrize("given", [{"axis": 1}, {"axis": -1}, {"sizes": (4, 2)}, {"axis": 1, "sizes": [6]}])
@pytest.mark.parametrize("to", ["y", ["y"]])
def test_a_split_for_a_single_leaf_and_a_rule_without_one_are_refused(given: dict[str, Any], to: Any) -> None:
    name = next(iter(given))
    with pytest.raises(ArgumentError, match=rf"WeightRule\({name}=.*\) splits .* got to=.*y.*Leave {name} out"):
        jl.WeightRule(to, **given)
    for none in ("", [], ()):
        with pytest.raises(ArgumentError, match=re.escape(f"the name of a leaf or a list of names, got {none!r}.")):
            jl.WeightRule(none)


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_rule_that_does_not_apply_is_refused(mistake: str) -> None:
    rename, kind, message = REFUSED[mistake]
    more = {"shapes": {"h.0": X, "i.1": X.T}, "dtypes": {"h.0": X, "c.1": 1j * X}}
    arrays = {"x": X, "y": X} | more.get(mistake, {"h.3": X} | ({"h.-1": X} if mistake == "below zero" else {}))
    with pytest.raises(kind, match=re.escape(message)):
        assign(arrays, rename, {})
