"""Shardings by hand, for loops of one's own: the functions that the strategies are made of."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import checks as check
from jaxlit.errors import ArgumentError

__all__ = ["all_reduce", "mesh", "place", "place_state", "rows"]


def __dir__() -> list[str]:
    return __all__


def mesh(shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return a mesh of devices, ordered so that neighbours on it are near each other where the hardware tells.

    Args:
        shape: The size of each axis by its name; one of them may be -1, for all devices that are left.
        devices: The devices; None for all there are.

    Raises:
        ArgumentError: The sizes do not multiply to the number of devices.

    Example:
        >>> import jaxlit as jl
        >>> mesh = jl.sharding.mesh({"data": 1, "fsdp": -1})
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = dict(shape)
    known = all(isinstance(axis, str) and (size == -1 or check.is_int(size, low=1)) for axis, size in sizes.items())
    if not sizes or not known or [*sizes.values()].count(-1) > 1:
        raise ArgumentError(
            f"jl.sharding.mesh(shape) takes the size of each axis by its name, one of them -1 at most, got {shape!r}."
        )
    product = math.prod(size for size in sizes.values() if size != -1)
    for axis, size in sizes.items():
        if size == -1 and len(devices) % product == 0:
            sizes[axis] = len(devices) // product
    if math.prod(sizes.values()) != len(devices):
        raise ArgumentError(
            f"A mesh of {dict(shape)} has {'a multiple of ' if -1 in sizes.values() else ''}{product} devices, and "
            f"there are {len(devices)}. Its sizes must multiply to the number of devices."
        )
    automatic = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic, devices=devices)


def rows(mesh: Mesh, axes: str | Sequence[str] = "data") -> NamedSharding:
    """Return the sharding of arrays whose rows are split over mesh axes.

    Args:
        mesh: The mesh.
        axes: The axis, or several that split the rows together.

    Raises:
        ArgumentError: The mesh has no such axis.

    Example:
        >>> import jaxlit as jl
        >>> sharding = jl.sharding.rows(jl.sharding.mesh({"data": -1}))
    """
    axes = _known(mesh, axes, "rows")
    return NamedSharding(mesh, P(axes[0] if len(axes) == 1 else axes))


def place(batch: Any, sharding: Any) -> Any:
    """Place a host batch on the devices.

    Args:
        batch: A pytree of numpy arrays, (rows, ...) or single numbers; in several processes this one's rows.
        sharding: That of arrays with rows, whose number it divides; numbers lie whole on each device. Or a pytree like
            the batch, of a sharding for each leaf.

    Returns:
        The same pytree, of global `jax.Array`s.

    Example:
        >>> import jaxlit as jl, numpy as np
        >>> sharding = jl.sharding.rows(jl.sharding.mesh({"data": -1}))
        >>> batch = jl.sharding.place({"x": np.ones((8, 2), np.float32)}, sharding)
    """
    if isinstance(sharding, NamedSharding):
        whole = NamedSharding(sharding.mesh, P())
        sharding = jax.tree.map(lambda x, split=sharding: split if np.ndim(x) else whole, batch)
    return jax.make_array_from_process_local_data(sharding, batch)


def place_state(
    state: Any, mesh: Mesh, how: str = "replicate", *, axes: str | Sequence[str] = "data", min_size: int = 1024
) -> Any:
    """Place arrays whole on each device, or split as `strategy="fsdp"` splits them.

    Args:
        state: A pytree of arrays: `nnx.state(module)`, an optimizer's state.
        mesh: The mesh.
        how: "replicate", or "shard": each array along its largest dim that divides by the size of `axes`.
        axes: The mesh axis, or several together, that "shard" splits over.
        min_size: The most elements of an array that "shard" leaves whole.

    Raises:
        ArgumentError: `how` is another word, or the mesh has no such axis.

    Example:
        >>> import jaxlit as jl
        >>> from flax import nnx
        >>> mesh = jl.sharding.mesh({"data": -1})
        >>> model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        >>> nnx.update(model, jl.sharding.place_state(nnx.state(model), mesh, "shard"))
    """
    check.one_of("how", how, ("replicate", "shard"), owner="jl.sharding.place_state")
    axes = _known(mesh, axes, "place_state")
    parts = math.prod(mesh.shape[axis] for axis in axes)

    def lies(x: Any) -> NamedSharding:
        dim = largest_dim(x.shape, parts, min_size) if how == "shard" else None
        return NamedSharding(mesh, split_dim(dim, axes))

    return jax.tree.map(lambda x: jax.device_put(x, lies(x)), state)


def all_reduce(tree: Any, axis: str | Sequence[str], how: str = "mean") -> Any:
    """Return the mean or the sum of arrays over the devices of a mesh axis, inside `jax.shard_map` or `jax.pmap`.

    Gradients of a loss that is a mean over rows are averaged, those of a sum added up.

    Args:
        tree: A pytree of arrays.
        axis: The axis, or several.
        how: "mean" or "sum".

    Raises:
        ArgumentError: `how` is another word.

    Example:
        >>> import jax, jax.numpy as jnp, jaxlit as jl
        >>> mean = jax.vmap(lambda x: jl.sharding.all_reduce(x, "data"), axis_name="data")(jnp.arange(4.0))
    """
    check.one_of("how", how, ("mean", "sum"), owner="jl.sharding.all_reduce")
    return (jax.lax.pmean if how == "mean" else jax.lax.psum)(tree, axis)


def largest_dim(shape: Sequence[int], parts: int, min_size: int = 0) -> int | None:
    """Return the largest dim that divides by a number; None if there is none, or the array has `min_size` elements."""
    dividing = [dim for dim, size in enumerate(shape) if size % parts == 0]
    if math.prod(shape) <= min_size or not dividing:
        return None
    return max(dividing, key=lambda dim: shape[dim])


def split_dim(dim: int | None, axes: Sequence[str]) -> P:
    """Return the partition of an array whose one dim is split over mesh axes; None for no dim."""
    return P() if dim is None else P(*(None,) * dim, axes[0] if len(axes) == 1 else tuple(axes))


def _known(mesh: Mesh, axes: str | Sequence[str], owner: str) -> tuple[str, ...]:
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if not axes or (unknown := [axis for axis in axes if axis not in mesh.axis_names]):
        given = unknown if axes else axes
        raise ArgumentError(f"jl.sharding.{owner}(axes=...) takes axes of the mesh {dict(mesh.shape)}, got {given}.")
    return axes
