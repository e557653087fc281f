"""Sequence parallel: the batch is split along its rows and along its sequences."""

from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec as P

from jaxlit import checks as check
from jaxlit.core.pure_module import PureModule
from jaxlit.core.train_state import TrainState
from jaxlit.errors import ArgumentError
from jaxlit.strategies.base import AXIS_TYPES, Strategy


class SequenceParallel(Strategy):
    """Split the batch's rows over `data` and their second dim, the positions of a sequence, over `seq`.

    Activations follow: a device holds its part of each sequence only. If an operation needs all positions, as attention
    needs keys and values, XLA gathers them, unless the model exchanges them itself (`jax.shard_map` and
    `jax.lax.ppermute` over `seq`). An array whose second dim does not divide is split by rows only. The state is
    replicated.

    Args:
        seq: Devices that share a sequence; -1 for all other devices.
        data: Parts of the rows.
        axis_types: See `DDP`.

    Raises:
        ArgumentError: The sizes do not multiply to the number of devices.

    Example:
        >>> import jaxlit as jl
        >>> strategy = jl.strategies.SequenceParallel(seq=4, data=-1)
    """

    def __init__(self, *, seq: int = -1, data: int = 1, axis_types: Literal["auto", "explicit"] = "auto") -> None:
        self.axis_types = check.one_of("axis_types", axis_types, AXIS_TYPES, owner=type(self).__name__)
        self.seq, self.data = seq, data
        self.use_mesh({"data": data, "seq": seq})

    def batch_spec(self, x: Any) -> P:
        """Return rows over `data`, and the second dim over `seq` if it divides."""
        return P("data", "seq") if self._divides(x) else super().batch_spec(x)

    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return the replicated sharding for every leaf; refuse a batch without a second dim that divides by `seq`."""
        leaves = jax.tree.leaves(example)
        if leaves and not any(map(self._divides, leaves)):
            raise ArgumentError(
                f"SequenceParallel splits the second dim of a batch over {self.mesh.shape['seq']} devices, and none "
                f"divides: {[x.shape for x in leaves]}. Pad the sequences, or choose another seq."
            )
        return super().state_sharding(state, model, example)

    def _divides(self, x: Any) -> bool:
        return x.ndim > 1 and x.shape[1] % self.mesh.shape["seq"] == 0
