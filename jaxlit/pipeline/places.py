"""The devices of a pipeline's ranks, and how arrays get from one rank to another, in one process or in several."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.errors import ArgumentError
from jaxlit.sharding import carry, place, place_whole


@dataclass(frozen=True)
class Rows:
    """An array of a batch of which each process has its own rows.

    Args:
        own: Those of this process, (rows / processes, ...).
        processes: How many there are.
        sharding: How it lies on the first rank.
    """

    own: np.ndarray
    processes: int
    sharding: NamedSharding

    @property
    def shape(self) -> tuple[int, ...]:
        """That of all rows."""
        return (self.processes * len(self.own), *self.own.shape[1:])

    ndim = property(lambda self: self.own.ndim)
    dtype = property(lambda self: self.own.dtype)
    size = property(lambda self: self.processes * self.own.size)

    def __getitem__(self, rows: slice) -> "Rows":
        """Return a part, from and to a row that divides by the processes."""
        part = self.own[rows.start // self.processes : rows.stop // self.processes]
        return Rows(part, self.processes, self.sharding)


class Places:
    """The ranks of a pipeline.

    Args:
        meshes: The mesh of each, all of one shape and with the same axes.
    """

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        self.meshes = list(meshes)
        self._rank_of = {device: rank for rank, mesh in enumerate(meshes) for device in mesh.devices.flat}
        self.several = self.meshes[0].is_multi_process
        self._moved: dict[tuple[Any, int], NamedSharding] = {}
        self._ranks: dict[Any, int | None] = {}

    def rank_of(self, x: Any) -> int | None:
        """Return the rank that an array or a `jax.ShapeDtypeStruct` lies on; None for what is on no device yet."""
        lies = None if isinstance(x, Rows) else getattr(x, "sharding", None)
        return None if lies is None or (isinstance(x, jax.Array) and not x.committed) else self.rank_at(lies)

    def rank_at(self, lies: Any) -> int | None:
        """Return the rank of a sharding."""
        if lies not in self._ranks:
            self._ranks[lies] = self._rank_of.get(next(iter(lies.device_set)))
        return self._ranks[lies]

    def on(self, lies: Any, rank: int) -> NamedSharding:
        """Return a sharding as it is on the devices of another rank."""
        if (lies, rank) not in self._moved:
            mesh: Any = self.meshes[rank]
            spec = P()
            if isinstance(lies, NamedSharding):  # it may lie on the same devices under other axes
                held: Any = lies.mesh
                shape, spec = held.devices.shape, lies.spec
                mesh = Mesh(mesh.devices.reshape(shape), held.axis_names, axis_types=held.axis_types)
            self._moved[lies, rank] = NamedSharding(mesh, spec)
        return self._moved[lies, rank]

    def send(self, arrays: Sequence[Any], ranks: Sequence[int]) -> list[Any]:
        """Return arrays on other ranks, split there as they are here; those that are there already stay."""
        going = [i for i, (x, rank) in enumerate(zip(arrays, ranks, strict=True)) if self.rank_of(x) != rank]
        found = list(arrays)
        if len(going) == 1:  # what most tasks send, for which a list takes half as long again
            x = arrays[going[0]]
            found[going[0]] = self.put(x, self.on(getattr(x, "sharding", None), ranks[going[0]]))
        elif going:
            to = [self.on(getattr(arrays[i], "sharding", None), ranks[i]) for i in going]
            for i, x in zip(going, self.put([arrays[i] for i in going], to), strict=True):
                found[i] = x
        return found

    def put(self, arrays: Any, lies: Any) -> Any:
        """Place a pytree of arrays, which may lie on a rank, as a pytree of shardings says."""
        return jax.tree.map(self._put, arrays, lies) if self.several else jax.device_put(arrays, lies)

    def _put(self, x: Any, to: NamedSharding) -> jax.Array:
        if isinstance(x, Rows):
            return place(x.own, to)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return carry(x, to)
        return place_whole(x, to)


def within_processes(devices: Sequence[jax.Device], shape: Mapping[str, int]) -> list[jax.Device]:
    """Return devices in an order in which each rank has some of every process.

    Args:
        devices: The devices, those of each process as many.
        shape: The size of each axis of the mesh that they are for, one of them -1 at most.

    Raises:
        ArgumentError: There are more ranks than devices in a process.
    """
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    if len(by_process) == 1 or "stage" not in shape:
        return list(devices)
    held, others = min(map(len, by_process.values())), [size for axis, size in shape.items() if axis != "stage"]
    stages = len(devices) // math.prod(others) if shape["stage"] == -1 else shape["stage"]
    if held % stages:
        raise ArgumentError(
            f"Pipeline(stages={stages}): each of the {len(by_process)} processes has {held} devices, which do not "
            f"divide into {stages} stages. A pipeline goes through the devices of each process, and its ranks span "
            f"them all: give stages={held} or a divisor."
        )
    grid = np.array([*by_process.values()]).reshape(len(by_process), stages, -1).swapaxes(0, 1)
    grid = grid.reshape(stages, *(others or [-1]))
    return list(np.moveaxis(grid, 0, [*shape].index("stage")).flat)


def check_processes(meshes: Sequence[Mesh]) -> None:
    """Refuse ranks that do not span all processes.

    Args:
        meshes: The mesh of each rank.

    Raises:
        ArgumentError: One has not as many devices of each.
    """
    every = range(jax.process_count())
    held = [[sum(d.process_index == p for d in mesh.devices.flat) for p in every] for mesh in meshes]
    if len({count for counts in held for count in counts}) > 1:
        raise ArgumentError(
            f"Pipeline: its ranks have {held} devices of each process. A pipeline goes through the devices of each "
            "process, and each of its ranks spans them all: give a mesh whose axis 'stage' lies within processes, or "
            "leave mesh out."
        )
