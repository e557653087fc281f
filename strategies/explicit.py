"""The explicit body of FSDP: split arrays are gathered once a step, gradients reduced into shards once a window."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
from jax.extend.core import Literal, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding

from jaxlit.core.replica import Replica
from jaxlit.strategies.program import SHARED, ArraySpec, Program, jit, named, state_shardings
from jaxlit.strategies.replicas import ByDivision
from jaxlit.strategies.shard_map import ShardMapDDP


@dataclass(frozen=True)
class ShardReplica(Replica):
    """A replica that keeps a shard of each split parameter."""

    def reduce_grads(self, grads: Any, how: str, shardings: Any) -> Any:
        """Return the sum or the mean of all replicas' gradients, of those that are split this replica's shard."""

        def one(g: jax.Array, sharding: NamedSharding) -> jax.Array:
            axis, dim = str(self.axis), shard_dim(sharding, str(self.axis))
            if dim is None:
                g = jax.lax.psum(g, axis)
            else:
                g = jax.lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True)
            return g / self.count if how == "mean" else g

        return self.reduce(grads, how) if shardings is None else jax.tree.map(one, grads, shardings)


class ExplicitBody(ShardMapDDP):
    """Runs a step once on each device under `jax.shard_map`, and its optimizer on global arrays.

    Args:
        mesh: The mesh.
        axis: Its axis that splits the batch and the state.
    """

    def __init__(self, mesh: Mesh, axis: str) -> None:
        super().__init__()
        self.mesh, self.batch_axes = mesh, (axis,)

    @property
    def replica(self) -> Replica:
        """One of the replicas."""
        base = super().replica
        return ShardReplica(**{field.name: getattr(base, field.name) for field in fields(base)})

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
            return jit(self.mesh, named(program.name, call), out_shardings=out, donate_argnums=program.donate)

        return ByDivision(step(self.replica), step(replace(self.replica, sees_all_rows=True)))

    def on_replica(self, program: Program, replica: Replica, *args: Any) -> Callable[..., Any]:
        """Return the body of a program, which gathers what is split."""
        closed, treedef = self.traced(partial(program.fn, replica), *args)
        run, jaxpr, axis = jaxpr_as_fun(closed), closed.jaxpr, str(replica.axis)
        dims = [_dim(spec, axis) for state in program.inputs for spec in state]
        dims += [None] * (len(jaxpr.invars) - len(dims))  # of the batch
        input_of = {var: i for i, var in enumerate(jaxpr.invars)}
        outputs = jax.tree.leaves(program.outputs[0])  # the state, the first result of each program
        out_dims = [_dim(spec, axis) for spec in outputs] + [None] * (len(jaxpr.outvars) - len(outputs))

        def shard(var: Any, result: Any, dim: int | None, shards: list[Any]) -> Any:
            if dim is None:
                return result
            place = None if isinstance(var, Literal) else input_of.get(var)
            if place is not None and dims[place] == dim:
                return shards[place]  # the step did not change it: no slice of the gathered copy
            size = result.shape[dim] // replica.count
            return jax.lax.dynamic_slice_in_dim(result, jax.lax.axis_index(axis) * size, size, dim)

        def body(*args: Any) -> Any:
            shards = jax.tree.leaves(args)
            # jit drops the gathering of what the step does not use.
            gather = lambda x, dim: x if dim is None else jax.lax.all_gather(x, axis, axis=dim, tiled=True)  # noqa: E731
            results = run(*map(gather, shards, dims))
            triples = zip(jaxpr.outvars, results, out_dims, strict=True)
            return treedef.unflatten([shard(*triple, shards) for triple in triples])

        return body


def shard_dim(sharding: NamedSharding, axis: str) -> int | None:
    """Return the dim of an array that is split over `axis`; None if it is replicated, or split on a divided mesh."""
    if axis not in sharding.mesh.axis_names:
        return None
    return next((dim for dim, axes in enumerate(sharding.spec) if axes is not None), None)


def _dim(spec: ArraySpec, axis: str) -> int | None:
    return None if spec.per_replica else shard_dim(spec.sharding, axis)
