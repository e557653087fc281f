"""The devices of a pipeline's ranks, and how arrays get from one rank to another, in one process or in several."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.errors import ArgumentError
from jaxlit.sharding import carry, place, place_replicated


@dataclass(frozen=True)
class Rows:
    """An array of a batch of which each process has its own rows.

    Args:
        local: Those of this process, (rows / processes, ...).
        processes: How many there are.
        sharding: Its sharding on the first rank.
    """

    local: np.ndarray
    processes: int
    sharding: NamedSharding

    @property
    def shape(self) -> tuple[int, ...]:
        """That of all rows."""
        return (self.processes * len(self.local), *self.local.shape[1:])

    ndim = property(lambda self: self.local.ndim)
    dtype = property(lambda self: self.local.dtype)

    def __getitem__(self, rows: slice) -> "Rows":
        """Return a part, whose first row and end divide by the processes."""
        part = self.local[rows.start // self.processes : rows.stop // self.processes]
        return Rows(part, self.processes, self.sharding)


class Places:
    """The ranks of a pipeline.

    Args:
        meshes: The mesh of each, all of one shape and with the same axes.
        home: The rank of the loss, on which numbers of several ranks are combined.
        jit: Compiles a function for the devices of a rank, given (rank, function, name, **options of `jax.jit`).
    """

    def __init__(self, meshes: Sequence[Mesh], home: int, jit: Callable[..., Any]) -> None:
        self.meshes, self.home, self.jit = list(meshes), home, jit
        self._rank_of = {device: rank for rank, mesh in enumerate(meshes) for device in mesh.devices.flat}
        self.several = self.meshes[0].is_multi_process
        self._moved: dict[tuple[Any, int], NamedSharding] = {}
        self._ranks: dict[Any, int | None] = {}

    def rank_of(self, x: Any) -> int | None:
        """Return the rank of an array or a `jax.ShapeDtypeStruct`; None for what is on no device yet."""
        sharding = None if isinstance(x, Rows) else getattr(x, "sharding", None)
        return None if sharding is None or (isinstance(x, jax.Array) and not x.committed) else self.rank_at(sharding)

    def rank_at(self, sharding: Any) -> int | None:
        """Return the rank of a sharding."""
        if sharding not in self._ranks:
            self._ranks[sharding] = self._rank_of.get(next(iter(sharding.device_set)))
        return self._ranks[sharding]

    def on(self, sharding: Any, rank: int) -> NamedSharding:
        """Return a sharding as it is on the devices of another rank."""
        if (sharding, rank) not in self._moved:
            mesh: Any = self.meshes[rank]
            spec = P()
            if isinstance(sharding, NamedSharding):  # its mesh may have other axes than the rank's
                old: Any = sharding.mesh
                mesh = Mesh(mesh.devices.reshape(old.devices.shape), old.axis_names, axis_types=old.axis_types)
                spec = sharding.spec
            self._moved[sharding, rank] = NamedSharding(mesh, spec)
        return self._moved[sharding, rank]

    def send(self, arrays: Sequence[Any], ranks: Sequence[int]) -> list[Any]:
        """Return arrays on other ranks, with the same partition; those that are there already stay."""
        going = [i for i, (x, rank) in enumerate(zip(arrays, ranks, strict=True)) if self.rank_of(x) != rank]
        moved = list(arrays)
        if len(going) == 1:  # most tasks send one array, for which a list takes 1.5 times as long
            x = arrays[going[0]]
            moved[going[0]] = self.put(x, self.on(getattr(x, "sharding", None), ranks[going[0]]))
        elif going:
            to = [self.on(getattr(arrays[i], "sharding", None), ranks[i]) for i in going]
            for i, x in zip(going, self.put([arrays[i] for i in going], to), strict=True):
                moved[i] = x
        return moved

    def put(self, arrays: Any, shardings: Any) -> Any:
        """Place a pytree of arrays, on the host or on a rank, in a pytree of shardings."""
        return jax.tree.map(self._put, arrays, shardings) if self.several else jax.device_put(arrays, shardings)

    def gather(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], str]:
        """Return arrays of all ranks on the first device, or in several processes on the first rank, and where that is.

        Where there is no room they go to the host; if jax has no host device they stay.
        """
        mesh = self.meshes[0]
        devices = [*mesh.local_devices] if self.several else [mesh.devices.flat[0]]
        part = lambda x: math.prod(x.sharding.shard_shape(x.shape)) if self.several else x.size  # noqa: E731
        needed = sum(part(x) * (x.nbytes // max(x.size, 1)) for x in arrays)
        if all(needed <= _room(device) for device in devices):
            if self.several:
                return self.send(arrays, [0] * len(arrays)), "the devices of the first"
            return jax.device_put(list(arrays), devices[0]), str(devices[0])
        if self.several or (host := _host()) is None:
            return list(arrays), "no device, none of which has room for all of it: each array stays where it is"
        return jax.device_put(list(arrays), host), "the host: no device has room for all of it"

    def _put(self, x: Any, to: NamedSharding) -> jax.Array:
        if isinstance(x, Rows):
            return place(x.local, to)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return carry(x, to)
        return place_replicated(x, to)


def _room(device: jax.Device) -> float:
    """Return the free bytes of a device, inf where it does not report them."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)


def _host() -> jax.Device | None:
    """Return the host as a device of jax, None where jax was started without it."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


def mesh_within_processes(devices: Sequence[jax.Device], shape: Mapping[str, int]) -> Mesh | None:
    """Return a mesh of which each rank has some devices of every process; None where there is one process.

    Args:
        devices: The devices, those of each process as many.
        shape: The size of each axis, "stage" among them, one of them -1 at most.

    Raises:
        ArgumentError: There are more ranks than devices in a process.
    """
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    sizes = dict(shape)
    for axis, size in shape.items():
        if size == -1:
            sizes[axis] = len(devices) // -math.prod(shape.values())
    if len(by_process) == 1 or "stage" not in sizes or math.prod(sizes.values()) != len(devices):
        return None
    count, stages = min(map(len, by_process.values())), sizes["stage"]
    if count % stages:
        raise ArgumentError(
            f"Pipeline(stages={stages}): each of the {len(by_process)} processes has {count} devices, which do not "
            f"divide into {stages} stages. A pipeline goes through the devices of each process, and its ranks span "
            f"them all: give stages={count} or a divisor, or start one process for all devices of a host."
        )
    # Not by jax.make_mesh, which may order devices by their network.
    grid = np.array([*by_process.values()]).reshape(len(by_process), stages, -1).swapaxes(0, 1)
    grid = grid.reshape(stages, *(size for axis, size in sizes.items() if axis != "stage"))
    grid = grid.reshape(stages) if len(sizes) == 1 else np.moveaxis(grid, 0, [*sizes].index("stage"))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def check_processes(meshes: Sequence[Mesh]) -> None:
    """Refuse ranks whose k-th devices are of different processes: no array can be sent between them.

    Args:
        meshes: The mesh of each rank.

    Raises:
        ArgumentError: They are not.
    """
    processes = [[device.process_index for device in mesh.devices.flat] for mesh in meshes]
    if any(row != processes[0] for row in processes):
        raise ArgumentError(
            f"Pipeline: the devices of its ranks are of processes {processes}. The k-th device of each rank must be of "
            "the same process, which sends from one to the next: give a mesh whose axis 'stage' is within processes, "
            "or leave mesh out."
        )
