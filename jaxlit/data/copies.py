"""Copies of batches whose memory someone else may fill again."""

from typing import Any

import jax
import numpy as np


def own(x: Any) -> Any:
    """Return a batch with copies of its arrays; what a host key holds need be no pytree."""
    if isinstance(x, np.ndarray):
        return np.array(x)
    if type(x) is dict:
        return {key: own(value) for key, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(map(own, x))
    if jax.tree_util.all_leaves([x]):
        # The tensor of another library, which numpy would look into.
        foreign = hasattr(x, "__array__") and not isinstance(x, (jax.Array, np.generic))
        return np.array(np.asarray(x)) if foreign else x
    return jax.tree.map(own, x)
