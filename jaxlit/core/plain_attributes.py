"""The plain attributes of a module, and what they hold at one time, to compare with another."""

from collections import deque
from typing import Any, NamedTuple

from flax import nnx

from jaxlit.leaf_names import leaf_name

# What train() and eval() set: a step may switch a part of its module.
MODES = {"deterministic", "use_running_average", "decode"}


CONTAINERS = (list, tuple, set, dict, deque)
_DEEPEST = 30  # containers within containers
_MOST = 10_000  # containers in one


class Held(NamedTuple):
    """A container, and what it holds: it is the caller's own, which a step could write to."""

    container: Any
    items: list[Any]  # themselves held; of a dict keys and values in turn


def attributes_of(module: nnx.Module) -> dict[str, Any]:
    """Return each plain attribute of a module and its sub-modules, by path; containers by what they hold."""
    return {name: as_held(value) for name, value in each_attribute(module)}


def as_held(value: Any) -> Any:
    """Return a value as it is now, to compare with later: a container by what it holds."""
    return _held(value, set())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two dicts of attributes hold the same."""
    return one.keys() == other.keys() and all(same_value(value, other[name]) for name, value in one.items())


def same_value(a: Any, b: Any) -> bool:
    """Return whether two values, as `as_held` returns them, are the same: by identity, but for plain ones."""
    if isinstance(a, Held) and isinstance(b, Held):
        same_kind = type(a.container) is type(b.container) and len(a.items) == len(b.items)
        return same_kind and all(same_value(x, y) for x, y in zip(a.items, b.items, strict=True))
    if a is b:
        return True
    if isinstance(a, (bool, int, float, str, bytes)):
        return type(a) is type(b) and a == b
    return False


def each_attribute(module: nnx.Module, *, of: type = object) -> list[tuple[str, Any]]:
    """Return each plain attribute of a module, its sub-modules and objects that they hold, by path.

    Args:
        module: The module.
        of: Only those of objects of this type.
    """
    found = []
    for path, node in nnx.iter_graph(module):
        # nnx keeps its own books as attributes too.
        if (
            isinstance(node, nnx.Variable)
            or not hasattr(node, "__dict__")
            or _is_book(path)
            or not isinstance(node, of)
        ):
            continue
        for name, value in vars(node).items():
            if name not in MODES and not _is_book((name,)) and not isinstance(value, (nnx.Variable, nnx.Pytree)):
                found.append((leaf_name((*path, name)), value))
    return found


def _is_book(path: tuple[Any, ...]) -> bool:
    return any(str(part).startswith("_pytree__") for part in path)


def _held(value: Any, seen: set[int], depth: int = 0) -> Any:
    # Each once, wherever it is met first: containers that refer to each other have paths without number.
    if id(value) in seen or depth > _DEEPEST or len(seen) > _MOST:
        return value
    if isinstance(value, dict):
        items = [x for pair in value.items() for x in pair]
    elif isinstance(value, CONTAINERS):
        items = list(value)
    else:
        return value
    seen.add(id(value))
    return Held(value, [_held(x, seen, depth + 1) for x in items])
