"""Modules that functions hold, out of sight of nnx: their weights would be constants of the compiled step."""

import functools
from collections.abc import Iterable, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from flax import nnx

from jaxlit.core.plain_attributes import CONTAINERS, each_attribute
from jaxlit.errors import ModuleError

# Whose objects hold no module of a user's.
_LIBRARIES = ("builtins", "flax", "jax", "jaxlib", "jaxlit", "numpy", "optax")
_PLAIN = (bool, int, float, complex, str, bytes, type, type(None), ModuleType, nnx.Rngs, nnx.RngStream)
_MOST = 10_000  # objects in an attribute


def check_closures(module: nnx.Module) -> None:
    """Refuse attributes that hide modules or Variables: in closures, partials, bound methods and plain objects.

    A copy of the module calls the function with the original, whose arrays are then compiled
    into the step and never trained.

    Raises:
        ModuleError: Naming the attribute.
    """
    for name, attributes, key in each_attribute(module, of=nnx.Pytree):
        value = attributes[key]
        if (held := _hidden(value)) is not None:
            kind = "function" if callable(value) else type(value).__name__
            what = f"{'an nnx.' if isinstance(held, nnx.Variable) else 'the module '}{type(held).__name__}"
            raise ModuleError(
                f"{type(module).__name__}.{name} is a {kind} that holds {what}, which nnx does not see "
                "there: its weights would be constants of the compiled step, and not trained. Make the layer an "
                "attribute of the module, and write a method that calls it (def f(self, x): return self.layer(x)) or "
                "an nnx.Sequential. Leave out a layer that stays frozen by jl.Optimizer(wrt=...)."
            )


def _hidden(value: Any) -> Any:
    """Return a module or Variable that a function or plain object in a value holds; None if there is none."""
    todo, seen = [(value, False)], dict[tuple[int, bool], Any]()  # with whether nnx cannot see it
    while todo and len(seen) < _MOST:
        value, inside = todo.pop()
        if (id(value), inside) in seen or isinstance(value, _PLAIN):
            continue
        seen[id(value), inside] = value  # also to keep it, as another object could get its id
        parts: Iterable[Any] = ()
        if isinstance(value, (Mapping, *CONTAINERS)):
            parts = value.values() if isinstance(value, Mapping) else value
        elif isinstance(value, (nnx.Variable, nnx.Pytree)):
            if inside and any(isinstance(x, nnx.Variable) for _, x in nnx.iter_graph(value)):
                return value
        elif isinstance(value, functools.partial):
            inside, parts = True, (value.func, value.args, value.keywords)
        elif isinstance(value, MethodType):
            inside, parts = True, (value.__self__,)
        elif isinstance(value, FunctionType):
            around = (cell.cell_contents for cell in value.__closure__ or () if cell != CellType())  # not an empty one
            inside, parts = True, (*around, value.__defaults__, value.__kwdefaults__)
        elif callable(value) or type(value).__module__.partition(".")[0] not in _LIBRARIES:
            inside, parts = True, (getattr(value, "__dict__", {}),)
        todo += [(part, inside) for part in parts]
    return None
