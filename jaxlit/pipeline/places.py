"""The devices of a pipeline's ranks, and how arrays get from one rank to another."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


class Places:
    """The ranks of a pipeline.

    Args:
        meshes: The mesh of each, all of one shape and with the same axes.
    """

    def __init__(self, meshes: Sequence[Mesh]) -> None:
        self.meshes = list(meshes)
        self._rank_of = {device: rank for rank, mesh in enumerate(meshes) for device in mesh.devices.flat}
        self._moved: dict[tuple[Any, int], NamedSharding] = {}
        self._ranks: dict[Any, int | None] = {}

    def rank_of(self, x: Any) -> int | None:
        """Return the rank that an array or a `jax.ShapeDtypeStruct` lies on; None for what is on no device yet."""
        lies = getattr(x, "sharding", None)
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
            found[going[0]] = jax.device_put(x, self.on(getattr(x, "sharding", None), ranks[going[0]]))
        elif going:
            to = [self.on(getattr(arrays[i], "sharding", None), ranks[i]) for i in going]
            for i, x in zip(going, jax.device_put([arrays[i] for i in going], to), strict=True):
                found[i] = x
        return found
