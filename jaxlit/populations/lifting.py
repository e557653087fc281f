"""One program for all members: the numbers in which their programs differ become inputs of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxlit.errors import ArgumentError
from jaxlit.leaf_names import is_key
from jaxlit.programs.jaxpr import JITS, bind, bodies, called, inner_jaxprs, scan_counts, value_of

# Where a number is in a program: for each equation that runs a program the equation's index and the program's, then
# an equation's index and the input's; or a constant or a result of the program, and which.
Place = tuple[int, ...]
_CONSTANT, _RESULT = -1, -2
# What no program runs once it is differentiated: traces of one function have different objects here.
_RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


@dataclass(frozen=True, eq=False)
class Lifted:
    """A program that computes what each member's own program does, given the member's numbers.

    Attributes:
        closed: The program of member 0.
        treedef: The structure of its results.
        inputs: Which of `numbers` takes the place of a number of member 0.
        numbers: (members, ...) each.
    """

    closed: Any
    treedef: Any
    inputs: dict[Place, int]
    numbers: list[np.ndarray]

    def __call__(self, numbers: Sequence[Any], *args: Any) -> Any:
        """Return what one member's program returns.

        Args:
            numbers: That member's numbers.
            *args: The arguments of the function that was traced.
        """
        given = {place: numbers[i] for place, i in self.inputs.items()}
        entered = {place[:n] for place in given for n in range(2, len(place) - 1, 2)}
        run = _Run(given, entered)
        return self.treedef.unflatten(run(self.closed, jax.tree.leaves(args), ()))


def lift(trace_of: Callable[[int], tuple[Any, Any]], names: Sequence[str]) -> Lifted:
    """Return one program for all members.

    Each member's program is traced and compared with that of member 0, equation by equation: so no number of a member
    is lost, wherever it was read from.

    Args:
        trace_of: Returns the program of a member, a `ClosedJaxpr`, and its results' shapes.
        names: How each member is called in messages.

    Raises:
        ArgumentError: The programs differ in more than numbers, or in numbers that cannot be inputs.
    """
    closed, shapes = trace_of(0)
    differing: list[dict[Place, Any]] = [{}]
    for i in range(1, len(names)):
        comparison = _Comparison()
        try:
            comparison.compare(closed, trace_of(i)[0], ())
        except _DifferentError as error:
            raise ArgumentError(
                f"jl.fit_many trains all members by one program, and that of {names[i]} differs from that of "
                f"{names[0]}: {error}. Variations may change seeds and numbers, but not what is computed, such as "
                "dropout of rate 0.0 and of others: call jl.fit_many once for each kind of members."
            ) from None
        differing.append(comparison.numbers)
    places = dict.fromkeys(place for numbers in differing for place in numbers)
    inputs, columns = dict[Place, int](), dict[Any, tuple[int, np.ndarray]]()
    for place in places:
        first = _number_at(closed, place)
        column = np.stack([np.asarray(numbers.get(place, first)) for numbers in differing]).astype(first.dtype)
        # One rate is in the program once for each parameter: it is one input.
        key = (str(column.dtype), column.shape, column.tobytes())
        inputs[place] = columns.setdefault(key, (len(columns), column))[0]
    return Lifted(closed, jax.tree.structure(shapes), inputs, [column for _, column in columns.values()])


class _DifferentError(Exception):
    """Two programs differ in more than numbers."""


class _Comparison:
    """Compares the program of a member with that of member 0.

    Attributes:
        numbers: The member's own numbers, by their places.
    """

    def __init__(self) -> None:
        self.numbers: dict[Place, Any] = {}

    def compare(self, a: Any, b: Any, at: Place) -> None:
        """Compare two programs, and those that they run.

        Raises:
            _DifferentError: They differ in more than numbers.
        """
        jaxprs = [getattr(x, "jaxpr", x) for x in (a, b)]
        known: list[dict[Any, int]] = [{}, {}]
        (in_a, in_b), (consts_a, consts_b) = ([x.invars for x in jaxprs], [x.constvars for x in jaxprs])
        self._define(known, in_a, in_b, "the inputs")
        self._define(known, consts_a, consts_b, "the constants")
        values = (getattr(x, "consts", ()) for x in (a, b))
        for k, pair in enumerate(zip(*values, strict=True)):
            self._number(*pair, (*at, _CONSTANT, k), "a constant")
        if len(jaxprs[0].eqns) != len(jaxprs[1].eqns):
            self._count([x.eqns for x in jaxprs])
        for k, (x, y) in enumerate(zip(*(x.eqns for x in jaxprs), strict=True)):
            if x.primitive is not y.primitive or len(x.invars) != len(y.invars):
                raise _DifferentError(f"it computes {_shown(y)}, and not {_shown(x)}")
            for i, pair in enumerate(zip(x.invars, y.invars, strict=True)):
                self._use(known, *pair, (*at, k, i), _shown(y))
            self._params(x, y, (*at, k))
            self._define(known, x.outvars, y.outvars, _shown(y))
        outputs = [x.outvars for x in jaxprs]
        for i, pair in enumerate(zip(*outputs, strict=True)):
            self._use(known, *pair, (*at, _RESULT, i), "a result")

    def _define(self, known: list[dict[Any, int]], a: Sequence[Any], b: Sequence[Any], what: str) -> None:
        for x, y in zip(a, b, strict=False):
            if x.aval != y.aval:
                raise _DifferentError(f"{what} is {y.aval}, and {x.aval}")
            known[0][x] = known[1][y] = len(known[0])
        if len(a) != len(b):
            raise _DifferentError(f"{what} are {len(b)}, and {len(a)}")

    def _use(self, known: list[dict[Any, int]], a: Any, b: Any, at: Place, what: str) -> None:
        literals = isinstance(a, core.Literal), isinstance(b, core.Literal)
        if all(literals):
            if a.aval != b.aval:
                raise _DifferentError(f"{what} takes {b.val!r} of {b.aval}, and {a.val!r} of {a.aval}")
            self._number(a.val, b.val, at, what)
        elif any(literals) or known[0][a] != known[1][b]:
            raise _DifferentError(f"{what} takes another value")

    def _number(self, a: Any, b: Any, at: Place, what: str) -> None:
        if a is b:
            return
        if is_key(a) and is_key(b):
            raise _DifferentError(f"{what} is a random key that the step holds: give it to the module's rngs")
        x, y = np.asarray(a), np.asarray(b)
        if x.dtype != y.dtype or x.shape != y.shape:
            raise _DifferentError(f"{what} is {y.dtype}{list(y.shape)}, and {x.dtype}{list(x.shape)}")
        if x.tobytes() != y.tobytes():
            self.numbers[at] = y

    def _params(self, x: Any, y: Any, at: Place) -> None:
        """Compare the parameters of two equations, and the programs that they run."""
        before, inner = len(self.numbers), [inner_jaxprs(eqn) for eqn in (x, y)]
        if x.params.keys() != y.params.keys() or len(inner[0]) != len(inner[1]):
            raise _DifferentError(f"it computes {_shown(y)} in another way")
        for j, pair in enumerate(zip(*inner, strict=True)):
            self.compare(*pair, (*at, j))
        if len(self.numbers) > before and called(x) is None and x.primitive.name not in ("scan", "cond"):
            raise _DifferentError(f"a number inside of {_shown(x)} differs, and only scan and cond can take it")
        for key, value in x.params.items():
            others = (value, y.params[key])
            if any(map(_runs_programs, others)) or (x.primitive.name in _RULES and any(map(callable, others))):
                continue
            if not _equal(*others):
                raise _DifferentError(f"{x.primitive.name} has {key}={others[1]!r:.80}, and {others[0]!r:.80}")

    def _count(self, eqns: list[Any]) -> None:
        """Refuse two programs of different lengths by their first equations that differ."""
        for x, y in zip(*eqns, strict=False):
            if x.primitive is not y.primitive:
                raise _DifferentError(f"it computes {_shown(y)}, and not {_shown(x)}")
        raise _DifferentError(f"it has {len(eqns[1])} operations, and not {len(eqns[0])}")


@dataclass(frozen=True)
class _Run:
    """Runs a program with some of its numbers replaced.

    Attributes:
        given: The numbers, by their places.
        entered: The places of programs that hold some of them.
    """

    given: dict[Place, Any]
    entered: set[Place]

    def __call__(self, program: Any, args: Sequence[Any], at: Place) -> list[Any]:
        jaxpr, given = getattr(program, "jaxpr", program), self.given
        values = dict(zip(jaxpr.invars, args, strict=True))
        for k, (var, x) in enumerate(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True)):
            values[var] = given.get((*at, _CONSTANT, k), x)
        for k, eqn in enumerate(jaxpr.eqns):
            pairs = [((*at, k, i), x) for i, x in enumerate(eqn.invars)]
            inputs = [given[place] if place in given else value_of(x, values) for place, x in pairs]
            with eqn.ctx.manager:  # see `jaxlit.programs.jaxpr.walk`
                has_numbers = any((*at, k, j) in self.entered for j in range(len(bodies(eqn))))
                results = self._enter(eqn, inputs, (*at, k)) if has_numbers else bind(eqn, inputs)
            values.update(zip(eqn.outvars, results, strict=True))
        pairs = [((*at, _RESULT, i), x) for i, x in enumerate(jaxpr.outvars)]
        return [given[place] if place in given else value_of(x, values) for place, x in pairs]

    def _enter(self, eqn: Any, args: list[Any], at: Place) -> list[Any]:
        """Run an equation that runs programs in which numbers are replaced."""
        programs = inner_jaxprs(eqn)
        if eqn.primitive.name == "cond":
            branches = [lambda *xs, j=j, x=x: self(x, xs, (*at, j)) for j, x in enumerate(programs)]
            return list(jax.lax.switch(args[0], branches, *args[1:]))
        if eqn.primitive.name != "scan":  # nothing is differentiated here, so that custom rules and remat are calls
            return self(programs[0], args, (*at, 0))
        num_consts, num_carries = scan_counts(eqn)
        first = num_consts + num_carries

        def body(carry: Any, xs: Any) -> tuple[Any, Any]:
            results = self(programs[0], [*args[:num_consts], *carry, *xs], (*at, 0))
            return results[:num_carries], results[num_carries:]

        params = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        carry, made = jax.lax.scan(body, args[num_consts:first], args[first:], **params)
        return [*carry, *made]


def _number_at(program: Any, place: Place) -> np.ndarray:
    """Return the number at a place of a program."""
    while len(place) > 2:
        jaxpr = getattr(program, "jaxpr", program)
        program, place = inner_jaxprs(jaxpr.eqns[place[0]])[place[1]], place[2:]
    (k, i), jaxpr = place, getattr(program, "jaxpr", program)
    if k == _CONSTANT:
        return np.asarray(program.consts[i])
    atom = jaxpr.outvars[i] if k == _RESULT else jaxpr.eqns[k].invars[i]
    return np.asarray(atom.val, atom.aval.dtype)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        return bool(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)
    except Exception:  # an object of another library
        return False


def _runs_programs(x: Any) -> bool:
    return any(isinstance(y, (core.Jaxpr, core.ClosedJaxpr)) for y in (x if isinstance(x, tuple) else (x,)))


def _shown(eqn: Any) -> str:
    return str(eqn.params["name"]) if eqn.primitive.name in JITS and "name" in eqn.params else eqn.primitive.name
