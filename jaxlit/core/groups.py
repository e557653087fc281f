"""Groups of a module's parameters: by their paths, or by nnx filters."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from flax import nnx

from jaxlit.errors import ArgumentError, did_you_mean
from jaxlit.leaf_names import leaf_name


def label_of(key: Any) -> str:
    """Return what a group is called, in rows and in the optimizer's state."""
    if isinstance(key, nnx.PathContains):
        return str(key.key)
    if isinstance(key, type):
        return key.__name__
    return key if isinstance(key, str) else "rest" if key is ... else " ".join(str(key).split())


def groups_of(module: nnx.Module, wrt: Any, keys: Sequence[Any]) -> dict[str, str]:
    """Return the group of each trained parameter, by its name: the first that it fits.

    Args:
        module: The module.
        wrt: The nnx filter of what is trained.
        keys: The groups: paths, patterns of paths, or nnx filters.

    Raises:
        ArgumentError: A group has no parameter, or a parameter no group.
    """
    flat = list(nnx.to_flat_state(nnx.state(module, wrt)))
    fits = [_fits(key) for key in keys]
    found = {path: next((k for k, fit in enumerate(fits) if fit(path, x)), None) for path, x in flat}
    paths = ["/".join(map(str, path)) for path, _ in flat]
    for k, key in enumerate(keys):
        if k not in found.values():
            taken = next((found[path] for path, x in flat if fits[k](path, x)), None)
            inner = sorted({"/".join(map(str, path[:n])) for path, _ in flat for n in range(1, len(path))})
            why = (
                f"has nothing left: {_shown(keys[taken])} comes first and fits all of it. Put it before that"
                if taken is not None
                else f"fits no trained parameter.{did_you_mean(str(key), [*inner, *paths])} There are "
                f"{_several(inner or paths)}"
            )
            raise ArgumentError(f"jl.Optimizer(by=...): {_shown(key)} {why}.")
    if left := [name for name, group in zip(paths, found.values(), strict=True) if group is None]:
        raise ArgumentError(
            f"jl.Optimizer(by=...) has no group for {_several(left)}. Add one, `...: optax.adam(1e-3)` for all that is "
            "left, or leave them out of wrt=."
        )
    # In the order of the groups, in which their rates stand in a row.
    return {leaf_name(path): label_of(key) for k, key in enumerate(keys) for path, at in found.items() if at == k}


def _fits(key: Any) -> Any:
    """Return a function of a Variable's (path, Variable) to whether it is in a group."""
    if not isinstance(key, str):
        return nnx.filterlib.to_predicate(key)

    def fits(path: tuple[Any, ...], x: Any) -> bool:
        begins = [path[: n + 1] for n in range(len(path))]
        return any(fnmatchcase("/".join(map(str, part)), key) or leaf_name(part) == key for part in begins)

    return fits


def _shown(key: Any) -> str:
    return "..." if key is ... else repr(key)


def _several(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + f" and {len(names) - 5} more" * (len(names) > 5)
