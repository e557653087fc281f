"""Archives of numpy, indices, folders and mappings; files of safetensors, compared with those of the library."""

import importlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import nnx
from kit.modules import Net
from kit.pages import needing

from jaxlit.checkpoints.safetensors import DTYPES
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxlit.weights import sources as safetensors_file
from jaxlit.weights.loading import load_weights
from jaxlit.weights.sources import read_arrays
from jaxlit.weights.weight_rules import WeightRule

ARRAYS = {"a.b": np.arange(6.0).reshape(2, 3), "c": np.array(3, np.int8), "none": np.zeros((0, 2), np.float16)}


def assert_equal(read: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read.keys() == expected.keys()
    for name, x in expected.items():
        assert read[name].dtype == x.dtype
        np.testing.assert_array_equal(read[name], x)


def is_mapped(x: Any) -> bool:
    return isinstance(x, np.memmap) or (x.base is not None and is_mapped(x.base))


@pytest.mark.parametrize(("save", "mapped"), [(np.savez, True), (np.savez_compressed, False)])
def test_an_archive_of_numpy_is_read_and_mapped_if_it_can_be(save: Any, mapped: bool) -> None:
    arrays = ARRAYS | {"fortran": np.asfortranarray(ARRAYS["a.b"]), "low": np.ones(2, ml_dtypes.bfloat16)}
    save("x.npz", **arrays)
    read = read_arrays("x.npz")
    assert_equal(read, arrays)
    assert is_mapped(read["a.b"]) == mapped


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_headers_of_both_versions_are_read(version: tuple[int, int]) -> None:
    with zipfile.ZipFile("x.npz", "w") as archive, archive.open("a.b.npy", "w") as file:
        np.lib.format.write_array(file, ARRAYS["a.b"], version)
    read = read_arrays("x.npz")
    assert_equal(read, {"a.b": ARRAYS["a.b"]})
    assert is_mapped(read["a.b"])


def test_an_index_names_the_file_of_each_array() -> None:
    first, second = {"a": np.arange(3.0)}, {"b": np.arange(4), "more": np.zeros(2)}
    folder = Path("snapshot")
    folder.mkdir()
    safetensors.numpy.save_file(first, folder / "model-00001-of-00002.safetensors")
    safetensors.numpy.save_file(second, folder / "model-00002-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    expected = {"a": first["a"], "b": second["b"]}
    assert_equal(read_arrays(folder / "model.safetensors.index.json"), expected)
    assert_equal(read_arrays(folder), expected)


@pytest.mark.parametrize("source", ["snapshot", "memory://snapshot"])
def test_an_index_reads_files_in_its_own_folder_only(source: str) -> None:
    inside, outside = ({"a": x} for x in (np.arange(3.0), np.zeros(3)))
    files = {"snapshot/sub/part.safetensors": inside, "part.safetensors": outside, "snapshot/part.safetensors": outside}
    disk = fsspec.filesystem("memory" if "memory" in source else "file")

    def write_index(file: str) -> None:
        disk.pipe_file("snapshot/model.safetensors.index.json", json.dumps({"weight_map": {"a": file}}).encode())

    disk.makedirs("snapshot/sub")
    for name, arrays in files.items():
        disk.pipe_file(name, safetensors.numpy.save(arrays))
    write_index("sub/part.safetensors")
    assert_equal(read_arrays(source), inside)
    for file in ("../part.safetensors", "sub/../../part.safetensors", str(Path("part.safetensors").absolute())):
        write_index(file)
        with pytest.raises(CheckpointError, match=f"as an index.*{re.escape(file)}' is not in its folder"):
            read_arrays(source)
    # As in transformers, a file with all arrays has precedence over an index.
    disk.pipe_file("snapshot/model.safetensors", safetensors.numpy.save({"a": np.ones(3)}))
    assert_equal(read_arrays(source), {"a": np.ones(3)})
    disk.rm("snapshot/model.safetensors.index.json")
    assert_equal(read_arrays(source), {"a": np.ones(3)})
    disk.rm("snapshot", recursive=True)


@pytest.mark.parametrize("package", needing("torch"))
def test_a_torch_module_gives_its_outputs_and_tensors_are_taken_bit_by_bit(package: str) -> None:
    torch: Any = importlib.import_module(package)
    theirs = torch.nn.Linear(4, 3)
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    load_weights(module, theirs.state_dict(), {"weight": WeightRule("kernel", transpose=True)})
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    np.testing.assert_allclose(module(x), theirs(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-6)
    x = torch.tensor([[1.5, 2], [-3, 0.125]], requires_grad=True)
    half = np.array([[1.5, 2], [-3, 0.125]], ml_dtypes.bfloat16)
    given = {"trained": x, "strided": x.T, "half": x.bfloat16(), "strided.half": x.bfloat16().T}
    expected = {"trained": half.astype(np.float32), "strided": half.astype(np.float32).T, "half": half}
    assert_equal(read_arrays(given), expected | {"strided.half": half.T})


def test_mappings_may_be_nested_and_of_jax() -> None:
    given = {"layers": [{"w": jnp.ones(2)}, {"w": np.zeros(3)}], "b": [1.0, 2.0]}
    expected = {"layers.0.w": np.ones(2, np.float32), "layers.1.w": np.zeros(3), "b.0": np.array(1.0)}
    assert_equal(read_arrays(given), expected | {"b.1": np.array(2.0)})


def test_a_state_of_nnx_is_a_mapping() -> None:
    module = Net(rngs=nnx.Rngs(0))
    state = nnx.state(module, nnx.Param)
    names = ["blocks.0.bias", "blocks.0.kernel", "inner.bias", "inner.kernel"]
    names += ["norm.bias", "norm.scale", "outer.bias", "outer.kernel"]
    read = read_arrays(state)
    assert sorted(read) == names
    np.testing.assert_array_equal(read["inner.kernel"], module.inner.kernel[...])
    assert_equal(read, read_arrays(nnx.to_pure_dict(state)))


def test_sharded_arrays_are_gathered() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.device_put(np.arange(16.0), jax.NamedSharding(mesh, jax.P("data")))
    assert_equal(read_arrays({"x": sharded}), {"x": np.arange(16.0, dtype=np.float32)})


REFUSED = {
    "a number": (3, ArgumentTypeError, "takes the path of a file, or a mapping"),
    "an object": ({"a": object()}, ArgumentTypeError, "to arrays, and a is"),
    "a torch file": ("pytorch_model.bin", CheckpointError, "torch.load(path, weights_only=True)"),
    "an empty folder": (".", CheckpointError, "a folder with model.safetensors"),
    "no file": ("no.npz", CheckpointError, "load_weights: there is no file no.npz in "),
    "no folder": ("gpt2", CheckpointError, "there is no file gpt2 in "),
    "no file at a path": ("/absent/x.safetensors", CheckpointError, "there is no file /absent/x.safetensors."),
    "no archive": ("bad.npz", CheckpointError, "bad.npz cannot be read as a numpy archive"),
    "objects": ("objects.npz", CheckpointError, "Object arrays cannot be loaded"),
    "stored objects": ("stored.npz", CheckpointError, "stored.npz cannot be read"),
    "no file system": ("foo://x", ArgumentError, "load_weights(source='foo://x') cannot be opened"),
    "a password": ("s3://me:word@b/x.npz", ArgumentError, "load_weights(source=...) has a password in its URL"),
    "no index": ("bad.safetensors.index.json", CheckpointError, "as an index"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_cannot_be_read_is_refused(mistake: str) -> None:
    Path("bad.npz").write_bytes(b"no zip")
    Path("pytorch_model.bin").touch()
    Path("bad.safetensors.index.json").write_text("{}")
    np.savez_compressed("objects.npz", x=np.array([{}], object))
    np.savez("stored.npz", x=np.array([{}], object))
    source, kind, message = REFUSED[mistake]
    with pytest.raises(kind, match=re.escape(message)):
        read_arrays(source)


def of_all_kinds() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = {}
    for name, dtype in DTYPES.items():
        for shape in [(), (0, 3), (5,), (2, 3)]:
            bits = rng.integers(0, 2 if name == "BOOL" else 256, (*shape, dtype.itemsize), np.uint8)
            arrays[f"{name}{list(shape)}"] = bits.view(dtype).reshape(shape)
    return arrays


def write(path: Path, arrays: dict[str, np.ndarray], **metadata: str) -> Path:
    specs = [(name, x.shape, x.dtype) for name, x in arrays.items()]
    safetensors_file.write_safetensors(path, specs, arrays.values(), metadata)
    return path


def test_the_library_reads_what_was_written_and_it_comes_back_bit_by_bit() -> None:
    arrays = of_all_kinds()
    path = write(Path("all.safetensors"), arrays, format="np")
    read = safetensors_file.read_safetensors(path)
    assert read.keys() == arrays.keys()
    for name, x in arrays.items():
        assert (read[name].dtype, read[name].shape, read[name].tobytes()) == (x.dtype, x.shape, x.tobytes())
    with safetensors.safe_open(path, framework="np") as file:
        assert file.metadata() == {"format": "np"}
        assert sorted(file.keys()) == sorted(arrays)
    entries = dict(safetensors.deserialize(path.read_bytes()))
    for name, x in arrays.items():
        assert entries[name]["dtype"] == name.split("[")[0]
        assert entries[name]["shape"] == list(x.shape)
        assert bytes(entries[name]["data"]) == x.tobytes()


def test_what_the_library_has_written_is_read() -> None:
    arrays = {name: x for name, x in of_all_kinds().items() if x.dtype.kind in "biuf"}
    safetensors.numpy.save_file(arrays, "theirs.safetensors", {"format": "pt"})
    read = read_arrays(Path("theirs.safetensors"))
    assert all(is_mapped(x) for x in read.values() if x.size)
    assert {name: x.tobytes() for name, x in read.items()} == {name: x.tobytes() for name, x in arrays.items()}


def with_header(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = {
    "empty": (b"", "cannot be read"),
    "short": (b"123", "header is damaged"),
    "long header": ((2**60).to_bytes(8, "little") + b"{}", "header is damaged"),
    "no json": (with_header("x")[:-1] + b"!", "header is damaged"),
    "no entry": (with_header({"x": 3}), "header is damaged"),
    "truncated": (with_header({"x": ENTRY}, b"1234567"), "the bytes of x .* Download the file again"),
    "other size": (with_header({"x": ENTRY | {"shape": [3]}}, bytes(12)), "the bytes of x"),
    "negative": (with_header({"x": ENTRY | {"data_offsets": [-8, 0]}}, bytes(12)), "the bytes of x"),
    "from the end": (with_header({"x": ENTRY | {"data_offsets": [-16, -8]}}, bytes(16)), "the bytes of x"),
    "no size": (with_header({"x": ENTRY | {"shape": [-1], "data_offsets": [0, 400]}}, bytes(16)), "the bytes of x"),
    "overlapping": (with_header({"x": ENTRY, "y": ENTRY | {"data_offsets": [4, 12]}}, bytes(12)), "not contiguous"),
    "a hole": (with_header({"x": ENTRY | {"data_offsets": [8, 16]}}, bytes(16)), "not contiguous"),
    "more": (with_header({"x": ENTRY}, bytes(16)), "not contiguous up to the end"),
    "a broken second": (with_header({"x": ENTRY, "y": {"shape": [1]}}, bytes(8)), "the entry of y"),
    "deep": (len(b"[" * 99999).to_bytes(8, "little") + b"[" * 99999, "header is damaged"),
    "dtype": (with_header({"x": ENTRY | {"dtype": "F4"}}, bytes(8)), "x has the dtype 'F4'"),
}


def test_a_header_beyond_the_limit_of_the_library_is_refused() -> None:
    path, length = Path("long.safetensors"), 100_000_001
    try:
        path.write_bytes(length.to_bytes(8, "little") + b"{}" + b" " * (length - 2))
        with pytest.raises(safetensors.SafetensorError, match="header too large"):
            safetensors.safe_open(path, framework="np")
        with pytest.raises(CheckpointError, match="header is damaged"):
            safetensors_file.read_safetensors(path)
    finally:
        path.unlink()


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(damage: str) -> None:
    content, message = DAMAGED[damage]
    Path("bad.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=f"bad.safetensors .*{message}"):
        safetensors_file.read_safetensors(Path("bad.safetensors"))


def test_a_write_that_fails_leaves_the_older_file() -> None:
    path = write(Path("x.safetensors"), {"x": np.arange(3)})
    before = path.read_bytes()

    def arrays():
        yield np.arange(2)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        safetensors_file.write_safetensors(path, [("x", (2,), np.dtype(int)), ("y", (2,), np.dtype(int))], arrays(), {})
    assert path.read_bytes() == before
    assert [file.name for file in Path().iterdir()] == [path.name]


def test_arrays_without_alignment_are_read() -> None:
    """Files of other writers need not have any."""
    header = {"x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}
    header["y"] = {"dtype": "BF16", "shape": [2], "data_offsets": [1, 5]}
    y = np.array([1.5, -2], ml_dtypes.bfloat16)
    Path("odd.safetensors").write_bytes(with_header(header, b"\7" + y.tobytes()))
    read = safetensors_file.read_safetensors(Path("odd.safetensors"))
    assert read["x"].tolist() == [7]
    assert read["y"].tolist() == [1.5, -2]
