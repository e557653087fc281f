"""Runs a function of arrays of several ranks, each part of it on the rank of its arrays."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from jaxlit.core.replica import abstract_batch
from jaxlit.distributed.job import same_program
from jaxlit.errors import StateError
from jaxlit.pipeline.executor import Places
from jaxlit.programs.jaxpr import inline, value_of, variables, walk, walk_back
from jaxlit.texts import is_key

_SMALL = 4096  # bytes that may be sent to where they meet arrays of another rank


class _Slot(NamedTuple):
    """A rank, and the round in which it computes: one more than the sends before it."""

    rank: int
    turn: int


@dataclass
class _Part:
    """The equations of one rank in one round: nothing in it waits for another part of that round."""

    turn: int
    rank: int
    eqns: list[Any]
    ins: list[Any]  # those that it may overwrite come first
    outs: list[Any]
    num_donated: int = 0
    away: list[int] = field(default_factory=list)  # indices into `ins` of arrays on another rank


class Placed:
    """A function of arrays on several ranks, compiled in parts when it is first called with arrays like these.

    An operation runs on the rank of its arrays. One that combines single numbers of several ranks, such as a norm of
    all parameters, runs on one of them. Small arrays of integers, counters and random keys, are sent to the ranks
    that use them.

    Args:
        fn: A function of pytrees of arrays to a pytree of arrays.
        follows: Run an operation on arrays of several ranks on that of its largest uncomputed array, such as a weight,
            or of the array computed last. False refuses it, unless the arrays are small.
        outputs: The sharding of each of the first leaves of the result.
        donate: The indices of the leaves of the arguments that may be overwritten.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        places: Places,
        name: str,
        *,
        follows: bool = False,
        outputs: Sequence[Any] = (),
        donate: Sequence[int] = (),
    ) -> None:
        self._fn, self.places, self.name = fn, places, name
        self._follows, self._outputs, self.donate = follows, outputs, frozenset(donate)
        self._known: dict[Any, Callable[[Sequence[Any]], Any]] = {}

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        leaves, treedef = jax.tree.flatten(args)
        moves = [not jnp.issubdtype(x.dtype, jnp.inexact) and x.size * x.dtype.itemsize <= _SMALL for x in leaves]
        ranks = [None if is_moved else self.places.rank_of(x) for x, is_moved in zip(leaves, moves, strict=True)]
        key = treedef, tuple((x.shape, x.dtype, rank) for x, rank in zip(leaves, ranks, strict=True))
        if key not in self._known:
            self._known[key] = self._plan(leaves, treedef, ranks)
        return self._known[key](leaves)

    def _plan(self, leaves: Sequence[Any], treedef: Any, ranks: Sequence[int | None]) -> Callable[[Sequence[Any]], Any]:
        shapes = [x if is_key(x) else abstract_batch(x) for x in leaves]
        closed, result = jax.make_jaxpr(lambda *x: self._fn(*treedef.unflatten(x)), return_shape=True)(*shapes)
        same_program(self.name, lambda: closed)
        closed, structure = inline(closed, selects=True), jax.tree.structure(result)
        names, inputs = closed.jaxpr.outvars, closed.jaxpr.invars
        home = self.places.home
        slots = _slots_of(closed.jaxpr, ranks, home, self.name, follows=self._follows)
        parts = _parts(closed.jaxpr, slots, home, {inputs[i] for i in self.donate})
        shardings = [*self._outputs, *[None] * (len(names) - len(self._outputs))]
        to = {x: s for x, s in zip(names, shardings, strict=True) if not isinstance(x, Literal)}
        programs = [self._compiled(part, closed, to) for part in parts]
        twice = [i for i, x in enumerate(names) if not isinstance(x, Literal) and x in names[:i]]

        def run(leaves: Sequence[Any]) -> Any:
            values = dict(zip(inputs, leaves, strict=True))
            for part, program in zip(parts, programs, strict=True):
                arrays = [values[x] for x in part.ins]
                sent = self.places.send([arrays[k] for k in part.away], [part.rank] * len(part.away))
                for k, x in zip(part.away, sent, strict=True):
                    arrays[k] = x
                outs = program(arrays[: part.num_donated], arrays[part.num_donated :])
                values.update(zip(part.outs, outs, strict=True))
            results = [value_of(x, values) for x in names]
            for i in twice:  # each result needs its own buffer, as after jit
                results[i] = results[i].copy()
            moves = [i for i, s in enumerate(shardings) if s not in (None, getattr(results[i], "sharding", None))]
            moved = self.places.put([results[i] for i in moves], [shardings[i] for i in moves]) if moves else []
            for i, x in zip(moves, moved, strict=True):
                results[i] = x
            returned = {id(x) for x in results}
            for i in self.donate:  # also those that no part could overwrite
                if id(leaves[i]) not in returned:
                    leaves[i].delete()
            return structure.unflatten(results)

        return run

    def _compiled(self, part: _Part, closed: ClosedJaxpr, to: dict[Any, Any]) -> Callable[..., Any]:
        devices = set(self.places.meshes[part.rank].devices.flat)

        def body(donated: list[Any], rest: list[Any]) -> list[Any]:
            values = dict(zip([*closed.jaxpr.constvars, *part.ins], [*closed.consts, *donated, *rest], strict=True))
            walk(part.eqns, values)
            return [values[x] for x in part.outs]

        wanted = [to.get(x) for x in part.outs]
        shardings = [s if s is not None and s.device_set == devices else None for s in wanted]
        name = f"{self.name}_{part.turn}_{part.rank}"
        return self.places.jit(part.rank, body, name, out_shardings=shardings, donate_argnums=0)


class _Slots(NamedTuple):
    """Where the operations of a program run."""

    at: dict[Any, _Slot]  # of each value that has one
    effects: dict[int, _Slot]  # of equations that print or call back, by their identity


def _slots_of(jaxpr: Any, ranks: Sequence[int | None], home: int, name: str, *, follows: bool) -> _Slots:
    """Return where operations run, given the rank of each input, None for one that is sent to the ranks that use it."""
    at = {x: _Slot(rank, 0) for x, rank in zip(jaxpr.invars, ranks, strict=True) if rank is not None}
    effects, held = dict[int, _Slot](), set(at)  # values that are computed only from arrays with a rank

    def rank_of(eqn: Any, operands: Sequence[Any]) -> int:
        arrays = [x for x in operands if x.aval.size > 1]
        for group in (operands, arrays):
            if len(ranks := {at[x].rank for x in group}) == 1:
                return ranks.pop()
        if not arrays:
            return home
        if follows:
            known = [x for x in arrays if x in held]
            leader = max(known, key=_size) if known else max(arrays, key=lambda x: (at[x].turn, _size(x)))
            return at[leader].rank
        large = [x for x in arrays if _size(x) > _SMALL]
        if len(ranks := {at[x].rank for x in large}) > 1:
            shapes = ", ".join(f"{x.aval.str_short()} of rank {at[x].rank}" for x in large)
            raise StateError(
                f"{name}: the operation {eqn.primitive.name} combines large arrays of several ranks of the pipeline: "
                f"{shapes}. Only small ones are sent to one rank: reduce each array first, as a norm does, or train "
                "with strategy='fsdp'."
            )
        return ranks.pop() if ranks else home

    for eqn in jaxpr.eqns:
        operands = variables(eqn.invars)
        placed = [x for x in operands if x in at]
        slot = _Slot(home, 0)
        if placed:
            rank = rank_of(eqn, placed)
            slot = _Slot(rank, max(at[x].turn + (at[x].rank != rank) for x in placed))
            at |= dict.fromkeys(eqn.outvars, slot)
            if len(placed) == len(operands) and held.issuperset(placed):
                held |= {*eqn.outvars}
        if eqn.effects:
            effects[id(eqn)] = slot
    return _Slots(at, effects)


def _size(x: Any) -> int:
    return math.prod(x.aval.shape) * x.aval.dtype.itemsize


def _parts(jaxpr: Any, placed: _Slots, home: int, donate: set[Any]) -> list[_Part]:
    """Return the parts of a program, in an order in which each has what it needs."""
    at, first = placed.at, _Slot(home, 0)
    slots = sorted({first, *at.values(), *placed.effects.values()}, key=lambda slot: (slot.turn, slot.rank))
    wanted: dict[_Slot, dict[Any, None]] = {slot: {} for slot in slots}
    inputs = set(jaxpr.invars)
    for x in variables(jaxpr.outvars):
        if x not in inputs:
            wanted[at.get(x, first)][x] = None
    parts: list[_Part] = []
    for slot in reversed(slots):

        def takes(eqn: Any, used: list[Any], slot: Any = slot) -> bool:
            return placed.effects.get(id(eqn)) == slot or any(at.get(x, slot) == slot for x in used)

        needed = dict(wanted[slot])
        eqns = walk_back(jaxpr.eqns, needed, takes)
        computed = {*jaxpr.constvars, *(x for eqn in eqns for x in eqn.outvars)}
        ins = [x for x in needed if x not in computed]
        for x in ins:
            if x not in inputs:
                wanted[at[x]][x] = None
        if eqns:
            parts.insert(0, _Part(slot.turn, slot.rank, eqns, ins, list(wanted[slot])))
    _donate(parts, donate.difference(variables(jaxpr.outvars)), {x: slot.rank for x, slot in at.items()})
    return parts


def _donate(parts: Sequence[_Part], donate: set[Any], rank_of: dict[Any, int]) -> None:
    """Let the last part that uses an array overwrite it, if it is on its rank and returns an array of its shape."""
    last: dict[Any, _Part] = {}
    for part in parts:
        last |= dict.fromkeys(part.ins, part)
    for part in parts:
        room, donated = Counter((x.aval.shape, x.aval.dtype) for x in part.outs), []
        for x in part.ins:
            fits = x in donate and last[x] is part and rank_of.get(x) == part.rank
            if fits and room[kind := (x.aval.shape, x.aval.dtype)] > 0:
                donated.append(x)
                room[kind] -= 1
        part.ins = [*donated, *(x for x in part.ins if x not in donated)]
        part.num_donated = len(donated)
        part.away = [k for k, x in enumerate(part.ins) if rank_of.get(x) != part.rank]
