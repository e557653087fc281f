"""Fully sharded data parallel with collectives of its own: each gathered and reduced once a step."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica
from jaxlit.core.state import TrainState
from jaxlit.errors import ArgumentError
from jaxlit.strategies.fsdp import FSDP
from jaxlit.strategies.program import SHARED, ArraySpec, Program, named, state_shardings
from jaxlit.strategies.replicas import ByDivision
from jaxlit.strategies.shard_map import ShardMapDDP


class ExplicitFSDP(FSDP, ShardMapDDP, body="explicit"):
    """What `FSDP(body="explicit")` is: the step runs once on each device, on its rows, under `jax.shard_map`.

    Split parameters are gathered before the step and gradients summed into shards after it, after the last batch of a
    window only; clipping, checks and the optimizer see global arrays. A device holds all parameters during a step, and
    its own float32 gradients of all of them during a window. Losses that couple rows see one device's rows.

    Example:
        >>> import jaxlit as jl
        >>> strategy = jl.strategies.FSDP(body="explicit")
        >>> trainer = jl.Trainer(strategy=strategy, accumulate_grad_batches=4, max_epochs=1, logger=False)
    """

    sync_batchnorm, loss_reduction = True, "mean"

    def check_mesh(self) -> None:
        """Refuse a mesh of which the replicas would stand on several axes.

        Raises:
            ArgumentError: Naming its axes.
        """
        if len(self.batch_axes) > 1 or self.mesh.size != self.num_replicas:
            raise ArgumentError(
                f"FSDP(body='explicit') takes a mesh of one axis, got {dict(self.mesh.shape)}. Leave replicas and "
                "other axes out, or take body='auto'."
            )

    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return sharded parameters and optimizer state, and each device's window on its own."""
        self.check_mesh()
        found = super().state_sharding(state, model, example)
        own = jax.tree.map(lambda _: NamedSharding(self.mesh, P(self.axis)), state.window)
        return replace(found, window=own)

    def wrap_body(self, body: Callable[..., Any], shardings: TrainState) -> Callable[..., Any]:
        """Return the step with scans that are computed again if asked; parameters are whole in it."""
        whole = replace(shardings, **{k: jax.tree.map(self._gathered, getattr(shardings, k)) for k in _HELD})
        return super().wrap_body(body, whole)

    def reduce_grads(self, replica: Replica, grads: Any, how: str, to: Any) -> Any:
        """Return the sum or the mean of all devices' gradients, of those that are split this device's shard."""

        def one(g: jax.Array, lies: NamedSharding) -> jax.Array:
            axis, dim = str(replica.axis), self._dim(lies)
            if dim is None:
                g = jax.lax.psum(g, axis)
            else:
                g = jax.lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True)
            return g / replica.count if how == "mean" else g

        return jax.tree.map(one, grads, to) if to is not None else super().reduce_grads(replica, grads, how, to)

    def compile(self, program: Program) -> ByDivision:
        """Return the program, of an optimizer step the first half mapped and the second on global arrays."""
        if program.parts is None:
            return super().compile(program)
        gradients, apply = program.parts
        grads = SHARED if program.grads is None else jax.tree.map(ArraySpec, program.grads)
        state, _, loss, outputs, *_ = program.outputs
        first = replace(program, fn=gradients, outputs=(state, grads, SHARED, loss, outputs), parts=None)

        def step(replica: Replica) -> Callable[..., Any]:
            mapped = self.mapped(first, replica)

            def call(leaves: list[Any], batch: Any) -> tuple[Any, ...]:
                new, grads, table, loss, outputs = mapped(leaves, batch)
                new, logs, *seen = self.in_mesh(apply)(leaves, new, grads, table)
                return new, logs, loss, outputs, *seen

            out = state_shardings(program)
            return self.jit(named(program.name, call), out_shardings=out, donate_argnums=program.donate)

        return ByDivision(step(self.replica), step(replace(self.replica, whole=True)))

    def on_replica(self, program: Program, replica: Replica, *args: Any) -> Callable[..., Any]:
        """Return the body of a program, which gathers what is split."""
        closed, treedef = self.traced(partial(program.fn, replica), *args)
        run, jaxpr = jaxpr_as_fun(closed), closed.jaxpr
        lies = [spec for state in program.inputs for spec in state]
        dims = [None if spec.per_replica else self._dim(spec.sharding) for spec in lies]
        dims += [None] * (len(jaxpr.invars) - len(dims))  # of the batch
        as_given = {var: i for i, var in enumerate(jaxpr.invars)}
        outputs = jax.tree.leaves(program.outputs[0])  # the state, first of all that leaves a step

        def part(i: int, var: Any, result: Any, blocks: list[Any]) -> Any:
            dim = self._dim(outputs[i].sharding) if i < len(outputs) and not outputs[i].per_replica else None
            if dim is None:
                return result
            if (place := as_given.get(var)) is not None and dims[place] == dim:
                return blocks[place]  # not from the gathered copy of it
            size = result.shape[dim] // replica.count
            return jax.lax.dynamic_slice_in_dim(result, jax.lax.axis_index(str(replica.axis)) * size, size, dim)

        def body(*args: Any) -> Any:
            blocks = jax.tree.leaves(args)
            axis = str(replica.axis)  # what the step does not use is not gathered in the end, as jit drops it
            gather = lambda x, dim: x if dim is None else jax.lax.all_gather(x, axis, axis=dim, tiled=True)  # noqa: E731
            whole = map(gather, blocks, dims)
            pairs = zip(jaxpr.outvars, run(*whole), strict=True)
            results = [
                part(i, None if isinstance(var, Literal) else var, x, blocks) for i, (var, x) in enumerate(pairs)
            ]
            return treedef.unflatten(results)

        return body

    def describe(self) -> str:
        """Return one line for people, with what it costs."""
        return f"{super().describe()}, explicit: all parameters and gradients on each device during a step"

    def _dim(self, lies: NamedSharding) -> int | None:
        """Return which dim a device has its own part of; None where it has all, or a part on a mesh of its own."""
        if lies.mesh != self.mesh:
            return None
        return next((dim for dim, axes in enumerate(lies.spec) if axes is not None), None)


_HELD = ("params", "frozen", "model_state")
