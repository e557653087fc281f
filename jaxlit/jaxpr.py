"""What a traced program tells about the user's step."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

# Programs whose inputs are the equation's own, one by one.
_CALLS = ("jit", "pjit", "closed_call", "core_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call")


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Return the programs that an equation runs."""
    found = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))]
    return [x for x in found if isinstance(x, (core.Jaxpr, core.ClosedJaxpr))]


def is_computed(jaxpr: Any, var: Any) -> bool:
    """Tell whether a value of a program is computed in it, and not just an input handed through."""
    made_by = next((eqn for eqn in jaxpr.eqns if any(var is out for out in eqn.outvars)), None)
    if made_by is None:
        return False
    if made_by.primitive.name == "convert_element_type":
        return is_computed(jaxpr, made_by.invars[0])
    place = next(i for i, out in enumerate(made_by.outvars) if out is var)
    # scan, remat, cond and jit run programs whose outputs are theirs, one by one.
    inner = [getattr(x, "jaxpr", x) for x in inner_jaxprs(made_by)]
    inner = [x for x in inner if len(x.outvars) == len(made_by.outvars)]
    return not inner or any(is_computed(x, x.outvars[place]) for x in inner)


def has_gradient(jaxpr: Any, output: int) -> list[bool]:
    """Return for each input whether the gradient of an output can reach it."""
    needed = {id(jaxpr.outvars[output])}
    for eqn in reversed(jaxpr.eqns):
        # No gradient goes through whole numbers or comparisons.
        places = [i for i, out in enumerate(eqn.outvars) if id(out) in needed and _is_inexact(out)]
        if not places or eqn.primitive.name == "stop_gradient":
            continue
        inner = [getattr(x, "jaxpr", x) for x in inner_jaxprs(eqn)]
        inner = inner[:1] if eqn.primitive.name in _CALLS else []
        if inner and len(inner[0].invars) == len(eqn.invars) and len(inner[0].outvars) == len(eqn.outvars):
            reached = [any(x) for x in zip(*(has_gradient(inner[0], i) for i in places), strict=True)]
        else:  # whatever else takes it may use it
            reached = [True] * len(eqn.invars)
        needed |= {id(x) for x, used in zip(eqn.invars, reached, strict=True) if used}
    return [id(x) in needed for x in jaxpr.invars]


def same_program(a: Any, b: Any) -> bool:
    """Tell whether two traces of one function are the same, their constants included."""
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
