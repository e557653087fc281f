"""Refuses names and arguments that are not there, with what takes their place."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from jaxlit.errors import ArgumentTypeError, did_you_mean
from jaxlit.field_arguments import ARGUMENTS
from jaxlit.field_names import ADVICE
from jaxlit.shown import shown

_F = TypeVar("_F", bound=Callable[..., Any])


def no_such_name(owner: str, name: str, known: Iterable[str] = (), *, called: str = "") -> AttributeError | ImportError:
    """Return the error of a name that is not there: with what takes its place, or a name that is spelt like it.

    Args:
        owner: A key of `ADVICE`.
        name: The name.
        known: Those that are there.
        called: What the owner is called in the message; its key if left out.
    """
    advice = ADVICE[owner].get(name)
    text = f"{called or owner} has no attribute {name!r}.{f' {advice}' if advice else did_you_mean(name, known, 0.75)}"
    # `from jaxlit import name` asks in this frame, and puts words of its own in the place of an AttributeError.
    imports = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    return ImportError(text, name=name) if advice and imports else AttributeError(text)


class ElsewhereOnTheClass:
    """A class method of Lightning's that a class does not have: the class says what takes its place.

    Args:
        owner: A key of `ADVICE`.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type) -> Any:
        raise AttributeError(f"{owner.__name__} has no attribute {self._name!r}. {ADVICE[self._owner][self._name]}")


def refuse_unknown(cls: type, args: Sequence[Any], given: Iterable[str]) -> None:
    """Refuse an argument that a constructor does not have.

    Args:
        cls: Whose constructor it is.
        args: What it was given by position.
        given: The names of the other arguments that it was given.

    Raises:
        ArgumentTypeError: With what takes its place, or one that is spelt like it.
    """
    none = cls.__init__ is object.__init__
    parameters = [] if none else [*inspect.signature(cls.__init__).parameters.values()][1:]
    if none and args:
        raise ArgumentTypeError(f"{cls.__name__} takes no arguments, got {shown(args[0])}. Define __init__ to take it.")
    _refuse_positions(cls.__name__, args, parameters)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters]
    advice = {k: v for base in reversed(cls.__mro__) for k, v in ARGUMENTS.get(base.__name__, {}).items()}
    _refuse(cls.__name__, given, known, advice)


def takes_only_its_arguments(called: str) -> Callable[[_F], _F]:
    """Return a decorator of a method: an argument that it does not have is refused with what takes its place.

    Args:
        called: The method, as a user calls it. `ARGUMENTS[called]` says what takes whose place.
    """

    def decorate(method: _F) -> _F:
        parameters = inspect.signature(method).parameters
        own = [p for p in parameters.values() if p.name != "self"]
        known, most = [p.name for p in own], len(_by_position(parameters.values()))

        @functools.wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            if not named.keys() <= parameters.keys():
                _refuse(called, named, known, ARGUMENTS.get(called, {}))
            if len(args) > most:
                _refuse_positions(called, args[len(parameters) - len(own) :], own)
            return method(*args, **named)

        return call  # type: ignore[return-value]

    return decorate


def _by_position(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Return the names of those that may be given by position, and as many as one likes for `*args`."""
    found = []
    for p in parameters:
        found += [p.name] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) else []
        found += [p.name] * 1000 if p.kind is p.VAR_POSITIONAL else []
    return found


def _refuse_positions(called: str, args: Sequence[Any], parameters: Sequence[inspect.Parameter]) -> None:
    places = _by_position(parameters)
    if len(args) > len(places):
        others = [f"{p.name}=" for p in parameters if p.kind is p.KEYWORD_ONLY]
        named = ", ".join(others) if len(others) < 16 else f"help(jl.{called}) lists them"
        raise ArgumentTypeError(
            f"{called} takes {' and '.join(places) or 'nothing'} by position, got {len(args)} values. Name the others: "
            f"{named or 'it has none'}."
        )


def _refuse(called: str, given: Iterable[str], known: list[str], advice: Mapping[str, str]) -> None:
    for name in given:
        if name not in known:
            has = (
                f"It has {', '.join(known) or 'none'}." if len(known) < 16 else f"help(jl.{called}) lists those it has."
            )
            hint = advice.get(name) or f"{did_you_mean(name, known)} {has}".lstrip()
            raise ArgumentTypeError(f"{called} has no argument {name!r}. {hint}")
