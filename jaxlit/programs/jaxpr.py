"""Walking through traced programs: one list of calls, one walk forward, one backward, and what they show."""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.source_info_util import user_context

from jaxlit.texts import array_text, stable_text

JITS = ("jit", "pjit", "closed_call", "core_call")
REMATS = ("checkpoint", "remat", "remat2")
# Equations that run one program, on their own inputs and in their order.
CALLS = (*JITS, *REMATS, "custom_jvp_call", "custom_vjp_call")
# A function of an equation and of what is known of its inputs to what is known of its outputs.
Rule = Callable[[Any, list[Any]], Sequence[Any]]
COPIES = ("copy", "copy_p", "sharding_constraint", "reshard", "optimization_barrier")


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Return the programs that an equation runs, closed ones with their constants."""
    params = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))]
    return [x for x in params if isinstance(x, (core.Jaxpr, core.ClosedJaxpr))]


def bodies(eqn: Any) -> list[Any]:
    """Return the programs that an equation runs, without their constants."""
    return [getattr(x, "jaxpr", x) for x in inner_jaxprs(eqn)]


def called(eqn: Any) -> Any:
    """Return the program of a call, whose inputs and outputs are the equation's own; None for another equation."""
    if eqn.primitive.name not in CALLS or not (inner := bodies(eqn)):
        return None
    same = (len(inner[0].invars), len(inner[0].outvars)) == (len(eqn.invars), len(eqn.outvars))
    return inner[0] if same else None


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a program, followed by those of the programs that it runs."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in bodies(eqn):
            yield from equations(inner)


def numbers_of(closed: Any) -> Iterator[Any]:
    """Yield the constants and literals of a program, and of those that it runs."""
    for program in (closed, *(x for eqn in equations(closed.jaxpr) for x in inner_jaxprs(eqn))):
        jaxpr = getattr(program, "jaxpr", program)
        yield from getattr(program, "consts", ())
        for atom in (*(x for eqn in jaxpr.eqns for x in eqn.invars), *jaxpr.outvars):
            if isinstance(atom, core.Literal):
                yield atom.val


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Return the inputs or outputs that are variables, not literals."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


def value_of(atom: Any, values: dict[Any, Any]) -> Any:
    """Return the value of a variable or a literal."""
    return atom.val if isinstance(atom, core.Literal) else values[atom]


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Run one equation on arrays."""
    with user_context(eqn.source_info.traceback):  # in a trace it stays at its place in the user's code
        results = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def walk(
    eqns: Sequence[Any],
    values: dict[Any, Any],
    rule: Rule = bind,
    read: Callable[[Any, dict[Any, Any]], Any] = value_of,
) -> dict[Any, Any]:
    """Go through equations in order, and return `values` with what the rule makes of each.

    Args:
        eqns: The equations.
        values: What is known of variables: arrays, or whatever the rule works on.
        rule: A function of (equation, values of its inputs) to the values of its outputs; by default it is run.
        read: A function of (variable or literal, values) to a value.
    """
    for eqn in eqns:
        with eqn.ctx.manager:  # the settings that the user's code had here, such as a precision of products
            results = rule(eqn, [read(x, values) for x in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return values


def walk_back(
    eqns: Sequence[Any],
    needed: dict[Any, None],
    takes: Callable[[Any, list[Any]], bool] = lambda _, used: bool(used),
) -> list[Any]:
    """Return the equations that make what is needed, in order, and add to `needed` what they read.

    Args:
        eqns: The equations to choose from.
        needed: Variables.
        takes: A function of (equation, its outputs that are needed) to whether the equation is taken.
    """
    taken = []
    for eqn in reversed(eqns):
        if takes(eqn, [x for x in eqn.outvars if x in needed]):
            taken.append(eqn)
            needed.update(dict.fromkeys(variables(eqn.invars)))
    return taken[::-1]


def run(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    rule: Rule = bind,
    read: Callable[[Any, dict[Any, Any]], Any] = value_of,
) -> list[Any]:
    """Return a program's outputs, given its constants and inputs; see `walk`."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    walk(jaxpr.eqns, values, rule, read)
    return [read(x, values) for x in jaxpr.outvars]


def follow(jaxpr: Any, inputs: Sequence[Any], rule: Rule, other: Any) -> list[Any]:
    """Return what is known of a program's outputs, given that of its inputs.

    Args:
        jaxpr: The program.
        inputs: What is known of each input.
        rule: See `walk`.
        other: What is known of constants and literals.
    """
    read = lambda x, values: other if isinstance(x, core.Literal) else values[x]  # noqa: E731
    return run(jaxpr, [other] * len(jaxpr.constvars), inputs, rule, read)


def inline(closed: Any, *, also: Callable[[Any], bool] = lambda _: False, selects: bool = False) -> Any:
    """Return a program in which the equations of nested `jax.jit` calls take the place of the calls.

    Args:
        closed: The program, a `ClosedJaxpr`.
        also: Returns whether the program of a `jax.checkpoint` is written out too.
        selects: Compute both branches of a `cond`, and choose between their results.
    """

    def rule(eqn: Any, args: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in JITS or (name in REMATS and also(eqn)):
            (inner,) = inner_jaxprs(eqn)
            return run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), args, rule)
        if name == "cond" and selects:
            branches = [run(x.jaxpr, x.consts, args[1:], rule) for x in eqn.params["branches"]]
            last = len(branches) - 1
            which = args[0] != 0 if last == 1 else jnp.clip(args[0], 0, last)
            return [jax.lax.select_n(which, *cases) for cases in zip(*branches, strict=True)]
        return bind(eqn, args)

    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=None) for x in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args, rule))(*shapes)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Return how many constants and how many carries a scan takes, in this order, before the arrays that it scans.

    By shapes, as jax's releases name them differently: a scanned or stacked array has one dim more outside.
    """
    (body,) = bodies(eqn)
    same_ndim = lambda outer, inner: outer.aval.ndim == inner.aval.ndim  # noqa: E731
    carries = sum(map(same_ndim, eqn.outvars, body.outvars))
    return sum(map(same_ndim, eqn.invars, body.invars)) - carries, carries


def overwrites(eqn: Any) -> bool:
    """Return whether an equation sets an entire array: `x.at[...].set(y)`, `variable[...] = y` with another dtype."""
    if eqn.primitive.name != "scatter":
        return False
    array, indices, new = (x.aval for x in eqn.invars)
    return indices.size == 0 and array.shape == new.shape and array.dtype == new.dtype


def origins(jaxpr: Any, rounded: tuple[Any, ...] = ()) -> list[int | None]:
    """Return for each output of a program which input it is, unchanged; None for one that is computed.

    Args:
        jaxpr: The program.
        rounded: Two dtypes; a cast from one to the other counts as the value itself.
    """

    def rule(eqn: Any, given: list[Any]) -> list[Any]:
        if eqn.primitive.name == "transpose":  # nnx.scan moves the scanned dim to the front and back
            return [given[0] and (given[0][0], tuple(given[0][1][i] for i in eqn.params["permutation"]))]
        return [None if i is None else given[i] for i in _origins_in(eqn, rounded)]

    dims = [tuple(range(getattr(x.aval, "ndim", 0))) for x in jaxpr.invars]
    outputs = follow(jaxpr, list(enumerate(dims)), rule, None)
    return [x[0] if x is not None and x[1] == dims[x[0]] else None for x in outputs]


def _origins_in(eqn: Any, rounded: tuple[Any, ...]) -> list[int | None]:
    """Return for each output of an equation which of its inputs it is, or None."""
    name, params = eqn.primitive.name, eqn.params
    if name in COPIES:
        return list(range(len(eqn.outvars)))
    if name == "convert_element_type":
        return [0 if {eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype} == set(rounded) else None]
    if overwrites(eqn):
        return [2]
    if name == "cond":  # an input, after the index, if all branches return the same one
        branches = [origins(x, rounded) for x in bodies(eqn)]
        return [None if x[0] is None or len({*x}) > 1 else 1 + x[0] for x in zip(*branches, strict=True)]
    if (inner := called(eqn)) is not None:
        return origins(inner, rounded)
    if name == "scan" and params["length"]:
        consts, carries = scan_counts(eqn)
        inner_origins = origins(bodies(eqn)[0], rounded)
        # A carry that comes in or that each turn sets to a constant; a scanned array returned slice by slice.
        carry = [x if x is not None and (x == consts + i or x < consts) else None for i, x in enumerate(inner_origins)]
        stacked = [x if x is not None and x >= consts + carries else None for x in inner_origins]
        return [*carry[:carries], *stacked[carries:]]
    if name == "while":
        skipped, consts = params["cond_nconsts"], params["body_nconsts"]
        inner_origins = origins(getattr(params["body_jaxpr"], "jaxpr", params["body_jaxpr"]), rounded)
        return [skipped + x if x == consts + i else None for i, x in enumerate(inner_origins)]
    return [None] * len(eqn.outvars)


def sources(jaxpr: Any, *, gradient: bool = False) -> list[int]:
    """Return for each output of a program the inputs that it may depend on, as the bits of an int.

    Args:
        jaxpr: The program.
        gradient: Only those inputs that a gradient of the output may reach.
    """
    return _sources(jaxpr, [1 << i for i in range(len(jaxpr.invars))], gradient)


def indices(bits: int) -> frozenset[int]:
    """Return the inputs that the bits of an int stand for; see `sources`."""
    result = list[int]()
    while bits:
        lowest = bits & -bits
        result.append(lowest.bit_length() - 1)
        bits ^= lowest
    return frozenset(result)


def reaches(jaxpr: Any, outputs: Sequence[int], *, gradient: bool = False) -> list[bool]:
    """Return for each input whether one of some outputs depends on it; see `sources`."""
    of_outputs = sources(jaxpr, gradient=gradient)
    needed = reduce(or_, [of_outputs[i] for i in outputs], 0)
    return [bool(needed >> i & 1) for i in range(len(jaxpr.invars))]


def _sources(jaxpr: Any, inputs: Sequence[int], gradient: bool) -> list[int]:
    def rule(eqn: Any, given: list[int]) -> list[int]:
        through = _sources_through(eqn, given, gradient)
        # No gradient passes through integers or comparisons. A token has no dtype.
        dtypes = [getattr(var.aval, "dtype", jnp.bool_) for var in eqn.outvars]
        pairs = zip(dtypes, through, strict=True)
        return [x if not gradient or jnp.issubdtype(dtype, jnp.inexact) else 0 for dtype, x in pairs]

    return follow(jaxpr, inputs, rule, 0)


def _sources_through(eqn: Any, given: list[int], gradient: bool) -> list[int]:
    name, inner = eqn.primitive.name, bodies(eqn)
    if gradient and name == "stop_gradient":
        return [0]
    if name == "scan":
        consts, carries = scan_counts(eqn)
        while True:  # a carry depends on what the turn before made of it
            made = _sources(inner[0], given, gradient)
            carry = [a | b for a, b in zip(given[consts : consts + carries], made[:carries], strict=True)]
            if carry == given[consts : consts + carries]:
                return [*carry, *made[carries:]]  # a scan of no turns returns what came in
            given = [*given[:consts], *carry, *given[consts + carries :]]
    if name == "cond":
        branches = zip(*(_sources(x, given[1:], gradient) for x in inner), strict=True)
        return [reduce(or_, x, 0 if gradient else given[0]) for x in branches]
    # The backward pass of a custom rule is a function of its own, which may read every input.
    if (body := called(eqn)) is not None and not (gradient and name.startswith("custom_")):
        return _sources(body, given, gradient)
    return [reduce(or_, given, 0)] * len(eqn.outvars)


def described(closed: Any) -> Iterator[tuple[str, Any]]:
    """Yield a text for each constant and equation of a program, and the equation, None for a constant.

    The texts are the same in all traces of one program, in any process. An equation is followed by those of the
    programs that it runs. Each program numbers its variables from 0: jax's caches decide whether calls share a program.
    """
    jaxpr, numbers = getattr(closed, "jaxpr", closed), dict[Any, str]()

    def name(atom: Any) -> str:
        if isinstance(atom, core.Literal):
            return array_text(atom.val) if np.ndim(atom.val) else str(atom.val)
        return numbers.setdefault(atom, f"v{len(numbers)}")

    yield f"inputs {' '.join(f'{name(x)}:{x.aval}' for x in jaxpr.invars)}", None
    for var, x in zip(jaxpr.constvars, getattr(closed, "consts", jaxpr.constvars), strict=True):
        yield f"{name(var)} = constant {array_text(x) if hasattr(x, 'dtype') else var.aval}", None
    for eqn in jaxpr.eqns:
        inputs, inner = [name(x) for x in eqn.invars], inner_jaxprs(eqn)
        params = [f"{key}={_param_text(x)}" for key, x in eqn.params.items() if x is not None and not _runs(x)]
        outputs = " ".join(f"{name(x)}:{x.aval}" for x in eqn.outvars)
        yield " ".join([outputs, "=", eqn.primitive.name, *inputs, *params]), eqn
        for program in inner:
            yield from described(program)
    yield f"outputs {' '.join(map(name, jaxpr.outvars))}", None


def _runs(x: Any) -> bool:
    return any(isinstance(y, (core.Jaxpr, core.ClosedJaxpr)) for y in (x if isinstance(x, tuple) else (x,)))


def _param_text(x: Any) -> str:
    # A function has other parts in its text that no program depends on: its wrappers, and their addresses.
    return getattr(x, "__qualname__", type(x).__name__) if callable(x) else stable_text(repr(x))
