"""How arrays that belong to parameters are split: as these are."""

from typing import Any

import jax
from jax.sharding import NamedSharding


def like_params(state: Any, params: Any, shardings: Any, default: NamedSharding) -> Any:
    """Give each leaf of an optimizer's or a callback's state the sharding of the parameter that it belongs to.

    A leaf belongs to the parameter whose path is the end of its own and whose shape it has. This holds
    for transforms that mask, partition or factor as well, where optax's own map over parameters fails.

    Args:
        state: The state, of `jax.ShapeDtypeStruct`s.
        params: The parameters, of `jax.ShapeDtypeStruct`s.
        shardings: The parameters' shardings.
        default: The sharding of the other leaves.
    """
    known = {
        _keys(path): (x.shape, sharding)
        for (path, x), sharding in zip(
            jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(shardings), strict=True
        )
    }

    def sharding_of(path: tuple[Any, ...], x: Any) -> NamedSharding:
        keys = _keys(path)
        for start in range(len(keys)):
            shape, sharding = known.get(keys[start:], (None, default))
            if shape == x.shape:
                return sharding
        return default

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path)
