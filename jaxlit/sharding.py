"""Shardings by hand, for the user's own loops: the functions on which the strategies are built.

First meshes, then batches, then the state; last what hides the mesh of a caller from the programs of jaxlit.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, Literal, TypeVar

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import checks as check
from jaxlit.errors import ArgumentError, ArgumentTypeError, add_note
from jaxlit.texts import is_key, shown

HOST = "pinned_host"  # the host's memory, in which an array of a device may be
BATCH_AXES = ("data", "batch", "fsdp")  # as the axes that split the batch are called

__all__ = ["all_reduce", "mesh", "place", "place_state", "rows"]


def __dir__() -> list[str]:
    return __all__


def mesh(
    shape: Mapping[str, int],
    devices: Sequence[jax.Device] | None = None,
    *,
    axis_types: Literal["auto", "explicit"] = "auto",
) -> Mesh:
    """Return a mesh of devices, ordered so that neighbours are near each other, where the hardware reports it.

    Args:
        shape: The size of each axis by its name; one of them may be -1, for all devices that remain.
        devices: The devices; None for all there are.
        axis_types: "auto" leaves the shardings of a computation to XLA, with "explicit" they are part of the types of
            arrays, as on a mesh of `jax.make_mesh`.

    Raises:
        ArgumentError: The sizes do not multiply to the number of devices, or `axis_types` is another word.

    Example:
        >>> import jaxlit as jl
        >>> mesh = jl.sharding.mesh({"data": 1, "fsdp": -1})
    """
    check.one_of("axis_types", axis_types, ("auto", "explicit"), owner="jl.sharding.mesh")
    built = build_mesh(shape, jax.devices() if devices is None else list(devices), "jl.sharding.mesh(shape)")
    return built if axis_types == "auto" else with_types(built, built.axis_names)


def build_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device], owner: str) -> Mesh:
    """Return a mesh; see `mesh`. `owner` is the function that was called, for errors."""
    sizes = dict(shape) if isinstance(shape, Mapping) else {}
    known = all(isinstance(axis, str) and (size == -1 or check.is_int(size, low=1)) for axis, size in sizes.items())
    if not sizes or not known or [*sizes.values()].count(-1) > 1:
        raise ArgumentError(
            f"{owner} takes the size of each axis by its name, at least 1 and one of them -1 at most, got "
            f"{shown(shape)}."
        )
    remaining, rest = divmod(len(devices), math.prod(size for size in sizes.values() if size != -1))
    if rest or (remaining > 1 and -1 not in sizes.values()):
        raise ArgumentError(
            f"{owner}: the sizes of {dict(shape)} do not multiply to {len(devices)}, the number of devices. Change one "
            "of them, or give -1 for one."
        )
    sizes = {axis: remaining if size == -1 else size for axis, size in sizes.items()}
    automatic = (AxisType.Auto,) * len(sizes)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=automatic, devices=devices)
    return Mesh(_over_slices([*sizes.values()], slices, devices), tuple(sizes), axis_types=automatic)


def first_devices(count: int | None) -> list[jax.Device]:
    """Return the first `count` devices of all processes, all for None; raise an ArgumentError if there are fewer."""
    present = jax.devices()
    if count is None:
        return present
    if count > len(present):
        platform = present[0].platform
        hint = f" Set XLA_FLAGS=--xla_force_host_platform_device_count={count} to simulate them."
        raise ArgumentError(
            f"Trainer(devices={count}) asks for more devices than the {len(present)} {platform} devices "
            f"here.{hint if platform == 'cpu' else ''}"
        )
    return present[:count]


def _over_slices(sizes: list[int], slices: int, devices: Sequence[jax.Device]) -> np.ndarray:
    """Divide the first axis that can be over the slices of the devices, since the network between slices is slow."""
    for axis, size in enumerate(sizes):
        if size % slices == 0:
            between = [slices if i == axis else 1 for i in range(len(sizes))]
            sizes[axis] = size // slices
            return mesh_utils.create_hybrid_device_mesh(sizes, between, devices)
    raise ArgumentError(f"A mesh of sizes {sizes} has no axis that divides into the {slices} slices of its devices.")


def rows(mesh: Mesh, axes: str | Sequence[str] = "data") -> NamedSharding:
    """Return the sharding of arrays whose rows are split over mesh axes.

    Args:
        mesh: The mesh.
        axes: The axis, or more that split the rows together.

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
        sharding: That of arrays with rows, whose number it divides; numbers are replicated. Or a pytree like
            the batch, of a sharding for each leaf.

    Returns:
        The same pytree, of global `jax.Array`s.

    Raises:
        ValueError: The rows of an array do not divide, from jax.

    Example:
        >>> import jaxlit as jl, numpy as np
        >>> sharding = jl.sharding.rows(jl.sharding.mesh({"data": -1}))
        >>> batch = jl.sharding.place({"x": np.ones((8, 2), np.float32)}, sharding)
    """
    shardings = sharding
    if isinstance(sharding, NamedSharding):
        replicated = NamedSharding(sharding.mesh, P())
        shardings = jax.tree.map(lambda x: sharding if np.ndim(x) else replicated, batch)
    return jax.make_array_from_process_local_data(shardings, batch)


def array_of_shards(shape: Sequence[int], to: jax.sharding.Sharding, read: Callable[[Any], np.ndarray]) -> jax.Array:
    """Return an array from what `read` returns for the index of each shard; devices with the same one share a read."""
    shards = {}

    def shard(index: Any) -> np.ndarray:
        if (key := str(index)) not in shards:
            shards[key] = read(index)
        return shards[key]

    return jax.make_array_from_callback(tuple(shape), to, shard)


def is_abstract(batch: Any) -> bool:
    """Return whether a batch consists of shapes and dtypes, as a plan has it."""
    leaves = jax.tree.leaves(batch)
    return bool(leaves) and leaves[0].__class__ is jax.ShapeDtypeStruct


def place_shapes(batch: Any, shardings: Any) -> Any:
    """Return the shapes and dtypes of a global batch with the shardings of its leaves."""
    return jax.tree.map(lambda x, to: x.update(sharding=to), batch, shardings)


def place_replicated(batch: Any, shardings: Any) -> Any:
    """Place a host batch of which every process has all rows.

    Args:
        batch: A pytree of numpy arrays.
        shardings: The same pytree, of shardings.
    """

    def put(x: Any, to: NamedSharding) -> jax.Array:
        x = np.asarray(x, jax.dtypes.canonicalize_dtype(x.dtype))
        return jax.make_array_from_callback(x.shape, to, lambda at: x[at])

    return jax.tree.map(put, batch, shardings)


def constrain(tree: Any, shardings: Any) -> Any:
    """Constrain the arrays of a tree inside a step to a tree of shardings; None lets XLA choose."""
    return tree if shardings is None else jax.tree.map(jax.lax.with_sharding_constraint, tree, shardings)


def carry(x: jax.Array, to: NamedSharding) -> jax.Array:
    """Move an array from one mesh to another of as many devices of each process.

    Each process moves its own parts, from the k-th device of one mesh to the k-th of the other.
    """
    if is_key(x):
        data = carry(jax.random.key_data(x), NamedSharding(to.mesh, P(*to.spec)))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    old: Any = x.sharding.mesh  # type: ignore[attr-defined]
    there: Any = to.mesh
    mesh = Mesh(there.devices.reshape(old.devices.shape), old.axis_names, axis_types=old.axis_types)
    onto = dict(zip(old.devices.flat, mesh.devices.flat, strict=True))
    shards = x.addressable_shards
    parts = jax.device_put([shard.data for shard in shards], [onto[shard.device] for shard in shards])
    moved = jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, x.sharding.spec), parts)  # type: ignore[attr-defined]
    return moved if moved.sharding.is_equivalent_to(to, x.ndim) else _resharding(to)(moved)


@lru_cache(maxsize=1024)
def _resharding(to: NamedSharding) -> Any:
    return jax.jit(lambda x: x, out_shardings=to)


@lru_cache(maxsize=1024)
def rows_by_process(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Return whether each process's devices hold entire rows of an array that no other process holds."""
    parts_of: dict[int, set[Any]] = {}  # by process
    for device, index in sharding.devices_indices_map(shape).items():
        part = tuple(each.indices(size)[:2] for each, size in zip(index, shape, strict=True))
        parts_of.setdefault(device.process_index, set()).add(part)
    rows = [begin for parts in parts_of.values() for begin in {part[0] for part in parts}]
    sizes = [sum(math.prod(end - begin for begin, end in part) for part in parts) for parts in parts_of.values()]
    return len(set(rows)) == len(rows) and all(size * len(parts_of) == math.prod(shape) for size in sizes)


def place_state(
    state: Any, mesh: Mesh, how: str = "replicate", *, axes: str | Sequence[str] = "data", min_size: int = 1024
) -> Any:
    """Place arrays replicated, or split as `strategy="fsdp"` splits them.

    Args:
        state: A pytree of arrays: `nnx.state(module)`, an optimizer's state.
        mesh: The mesh.
        how: "replicate", or "shard": each array along its largest dim that divides by the size of `axes`; if none
            does, along dims that do together, or over a part of the devices.
        axes: The mesh axis, or more together, that "shard" splits over.
        min_size: The most elements of an array that "shard" does not split.

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
    check.integer("min_size", min_size, low=0, owner="jl.sharding.place_state")
    axes = _known(mesh, axes, "place_state")

    def place(x: Any) -> jax.Array:
        x = x if hasattr(x, "shape") else np.asarray(x)
        split = by_size(x, mesh, axes, min_size=min_size) if how == "shard" else NamedSharding(mesh, P())
        return jax.device_put(x, split)

    return jax.tree.map(place, state)


def all_reduce(tree: Any, axis: str | Sequence[str], how: str = "mean") -> Any:
    """Return the mean or the sum of arrays over the devices of a mesh axis, inside `jax.shard_map` or `jax.pmap`.

    Gradients of a loss that is a mean over rows are averaged, those of a sum added up.

    Args:
        tree: A pytree of arrays.
        axis: The axis, or more.
        how: "mean" or "sum".

    Raises:
        ArgumentError: `how` is another word.

    Example:
        >>> import jax, jax.numpy as jnp, jaxlit as jl
        >>> mean = jax.vmap(lambda x: jl.sharding.all_reduce(x, "data"), axis_name="data")(jnp.arange(4.0))
    """
    check.one_of("how", how, ("mean", "sum"), owner="jl.sharding.all_reduce")
    return (jax.lax.pmean if how == "mean" else jax.lax.psum)(tree, axis)


def by_size(
    x: Any, mesh: Mesh, axes: Sequence[str], *, min_size: int = 0, unsplit_dims: Collection[int] = ()
) -> NamedSharding:
    """Return the sharding of an array whose dims have no names: over as many devices as its sizes allow.

    Its largest dim that divides by the number of devices is split. If none does, dims that divide together are, or else
    dims that divide by a part of the devices, and more than one device holds each part.

    Args:
        x: The array, or its shape and dtype.
        mesh: The mesh.
        axes: The mesh axes to split over, together.
        min_size: The most elements of an array that is replicated.
        unsplit_dims: Dims that are not split.
    """
    parts = math.prod(mesh.shape[axis] for axis in axes)
    free = sorted((d for d in range(len(x.shape)) if d not in unsplit_dims), key=lambda d: -x.shape[d])
    if parts == 1 or math.prod(x.shape) <= min_size or not free:
        return NamedSharding(mesh, P())
    for dim in free:
        if x.shape[dim] % parts == 0:
            return NamedSharding(mesh, split_dim(dim, axes))
    return _over_factors(x.shape, free, mesh, axes, parts)


def _over_factors(
    shape: Sequence[int], free: Sequence[int], mesh: Mesh, axes: Sequence[str], parts: int
) -> NamedSharding:
    """Split dims into factors of the number of devices, on a mesh whose axis is divided into these."""
    factors = dict[int, int]()
    for dim in free:
        if (factor := math.gcd(shape[dim], parts)) > 1:
            factors[dim], parts = factor, parts // factor
    begin = mesh.axis_names.index(axes[0])
    around = slice(begin, begin + len(axes))
    # Where the axes are not neighbours, the devices would be in another order.
    if not factors or mesh.axis_names[around] != tuple(axes):
        return NamedSharding(mesh, P())
    counts, sizes, axis_names = [*factors.values(), parts], list(mesh.axis_sizes), list(mesh.axis_names)
    sizes[around], axis_names[around] = counts, [f"{axes[0]}.{i}" for i in range(len(counts))]
    divided = Mesh(mesh.devices.reshape(sizes), axis_names, axis_types=(AxisType.Auto,) * len(sizes))
    name_of = dict(zip(factors, axis_names[begin:], strict=False))
    return NamedSharding(divided, P(*map(name_of.get, range(max(factors) + 1))))


def split_dim(dim: int, axes: Sequence[str]) -> P:
    """Return the partition of an array whose one dim is split over mesh axes."""
    return P(*(None,) * dim, axes[0] if len(axes) == 1 else tuple(axes))


def with_types(mesh: Mesh, explicit: Collection[str]) -> Mesh:
    """Return a mesh with some axes Explicit, and the others Auto."""
    kinds = [AxisType.Explicit if axis in explicit else AxisType.Auto for axis in mesh.axis_names]
    return Mesh(mesh.devices, mesh.axis_names, axis_types=tuple(kinds))


def explicit_axes(mesh: Any) -> tuple[str, ...]:
    """Return the axes of a mesh whose shardings are part of the types of arrays."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(axis for axis, kind in kinds if kind == AxisType.Explicit)


def over_axes(spec: P, axes: Collection[str]) -> P:
    """Return a partition without its other axes."""
    entries = [tuple(axis for axis in axes_of(P(entry)) if axis in axes) for entry in spec]
    return P(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def axes_of(spec: P) -> tuple[Any, ...]:
    """Return the names in a partition, one by one."""
    return tuple(x for entry in spec for x in (entry if isinstance(entry, tuple) else (entry,)) if x is not None)


def _known(mesh: Mesh, axes: str | Sequence[str], owner: str) -> tuple[str, ...]:
    if not isinstance(mesh, Mesh):
        raise ArgumentTypeError(
            f"jl.sharding.{owner}(mesh, ...) takes a jax.sharding.Mesh, as jl.sharding.mesh makes it, got "
            f"{shown(mesh)}."
        )
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    if not axes or not {*axes} <= {*mesh.axis_names}:
        raise ArgumentError(f"jl.sharding.{owner}(axes=...) takes axes of the mesh {dict(mesh.shape)}, got {axes}.")
    return axes


F = TypeVar("F", bound=Callable[..., Any])

_NO_DEVICES: Any = np.empty((), dtype=object)
NO_MESH = Mesh(_NO_DEVICES, ())
is_out: ContextVar[bool] = ContextVar("is_out", default=False)  # part of the key of compiled programs


def note_mesh(error: Exception, batch: Any = None) -> None:
    """Note on an error about shardings, raised in a trace, the mesh that the code sees, and what takes another one."""
    mesh, text = jax.sharding.get_abstract_mesh(), f"{type(error).__name__} {error}"
    sizes, explicit = dict(mesh.shape), explicit_axes(mesh)
    if not any(word in text for word in ("shard", "Shard", "PartitionSpec", "in mesh", *["@"] * bool(explicit))):
        return
    if mesh.empty:
        note = (
            "No mesh is in context: a step that sees the rows of one replica, and a member of jl.fit_many, name no "
            "mesh axes. Take 'single', 'ddp' or 'fsdp' with axis_types='explicit'."
        )
    elif not explicit:
        note = (
            f"The axes of the mesh {sizes} are Auto: XLA shards what the code computes. Code that names shardings, by "
            "out_sharding=, jax.sharding.reshard or a P in jax.device_put, takes Explicit axes: "
            "Trainer(mesh=jax.make_mesh(...)), or axis_types='explicit' of a strategy."
        )
    else:
        note = (
            f"The mesh {sizes} has the Explicit axes {explicit}: how an array is split follows from the code, by "
            "out_sharding= where jax asks for it. Code that names no shardings takes Auto axes: "
            f"Trainer(mesh={sizes}), or axis_types=(jax.sharding.AxisType.Auto,) * {len(sizes)} of jax.make_mesh."
        )
        if any(x.ndim and not axes_of(jax.typeof(x).sharding.spec) for x in jax.tree.leaves(batch)):
            note += " The rows of this batch do not divide, and none is split: make it with drop_remainder=True."
    add_note(error, note)


def untyped(x: Any) -> Any:
    """Return an array where it is, or its shape and dtype, without a type over Explicit axes: meshes do not mix."""
    mesh: Any = getattr(getattr(x, "sharding", None), "mesh", NO_MESH)
    if not explicit_axes(mesh):
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return renamed(x, with_types(mesh, ()))


def renamed(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Return an array where it is, with its mesh replaced by another one of the same devices and names."""
    if is_key(x):
        return jax.random.wrap_key_data(renamed(jax.random.key_data(x), mesh), impl=jax.random.key_impl(x))
    sharding = NamedSharding(mesh, x.sharding.spec)  # type: ignore[attr-defined]
    return jax.make_array_from_single_device_arrays(x.shape, sharding, [shard.data for shard in x.addressable_shards])


def under(mesh: Mesh, fn: Any) -> Any:
    """Return a function that traces, or a compiled program, called where a mesh is set.

    `jax.device_put(x, P("data"))` asks for the mesh that is set; that of a trace is not enough.
    """

    def around(call: Callable[..., Any]) -> Any:
        def set_and_call(*args: Any) -> Any:
            with jax.set_mesh(mesh):
                return call(*args)

        return set_and_call

    called = around(fn)
    if hasattr(fn, "trace"):
        called.trace = around(fn.trace)
    return called


def out_of_meshes(fn: F) -> F:
    """Return `fn` running without the mesh that `jax.set_mesh` has put around it.

    A strategy sets its own mesh where it traces; jax refuses programs on other devices, or with axes of other types,
    than those of the mesh in context.
    """

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if jax.sharding.get_abstract_mesh().empty:
            return fn(*args, **kwargs)
        with out():
            return fn(*args, **kwargs)

    return call  # type: ignore[return-value]


@contextmanager
def out(wanted: bool = True) -> Iterator[None]:
    """Leave the mesh in context, if `wanted`."""
    if not wanted or (is_out.get() and jax.sharding.get_abstract_mesh().empty):
        yield
        return
    token = is_out.set(True)
    try:
        with jax.set_mesh(NO_MESH):
            yield
    finally:
        is_out.reset(token)
