"""The plain attributes of a module, which no compiled step changes, and what they contained before."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from typing import Any

import jax
from flax import nnx

from jaxlit.errors import StateError
from jaxlit.leaf_names import leaf_name

# What train() and eval() set: a step may switch a part of its module.
MODES = {"deterministic", "use_running_average", "decode"}
CONTAINERS = (list, tuple, set, dict, deque)
_COPIED = (*CONTAINERS, OrderedDict, defaultdict)
# The attributes of its own that nnx adds to a module, and to an `nnx.List`.
_OF_NNX = frozenset(vars(nnx.Module()))
_OF_NNX_LIST = frozenset(vars(nnx.List([])))


def each_attribute(module: nnx.Module, *, of: type = object) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each plain attribute of a module, its sub-modules and objects that they hold.

    Args:
        module: The module.
        of: Only those of objects of this type.

    Yields:
        The path of the attribute, the dict that contains it, and its name there.
    """
    for path, node in list(nnx.iter_graph(module)):
        if isinstance(node, nnx.Variable) or not (isinstance(node, of) and hasattr(node, "__dict__")):
            continue
        if not _OF_NNX.isdisjoint(path):
            continue
        for name, value in list(vars(node).items()):
            is_book = name in MODES or name in _OF_NNX
            if not (is_book or isinstance(value, (nnx.Variable, nnx.Pytree))):
                yield leaf_name((*path, name)), vars(node), name


def list_changes(before: nnx.Module, after: nnx.Module) -> str:
    """Return the attributes that were added, removed and set between two states of a module, outermost ones alone."""
    old, new, verbs = _structure(before), _structure(after), dict[str, str]()
    for name in sorted(old | new):
        if name not in old or name not in new:
            verbs[name] = "removed" if name in old else "added"
        elif not same(old[name], new[name]):
            verbs[name] = "set"
    outer = [x for x in verbs if not any(x.startswith((f"{y}.", f"{y}[")) for y in verbs)]
    return ", ".join(f"{verbs[name]} {name}" for name in outer)


def _structure(module: nnx.Module) -> dict[str, Any]:
    """Return each attribute of a module and its parts by path: its value, or its type where it contains arrays."""
    found = dict[str, Any]()
    for path, node in nnx.iter_graph(module):
        for name, value in vars(node).items() if isinstance(node, nnx.Pytree) else ():
            if name not in (_OF_NNX_LIST if isinstance(node, nnx.List) else _OF_NNX):
                key = int(name) if isinstance(node, nnx.List) else name
                is_array = hasattr(value, "shape") and not isinstance(value, (nnx.Variable, nnx.Pytree))
                kind = jax.Array if is_array else type(value) if nnx.has_data(value) else value
                found[leaf_name((*path, key))] = kind
    return found


class ArrayAttribute:
    """An array that a module holds without a Variable, read and set like one.

    Args:
        owner: The module, or a part or dict of it.
        name: The attribute's name, its index in an `nnx.List`, or its key.
    """

    def __init__(self, owner: nnx.Pytree | dict[Any, Any], name: Any) -> None:
        self._attributes, self._name = (owner, name) if isinstance(owner, dict) else (vars(owner), str(name))

    def get_raw_value(self) -> Any:
        """Return the array."""
        return self._attributes[self._name]

    def set_raw_value(self, array: Any) -> None:
        """Put another array in its place."""
        self._attributes[self._name] = array  # not by setattr, which asks the Trainer whether it may


def copied(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Return a value with copies of the containers in it, and everything else as it is."""
    # Each once, as containers may refer to each other.
    seen = {} if seen is None else seen
    if type(value) not in _COPIED:
        return value
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, tuple):
        return tuple(copied(x, seen) for x in value)
    copy = seen[id(value)] = value.copy()
    if not isinstance(value, set):
        for key, x in value.items() if isinstance(value, dict) else enumerate(value):
            copy[key] = copied(x, seen)
    return copy


def same(a: Any, b: Any, seen: set[tuple[int, int]] | None = None) -> bool:
    """Return whether two values are the same: numbers and text if equal, containers if the same is in them."""
    seen = set() if seen is None else seen
    if a is b or (id(a), id(b)) in seen:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (bool, int, float, str, bytes)):
        return a == b
    if type(a) not in _COPIED or len(a) != len(b):
        return False
    seen.add((id(a), id(b)))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key], seen) for key in a)
    return a == b if isinstance(a, set) else all(same(x, y, seen) for x, y in zip(a, b, strict=True))


class AttributesOfStep:
    """Refuses what a step writes to the plain attributes of its module.

    Args:
        module: The copy of the module that the step runs on. Containers are copied as well, so that a traced value
            that the step appends is not left in the user's module.
    """

    def __init__(self, module: nnx.Module) -> None:
        self._before, seen = dict[str, Any](), dict[int, Any]()
        for path, attributes, name in each_attribute(module, of=nnx.Pytree):
            self._before[path] = attributes[name]
            attributes[name] = copied(attributes[name], seen)

    def check(self, module: nnx.Module, step: str) -> None:
        """Refuse a step that has changed one.

        Args:
            module: The module that the step ran on.
            step: The step's name.

        Raises:
            StateError: Naming the attribute.
        """
        for path, attributes, name in each_attribute(module, of=nnx.Pytree):
            if path not in self._before or not same(self._before[path], attributes[name]):
                raise StateError(
                    f"{step} changed the attribute {path}. A step is traced once, so the change would happen once and "
                    "be lost: make it an nnx.Variable, return it as an output, or log it with self.log."
                )
