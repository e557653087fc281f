"""Creates arrays in their shardings."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.distributed.same_job import same_program
from jaxlit.leaf_names import is_key
from jaxlit.programs.jaxpr import reaches
from jaxlit.sharding import carry, place_replicated
from jaxlit.strategies.program import named


def create(init: Callable[..., Any], shardings: Any, *inputs: Any, donate: bool = False) -> Any:
    """Run `init(*inputs)` so that each result is created in its sharding.

    Where the results are on several sets of devices, each set computes its own: no device ever holds another's.

    Args:
        init: A function of arrays to a pytree of arrays.
        shardings: The same pytree, of shardings.
        *inputs: Pytrees of arrays.
        donate: Whether the inputs may be overwritten.
    """
    wanted, treedef = jax.tree.flatten(shardings)
    groups: dict[Any, list[int]] = {}
    for i, sharding in enumerate(wanted):
        groups.setdefault(tuple(sharding.mesh.devices.flat), []).append(i)
    made: list[Any] = [None] * len(wanted)
    for places in groups.values():
        some, alone = partial(_leaves_at, tuple(places), init), len(groups) == 1
        some, given = (some, inputs) if alone else _of_what_is_used(some, inputs)
        arrays = _on_one_set(some, [wanted[i] for i in places], given, donate=donate and alone)
        for i, array in zip(places, arrays, strict=True):
            made[i] = array
    return treedef.unflatten(made)


def _leaves_at(places: tuple[int, ...], init: Callable[..., Any], *inputs: Any) -> list[jax.Array]:
    leaves = jax.tree.leaves(init(*inputs))  # XLA drops what only the others need
    return [leaves[i] for i in places]


def _of_what_is_used(init: Callable[..., Any], inputs: Any) -> tuple[Callable[..., Any], Any]:
    """Return a function of only the inputs that its results depend on: the others are not sent anywhere."""
    leaves, treedef = jax.tree.flatten(inputs)
    closed = jax.make_jaxpr(lambda *x: init(*treedef.unflatten(x)))(*leaves)
    used = reaches(closed.jaxpr, range(len(closed.jaxpr.outvars)))
    kept = [i for i, is_used in enumerate(used) if is_used]

    def some(*given: Any) -> Any:
        run = jaxpr_as_fun(closed)
        values = dict(zip(kept, given, strict=True))
        return run(*(values[i] if i in values else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(leaves)))

    return some, tuple(leaves[i] for i in kept)


def _on_one_set(init: Callable[..., Any], shardings: list[Any], inputs: Any, *, donate: bool) -> list[jax.Array]:
    if inputs and not donate:
        # Arrays that the caller holds may be committed to other devices.
        inputs = jax.tree.map(lambda x: _onto(x, shardings[0].mesh), inputs)
    leaves, treedef = jax.tree.flatten(inputs)
    # A typed key becomes raw data, for which its buffer cannot be reused.
    kept = [x if is_key(x) else None for x in leaves]

    def build(given: list[Any], kept: list[Any]) -> Any:
        return init(*treedef.unflatten(y if x is None else x for x, y in zip(kept, given, strict=True)))

    given = [None if is_key(x) else x for x in leaves]
    build = named("create_state", build)
    program = jax.jit(build, out_shardings=shardings, donate_argnums=0 if donate else ())
    with _kernel_of_random_bits(shardings[0].mesh):
        same_program("create_state", lambda: program.trace(given, kept))
        made = program(given, kept)
    # Without jit nothing follows out_shardings.
    return jax.device_put(made, shardings) if jax.config.jax_disable_jit else made  # type: ignore[attr-defined]


@contextlib.contextmanager
def _kernel_of_random_bits(mesh: Mesh) -> Iterator[None]:
    """Draw random bits on a single GPU by jax's own kernel, which gives the same ones.

    XLA unrolls them otherwise, and takes minutes to compile the weights of a few dozen layers. On several devices it
    could not split the kernel.
    """
    name, config = "jax_threefry_gpu_kernel_lowering", jax.config
    is_set = getattr(config, name, True)  # True: a jax that has no such flag chooses by itself
    if is_set or mesh.size > 1 or mesh.devices.flat[0].platform != "gpu":
        yield
        return
    config.update(name, True)
    try:
        yield
    finally:
        config.update(name, False)


def _untyped(x: jax.Array) -> jax.Array:
    """Return an array in its place, on a mesh of Auto axes: one of Explicit axes would be a part of its type."""
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or set(sharding.mesh.axis_types) == {AxisType.Auto}:
        return x
    mesh: Any = sharding.mesh
    automatic = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
    return jax.device_put(x, NamedSharding(automatic, sharding.spec))


def _onto(x: Any, mesh: jax.sharding.Mesh) -> jax.Array:
    # An array on these devices keeps its sharding: replicated, it might not fit.
    if isinstance(x, jax.Array) and x.sharding.device_set == set(mesh.devices.flat):
        return _untyped(x)
    replicated = NamedSharding(mesh, P())
    if not mesh.is_multi_process:
        return jax.device_put(x, replicated)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return carry(x, replicated)
    key = is_key(x)  # which jax does not put onto the devices of other processes
    # The processes have compared their arrays: jax, which would send all of them around for it, need not.
    data = place_replicated(jax.random.key_data(x) if key else x, replicated)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x)) if key else data
