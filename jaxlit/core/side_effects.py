"""What a traced step changes beside its arrays, and no compiled step repeats: attributes, containers and objects."""

import functools
from collections import deque
from collections.abc import Iterable
from typing import Any

from flax import nnx
from jax.core import Tracer

from jaxlit.core.plain_attributes import CONTAINERS, Held, as_held, each_attribute, same_value
from jaxlit.core.reached import Named, is_of_library
from jaxlit.errors import StateError

_KEPT = "make it an nnx.Variable, return it as an output, or log it with self.log."
_MOST = 1_000  # entries of a container inside an object
_NAMESPACES = ("argparse", "types")  # objects of the standard library's that are a user's


class Before:
    """What a step could change, as it was before the step was traced.

    Args:
        module: The copy of the module that the step runs on.
        around: What the step reaches outside of it.
    """

    def __init__(self, module: nnx.Module, around: Iterable[Named]) -> None:
        self._attributes = {name: as_held(value, _fields_of) for name, value in each_attribute(module, of=nnx.Pytree)}
        outside = [x for x in around if _is_small_container(x.value) or _fields_of(x.value)]
        self._around = [(x.name, as_held(x.value, _fields_of)) for x in outside]

    def check(self, module: nnx.Module, step: str) -> None:
        """Refuse a step that changed something; what it put into containers and objects is taken out again.

        What lies outside of the module may be a cache: there only traced arrays are refused.

        Args:
            module: The module that the step ran on.
            step: The step's name.

        Raises:
            StateError: Naming what was changed.
        """
        for name, value in each_attribute(module, of=nnx.Pytree):
            changed = (
                _change(self._attributes[name], as_held(value, _fields_of), name) if name in self._attributes else name
            )
            if changed is not None:
                self._restore()
                raise StateError(
                    f"{step} changed the attribute {changed}. A step is traced once, so the change would happen once "
                    f"and be lost: {_KEPT}"
                )
        for name, before in self._around:
            now = as_held(before.container, _fields_of)
            changed = _change(before, now, name)
            if changed is not None and _has_tracer(now) and not _has_tracer(before):
                self._restore()
                raise StateError(
                    f"{step} put a traced array into {changed}, which lies outside of it. It has no value, and no "
                    f"later step would add another: {_KEPT}"
                )

    def _restore(self) -> None:
        for value in (*self._attributes.values(), *(held for _, held in self._around)):
            _restore(value)


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Return the fields of an object of the user's, without large containers; None for any other."""
    kind = type(value).__module__  # objects of libraries keep books of their own
    if isinstance(value, (type, nnx.Variable, nnx.Pytree)) or (is_of_library(kind) and kind not in _NAMESPACES):
        return None
    found = {name: x for name, x in _fields(value).items() if not isinstance(x, CONTAINERS) or _is_small_container(x)}
    return found or None


def _is_small_container(value: Any) -> bool:
    return isinstance(value, CONTAINERS) and len(value) <= _MOST


def _fields(value: Any) -> dict[str, Any]:
    slots = [x for kind in type(value).__mro__ for x in (vars(kind).get("__slots__", ()),)]
    names = [name for found in slots for name in ((found,) if isinstance(found, str) else found)]
    in_slots = {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}
    return in_slots | dict(getattr(value, "__dict__", {}))


def _change(before: Any, now: Any, name: str) -> str | None:
    """Return the first thing that changed, as a user writes it; None if nothing did."""
    if not (isinstance(before, Held) and isinstance(now, Held)):
        return None if same_value(before, now) else name
    if before.is_object or now.is_object:
        return _change_of_object(before, now, name)
    if type(before.container) is not type(now.container) or len(before.items) != len(now.items):
        return name
    return next(filter(None, (_change(x, y, name) for x, y in zip(before.items, now.items, strict=True))), None)


def _change_of_object(before: Held, now: Held, name: str) -> str | None:
    if before.container is not now.container:
        return name
    old, new = (dict(zip(x.items[::2], x.items[1::2], strict=True)) for x in (before, now))
    for field in {**old, **new}:
        both = field in old and field in new
        changed = _change(old[field], new[field], f"{name}.{field}") if both else f"{name}.{field}"
        # What an object computes once and keeps to itself is right in every step, unless it is of the trace.
        cached = isinstance(getattr(type(now.container), field, None), functools.cached_property)
        if changed and (_has_tracer(new.get(field)) or not (cached or field.startswith("_"))):
            return changed
    return None


def _has_tracer(value: Any) -> bool:
    return isinstance(value, Tracer) or (isinstance(value, Held) and any(map(_has_tracer, value.items)))


def _restore(value: Any) -> None:
    if not isinstance(value, Held):
        return
    container, items = value.container, [x.container if isinstance(x, Held) else x for x in value.items]
    if value.is_object:
        _restore_fields(container, dict(zip(items[::2], items[1::2], strict=True)))
    elif isinstance(container, list):
        container[:] = items
    elif isinstance(container, dict):
        container.clear()
        container.update(zip(items[::2], items[1::2], strict=True))
    elif isinstance(container, (set, deque)):
        container.clear()
        container.update(items) if isinstance(container, set) else container.extend(items)
    for x in value.items:
        _restore(x)


def _restore_fields(owner: Any, fields: dict[str, Any]) -> None:
    for name, now in _fields(owner).items():
        if name not in fields and (not isinstance(now, CONTAINERS) or _is_small_container(now)):
            object.__delattr__(owner, name)
    for name, was in fields.items():
        object.__setattr__(owner, name, was)
