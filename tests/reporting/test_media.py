"""Histograms computed on the device count what numpy counts, and only the counts leave the devices. What a user
logs as an image, as the pixels that it becomes.
"""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from kit.refusals import refuses
from kit.wandb_runs import PIXELS
from PIL import Image

from jaxlit.errors import ArgumentError
from jaxlit.reporting.media import BINS, as_image, count, histogram, unpack

rng = np.random.default_rng(0)
NORMAL = rng.normal(size=(40, 25)).astype(np.float32)
WHOLE = (NORMAL * 20).astype(np.int32).clip(0, 100)
traced = jax.jit(histogram, static_argnums=1)


def check(x, bins=BINS):
    """Compare with numpy; counts near an edge may lie in the bin beside it, as numpy divides in float64."""
    packed = np.asarray(traced(x, bins))
    assert packed.shape == (2 + bins,) and packed.dtype == np.float32
    counts, edges = unpack(packed)
    values = np.asarray(x, np.float64)
    values = values[np.isfinite(values)]
    known, known_edges = np.histogram(values, bins)
    np.testing.assert_allclose(edges, known_edges, rtol=1e-6, atol=1e-6 * np.abs(known_edges).max())
    assert counts.dtype == np.int64 and counts.sum() == values.size
    # Cumulated, so that a number which float32 puts beside an edge is one off at that edge only.
    width = (known_edges[-1] - known_edges[0]) / bins
    near = [(np.abs(values - edge) < 1e-4 * width).sum() for edge in known_edges[1:-1]]
    assert (np.abs(np.cumsum(counts) - np.cumsum(known))[:-1] <= near).all()


def with_bad(*bad):
    x = NORMAL.copy()
    x[: len(bad), 1] = bad
    return x


CASES = {
    "normal numbers": (NORMAL,),
    "one bin": (NORMAL, 1),
    "more dimensions": (NORMAL.reshape(2, 5, 10, 10), 7),
    "a scalar": (np.float32(2.5), 3),
    "NaN": (with_bad(np.nan),),
    "all that is not finite": (with_bad(np.nan, np.inf, -np.inf),),
    "tiny": (NORMAL * np.float32(1e-30),),
    "huge, so that their difference overflows": (NORMAL / np.abs(NORMAL).max() * np.float32(3e38),),
    "integers": (WHOLE, 16),
    "bytes": (WHOLE.astype(np.uint8), 16),
    "bools": (WHOLE > 9, 16),
    "bfloat16": (WHOLE.astype(ml_dtypes.bfloat16), 16),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_counted_as_by_numpy(case):
    check(*CASES[case])


def test_a_constant_has_the_edges_of_numpy():
    for value in (0.0, 3.0, -2.5):
        check(np.full(6, value, np.float32), 5)
        counts, edges = unpack(np.asarray(traced(np.full(6, value, np.float32), 5)))
        assert counts.tolist() == [0, 0, 6, 0, 0]
        np.testing.assert_allclose(edges, np.linspace(value - 0.5, value + 0.5, 6), rtol=1e-6)
    for value in np.float32([1e8, -1e8, 3e38, 2.0**25]):
        packed = np.asarray(traced(np.full(6, value, np.float32), 5))
        assert packed[0] < packed[1] and packed[0] <= value <= packed[1] and packed[2:].sum() == 6


def test_numbers_on_an_edge_are_in_the_bin_above():
    x = np.arange(9, dtype=np.float32)  # each exactly an edge
    counts, edges = unpack(np.asarray(histogram(jnp.asarray(x), 8)))  # not traced
    assert counts.tolist() == [1] * 7 + [2] == np.histogram(x, 8)[0].tolist()
    np.testing.assert_array_equal(edges, x)


def test_nothing_finite_counts_nothing():
    for x in np.float32([np.inf, -np.inf] * 3), np.zeros((3, 0), np.float32):
        assert np.asarray(traced(x, 5)).tolist() == [-0.5, 0.5, 0, 0, 0, 0, 0]


def test_counts_on_the_host_are_numpys_own_of_what_is_finite():
    x = with_bad(np.nan, np.inf, -np.inf)
    for given in (x, x.tolist()):
        for actual, known in zip(count(given, 10), np.histogram(x[np.isfinite(x)].astype(np.float64), 10), strict=True):
            np.testing.assert_array_equal(actual, known)


def collectives(program):
    """Return how many numbers each collective of a compiled program has, by its kind."""
    actual = {}
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", program.compile().as_text()):
        shapes = [dims.split(",") for dims in re.findall(r"\w+\[([\d,]*)\]", result)]
        actual.setdefault(kind, []).extend(int(np.prod([int(d) for d in dims if d])) for dims in shapes)
    return actual


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, None, "fsdp")])
def test_a_sharded_array_stays_where_it_is(spec):
    sharding = NamedSharding(Mesh(np.asarray(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,)), spec)
    x = rng.normal(size=(16, 32, 24)).astype(np.float32)
    actual = collectives(traced.lower(sharded := jax.device_put(x, sharding), BINS))
    assert set(actual) == {"all-reduce"} and max(actual["all-reduce"]) == BINS
    np.testing.assert_array_equal(np.asarray(traced(sharded, BINS)), np.asarray(traced(x, BINS)))
    moved = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(sharding.mesh, P())).lower(sharded)
    assert collectives(moved) == {"all-gather": [x.size]}  # which are found where there are some


GRAYS = np.linspace(0, 1, 20, dtype=np.float32).reshape(4, 5)
ALPHA = np.dstack([PIXELS, PIXELS[..., :1]])
WILD = np.array([[-1.0, 0.0, 0.5], [2.0, np.nan, np.inf]])


def test_arrays_become_the_pixels_that_they_mean_and_are_copied():
    for given, expected in (
        (PIXELS, PIXELS),
        (ALPHA, ALPHA),
        (PIXELS[..., :1], PIXELS[..., 0]),
        (PIXELS / 255, PIXELS),
        (jnp.asarray(GRAYS), np.uint8(np.round(GRAYS * 255))),
        (np.ones((2, 3), jnp.bfloat16), np.full((2, 3), 255, np.uint8)),
        (np.eye(3, dtype=bool), np.eye(3, dtype=np.uint8) * 255),
        (WILD, np.array([[0, 0, 128], [255, 0, 255]], np.uint8)),
    ):
        result = as_image("here", given)
        assert result.dtype == np.uint8 and not np.shares_memory(result, given)
        np.testing.assert_array_equal(result, expected)
    picture = Image.fromarray(PIXELS)
    copy = as_image("here", picture)
    picture.putpixel((0, 0), (9, 9, 9))
    np.testing.assert_array_equal(np.asarray(copy), PIXELS)
    picture.convert("P").save("a.png")  # of a palette
    np.testing.assert_array_equal(as_image("here", Path("a.png")), np.asarray(picture.convert("P").convert("RGBA")))


def test_an_array_that_is_no_image_is_refused():
    for shape in ((3,), (2, 3, 4, 5), (4, 5, 2), (3, 4, 5), (0, 5)):
        array = np.zeros(shape, np.uint8)
        refuses(ArgumentError, lambda array=array: as_image("key", array), "^key takes", f"{list(shape)}"[1:-1])
    for array in (np.zeros((4, 5), np.int32), np.zeros((4, 5), np.complex64), np.array([["a"]])):
        refuses(ArgumentError, lambda array=array: as_image("key", array), f"got {array.dtype}")
