"""Cuts a program into the part that each stage of a pipeline computes, by what values depend on, not by their order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Literal

from jaxlit.errors import ArgumentError
from jaxlit.pipeline.segments import Segments, mark_of, segments_of
from jaxlit.programs.jaxpr import bind, value_of, variables, walk, walk_back

_TINY = 16  # elements of a result of weights alone that is sent, where otherwise the weights would be


class Role(Enum):
    """How the cut treats an input of a program."""

    WEIGHT = "weight"  # held by one stage; a stage that uses another's is sent a copy
    STATE = "state"  # the same, and what is computed of it and the batch alone is computed wherever it is used
    BATCH = "batch"  # from the host, at every stage that uses it


@dataclass(frozen=True)
class Input:
    """An input of a program."""

    role: Role
    update: int | None = None  # the index of the output that replaces it, None if it does not change


@dataclass
class Piece:
    """The part of a program that one stage computes."""

    stage: int
    eqns: list[Any] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)  # the indices of the program's inputs that it reads
    ins: list[Any] = field(default_factory=list)  # the variables that stages before it send
    outs: list[Any] = field(default_factory=list)  # the variables that it sends to stages after it
    results: list[int] = field(default_factory=list)  # the indices of the program's outputs that it computes


@dataclass
class Cut:
    """A program in pieces."""

    closed: ClosedJaxpr
    pieces: list[Piece]  # of each stage
    home_of: list[int | None]  # the stage that holds each input, None for those of the batch and unused ones
    made_at: list[int]  # the stage that computes each output
    sizes: list[int]  # how many of the parts between marks each stage has

    def runner(self, piece: Piece) -> Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]:
        """Return a function of a piece's (inputs, ins) to its (outs, results)."""
        jaxpr = self.closed.jaxpr
        names = [*jaxpr.constvars, *(jaxpr.invars[i] for i in piece.inputs), *piece.ins]

        def run(inputs: Sequence[Any], ins: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            values = dict(zip(names, [*self.closed.consts, *inputs, *ins], strict=True))
            # A mark gives the value itself: a gradient that needs it refers to what the stage was sent, not to a copy.
            walk(piece.eqns, values, lambda eqn, args: list(args) if mark_of(eqn) else bind(eqn, args))
            results = [value_of(jaxpr.outvars[i], values) for i in piece.results]
            return [values[x] for x in piece.outs], results

        return run

    def users(self, var: Any) -> list[int]:
        """Return the stages that are sent a value."""
        return [piece.stage for piece in self.pieces if var in piece.ins]


def cut(closed: ClosedJaxpr, inputs: Sequence[Input], num_stages: int, *, balance: Any) -> Cut:
    """Cut a program, its calls written out, into stages; `balance` is that of `segments_of`.

    What depends on the batch and on weights, or comes after a mark, is computed once: where the latest of its
    operands is. What depends on weights alone is computed where it is used, as late as possible; results of a few
    numbers such as a norm's, where the weights live. All else is computed again on each stage that uses it.

    Raises:
        ArgumentError: There are too few marks, one is where no program can be cut, or state is updated on one stage
            and read on another.
    """
    segments = segments_of(closed.jaxpr, num_stages, balance)
    # The first cut finds which stage uses each weight; the second places what is computed from weights alone.
    first = _Cutting(closed, inputs, segments, None).cut()
    return _Cutting(closed, inputs, segments, first.home_of).cut()


class _Place(NamedTuple):
    """The stage of a value that is computed once; else the weights that it depends on, and whether on the batch."""

    stage: int | None = None
    weights: frozenset[int] = frozenset()
    of_batch: bool = False


class _Cutting:
    def __init__(
        self, closed: ClosedJaxpr, inputs: Sequence[Input], segments: Segments, homes: Sequence[int | None] | None
    ) -> None:
        self.closed, self.jaxpr, self.inputs = closed, closed.jaxpr, inputs
        self.last, self.segments, self.pins = segments.stages[-1], segments, homes is not None
        self.known = homes or [None] * len(inputs)
        self.stage: dict[Any, int] = {}  # of values that are computed once
        self.weights: dict[Any, frozenset[int]] = {}  # the inputs of values that depend on weights alone
        self.effects: dict[int, int] = {}  # the stage of equations that print or call back, by their identity
        self.pieces = [Piece(stage) for stage in range(self.last + 1)]

    def cut(self) -> Cut:
        self._place()
        wanted: list[set[Any]] = [set() for _ in self.pieces]  # outputs and values that each stage must compute
        for i, var in enumerate(self.jaxpr.outvars):
            if (at := self._made_at(i, self.known)) is not None and not isinstance(var, Literal):
                wanted[at].add(var)
        for piece in reversed(self.pieces):  # a stage asks the stages before it, so the last comes first
            self._collect(piece, wanted)
        homes = [self._home(i, x) for i, x in enumerate(self.inputs)]
        made_at: list[Any] = [self._made_at(i, homes) for i in range(len(self.jaxpr.outvars))]
        for piece in self.pieces:
            piece.results = [i for i, stage in enumerate(made_at) if stage == piece.stage or i in self._updates(piece)]
        sizes = [self.segments.stages.count(piece.stage) for piece in self.pieces]
        return Cut(self.closed, self.pieces, homes, made_at, sizes)

    def _place(self) -> None:
        """Find the stage of each value that is computed once, and the weights of each that depends on these alone."""
        values = dict.fromkeys(self.jaxpr.constvars, _Place())
        for i, (var, x) in enumerate(zip(self.jaxpr.invars, self.inputs, strict=True)):
            weights = frozenset([i] if x.role is Role.WEIGHT else [])
            values[var] = _Place(weights=weights, of_batch=x.role is Role.BATCH)
        walk(self.jaxpr.eqns, values, self._place_equation, lambda _: _Place())
        self.stage = {var: x.stage for var, x in values.items() if x.stage is not None}
        self.weights = {var: x.weights for var, x in values.items() if x.stage is None and x.weights}

    def _place_equation(self, eqn: Any, operands: list[_Place]) -> list[_Place]:
        placed = [x.stage for x in operands if x.stage is not None]
        roots = frozenset[int]().union(*(x.weights for x in operands))
        of_batch = any(x.of_batch for x in operands)
        mark = self.segments.after.get(id(eqn))
        # Computed once, where the latest operand is: a copy elsewhere would need the activations sent there as well,
        # and activations only go forward through the stages.
        if placed or mark is not None or (roots and of_batch):
            at = max([*placed, 0 if mark is None else mark])
        elif roots and self.pins and all(x.aval.size <= _TINY for x in eqn.outvars):
            # A norm of weights: sending its result is cheaper than sending the weights.
            at = max((self.known[i] or 0 for i in roots), default=0)
        else:
            at = None
        if eqn.effects:  # a print runs once, though what it reads may be computed on every stage
            self.effects[id(eqn)] = self.last if at is None else at
        return [_Place(at, roots if at is None else frozenset(), of_batch)] * len(eqn.outvars)

    def _collect(self, piece: Piece, wanted: list[set[Any]]) -> None:
        """Fill a piece with what it must compute, and the pieces before it with what they must send."""
        places = {var: i for i, var in enumerate(self.jaxpr.invars)}
        while True:
            needed, ins = dict.fromkeys(wanted[piece.stage]), dict[Any, None]()

            def takes(eqn: Any, used: list[Any], ins: dict[Any, None] = ins) -> bool:
                if not used and self.effects.get(id(eqn)) != piece.stage:
                    return False
                # Computed once, by another stage, which sends it.
                elsewhere = any(self.stage.get(x, piece.stage) != piece.stage for x in eqn.outvars)
                ins.update(dict.fromkeys(used if elsewhere else []))
                return not elsewhere

            eqns = walk_back(self.jaxpr.eqns, needed, takes)
            used = sorted(places[x] for x in needed if x in places)
            sent = [i for i in used if self.stage.get(self.jaxpr.invars[i], piece.stage) != piece.stage]
            ins |= {self.jaxpr.invars[i]: None for i in sent}
            piece.inputs = [i for i in used if i not in sent]
            # A stage that uses a state computes its updates as well, from the values that it has.
            more = {x for x in variables([self.jaxpr.outvars[i] for i in self._updates(piece)]) if x not in self.stage}
            if more <= wanted[piece.stage]:
                break
            wanted[piece.stage] |= more
        piece.eqns, piece.ins = eqns, list(ins)
        for var in piece.ins:
            before = self.pieces[self.stage[var]]
            wanted[before.stage].add(var)
            if var not in before.outs:
                before.outs.append(var)

    def _updates(self, piece: Piece) -> list[int]:
        """Return the indices of the outputs that update inputs of a piece."""
        updates = []
        for i in piece.inputs:
            if (update := self.inputs[i].update) is None:
                continue
            if (at := self.stage.get(self.jaxpr.outvars[update], piece.stage)) != piece.stage:
                raise StateOnTwoStages(i, piece.stage, at)
            updates.append(update)
        return updates

    def _home(self, place: int, x: Input) -> int | None:
        """Return the stage that holds an input: the first that uses it, unless it is known."""
        if x.role is Role.BATCH:
            return None
        users = [piece.stage for piece in self.pieces if place in piece.inputs]
        if (known := self.known[place]) in users:
            return known
        if users or x.update is None:
            return next(iter(users), None)
        return self.stage.get(self.jaxpr.outvars[x.update], self.last)  # it is written only

    def _made_at(self, output: int, homes: Sequence[int | None]) -> int | None:
        """Return the stage of an output, a late one if any stage could compute it; None if its home is not known."""
        var = self.jaxpr.outvars[output]
        if isinstance(var, Literal):
            return self.last
        if var in self.stage:
            return self.stage[var]
        if (place := next((i for i, x in enumerate(self.inputs) if x.update == output), None)) is not None:
            return homes[place]
        known = [self.known[i] for i in self.weights.get(var, ())]
        return max((x for x in known if x is not None), default=self.last)


class StateOnTwoStages(ArgumentError):
    """A state, the input at `place`, is updated on one stage and read on another."""

    def __init__(self, place: int, read: int, updated: int) -> None:
        super().__init__(f"input {place} is read on stage {read} and updated on stage {updated}")
        self.place, self.read, self.updated = place, read, updated
