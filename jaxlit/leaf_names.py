"""How the leaves of a pytree are called."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def is_key(x: Any) -> bool:
    """Return whether `x` is a typed PRNG key array, concrete or abstract."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the (name, leaf) of each leaf of a pytree, named as a user writes it."""
    return [(leaf_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]


def keys_of(path: Sequence[Any]) -> list[Any]:
    """Return the names and indices in a pytree path."""
    return [getattr(x, "key", getattr(x, "name", getattr(x, "idx", x))) for x in path]


def leaf_name(path: Sequence[Any]) -> str:
    """Return a pytree path as a user writes it: `net.layers[0].kernel`."""
    name = ""
    for part in path:
        key = getattr(part, "key", getattr(part, "name", getattr(part, "idx", part)))
        if isinstance(key, int) or set(".[]") & set(str(key)):  # such a name would read like several
            name += f"[{key!r}]"
        else:
            name += f".{key}" if name else str(key)
    return name
