"""How a value that each replica computes from its rows relates to the value of the entire batch.

`relate` follows a program from the relations of its inputs to those of its outputs; below it are the rules of the
primitives, and their table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import core

from jaxlit.programs.jaxpr import (
    COPIES,
    bodies,
    called,
    equations,
    inner_jaxprs,
    overwrites,
    parts_of,
    run,
    scan_counts,
)


@dataclass(frozen=True)
class Relation:
    """How the value of each of n replicas relates to that of the entire batch.

    Attributes:
        kind: "same", the batch's value is `n**power` times each replica's; "total", it is `n**power` times their sum;
            "mixed", a sum of several of these; "rows", the replicas' values are blocks of it, in the one dim that grows
            with the rows; "zero"; "unknown". Of what a row is looked up by: "index", the row's own index; "never", that
            index compared with 0, which is false.
        power: The power of n: a mean over rows is a total of power -1, a count of rows is the same of power 1.
    """

    kind: str
    power: int = 0

    def as_total(self) -> "Relation":
        """Return what is the same on every replica as a sum over them."""
        return Relation("total", self.power - 1) if self.kind == "same" else self


KINDS = ("same", "total", "zero", "unknown", "mixed", "rows", "index", "never")
SAME, TOTAL, ZERO, UNKNOWN, MIXED, ROWS, INDEX, NEVER = map(Relation, KINDS)
MEAN = Relation("total", -1)


class Differ(Exception):
    """Two traces of a program are not the same but for the number of rows."""


@dataclass(frozen=True)
class Equation:
    """An equation of both traces, and the relations of its inputs."""

    one: Any
    longer: Any
    ins: list[Relation]

    name = property(lambda self: self.one.primitive.name)
    params = property(lambda self: self.one.params)
    out = property(lambda self: self.one.outvars[0].aval)  # the first output's shape and dtype

    @property
    def grows(self) -> list[int]:
        """The dims of the first output that depend on the number of rows."""
        return row_dims(self.one.outvars[0], self.longer.outvars[0])

    def shape(self, i: int) -> tuple[int, ...]:
        """Return the shape of input i."""
        return self.one.invars[i].aval.shape

    def row_dim(self, i: int) -> int:
        """Return the dim of the rows of input i, which has rows."""
        return row_dims(self.one.invars[i], self.longer.invars[i])[0]


def row_dims(a: Any, b: Any) -> list[int]:
    """Return the dims in which a value of the two traces differs."""
    shape, longer = getattr(a.aval, "shape", ()), getattr(b.aval, "shape", ())
    if len(shape) != len(longer):
        raise Differ
    return [i for i, (x, y) in enumerate(zip(shape, longer, strict=True)) if x != y]


def join(relations: list[Relation]) -> Relation:
    """Return the relation of a value that is one of several, or their sum."""
    kinds, unclear = {r for r in relations if r != ZERO}, UNKNOWN
    if len(kinds) > 1 and all(r.kind in ("same", "total", "mixed") for r in kinds):
        kinds, unclear = {r.as_total() for r in kinds}, MIXED
    return unclear if len(kinds) > 1 else kinds.pop() if kinds else ZERO


# Parameters that are sizes: they may grow with the rows, as then the output's shape does.
_SIZES = ("shape", "new_sizes", "slice_sizes", "start_indices", "limit_indices", "reps")


def relate(
    program: Any, longer: Any, inputs: Sequence[Relation], axis: str, replicas: int, *, alike: bool = False
) -> tuple[list[Relation], bool]:
    """Return the relation of each output, and whether rows are drawn from a key that is the same on every replica.

    Shapes and numbers that differ between two traces of the program come from the number of rows: so a sum divided by
    the rows is distinguished from a sum divided by a constant.

    Args:
        program: A `ClosedJaxpr` of a replica's program.
        longer: The same, traced with more rows.
        inputs: The relation of each input.
        axis: The mapped axis of the replicas.
        replicas: How many they are.
        alike: Take what replicas draw from their own keys, for all of their rows at once, as the same.
    """
    follower = _Follower(axis, replicas, alike)
    for x, y, relation in zip(program.jaxpr.invars, longer.jaxpr.invars, inputs, strict=True):
        if relation == ROWS:
            dim = row_dims(x, y)[0]
            follower.num_rows = x.aval.shape[dim], y.aval.shape[dim]
    try:
        outputs = follower.run(program, longer, list(inputs))
    except Differ:
        outputs = [UNKNOWN] * len(program.jaxpr.outvars)
    return [UNKNOWN if r in (INDEX, NEVER) else r for r in outputs], follower.same_draws


class _Follower:
    """Runs a program on relations in place of arrays."""

    def __init__(self, axis: str, replicas: int, alike: bool) -> None:
        self.axis, self.replicas, self.alike, self.same_draws = axis, replicas, alike, False
        self.num_rows = (1, 1)  # of the batch, in both traces
        self._summed: set[int] = set()  # by id: variables that were summed over replicas

    def run(self, a: Any, b: Any, ins: list[Relation]) -> list[Relation]:
        """Return the relations of a program's outputs, given its two traces."""
        (a, a_consts), (b, b_consts) = parts_of(a), parts_of(b)
        consts = [UNKNOWN] * len(a.constvars)
        for i, (x, y) in enumerate(zip(a_consts, b_consts, strict=False)):
            if not isinstance(x, Tracer) and not isinstance(y, Tracer) and (x is y or np.array_equal(x, y)):
                consts[i] = SAME
        longer_eqns = iter(b.eqns)
        if [(x.primitive, len(x.invars)) for x in a.eqns] != [(x.primitive, len(x.invars)) for x in b.eqns]:
            raise Differ

        def rule(one: Any, ins: list[Any]) -> list[Relation]:
            longer = next(longer_eqns)
            eqn = Equation(one, longer, list(map(self._read, ins, longer.invars)))
            outs = zip(self._follow(eqn), one.outvars, longer.outvars, strict=True)
            return [r if self._fits(r, x, y) else UNKNOWN for r, x, y in outs]

        return list(map(self._read, run(a, consts, ins, rule, lambda x: x), b.outvars))

    def _fits(self, relation: Relation, x: Any, y: Any) -> bool:
        """Return whether a value grows as it must: rows in one dim with the number of rows, anything else not."""
        dims, (rows, more) = row_dims(x, y), self.num_rows
        if relation not in (ROWS, INDEX, NEVER):
            return not dims
        return len(dims) == 1 and x.aval.shape[dims[0]] * more == y.aval.shape[dims[0]] * rows

    def _read(self, x: Any, y: Any) -> Relation:
        """Return a relation as it is, and that of a literal, given the literal of the longer trace."""
        if isinstance(x, Relation):
            return x
        if not isinstance(y, core.Literal) or np.shape(x.val) != np.shape(y.val):
            raise Differ
        one, longer, (rows, more) = np.asarray(x.val), np.asarray(y.val), self.num_rows
        if not np.any(one) and not np.any(longer):
            return ZERO
        if (one != one).any():  # NaN
            return SAME
        for power in (0, 1, -1):
            if np.allclose(one * (more / rows) ** power, longer, rtol=1e-5 * abs(power), atol=0):
                return Relation("same", power)
        return UNKNOWN

    def _follow(self, eqn: Equation) -> list[Relation]:
        """Return the relations of an equation's outputs, whatever their shapes."""
        count, name = len(eqn.one.outvars), eqn.name
        if called(eqn.one) is not None:
            return self.run(inner_jaxprs(eqn.one)[0], inner_jaxprs(eqn.longer)[0], eqn.ins)
        if name == "scan":
            return self._scan(eqn)
        if name == "cond":
            branches = zip(eqn.params["branches"], eqn.longer.params["branches"], strict=True)
            results = zip(*[self.run(a, b, eqn.ins[1:]) for a, b in branches], strict=True)
            return [join(list(x)) if eqn.ins[0] in (SAME, ZERO) else UNKNOWN for x in results]
        if self._is_collective(eqn.one):
            return self._collective(eqn)
        has_rows = ROWS in eqn.ins
        if name.startswith("random_") and eqn.grows and not has_rows:
            # A key that is folded with the rows' indices draws the same for the first row of each replica.
            self.same_draws |= UNKNOWN not in eqn.ins
            return [ROWS]  # the draws of replicas are others than those of the entire batch, as they should be
        if self.alike and name == "random_bits" and not has_rows:
            return [SAME]
        inside = (x for body in bodies(eqn.one) for x in equations(body))
        pairs = ((key, str(x), str(eqn.longer.params[key])) for key, x in eqn.params.items())
        same = all(x == y or (key in _SIZES and bool(eqn.grows)) for key, x, y in pairs)
        if not same or any(map(self._is_collective, inside)):
            return [UNKNOWN] * count
        if name == "div" and id(eqn.one.invars[0]) in self._summed and eqn.ins[0].kind == "same":
            by = eqn.one.invars[1]
            if isinstance(by, core.Literal) and float(by.val) == self.replicas:  # jax.lax.pmean
                return [Relation("same", eqn.ins[0].power + 1)]
        return [relation_of(eqn)] * count

    def _is_collective(self, eqn: Any) -> bool:
        axes = (eqn.params.get("axes"), eqn.params.get("axis_name"))
        return any(self.axis in (x if isinstance(x, (tuple, list)) else (x,)) for x in axes)

    def _collective(self, eqn: Equation) -> list[Relation]:
        if not eqn.name.startswith("psum") or eqn.params.get("axis_index_groups") is not None:
            return [UNKNOWN] * len(eqn.one.outvars)
        self._summed |= set(map(id, eqn.one.outvars))
        sums = {r: Relation("same", r.as_total().power) for r in eqn.ins if r.kind in ("same", "total")} | {ZERO: ZERO}
        return [sums.get(r, UNKNOWN) for r in eqn.ins]

    def _scan(self, eqn: Equation) -> list[Relation]:
        """Return a scan's carry, as its body leaves it, and what it stacks; one turn a row is not followed."""
        consts, carries = scan_counts(eqn.one)
        programs = eqn.params["jaxpr"], eqn.longer.params["jaxpr"]
        before, carry, xs = eqn.ins[:consts], eqn.ins[consts : consts + carries], eqn.ins[consts + carries :]
        if eqn.params["length"] == eqn.longer.params["length"]:
            for _ in range(carries + 2):
                out = self.run(*programs, [*before, *carry, *xs])
                after = [join([x, y]) for x, y in zip(carry, out, strict=False)]
                if after == carry:
                    return [*carry, *out[carries:]]
                carry = after
        return [UNKNOWN] * len(eqn.one.outvars)


# By name, since jax does not export all of them. Functions of single numbers, or of the entries along some dims:
_LOCAL = (
    "abs acos acosh and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp clz conj cos cosh digamma "
    "eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min "
    "ne nextafter not or population_count pow rem round rsqrt shift_left shift_right_arithmetic shift_right_logical "
    "sign sin sinh sqrt square tan tanh xor random_wrap random_unwrap "
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum fft reduce_and reduce_max reduce_min reduce_or "
    "reduce_prod reduce_window_max reduce_window_min reduce_window_sum sort top_k random_bits random_fold_in "
    "random_split"
)
# Linear functions of one array:
_LINEAR = "imag neg real reduce_precision rev slice split squeeze stop_gradient transpose"
# Zeros in, zeros out:
_KEEP_ZERO = (*COPIES, "broadcast_in_dim", "convert_element_type", "mul", "neg", "reduce_sum", "reshape", "transpose")


def relation_of(eqn: Equation) -> Relation:
    """Return the relation of an equation's outputs; unknown for what no rule covers.

    Rules need not look at the outputs' shapes: only rows may grow with the rows, in one dim, which the caller checks.
    """
    if INDEX in eqn.ins or NEVER in eqn.ins:
        return _of_index(eqn)
    if UNKNOWN in eqn.ins:
        return UNKNOWN
    if all(r in (SAME, ZERO) for r in eqn.ins) and not eqn.grows:
        return ZERO if eqn.name in _KEEP_ZERO and SAME not in eqn.ins else SAME
    return _RULES[eqn.name](eqn) if eqn.name in _RULES else UNKNOWN


def _of_index(eqn: Equation) -> Relation:
    """Follow each row's own index, as in `logp[jnp.arange(rows), labels]`, from `iota` to `gather`."""
    name, (first, *rest), shape = eqn.name, eqn.ins, eqn.shape(0)
    if name == "lt" and eqn.ins == [INDEX, ZERO]:  # indexing asks whether an index is negative, which no row's is
        return NEVER
    if name == "select_n" and first == NEVER:
        return rest[0]
    if name == "gather" and eqn.ins == [ROWS, INDEX]:
        numbers, dim, row = eqn.params["dimension_numbers"], eqn.row_dim(0), eqn.row_dim(1)
        is_first = numbers.start_index_map[:1] == (dim,) and row < len(eqn.shape(1)) - 1
        fits = is_first and dim in numbers.collapsed_slice_dims and shape[dim] == eqn.shape(1)[row]
        return ROWS if fits else UNKNOWN
    if name == "broadcast_in_dim":
        fits = prod(eqn.out.shape) == prod(shape)
    elif name == "convert_element_type":
        fits = jnp.issubdtype(eqn.out.dtype, jnp.integer)
    else:  # the row's index, followed by other indices of the row
        last = len(shape) - 1
        fits = name == "concatenate" and {*rest} == {ROWS} and eqn.params["dimension"] == last and shape[last] == 1
    return INDEX if fits and first == INDEX else UNKNOWN  # otherwise it is a number that differs between replicas


def _local(eqn: Equation, *, linear: bool = False) -> Relation:
    """Follow a function of each row: of rows it returns rows; of a total it returns a total if it is linear."""
    relations = set(eqn.ins) - {SAME, ZERO}
    if relations == {ROWS}:
        return UNKNOWN if _acts_along_rows(eqn) else ROWS
    return relations.pop() if linear and len(relations) == 1 else UNKNOWN


_linear = partial(_local, linear=True)


def _acts_along_rows(eqn: Equation) -> bool:
    """Return whether an equation's parameters say that it combines, moves or cuts its input along the rows."""
    first, params = eqn.ins.index(ROWS), eqn.params
    dim, shape = eqn.row_dim(first), eqn.shape(first)
    if eqn.name not in ("squeeze", "stack"):  # a squeezed dim has one entry; jnp.stack makes a new dim
        named = [params.get(key) for key in ("axes", "axis", "dimension", "dimensions")]
        dims = [x for dims in named if dims is not None for x in (dims if isinstance(dims, tuple) else (dims,))]
        if dim in [x % len(shape) for x in dims]:
            return True
    if "padding_config" in params:
        return params["padding_config"][dim] != (0, 0, 0)
    if "window_dimensions" in params:
        sizes = params["window_dimensions"][dim], params["window_strides"][dim], params["padding"][dim]
        return sizes != (1, 1, (0, 0))
    if "fft_lengths" in params:
        return dim >= len(shape) - len(params["fft_lengths"])
    if eqn.name in ("slice", "dynamic_slice"):
        return eqn.out.shape[dim] != shape[dim]
    return "reps" in params and params["reps"][dim] != 1


def _convert(eqn: Equation) -> Relation:
    rounds = jnp.issubdtype(eqn.one.invars[0].aval.dtype, jnp.inexact) and not jnp.issubdtype(
        eqn.out.dtype, jnp.inexact
    )
    return _local(eqn, linear=not rounds and eqn.out.dtype != jnp.bool_)


def _add(eqn: Equation) -> Relation:
    return _local(eqn) if ROWS in eqn.ins else join(eqn.ins)


def _product(a: Relation, b: Relation) -> Relation:
    """Follow a bilinear function: of rows with rows or with the same, or of anything with the same."""
    if ZERO in (a, b):
        return ROWS if ROWS in (a, b) else ZERO
    a, b = (b, a) if a.kind == "same" else (a, b)
    if ROWS in (a, b):
        return ROWS if {a, b} <= {ROWS, SAME} else UNKNOWN
    return Relation(a.kind, a.power + b.power) if b.kind == "same" else UNKNOWN


def _divide(eqn: Equation) -> Relation:
    a, by = eqn.ins
    if not jnp.issubdtype(eqn.out.dtype, jnp.inexact):
        return _local(eqn)
    # One over a sum is none.
    return _product(a, Relation(by.kind, -by.power)) if by.kind in ("same", "rows") else UNKNOWN


def _dot(eqn: Equation) -> Relation:
    if eqn.ins == [ROWS, ROWS]:
        rows = (eqn.row_dim(0), eqn.row_dim(1))
        contracted, paired = (rows in zip(*dims, strict=True) for dims in eqn.params["dimension_numbers"])
        return TOTAL if contracted else ROWS if paired else UNKNOWN
    return _product(*eqn.ins)


def _select(eqn: Equation) -> Relation:
    chosen_by, *cases = eqn.ins
    return join(cases) if chosen_by in (SAME, ZERO) and ROWS not in cases else _local(eqn)


def _sum(eqn: Equation) -> Relation:
    return TOTAL if eqn.ins == [ROWS] and eqn.row_dim(0) in eqn.params["axes"] else _linear(eqn)


def _broadcast(eqn: Equation) -> Relation:
    # Of what is the same everywhere it makes rows that are all the same, such as zeros.
    return ROWS if eqn.grows and eqn.ins[0] in (SAME, ZERO) else _linear(eqn)


def _iota(eqn: Equation) -> Relation:
    return INDEX if eqn.grows == [eqn.params["dimension"]] else ROWS


def _reshape(eqn: Equation) -> Relation:
    if eqn.ins != [ROWS] or not eqn.grows:
        return _linear(eqn)
    # The rows stay blocks if as many numbers come before them as did.
    return ROWS if prod(eqn.out.shape[: eqn.grows[0]]) == prod(eqn.shape(0)[: eqn.row_dim(0)]) else UNKNOWN


def _convolve(eqn: Equation) -> Relation:
    if eqn.ins != [ROWS, SAME] or eqn.params["batch_group_count"] != 1:
        return UNKNOWN
    return ROWS if eqn.row_dim(0) == eqn.params["dimension_numbers"].lhs_spec[0] else UNKNOWN


def _gather(eqn: Equation) -> Relation:
    (table, indices), numbers = eqn.ins, eqn.params["dimension_numbers"]
    if indices in (SAME, ZERO):
        fits = table != ROWS or eqn.params["slice_sizes"][eqn.row_dim(0)] == eqn.shape(0)[eqn.row_dim(0)]
        return table if fits else UNKNOWN
    # An embedding, or rows that are looked up row by row.
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    fits = table == SAME or (table == ROWS and (eqn.row_dim(0), eqn.row_dim(1)) in pairs)
    return ROWS if fits and indices == ROWS else UNKNOWN


def _scatter(eqn: Equation) -> Relation:
    table, indices, new = eqn.ins
    if eqn.name == "scatter" and overwrites(eqn.one):
        return new
    if eqn.name == "scatter-add" and table != ROWS and indices == new == ROWS:  # counts by label add up
        return join([table, TOTAL])
    return UNKNOWN


def _dynamic_slice(eqn: Equation) -> Relation:
    return _linear(eqn) if {*eqn.ins[1:]} <= {SAME, ZERO} else UNKNOWN


def _pad(eqn: Equation) -> Relation:
    return _linear(eqn) if eqn.ins[1] == ZERO or eqn.ins == [ROWS, SAME] else UNKNOWN


_RULES: dict[str, Callable[[Equation], Relation]] = {
    **dict.fromkeys(_LOCAL.split(), _local),
    **dict.fromkeys([*_LINEAR.split(), *COPIES], _linear),
    **dict.fromkeys(("add", "add_any", "sub", "concatenate", "stack"), _add),
    **dict.fromkeys(("scatter", "scatter-add"), _scatter),
    **dict.fromkeys(("broadcast_in_dim", "tile"), _broadcast),
    "conv_general_dilated": _convolve,
    "convert_element_type": _convert,
    "div": _divide,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "iota": _iota,
    "mul": lambda eqn: _product(*eqn.ins),
    "pad": _pad,
    "reduce_sum": _sum,
    "reshape": _reshape,
    "select_n": _select,
}
