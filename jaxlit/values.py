"""Values as JSON from which they come back the same: the arguments of a module's constructor, for example.

What JSON does not have is a dict `{"jaxlit": kind, "value": ...}`; functions and classes are saved by name. Nothing is
imported to look up a name: it is looked up in the modules that are loaded, and only in those of the class that is
built, of jax, flax, optax and numpy.
"""

import contextlib
import dataclasses
import functools
import importlib
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
from jax.sharding import PartitionSpec as P

from jaxlit.texts import shown

_KIND, _VALUE = "jaxlit", "value"
DEFAULT = {_KIND: "default"}  # of an argument that had its default, and whose value is not kept
_MAKERS: dict[Any, Callable[[Any], Any]] = {"dtype": np.dtype, "float": float, "tuple": tuple, "dict": dict}
_MAKERS |= {"partition": lambda entries: P(*entries), "scalar": lambda parts: np.dtype(parts[0]).type(parts[1])}
_MAKERS["omegaconf"] = lambda values: importlib.import_module("omegaconf").OmegaConf.create(values)
_LIBRARIES = ("jax.nn", "jax.numpy", "jax.nn.initializers", "jax.lax", "numpy", "flax.nnx", "optax")  # public names


class NotKeptError(Exception):
    """A value cannot be saved, or not be restored; its text is the value as messages show it."""


def encode(x: Any) -> Any:
    """Return a value as JSON, or raise a NotKeptError if it would come back as another."""
    kind = type(x)  # exactly: a value of a subclass would come back as one of its base
    if issubclass(kind, dict) and kind is not dict:  # first: its keys may be attributes, and any other raises
        raise NotKeptError(f"{kind.__name__}(...)")
    if is_omegaconf(x):
        try:
            values = encode(sys.modules["omegaconf"].OmegaConf.to_container(x, resolve=True))
        except Exception as error:  # a reference to what is not there
            raise NotKeptError(f"{kind.__name__}(...)") from error
        if "${" in json.dumps(values):  # a text that would be read as a reference
            raise NotKeptError(f"{kind.__name__}(...)")
        return _node("omegaconf", values)
    if (name := _name_of(x)) is not None:
        return _node("name", name)
    if isinstance(x, np.dtype):
        return _node("dtype", x.name)
    if issubclass(kind, (np.bool_, np.number)) and type(x.item()) in (bool, int, float):
        return _node("scalar", [x.dtype.name, encode(x.item())])
    if kind is float and not math.isfinite(x):
        return _node("float", str(x))
    if x is None or kind in (bool, int, float, str):
        return x
    if kind in (list, tuple):
        values = [encode(value) for value in x]
        return values if kind is list else _node("tuple", values)
    if kind is P and P(*x.partitions) == x:  # it is not, if it has unreduced axes
        return _node("partition", [encode(entry) for entry in x])
    if kind is dict:
        if _KIND not in x and all(isinstance(key, str) for key in x):
            return {key: encode(value) for key, value in x.items()}
        return _node("dict", [[encode(key), encode(value)] for key, value in x.items()])
    is_plain = dataclasses.is_dataclass(x) and not isinstance(x, (type, nnx.Module, int, float, str, list, tuple, dict))
    if is_plain and (name := _name_of(type(x))) is not None:
        fields = {f.name: getattr(x, f.name) for f in dataclasses.fields(x) if f.init}
        values, names = {key: encode(value) for key, value in fields.items()}, {f.name for f in dataclasses.fields(x)}
        with contextlib.suppress(Exception):  # of the user's code
            again = type(x)(**fields)
            is_same = all(getattr(again, n) == getattr(x, n) for n in {*getattr(x, "__dict__", {}), *names})
            if is_same and names == type(x).__dataclass_fields__.keys():  # it may take more than the fields
                return _node("dataclass", values, name=name)
    # Functions and arrays are named; the repr of anything else may show a secret.
    is_named = isinstance(getattr(x, "__qualname__", None), str) or (hasattr(x, "shape") and hasattr(x, "dtype"))
    raise NotKeptError(shown(x) if is_named else f"{type(x).__name__}(...)")


def is_omegaconf(x: Any) -> bool:
    """Return whether a value is a `DictConfig` or a `ListConfig`, whose attributes are its values."""
    return type(x).__module__.startswith("omegaconf.")


def not_kept(text: str) -> dict[str, Any]:
    """Return what is saved of a value that cannot be: how it is shown."""
    return _node("not kept", text)


def decode(x: Any, cls: type) -> Any:
    """Return the value of what `encode` or `not_kept` returned, for a class, or raise a NotKeptError."""

    def value_of(node: dict[str, Any]) -> Any:
        value: Any = node.get(_VALUE)
        try:
            if (kind := node.get(_KIND)) is None:
                return node
            if kind == "name":
                return _named(value, cls)  # "package.module:Class.method"
            if kind in _MAKERS:
                return _MAKERS[kind](value)
            of = _named(node["name"], cls) if kind == "dataclass" else None
            if isinstance(of, type) and dataclasses.is_dataclass(of):  # nothing else is called
                return of(**value)
        except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
            raise NotKeptError(_dotted(value) if kind == "name" else shown(node)) from error
        raise NotKeptError(value if kind == "not kept" else shown(node))

    return _from_inside(x, value_of)


def _from_inside(x: Any, hook: Callable[[dict[str, Any]], Any]) -> Any:
    """Return a JSON value with every dict replaced by `hook(dict)`, the inner ones first."""
    return json.loads(json.dumps(x), object_hook=hook)


def readable(x: Any) -> Any:
    """Return a value as JSON for people to read: "jax.nn.relu" for a function."""

    def plain(node: dict[str, Any]) -> Any:
        kind = node.get(_KIND)
        value: Any = node if kind is None else node.get(_VALUE)
        value = {str(key): item for key, item in value} if kind == "dict" else value
        return _dotted(value) if kind == "name" else value

    try:
        return _from_inside(encode(x), plain)
    except NotKeptError as error:
        return str(error)


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
    spec, file = (getattr(sys.modules["__main__"], name, None) for name in ("__spec__", "__file__"))
    return f"__main__/{Path(file or '').stem if spec is None else spec.name}"


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
    if known is not None:
        # A checkpoint may name values of a module of the user, of the class, or of a library of arrays.
        place = known.partition(":")[0].partition("/")[0]
        root, file = place.partition(".")[0], getattr(sys.modules[place], "__file__", None)
        roots = {name.partition(".")[0] for name in (*_LIBRARIES, *(x.__module__ for x in cls.__mro__))}
        is_of_users = root in {"__main__", *roots} or (file is not None and "-packages" not in file)
        if is_of_users and root not in sys.stdlib_module_names and root != "jaxlit":
            return x
    if isinstance(x, type) and module == "builtins":  # float as a dtype
        return x
    raise KeyError(path)
