"""Data parallel training of n replicas on one device, to see what n devices would compute."""

from collections.abc import Callable
from typing import Any, Literal

import jax

from jaxlit import checks as check
from jaxlit.core.replica import Replica
from jaxlit.errors import ArgumentError
from jaxlit.strategies.base import EACH, ROWS, ArraySpec, Program, named
from jaxlit.strategies.replicas import PerReplica


class Simulated(PerReplica):
    """Compute on one device what `shard_map` computes on `replicas`.

    The replicas are a vmapped dim with an axis name, so the same collectives run between them.

    Args:
        replicas: How many; None takes the Trainer's `devices`, which may exceed the real ones here.
        sync_batchnorm: BatchNorm takes its statistics over all replicas, as on one device.
        loss_reduction: What the loss is over the rows, "mean" or "sum".

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy="simulate:8", max_epochs=1, logger=False)
    """

    several_processes = False
    takes_mesh = False

    def __init__(
        self,
        replicas: int | None = None,
        *,
        sync_batchnorm: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm, loss_reduction=loss_reduction)
        self.replicas = check.integer("replicas", replicas, low=1, also=(None,), owner="Simulated")

    def setup(self, devices: int | None = None) -> None:
        """Take the first device, and the number of replicas; refuse two different numbers."""
        if self.replicas is not None and devices not in (None, self.replicas):
            raise ArgumentError(
                f"Trainer(strategy='simulate:{self.replicas}', devices={devices}) names two numbers of replicas. "
                "Leave devices out."
            )
        self._count = self.replicas or devices or jax.device_count()
        super().setup(1)

    @property
    def num_replicas(self) -> int:
        """How many replicas are simulated."""
        return self._count

    def place(self, batch: Any, *, replicated: bool) -> Any:
        """Return the batch as it is, for the one device."""
        return batch

    def map(self, program: Program, replica: Replica) -> Callable[..., Any]:
        """Return the program under jit and vmap."""
        axes = tuple([0 if spec.per_replica else None for spec in state] for state in program.inputs)
        n = self.num_replicas

        def call(*args: Any) -> Any:
            *states, batch = args
            body = self.on_replica(program, replica, *self.local(program, replica, states, batch))
            if replica.splits:
                batch = jax.tree.map(lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]) if x.ndim else x, batch)
            rows = jax.tree.map(lambda x: 0 if replica.splits and x.ndim else None, batch)
            mapped = jax.vmap(body, in_axes=(*axes, rows), axis_name=self.axis, axis_size=n)

            def join(layout: Any, x: Any) -> Any:  # `layout` may be that of an entire tree
                if layout is ROWS and replica.splits:
                    return x.reshape(-1, *x.shape[2:])
                per_replica = layout.per_replica if isinstance(layout, ArraySpec) else layout is EACH
                # A value that is the same on every replica is taken from the first, as on devices.
                return x if per_replica else jax.tree.map(lambda leaf: leaf[0], x)

            return jax.tree.map(join, program.outputs, mapped(*states, batch))

        return jax.jit(named(program.name, call), donate_argnums=program.donate)

    def describe(self) -> str:
        """Return one line for people."""
        return f"Simulated: {self.num_replicas} replicas on one device"
