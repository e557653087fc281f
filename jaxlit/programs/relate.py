"""Follows a program from the relations of its inputs to those of its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend import core

from jaxlit.programs.jaxpr import CALLS, called, equations, inner_jaxprs, run, scan_counts
from jaxlit.programs.primitive_rules import SIZES, relation_of
from jaxlit.programs.relation import ROWS, SAME, UNKNOWN, ZERO, Differ, Equation, Relation, join, row_dims


@dataclass(frozen=True)
class Related:
    """The relations of a program's outputs.

    Attributes:
        outputs: The relation of each output.
        same_draws: It draws random numbers for its rows from a key that is the same on every replica.
    """

    outputs: list[Relation]
    same_draws: bool


def relate(
    program: Any, longer: Any, inputs: Sequence[Relation], axis: str, replicas: int, *, alike: bool = False
) -> Related:
    """Follow a program from its inputs to its outputs.

    Shapes and numbers that differ between two traces of the program come from the number of rows: so a sum that is
    divided by the rows is distinguished from one that is divided by a constant.

    Args:
        program: A `ClosedJaxpr` of a replica's program.
        longer: The same, traced with more rows.
        inputs: The relation of each input.
        axis: The mapped axis of the replicas.
        replicas: How many they are.
        alike: Take what replicas draw from their own keys, for all of their rows at once, as the same.
    """
    follower = _Follower(axis, replicas, alike)
    try:
        outputs = follower.run(program, longer, list(inputs))
    except Differ:
        outputs = [UNKNOWN] * len(program.jaxpr.outvars)
    return Related([UNKNOWN if r.kind in ("index", "never") else r for r in outputs], follower.same_draws)


class _Follower:
    """Runs a program on relations in place of arrays."""

    def __init__(self, axis: str, replicas: int, alike: bool) -> None:
        self.axis, self.replicas, self.alike, self.same_draws = axis, replicas, alike, False
        self._num_rows: tuple[int, int] | None = None
        self._summed: set[int] = set()  # by id: variables that were summed over replicas

    def run(self, a: Any, b: Any, ins: list[Relation]) -> list[Relation]:
        """Return the relations of a program's outputs, given its two traces."""
        consts = [*map(_of_constant, getattr(a, "consts", ()), getattr(b, "consts", ()))]
        a, b = getattr(a, "jaxpr", a), getattr(b, "jaxpr", b)
        if len(a.eqns) != len(b.eqns):
            raise Differ
        for x, y, relation in zip(a.invars, b.invars, ins, strict=True):
            if self._num_rows is None and relation.kind == "rows":
                self._num_rows = x.aval.shape[relation.dim], y.aval.shape[relation.dim]
        others = iter(b.eqns)

        def rule(one: Any, given: list[Any]) -> list[Relation]:
            longer = next(others)
            if one.primitive is not longer.primitive or len(one.invars) != len(longer.invars):
                raise Differ
            relations = list(map(self._read, given, longer.invars))
            return self._checked(Equation(one, longer, relations, self._num_rows or (1, 1)))

        read = lambda x, values: x if isinstance(x, core.Literal) else values[x]  # noqa: E731
        consts += [UNKNOWN] * (len(a.constvars) - len(consts))
        return list(map(self._read, run(a, consts, ins, rule, read), b.outvars))

    def _read(self, x: Any, y: Any) -> Relation:
        """Return a relation as it is, and that of a literal, given the literal of the other trace."""
        if isinstance(x, Relation):
            return x
        if not isinstance(y, core.Literal) or np.shape(x.val) != np.shape(y.val):
            raise Differ
        one, other = np.asarray(x.val), np.asarray(y.val)
        if not np.any(one) and not np.any(other):
            return ZERO
        if (one == other).all() or (one != one).any():
            return SAME
        rows, more = self._num_rows or (1, 1)
        for power, factor in ((1, more / rows), (-1, rows / more)):
            if np.allclose(one * factor, other, rtol=1e-5, atol=0):
                return Relation("same", power)
        return UNKNOWN

    def _checked(self, eqn: Equation) -> list[Relation]:
        """Return the relations of an equation's outputs; only what has rows may grow with them."""
        relations = self._follow(eqn)
        for i, (relation, x, y) in enumerate(zip(relations, eqn.one.outvars, eqn.longer.outvars, strict=True)):
            if row_dims(x, y) != ([relation.dim] if relation.kind in ("rows", "index", "never") else []):
                relations[i] = UNKNOWN
        return relations

    def _follow(self, eqn: Equation) -> list[Relation]:
        count, name = len(eqn.one.outvars), eqn.name
        if called(eqn.one) is not None:
            return self.run(inner_jaxprs(eqn.one)[0], inner_jaxprs(eqn.longer)[0], eqn.ins)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn)
        axes = [eqn.params.get(key) for key in ("axes", "axis_name")]
        if any(self.axis == x or (isinstance(x, (tuple, list)) and self.axis in x) for x in axes):
            return self._collective(eqn)
        has_rows = any(r.kind == "rows" for r in eqn.ins)
        if name.startswith("random_") and eqn.grows and not has_rows:
            # A key that is folded with the rows' indices draws the same for the first row of each replica.
            self.same_draws |= all(r in (SAME, ZERO) or r.kind in ("index", "never") for r in eqn.ins)
            # The draws of replicas are others than those of the entire batch, as they should be.
            return [UNKNOWN if eqn.only_same else eqn.rows()]
        if self.alike and name == "random_bits" and not has_rows:
            return [SAME]
        if not _same_params(eqn):
            return [UNKNOWN] * count
        if name == "div" and self._is_mean_over_replicas(eqn):
            return [eqn.ins[0].times(1)]
        return [relation_of(eqn)] * count

    def _collective(self, eqn: Equation) -> list[Relation]:
        if not eqn.name.startswith("psum") or eqn.params.get("axis_index_groups") is not None:
            return [UNKNOWN] * len(eqn.one.outvars)
        self._summed |= {id(x) for x in eqn.one.outvars}
        return [
            r if r == ZERO else Relation("same", r.as_total().power) if r.kind in ("same", "total") else UNKNOWN
            for r in eqn.ins
        ]

    def _is_mean_over_replicas(self, eqn: Equation) -> bool:
        by, summed = eqn.one.invars[1], id(eqn.one.invars[0]) in self._summed
        return summed and isinstance(by, core.Literal) and float(by.val) == self.replicas and eqn.ins[0] != UNKNOWN

    # Control flow -----------------------------------------------------------------------------------

    def _cond(self, eqn: Equation) -> list[Relation]:
        branches = zip(eqn.params["branches"], eqn.longer.params["branches"], strict=True)
        results = [self.run(a, b, eqn.ins[1:]) for a, b in branches]
        known = eqn.ins[0] in (SAME, ZERO)
        return [join(list(x)) if known else UNKNOWN for x in zip(*results, strict=True)]

    def _scan(self, eqn: Equation) -> list[Relation]:
        (consts, carries), turns = scan_counts(eqn.one), (eqn.params["length"], eqn.longer.params["length"])
        head, xs = eqn.ins[: consts + carries], eqn.ins[consts + carries :]
        if turns[0] != turns[1]:
            # One turn a row, which sees no other, as in jax.lax.map.
            apart = carries == 0 and all(r in (SAME, ZERO) for r in head) and all(x == ROWS for x in xs)
            return [ROWS if apart and turns == eqn.num_rows else UNKNOWN] * len(eqn.one.outvars)
        # A scanned array comes without its leading dim.
        xs = [
            replace(x, dim=x.dim - 1) if x.kind == "rows" else UNKNOWN if x.kind in ("index", "never") else x
            for x in xs
        ]
        carry, out = self._until_stable(eqn, "jaxpr", head[:consts], head[consts:], xs)
        return [*carry, *(replace(y, dim=y.dim + 1) if y.kind == "rows" else y for y in out[carries:])]

    def _while(self, eqn: Equation) -> list[Relation]:
        first = eqn.params["cond_nconsts"]
        second = first + eqn.params["body_nconsts"]
        carry, _ = self._until_stable(eqn, "body_jaxpr", eqn.ins[first:second], eqn.ins[second:], [])
        programs = eqn.params["cond_jaxpr"], eqn.longer.params["cond_jaxpr"]
        (again,) = self.run(*programs, [*eqn.ins[:first], *carry])
        return carry if again in (SAME, ZERO) else [UNKNOWN] * len(carry)

    def _until_stable(
        self, eqn: Equation, body: str, consts: list[Relation], carry: list[Relation], xs: list[Relation]
    ) -> tuple[list[Relation], list[Relation]]:
        """Return a loop's carry that its body leaves as it is, and what the body returns for it."""
        for _ in range(len(carry) + 2):
            out = self.run(eqn.params[body], eqn.longer.params[body], [*consts, *carry, *xs])
            after = [join([x, y]) for x, y in zip(carry, out, strict=False)]
            if after == carry:
                return carry, out
            carry = after
        return [UNKNOWN] * len(carry), [UNKNOWN] * len(out)


def _of_constant(x: Any, y: Any) -> Relation:
    traced = isinstance(x, Tracer) or isinstance(y, Tracer)
    return SAME if not traced and (x is y or np.array_equal(np.asarray(x), np.asarray(y))) else UNKNOWN


def _same_params(eqn: Equation) -> bool:
    """Return whether an equation's parameters are the same in both traces, but for sizes that grow with the rows."""
    rows, more = eqn.num_rows

    def fits(key: str, a: Any, b: Any) -> bool:
        if str(a) == str(b):
            return True
        if key not in SIZES or not eqn.grows or len(a) != len(b):
            return False
        return all(x == y or x * more == y * rows for x, y in zip(a, b, strict=True))

    return all(fits(key, x, eqn.longer.params[key]) for key, x in eqn.params.items())


# Operations on shapes, of which a dim of size 1 needs others than a longer one.
_OF_SHAPES = (*CALLS, "broadcast_in_dim", "convert_element_type", "copy", "reshape", "squeeze", "transpose")


def same_computation(programs: Sequence[tuple[int, Any]]) -> bool:
    """Return whether programs differ in shapes only, and in numbers as their rows or the inverse of these.

    Args:
        programs: Pairs of the number of rows and the `ClosedJaxpr` that was traced with them.
    """
    num_rows = np.array([rows for rows, _ in programs], float)
    several = [
        [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name not in _OF_SHAPES] for _, program in programs
    ]
    if len({tuple(eqn.primitive.name for eqn in eqns) for eqns in several}) > 1:
        return False
    for eqns in zip(*several, strict=True):
        literals = [[x.val for x in eqn.invars if isinstance(x, core.Literal) and not np.ndim(x.val)] for eqn in eqns]
        if len({len(x) for x in literals}) > 1:
            return False
        for values in zip(*literals, strict=True):
            with np.errstate(invalid="ignore"):  # of an infinity
                scaled = [np.array(values) * num_rows**power for power in (0, 1, -1)]
            if not any(np.allclose(x, x[0], rtol=1e-5, atol=0, equal_nan=True) for x in scaled):
                return False
    return True
