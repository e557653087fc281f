"""Follows a program from the relations of its inputs to those of its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend import core

from jaxlit.programs.jaxpr import CALLS, inner_jaxprs, scan_counts
from jaxlit.programs.primitive_rules import KEEPS_ZERO, RULES, SHAPED, SUMS, TAKES_PLACES
from jaxlit.programs.relation import (
    BY_ROW,
    MIXED,
    PLACES,
    ROWS,
    SAME,
    UNKNOWN,
    ZERO,
    Differ,
    Equation,
    Relation,
    join,
    row_dims,
)


@dataclass(frozen=True)
class Related:
    """What was found out about a program.

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

    Shapes and numbers that differ between two traces of it come from the number of rows: so a sum that is
    divided by the rows is told from one that is divided by a constant.

    Args:
        program: A `ClosedJaxpr` of a replica's program.
        longer: The same, traced with more rows.
        inputs: The relation of each input.
        axis: The mapped axis that the replicas stand on.
        replicas: How many they are.
        alike: Take what replicas draw from keys of their own, for all of their rows at once, as the same.
    """
    follower = _Follower(axis, replicas, alike)
    try:
        outputs = follower.run(program, longer, list(inputs))
    except Differ:
        outputs = [UNKNOWN] * len(program.jaxpr.outvars)
    outputs = [UNKNOWN if r.kind in PLACES else r for r in outputs]
    return Related(outputs, follower.same_draws)


class _Follower:
    """Runs a program on relations in place of arrays."""

    def __init__(self, axis: str, replicas: int, alike: bool) -> None:
        self.axis, self.replicas, self.alike, self.same_draws = axis, replicas, alike, False
        self._rows: tuple[int, int] | None = None
        self._summed: set[int] = set()  # by id: variables that were summed over replicas

    def run(self, a: Any, b: Any, ins: list[Relation]) -> list[Relation]:
        """Return the relations of a program's outputs."""
        consts = zip(getattr(a, "consts", ()), getattr(b, "consts", ()), strict=False)
        a, b = getattr(a, "jaxpr", a), getattr(b, "jaxpr", b)
        if len(a.eqns) != len(b.eqns):
            raise Differ
        self._learn_rows(a, b, ins)
        env = dict(zip(a.invars, ins, strict=True))
        env |= {var: _of_constant(x, y) for var, (x, y) in zip(a.constvars, consts, strict=False)}
        env |= {var: UNKNOWN for var in a.constvars if var not in env}
        for one, longer in zip(a.eqns, b.eqns, strict=True):
            if one.primitive is not longer.primitive or len(one.invars) != len(longer.invars):
                raise Differ
            given = [self._read(env, x, y) for x, y in zip(one.invars, longer.invars, strict=True)]
            found = self._checked(Equation(one, longer, given, self._rows or (1, 1)))
            env |= dict(zip(one.outvars, found, strict=True))
        return [self._read(env, x, y) for x, y in zip(a.outvars, b.outvars, strict=True)]

    def _learn_rows(self, a: Any, b: Any, ins: list[Relation]) -> None:
        if self._rows is None:
            for x, y, relation in zip(a.invars, b.invars, ins, strict=True):
                if relation.kind == "rows":
                    self._rows = (x.aval.shape[relation.dim], y.aval.shape[relation.dim])

    def _read(self, env: dict[Any, Relation], x: Any, y: Any) -> Relation:
        if not isinstance(x, core.Literal):
            return env[x]
        if not isinstance(y, core.Literal):
            raise Differ
        one, other = np.asarray(x.val), np.asarray(y.val)
        if one.shape != other.shape:
            raise Differ
        if not np.any(one) and not np.any(other):
            return ZERO
        if (one == other).all() or (one != one).any():
            return SAME
        rows, more = self._rows or (1, 1)
        if np.allclose(one * (more / rows), other, rtol=1e-5, atol=0):
            return Relation("same", 1)
        return Relation("same", -1) if np.allclose(one * (rows / more), other, rtol=1e-5, atol=0) else UNKNOWN

    def _checked(self, eqn: Equation) -> list[Relation]:
        """Return the relations of an equation's outputs; only what has rows may grow with them."""
        found = self._follow(eqn)
        for i, (relation, x, y) in enumerate(zip(found, eqn.one.outvars, eqn.longer.outvars, strict=True)):
            dims = row_dims(x, y)
            if dims != ([relation.dim] if relation.kind in BY_ROW else []):
                found[i] = UNKNOWN
        return found

    def _follow(self, eqn: Equation) -> list[Relation]:
        count, same = len(eqn.one.outvars), all(r in (SAME, ZERO) for r in eqn.ins)
        has_places = any(r.kind in PLACES for r in eqn.ins)
        inner = inner_jaxprs(eqn.one)
        if eqn.name in CALLS and inner and len(getattr(inner[0], "jaxpr", inner[0]).invars) == len(eqn.ins):
            return self.run(inner[0], inner_jaxprs(eqn.longer)[0], eqn.ins)
        if eqn.name in ("scan", "while", "cond"):
            return getattr(self, f"_{eqn.name}")(eqn)
        if self._is_collective(eqn):
            return self._collective(eqn)
        if eqn.name.startswith("random_") and eqn.makes_rows and not eqn.has_rows:
            # A key that is folded with the places of rows draws the same for the first row of each replica.
            self.same_draws |= all(r in (SAME, ZERO) or r.kind in PLACES for r in eqn.ins)
            # The draws of replicas are others than those of the whole batch, as they should be.
            return [UNKNOWN if same or eqn.row_dim is None else Relation("rows", 0, eqn.row_dim)]
        if self.alike and eqn.name == "random_bits" and not eqn.has_rows:
            return [SAME]
        if not (eqn.makes_rows and eqn.name in SHAPED) and not _same_params(eqn):
            return [UNKNOWN] * count
        if same and not eqn.makes_rows:
            zero = eqn.name in KEEPS_ZERO and all(r == ZERO for r in eqn.ins)
            return [ZERO if zero else SAME] * count
        if eqn.name == "div" and self._is_mean_over_replicas(eqn):
            return [replace(eqn.ins[0], power=eqn.ins[0].power + 1)]
        if has_places and eqn.name not in TAKES_PLACES:
            return [UNKNOWN] * count
        rule = RULES.get(eqn.name)
        mixed = MIXED in eqn.ins and (eqn.name not in SUMS or any(r.kind in ("rows", "total") for r in eqn.ins[1:]))
        if rule is None or mixed or (UNKNOWN in eqn.ins and eqn.ins[0].kind != "never"):
            return [UNKNOWN] * count
        return [rule(eqn)] * count

    def _is_collective(self, eqn: Equation) -> bool:
        axes = [eqn.one.params.get(name) for name in ("axes", "axis_name")]
        return any(self.axis == x or (isinstance(x, (tuple, list)) and self.axis in x) for x in axes)

    def _collective(self, eqn: Equation) -> list[Relation]:
        if not eqn.name.startswith("psum") or eqn.one.params.get("axis_index_groups") is not None:
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
        pairs = zip(eqn.one.params["branches"], eqn.longer.params["branches"], strict=True)
        found = [self.run(a, b, eqn.ins[1:]) for a, b in pairs]
        if eqn.ins[0] not in (SAME, ZERO):
            return [UNKNOWN] * len(eqn.one.outvars)
        return [join(list(branch)) for branch in zip(*found, strict=True)]

    def _scan(self, eqn: Equation) -> list[Relation]:
        params = eqn.one.params
        consts, carries = scan_counts(eqn.one)
        head, xs = eqn.ins[: consts + carries], eqn.ins[consts + carries :]
        if params["length"] != (more := eqn.longer.params["length"]):
            # One turn a row, which sees no other, as in jax.lax.map.
            apart = carries == 0 and all(r in (SAME, ZERO) for r in head) and all(x == ROWS for x in xs)
            return [ROWS if apart and (params["length"], more) == eqn.rows else UNKNOWN] * len(eqn.one.outvars)
        # A scanned array comes without its leading dim.
        xs = [replace(x, dim=x.dim - 1) if x.kind == "rows" else UNKNOWN if x.kind in PLACES else x for x in xs]
        body = params["jaxpr"], eqn.longer.params["jaxpr"]
        carry, out = self._until_stable(body, head[:consts], head[consts:], xs)
        ys = [replace(y, dim=y.dim + 1) if y.kind == "rows" else y for y in out[carries:]]
        return [*carry, *ys]

    def _while(self, eqn: Equation) -> list[Relation]:
        params, longer = eqn.one.params, eqn.longer.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        consts, carry = eqn.ins[first : first + second], eqn.ins[first + second :]
        carry, _ = self._until_stable((params["body_jaxpr"], longer["body_jaxpr"]), consts, carry, [])
        (again,) = self.run(params["cond_jaxpr"], longer["cond_jaxpr"], [*eqn.ins[:first], *carry])
        return carry if again in (SAME, ZERO) else [UNKNOWN] * len(carry)

    def _until_stable(
        self, body: tuple[Any, Any], consts: list[Relation], carry: list[Relation], xs: list[Relation]
    ) -> tuple[list[Relation], list[Relation]]:
        """Return a loop's carry that its body leaves as it is, and what the body returns for it."""
        for _ in range(len(carry) + 2):
            out = self.run(*body, [*consts, *carry, *xs])
            after = [join([x, y]) for x, y in zip(carry, out, strict=False)]
            if after == carry:
                return carry, out
            carry = after
        return [UNKNOWN] * len(carry), [UNKNOWN] * len(out)


def _of_constant(x: Any, y: Any) -> Relation:
    if isinstance(x, Tracer) or isinstance(y, Tracer) or np.shape(x) != np.shape(y):
        return UNKNOWN
    if x is y:
        return SAME
    return SAME if np.array_equal(np.asarray(x), np.asarray(y)) else UNKNOWN


def _same_params(eqn: Equation) -> bool:
    """Return whether an equation's parameters, programs among them, are the same in both traces."""
    one, longer = ({k: str(v) for k, v in e.params.items()} for e in (eqn.one, eqn.longer))
    return one == longer
