"""Ranks in several processes, and where a module goes after a fit."""

from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from kit.refusals import refuses

from jaxlit.errors import ArgumentError
from jaxlit.pipeline import executor as places
from jaxlit.pipeline.executor import Places, check_processes, mesh_within_processes


def of_processes(*indices: int) -> list[Any]:
    """Return devices of these processes, which their network orders otherwise: each process is a slice."""
    return [SimpleNamespace(id=i, process_index=p, slice_index=p, platform="gpu") for i, p in enumerate(indices)]


def processes(mesh: Any) -> list[Any]:
    return np.vectorize(lambda device: device.process_index)(mesh.devices).tolist()


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ({"stage": 2, "data": 4}, [[0, 0, 1, 1]] * 2),
        ({"stage": 4, "data": -1}, [[0, 1]] * 4),
        ({"data": 2, "stage": -1}, [[0] * 4, [1] * 4]),
        ({"stage": 2, "data": 2, "fsdp": 2}, [[[0, 0], [1, 1]]] * 2),
    ],
)
def test_each_rank_has_devices_of_every_process(shape: Any, expected: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(places, "Mesh", lambda grid, axes, **_: SimpleNamespace(devices=grid, axis_names=axes))
    made: Any = mesh_within_processes(of_processes(0, 0, 0, 0, 1, 1, 1, 1), shape)
    assert made.axis_names == tuple(shape) and processes(made) == expected


def test_more_stages_than_devices_of_a_process_are_refused() -> None:
    refuses(
        ArgumentError,
        lambda: mesh_within_processes(of_processes(0, 0, 1, 1), {"stage": 4}),
        r"stages=4\): each of the 2 processes has 2 devices",
        "give stages=2 or a divisor",
    )
    assert mesh_within_processes(of_processes(0, 0, 0, 0), {"stage": 4}) is None


def test_ranks_must_have_devices_of_the_same_processes() -> None:
    ranks: Any = [SimpleNamespace(devices=np.array(of_processes(*row))) for row in ((0, 0, 1, 1), (1, 1, 0, 0))]
    refuses(ArgumentError, lambda: check_processes(ranks), r"\[\[0, 0, 1, 1\], \[1, 1, 0, 0\]\]", "or leave mesh out")
    check_processes(ranks[:1] * 2)


@pytest.mark.parametrize("has_host", [True, False])
def test_what_no_device_has_room_for_goes_to_the_host_or_stays(has_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Mesh(np.array([device]), ("data",)) for device in jax.devices()[:2]]
    arrays = [jax.device_put(np.full(8, k, np.float32), mesh.devices.flat[0]) for k, mesh in enumerate(ranks)]
    monkeypatch.setattr(places, "_room", lambda device: 63)
    if not has_host:
        monkeypatch.setattr(places, "_host", lambda: None)
    result, where = Places(ranks, 0, jax.jit).gather(arrays)
    assert [x.tolist() for x in result] == [[0] * 8, [1] * 8]
    if has_host:
        assert where.startswith("the host") and {x.sharding for x in result} == {result[0].sharding}
    else:
        assert "stays where it is" in where and all(x is y for x, y in zip(result, arrays, strict=True))
    monkeypatch.setattr(places, "_room", lambda device: 64)
    result, where = Places(ranks, 0, jax.jit).gather(arrays)
    assert where == str(jax.devices()[0]) and all(x.devices() == {jax.devices()[0]} for x in result)
