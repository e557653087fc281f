"""How the leaves of a pytree are called."""

from typing import Any

import jax
import jax.numpy as jnp


def is_key(x: Any) -> bool:
    """Return whether `x` is a typed PRNG key array, concrete or abstract."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the (name, leaf) of each leaf of a pytree, named as a user writes it."""
    return [(leaf_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def leaf_name(path: tuple[Any, ...]) -> str:
    """Return a pytree path as a user writes it: `net.layers[0].kernel`."""
    name = ""
    for entry in path:
        key = getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", entry)))
        if isinstance(key, int) or set(".[]") & set(str(key)):  # such a name would read like several
            name += f"[{key!r}]"
        else:
            name += f".{key}" if name else str(key)
    return name
