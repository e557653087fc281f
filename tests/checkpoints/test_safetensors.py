"""Files of arrays: any part of any sharding is read back as numpy slices it, and damaged headers are refused."""

import itertools
import json
import random
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from kit.buckets import make_machine
from kit.refusals import refuses
from kit.trainers import thinned

from jaxlit.checkpoints.places import Place, RemotePath
from jaxlit.checkpoints.safetensors import own_parts, parts_in, read_header, read_region, read_safetensors, write_arrays
from jaxlit.errors import CheckpointError

DTYPES = ["bool", "int8", "uint16", "int32", "float16", "float32", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
DTYPES += ["float8_e4m3b11fnuz", "float8_e5m2fnuz", "complex64", "int4", "uint4", "int2", "uint2"]
WIDE = ["float64", "int64", "complex128", "float4_e2m1fn"]  # of numpy's arrays: jax has some with 64 bits only
SHAPES = [(), (0,), (3, 0, 2), (1,), (7,), (16,), (8, 8), (16, 4, 2), (2, 8, 3), (4, 2, 2, 2)]


def values(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return numbers that differ, as far as the dtype can tell them apart."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7).astype(dtype)


def mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(shape), tuple("xyz"[: len(shape)]))


def shardings(shape: tuple[int, ...]) -> list[Any]:
    """Return ways to lay an array out on eight devices."""
    result = [jax.sharding.SingleDeviceSharding(jax.devices()[0])]
    for devices in (mesh(8), mesh(2, 4), mesh(2, 2, 2)):
        axes = [None, *devices.axis_names, devices.axis_names]
        for spec in itertools.product(axes, repeat=len(shape)):
            names = [
                name for axis in spec if axis is not None for name in (axis if isinstance(axis, tuple) else (axis,))
            ]
            sizes = [np.prod([devices.shape[x] for x in np.atleast_1d(axis)]) if axis else 1 for axis in spec]
            if len(names) == len({*names}) and all(n % size == 0 for n, size in zip(shape, sizes, strict=True)):
                result.append(NamedSharding(devices, P(*spec)))
    return result


def write(file: Any, arrays: dict[str, Any]) -> tuple[int, str]:
    specs = [(name, x.shape, x.dtype) for name, x in arrays.items()]
    return write_arrays(file, specs, arrays.values(), {"mine": "yes"})


def stored(path: Place, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """Write arrays, and return their parts in the file by name."""
    with path.open("wb") as file:
        size, _ = write(file, own_parts(arrays))
    assert path.stat().st_size == size
    parts: dict[str, Any] = {name: [] for name in arrays}
    for name, part in parts_in(path, {name: np.dtype(x.dtype) for name, x in arrays.items()}):
        parts[name].append(part)
    return parts


@pytest.mark.parametrize("place", ["disk", "bucket"])
@pytest.mark.parametrize("seed", thinned(range(40), 0, 1, full=range(2, 6)))
def test_any_region_of_any_sharding_is_numpys(seed: int, place: str, tmp_path: Path, monkeypatch: Any) -> None:
    make_machine(tmp_path, monkeypatch)
    draw = random.Random(seed)
    arrays, whole = {}, {}
    for k in range(6):
        shape = draw.choice(SHAPES)
        x = whole[f"x{k}@1,2"] = values(shape, draw.choice(DTYPES))
        arrays[f"x{k}@1,2"] = jax.device_put(jnp.asarray(x), draw.choice(shardings(shape)))
    parts = stored(tmp_path / "x" if place == "disk" else RemotePath("bucket://x/x"), arrays)
    for name, x in whole.items():
        regions = [[(0, n) for n in x.shape]]
        regions += [[tuple(sorted((draw.randint(0, n), draw.randint(0, n)))) for n in x.shape] for _ in range(8)]
        for region in regions:
            start, shape = [a for a, _ in region], [b - a for a, b in region]
            found = read_region(name, parts[name], start, shape, np.dtype(x.dtype))
            expected = x[tuple(slice(a, b) for a, b in region)]
            assert found.dtype == x.dtype
            assert found.shape == expected.shape
            assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", thinned(DTYPES, "bfloat16", "int4", "complex64", "bool", full=()))
def test_an_array_comes_back_in_another_sharding(dtype: str, tmp_path: Path) -> None:
    x = values((16, 8), dtype)
    every = shardings((16, 8))
    pairs = itertools.zip_longest(every, every[::-1][: len(every)])
    for k, (before, after) in enumerate(pairs):
        parts = stored(tmp_path / f"{k}", {"x": jax.device_put(jnp.asarray(x), before)})["x"]

        def read(at: Any, parts: Any = parts) -> np.ndarray:
            start = [s.start or 0 for s in at]
            shape = [(n if s.stop is None else s.stop) - i for s, n, i in zip(at, x.shape, start, strict=True)]
            return read_region("x", parts, start, shape, x.dtype)

        y = jax.make_array_from_callback(x.shape, after, read)
        assert y.sharding == after
        assert np.asarray(y).tobytes() == x.tobytes()


@pytest.mark.parametrize("dtype", [*DTYPES, *WIDE])
def test_bytes_of_any_dtype_come_back(dtype: str, tmp_path: Path) -> None:
    for k, shape in enumerate(SHAPES[:6]):
        x = values(shape, np.dtype(dtype) if dtype in np.sctypeDict else getattr(ml_dtypes, dtype))
        with (tmp_path / f"{k}").open("wb") as file:
            write(file, {"x": x} if x.size else {})
        parts = [part for _, part in parts_in(tmp_path / f"{k}", {"x": x.dtype})]
        found = read_region("x", parts, [0] * x.ndim, x.shape, x.dtype)
        assert found.dtype == x.dtype
        assert found.tobytes() == x.tobytes()


def test_no_part_is_stored_twice_and_devices_share_the_bytes() -> None:
    """Of arrays that all have, each process of eight would store an eighth, by its place among the copies."""
    devices = mesh(8)
    arrays = {f"x{k}": jax.device_put(jnp.ones((64,)), NamedSharding(devices, P())) for k in range(16)}
    copies = [next(s.replica_id for s in x.addressable_shards if s.device == jax.devices()[0]) for x in arrays.values()]
    assert {*copies} == {0}
    assert own_parts(arrays).keys() == arrays.keys()
    split = {"x": jax.device_put(jnp.arange(16.0), NamedSharding(mesh(2, 4), P("y")))}
    assert [np.asarray(x).tolist() for x in own_parts(split).values()] == np.arange(16.0).reshape(4, 4).tolist()
    assert [*own_parts(split)] == ["x@0", "x@4", "x@8", "x@12"]


def test_a_name_that_ends_as_a_part_of_another_is_another_array(tmp_path: Path) -> None:
    first, second = values((16, 8), "float32"), values((3,), "float32")
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.device_put(jnp.asarray(first), jax.NamedSharding(mesh, jax.P("x")))
    parts = stored(tmp_path / "x", {"w": split, "w@2,0": jnp.asarray(second)})
    for name, x in (("w", first), ("w@2,0", second)):
        assert read_region(name, parts[name], [0] * x.ndim, x.shape, x.dtype).tobytes() == x.tobytes()


def test_files_are_those_of_the_safetensors_package(tmp_path: Path) -> None:
    arrays = {"a": values((4, 2), "float32"), "b": np.array(7, "int32"), "c": values((3,), "bool")}
    with (tmp_path / "ours").open("wb") as file:
        write(file, arrays)
    theirs = safetensors.numpy.load_file(tmp_path / "ours")
    safetensors.numpy.save_file(arrays, tmp_path / "theirs", metadata={"mine": "yes"})
    ours = read_safetensors(tmp_path / "theirs")
    for name, x in arrays.items():
        for found in (theirs[name], ours[name]):
            np.testing.assert_array_equal(found, x)
            assert found.dtype == x.dtype
    assert read_header(tmp_path / "theirs")[1] == read_header(tmp_path / "ours")[1] == {"mine": "yes"}


def file_of(header: Any, data: bytes = b"12345678") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


DAMAGED: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "a header longer than the file": (2**40).to_bytes(8, "little") + b"{}",
    "no JSON": file_of(b"{"),
    "a list": file_of([]),
    "deep": file_of(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"),
    "metadata only, with data": file_of({"__metadata__": {}}),
    "an entry that is a number": file_of({"x": 7}),
    "no offsets": file_of({"x": {"dtype": "F32", "shape": [2]}}),
    "an unknown dtype": file_of(entry("X7")),
    "a dtype that is a list": file_of(entry(["F32"])),
    "a shape that is a text": file_of(entry(shape="2")),
    "a negative shape": file_of(entry(shape=[-2, -1])),
    "a fraction": file_of(entry(shape=[2.5])),
    "a shape that does not fit": file_of(entry(shape=[3])),
    "a huge shape": file_of(entry(shape=[2**62, 2**62], offsets=[0, 2**126])),
    "offsets after the end": file_of(entry(offsets=[8, 16])),
    "negative offsets": file_of(entry(offsets=[-8, 0])),
    "one offset": file_of(entry(offsets=[0])),
    "a hole": file_of(entry(offsets=[8, 16]), b"0" * 16),
    "twice the same bytes": file_of(entry() | {"y": entry()["x"]}),
    "bytes after the last": file_of(entry(), b"0" * 9),
    "cut": file_of(entry())[:-1],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_refused(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    make_machine(tmp_path, monkeypatch)
    for place in (tmp_path / "x.safetensors", RemotePath("bucket://x/x.safetensors")):
        with place.open("wb") as file:
            file.write(DAMAGED[name])
        words = rf"{place} cannot be read as a safetensors file: .*\.$"
        refuses(CheckpointError, lambda place=place: read_header(place), words)
        refuses(CheckpointError, lambda place=place: parts_in(place, {"x": np.dtype("float32")}), words)


@pytest.mark.parametrize(
    ("key", "dtype", "words"),
    [
        ("x", "int32", r"x is stored as float32\[2\], not as int32"),
        ("x", "complex128", "x is stored as float32"),
        ("x@1,2", "float32", "x@1,2 is stored as"),
        ("x@a", "float32", "invalid literal"),
        ("x@5", "float32", "is not stored as"),
        ("x@-1", "float32", "is not stored as"),
        ("y", "float32", "y|''"),
    ],
)
def test_parts_that_lie_are_refused(key: str, dtype: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(file_of({key: entry()["x"]}))
    with pytest.raises((CheckpointError, LookupError, ValueError), match=words):
        parts = [part for _, part in parts_in(tmp_path / "x", {"x": np.dtype(dtype)})]
        read_region("x", parts, [0], [2], np.dtype(dtype))


def test_nothing_is_allocated_for_more_than_is_stored(tmp_path: Path) -> None:
    parts = stored(tmp_path / "x", {"x": jnp.ones(4)})["x"]
    for start, shape in (([0], [2**50]), ([2], [3]), ([-1], [2]), ([4], [1])):
        with pytest.raises(CheckpointError, match="x is not stored as float32"):
            read_region("x", parts, start, shape, np.dtype("float32"))
    twice = [*parts, *parts]
    with pytest.raises(CheckpointError, match="x is not stored as float32"):
        read_region("x", twice, [0], [4], np.dtype("float32"))
