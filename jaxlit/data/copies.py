"""Copies of batches whose memory their loader may fill again."""

from typing import Any

import jax
import numpy as np


def copied(x: Any) -> Any:
    """Return a batch with copies of its arrays; the value of a host key need not be a pytree."""
    if isinstance(x, np.ndarray):
        return np.array(x)
    if type(x) is dict:
        return {key: copied(value) for key, value in x.items()}
    if type(x) in (list, tuple):
        return type(x)(map(copied, x))
    if jax.tree_util.all_leaves([x]):
        # The tensor of another library, whose memory numpy would share.
        foreign = hasattr(x, "__array__") and not isinstance(x, (jax.Array, np.generic))
        return np.array(np.asarray(x)) if foreign else x
    return jax.tree.map(copied, x)
