"""Plain attributes of a module that a traced step changes, which no compiled step repeats."""

from collections import deque
from typing import Any

from flax import nnx

from jaxlit.core.plain_attributes import Held, as_held, each_attribute, same_value
from jaxlit.errors import StateError


class Before:
    """The plain attributes of a module before its step is traced.

    Args:
        module: The copy of the module that the step runs on; its containers are the caller's own.
    """

    def __init__(self, module: nnx.Module) -> None:
        self._attributes = {name: as_held(value) for name, value in each_attribute(module, of=nnx.Pytree)}

    def check(self, module: nnx.Module, step: str) -> None:
        """Refuse a step that changed one, after the containers are as they were.

        Args:
            module: The module that the step ran on.
            step: The step's name.

        Raises:
            StateError: Naming the attribute.
        """
        for name, value in each_attribute(module, of=nnx.Pytree):
            if name in self._attributes and same_value(self._attributes[name], as_held(value)):
                continue
            for held in self._attributes.values():
                _restore(held)
            raise StateError(
                f"{step} changed the attribute {name}. A step is traced once, so the change would happen once and be "
                "lost: make it an nnx.Variable, return it as an output, or log it with self.log."
            )


def _restore(value: Any) -> None:
    if not isinstance(value, Held):
        return
    container, items = value.container, [x.container if isinstance(x, Held) else x for x in value.items]
    if isinstance(container, list):
        container[:] = items
    elif isinstance(container, dict):
        container.clear()
        container.update(zip(items[::2], items[1::2], strict=True))
    elif isinstance(container, (set, deque)):
        container.clear()
        container.update(items) if isinstance(container, set) else container.extend(items)
    for x in value.items:
        _restore(x)
