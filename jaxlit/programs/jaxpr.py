"""What a traced program tells about the user's step."""

import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Programs whose inputs are the equation's own, one by one.
CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Return the programs that an equation runs."""
    found = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))]
    return [x for x in found if isinstance(x, (core.Jaxpr, core.ClosedJaxpr))]


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Run one equation; returns its results."""
    results = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def origin(jaxpr: Any, var: Any, rounded: tuple[Any, ...] = ()) -> int | None:
    """Return which input of a program a value is: its place, or None for a value that is computed.

    Args:
        jaxpr: The program.
        var: One of its variables.
        rounded: Two dtypes; a cast from one to the other counts as the value itself.
    """
    order = list(range(getattr(var.aval, "ndim", 0)))  # of the dims, as nnx.scan moves the scanned one and back
    while not isinstance(var, core.Literal):
        if var in jaxpr.invars:
            return jaxpr.invars.index(var) if order == sorted(order) else None
        made_by = next((eqn for eqn in jaxpr.eqns if any(var is out for out in eqn.outvars)), None)
        if made_by is None:
            return None
        if made_by.primitive.name == "transpose":
            place, order = 0, [made_by.params["permutation"][i] for i in order]
        else:
            place = _input_of(made_by, next(i for i, out in enumerate(made_by.outvars) if out is var), rounded)
        if place is None:
            return None
        var = made_by.invars[place]
    return None


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Return how many constants and how many carries a scan takes, in this order, before the arrays that it scans.

    Told by shapes, as jax's releases name them differently: what is scanned and stacked has a dim more outside.
    """
    (body,) = (getattr(x, "jaxpr", x) for x in inner_jaxprs(eqn))
    is_whole = lambda outer, inner: outer.aval.ndim == inner.aval.ndim  # noqa: E731
    carries = sum(map(is_whole, eqn.outvars, body.outvars))
    return sum(map(is_whole, eqn.invars, body.invars)) - carries, carries


def overwrites(eqn: Any) -> bool:
    """Return whether an equation sets an entire array: `x.at[...].set(y)`, `variable[...] = y` with another dtype."""
    if eqn.primitive.name != "scatter":
        return False
    array, places, new = (x.aval for x in eqn.invars)
    return places.size == 0 and array.shape == new.shape and array.dtype == new.dtype


def _input_of(eqn: Any, place: int, rounded: tuple[Any, ...]) -> int | None:
    """Return which input of an equation its output at `place` is, or None."""
    name, params = eqn.primitive.name, eqn.params
    if name in ("copy", "copy_p", "sharding_constraint", "reshard"):
        return 0
    if name == "convert_element_type":
        return 0 if {eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype} == set(rounded) else None
    if overwrites(eqn):
        return 2
    inner = [getattr(x, "jaxpr", x) for x in inner_jaxprs(eqn)]
    if name == "cond":
        places = {origin(x, x.outvars[place], rounded) for x in inner}
        only = places.pop() if len(places) == 1 else None
        return None if only is None else only + 1  # after the index
    if name in CALLS and inner and len(inner[0].invars) == len(eqn.invars):
        return origin(inner[0], inner[0].outvars[place], rounded)
    if name == "scan":
        return _input_of_scan(eqn, inner[0], place, rounded)
    if name == "while":
        skipped, consts = params["cond_nconsts"], params["body_nconsts"]
        body = getattr(params["body_jaxpr"], "jaxpr", params["body_jaxpr"])
        found = origin(body, body.outvars[place], rounded)
        return skipped + found if found == consts + place else None
    return None


def _input_of_scan(eqn: Any, body: Any, place: int, rounded: tuple[Any, ...]) -> int | None:
    consts, carries = scan_counts(eqn)
    found = origin(body, body.outvars[place], rounded)
    if found is None or eqn.params["length"] == 0:
        return None
    if place < carries:  # the carry that came in, or what each turn sets it to
        return found if found == consts + place or found < consts else None
    return found if found >= consts + carries else None  # a scanned array handed through, slice by slice


def reaches(jaxpr: Any, outputs: Sequence[int], *, gradient: bool = False) -> list[bool]:
    """Return for each input whether an output depends on it, or whether a gradient of an output can reach it."""
    needed = {id(jaxpr.outvars[i]) for i in outputs}
    for eqn in reversed(jaxpr.eqns):
        # No gradient goes through whole numbers or comparisons.
        places = [i for i, out in enumerate(eqn.outvars) if id(out) in needed and (not gradient or _is_inexact(out))]
        if not places or (gradient and eqn.primitive.name == "stop_gradient"):
            continue
        reached = _reaches_through(eqn, places, gradient)
        needed |= {id(x) for x, used in zip(eqn.invars, reached, strict=True) if used}
    return [id(x) in needed for x in jaxpr.invars]


def _reaches_through(eqn: Any, outputs: list[int], gradient: bool) -> list[bool]:
    """Return `reaches` for the outputs of an equation."""
    name, inner = eqn.primitive.name, [getattr(x, "jaxpr", x) for x in inner_jaxprs(eqn)]
    if name == "scan":
        consts, carries = scan_counts(eqn)
        while True:  # a carry that is used is an output of the turn before
            reached = reaches(inner[0], outputs, gradient=gradient)
            more = {i for i in range(carries) if reached[consts + i]} - set(outputs)
            if not more:
                return reached
            outputs = [*outputs, *more]
    if name == "cond":
        branches = zip(*(reaches(x, outputs, gradient=gradient) for x in inner), strict=True)
        return [not gradient, *map(any, branches)]
    # The backward pass of a custom rule is a function of its own.
    follows = name in CALLS and not (gradient and name.startswith("custom_"))
    if follows and inner and (len(inner[0].invars), len(inner[0].outvars)) == (len(eqn.invars), len(eqn.outvars)):
        return reaches(inner[0], outputs, gradient=gradient)
    return [True] * len(eqn.invars)  # whatever else takes it may use it


def sources(jaxpr: Any) -> list[frozenset[int]]:
    """Return for each output of a program the places of the inputs that it may depend on."""
    nothing: frozenset[int] = frozenset()
    found = {id(x): frozenset([i]) for i, x in enumerate(jaxpr.invars)}  # a constant depends on none
    for eqn in jaxpr.eqns:
        given = [found.get(id(x), nothing) for x in eqn.invars]
        inner = [getattr(x, "jaxpr", x) for x in inner_jaxprs(eqn)]
        inner = inner[:1] if eqn.primitive.name in CALLS else []
        if inner and len(inner[0].invars) == len(eqn.invars) and len(inner[0].outvars) == len(eqn.outvars):
            made = [nothing.union(*(given[i] for i in places)) for places in sources(inner[0])]
        else:  # whatever else takes it may use it
            made = [nothing.union(*given)] * len(eqn.outvars)
        found |= {id(x): places for x, places in zip(eqn.outvars, made, strict=True)}
    return [found.get(id(x), nothing) for x in jaxpr.outvars]


def same_program(a: Any, b: Any) -> bool:
    """Return whether two traces of one function are the same, their constants included."""
    texts = [re.sub(r" at 0x[0-9a-f]+", "", str(closed.jaxpr)) for closed in (a, b)]
    held = [[np.asarray(x) for x in constants(closed)] for closed in (a, b)]
    return texts[0] == texts[1] and all(
        x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in zip(*held, strict=True)
    )


def _is_inexact(var: Any) -> bool:
    dtype = getattr(var.aval, "dtype", None)  # a token has none
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def constants(closed: Any) -> list[Any]:
    """Return the arrays that a program holds, those of the programs in it as well."""
    found = list(closed.consts)
    for eqn in closed.jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            if isinstance(inner, core.ClosedJaxpr):
                found += constants(inner)
    return found
