"""Constructor arguments as JSON values, and back: functions and classes are saved by name.

What JSON does not have is a dict `{"jaxlit": kind, "value": ...}`. Nothing is imported to look up a name: it is looked
up in the modules that are loaded, and only in those of the class that is built, of jax, flax, optax and numpy.
"""

import dataclasses
import functools
import json
import math
import re
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from jaxlit.texts import shown

_KIND, _VALUE = "jaxlit", "value"
DEFAULT = {_KIND: "default"}  # of an argument that had its default, and whose value is not kept
_MAKERS: dict[Any, Callable[[Any], Any]] = {"dtype": np.dtype, "float": float, "tuple": tuple, "dict": dict}
_LIBRARIES = ("jax.nn", "jax.numpy", "jax.nn.initializers", "jax.lax", "numpy", "flax.nnx", "optax")  # public names


class NotKeptError(Exception):
    """A value cannot be saved, or not be restored; its text is the value as messages show it."""


def encode(x: Any) -> Any:
    """Return a value as JSON.

    Raises:
        NotKeptError: It would come back as another.
    """
    if (name := _name_of(x)) is not None:
        return _node("name", name)
    if isinstance(x, np.dtype):
        return _node("dtype", x.name)
    kind = type(x)  # exactly: a value of a subclass would come back as one of its base
    if issubclass(kind, (np.bool_, np.number)) and type(x.item()) in (bool, int, float):
        return _node("scalar", encode(x.item()), dtype=x.dtype.name)
    if kind is float and not math.isfinite(x):
        return _node("float", str(x))
    if x is None or kind in (bool, int, float, str):
        return x
    if kind in (list, tuple):
        values = [encode(value) for value in x]
        return values if kind is list else _node("tuple", values)
    if kind is dict:
        if _KIND not in x and all(isinstance(key, str) for key in x):
            return {key: encode(value) for key, value in x.items()}
        return _node("dict", [[encode(key), encode(value)] for key, value in x.items()])
    is_plain = dataclasses.is_dataclass(x) and not isinstance(x, (type, nnx.Module, int, float, str, list, tuple, dict))
    if is_plain and (name := _name_of(type(x))) is not None:
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
        values = {key: encode(value) for key, value in fields.items()}
        if _is_rebuilt_from(x, fields):
            return _node("dataclass", values, name=name)
    # Functions and arrays are named; the repr of anything else may show a secret.
    is_named = isinstance(getattr(x, "__qualname__", None), str) or (hasattr(x, "shape") and hasattr(x, "dtype"))
    raise NotKeptError(shown(x) if is_named else f"{type(x).__name__}(...)")


def not_kept(text: str) -> dict[str, Any]:
    """Return what is saved of a value that cannot be: how it is shown."""
    return _node("not kept", text)


def decode(x: Any, cls: type) -> Any:
    """Return the value of what `encode` or `not_kept` returned, an argument of the class that is built.

    Raises:
        NotKeptError: It was not kept, or its name now means nothing, or something else.
    """
    return _from_inside(x, functools.partial(_value_of, cls=cls))


def _from_inside(x: Any, hook: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a JSON value with every dict replaced by `hook(dict)`, the inner ones first."""
    return json.loads(json.dumps(x), object_hook=hook)


def _value_of(node: dict[str, Any], cls: type) -> Any:
    """Return the value of a node, whose parts are values already."""
    kind: Any = node.get(_KIND)
    value: Any = node.get(_VALUE)
    if kind is None:
        return node
    try:
        if kind == "name":
            return _named(value, cls)  # "package.module:Class.method"
        if kind == "scalar" and issubclass(scalar := np.dtype(node["dtype"]).type, (np.bool_, np.number)):
            return scalar(value)
        if kind in _MAKERS:
            return _MAKERS[kind](value)
        if kind == "dataclass":
            of = _named(node["name"], cls)
            if isinstance(of, type) and dataclasses.is_dataclass(of):  # nothing else is called
                return of(**value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise NotKeptError(_dotted(value) if kind == "name" else shown(node)) from error
    raise NotKeptError(value if kind == "not kept" else shown(node))


def readable(x: Any) -> Any:
    """Return a value as JSON for people to read: "jax.nn.relu" for a function."""
    try:
        return _from_inside(encode(x), _plain)
    except NotKeptError as error:
        return str(error)


def _plain(node: dict[str, Any]) -> Any:
    """Return a node of `encode` without the marks that say what it was."""
    value: Any = node.get(_VALUE)
    if node.get(_KIND) == "dict":
        return {str(key): item for key, item in value}
    return node if _KIND not in node else _dotted(value) if node[_KIND] == "name" else value


def _node(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {_KIND: kind, **more, _VALUE: value}


def _name_of(x: Any) -> str | None:
    """Return "module:name" of a function, a class or a member of an Enum; None if that leads to nothing or another."""
    of = type(x) if isinstance(x, Enum) else x
    module, name = getattr(of, "__module__", None), getattr(of, "__qualname__", None) or getattr(of, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    name = f"{name}.{x.name}" if isinstance(x, Enum) else name
    place = next((at for at in (*_LIBRARIES, module) if _look_up(at, name) is x), None)
    return None if place is None else f"{_script() if place == '__main__' else place}:{name}"


def _script() -> str:
    """Return how a name of `__main__` is saved: with the module that other programs import the script as."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    return f"__main__/{spec.name if spec is not None else Path(getattr(main, '__file__', '')).stem}"


def _dotted(path: Any) -> str:
    return re.sub("^__main__/[^:]*", "__main__", str(path)).replace(":", ".")


def _look_up(module: str, name: str) -> Any:
    return functools.reduce(lambda x, part: getattr(x, part, None), name.split("."), sys.modules.get(module))


def _named(path: str, cls: type) -> Any:
    """Return the value of a name, in the program that builds the class."""
    module, _, name = path.partition(":")
    # The program that loads what a script has trained may import the script, and has another `__main__`.
    module = "__main__" if module == _script() else module.removeprefix("__main__/")
    x = _look_up(module, name)
    # By the name of the value itself: a module may import functions of any other.
    known = None if x is None else _name_of(x)
    if known is not None and _may_be_named(known.partition(":")[0].partition("/")[0], cls):
        return x
    if isinstance(x, type) and module == "builtins":  # float as a dtype
        return x
    raise KeyError(path)


def _may_be_named(module: str, cls: type) -> bool:
    """Return whether a checkpoint may name values of a module: the user's, that of the class, or one of arrays."""
    root, file = module.partition(".")[0], getattr(sys.modules[module], "__file__", None)
    if root in sys.stdlib_module_names or root == "jaxlit":
        return False
    known = {"__main__", *(name.partition(".")[0] for name in (*_LIBRARIES, *(x.__module__ for x in cls.__mro__)))}
    return root in known or (file is not None and "-packages" not in file)


def _is_rebuilt_from(x: Any, fields: dict[str, Any]) -> bool:
    """Return whether a dataclass's constructor rebuilds it from its fields, with those that are not compared."""
    names = {field.name for field in dataclasses.fields(x)}
    if type(x).__dataclass_fields__.keys() - names:  # the constructor takes more than the fields
        return False
    try:
        rebuilt = type(x)(**fields)
        return all(getattr(rebuilt, name) == getattr(x, name) for name in {*getattr(x, "__dict__", {}), *names})
    except Exception:  # of the user's code
        return False
