"""What a step reaches by its names: the user's functions that it may call, and what they take from around them."""

import contextlib
import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

# Wherever they are installed.
_LIBRARIES = {*sys.stdlib_module_names, "chex", "einops", "flax", "grain", "jax", "jaxlib", "jaxlit", "numpy", "optax"}
_MOST = 100  # functions


class Named(NamedTuple):
    """Something that a function takes from around it."""

    space: dict[str, Any]  # a module's, or that of the functions around
    name: str
    value: Any
    beside: set[str]  # all names in the function


def reached(step: Callable[..., Any], kind: type) -> list[Named]:
    """Return what a step, and the user's functions and methods that it names, take from around them.

    Args:
        step: The step's function.
        kind: The module's class, whose methods may be called.
    """
    todo, seen, found = deque([step]), set[CodeType](), list[Named]()
    members = [x for c in kind.__mro__ if not is_of_library(c.__module__) for x in vars(c).items()]
    while todo and len(seen) < _MOST:
        function = _function(todo.popleft())
        if function is None or function.__code__ in seen or is_of_library(function.__module__):
            continue
        seen.add(function.__code__)
        names, spaces = names_in(function.__code__), [function.__globals__, closure_of(function)]
        taken = [space[name] for space in spaces for name in names if name in space]
        spaces += [vars(x) for x in taken if isinstance(x, ModuleType) and not is_of_library(x.__name__)]
        here = [Named(space, name, space[name], names) for space in spaces for name in names if name in space]
        found += here
        todo += [x.value for x in here] + [x for name, x in members if name in {*names, "__call__"}]
    return list({(id(x.space), x.name): x for x in found}.values())


@functools.cache
def is_of_library(module: str | None) -> bool:
    """Tell whether a module belongs to Python or to a library."""
    top = (module or "").partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return top in _LIBRARIES or "site-packages" in file or "dist-packages" in file


def _function(value: Any) -> FunctionType | None:
    if isinstance(value, (staticmethod, classmethod, MethodType)):
        value = value.__func__
    value = value.fget if isinstance(value, property) else value
    with contextlib.suppress(Exception):  # an object may answer to every name
        value = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value
    return value if isinstance(value, FunctionType) else None


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Return what a function takes from the functions around it, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it may still be empty
            found[name] = cell.cell_contents
    return found


def names_in(code: CodeType) -> set[str]:
    """Return the names in a function, and in the functions and comprehensions within it."""
    inner = [names_in(x) for x in code.co_consts if isinstance(x, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*inner)
