"""The public names of a room, each imported when it is first used, and errors of names and arguments that do not exist.

These errors say what to use instead: `porting.toml` has the advice. `Configured` is the base of classes that refuse
unknown arguments, and show those that they were called with.
"""

import builtins
import contextlib
import functools
import importlib
import inspect
import reprlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar

from jaxlit.errors import ArgumentTypeError, did_you_mean
from jaxlit.texts import shown

_F = TypeVar("_F", bound=Callable[..., Any])
_FACES = {  # by package: the tables that give advice on its names
    "jaxlit": ("jl", "jl.callbacks"),
    "jaxlit.callbacks": ("jl.callbacks",),
    "jaxlit.loggers": ("jl.callbacks",),
    "jaxlit.strategies": ("jl.strategies",),
}


@functools.cache
def advice(owner: str) -> Mapping[str, str]:
    """Return what to use in place of each name that an owner does not have, by its table of `porting.toml`.

    Tables are called "jl.callbacks", "Trainer", or "Trainer()" for arguments; an owner without one has no advice.
    """
    return {name: text for names, text in _tables().get(owner, {}).items() for name in names.split()}


@functools.cache
def _tables() -> dict[str, dict[str, str]]:
    import tomllib  # only to explain a mistake

    return tomllib.loads(Path(__file__).with_name("porting.toml").read_text(encoding="utf-8"))


def no_such_name(owner: str, name: str, known: Iterable[str] = (), *, called: str = "") -> AttributeError:
    """Return the error of a name that does not exist, with the advice of the owner's table, or a similar known name.

    In the message the owner is `called` so, by default as its table.
    """
    hint = f" {text}" if (text := advice(owner).get(name)) else did_you_mean(name, known, 0.75)
    return AttributeError(f"{called or owner} has no attribute {name!r}.{hint}")


def no_such_public_name(package: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error of a name that a package does not have; the arguments are those of `no_such_name`."""
    called = package.replace("jaxlit", "jl", 1)
    owners = _FACES.get(package, (called,))
    owner = next((x for x in owners if name in advice(x)), called)
    return no_such_name(owner, name, known, called=called)


class _Imports:
    """Gives the advice to `from jaxlit import name` too, which asks for a module of that name before it fails."""

    @staticmethod
    def find_spec(fullname: str, path: Any = None, target: Any = None) -> None:
        package, _, name = fullname.rpartition(".")
        for owner in _FACES.get(package, ()):
            if name in advice(owner):
                raise ImportError(str(no_such_name(owner, name)), name=fullname)


sys.meta_path.append(_Imports)  # last: asked only after no module of this name exists


def refuse_unknown(cls: type, args: Sequence[Any], kwargs: Iterable[str]) -> None:
    """Refuse keyword arguments that a constructor does not have, and all where there is no constructor."""
    no_init = cls.__init__ is object.__init__  # which ignores all arguments, as `__new__` is overridden
    if no_init and args:
        raise ArgumentTypeError(f"{cls.__name__} takes no arguments, got {shown(args[0])}. Define __init__ to take it.")
    parameters = [] if no_init else [*inspect.signature(cls.__init__).parameters.values()][1:]
    _refuse(cls.__name__, parameters, kwargs, [base.__name__ for base in cls.__mro__])


def takes_only_its_arguments(called: str) -> Callable[[_F], _F]:
    """Return a decorator that refuses arguments by names that the function, `called` "Trainer.fit", does not have."""

    def decorate(method: _F) -> _F:
        parameters = [*inspect.signature(method).parameters.values()]
        names, bound = {p.name for p in parameters}, parameters[0].name == "self"

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.keys() <= names:
                _refuse(called, parameters[bound:], kwargs, [called])
            return method(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def refuse_arguments(called: str, function: Callable[..., Any], kwargs: Iterable[str]) -> None:
    """Refuse arguments that a method takes as `**unknown`, which costs no call around it as the decorator does."""
    _, *parameters, _ = inspect.signature(function).parameters.values()
    _refuse(called, parameters, kwargs, [called])


def _refuse(called: str, parameters: list[inspect.Parameter], kwargs: Iterable[str], owners: list[str]) -> None:
    known = [p.name for p in parameters]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    for name in kwargs:
        if name not in known:
            names = f"It has {', '.join(known) or 'none'}"
            listed = names if len(known) < 16 else f"help(jl.{called}) lists those it has"
            hint = f"{did_you_mean(name, known)} {listed}.".lstrip()
            texts = (advice(f"{owner}()").get(name) for owner in owners)
            raise ArgumentTypeError(f"{called} has no argument {name!r}. {next(filter(None, texts), hint)}")


_patching = threading.Lock()


@contextlib.contextmanager
def lazy_imports(face: dict[str, Any]) -> Iterator[None]:
    """Put off each `from module import name` of the block until the face, a package's globals, is asked for the name.

    Type checkers and readers see imports like any other; plain ones would cost each `import jaxlit` half a second.
    `etils.epy.lazy_api_imports` does the same. The face also gets a `__dir__` and a `__getattr__`.
    """
    modules: dict[str, str] = {}  # of each name

    def note(module: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if globals is not face:  # another thread's import
            return plain_import(module, globals, locals, fromlist, level)
        names = sys.modules[module].__all__ if fromlist == ("*",) else fromlist
        modules.update(dict.fromkeys(names, module))
        return SimpleNamespace(**dict.fromkeys(names))

    with _patching:
        plain_import, builtins.__import__ = builtins.__import__, note
        try:
            yield
        finally:
            builtins.__import__ = plain_import
    for name in modules:
        del face[name]

    def get(name: str) -> Any:
        if name not in modules:
            raise no_such_public_name(face["__name__"], name, modules)
        if (module := modules[name]) == face["__name__"]:  # a file of this room
            face[name] = importlib.import_module(f"{module}.{name}")
        else:
            face[name] = getattr(importlib.import_module(module), name)
        return face[name]

    face.update(__getattr__=get, __dir__=lambda: face["__all__"])


_PLAIN = (bool, int, float, str, Path, timedelta, dict, list, tuple)
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80


class Configured:
    """The base of callbacks and strategies, whose attributes are called as the constructor's arguments."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Refuse an argument that the constructor does not have, with what takes its place."""
        refuse_unknown(cls, args, kwargs)
        return super().__new__(cls)

    def __repr__(self) -> str:
        """Return the call that makes such an object, without arguments that have their defaults."""
        texts = list[str]()
        for x in [*inspect.signature(type(self).__init__).parameters.values()][1:]:
            value = vars(self).get(x.name)
            value = getattr(value, "given", value)  # rules
            if callable(value) and value is not x.default and not isinstance(value, contextlib.ContextDecorator):
                name = getattr(getattr(value, "func", value), "__qualname__", type(value).__name__)
                texts.append(f"{x.name}={name.replace('.<locals>', '')}")
            elif isinstance(value, _PLAIN) and value != x.default and (value or x.default is not None):
                is_first = x.kind is x.POSITIONAL_OR_KEYWORD and x.default is x.empty
                texts.append(_short.repr(value) if is_first else f"{x.name}={_short.repr(value)}")
        return f"{type(self).__name__}({', '.join(texts)})"
