"""Archives of numpy, indices of several files, folders, and mappings of arrays and tensors."""

import importlib
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from kit.modules import Net
from kit.pages import needing

from jaxlit.errors import ArgumentTypeError, CheckpointError
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
    arrays = ARRAYS | {"fortran": np.asfortranarray(ARRAYS["a.b"])}
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


def test_an_archive_keeps_bfloat16() -> None:
    x = np.array([1.5, -0.25], ml_dtypes.bfloat16)
    np.savez("x.npz", x=x)
    assert_equal(read_arrays("x.npz"), {"x": x})


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


def test_an_index_reads_files_of_its_own_folder_only() -> None:
    Path("snapshot").mkdir()
    safetensors.numpy.save_file({"a": np.arange(3.0)}, "snapshot/part.safetensors")
    safetensors.numpy.save_file({"a": np.zeros(3)}, "part.safetensors")
    for file in ("../part.safetensors", str(Path("part.safetensors").absolute())):
        Path("snapshot/model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
        assert_equal(read_arrays("snapshot"), {"a": np.arange(3.0)})


def test_a_folder_of_one_file_is_read() -> None:
    safetensors.numpy.save_file(ARRAYS, "model.safetensors")
    assert_equal(read_arrays(Path()), ARRAYS)


@pytest.mark.parametrize("package", needing("torch"))
def test_the_state_of_a_torch_module_gives_its_outputs(package: str) -> None:
    torch: Any = importlib.import_module(package)
    theirs = torch.nn.Linear(4, 3)
    module = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    load_weights(module, theirs.state_dict(), {"weight": WeightRule("kernel", transpose=True)})
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    np.testing.assert_allclose(module(x), theirs(torch.from_numpy(x)).detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("package", needing("torch"))
def test_tensors_of_torch_are_taken_bit_by_bit(package: str) -> None:
    torch: Any = importlib.import_module(package)
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


def sharded_array_of_eight() -> jax.Array:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.device_put(np.arange(16.0), jax.NamedSharding(mesh, jax.P("data")))


def test_sharded_arrays_are_gathered() -> None:
    assert_equal(read_arrays({"x": sharded_array_of_eight()}), {"x": np.arange(16.0, dtype=np.float32)})


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
