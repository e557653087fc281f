"""How what a replica computes from its rows relates to what one device computes from the whole batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax.numpy as jnp

from jaxlit.jaxpr import overwrites


@dataclass(frozen=True)
class Relation:
    """How the value that each of n replicas has relates to the one of the whole batch.

    Attributes:
        kind: "same", the whole value is `n**power` times each replica's; "rows", a replica's value is its block of it
            along `dim`, but for that factor; "total", it is that factor times the sum over replicas; "mixed", values
            of several relations are added up; "zero", the value is zero; "unknown".
        power: The power of n: a mean over rows is a total of power -1, a count of rows is the same of power 1.
        dim: Where the rows are.
    """

    kind: str
    power: int = 0
    dim: int = 0

    @property
    def is_total(self) -> bool:
        """Whether the replicas' values add up to the whole one: a sum over rows, or their number."""
        return self.as_total() == Relation("total")

    def as_total(self) -> "Relation":
        """Return what the same on every replica is as a sum over them."""
        return Relation("total", self.power - 1) if self.kind == "same" else self


SAME, TOTAL, ZERO, UNKNOWN = Relation("same"), Relation("total"), Relation("zero"), Relation("unknown")
MIXED = Relation("mixed")
MEAN, ROWS = Relation("total", -1), Relation("rows")


class Differ(Exception):
    """Two traces of a program are not the same but for the number of rows."""


@dataclass(frozen=True)
class Equation:
    """One equation of both traces, and the relations of its inputs."""

    one: Any
    longer: Any
    ins: list[Relation]
    rows: tuple[int, int]  # of the batch, in both traces

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.one.primitive.name

    def shape(self, i: int) -> tuple[int, ...]:
        """The shape of input i."""
        return self.one.invars[i].aval.shape

    @property
    def row_dims(self) -> list[int]:
        """The dims of the first output that depend on the number of rows."""
        return row_dims(self.one.outvars[0], self.longer.outvars[0])

    @property
    def row_dim(self) -> int | None:
        """The one dim of the first output that grows as the rows do; None if there is no such dim, or another grows."""
        dims, (one, longer) = self.row_dims, (self.one.outvars[0].aval.shape, self.longer.outvars[0].aval.shape)
        fits = len(dims) == 1 and one[dims[0]] * self.rows[1] == longer[dims[0]] * self.rows[0]
        return dims[0] if fits else None

    @property
    def has_rows(self) -> bool:
        """Whether an input has rows."""
        return any(r.kind == "rows" for r in self.ins)

    @property
    def makes_rows(self) -> bool:
        """Whether an output's shape depends on the number of rows."""
        return any(row_dims(a, b) for a, b in zip(self.one.outvars, self.longer.outvars, strict=True))


def row_dims(a: Any, b: Any) -> list[int]:
    """Return the dims in which a value of the two traces differs."""
    shape, longer = getattr(a.aval, "shape", ()), getattr(b.aval, "shape", ())
    if len(shape) != len(longer):
        raise Differ
    return [i for i, (x, y) in enumerate(zip(shape, longer, strict=True)) if x != y]


def join(relations: list[Relation]) -> Relation:
    """Return the relation of a value that is one of several, or their sum."""
    found = {r for r in relations if r != ZERO}
    if len(found) > 1 and all(r.kind in ("same", "total", "mixed") for r in found):
        found = {r.as_total() for r in found}
        return found.pop() if len(found) == 1 else MIXED
    return ZERO if not found else found.pop() if len(found) == 1 else UNKNOWN


# What the primitives do ----------------------------------------------------------------------------


def _rows(eqn: Equation, power: int = 0) -> Relation:
    """Return that the output has rows, where its shape tells."""
    return UNKNOWN if eqn.row_dim is None else Relation("rows", power, eqn.row_dim)


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
    # Whole numbers cut off what is behind the point.
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
    if relation.kind == "rows":
        return replace(relation, dim=eqn.one.params["broadcast_dimensions"][relation.dim])
    if not eqn.makes_rows:
        return relation
    return _rows(eqn, relation.power) if relation.kind in ("same", "zero") else UNKNOWN


def _iota(eqn: Equation) -> Relation:
    return _rows(eqn) if eqn.row_dim != eqn.one.params["dimension"] else UNKNOWN


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


def _scatter_add(eqn: Equation) -> Relation:
    table, places, rows = eqn.ins
    if eqn.makes_rows or rows.kind != "rows" or places.kind != "rows" or places.power:
        return UNKNOWN
    return join([table, Relation("total", rows.power)])


def _scatter(eqn: Equation) -> Relation:
    return eqn.ins[2] if overwrites(eqn.one) else UNKNOWN


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
    relation = join(eqn.ins)
    along = eqn.one.params["dimension"]
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
    "eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min "
    "ne nextafter not or population_count pow rem round rsqrt shift_left shift_right_arithmetic shift_right_logical "
    "sign sin sinh sqrt square tan tanh xor random_wrap random_unwrap "
)

RULES: dict[str, Callable[[Equation], Relation]] = {
    **dict.fromkeys(_ELEMENTWISE.split(), _elementwise),
    **dict.fromkeys(
        ("neg", "copy", "copy_p", "stop_gradient", "real", "imag", "reduce_precision", "sharding_constraint"), _linear
    ),
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
    "gather": _gather,
    "iota": _iota,
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
}

KEEPS_ZERO = (
    "broadcast_in_dim",
    "convert_element_type",
    "copy",
    "mul",
    "neg",
    "reduce_sum",
    "reshape",
    "squeeze",
    "transpose",
)

# Whose parameters may tell of the number of rows: their rules look at the shapes that come of it.
SHAPED = ("broadcast_in_dim", "dynamic_slice", "gather", "iota", "random_bits", "reshape", "slice")
# Through which a sum of several relations stays one.
SUMS = (
    "add",
    "add_any",
    "sub",
    "neg",
    "mul",
    "div",
    "convert_element_type",
    "copy",
    "reshape",
    "squeeze",
    "reduce_sum",
)
