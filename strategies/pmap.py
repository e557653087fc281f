"""Data parallel by jax.pmap."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import sharding
from jaxlit.core.replica import Replica
from jaxlit.strategies.base import ROWS, Program, named, state_shardings
from jaxlit.strategies.per_replica import PerReplica


class PMap(PerReplica):
    """Run the step body once on each device by `jax.pmap`; otherwise like `ShardMapDDP`.

    It trains in one process; in several, use `ShardMapDDP`. The state is stored once and replicated, never
    stacked, so other strategies can load it.

    Args:
        sync_batchnorm: BatchNorm takes its statistics over all replicas, as on one device.
        loss_reduction: What the loss is over the rows, "mean" or "sum".

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy="pmap", max_epochs=1, logger=False)
    """

    several_processes = False
    takes_mesh = False

    def place(self, batch: Any, *, replicated: bool) -> Any:
        """Place every leaf with a leading dim of replicas."""
        n, by_replica = self.num_replicas, NamedSharding(self.mesh, P(self.axis))

        def stack(x: Any) -> Any:
            is_copied = replicated or not x.ndim  # pmap refuses a call with nothing mapped
            shape = (n, *x.shape) if is_copied else (n, x.shape[0] // n, *x.shape[1:])
            if isinstance(x, jax.ShapeDtypeStruct):
                return x.update(shape=shape, sharding=by_replica)
            return np.broadcast_to(x, shape) if is_copied else np.asarray(x).reshape(shape)

        stacked = jax.tree.map(stack, batch)
        return stacked if sharding.is_abstract(batch) else jax.device_put(stacked, by_replica)

    def map(self, program: Program, replica: Replica) -> Callable[..., Any]:
        """Return the pmapped program."""
        axes = tuple([0 if spec.per_replica else None for spec in state] for state in program.inputs)

        def call(*args: Any) -> Any:
            *states, batch = args
            # The leaves of the batch have a dim of replicas already.
            share = jax.tree.map(lambda x: x[0], batch)
            shares = self.local(program, replace(replica, sees_all_rows=True), states, share)
            mapped = jax.pmap(
                self.on_replica(program, replica, *shares),
                axis_name=self.axis,
                in_axes=(*axes, 0),
                out_axes=self.out_tree(program, replica, per_replica=0, shared=None),
                devices=list(self.mesh.devices.flat),
            )
            return jax.tree.map(
                lambda layout, x: x.reshape(-1, *x.shape[2:]) if layout is ROWS and replica.splits else x,
                program.outputs,
                mapped(*args),
            )

        # With jit around it, pmap takes its faster path, and the program has a name.
        out = state_shardings(program)
        return jax.jit(named(program.name, call), out_shardings=out, donate_argnums=program.donate)
