"""The difference between two trainings."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxlit.testing.training import Training

PARTS = ("loss", "metrics", "grads", "params")

RTOL = {"32-true": 1e-5, "bf16-mixed": 2e-2, "16-mixed": 2.5e-3}
"""How far trainings may differ, by precision.

Strategies add up rows in different orders, and round differently: in float32 by 2**-24 each time, so that 1e-5 allows
170 roundings. The tolerances of the 16-bit floats allow five roundings, of 2**-8 and of 2**-11; a gradient that misses
one of eight replicas is off by an eighth.
"""


def assert_close(parts: Sequence[str], a: Training, b: Training, rtol: float) -> float:
    """Assert that two trainings agree; returns their largest difference, relative to the largest magnitude.

    Args:
        parts: Which of "loss", "metrics", "grads", "params".
        a: The reference.
        b: The other.
        rtol: The most that they may differ.

    Raises:
        AssertionError: They differ by more, or in an integer; it names them, the part and the difference.
    """
    return max((_assert_part_close(part, a, b, rtol) for part in parts), default=0.0)


def _assert_part_close(part: str, a: Training, b: Training, rtol: float) -> float:
    left, right = _arrays(part, a), _arrays(part, b)
    what = "the gradient of the first step under " if part == "grads" else ""
    assert left.keys() == right.keys(), f"{part}: {a.name} has {sorted(left)}, {b.name} has {sorted(right)}"
    sizes = {name: np.abs(x).max(initial=0.0) for name, x in left.items() if np.issubdtype(x.dtype, np.inexact)}
    # An array whose true value is zero holds rounding noise of the size of the others; counts and keys have none.
    floor, largest = max(sizes.values(), default=0.0) if part in ("grads", "params") else 0.0, 0.0
    for name, x in left.items():
        y = right[name]
        assert x.shape == y.shape, f"{part} {name}: {a.name} has shape {x.shape}, {b.name} has {y.shape}"
        if name not in sizes:
            assert (x == y).all(), f"{part} {name}: {a.name} has {x}, {b.name} has {y}"
            continue
        scale, worst = max(sizes[name], floor), np.abs(x - y).max(initial=0.0)
        assert worst <= rtol * scale, (
            f"{part} {name}: {what}{a.name} and {b.name} differ by {worst:.3g} where the largest value is "
            f"{sizes[name]:.3g} (rtol={rtol})"
        )
        largest = max(largest, float(worst / scale) if worst else 0.0)
    return largest


def _arrays(part: str, training: Training) -> dict[str, Any]:
    value = getattr(training, part)
    if part == "loss":
        return {"loss": np.array(value)}
    if part == "metrics":
        names = sorted({k for row in value for k in row})
        return {k: np.array([row[k] for row in value if k in row]) for k in names}
    return value
