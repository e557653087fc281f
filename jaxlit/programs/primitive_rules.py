"""The relation of each primitive's output, given those of its inputs."""

from collections.abc import Callable, Sequence
from math import prod

import jax.numpy as jnp

from jaxlit.programs.jaxpr import COPIES, overwrites
from jaxlit.programs.relation import SAME, UNKNOWN, ZERO, Equation, Relation, join

Pairs = Sequence[tuple[int, int]]  # of dims of two inputs

# By name, since jax does not export all of them. Functions of single numbers, and of entries along dims:
_ELEMENTWISE = (
    "abs acos acosh and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp clz conj cos cosh digamma "
    "eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min "
    "ne nextafter not or population_count pow rem round rsqrt shift_left shift_right_arithmetic shift_right_logical "
    "sign sin sinh sqrt square tan tanh xor random_wrap random_unwrap"
)
_ALONG = (
    "argmax argmin cumlogsumexp cummax cummin cumprod cumsum fft reduce_and reduce_max reduce_min reduce_or "
    "reduce_prod reduce_window_max reduce_window_min reduce_window_sum sort top_k random_bits random_fold_in "
    "random_split"
)
# Linear functions of one array:
_LINEAR = "imag neg real reduce_precision rev slice split squeeze stop_gradient tile transpose"
# Zeros in, zeros out:
_KEEP_ZERO = (*COPIES, "broadcast_in_dim", "convert_element_type", "mul", "neg", "reduce_sum", "reshape", "transpose")
# Those that may take a row's index; to others it is a number that differs between replicas.
_TAKE_INDEX = (
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "gather",
    "lt",
    "scatter",
    "scatter-add",
    "select_n",
)
# Parameters that are sizes: they may grow with the rows, as then the output's shape does.
SIZES = ("shape", "new_sizes", "slice_sizes", "start_indices", "limit_indices", "reps")


def relation_of(eqn: Equation) -> Relation:
    """Return the relation of an equation's outputs; unknown for what no rule covers."""
    name = eqn.name
    if eqn.only_same and not eqn.grows:
        return ZERO if name in _KEEP_ZERO and all(r == ZERO for r in eqn.ins) else SAME
    if UNKNOWN in eqn.ins and eqn.ins[0].kind != "never":
        return UNKNOWN
    if any(r.kind in ("index", "never") for r in eqn.ins) and name not in _TAKE_INDEX:
        return UNKNOWN
    return _RULES[name](eqn) if name in _RULES else UNKNOWN


def _linear(eqn: Equation) -> Relation:
    return _local(eqn, linear=True)


def _local(eqn: Equation, *, linear: bool = False) -> Relation:
    """A function of each row by itself: of rows it makes rows, and a linear one of a total makes a total."""
    relations = {r for r in eqn.ins if r not in (SAME, ZERO)}
    if not relations:  # rows that are all the same, such as zeros
        return eqn.rows() if eqn.name in _ELEMENTWISE.split() or eqn.name == "tile" else UNKNOWN
    (relation, *others) = relations
    if others or (relation.power and not linear):
        return UNKNOWN
    if relation.kind == "rows":
        return UNKNOWN if _acts_along(eqn, relation.dim) else eqn.rows(relation.power)
    return relation if linear and not eqn.grows else UNKNOWN


def _acts_along(eqn: Equation, dim: int) -> bool:
    """Return whether an equation's parameters say that it combines, moves or cuts entries along a dim of its input."""
    params, shape = eqn.params, eqn.shape(0)
    for key in ("axes", "axis", "dimension", "dimensions"):
        named = params.get(key)
        named = named if isinstance(named, tuple) else () if named is None else (named,)
        # A squeezed dim has one entry; jnp.stack makes a new dim.
        if eqn.name not in ("squeeze", "stack") and dim in [x % len(shape) for x in named]:
            return True
    if "padding_config" in params:
        return params["padding_config"][dim] != (0, 0, 0)
    if "window_dimensions" in params:
        sizes = params["window_dimensions"][dim], params["window_strides"][dim], params["padding"][dim]
        return sizes != (1, 1, (0, 0))
    if "fft_lengths" in params:
        return dim >= len(shape) - len(params["fft_lengths"])
    if eqn.name in ("slice", "dynamic_slice"):
        return eqn.out.shape[dim] != shape[dim] or len(eqn.out.shape) != len(shape)
    return "reps" in params and params["reps"][dim] != 1


def _convert(eqn: Equation) -> Relation:
    if eqn.ins[0].kind == "index":
        return eqn.ins[0] if jnp.issubdtype(eqn.out.dtype, jnp.integer) else UNKNOWN
    cut = eqn.out.dtype == jnp.bool_ or (
        jnp.issubdtype(eqn.one.invars[0].aval.dtype, jnp.inexact) and not jnp.issubdtype(eqn.out.dtype, jnp.inexact)
    )
    return _local(eqn, linear=not cut)


def _less(eqn: Equation) -> Relation:
    # Indexing asks whether an index is negative, which no row's is.
    if eqn.ins[0].kind == "index":
        return Relation("never", 0, eqn.ins[0].dim) if eqn.ins[1] == ZERO else UNKNOWN
    return _local(eqn)


def _add(eqn: Equation) -> Relation:
    rows = {r for r in eqn.ins if r.kind == "rows"}
    if not rows:
        return UNKNOWN if eqn.grows else join(eqn.ins)
    others = [r for r in eqn.ins if r.kind not in ("rows", "zero")]
    # What is added to rows is one number for all of them.
    fit = len(rows) == 1 and all(r == Relation("same", next(iter(rows)).power) for r in others)
    return rows.pop() if fit else UNKNOWN


def _product(eqn: Equation, b: Relation, contracted: Pairs = (), paired: Pairs = ()) -> Relation:
    """A bilinear function of the first input and one that relates as `b`, given the dims that it joins."""
    a, power = eqn.ins[0], eqn.ins[0].power + b.power
    if ZERO in (a, b):
        return eqn.rows() if eqn.grows else ZERO
    if a.kind == b.kind == "rows":
        if (a.dim, b.dim) in contracted:
            return Relation("total", power)
        return eqn.rows(power) if (a.dim, b.dim) in paired else UNKNOWN
    a, b = (b, a) if a.kind == "same" else (a, b)
    if b.kind != "same":
        return UNKNOWN
    return eqn.rows(power) if a.kind == "rows" else a.times(b.power)


def _multiply(eqn: Equation) -> Relation:
    return _product(eqn, eqn.ins[1], paired=[(dim, dim) for dim in range(len(eqn.out.shape))])


def _divide(eqn: Equation) -> Relation:
    by, dims = eqn.ins[1], range(len(eqn.out.shape))
    if not jnp.issubdtype(eqn.out.dtype, jnp.inexact):
        return _local(eqn)
    # One over a sum is none.
    known = by.kind in ("same", "rows")
    return _product(eqn, by.times(-2 * by.power), paired=[(dim, dim) for dim in dims]) if known else UNKNOWN


def _dot(eqn: Equation) -> Relation:
    contracted, batch = (list(zip(*dims, strict=True)) for dims in eqn.params["dimension_numbers"])
    return _product(eqn, eqn.ins[1], contracted, batch)


def _select(eqn: Equation) -> Relation:
    chosen_by, *cases = eqn.ins
    if chosen_by.kind == "never":
        return cases[0]
    if chosen_by in (SAME, ZERO) and not any(r.kind == "rows" for r in cases):
        return join(cases)
    return _local(eqn)


def _sum(eqn: Equation) -> Relation:
    (relation,) = eqn.ins
    if relation.kind == "rows" and relation.dim in eqn.params["axes"]:
        return Relation("total", relation.power)
    return _linear(eqn)


def _broadcast(eqn: Equation) -> Relation:
    relation = eqn.ins[0]
    if relation.kind == "index":  # of dims of size 1 only: each entry stays the only one of its row
        dim = eqn.params["broadcast_dimensions"][relation.dim]
        return Relation("index", 0, dim) if prod(eqn.out.shape) == prod(eqn.shape(0)) else UNKNOWN
    if relation.kind == "rows" or (eqn.grows and relation.kind in ("same", "zero")):
        return eqn.rows(relation.power)
    return UNKNOWN if eqn.grows else relation


def _iota(eqn: Equation) -> Relation:
    rows = eqn.rows()
    return Relation("index", 0, rows.dim) if rows.dim == eqn.params["dimension"] and rows != UNKNOWN else rows


def _reshape(eqn: Equation) -> Relation:
    relation, rows = eqn.ins[0], eqn.rows()
    if relation.kind == "rows" and rows != UNKNOWN:
        # The rows stay blocks if as many numbers come before them as did.
        kept = prod(eqn.out.shape[: rows.dim]) == prod(eqn.shape(0)[: relation.dim])
        return rows.times(relation.power) if kept else UNKNOWN
    return _linear(eqn)


def _convolve(eqn: Equation) -> Relation:
    (a, b), numbers = eqn.ins, eqn.params["dimension_numbers"]
    plain = b.kind == "same" and eqn.params["batch_group_count"] == 1
    return eqn.rows(a.power + b.power) if plain and (a.kind, a.dim) == ("rows", numbers.lhs_spec[0]) else UNKNOWN


def _gather(eqn: Equation) -> Relation:
    (table, indices), numbers = eqn.ins, eqn.params["dimension_numbers"]
    if indices.kind == "index":  # each row's own entry, as in logp[jnp.arange(rows), labels]
        fits = _looks_up_own_row(numbers.start_index_map, eqn) and table.dim in numbers.collapsed_slice_dims
    elif indices in (SAME, ZERO):
        if table.kind != "rows":
            return UNKNOWN if eqn.grows else table
        fits = eqn.params["slice_sizes"][table.dim] == eqn.shape(0)[table.dim]
    else:  # an embedding, or rows that are looked up row by row
        pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
        by_row = table.kind == "same" or (table.kind == "rows" and (table.dim, indices.dim) in pairs)
        fits = indices == Relation("rows", 0, indices.dim) and by_row
    return eqn.rows(table.power) if fits else UNKNOWN


def _looks_up_own_row(index_map: tuple[int, ...], eqn: Equation) -> bool:
    """Return whether the first of each row's indices, and it alone, is the row's own in a table of rows."""
    table, indices = eqn.ins[:2]
    return table.kind == "rows" and index_map[:1] == (table.dim,) and indices.dim < len(eqn.shape(1)) - 1


def _scatter(eqn: Equation) -> Relation:
    table, indices, new = eqn.ins
    if eqn.name == "scatter" and overwrites(eqn.one):
        return new
    if table.kind != "rows":  # counts by label: what is added for each row adds up
        fits = eqn.name == "scatter-add" and new.kind == "rows" and indices == Relation("rows", 0, indices.dim)
        return join([table, Relation("total", new.power)]) if fits and not eqn.grows else UNKNOWN
    # Entries of each row are written: at the same indices in all rows, or at those of the row.
    numbers = eqn.params["dimension_numbers"]
    written, outside = numbers.update_window_dims, (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    fits = False
    if table.power or new.power or new.kind != "rows":
        return UNKNOWN
    if indices in (SAME, ZERO) and table.dim not in (*numbers.scatter_dims_to_operand_dims, *outside):
        window = [dim for dim in range(len(eqn.shape(0))) if dim not in outside]
        fits = new.dim == written[window.index(table.dim)] and eqn.shape(2)[new.dim] == eqn.shape(0)[table.dim]
    elif indices.kind == "index" and table.dim in numbers.inserted_window_dims:
        looked_up = [dim for dim in range(len(eqn.shape(2))) if dim not in written]
        own = _looks_up_own_row(numbers.scatter_dims_to_operand_dims, eqn)
        fits = own and new.dim == looked_up[indices.dim]
    return eqn.rows() if fits else UNKNOWN


def _dynamic_slice(eqn: Equation) -> Relation:
    return _linear(eqn) if all(r in (SAME, ZERO) for r in eqn.ins[1:]) else UNKNOWN


def _concatenate(eqn: Equation) -> Relation:
    first, *others = eqn.ins
    if first.kind == "index":  # the row's index, followed by others of the row
        fits = all(r == Relation("rows", 0, first.dim) for r in others) and eqn.shape(0)[-1] == 1
        return first if fits and eqn.params["dimension"] == len(eqn.shape(0)) - 1 != first.dim else UNKNOWN
    relation = join(eqn.ins)
    along = relation.kind == "rows" and relation.dim == eqn.params["dimension"]
    return UNKNOWN if along else relation


def _stack(eqn: Equation) -> Relation:
    relation = join(eqn.ins)
    return eqn.rows(relation.power) if relation.kind == "rows" else relation


def _pad(eqn: Equation) -> Relation:
    relation, filling = eqn.ins
    plain = filling == ZERO or (filling == SAME and relation.kind == "rows" and not relation.power)
    return _linear(eqn) if plain else UNKNOWN


_RULES: dict[str, Callable[[Equation], Relation]] = {
    **dict.fromkeys([*_ELEMENTWISE.split(), *_ALONG.split()], _local),
    **dict.fromkeys([*_LINEAR.split(), *COPIES], _linear),
    **dict.fromkeys(("add", "add_any", "sub"), _add),
    **dict.fromkeys(("scatter", "scatter-add"), _scatter),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolve,
    "convert_element_type": _convert,
    "div": _divide,
    "dot_general": _dot,
    "dynamic_slice": _dynamic_slice,
    "gather": _gather,
    "iota": _iota,
    "lt": _less,
    "mul": _multiply,
    "pad": _pad,
    "reduce_sum": _sum,
    "reshape": _reshape,
    "select_n": _select,
    "stack": _stack,
}
