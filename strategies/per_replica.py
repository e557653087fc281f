"""`PerReplica`, the base of strategies whose step sees one replica's rows: one body, mapped in three ways."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
from jax.extend.core import jaxpr_as_fun
from jax.stages import Traced

from jaxlit import checks as check
from jaxlit import sharding
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica, num_rows, with_rows
from jaxlit.core.train_state import TrainState
from jaxlit.programs.costs import trace
from jaxlit.strategies.base import EACH, ROWS, ArraySpec, Program, ReplicatedBatch, Strategy


@dataclass(frozen=True)
class ByDivision:
    """A compiled step for batches that divide among the replicas, and for batches that do not."""

    split: Callable[..., Any]  # each replica sees its rows
    replicated: Callable[..., Any]  # each replica sees all rows

    def __call__(self, *args: Any) -> Any:
        """Run the program that fits the batch, the last argument."""
        *states, batch = args
        return self.replicated(*states, batch.batch) if type(batch) is ReplicatedBatch else self.split(*args)

    def trace(self, *args: Any) -> Traced | None:
        """Return the trace of the program that fits the batch."""
        *states, batch = args
        if type(batch) is ReplicatedBatch:
            return trace(self.replicated, *states, batch.batch)
        return trace(self.split, *args)


class PerReplica(Strategy, ABC):
    """Base of strategies whose step body runs once a replica, with collectives between the replicas.

    Losses that couple rows see one replica's rows. Gradients are averaged once an optimizer step, also when it
    accumulates several batches. Each replica draws its own random numbers. State that a step computes from the rows
    becomes what one device would compute: means are averaged, counts and sums added up; any other is refused before
    the first step.

    Args:
        sync_batchnorm: BatchNorm takes its statistics over all replicas, as on one device.
        loss_reduction: What the loss is over the rows, "mean" or "sum".
    """

    per_replica = True
    types_arrays = False

    def __init__(self, *, sync_batchnorm: bool = True, loss_reduction: Literal["mean", "sum"] = "mean") -> None:
        owner = type(self).__name__
        self.sync_batchnorm = check.boolean("sync_batchnorm", sync_batchnorm, owner=owner)
        self.loss_reduction = check.one_of("loss_reduction", loss_reduction, ("mean", "sum"), owner=owner)

    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return the replicated state, with an accumulation window for each replica."""
        shardings = super().state_sharding(state, model, example)
        by_replica = sharding.rows(self.mesh, self.batch_axes)
        return replace(shardings, window=jax.tree.map(lambda _: by_replica, state.window))

    @property
    def axis(self) -> str:
        """The mesh axis of the replicas."""
        return self.batch_axes[0]

    @property
    def replica(self) -> Replica:
        """One of the replicas."""
        return Replica(
            self.axis, self.num_replicas, sync_batchnorm=self.sync_batchnorm, loss_reduction=self.loss_reduction
        )

    def shard_batch(self, batch: Any) -> Any:
        """Place a host batch, as a `ReplicatedBatch` if its rows do not divide."""
        if not isinstance(batch, ReplicatedBatch):
            if num_rows(batch) * jax.process_count() % self.num_replicas == 0:
                return self.place(batch, replicated=False)
            batch = ReplicatedBatch(batch)
        return ReplicatedBatch(self.place(batch.batch, replicated=True))

    @abstractmethod
    def place(self, batch: Any, *, replicated: bool) -> Any:
        """Place a host batch as the mapped step takes it."""

    @abstractmethod
    def map(self, program: Program, replica: Replica) -> Callable[..., Any]:
        """Return the program, mapped over the replicas and compiled at its first call."""

    def trace(self, fn: Callable[..., None], states: tuple[Any, ...], batch: Any, used: Any) -> None:
        """Run `fn` on one replica's rows, rounded up if the batch does not divide."""
        states = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), states)
        share = with_rows(batch, -(-num_rows(batch) // self.num_replicas))
        self.traced(partial(fn, self.replica), *states, share)

    def traced(self, fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        """Return the program of `fn` on one replica, traced outside of any map, and the structure of its results."""
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)
        program, results = jax.make_jaxpr(fn, axis_env=[(self.axis, self.num_replicas)], return_shape=True)(*shapes)
        return program, jax.tree.structure(results)

    def on_replica(self, program: Program, replica: Replica, *args: Any) -> Callable[..., Any]:
        """Return the body of a program, to be mapped; `args` are the arrays of one replica, or their shapes."""
        body = partial(program.fn, replica)
        if jax.config.jax_disable_jit:  # type: ignore[attr-defined]
            return body
        closed, treedef = self.traced(body, *args)
        run = jaxpr_as_fun(closed)
        return lambda *args: treedef.unflatten(run(*jax.tree.leaves(args)))

    def local(self, program: Program, replica: Replica, states: Sequence[Any], batch: Any) -> tuple[Any, ...]:
        """Return the shapes and dtypes of one replica's part of a program's states and of a global batch."""

        def part(spec: ArraySpec, x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape[1:] if spec.per_replica else x.shape, x.dtype)

        rows = num_rows(batch) // self.num_replicas if replica.splits else num_rows(batch)
        return *jax.tree.map(part, program.inputs, tuple(states)), with_rows(batch, rows)

    def compile(self, program: Program) -> ByDivision:
        """Return a function of `(*states, batch)`, which has a second program for batches that do not divide."""
        # In the second program no key is folded and nothing is summed: every replica computes the same.
        return ByDivision(self.map(program, self.replica), self.map(program, replace(self.replica, sees_all_rows=True)))

    def out_tree(self, program: Program, replica: Replica, per_replica: Any, shared: Any) -> tuple[Any, ...]:
        """Return the results' layout: `per_replica` for parts of each replica, else `shared`."""

        def layout(x: Any) -> Any:
            if isinstance(x, ArraySpec):
                return per_replica if x.per_replica else shared
            return per_replica if x is EACH or (x is ROWS and replica.splits) else shared

        return jax.tree.map(layout, program.outputs)
