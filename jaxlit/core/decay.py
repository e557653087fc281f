"""Which parameters decay."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxlit.leaf_names import keys_of

_NEVER = ("bias", "scale")  # as flax calls what shifts and what normalizes; a bias of attention is a matrix
_VALUE = ("value", "raw_value")  # of a Variable


def decay_mask(params: Any) -> Any:
    """Return which parameters a weight decay should change: matrices and larger, but no biases, norms and embeddings.

    It is a `mask=` of optax, for every optimizer that decays weights. What is left out has fewer than two dims, is
    called `bias` or `scale`, or has `embed` in its name or `emb` at its end, as `nnx.Embed`'s `embedding` and a
    `pos_emb`.

    Args:
        params: The parameters, a pytree of arrays or of nnx Variables.

    Returns:
        A pytree like them, of bools.

    Example:
        >>> import jaxlit as jl, optax
        >>> tx = optax.adamw(1e-3, weight_decay=0.1, mask=jl.decay_mask)
    """
    return jax.tree.map_with_path(lambda path, x: jnp.ndim(x) > 1 and _may_decay(path), params)


def _may_decay(path: tuple[Any, ...]) -> bool:
    names = [key for key in map(str, keys_of(path)) if not key.isdigit()]  # of a list of arrays, the list's name
    names = names[:-1] if len(names) > 1 and names[-1] in _VALUE else names
    name = names[-1].lower() if names else ""
    return name not in _NEVER and "embed" not in name and not name.endswith("emb")
