"""Modules that functions hold, out of sight of nnx: their weights would be constants of the compiled step."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import jax
from flax import errors, nnx

from jaxlit.core.module import TrainModule
from jaxlit.core.plain_attributes import CONTAINERS, each_attribute
from jaxlit.errors import ModuleError


def check_closures(module: nnx.Module) -> None:
    """Refuse callable attributes that hold modules or Variables: in closures, partials, defaults and bound methods.

    nnx does not see them. A copy of the module calls the function with the original, whose arrays are then compiled
    into the step and never trained.

    Raises:
        ModuleError: Naming the attribute.
    """
    for name, value in each_attribute(module, of=nnx.Pytree):
        if (held := next(_held(value, set()), None)) is not None:
            raise ModuleError(
                f"{type(module).__name__}.{name} is a function that holds {_described(held)}, which nnx does not see "
                "there: its weights would be constants of the compiled step, and not trained. Write a method that "
                "calls the layer as an attribute of the module (def f(self, x): return self.layer(x)), or make the "
                "attribute an nnx.Sequential."
            )


def note_trace_level(error: Exception) -> None:
    """Add to flax's error about a Variable of another trace where such a Variable comes from."""
    if isinstance(error, errors.TraceContextError):
        error.add_note(
            "A step may change the Variables of its own module only. A layer that is held by a closure, by a global or "
            "by an object that is no nnx.Module is not part of it: make the layer an attribute of the module, and call "
            "it in a method."
        )


def _described(held: Any) -> str:
    if isinstance(held, nnx.Variable):
        return f"an nnx.{type(held).__name__}"
    return f"the module {type(held).__name__}"


def _held(value: Any, seen: set[tuple[int, bool]], *, inside: bool = False) -> Iterator[Any]:
    """Yield the modules and Variables that functions use: the value itself, or the entries of a container.

    Args:
        value: The value.
        seen: What was looked at, by id and `inside`.
        inside: Whether a function holds the value; nnx sees any other.
    """
    if (id(value), inside) in seen or isinstance(value, (type, str, bytes)):
        return
    seen.add((id(value), inside))
    parts: Iterable[Any] = ()
    if isinstance(value, (nnx.Variable, nnx.Pytree)):
        if inside and any(isinstance(x, nnx.Variable) for _, x in nnx.iter_graph(value)):
            yield value
    elif isinstance(value, CONTAINERS):
        parts = value.values() if isinstance(value, dict) else value
    elif isinstance(value, functools.partial):
        inside, parts = True, (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        # A method that reads only plain attributes of its module may be kept.
        if not isinstance(value.__self__, nnx.Pytree) or any(map(_of_graph, _used(value.__func__, value.__self__))):
            inside, parts = True, (value.__self__,)
    elif isinstance(value, FunctionType):
        around = (*_closure(value).values(), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        used = [(x, _used(value, x) if isinstance(x, nnx.Pytree) else []) for x in around]
        inside, parts = True, [x for x, names in used if not names or any(map(_of_graph, names))]
    elif callable(value) and not isinstance(value, jax.Array):
        inside, parts = True, (dict(getattr(value, "__dict__", {})),)
    for part in parts:
        yield from _held(part, seen, inside=inside)


def _used(function: Callable[..., Any], owner: Any) -> list[Any]:
    """Return the attributes of an object whose names a function's code has."""
    names = _names(function.__code__) if isinstance(function, FunctionType) else set(vars(owner))
    found = [(name, inspect.getattr_static(owner, name, None)) for name in names]
    # What TrainModule itself defines, `hparams` and `log` for example, reads no weights.
    return [None if x is getattr(TrainModule, name, None) else x for name, x in found if x is not None]


def _of_graph(value: Any) -> bool:
    return callable(value) or isinstance(value, (property, nnx.Variable, nnx.Pytree))


def _closure(function: FunctionType) -> dict[str, Any]:
    """Return what a function takes from the functions around it, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it may still be empty
            found[name] = cell.cell_contents
    return found


def _names(code: CodeType) -> set[str]:
    """Return the names in a function, and in the functions and comprehensions within it."""
    inner = [_names(x) for x in code.co_consts if isinstance(x, CodeType)]
    return {*code.co_names, *code.co_freevars}.union(*inner)
