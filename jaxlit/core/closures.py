"""Modules that functions hold, out of sight of nnx: their weights would be constants of the compiled step."""

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from flax import errors, nnx

from jaxlit.core.plain_attributes import CONTAINERS, each_attribute
from jaxlit.errors import ModuleError

_LIBRARIES = (
    "builtins",
    "flax",
    "jax",
    "jaxlib",
    "jaxlit",
    "numpy",
    "optax",
)  # whose objects hold no module of a user's


def check_closures(module: nnx.Module) -> None:
    """Refuse attributes that hide modules or Variables: in closures, partials, bound methods and plain objects.

    A copy of the module calls the function with the original, whose arrays are then compiled
    into the step and never trained.

    Raises:
        ModuleError: Naming the attribute.
    """
    for name, value in each_attribute(module, of=nnx.Pytree):
        if (held := next(_held(value, set()), None)) is not None:
            kind = "function" if callable(value) else type(value).__name__
            raise ModuleError(
                f"{type(module).__name__}.{name} is a {kind} that holds {_described(held)}, which nnx does not see "
                "there: its weights would be constants of the compiled step, and not trained. Make the layer an "
                "attribute of the module, and write a method that calls it (def f(self, x): return self.layer(x)) or "
                "an nnx.Sequential. Leave out a layer that stays frozen by jl.Optimizer(wrt=...)."
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
    kind = type(held).__name__
    return f"an nnx.{kind}" if isinstance(held, nnx.Variable) else f"the module {kind}"


def _held(value: Any, seen: set[tuple[int, bool]], *, inside: bool = False) -> Iterator[Any]:
    """Yield the modules and Variables that functions and plain objects hold: the value itself, or what is in it.

    Args:
        value: The value.
        seen: What was looked at, by id and `inside`.
        inside: Whether a function or an object holds the value; nnx sees any other.
    """
    if (id(value), inside) in seen or isinstance(value, (type, ModuleType, str, bytes, nnx.Rngs, nnx.RngStream)):
        return
    seen.add((id(value), inside))
    parts: Iterable[Any] = ()
    if isinstance(value, (Mapping, *CONTAINERS)):
        parts = value.values() if isinstance(value, Mapping) else value
    elif isinstance(value, (nnx.Variable, nnx.Pytree)):
        if inside and any(isinstance(x, nnx.Variable) for _, x in nnx.iter_graph(value)):
            yield value
    elif isinstance(value, functools.partial):
        inside, parts = True, (value.func, value.args, value.keywords)
    elif isinstance(value, MethodType):
        # A method that reads nothing of its module may be kept.
        names = _names(value.__func__.__code__) if isinstance(value.__func__, FunctionType) else vars(value.__self__)
        if any(hasattr(type(value.__self__), name) or name in vars(value.__self__) for name in names):
            inside, parts = True, (value.__self__,)
    elif isinstance(value, FunctionType):
        around = inspect.getclosurevars(value).nonlocals.values()
        inside, parts = True, (*around, value.__defaults__, value.__kwdefaults__)
    elif callable(value) or type(value).__module__.partition(".")[0] not in _LIBRARIES:
        inside, parts = True, (getattr(value, "__dict__", {}),)
    for part in parts:
        yield from _held(part, seen, inside=inside)


def _names(code: CodeType) -> set[str]:
    """Return the names in a function, and in the functions within it."""
    return set(code.co_names).union(*(_names(x) for x in code.co_consts if isinstance(x, CodeType)))
