"""What a training leaves to be compared."""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from flax import nnx


@dataclass
class Record:
    """What one training gave.

    Attributes:
        losses: The loss of each batch.
        steps: The logged loss of each optimizer step, of all rows of its window, by fit and step.
        epochs: The metrics of each epoch, by fit and epoch.
        validations: The metrics of each validation, and the optimizer steps before it.
        params: Parameters by path.
        state: Other state by path; keys as their data.
        modes: Whether a part trains or evaluates, by path.
    """

    losses: list[float] = field(default_factory=list)
    steps: dict[tuple[int, int], float] = field(default_factory=dict)
    epochs: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)
    validations: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    params: dict[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    modes: dict[str, bool] = field(default_factory=dict)

    def take(self, net: nnx.Module) -> None:
        """Keep what the network holds."""
        params, rest = nnx.split(net, nnx.Param, ...)[1:]
        self.params, self.state = _by_path(params), _by_path(rest)
        self.modes = {
            f"{'/'.join(map(str, path))}.{name}": getattr(node, name)
            for path, node in nnx.iter_graph(net)
            for name in ("deterministic", "use_running_average")
            if isinstance(node, nnx.Module) and hasattr(node, name)
        }


def _by_path(state: Any) -> dict[str, np.ndarray]:
    result = {}
    for path, x in jax.tree_util.tree_leaves_with_path(nnx.as_pure(state)):
        key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        result[jax.tree_util.keystr(path)] = np.asarray(jax.random.key_data(x) if key else x)
    return result
