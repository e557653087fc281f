"""Data parallel: every device holds the entire state and a share of the rows."""

from collections.abc import Mapping
from typing import Literal

from jax.sharding import Mesh

from jaxlit import checks as check
from jaxlit.strategies.base import AXIS_TYPES, Strategy


class DDP(Strategy):
    """Keep a full copy of the state on every device and split the batch.

    The step sees the global batch, so the numbers are those of `single`, also for losses and BatchNorm, which couple
    rows. XLA averages the gradients.

    Args:
        mesh: A mesh of the user's, or the sizes of its axes: the batch is split over its axis `data`, or its single
            axis, and the state is replicated. Its axes keep their types.
        axis_types: "explicit" makes all axes Explicit, as for a model with `out_sharding=` and `jax.sharding.reshard`.

    Raises:
        ArgumentError: The mesh has several axes and none named `data`.
        ArgumentTypeError: `mesh` is not a mesh or a mapping.

    Example:
        >>> import jax, jaxlit as jl
        >>> trainer = jl.Trainer(strategy="ddp", max_epochs=1, logger=False)
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> trainer = jl.Trainer(strategy=jl.strategies.DDP(mesh=mesh), max_epochs=1, logger=False)
    """

    def __init__(
        self, *, mesh: Mesh | Mapping[str, int] | None = None, axis_types: Literal["auto", "explicit"] = "auto"
    ) -> None:
        self.axis_types = check.one_of("axis_types", axis_types, AXIS_TYPES, owner=type(self).__name__)
        self.use_mesh(mesh)
