"""Groups of a module's parameters: by their paths, or by nnx filters."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from flax import nnx

from jaxlit.errors import ArgumentError, did_you_mean
from jaxlit.leaf_names import leaf_name
from jaxlit.shown import shown


def labels_of(keys: Iterable[Any], kind: str = "group") -> list[str]:
    """Return what each group is called, in rows and in the optimizer's state.

    A checkpoint holds the labels, so they must be those of the next process. What python prints with an address is
    called by its number: `group1`, `group2`.

    Args:
        keys: The groups: paths, patterns of paths, or nnx filters.
        kind: What the groups are.
    """
    return [_label(key, f"{kind}{place}") for place, key in enumerate(keys, 1)]


def _label(key: Any, by_place: str) -> str:
    if isinstance(key, nnx.PathContains):
        return _label(key.key, by_place)
    if isinstance(key, type):
        return key.__name__
    if isinstance(key, str) or key is ...:
        return "rest" if key is ... else key
    text = getattr(key, "__qualname__", "").replace("<locals>.", "") or " ".join(str(key).split())
    return by_place if "<lambda>" in text or re.search(r" at 0x[0-9a-fA-F]", text) else text


def names_in(module: nnx.Module, wrt: Any, key: Any) -> list[str]:
    """Return the names of the trained parameters that are in a group.

    Args:
        module: The module.
        wrt: The nnx filter of what is trained.
        key: The group: a path, a pattern of paths, or an nnx filter.
    """
    fits = _fits(key)
    return [leaf_name(path) for path, x in nnx.to_flat_state(nnx.state(module, wrt)) if fits(path, x)]


def fits_none(module: nnx.Module, wrt: Any, key: Any) -> str:
    """Return what is said of a group without a parameter, see `names_in`: that it has none, and what there is."""
    paths = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(module, wrt))]
    inner = sorted({path[:i] for path in paths for i, letter in enumerate(path) if letter == "/"})
    hint = did_you_mean(key, [*inner, *paths]) if isinstance(key, str) else ""
    return f"fits no trained parameter of {type(module).__name__}.{hint} There are {_several(inner or paths)}"


def groups_of(module: nnx.Module, wrt: Any, keys: Sequence[Any]) -> dict[str, str]:
    """Return the group of each trained parameter, by its name: the first that it fits.

    Args:
        module: The module.
        wrt: The nnx filter of what is trained.
        keys: The groups: paths, patterns of paths, or nnx filters.

    Raises:
        ArgumentError: A group has no parameter, or a parameter no group.
    """
    left, group_of = names_in(module, wrt, ...), dict[str, str]()
    for key, label in zip(keys, labels_of(keys), strict=True):
        names = names_in(module, wrt, key)
        first = [name for name in names if name in left]
        if not first:
            why = "has nothing left: put it before those that fit it" if names else fits_none(module, wrt, key)
            raise ArgumentError(f"jl.Optimizer(by=...): {shown(key)} {why}.")
        group_of |= dict.fromkeys(first, label)  # in the order of the groups, in which a row has their rates
        left = [name for name in left if name not in group_of]
    if left:
        raise ArgumentError(
            f"jl.Optimizer(by=...) has no group for {_several(left)}. Add one, `...: optax.adam(1e-3)` for all that is "
            "left, or leave them out of wrt=."
        )
    return group_of


def _fits(key: Any) -> Any:
    """Return a function of a Variable's (path, Variable) to whether it is in a group."""
    if not isinstance(key, str):
        return nnx.filterlib.to_predicate(key)

    def fits(path: tuple[Any, ...], x: Any) -> bool:
        begins = [path[: n + 1] for n in range(len(path))]
        return any(fnmatchcase("/".join(map(str, part)), key) or leaf_name(part) == key for part in begins)

    return fits


def _several(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + f" and {len(names) - 5} more" * (len(names) > 5)
