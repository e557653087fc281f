"""Runs a function of arrays that lie on several ranks, each part of it where its arrays are."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from jaxlit.errors import StateError
from jaxlit.pipeline.places import Places
from jaxlit.programs.jaxpr import inline, value_of, variables, walk, walk_back

_SMALL = 4096  # bytes that may be sent to where they meet arrays of another rank


@dataclass
class _Part:
    """What one rank computes at a time: nothing in it waits for another part of the same round."""

    turn: int
    rank: int
    eqns: list[Any] = field(default_factory=list)
    given: list[Any] = field(default_factory=list)
    made: list[Any] = field(default_factory=list)
    donated: list[bool] = field(default_factory=list)
    away: list[int] = field(default_factory=list)  # the places among what is given of what another rank has
    run: Callable[..., Any] | None = None


class Placed:
    """A function of arrays on several ranks, compiled in parts when it is first called with arrays like these.

    An operation runs on the rank of its arrays. What combines single numbers of several ranks, a norm over all
    parameters say, runs on one of them. Small arrays of whole numbers, counters and random keys, are sent to where they
    are used.

    Args:
        fn: A function of pytrees of arrays to a pytree of arrays.
        places: The ranks.
        home: The rank where numbers of several meet.
        jit: Compiles a function for a rank, given (rank, function, name, options of jax.jit).
        name: What its programs are called.
        follows: What combines arrays of several ranks runs where the first that was not computed lies, weights say, or
            where the last was computed. Otherwise it is refused, unless they are small.
        outputs: The sharding of each of the first leaves of the result.
        donate: The places of the leaves of the arguments that may be overwritten.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        places: Places,
        home: int,
        jit: Callable[..., Any],
        name: str,
        *,
        follows: bool = False,
        outputs: Sequence[Any] = (),
        donate: Sequence[int] = (),
    ) -> None:
        self._fn, self.places, self.home, self._jit, self.name = fn, places, home, jit, name
        self._follows, self._outputs, self.donate = follows, outputs, frozenset(donate)
        self._known: dict[Any, _Plan] = {}

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        leaves, treedef = jax.tree.flatten(args)
        ranks = [None if self._goes_along(x) else self.places.rank_of(x) for x in leaves]
        key = treedef, tuple((x.shape, x.dtype, rank) for x, rank in zip(leaves, ranks, strict=True))
        if (plan := self._known.get(key)) is None:
            plan = self._known[key] = self._plan(leaves, treedef, ranks)
        return plan(leaves)

    def _goes_along(self, x: Any) -> bool:
        return not jnp.issubdtype(x.dtype, jnp.inexact) and x.size * x.dtype.itemsize <= _SMALL

    def _plan(self, leaves: Sequence[Any], treedef: Any, ranks: Sequence[int | None]) -> "_Plan":
        shapes = [jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)) for x in leaves]
        closed, result = jax.make_jaxpr(lambda *x: self._fn(*treedef.unflatten(x)), return_shape=True)(*shapes)
        closed = inline(closed, selects=True)
        donate = {closed.jaxpr.invars[i] for i in self.donate}
        placing = _Placing(closed.jaxpr, ranks, self.home, self.name, follows=self._follows)
        parts = _parts(closed.jaxpr, placing, donate)
        for part in parts:
            part.away = [k for k, x in enumerate(part.given) if placing.at.get(x, (None,))[0] != part.rank]
        outputs = [*self._outputs, *[None] * (len(closed.jaxpr.outvars) - len(self._outputs))]
        return _Plan(self, closed, parts, outputs, jax.tree.structure(result))


class _Plan:
    def __init__(
        self, of: Placed, closed: ClosedJaxpr, parts: list[_Part], outputs: Sequence[Any], treedef: Any
    ) -> None:
        self.of, self.closed, self.parts, self.outputs, self.treedef = of, closed, parts, outputs, treedef
        names = list(closed.jaxpr.outvars)
        self.twice = [i for i, x in enumerate(names) if not isinstance(x, Literal) and x in names[:i]]
        to = {x: s for x, s in zip(closed.jaxpr.outvars, outputs, strict=True) if not isinstance(x, Literal)}
        for part in parts:
            lies = [to.get(x) if self._is_on(to.get(x), part.rank) else None for x in part.made]
            options = {"out_shardings": lies, "donate_argnums": 0}
            part.run = of._jit(part.rank, self._body(part), f"{of.name}_{part.turn}_{part.rank}", options)

    def _is_on(self, lies: Any, rank: int) -> bool:
        return lies is not None and lies.device_set == set(self.of.places.meshes[rank].devices.flat)

    def _body(self, part: _Part) -> Callable[..., Any]:
        jaxpr, consts = self.closed.jaxpr, self.closed.consts
        donated = [x for x, d in zip(part.given, part.donated, strict=True) if d]
        others = [x for x, d in zip(part.given, part.donated, strict=True) if not d]

        def body(given: list[Any], rest: list[Any]) -> list[Any]:
            values = dict(zip(jaxpr.constvars, consts, strict=True))
            values.update(zip([*donated, *others], [*given, *rest], strict=True))
            walk(part.eqns, values)
            return [values[x] for x in part.made]

        return body

    def __call__(self, leaves: Sequence[Any]) -> Any:
        values = dict(zip(self.closed.jaxpr.invars, leaves, strict=True))
        for part in self.parts:
            arrays = [values[x] for x in part.given]
            sent = self.of.places.send([arrays[k] for k in part.away], [part.rank] * len(part.away))
            for k, x in zip(part.away, sent, strict=True):
                arrays[k] = x
            donated = [x for x, d in zip(arrays, part.donated, strict=True) if d]
            rest = [x for x, d in zip(arrays, part.donated, strict=True) if not d]
            assert part.run is not None
            values.update(zip(part.made, part.run(donated, rest), strict=True))
        found = self._results(values)
        kept = {id(x) for x in found}
        for i in self.of.donate:  # also what no result has taken the place of
            if id(leaves[i]) not in kept:
                leaves[i].delete()
        return self.treedef.unflatten(found)

    def _results(self, values: dict[Any, Any]) -> list[Any]:
        found = [value_of(x, values) for x in self.closed.jaxpr.outvars]
        for i in self.twice:  # each result has a buffer of its own, as after jit
            found[i] = found[i].copy()
        astray = [i for i, lies in enumerate(self.outputs) if lies is not None and not _lies(found[i], lies)]
        if astray:
            moved = self.of.places.put([found[i] for i in astray], [self.outputs[i] for i in astray])
            for i, x in zip(astray, moved, strict=True):
                found[i] = x
        return found


def _lies(x: Any, lies: Any) -> bool:
    return isinstance(x, jax.Array) and x.sharding == lies


class _Placing:
    """Finds where the operations of a program run.

    Args:
        jaxpr: The program.
        ranks: The rank of each input, None for one that goes to wherever it is used.
        home: The rank where numbers of several meet.
        name: What the program is called.
        follows: See `Placed`.

    Attributes:
        at: The rank of each value, and how often something was sent before it could be computed.
        effects: The same of equations that print or call back, by their identity.
    """

    def __init__(self, jaxpr: Any, ranks: Sequence[int | None], home: int, name: str, *, follows: bool) -> None:
        self.home, self.name, self.follows = home, name, follows
        self.at: dict[Any, tuple[int, int]] = {}
        self.effects: dict[int, tuple[int, int]] = {}
        self._held = set[Any]()  # values computed of arrays with a rank alone
        for x, rank in zip(jaxpr.invars, ranks, strict=True):
            if rank is not None:
                self.at[x] = rank, 0
                self._held.add(x)
        for eqn in jaxpr.eqns:
            self._place(eqn)

    def _place(self, eqn: Any) -> None:
        given = variables(eqn.invars)
        placed = [x for x in given if x in self.at]
        if placed:
            rank = self._rank_of(eqn, placed)
            turn = max(self.at[x][1] + (self.at[x][0] != rank) for x in placed)
            self.at |= dict.fromkeys(eqn.outvars, (rank, turn))
            if len(placed) == len(given) and self._held.issuperset(placed):
                self._held |= {*eqn.outvars}
        if eqn.effects:
            self.effects[id(eqn)] = (rank, turn) if placed else (self.home, 0)

    def _rank_of(self, eqn: Any, given: Sequence[Any]) -> int:
        """Return where an operation runs."""
        if len(several := {self.at[x][0] for x in given}) == 1:
            return several.pop()
        arrays = [x for x in given if x.aval.size > 1]
        if len(several := {self.at[x][0] for x in arrays}) == 1:
            return several.pop()
        if not arrays:
            return self.home
        if self.follows:
            held = [x for x in arrays if x in self._held]
            found = max(held, key=_size) if held else max(arrays, key=lambda x: (self.at[x][1], _size(x)))
            return self.at[found][0]
        large = [x for x in arrays if _size(x) > _SMALL]
        if len(several := {self.at[x][0] for x in large}) > 1:
            shapes = ", ".join(f"{x.aval.str_short()} of rank {self.at[x][0]}" for x in large)
            raise StateError(
                f"{self.name}: the operation {eqn.primitive.name} combines large arrays of several ranks of the "
                f"pipeline: {shapes}. Only small ones are brought together: reduce each array first, as a norm does, "
                "or train with strategy='fsdp'."
            )
        return several.pop() if several else self.home


def _size(x: Any) -> int:
    return math.prod(x.aval.shape) * x.aval.dtype.itemsize


def _parts(jaxpr: Any, placing: _Placing, donate: set[Any]) -> list[_Part]:
    """Return the parts of a program, in an order in which each has what it needs."""
    at, home = placing.at, placing.home
    keys = sorted({(home, 0), *at.values(), *placing.effects.values()}, key=lambda key: (key[1], key[0]))
    wanted: dict[tuple[int, int], dict[Any, None]] = {key: {} for key in keys}
    inputs = set(jaxpr.invars)
    for x in jaxpr.outvars:
        if not isinstance(x, Literal) and x not in inputs:
            wanted[at.get(x, (home, 0))][x] = None
    parts = {key: _Part(key[1], key[0]) for key in keys}
    for key in reversed(keys):
        _fill(parts[key], key, jaxpr, placing, wanted)
    found = [parts[key] for key in keys if parts[key].eqns]
    _donate(found, jaxpr, donate, at)
    return found


def _fill(
    part: _Part,
    key: tuple[int, int],
    jaxpr: Any,
    placing: _Placing,
    wanted: dict[tuple[int, int], dict[Any, None]],
) -> None:
    at, effects, needed = placing.at, placing.effects, dict(wanted[key])
    eqns = walk_back(
        jaxpr.eqns, needed, lambda eqn, used: effects.get(id(eqn)) == key or any(at.get(x, key) == key for x in used)
    )
    made = {x for eqn in eqns for x in eqn.outvars}
    held, inputs = set(jaxpr.constvars), set(jaxpr.invars)
    part.eqns, part.made = eqns, list(wanted[key])
    part.given = [x for x in needed if x not in made and x not in held]
    for x in part.given:
        if x not in inputs:
            wanted[at[x]][x] = None


def _donate(parts: Sequence[_Part], jaxpr: Any, donate: set[Any], at: dict[Any, tuple[int, int]]) -> None:
    """Let the last part that uses an array overwrite it, if it lies on its rank, and something like it is made."""
    kept = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    last: dict[Any, _Part] = {}
    for part in parts:
        last |= dict.fromkeys(part.given, part)
    for part in parts:
        room = Counter((x.aval.shape, x.aval.dtype) for x in part.made)
        for x in part.given:
            fits = x in donate and x not in kept and last[x] is part and at.get(x, (None, 0))[0] == part.rank
            kind = x.aval.shape, x.aval.dtype
            part.donated.append(fits and room[kind] > 0)
            room[kind] -= part.donated[-1]
