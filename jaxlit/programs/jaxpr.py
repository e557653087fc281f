"""Traced programs: their parts, walks forward and backward through their equations, and what these walks find.

`run`, `follow` and `inline` are built on the walk forward. `origins` returns which outputs are unchanged inputs,
`sources` which inputs an output depends on, `dependence` how it depends on the rows of a batch, and `described` a text
that is the same in every process.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from itertools import zip_longest
from operator import attrgetter, or_
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.extend.source_info_util import user_context

from jaxlit.texts import array_text, is_key, stable_text

JITS = ("jit", "pjit", "closed_call", "core_call")
# A function of an equation and of what is known of its inputs to what is known of its outputs.
Rule = Callable[[Any, list[Any]], Sequence[Any]]
Dims = dict[Any, set[int]]  # of each variable that grows with the number of rows, the dims that do
COPIES = ("copy", "copy_p", "sharding_constraint", "reshard", "optimization_barrier", "stop_gradient")
_PROGRAMS = (core.Jaxpr, core.ClosedJaxpr)


def params_of(eqn: Any) -> dict[str, Any]:
    """Return the parameters of an equation; one of `jax.experimental.hijax` has a single one, which holds them."""
    holder = next(iter(eqn.params.values())) if len(eqn.params) == 1 else None
    params = getattr(holder, "params", None)
    return params if isinstance(params, dict) else eqn.params


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Return the programs that an equation runs, closed ones with their constants."""
    params = [param for param in params_of(eqn).values() if isinstance(param, (tuple, *_PROGRAMS))]
    return [program for param in params for program in programs_in(param)]


def programs_in(param: Any) -> list[Any]:
    """Return the programs in a parameter of an equation."""
    return [x for x in (param if isinstance(param, tuple) else (param,)) if isinstance(x, _PROGRAMS)]


def parts_of(program: Any) -> tuple[Any, Sequence[Any]]:
    """Return a program without its constants, and the constants; a `Jaxpr` has none."""
    return getattr(program, "jaxpr", program), getattr(program, "consts", ())


def bodies(eqn: Any) -> list[Any]:
    """Return the programs that an equation runs, without their constants."""
    return [getattr(x, "jaxpr", x) for x in inner_jaxprs(eqn)]


def remat_of(eqn: Any) -> dict[str, Any]:
    """Return the arguments of the `jax.checkpoint` that an equation is, {} for another; its name is not always one."""
    return {name: x for name, x in params_of(eqn).items() if name in ("prevent_cse", "policy")}


def is_call(eqn: Any) -> bool:
    """Return whether an equation runs one program, on its own inputs and in their order."""
    return eqn.primitive.name in (*JITS, "custom_jvp_call", "custom_vjp_call") or bool(remat_of(eqn))


def called(eqn: Any) -> Any:
    """Return the program of a call, whose inputs and outputs are the equation's own; None for another equation."""
    if not (inner := bodies(eqn)) or not is_call(eqn):
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
        jaxpr, consts = parts_of(program)
        yield from consts
        for atom in (*(x for eqn in jaxpr.eqns for x in eqn.invars), *jaxpr.outvars):
            if isinstance(atom, core.Literal):
                yield atom.val


def variables(atoms: Sequence[Any]) -> list[Any]:
    """Return the inputs or outputs that are variables, not literals."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


def value_of(atom: Any, values: dict[Any, Any], literal: Callable[[Any], Any] = attrgetter("val")) -> Any:
    """Return the value of a variable or a literal."""
    return literal(atom) if isinstance(atom, core.Literal) else values[atom]


def bind(eqn: Any, args: Sequence[Any]) -> list[Any]:
    """Run one equation on arrays."""
    with user_context(eqn.source_info.traceback):  # in a trace it stays at its place in the user's code
        results = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def walk(
    eqns: Sequence[Any], values: dict[Any, Any], rule: Rule = bind, literal: Callable[[Any], Any] = attrgetter("val")
) -> dict[Any, Any]:
    """Go through equations in order, and return `values` with what the rule returns for each.

    Args:
        eqns: The equations.
        values: The values of variables: arrays, or whatever the rule works on.
        rule: A function of (equation, values of its inputs) to the values of its outputs; runs the equation by default.
        literal: A function of a literal to its value.
    """
    for eqn in eqns:
        with eqn.ctx.manager:  # the settings that the user's code had here, such as a precision of products
            results = rule(eqn, [value_of(x, values, literal) for x in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return values


def walk_back(
    eqns: Sequence[Any], needed: dict[Any, None], takes: Callable[[Any, list[Any]], bool] = lambda _, used: bool(used)
) -> list[Any]:
    """Return the equations that compute variables, in order, and add to `needed` the variables that they read.

    `takes` is a function of (equation, its outputs that are needed) to whether the equation is chosen.
    """
    chosen = []
    for eqn in reversed(eqns):
        if takes(eqn, [x for x in eqn.outvars if x in needed]):
            chosen.append(eqn)
            needed.update(dict.fromkeys(variables(eqn.invars)))
    return chosen[::-1]


def run(
    jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], rule: Rule = bind, literal: Callable = attrgetter("val")
) -> list[Any]:
    """Return a program's outputs, given its constants and inputs; see `walk`."""
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    walk(jaxpr.eqns, values, rule, literal)
    return [value_of(x, values, literal) for x in jaxpr.outvars]


def follow(jaxpr: Any, inputs: Sequence[Any], rule: Rule, other: Any) -> list[Any]:
    """Return the values of a program's outputs, given those of its inputs; constants and literals have `other`."""
    return run(jaxpr, [other] * len(jaxpr.constvars), inputs, rule, lambda _: other)


def inline(closed: Any, *, also: Callable[[Any], bool] = lambda _: False, selects: bool = False) -> Any:
    """Return a program in which the equations of nested `jax.jit` calls take the place of the calls.

    Args:
        closed: The program, a `ClosedJaxpr`.
        also: Returns whether the program of a `jax.checkpoint` is written out too.
        selects: Compute both branches of a `cond`, and choose between their results.
    """

    def rule(eqn: Any, args: list[Any]) -> list[Any]:
        name = eqn.primitive.name
        if name in JITS or (remat_of(eqn) and also(eqn)):
            (inner,) = inner_jaxprs(eqn)
            return run(*parts_of(inner), args, rule)
        if name == "cond" and selects:
            branches = [run(x.jaxpr, x.consts, args[1:], rule) for x in eqn.params["branches"]]
            last = len(branches) - 1
            index = args[0] != 0 if last == 1 else jnp.clip(args[0], 0, last)
            return [jax.lax.select_n(index, *cases) for cases in zip(*branches, strict=True)]
        return bind(eqn, args)

    shapes = [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype, sharding=None) for x in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *args: run(closed.jaxpr, closed.consts, args, rule))(*shapes)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Return how many constants and how many carries a scan takes, in this order, before the arrays that it scans.

    By shapes, as jax's releases name them differently: a scanned or stacked array has one dim more outside.
    """
    (body,) = bodies(eqn)
    carries, unscanned = (
        sum(outer.aval.ndim == inner.aval.ndim for outer, inner in zip(*pair, strict=True))
        for pair in ((eqn.outvars, body.outvars), (eqn.invars, body.invars))
    )
    return unscanned - carries, carries


def rerun_scan(eqn: Any, args: Sequence[Any], body: Callable[..., Sequence[Any]]) -> list[Any]:
    """Run a scan with another body, a function of the same inputs to the same outputs."""
    num_consts, num_carries = scan_counts(eqn)
    first = num_consts + num_carries

    def turn(carry: Any, xs: Any) -> tuple[Any, Any]:
        results = body(*args[:num_consts], *carry, *xs)
        return results[:num_carries], results[num_carries:]

    params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, stacked = jax.lax.scan(turn, list(args[num_consts:first]), list(args[first:]), **params)
    return [*carry, *stacked]


def rerun(eqn: Any, args: Sequence[Any], run: Callable[..., Sequence[Any]]) -> list[Any] | None:
    """Run an equation that contains programs, each by `run(program, *args)`; return None for another equation.

    A call is written out, also that of a `jax.checkpoint`.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return rerun_scan(eqn, args, partial(run, params["jaxpr"]))
    if name == "cond":
        branches = [partial(run, x) for x in params["branches"]]
        return jax.lax.switch(args[0].astype(jnp.int32), branches, *args[1:])
    if name == "while":
        start, first = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        return jax.lax.while_loop(
            lambda xs: run(params["cond_jaxpr"], *args[:start], *xs)[0],
            lambda xs: list(run(params["body_jaxpr"], *args[start:first], *xs)),
            list(args[first:]),
        )
    return None if called(eqn) is None else list(run(inner_jaxprs(eqn)[0], *args))


def draws(eqn: Any) -> bool:
    """Return whether an equation draws random numbers from a key."""
    return any(is_key(x.aval) for x in eqn.invars) and not any(is_key(x.aval) for x in eqn.outvars)


def run_drawing_alike(closed: Any, known: dict[Any, float], *args: Any) -> list[Any]:
    """Run a program with one number in place of all that it draws, whatever their shape, and without side effects.

    So what it returns can be compared for different numbers of rows. What it computes of variables that are `known` is
    replaced too, each by its number.
    """

    def number(x: Any) -> Any:
        aval: Any = x.aval if isinstance(x, core.Var) else None
        return x if aval is None else jnp.full(aval.shape, known[x], aval.dtype)

    def rule(eqn: Any, args: list[Any]) -> Sequence[Any]:
        if all(x in known for x in eqn.outvars):  # none: it is a side effect
            return eqn.outvars  # most are read by what is not run either
        args = list(map(number, args))
        rerunning = rerun(eqn, args, lambda program, *args: run_drawing_alike(program, known, *args))
        if rerunning is not None:
            return rerunning
        if draws(eqn):  # bits, of which 3/32 of the range lets a dropout keep all and a rejection accept, or a gamma
            aval = eqn.outvars[0].aval
            is_bits = jnp.issubdtype(aval.dtype, jnp.integer)
            return [jnp.full(aval.shape, 3 << (8 * aval.dtype.itemsize - 5) if is_bits else 0.5, aval.dtype)]
        return bind(eqn, args)

    return list(map(number, run(*parts_of(closed), args, rule)))


def overwrites(eqn: Any) -> bool:
    """Return whether an equation sets an entire array: `x.at[...].set(y)`, `variable[...] = y` with another dtype."""
    if eqn.primitive.name != "scatter":
        return False
    array, indices, new = (x.aval for x in eqn.invars)
    return indices.size == 0 and array.shape == new.shape and array.dtype == new.dtype


def origins(jaxpr: Any, rounded: tuple[Any, ...] = ()) -> list[int | None]:
    """Return for each output of a program which input it is, unchanged; None for one that is computed.

    A cast between the two dtypes of `rounded` counts as the value itself.
    """

    def rule(eqn: Any, inputs: list[Any]) -> list[Any]:
        if eqn.primitive.name == "transpose" and inputs[0]:  # nnx.scan moves the scanned dim to the front and back
            place, dims = inputs[0]
            return [(place, tuple(dims[i] for i in eqn.params["permutation"]))]
        return [None if i is None else inputs[i] for i in _origins_in(eqn, rounded)]

    dims_of = [tuple(range(getattr(x.aval, "ndim", 0))) for x in jaxpr.invars]
    outputs = follow(jaxpr, list(enumerate(dims_of)), rule, None)
    return [x[0] if x is not None and x[1] == dims_of[x[0]] else None for x in outputs]


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
        inner_origins = origins(parts_of(params["body_jaxpr"])[0], rounded)
        return [skipped + x if x == consts + i else None for i, x in enumerate(inner_origins)]
    return [None] * len(eqn.outvars)


def sources(jaxpr: Any, *, gradient: bool = False) -> list[int]:
    """Return for each output of a program the inputs that it may depend on, as the bits of an int.

    With `gradient` these are the inputs that a gradient of the output may reach.
    """
    return flow(jaxpr, [1 << i for i in range(len(jaxpr.invars))], gradient=gradient)


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


def flow(
    jaxpr: Any,
    inputs: Sequence[int],
    *,
    gradient: bool = False,
    special: Callable[[Any, list[int]], Sequence[int] | None] | None = None,
) -> list[int]:
    """Return the bits of a program's outputs, given those of its inputs: an output has those of all that it depends on.

    `special` returns the bits of an equation's outputs, given those of its inputs, or None for the ordinary ones.
    """

    def rule(eqn: Any, ins: list[int]) -> Sequence[int]:
        outs = None if special is None else special(eqn, ins)
        if outs is None:
            outs = _flow_through(eqn, ins, partial(flow, gradient=gradient, special=special), gradient)
        if not gradient:
            return outs
        # No gradient passes through integers or comparisons. A token has no dtype.
        dtypes = [getattr(var.aval, "dtype", jnp.bool_) for var in eqn.outvars]
        return [x if jnp.issubdtype(dtype, jnp.inexact) else 0 for dtype, x in zip(dtypes, outs, strict=True)]

    return follow(jaxpr, inputs, rule, 0)


def _flow_through(eqn: Any, ins: list[int], through: Callable[..., list[int]], gradient: bool) -> list[int]:
    name, inner = eqn.primitive.name, bodies(eqn)
    if gradient and name == "stop_gradient":
        return [0]
    if name == "scan":
        consts, carries = scan_counts(eqn)
        before, carry, xs = ins[:consts], ins[consts : consts + carries], ins[consts + carries :]
        while True:  # a carry depends on what the turn before returned
            outs = through(inner[0], [*before, *carry, *xs])
            after = list(map(or_, carry, outs[:carries]))
            if after == carry:
                return [*carry, *outs[carries:]]  # a scan of no turns returns what came in
            carry = after
    if name == "cond":
        branches = zip(*(through(x, ins[1:]) for x in inner), strict=True)
        return [reduce(or_, x, 0 if gradient else ins[0]) for x in branches]
    # The backward pass of a custom rule is another function, which may read every input.
    if inner and (body := called(eqn)) is not None and not (gradient and name.startswith("custom_")):
        return through(body, ins)
    return [reduce(or_, ins, 0)] * len(eqn.outvars)


# How a value depends on rows, in bits: it has those of all that it is computed from. ROWS: a function of rows, with a
# dim that grows with their number. LINEAR: a sum of such values, or of parts of a sum. OTHER: any other function.
CONSTANT, ROWS, LINEAR, OTHER = 0, 1, 2, 4


def growing(jaxpr: Any, longer: Any) -> Dims | None:
    """Return what is of another size in a trace of a program with other rows; None if more than that differs."""
    pairs = list(zip_longest(equations(jaxpr), equations(longer)))
    if any(x is None or y is None or x.primitive != y.primitive or len(x.invars) != len(y.invars) for x, y in pairs):
        return None
    atoms = [z for x, y in pairs for z in zip([*x.invars, *x.outvars], [*y.invars, *y.outvars], strict=True)]
    sizes = ((a, zip_longest(*(getattr(x.aval, "shape", ()) for x in (a, b)))) for a, b in atoms)
    dims = ((a, {i for i, (m, n) in enumerate(x) if m != n}) for a, x in sizes if not isinstance(a, core.Literal))
    return {a: x for a, x in dims if x}


def dependence(jaxpr: Any, inputs: Sequence[int], grows: Dims | None, axis: str) -> tuple[list[int], bool]:
    """Return how each output depends on rows, and whether numbers for rows are drawn from a key that is constant.

    Args:
        jaxpr: The program of a replica.
        inputs: How its inputs depend on them.
        grows: Its variables that grow with the rows; None if unknown.
        axis: The mapped axis of the replicas.
    """
    draws_alike = False

    def rule(eqn: Any, ins: list[int]) -> Sequence[int] | None:
        nonlocal draws_alike
        name, bits = eqn.primitive.name, reduce(or_, ins, CONSTANT)
        if name == "axis_index":
            return [OTHER]
        dims = [set() if grows is None else grows.get(x, set()) for x in eqn.outvars]
        draws_alike = draws_alike or (draws(eqn) and not bits and any(dims))
        is_sum = name.startswith("psum") and axis in eqn.params["axes"] and not eqn.params.get("axis_index_groups")
        if not bits or is_sum:  # over all replicas, the same on each
            return [CONSTANT] * len(eqn.outvars)
        if called(eqn) is not None or name == "scan" or (name == "cond" and not ins[0]):
            return None
        if name in COPIES or overwrites(eqn):
            return ins if name in COPIES else ins[2:]
        # Not of rows: a value of each pair of them, one that is found among all, and one to which their sum is added.
        over = [eqn.params.get("axis"), eqn.params.get("dimension")] * name.startswith(("cum", "sort", "top_k"))
        is_rows = [(bits == ROWS or draws(eqn)) and len(of) == 1 and of.isdisjoint(over) for of in dims]
        outs = [ROWS if x else OTHER if of else LINEAR for x, of in zip(is_rows, dims, strict=True)]
        is_linear = LINEAR not in outs or (grows is not None and not bits & OTHER and _is_linear(eqn, ins))
        return outs if is_linear else [OTHER] * len(outs)

    return flow(jaxpr, inputs, special=rule), draws_alike


def _is_linear(eqn: Any, ins: list[int]) -> bool:
    """Return whether an equation is linear in what depends on rows: in each of several rows, else in all at once."""
    name, places = eqn.primitive.name, [i for i, x in enumerate(ins) if x]
    if name == "scatter-add" and ins[1] in (CONSTANT, ROWS):  # wherever it adds
        places = [i for i in places if i != 1]
    dtypes = eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype
    if name == "convert_element_type" and jnp.bool_ not in dtypes:  # integers to floats have no transpose
        return jnp.issubdtype(dtypes[1], jnp.inexact) or not jnp.issubdtype(dtypes[0], jnp.inexact)

    def zeros(x: Any) -> jax.Array:
        return jnp.zeros(x.aval.shape, x.aval.dtype)

    def transpose(places: list[int]) -> Any:
        def run(*args: jax.Array) -> list[jax.Array]:
            changed = dict(zip(places, args, strict=True))
            return bind(eqn, [changed.get(i, zeros(x)) for i, x in enumerate(eqn.invars)])

        return jax.linear_transpose(run, *[zeros(eqn.invars[i]) for i in places])([zeros(x) for x in eqn.outvars])

    try:
        for group in ([i] for i in places) if {ins[i] for i in places} == {ROWS} else [places]:
            jax.eval_shape(partial(transpose, group))
    except Exception:  # each primitive that is not linear raises its own
        return False
    return True


def described(closed: Any) -> Iterator[tuple[str, Any]]:
    """Yield a text for each constant and equation of a program, and the equation, None for a constant.

    The texts are the same in all traces of one program, in any process. An equation is followed by those of the
    programs that it runs. Each program numbers its variables from 0: jax's caches decide whether calls share a program.
    """
    jaxpr, consts = parts_of(closed)
    numbers = dict[Any, str]()

    def text(x: Any) -> str:
        # A function has other parts in its text that no program depends on: its wrappers, and their addresses.
        return getattr(x, "__qualname__", type(x).__name__) if callable(x) else stable_text(repr(x))

    def name(atom: Any) -> str:
        if isinstance(atom, core.Literal):
            return array_text(atom.val) if np.ndim(atom.val) else str(atom.val)
        return numbers.setdefault(atom, f"v{len(numbers)}")

    yield f"inputs {' '.join(f'{name(x)}:{x.aval}' for x in jaxpr.invars)}", None
    for var, x in zip(jaxpr.constvars, consts or jaxpr.constvars, strict=True):
        yield f"{name(var)} = constant {array_text(x) if hasattr(x, 'dtype') else var.aval}", None
    for eqn in jaxpr.eqns:
        inputs = [name(x) for x in eqn.invars]
        params = [f"{key}={text(x)}" for key, x in params_of(eqn).items() if x is not None and not programs_in(x)]
        outputs = " ".join([f"{name(x)}:{x.aval}" for x in eqn.outvars])
        yield " ".join([outputs, "=", eqn.primitive.name, *inputs, *params]), eqn
        for program in inner_jaxprs(eqn):
            yield from described(program)
    yield f"outputs {' '.join(map(name, jaxpr.outvars))}", None
