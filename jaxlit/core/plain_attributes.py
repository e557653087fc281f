"""Changes that a traced step makes to a module's plain attributes, which no compiled step repeats."""

from typing import Any, NamedTuple

from flax import nnx

from jaxlit.errors import StateError
from jaxlit.leaf_names import leaf_name

# What train() and eval() set: a step may switch a part of its module.
MODES = {"deterministic", "use_running_average", "decode"}


class _Held(NamedTuple):
    """A container and what it holds: it is the caller's own, which a step could write to."""

    container: Any
    items: list[Any]  # themselves held


def attributes_of(module: nnx.Module) -> dict[str, Any]:
    """Return each plain attribute of a module and its sub-modules, by path; containers by what they hold."""
    return {name: as_held(value) for name, value in _attributes(module)}


def as_held(value: Any) -> Any:
    """Return a value as it is now, to compare with later: a container by what it holds."""
    return _held(value, set())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Tell whether two dicts of attributes hold the same."""
    return one.keys() == other.keys() and all(same_value(value, other[name]) for name, value in one.items())


def same_value(a: Any, b: Any) -> bool:
    """Tell whether two values, as `as_held` returns them, are the same: by identity, but for plain ones."""
    if isinstance(a, _Held) and isinstance(b, _Held):
        same_kind = type(a.container) is type(b.container) and len(a.items) == len(b.items)
        return same_kind and all(same_value(x, y) for x, y in zip(a.items, b.items, strict=True))
    if a is b:
        return True
    if isinstance(a, (bool, int, float, str, bytes)):
        return type(a) is type(b) and a == b
    return False


def check_unchanged(before: dict[str, Any], module: nnx.Module, step: str) -> None:
    """Refuse a step that set plain attributes; what it put into containers is taken out again.

    Raises:
        StateError: Naming the attribute.
    """
    for name, value in _attributes(module):
        if name in before and same_value(before[name], as_held(value)):
            continue
        for held in before.values():
            _restore(held)
        raise StateError(
            f"{step} changed the attribute {name}. A step is traced once, so the change would happen once and be lost: "
            "make it an nnx.Variable, return it as an output, or log it with self.log."
        )


def _attributes(module: nnx.Module) -> list[tuple[str, Any]]:
    found = []
    for path, node in nnx.iter_graph(module):
        # nnx keeps its own books as attributes too.
        if isinstance(node, nnx.Variable) or not hasattr(node, "__dict__") or _is_book(path):
            continue
        for name, value in vars(node).items():
            if name not in MODES and not _is_book((name,)) and not isinstance(value, (nnx.Variable, nnx.Pytree)):
                found.append((leaf_name((*path, name)), value))
    return found


def _is_book(path: tuple[Any, ...]) -> bool:
    return any(str(part).startswith("_pytree__") for part in path)


def _held(value: Any, seen: set[int]) -> Any:
    if not isinstance(value, (list, tuple, set, dict)) or id(value) in seen:
        return value
    seen = seen | {id(value)}
    items = [x for pair in value.items() for x in pair] if isinstance(value, dict) else list(value)
    return _Held(value, [_held(x, seen) for x in items])


def _restore(held: Any) -> None:
    if not isinstance(held, _Held):
        return
    container = held.container
    items = [x.container if isinstance(x, _Held) else x for x in held.items]
    if isinstance(container, list):
        container[:] = items
    elif isinstance(container, dict):
        container.clear()
        container.update(zip(items[::2], items[1::2], strict=True))
    elif isinstance(container, set):
        container.clear()
        container.update(items)
    for x in held.items:
        _restore(x)
