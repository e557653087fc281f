"""Shardings by hand: where arrays lie, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from kit.batches import random

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError


def test_a_mesh_is_made_of_all_devices_with_one_size_left_open() -> None:
    mesh = jl.sharding.mesh({"data": 2, "fsdp": -1})
    assert dict(mesh.shape) == {"data": 2, "fsdp": 4} and list(mesh.devices.flat) == jax.devices()
    assert dict(jl.sharding.mesh({"rows": -1}, jax.devices()[:3]).shape) == {"rows": 3}


NO_MESH = [
    ({"data": 3}, r"\{'data': 3\} do not multiply to 8"),
    ({"data": 3, "fsdp": -1}, r"-1\} do not multiply to 8"),
    ({"data": -1, "fsdp": -1}, "one of them -1 at most"),
    ({"data": 0}, "the size of each axis"),
    ({}, "the size of each axis"),
]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s, m: s.place_state(np.ones(8), {"data": 8}), r"place_state\(mesh, .* got \{'data': 8\}"),
        (lambda s, m: s.place_state(1.0, m, min_size=-1), r"min_size=\.\.\.\) takes an int of at least 0"),
        (lambda s, m: s.rows({"data": 8}), r"sharding\.rows\(mesh, "),
        (lambda s, m: s.rows(m, "model"), r"rows\(axes=...\) takes axes of the mesh.*'model'"),
        (lambda s, m: s.place_state({}, m, "split"), r"place_state\(how=...\) takes one of 'replicate', 'shard'"),
        (lambda s, m: s.place_state({}, m, axes=()), r"place_state\(axes=...\) takes axes of the mesh"),
        (lambda s, m: s.all_reduce(1.0, "data", "max"), r"all_reduce\(how=...\) takes one of 'mean', 'sum'"),
        *((lambda s, m, shape=shape: s.mesh(shape), words) for shape, words in NO_MESH),
    ],
)
def test_what_there_is_not_is_refused_by_name(call, words) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        call(jl.sharding, jl.sharding.mesh({"data": 8}))


def test_rows_are_split_and_numbers_lie_whole() -> None:
    mesh, (batch,) = jl.sharding.mesh({"data": 2, "fsdp": 4}), random(1)
    placed = jl.sharding.place(batch | {"scale": np.float32(2)}, jl.sharding.rows(mesh, ("data", "fsdp")))
    assert placed["x"].sharding.spec == P(("data", "fsdp")) and placed["scale"].sharding.spec == P()
    assert {shard.data.shape for shard in placed["x"].addressable_shards} == {(1, 3)}
    np.testing.assert_array_equal(placed["x"], batch["x"])
    assert jl.sharding.rows(mesh).spec == P("data")


def test_a_state_is_split_along_the_largest_dim() -> None:
    mesh, model = jl.sharding.mesh({"data": 8}), nnx.Linear(24, 64, rngs=nnx.Rngs(0))
    before = np.array(model.kernel[...])
    for how, specs in (("replicate", (P(), P())), ("shard", (P(None, "data"), P()))):
        nnx.update(model, jl.sharding.place_state(nnx.state(model), mesh, how))
        assert (model.kernel.sharding.spec, model.bias.sharding.spec) == specs
        np.testing.assert_array_equal(model.kernel[...], before)
    placed = jl.sharding.place_state({"b": np.ones(64), "scale": 2.0}, mesh, "shard", min_size=0)
    assert (placed["b"].sharding.spec, placed["scale"].sharding.spec) == (P("data"), P())


@pytest.mark.parametrize(
    ("shape", "unsplit_dims", "part"),
    [
        ((64, 128), (), (64, 16)),
        ((128, 64), (), (16, 64)),
        ((100, 64), (), (100, 8)),
        ((4, 16, 32), (), (4, 16, 4)),
        ((32, 32), (), (32, 32)),  # 1024 elements stay whole
        ((), (), ()),
        ((96, 64), (0,), (96, 8)),
        ((96, 33), (0,), (96, 33)),
        ((33, 3, 31), (), (33, 3, 31)),  # nothing divides
        ((4, 2, 257), (), (1, 1, 257)),  # two dims divide together
        ((502, 4), (), (251, 1)),
        ((50, 30), (), (25, 15)),  # over four of the eight devices
        ((12, 101), (), (3, 101)),
        ((4, 4, 101), (), (1, 2, 101)),  # four devices along the first, two are left for the second
    ],
)
def test_by_size_splits_as_many_ways_as_sizes_allow(shape, unsplit_dims, part) -> None:
    mesh, x = jl.sharding.mesh({"copies": 1, "data": 8}), np.arange(float(np.prod(shape))).reshape(shape)
    lies = jl.sharding.by_size(x, mesh, ("data",), min_size=1024, unsplit_dims=unsplit_dims)
    placed = jax.device_put(x, lies)
    assert lies.shard_shape(shape) == part and list(lies.mesh.devices.flat) == jax.devices()
    np.testing.assert_array_equal(placed, x)


def test_devices_of_several_slices_are_split_by_one_axis(monkeypatch) -> None:
    class Device:
        platform = device_kind = "cpu"
        process_index = 0

        def __init__(self, id: int, slice_index: int) -> None:
            self.id, self.slice_index = id, slice_index

    devices = [Device(i, i % 2) for i in range(8)]
    monkeypatch.setattr(jl.sharding, "Mesh", lambda devices, names, axis_types: devices)
    for shape, inner in (({"data": 2, "fsdp": 4}, 1), ({"a": 1, "data": 4, "fsdp": 2}, 2)):
        made = jl.sharding.mesh(shape, devices)
        assert made.shape == tuple(shape.values())
        axis = list(shape).index("data")
        slices = np.vectorize(lambda d: d.slice_index)(np.moveaxis(made, axis, 0).reshape(made.shape[axis], -1))
        assert (slices == slices[:, :1]).all()  # all that stands at one place of the axis is of one slice
        assert len(np.unique(slices)) == 2 and (slices[: len(slices) // 2] == slices[0, 0]).all(), inner
    with pytest.raises(ArgumentError, match="no axis that divides into the 2 slices"):
        jl.sharding.mesh({"data": 3, "fsdp": 3}, [Device(i, i % 2) for i in range(9)])


@pytest.mark.parametrize(("how", "expected"), [("mean", 1.5), ("sum", 6.0)])
def test_values_of_devices_are_averaged_or_added_up(how, expected) -> None:
    mesh = jl.sharding.mesh({"data": 4}, jax.devices()[:4])
    reduce = lambda x: jl.sharding.all_reduce({"x": x}, "data", how)  # noqa: E731
    mapped = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P())
    assert mapped(jnp.arange(4.0))["x"].tolist() == [expected]
