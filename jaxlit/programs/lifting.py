"""Joining programs that differ only in numbers: the joint program takes the numbers as inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxlit.programs.jaxpr import JITS, bind, bodies, called, inner_jaxprs, scan_counts, value_of
from jaxlit.texts import is_key, shown

# The place of a number in a program: the index of an equation and of the program that it runs, for each level of
# nesting; then the index of an equation and of its input, or _CONSTANT or _RESULT and an index.
Place = tuple[int, ...]
_CONSTANT, _RESULT = -1, -2
# Their other parameters are rules for derivatives: a program that is compared has been differentiated, if ever.
_RULES = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


class DifferentError(Exception):
    """Two programs differ in more than numbers.

    Attributes:
        index: Which program differs from the first one; None where only two are compared.
    """

    index: int | None = None


@dataclass(frozen=True, eq=False)
class Lifted:
    """A program that computes what each of several programs does, given the numbers of that program.

    Attributes:
        first: The first program.
        treedef: The structure of its results.
        inputs: Which of `numbers` takes the place of a number of the first program.
        numbers: (programs, ...) each.
    """

    first: Any
    treedef: Any
    inputs: dict[Place, int]
    numbers: list[np.ndarray]

    def __call__(self, numbers: Sequence[Any], *args: Any) -> Any:
        """Return what one of the programs returns.

        Args:
            numbers: The numbers of that program.
            *args: The arguments of the function that was traced.
        """
        given = {place: numbers[i] for place, i in self.inputs.items()}
        entered = {place[:n] for place in given for n in range(2, len(place) - 1, 2)}
        return self.treedef.unflatten(_Run(given, entered)(self.first, jax.tree.leaves(args), ()))


def lift(trace_of: Callable[[int], tuple[Any, Any]], like: Sequence[int]) -> Lifted:
    """Return one program for several.

    Each is compared with the first one, equation by equation. This finds every number that the trace has read, from
    any object. A number may be an array.

    Args:
        trace_of: Returns program `i`, a `ClosedJaxpr`, and its results' shapes.
        like: For each program the index of the first one that is the same, which may be the program itself.

    Raises:
        DifferentError: One differs from the first in more than numbers, or in numbers that cannot be inputs.
    """
    first, shapes = trace_of(0)
    numbers: list[dict[Place, Any]] = [{}]
    for i in range(1, len(like)):
        try:
            numbers.append(numbers[like[i]] if like[i] < i else differences(first, trace_of(i)[0]))
        except DifferentError as error:
            error.index = i
            raise
    inputs, columns = dict[Place, int](), dict[Any, tuple[int, np.ndarray]]()
    for place in dict.fromkeys(place for found in numbers for place in found):
        original = _number_at(first, place)
        column = np.stack([np.asarray(found.get(place, original)) for found in numbers]).astype(original.dtype)
        # One rate is in the program once for each parameter: it is one input.
        key = (str(column.dtype), column.shape, column.tobytes())
        inputs[place] = columns.setdefault(key, (len(columns), column))[0]
    return Lifted(first, jax.tree.structure(shapes), inputs, [column for _, column in columns.values()])


def differences(first: Any, other: Any) -> dict[Place, Any]:
    """Return the numbers of a program that differ from those of the first one, by their places.

    Raises:
        DifferentError: They differ in more than numbers.
    """
    numbers: dict[Place, Any] = {}
    _Comparison(first, other, (), numbers).compare()
    return numbers


def is_same(first: Any, other: Any) -> bool:
    """Return whether two programs compute the same."""
    try:
        return not differences(first, other)
    except DifferentError:
        return False


class _Comparison:
    """Compares two programs, and the programs that they run.

    Args:
        first: The first program.
        other: The other program.
        at: Their place.
        numbers: The numbers of the other program that differ are added here, by their places.
    """

    def __init__(self, first: Any, other: Any, at: Place, numbers: dict[Place, Any]) -> None:
        self.first, self.other, self.at, self.numbers = first, other, at, numbers
        self._known: tuple[dict[Any, int], dict[Any, int]] = ({}, {})  # variables by their numbers

    def compare(self) -> None:
        """Compare the two.

        Raises:
            DifferentError: They differ in more than numbers.
        """
        a, b = (getattr(x, "jaxpr", x) for x in (self.first, self.other))
        self._define(a.invars, b.invars, "inputs")
        self._define(a.constvars, b.constvars, "constants")
        pairs = zip(getattr(self.first, "consts", ()), getattr(self.other, "consts", ()), strict=True)
        for k, (x, y) in enumerate(pairs):
            self._compare_numbers(x, y, (_CONSTANT, k), "a constant")
        for k, (x, y) in enumerate(zip(a.eqns, b.eqns, strict=False)):
            if x.primitive is not y.primitive or len(x.invars) != len(y.invars):
                raise DifferentError(f"it computes {_shown(y)}, and not {_shown(x)}")
            for i, (use, other) in enumerate(zip(x.invars, y.invars, strict=True)):
                self._use(use, other, (k, i), _shown(y))
            self._compare_params(x, y, k)
            self._define(x.outvars, y.outvars, f"results of {_shown(y)}")
        if len(a.eqns) != len(b.eqns):
            raise DifferentError(f"it has {len(b.eqns)} operations, and not {len(a.eqns)}")
        for i, (use, other) in enumerate(zip(a.outvars, b.outvars, strict=True)):
            self._use(use, other, (_RESULT, i), "a result")

    def _define(self, a: Sequence[Any], b: Sequence[Any], what: str) -> None:
        if len(a) != len(b):
            raise DifferentError(f"the number of its {what} is {len(b)}, and not {len(a)}")
        known = self._known
        for x, y in zip(a, b, strict=True):
            if x.aval != y.aval:
                raise DifferentError(f"one of its {what} is {y.aval}, and not {x.aval}")
            known[0][x] = known[1][y] = len(known[0])

    def _use(self, a: Any, b: Any, place: Place, what: str) -> None:
        if not any(isinstance(x, core.Literal) for x in (a, b)) and self._known[0][a] == self._known[1][b]:
            return
        if not all(isinstance(x, core.Literal) for x in (a, b)):
            raise DifferentError(f"{what} takes another value")
        if a.aval != b.aval:
            raise DifferentError(f"{what} takes {b.val!r} as {b.aval}, and not {a.val!r} as {a.aval}")
        self._compare_numbers(a.val, b.val, place, what)

    def _compare_numbers(self, a: Any, b: Any, place: Place, what: str) -> None:
        if a is b:
            return
        if is_key(a) or is_key(b):
            raise DifferentError(f"{what} is a random key that is no Variable: draw it from an nnx.Rngs")
        x, y = np.asarray(a), np.asarray(b)
        if x.dtype != y.dtype or x.shape != y.shape:
            raise DifferentError(f"{what} is {y.dtype}{list(y.shape)}, and not {x.dtype}{list(x.shape)}")
        if x.tobytes() != y.tobytes():
            self.numbers[*self.at, *place] = y

    def _compare_params(self, x: Any, y: Any, k: int) -> None:
        """Compare the parameters of equation `k`, and the programs that it runs."""
        before, programs, others = len(self.numbers), inner_jaxprs(x), inner_jaxprs(y)
        if x.params.keys() != y.params.keys() or len(programs) != len(others):
            raise DifferentError(f"it computes {_shown(y)} in another way")
        for j, (program, other) in enumerate(zip(programs, others, strict=True)):
            _Comparison(program, other, (*self.at, k, j), self.numbers).compare()
        if len(self.numbers) > before and called(x) is None and x.primitive.name not in ("scan", "cond"):
            raise DifferentError(f"a number inside of {_shown(x)} differs, and only scan and cond can take it")
        for name, value in {} if x.primitive.name in _RULES else x.params.items():
            if not (_runs_programs(value) or _equal(value, y.params[name])):
                now, was = shown(y.params[name], 80), shown(value, 80)
                other = (
                    f"{name}={now}, and not {was}" if now != was else f"another {name}, or one that holds other values"
                )
                raise DifferentError(f"{_shown(y)} has {other}")


@dataclass(frozen=True)
class _Run:
    """Runs a program with some of its numbers replaced.

    Attributes:
        given: The numbers, by their places.
        entered: The places of the inner programs that contain some of them.
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
    for n in range(0, len(place) - 2, 2):
        eqn = getattr(program, "jaxpr", program).eqns[place[n]]
        program = inner_jaxprs(eqn)[place[n + 1]]
    jaxpr, k, i = getattr(program, "jaxpr", program), place[-2], place[-1]
    if k == _CONSTANT:
        return np.asarray(program.consts[i])
    atom = jaxpr.outvars[i] if k == _RESULT else jaxpr.eqns[k].invars[i]
    return np.asarray(atom.val, atom.aval.dtype)


def _equal(a: Any, b: Any) -> bool:
    """Return whether two parameters of equations are equal; functions are compared by their code and closures."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        if isinstance(a, (tuple, list)) and not hasattr(a, "_fields"):
            return len(a) == len(b) and all(map(_equal, a, b))
        if isinstance(a, partial):
            return all(map(_equal, (a.func, a.args, [*a.keywords.items()]), (b.func, b.args, [*b.keywords.items()])))
        if isinstance(a, FunctionType):
            return all(map(_equal, _parts(a), _parts(b)))
        if is_dataclass(a) and a != b:  # jax wraps the function of a pure_callback
            return all(_equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))
        return bool(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)
    except Exception:  # an object of another library, or a function that holds itself
        return False


def _parts(function: FunctionType) -> tuple[Any, ...]:
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__code__, id(function.__globals__), function.__defaults__, function.__kwdefaults__, held


def _runs_programs(x: Any) -> bool:
    return any(isinstance(y, (core.Jaxpr, core.ClosedJaxpr)) for y in (x if isinstance(x, tuple) else (x,)))


def _shown(eqn: Any) -> str:
    return str(eqn.params["name"]) if eqn.primitive.name in JITS and "name" in eqn.params else eqn.primitive.name
