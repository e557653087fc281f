"""What a training leaves, and how two of them are compared."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flax import nnx
from kit.by_hand import params_of, state_of


@dataclass
class Record:
    losses: list[float] = field(default_factory=list)  # of each batch
    # The logged loss of each optimizer step, of all rows of its window, by fit and step.
    steps: dict[tuple[int, int], float] = field(default_factory=dict)
    epochs: dict[tuple[int, int], dict[str, float]] = field(default_factory=dict)  # metrics, by fit and epoch
    validations: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # metrics, and the steps before
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # of the network by path; keys as their data
    params: set[str] = field(default_factory=set)  # the paths of the parameters
    modes: dict[str, bool] = field(default_factory=dict)  # whether a part trains or evaluates, by path

    def take(self, net: nnx.Module) -> None:
        self.arrays, self.params = state_of(net), {*params_of(net)}
        self.modes = {
            f"{'/'.join(map(str, path))}.{name}": getattr(node, name)
            for path, node in nnx.iter_graph(net)
            for name in ("deterministic", "use_running_average")
            if isinstance(node, nnx.Module) and hasattr(node, name)
        }

    def drawn(self) -> "Record":
        """Return what does not follow from random numbers themselves: ints, and with them keys and modes."""
        whole = {path: x for path, x in self.arrays.items() if not np.issubdtype(x.dtype, np.floating)}
        return Record(arrays=whole, modes=self.modes)

    def named(self) -> dict[str, tuple[Any, float]]:
        """Return all by name, each with the magnitude of what its rounding errors come from."""
        # An array whose true value is zero holds rounding noise of the size of the others.
        largest = max((np.abs(self.arrays[path]).max(initial=0.0) for path in self.params), default=1.0)
        result: dict[str, tuple[Any, float]] = {"losses": (self.losses, 0.0), "steps": ([*self.steps.values()], 0.0)}
        for path, x in self.arrays.items():
            result |= {f"parameter {path}": (x, largest)} if path in self.params else {f"state {path}": (x, 1.0)}
        validations = {(i, step): metrics for i, (step, metrics) in enumerate(self.validations)}
        for kind, table in (("epoch", self.epochs), ("validation", validations)):
            result |= {f"{kind} {at} {name}": (x, 0.0) for at, metrics in table.items() for name, x in metrics.items()}
        return result | {f"mode {path}": (mode, 0.0) for path, mode in self.modes.items()}


def assert_same(expected: Record, result: Record, tolerance: float) -> None:
    """Compare all, relative to the largest magnitude around it; ints, keys and modes exactly."""
    left, right = expected.named(), result.named()
    assert left.keys() == right.keys()
    for name, (x, magnitude) in left.items():
        x, y = np.asarray(x), np.asarray(right[name][0])
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        if np.issubdtype(x.dtype, np.floating):
            atol = tolerance * max(np.abs(x.astype(np.float64)).max(initial=0.0), magnitude, 1e-30)
            np.testing.assert_allclose(y, x, rtol=0, atol=atol, equal_nan=False, err_msg=name)
        else:
            np.testing.assert_array_equal(y, x, err_msg=name)
