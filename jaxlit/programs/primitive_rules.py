"""The relation of each primitive's output, given those of its inputs."""

from collections.abc import Callable
from functools import partial
from math import prod

import jax.numpy as jnp

from jaxlit.programs.jaxpr import COPIES, overwrites
from jaxlit.programs.relation import INDEX, NEVER, ROWS, SAME, TOTAL, UNKNOWN, ZERO, Equation, Relation, join

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
        own = numbers.start_index_map[:1] == (dim,) and row < len(eqn.shape(1)) - 1
        return ROWS if own and dim in numbers.collapsed_slice_dims and shape[dim] == eqn.shape(1)[row] else UNKNOWN
    fits = (
        (name == "broadcast_in_dim" and prod(eqn.out.shape) == prod(shape))
        or (name == "convert_element_type" and jnp.issubdtype(eqn.out.dtype, jnp.integer))
        # The row's index, followed by others of the row.
        or (
            name == "concatenate" and {*rest} == {ROWS} and eqn.params["dimension"] == len(shape) - 1 and shape[-1] == 1
        )
    )
    return INDEX if fits and first == INDEX else UNKNOWN  # to others it is a number that differs between replicas


def _local(eqn: Equation, *, linear: bool = False) -> Relation:
    """A function of each row by itself: of rows it makes rows, and a linear one of a total makes a total."""
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
    kept = jnp.issubdtype(eqn.out.dtype, jnp.inexact) or not jnp.issubdtype(eqn.one.invars[0].aval.dtype, jnp.inexact)
    return _local(eqn, linear=kept and eqn.out.dtype != jnp.bool_)


def _add(eqn: Equation) -> Relation:
    return _local(eqn) if ROWS in eqn.ins else join(eqn.ins)


def _multiply(eqn: Equation) -> Relation:
    return _product(*eqn.ins)


def _product(a: Relation, b: Relation) -> Relation:
    """A bilinear function: of rows with rows or with the same, or of anything with the same."""
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
    kept = prod(eqn.out.shape[: eqn.grows[0]]) == prod(eqn.shape(0)[: eqn.row_dim(0)])
    return ROWS if kept else UNKNOWN


def _convolve(eqn: Equation) -> Relation:
    plain = eqn.ins == [ROWS, SAME] and eqn.params["batch_group_count"] == 1
    return ROWS if plain and eqn.row_dim(0) == eqn.params["dimension_numbers"].lhs_spec[0] else UNKNOWN


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
    return _linear(eqn) if all(r in (SAME, ZERO) for r in eqn.ins[1:]) else UNKNOWN


def _pad(eqn: Equation) -> Relation:
    filled = eqn.ins[1] == ZERO or eqn.ins == [ROWS, SAME]
    return _linear(eqn) if filled else UNKNOWN


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
    "mul": _multiply,
    "pad": _pad,
    "reduce_sum": _sum,
    "reshape": _reshape,
    "select_n": _select,
}
