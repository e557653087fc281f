"""What each of jax's primitives makes of the relations of its inputs."""

from collections.abc import Callable
from dataclasses import replace
from math import prod

import jax.numpy as jnp

from jaxlit.programs.jaxpr import overwrites
from jaxlit.programs.relation import SAME, UNKNOWN, ZERO, Equation, Relation, join


def _rows(eqn: Equation, power: int = 0) -> Relation:
    """Return that the output has rows, where its shape tells."""
    return UNKNOWN if eqn.row_dim is None else Relation("rows", power, eqn.row_dim)


def _less(eqn: Equation) -> Relation:
    place, bound = eqn.ins
    # No place is negative, which indexing asks of each.
    return replace(place, kind="never") if place.kind == "index" and bound == ZERO else _elementwise(eqn)


def _elementwise(eqn: Equation) -> Relation:
    """A function of single numbers: of rows it gives rows."""
    found = {r for r in eqn.ins if r not in (SAME, ZERO)}
    if not found:
        return SAME
    (relation, *others) = found
    return relation if not others and relation.kind == "rows" and relation.power == 0 else UNKNOWN


def _linear(eqn: Equation) -> Relation:
    """A linear function of one input: a total stays one."""
    (relation,) = eqn.ins
    return UNKNOWN if relation.kind != "rows" and eqn.makes_rows else relation


def _cast(eqn: Equation) -> Relation:
    if eqn.ins[0].kind == "index":
        return eqn.ins[0] if jnp.issubdtype(eqn.one.outvars[0].aval.dtype, jnp.integer) else UNKNOWN
    # Whole numbers cut off what is after the point.
    dtypes = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in (eqn.one.invars[0], eqn.one.outvars[0])]
    to_bool = eqn.one.outvars[0].aval.dtype == jnp.bool_
    return _elementwise(eqn) if to_bool or dtypes == [True, False] else _linear(eqn)


def _add(eqn: Equation) -> Relation:
    if not eqn.has_rows:
        return join(eqn.ins)
    rows = {r for r in eqn.ins if r.kind == "rows"}
    others = [r for r in eqn.ins if r.kind not in ("rows", "zero")]
    # What is added to rows is one number for all of them.
    fit = len(rows) == 1 and all(r == Relation("same", next(iter(rows)).power) for r in others)
    return rows.pop() if fit else UNKNOWN


def _multiply(eqn: Equation) -> Relation:
    a, b = eqn.ins
    if ZERO in (a, b):
        return _zeros(eqn)
    if a.kind == "same":
        a, b = b, a
    if b.kind == "same" or (a.kind, a.dim, b.kind) == ("rows", b.dim, "rows"):
        return replace(a, power=a.power + b.power)
    return UNKNOWN


def _zeros(eqn: Equation) -> Relation:
    if not eqn.makes_rows:
        return ZERO
    return _rows(eqn)


def _divide(eqn: Equation) -> Relation:
    a, b = eqn.ins
    if not jnp.issubdtype(eqn.one.outvars[0].aval.dtype, jnp.inexact):
        return _elementwise(eqn)
    if a == ZERO:
        return _zeros(eqn)
    if b.kind == "same" or (a.kind, a.dim, b.kind) == ("rows", b.dim, "rows"):
        return replace(a, power=a.power - b.power)
    return replace(b, power=a.power - b.power) if (a.kind, b.kind) == ("same", "rows") else UNKNOWN


def _select(eqn: Equation) -> Relation:
    chosen_by, *cases = eqn.ins
    if chosen_by.kind == "never":
        return cases[0]
    return join(cases) if chosen_by in (SAME, ZERO) and not eqn.has_rows else _elementwise(eqn)


def _sum(eqn: Equation) -> Relation:
    (relation,), axes = eqn.ins, eqn.one.params["axes"]
    if relation.kind == "rows" and relation.dim in axes:
        return Relation("total", relation.power)
    return _moved(eqn)


def _reduce(eqn: Equation) -> Relation:
    """A maximum and the like: over anything but the rows."""
    (relation,) = eqn.ins
    plain = relation.power == 0 and relation.kind in ("rows", "same")
    return (
        _moved(eqn) if plain and not (relation.kind == "rows" and relation.dim in eqn.one.params["axes"]) else UNKNOWN
    )


def _along(parameter: str) -> Callable[[Equation], Relation]:
    """A function along one dim, such as a sort: along anything but the rows."""

    def rule(eqn: Equation) -> Relation:
        found = {r for r in eqn.ins if r != SAME}
        if len(found) != 1:
            return UNKNOWN
        (relation,) = found
        dim = eqn.one.params[parameter] % len(eqn.shape(0))
        return relation if relation.kind == "rows" and relation.dim != dim and relation.power == 0 else UNKNOWN

    return rule


def _fourier(eqn: Equation) -> Relation:
    (relation,), transformed = eqn.ins, len(eqn.one.params["fft_lengths"])
    apart = relation.kind != "rows" or relation.dim < len(eqn.shape(0)) - transformed
    return relation if apart else UNKNOWN


def _moved(eqn: Equation) -> Relation:
    """A function that leaves rows whole, and tells by its shape where they are now."""
    relations = {r for r in eqn.ins if r not in (SAME, ZERO)}
    if len(relations) != 1:
        return UNKNOWN
    (relation,) = relations
    if relation.kind == "rows":
        return _rows(eqn, relation.power)
    return UNKNOWN if eqn.makes_rows else relation


def _broadcast(eqn: Equation) -> Relation:
    relation = eqn.ins[0]
    if relation.kind in ("rows", "index"):
        return replace(relation, dim=eqn.one.params["broadcast_dimensions"][relation.dim])
    if not eqn.makes_rows:
        return relation
    return _rows(eqn, relation.power) if relation.kind in ("same", "zero") else UNKNOWN


def _tile(eqn: Equation) -> Relation:
    (relation,), repeats, dim = eqn.ins, eqn.one.params["reps"], eqn.row_dim
    if relation.kind == "rows":
        return relation if repeats[relation.dim] == 1 else UNKNOWN
    if not eqn.makes_rows:
        return relation
    alike = relation.kind in ("same", "zero") and dim is not None and eqn.shape(0)[dim] == 1
    return _rows(eqn, relation.power) if alike else UNKNOWN


def _iota(eqn: Equation) -> Relation:
    along_rows = eqn.row_dim == eqn.one.params["dimension"]
    return Relation("index", 0, eqn.one.params["dimension"]) if along_rows else _rows(eqn)


def _reshape(eqn: Equation) -> Relation:
    (relation,) = eqn.ins[:1]
    if relation.kind != "rows":
        return UNKNOWN if eqn.makes_rows else relation
    # The rows stay whole blocks if as many numbers are in front of them as were.
    dim, shape = eqn.row_dim, eqn.one.outvars[0].aval.shape
    kept = dim is not None and prod(shape[:dim]) == prod(eqn.shape(0)[: relation.dim])
    return _rows(eqn, relation.power) if kept else UNKNOWN


def _dot(eqn: Equation) -> Relation:
    a, b = eqn.ins
    if ZERO in (a, b):
        return _zeros(eqn)
    (contracted_a, contracted_b), (batch_a, batch_b) = eqn.one.params["dimension_numbers"]
    power = a.power + b.power
    if a.kind == b.kind == "rows":
        if (a.dim, b.dim) in zip(contracted_a, contracted_b, strict=True):
            return Relation("total", power)
        paired = (a.dim, b.dim) in zip(batch_a, batch_b, strict=True)
        return _rows(eqn, power) if paired else UNKNOWN
    if a.kind == "same":
        a, b = b, a
    if b.kind != "same":
        return UNKNOWN
    if a.kind == "rows":
        return _rows(eqn, power)
    return replace(a, power=power)


def _convolve(eqn: Equation) -> Relation:
    (a, b), params = eqn.ins, eqn.one.params
    batch = params["dimension_numbers"].lhs_spec[0]
    if a.kind == "rows" and b.kind == "same" and a.dim == batch and params["batch_group_count"] == 1:
        return Relation("rows", a.power + b.power, params["dimension_numbers"].out_spec[0])
    return UNKNOWN


def _windows(eqn: Equation) -> Relation:
    relation, params = eqn.ins[0], eqn.one.params
    if relation.kind != "rows" or relation.power:
        return UNKNOWN
    alone = params["window_dimensions"][relation.dim] == params["window_strides"][relation.dim] == 1
    return relation if alone and params["padding"][relation.dim] == (0, 0) else UNKNOWN


def _gather(eqn: Equation) -> Relation:
    table, places = eqn.ins
    params = eqn.one.params
    numbers = params["dimension_numbers"]
    if places.kind in ("index", "indexed"):  # each row from its own, as in logp[jnp.arange(rows), labels]
        own = table.kind == "rows" and _looks_up_own_row(numbers.start_index_map, table, places, eqn)
        return _rows(eqn, table.power) if own and table.dim in numbers.collapsed_slice_dims else UNKNOWN
    if places in (SAME, ZERO):
        if table.kind != "rows":
            return UNKNOWN if eqn.makes_rows else table
        whole = params["slice_sizes"][table.dim] == eqn.shape(0)[table.dim]
        return _rows(eqn, table.power) if whole else UNKNOWN
    if places.kind != "rows" or places.power:
        return UNKNOWN
    if table.kind == "same":  # an embedding
        return _rows(eqn, table.power)
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    return _rows(eqn, table.power) if (table.dim, places.dim) in pairs else UNKNOWN


def _looks_up_own_row(index_map: tuple[int, ...], table: Relation, places: Relation, eqn: Equation) -> bool:
    """Return whether the first of the places, and it alone, is that of the row among the rows of the table."""
    alone = places.kind == "indexed" or eqn.shape(1)[-1:] == (1,)
    return alone and index_map[:1] == (table.dim,) and places.dim < len(eqn.shape(1)) - 1


def _scatter_into_rows(eqn: Equation) -> Relation:
    """Entries of each row are written: at the same places in all, or where the row tells."""
    table, places, new = eqn.ins
    numbers = eqn.one.params["dimension_numbers"]
    if table.power or new.power or new.kind != "rows":
        return UNKNOWN
    written, outside = numbers.update_window_dims, (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    if places in (SAME, ZERO) and table.dim not in (*numbers.scatter_dims_to_operand_dims, *outside):
        window = [dim for dim in range(len(eqn.shape(0))) if dim not in outside]
        fits = new.dim == written[window.index(table.dim)] and eqn.shape(2)[new.dim] == eqn.shape(0)[table.dim]
    elif places.kind in ("index", "indexed") and table.dim in numbers.inserted_window_dims:
        looked_up = [dim for dim in range(len(eqn.shape(2))) if dim not in written]
        fits = _looks_up_own_row(numbers.scatter_dims_to_operand_dims, table, places, eqn)
        fits = fits and new.dim == looked_up[places.dim]
    else:
        fits = False
    return _rows(eqn) if fits else UNKNOWN


def _scatter_add(eqn: Equation) -> Relation:
    table, places, rows = eqn.ins
    if table.kind == "rows":
        return _scatter_into_rows(eqn)
    if eqn.makes_rows or rows.kind != "rows" or places.kind != "rows" or places.power:
        return UNKNOWN
    return join([table, Relation("total", rows.power)])


def _scatter(eqn: Equation) -> Relation:
    if overwrites(eqn.one):
        return eqn.ins[2]
    return _scatter_into_rows(eqn) if eqn.ins[0].kind == "rows" else UNKNOWN


def _slice(eqn: Equation) -> Relation:
    relation, *places = eqn.ins
    if any(r not in (SAME, ZERO) for r in places):
        return UNKNOWN
    if relation.kind != "rows":
        return relation
    size = eqn.one.outvars[0].aval.shape[relation.dim]
    cuts = [[eqn_.params.get(name) for name in ("start_indices", "limit_indices")] for eqn_ in (eqn.one, eqn.longer)]
    elsewhere = [[x and [v for i, v in enumerate(x) if i != relation.dim] for x in cut] for cut in cuts]
    return relation if size == eqn.shape(0)[relation.dim] and elsewhere[0] == elsewhere[1] else UNKNOWN


def _reverse(eqn: Equation) -> Relation:
    (relation,) = eqn.ins
    return UNKNOWN if relation.kind == "rows" and relation.dim in eqn.one.params["dimensions"] else relation


def _split(eqn: Equation) -> Relation:
    (relation,) = eqn.ins
    return UNKNOWN if relation.kind == "rows" and relation.dim == eqn.one.params["axis"] else relation


def _concatenate(eqn: Equation) -> Relation:
    along = eqn.one.params["dimension"]
    if eqn.ins[0].kind == "index":
        (place, *others), last = eqn.ins, len(eqn.shape(0)) - 1
        rows = all(r == Relation("rows", 0, place.dim) for r in others)
        return (
            replace(place, kind="indexed")
            if rows and along == last != place.dim and eqn.shape(0)[last] == 1
            else UNKNOWN
        )
    relation = join(eqn.ins)
    return UNKNOWN if relation.kind == "rows" and relation.dim == along else relation


def _stack(eqn: Equation) -> Relation:
    relation = join(eqn.ins)
    return _moved(eqn) if relation.kind == "rows" else relation


def _pad(eqn: Equation) -> Relation:
    relation, filling = eqn.ins
    if filling != ZERO and not (filling == SAME and relation.kind == "rows" and relation.power == 0):
        return UNKNOWN
    if relation.kind == "rows" and eqn.one.params["padding_config"][relation.dim] != (0, 0, 0):
        return UNKNOWN
    return UNKNOWN if relation.kind != "rows" and eqn.makes_rows else relation


_ELEMENTWISE = (  # by name, since jax does not export them all
    "abs acos acosh and asin asinh atan atan2 atanh bitcast_convert_type cbrt ceil clamp clz conj cos cosh digamma "
    "eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic max min "
    "ne nextafter not or population_count pow rem round rsqrt shift_left shift_right_arithmetic shift_right_logical "
    "sign sin sinh sqrt square tan tanh xor random_wrap random_unwrap "
)
_LINEAR = "neg copy copy_p stop_gradient real imag reduce_precision sharding_constraint reshard"

RULES: dict[str, Callable[[Equation], Relation]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(_LINEAR.split(), _linear),
    **dict.fromkeys(("add", "sub", "add_any"), _add),
    **dict.fromkeys(
        ("reduce_max", "reduce_min", "reduce_and", "reduce_or", "reduce_prod", "argmax", "argmin"), _reduce
    ),
    **dict.fromkeys(("cumsum", "cummax", "cummin", "cumprod", "cumlogsumexp", "top_k"), _along("axis")),
    **dict.fromkeys(("random_bits", "random_fold_in", "random_split", "transpose", "squeeze"), _moved),
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _windows),
    **dict.fromkeys(("slice", "dynamic_slice"), _slice),
    "broadcast_in_dim": _broadcast,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolve,
    "convert_element_type": _cast,
    "div": _divide,
    "dot_general": _dot,
    "fft": _fourier,
    "gather": _gather,
    "iota": _iota,
    "lt": _less,
    "mul": _multiply,
    "pad": _pad,
    "reduce_sum": _sum,
    "reshape": _reshape,
    "rev": _reverse,
    "scatter": _scatter,
    "scatter-add": _scatter_add,
    "select_n": _select,
    "sort": _along("dimension"),
    "split": _split,
    "stack": _stack,
    "tile": _tile,
}

# What may take a row's place; to all else it is a number that is another on each replica.
TAKES_PLACES = (
    "broadcast_in_dim",
    "concatenate",
    "convert_element_type",
    "gather",
    "lt",
    "scatter",
    "scatter-add",
    "select_n",
)

_KEEP_BOTH = ("convert_element_type", "copy", "mul", "neg", "reduce_sum", "reshape", "squeeze")
KEEPS_ZERO = (*_KEEP_BOTH, "broadcast_in_dim", "transpose")
# Through which a sum of several relations stays one.
SUMS = (*_KEEP_BOTH, "add", "add_any", "div", "sub")

# Whose parameters may tell of the number of rows: their rules look at the shapes that come of it.
SHAPED = ("broadcast_in_dim", "dynamic_slice", "gather", "iota", "random_bits", "reshape", "slice", "tile")
