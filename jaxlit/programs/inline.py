"""A traced program with the programs in it written out, so that it can be cut anywhere."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxlit.programs.jaxpr import bind, inner_jaxprs

_JITS = ("jit", "pjit", "closed_call", "core_call")
_REMATS = ("checkpoint", "remat", "remat2")


def inline(closed: Any, *, also: Callable[[Any], bool] = lambda _: False, selects: bool = False) -> Any:
    """Return a program without calls: what a nested `jax.jit` runs stands in the program itself.

    Args:
        closed: The program, a `ClosedJaxpr`.
        also: Returns whether a layer that is computed again in the backward pass (`jax.checkpoint`) is written out too.
        selects: Compute both branches of a `cond`, and choose between their results.
    """

    def run(*args: Any) -> list[Any]:
        return evaluate(closed.jaxpr, closed.consts, args, lambda eqn, args: _enter(eqn, args, also, selects))

    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=None) for x in closed.jaxpr.invars]
    return jax.make_jaxpr(run)(*shapes)


def evaluate(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], enter: Callable[[Any, Sequence[Any]], list[Any]] = bind
) -> list[Any]:
    """Run a program, equation by equation.

    Args:
        jaxpr: The program.
        consts: Its constants.
        args: Its inputs.
        enter: Runs an equation.
    """
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    run_equations(jaxpr.eqns, values, enter)
    return [value_of(x, values) for x in jaxpr.outvars]


def run_equations(
    eqns: Sequence[Any], values: dict[Any, Any], enter: Callable[[Any, Sequence[Any]], list[Any]] = bind
) -> None:
    """Run equations, and put their results beside the values that they read."""
    for eqn in eqns:
        with eqn.ctx.manager:
            results = enter(eqn, [value_of(x, values) for x in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))


def value_of(var: Any, values: dict[Any, Any]) -> Any:
    """Return the value of a variable or a literal."""
    return var.val if isinstance(var, core.Literal) else values[var]


def _enter(eqn: Any, args: Sequence[Any], also: Callable[[Any], bool], selects: bool) -> list[Any]:
    name = eqn.primitive.name
    again = lambda eqn, args: _enter(eqn, args, also, selects)  # noqa: E731
    if name in _JITS or (name in _REMATS and also(eqn)):
        (inner,) = inner_jaxprs(eqn)
        return evaluate(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args, again)
    if name == "cond" and selects:
        branches = [evaluate(x.jaxpr, x.consts, args[1:], again) for x in eqn.params["branches"]]
        which = jnp.clip(args[0], 0, len(branches) - 1) if len(branches) > 2 else args[0]
        return [jax.lax.select_n(_as_choice(which, len(branches)), *cases) for cases in zip(*branches, strict=True)]
    return bind(eqn, args)


def _as_choice(which: Any, branches: int) -> Any:
    return which != 0 if branches == 2 else which
