"""Joining programs that differ only in numbers: the joint program takes the numbers as inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any

import jax
import numpy as np
from jax.extend import core

from jaxlit.programs.jaxpr import (
    JITS,
    bind,
    called,
    inner_jaxprs,
    params_of,
    parts_of,
    programs_in,
    rerun_scan,
    value_of,
)
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
    """A program that computes what each of a list of programs does, given the numbers of that program."""

    first: Any  # the first program
    treedef: Any  # the structure of its results
    inputs: dict[Place, int]  # the index in `numbers` of the number at each place of the first program that differs
    numbers: list[np.ndarray]  # arrays of shape (programs, ...)

    def __call__(self, numbers: Sequence[Any], *args: Any) -> Any:
        """Return what one program returns for the arguments of the traced function, given the program's numbers."""
        entered = {place[:n] for place in self.inputs for n in range(2, len(place) - 1, 2)}
        run = _Run({place: numbers[i] for place, i in self.inputs.items()}, entered)
        return self.treedef.unflatten(run(self.first, jax.tree.leaves(args), ()))


def lift(trace_of: Callable[[int], tuple[Any, Any]], like: Sequence[int]) -> Lifted:
    """Return one program in place of a list of programs.

    Each is compared with the first one, equation by equation. This finds every number that the trace has read, from
    any object. A number may be an array.

    Args:
        trace_of: Returns program `i`, a `ClosedJaxpr`, and its results' shapes.
        like: For each program the index of the first one that is the same, which may be the program itself.

    Raises:
        DifferentError: A program differs from the first in more than numbers, or in numbers that cannot be inputs.
    """
    first, shapes = trace_of(0)
    changes: list[dict[Place, Any]] = [{}]  # of each program, by their places
    for i in range(1, len(like)):
        try:
            changes.append(changes[like[i]] if like[i] < i else differences(first, trace_of(i)[0]))
        except DifferentError as error:
            error.index = i
            raise
    inputs, columns = dict[Place, int](), list[np.ndarray]()
    index_of: dict[Any, int] = {}
    for place in dict.fromkeys(place for changed in changes for place in changed):
        original = _number_at(first, place)
        column = np.stack([np.asarray(changed.get(place, original)) for changed in changes]).astype(original.dtype)
        # One rate is in the program once for each parameter: it is one input.
        inputs[place] = index_of.setdefault((str(column.dtype), column.shape, column.tobytes()), len(columns))
        if inputs[place] == len(columns):
            columns.append(column)
    return Lifted(first, jax.tree.structure(shapes), inputs, columns)


def differences(first: Any, other: Any) -> dict[Place, Any]:
    """Return the numbers of a program that differ from those of the first one, by their places."""
    numbers: dict[Place, Any] = {}
    _Comparison((), numbers).compare(first, other)
    return numbers


def is_same(first: Any, other: Any) -> bool:
    """Return whether two programs compute the same."""
    try:
        return not differences(first, other)
    except DifferentError:
        return False


class _Comparison:
    """Compares two programs at a place, and the programs that they run; `numbers` receives those that differ."""

    def __init__(self, at: Place, numbers: dict[Place, Any]) -> None:
        self.at, self.numbers = at, numbers
        # The number of each variable, which is the same in both where they correspond.
        self._number_in_first: dict[Any, int] = {}
        self._number_in_other: dict[Any, int] = {}

    def compare(self, first: Any, other: Any) -> None:
        (a, consts), (b, other_consts) = parts_of(first), parts_of(other)
        self._define(a.invars, b.invars, "inputs")
        self._define(a.constvars, b.constvars, "constants")
        for k, (x, y) in enumerate(zip(consts, other_consts, strict=True)):
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

    def _define(self, a: Sequence[Any], b: Sequence[Any], kind: str) -> None:
        if len(a) != len(b):
            raise DifferentError(f"the number of its {kind} is {len(b)}, and not {len(a)}")
        for x, y in zip(a, b, strict=True):
            if x.aval != y.aval:
                raise DifferentError(f"one of its {kind} is {y.aval}, and not {x.aval}")
            self._number_in_first[x] = self._number_in_other[y] = len(self._number_in_first)

    def _use(self, a: Any, b: Any, place: Place, user: str) -> None:
        are_literals = isinstance(a, core.Literal), isinstance(b, core.Literal)
        if not any(are_literals) and self._number_in_first[a] == self._number_in_other[b]:
            return
        if not all(are_literals):
            raise DifferentError(f"{user} takes another value")
        if a.aval != b.aval:
            raise DifferentError(f"{user} takes {b.val!r} as {b.aval}, and not {a.val!r} as {a.aval}")
        self._compare_numbers(a.val, b.val, place, user)

    def _compare_numbers(self, a: Any, b: Any, place: Place, user: str) -> None:
        if a is b:
            return
        if is_key(a) or is_key(b):
            raise DifferentError(f"{user} is a random key that is no Variable: draw it from an nnx.Rngs")
        x, y = np.asarray(a), np.asarray(b)
        if x.dtype != y.dtype or x.shape != y.shape:
            raise DifferentError(f"{user} is {y.dtype}{list(y.shape)}, and not {x.dtype}{list(x.shape)}")
        if x.tobytes() != y.tobytes():
            self.numbers[*self.at, *place] = y

    def _compare_params(self, x: Any, y: Any, k: int) -> None:
        """Compare the parameters of equation `k`, and the programs that it runs."""
        before, programs, other_programs = len(self.numbers), inner_jaxprs(x), inner_jaxprs(y)
        params, others = params_of(x), params_of(y)
        if params.keys() != others.keys() or len(programs) != len(other_programs):
            raise DifferentError(f"it computes {_shown(y)} in another way")
        for j, (program, other) in enumerate(zip(programs, other_programs, strict=True)):
            _Comparison((*self.at, k, j), self.numbers).compare(program, other)
        if len(self.numbers) > before and called(x) is None and x.primitive.name not in ("scan", "cond"):
            raise DifferentError(f"a number inside of {_shown(x)} differs, and only scan and cond can take it")
        if x.primitive.name in _RULES:
            return
        for name, value in params.items():
            if not (programs_in(value) or _equal(value, others[name])):
                texts = shown(others[name], 80), shown(value, 80)
                if texts[0] == texts[1]:
                    raise DifferentError(f"{_shown(y)} has another {name}, or one that holds other values")
                raise DifferentError(f"{_shown(y)} has {name}={texts[0]}, and not {texts[1]}")


@dataclass(frozen=True)
class _Run:
    """Runs a program with some of its numbers replaced."""

    numbers: dict[Place, Any]
    entered: set[Place]  # the places of the inner programs that contain some of them

    def __call__(self, program: Any, args: Sequence[Any], at: Place) -> list[Any]:
        jaxpr, consts = parts_of(program)
        values = dict(zip(jaxpr.invars, args, strict=True))
        for k, (var, x) in enumerate(zip(jaxpr.constvars, consts, strict=True)):
            values[var] = self.numbers.get((*at, _CONSTANT, k), x)
        for k, eqn in enumerate(jaxpr.eqns):
            inputs = self._read(eqn.invars, values, (*at, k))
            with eqn.ctx.manager:  # see `jaxlit.programs.jaxpr.walk`
                has_numbers = any((*at, k, j) in self.entered for j in range(len(inner_jaxprs(eqn))))
                results = self._enter(eqn, inputs, (*at, k)) if has_numbers else bind(eqn, inputs)
            values.update(zip(eqn.outvars, results, strict=True))
        return self._read(jaxpr.outvars, values, (*at, _RESULT))

    def _read(self, atoms: Sequence[Any], values: dict[Any, Any], at: Place) -> list[Any]:
        places = (((*at, i), x) for i, x in enumerate(atoms))
        return [self.numbers[place] if place in self.numbers else value_of(x, values) for place, x in places]

    def _enter(self, eqn: Any, args: list[Any], at: Place) -> list[Any]:
        """Run an equation that runs programs in which numbers are replaced."""
        branches = [lambda *xs, j=j, x=x: self(x, xs, (*at, j)) for j, x in enumerate(inner_jaxprs(eqn))]
        if eqn.primitive.name == "cond":
            return list(jax.lax.switch(args[0], branches, *args[1:]))
        if eqn.primitive.name == "scan":
            return rerun_scan(eqn, args, branches[0])
        return branches[0](*args)  # nothing is differentiated here, so that custom rules and remat are calls


def _number_at(program: Any, place: Place) -> np.ndarray:
    *levels, k, i = place
    for n in range(0, len(levels), 2):
        program = inner_jaxprs(parts_of(program)[0].eqns[levels[n]])[levels[n + 1]]
    jaxpr, consts = parts_of(program)
    if k == _CONSTANT:
        return np.asarray(consts[i])
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


def _shown(eqn: Any) -> str:
    return str(eqn.params["name"]) if eqn.primitive.name in JITS and "name" in eqn.params else eqn.primitive.name
