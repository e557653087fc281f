"""Histograms, computed on the device, also inside a step, or on the host."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BINS = 64


def histogram(x: jax.Array, bins: int = BINS) -> jax.Array:
    """Count the finite entries of an array in bins of equal width, as `numpy.histogram` does; may be traced.

    Args:
        x: Numbers of any shape, however sharded: only the counts leave a device.
        bins: How many bins.

    Returns:
        (2 + bins,) float32: the lowest and the highest edge, and the counts. Counts above 2**24 are rounded.
    """
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x)
    some = finite.any()
    low = jnp.where(some, jnp.min(x, where=finite, initial=jnp.inf), 0.0)
    high = jnp.where(some, jnp.max(x, where=finite, initial=-jnp.inf), 0.0)
    half = jnp.where(low == high, jnp.maximum(0.5, jnp.abs(low) * 2.0**-20), 0.0)
    low, high = low - half, high + half
    # Parts, whose difference does not overflow, nor underflows its reciprocal, by which XLA multiplies. The last bin
    # includes its upper edge. Not reshaped: a sharded array would be gathered for it.
    at = jnp.clip(((x / 16 - low / 16) / (high / 16 - low / 16) * bins).astype(jnp.int32), 0, bins - 1)
    counts = jnp.zeros(bins, jnp.int32).at[jnp.where(finite, at, bins)].add(1, mode="drop")
    return jnp.concatenate([jnp.stack([low, high]), counts.astype(jnp.float32)])


def count(values: Any, bins: int = BINS) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts and the edges of a histogram of the finite entries, on the host.

    Args:
        values: Numbers of any shape.
        bins: How many bins.

    Returns:
        (bins,) int64 and (bins + 1,) float64.
    """
    values = np.asarray(values, np.float64)
    return np.histogram(values[np.isfinite(values)], bins)


def unpack(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts and the edges of what `histogram` returned."""
    return packed[2:].astype(np.int64), np.linspace(float(packed[0]), float(packed[1]), len(packed) - 1)
