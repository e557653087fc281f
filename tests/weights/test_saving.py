"""A module's weights in a file of safetensors, which the library reads."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from flax import nnx
from kit.batches import random
from kit.by_hand import params_of
from kit.modules import Net
from kit.trainers import FOUR, fit, splitting, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentTypeError, CheckpointError
from jaxlit.weights.sources import DTYPES


class Mixed(nnx.Module):
    """Variables of every dtype that jax has on this machine, and what is no weight."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.leaves = nnx.Dict()
        for name, dtype in DTYPES.items():
            if jax.dtypes.canonicalize_dtype(dtype) == dtype:
                bits = rng.integers(0, 2 if name == "BOOL" else 200, (3, dtype.itemsize), np.uint8)
                self.leaves[name] = nnx.Variable(jnp.asarray(bits.view(dtype)[:, 0]))
        self.tied = self.leaves["F32"]
        self.rngs = nnx.Rngs(seed)
        self.accuracy = nnx.metrics.Accuracy()
        self.sown = nnx.Intermediate(jnp.ones(2))
        self.cache = nnx.Cache(jnp.ones(2))


def bits_of(module: Mixed) -> dict[str, bytes]:
    return {name: np.asarray(x[...]).tobytes() for name, x in module.leaves.items()}


def test_every_dtype_comes_back_bit_by_bit() -> None:
    module, other = Mixed(0), Mixed(1)
    assert len(module.leaves) >= 13
    assert bits_of(module) != bits_of(other)
    jl.save_weights(module, "x.safetensors")
    with safetensors.safe_open("x.safetensors", framework="np") as file:
        assert {*file.keys()} == {f"leaves.{name}" for name in module.leaves}
    assert jl.load_weights(other, "x.safetensors").left == []
    assert bits_of(module) == bits_of(other)


@pytest.mark.parametrize("length", range(1, 9))
def test_each_array_begins_at_a_multiple_of_its_item_size(length: int) -> None:
    kinds = {"a": jnp.int8, "b": jnp.float32, "c": jnp.bfloat16, "d": jnp.uint8, "e" * length: jnp.int32}
    module = nnx.Dict({name: nnx.Variable(jnp.zeros(3, kind)) for name, kind in kinds.items()})
    jl.save_weights(module, "x.safetensors")
    data = Path("x.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    assert start % 8 == 0
    for name, kind in kinds.items():
        assert (start + header[name]["data_offsets"][0]) % jnp.dtype(kind).itemsize == 0


def test_names_are_paths_and_the_library_reads_the_values() -> None:
    module = Net(rngs=nnx.Rngs(0))
    jl.save_weights(module, Path("deep") / "x.safetensors")
    read = safetensors.numpy.load_file("deep/x.safetensors")
    names = {"blocks.0.bias", "blocks.0.kernel", "count", "inner.bias", "inner.kernel"}
    names |= {"norm.bias", "norm.mean", "norm.scale", "norm.var", "outer.bias", "outer.kernel"}
    assert read.keys() == names
    np.testing.assert_array_equal(read["blocks.0.kernel"], module.blocks[0].kernel[...])
    np.testing.assert_array_equal(read["norm.var"], module.norm.var[...])
    with safetensors.safe_open("deep/x.safetensors", framework="np") as file:
        assert file.metadata() == {"format": "np", "module": "Net", "jaxlit": jl.__version__}


@pytest.mark.parametrize("strategy", thinned(FOUR, "fsdp"))
def test_sharded_weights_are_gathered(strategy: str) -> None:
    trainer = fit(jl.lazy(Net), random(2), strategy=splitting(strategy))
    jl.save_weights(trainer.module, "x.safetensors")
    expected = params_of(trainer.module)
    read = safetensors.numpy.load_file("x.safetensors")
    other = Net(rngs=nnx.Rngs(3))
    jl.load_weights(other, "x.safetensors")
    assert len(expected) == 8
    for name, x in expected.items():
        np.testing.assert_array_equal(params_of(other)[name], x)
    np.testing.assert_array_equal(read["inner.kernel"], np.asarray(trainer.module.inner.kernel[...]))


def test_no_copy_of_the_weights_stays_in_memory() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(np.arange(16.0, dtype=np.float32), jax.NamedSharding(mesh, jax.P("data")))
    jl.save_weights(One(x), "x.safetensors")
    assert x._npy_value is None  # type: ignore[attr-defined] - where jax keeps it
    np.testing.assert_array_equal(safetensors.numpy.load_file("x.safetensors")["layers.0.w"], np.arange(16.0))
    assert x.tolist() == list(range(16))
    assert x._npy_value is not None  # type: ignore[attr-defined]


def test_a_hook_saves_the_newest_weights() -> None:
    seen: list[Any] = []

    def save(trainer: Any, module: Any) -> None:
        jl.save_weights(module, "x.safetensors")
        seen.append(np.asarray(module.inner.kernel[...]))

    fit(Net(rngs=nnx.Rngs(0)), random(2), None, jl.callbacks.LambdaCallback(on_train_epoch_end=save))
    np.testing.assert_array_equal(safetensors.numpy.load_file("x.safetensors")["inner.kernel"], seen[0])


class One(nnx.Module):
    def __init__(self, value: Any) -> None:
        self.layers = nnx.List([nnx.Dict(w=nnx.Variable(value))])


TWO = nnx.Dict({"a.b": nnx.Param(jnp.ones(1)), "a": nnx.Dict(b=nnx.Param(jnp.ones(1)))})
REFUSED = {
    "a key": (
        One(jax.random.key(0)),
        "x.safetensors",
        CheckpointError,
        r"layers\.0\.w is key<fry>, and a safetensors file",
    ),
    "int4": (One(jnp.ones(2, ml_dtypes.int4)), "x.safetensors", CheckpointError, r"layers\.0\.w is int4"),
    "a class": (One, "x.safetensors", ArgumentTypeError, "takes a flax.nnx module"),
    "a name": (One(jnp.ones(2)), "x.npz", ArgumentTypeError, r"path of a file, \*\.safetensors, got 'x\.npz'"),
    "no path": (One(jnp.ones(2)), None, ArgumentTypeError, r"path of a file, \*\.safetensors, got None"),
    "a shape": (
        One(jax.ShapeDtypeStruct((2,), "float32")),
        "x.safetensors",
        CheckpointError,
        "a shape without an array",
    ),
    "no array": (One("text"), "x.safetensors", CheckpointError, r"layers\.0\.w is"),
    "two": (TWO, "x.safetensors", CheckpointError, r"Two leaves of Dict are called a\.b"),
    "a folder": (One(jnp.ones(2)), "folder.safetensors", CheckpointError, "could not be written"),
}


@pytest.mark.parametrize("mistake", REFUSED)
def test_what_a_file_cannot_hold_is_refused(mistake: str) -> None:
    Path("folder.safetensors").mkdir()
    module, path, kind, message = REFUSED[mistake]
    with pytest.raises(kind, match=message):
        jl.save_weights(module, path)  # type: ignore[arg-type]
    assert [file.name for file in Path().iterdir()] == ["folder.safetensors"]
