"""Shardings of arrays that belong to parameters."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from jaxlit.leaf_names import keys_of


def like_params(state: Any, params: Any, shardings: Any, default: NamedSharding) -> Any:
    """Give each leaf of a state the sharding of the parameter that it belongs to.

    A leaf belongs to the parameter whose path is the end of its own and whose shape it has. This holds
    for optimizers that mask, partition or factor as well, where optax's own map over parameters fails.

    Args:
        state: A state of an optimizer or a callback, or the training state, of `jax.ShapeDtypeStruct`s.
        params: The parameters, of `jax.ShapeDtypeStruct`s.
        shardings: The parameters' shardings.
        default: The sharding of the other leaves.

    Returns:
        The tree of `state`, of shardings.

    Example:
        >>> import jax, jaxlit as jl, optax
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh = jl.sharding.mesh({"data": -1})
        >>> split, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        >>> params = {"w": jax.ShapeDtypeStruct((64, 2), "float32")}
        >>> state = jax.eval_shape(optax.adam(1e-3).init, params)
        >>> adam, _ = jl.strategies.like_params(state, params, {"w": split}, replicated)
        >>> adam.mu["w"] == split, adam.count == replicated
        (True, True)
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
    return tuple(map(str, keys_of(path)))
