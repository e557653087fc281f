"""Traces what one replica runs, which may name the axes of the mesh, and removes the mesh from the program."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxlit.errors import ModuleError


def trace_alone(fn: Callable[..., Any], names: Sequence[str], axis: str, count: int, *args: Any) -> tuple[Any, Any]:
    """Trace `fn` as one of `count` replicas, with a mesh of a single device in context.

    A constraint such as `with_sharding_constraint(x, P("data"))` is legal under that mesh, where it would not be inside
    a map over the axis, and has no effect: all rows of a replica are on its device.

    Args:
        fn: The function.
        names: The axes of the mesh.
        axis: The one of the replicas, for collectives.
        count: Replicas.
        *args: Pytrees of arrays or their shapes and dtypes.

    Returns:
        The program, which holds no constraint, and the structure of its results.

    Raises:
        ModuleError: `fn` maps over the mesh itself.
    """
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
    mesh = jax.sharding.Mesh(np.asarray(jax.local_devices()[:1]).reshape((1,) * len(names)), tuple(names))
    with warnings.catch_warnings():
        # In context in this way a mesh is met by constraints alone. As jax.set_mesh has it, it would be a part of each
        # type in the program, which then could not run inside a map over another mesh.
        warnings.filterwarnings("ignore", "`with mesh:`", DeprecationWarning)
        mesh.__enter__()
    try:
        program, shapes = jax.make_jaxpr(fn, axis_env=[(axis, count)], return_shape=True)(*args)
    except ValueError as error:
        if "context mesh cannot be empty" not in str(error):
            raise
        raise ModuleError(
            f"The step maps over the mesh by jax.shard_map, and runs in such a map already: once on each of {count} "
            "replicas. Take a strategy whose step sees the entire batch, for example 'ddp' or 'fsdp'."
        ) from error
    finally:
        mesh.__exit__(None, None, None)
    return _freed(program), jax.tree.structure(shapes)


def _freed(x: Any) -> Any:
    """Return a program, or a parameter of an operation, without constraints."""
    if isinstance(x, core.ClosedJaxpr) and x.jaxpr is not x:  # in later releases the two are one
        return core.ClosedJaxpr(_freed(x.jaxpr), x.consts)
    if isinstance(x, (tuple, list)) and not hasattr(x, "_fields"):
        return type(x)(map(_freed, x))
    if isinstance(x, jax.sharding.NamedSharding):  # of an operation that is to leave its result on the mesh
        return None
    if not isinstance(x, core.Jaxpr):
        return x
    known: dict[Any, Any] = {}  # the variables in place of others

    def in_place_of(var: Any) -> Any:
        if isinstance(var, core.Literal):
            return var
        if var not in known:
            # The mesh is a part of the type of what a constraint returns, and of what is made of it.
            kind, sharding = var.aval, getattr(var.aval, "sharding", None)
            on_mesh = sharding is not None and not sharding.mesh.empty
            known[var] = core.Var(type(kind)(kind.shape, kind.dtype, kind.weak_type)) if on_mesh else var
        return known[var]

    eqns = []
    for eqn in x.eqns:
        invars = list(map(in_place_of, eqn.invars))
        if eqn.primitive.name in ("sharding_constraint", "reshard"):
            known[eqn.outvars[0]] = invars[0]
            continue
        params = {name: _freed(value) for name, value in eqn.params.items()}
        eqns.append(eqn.replace(invars=invars, outvars=list(map(in_place_of, eqn.outvars)), params=params))
    bound = {name: list(map(in_place_of, getattr(x, name))) for name in ("invars", "outvars", "constvars")}
    if (consts := getattr(x, "consts", None)) is not None:  # where a program and its constants are one
        bound["consts"] = consts
    return x.replace(eqns=eqns, **bound)
