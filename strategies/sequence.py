"""Sequence parallel: the batch is split along its rows and along its sequences."""

from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxlit.core.pure_module import PureModule
from jaxlit.core.train_state import TrainState
from jaxlit.errors import ArgumentError
from jaxlit.strategies.base import Strategy


class SequenceParallel(Strategy):
    """Split the batch's rows over `data` and their second dim, the positions of a sequence, over `seq`.

    Activations follow: a device holds its part of each sequence only. Where positions meet, as keys and values in
    attention do, XLA gathers them, unless the model exchanges them itself (`jax.shard_map` and `jax.lax.ppermute`
    over `seq`). An array whose second dim does not divide is split by rows only. The state is replicated.

    Args:
        seq: Devices that share a sequence; -1 for all that are left.
        data: Parts of the rows.

    Raises:
        ArgumentError: The sizes do not multiply to the number of devices.

    Example:
        >>> import jaxlit as jl
        >>> strategy = jl.strategies.SequenceParallel(seq=4, data=-1)
    """

    def __init__(self, *, seq: int = -1, data: int = 1) -> None:
        self.use_mesh({"data": data, "seq": seq})

    def batch_spec(self, x: Any) -> P:
        """Return rows over `data`, and the second dim over `seq` if it divides."""
        split = x.ndim > 1 and x.shape[1] % self.mesh.shape["seq"] == 0
        return P("data", "seq") if split else super().batch_spec(x)

    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return the replicated sharding for every leaf.

        Raises:
            ArgumentError: No second dim of the batch divides by `seq`.
        """
        seq, leaves = self.mesh.shape["seq"], jax.tree.leaves(example)
        if leaves and not any(x.ndim > 1 and x.shape[1] % seq == 0 for x in leaves):
            raise ArgumentError(
                f"SequenceParallel splits the second dim of a batch over {seq} devices, and none divides: "
                f"{[x.shape for x in leaves]}. Pad the sequences, or choose another seq."
            )
        return jax.tree.map(lambda _: self.replicated, state)
