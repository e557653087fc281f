"""Follows a program from the relations of its inputs to those of its outputs."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer
from jax.extend import core

from jaxlit.programs.jaxpr import bodies, called, equations, inner_jaxprs, run, scan_counts
from jaxlit.programs.primitive_rules import relation_of
from jaxlit.programs.relation import INDEX, NEVER, ROWS, SAME, UNKNOWN, ZERO, Differ, Equation, Relation, join, row_dims

# Parameters that are sizes: they may grow with the rows, as then the output's shape does.
_SIZES = ("shape", "new_sizes", "slice_sizes", "start_indices", "limit_indices", "reps")


def relate(
    program: Any, longer: Any, inputs: Sequence[Relation], axis: str, replicas: int, *, alike: bool = False
) -> tuple[list[Relation], bool]:
    """Return the relation of each output, and whether rows are drawn from a key that is the same on every replica.

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
        consts = list[Relation]()
        for x, y in zip(getattr(a, "consts", ()), getattr(b, "consts", ()), strict=False):
            traced = isinstance(x, Tracer) or isinstance(y, Tracer)
            consts.append(SAME if not traced and (x is y or np.array_equal(x, y)) else UNKNOWN)
        a, b = getattr(a, "jaxpr", a), getattr(b, "jaxpr", b)
        others = iter(b.eqns)
        if [(x.primitive, len(x.invars)) for x in a.eqns] != [(x.primitive, len(x.invars)) for x in b.eqns]:
            raise Differ

        def rule(one: Any, given: list[Any]) -> list[Relation]:
            longer = next(others)
            eqn = Equation(one, longer, list(map(self._read, given, longer.invars)))
            pairs = zip(self._follow(eqn), one.outvars, longer.outvars, strict=True)
            return [r if self._fits(r, x, y) else UNKNOWN for r, x, y in pairs]

        read = lambda x, values: x if isinstance(x, core.Literal) else values[x]  # noqa: E731
        consts += [UNKNOWN] * (len(a.constvars) - len(consts))
        return list(map(self._read, run(a, consts, ins, rule, read), b.outvars))

    def _fits(self, relation: Relation, x: Any, y: Any) -> bool:
        """Return whether a value grows as it must: rows in one dim with the number of rows, anything else not."""
        dims, (rows, more) = row_dims(x, y), self.num_rows
        if relation not in (ROWS, INDEX, NEVER):
            return not dims
        return len(dims) == 1 and x.aval.shape[dims[0]] * more == y.aval.shape[dims[0]] * rows

    def _read(self, x: Any, y: Any) -> Relation:
        """Return a relation as it is, and that of a literal, given the literal of the other trace."""
        if isinstance(x, Relation):
            return x
        if not isinstance(y, core.Literal) or np.shape(x.val) != np.shape(y.val):
            raise Differ
        one, other, (rows, more) = np.asarray(x.val), np.asarray(y.val), self.num_rows
        if not np.any(one) and not np.any(other):
            return ZERO
        if (one != one).any():  # NaN
            return SAME
        for power in (0, 1, -1):
            if np.allclose(one * (more / rows) ** power, other, rtol=1e-5 * abs(power), atol=0):
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
            results = zip(*(self.run(a, b, eqn.ins[1:]) for a, b in branches), strict=True)
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
        axes = [eqn.params.get(key) for key in ("axes", "axis_name")]
        return any(self.axis == x or (isinstance(x, (tuple, list)) and self.axis in x) for x in axes)

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
