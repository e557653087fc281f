"""Data parallel with explicit collectives, by `jax.shard_map`."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import jax
from jax.sharding import PartitionSpec as P

from jaxlit import sharding
from jaxlit.core.replica import Replica
from jaxlit.strategies.base import EACH, ArraySpec, Program, jit, named, state_shardings
from jaxlit.strategies.per_replica import PerReplica


class ShardMapDDP(PerReplica):
    """Run the step body once on each device and average gradients once an optimizer step.

    `ddp` reduces after every accumulated batch, this strategy after the last one.

    Args:
        sync_batchnorm: BatchNorm takes its statistics over all replicas, as on one device.
        loss_reduction: What the loss is over the rows, "mean" or "sum".
        mesh: A mesh of the user's, or the sizes of its axes: the replicas are on its axis `data`, or its single axis.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy="shard_map", accumulate_grad_batches=4, max_epochs=1, logger=False)
    """

    compiler_options: ClassVar[dict[str, Any]] = {}
    """Options of XLA for its programs, by their names."""

    def __init__(
        self,
        *,
        sync_batchnorm: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
        mesh: jax.sharding.Mesh | Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm, loss_reduction=loss_reduction)
        self.use_mesh(mesh)

    def place(self, batch: Any, *, replicated: bool) -> Any:
        """Split the rows over the devices, or put all of them on each."""
        target = self.replicated if replicated else sharding.rows(self.mesh, self.axis)
        if sharding.is_abstract(batch):
            return sharding.place_shapes(batch, jax.tree.map(lambda x: target if x.ndim else self.replicated, batch))
        return sharding.place(batch, target)

    def map(self, program: Program, replica: Replica) -> Callable[..., Any]:
        """Return the program under jit and shard_map."""
        split, replicated = P(self.axis), P()
        specs = tuple([split if spec.per_replica else replicated for spec in state] for state in program.inputs)
        out_specs = self.out_tree(program, replica, per_replica=split, shared=replicated)

        def call(*args: Any) -> Any:
            *states, batch = args
            body = self.on_replica(program, replica, *self.local(program, replica, states, batch))
            batch_specs = jax.tree.map(lambda x: split if replica.splits and x.ndim else replicated, batch)
            mapped = jax.shard_map(
                partial(self.blocks, program, replica, body),
                mesh=self.mesh,
                in_specs=(*specs, batch_specs),
                out_specs=out_specs,
                # With varying axes in the types, a scan or a cond over a trained and a frozen array, legal on one
                # device, would not trace. Without them gradients are of the replica's loss, as under pmap.
                check_vma=False,
            )
            return mapped(*args)

        out = state_shardings(program)
        options = {"out_shardings": out, "donate_argnums": program.donate, "compiler_options": self.compiler_options}
        return jit(self.mesh, named(program.name, call), **options)

    def blocks(self, program: Program, replica: Replica, body: Callable[..., Any], *args: Any) -> Any:
        """Run the body on the blocks of one device: here arrays of one replica have a leading dim of one."""
        *states, batch = args
        states = jax.tree.map(lambda spec, x: x[0] if spec.per_replica else x, program.inputs, tuple(states))
        results = body(*states, batch)

        def stack(layout: Any, x: Any) -> Any:
            per_replica = layout.per_replica if isinstance(layout, ArraySpec) else layout is EACH
            return x[None] if per_replica else x

        return jax.tree.map(stack, program.outputs, results)
