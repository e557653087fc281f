"""Data parallel training of n replicas that gives the same bits on every number of devices that divides n.

Each device computes its replicas one after another. What they exchange is gathered in their order, and every device
computes the same with it, so no sum depends on how many devices there are.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, Literal

import jax
from jax.core import ShapedArray, Tracer
from jax.custom_batching import custom_vmap
from jax.experimental.xla_metadata import set_xla_metadata

from jaxlit import checks as check
from jaxlit.core.replica import Replica
from jaxlit.errors import ArgumentError
from jaxlit.programs.jaxpr import bind, bodies, equations, parts_of, remat_of, rerun, run, value_of, variables, walk
from jaxlit.strategies.base import EACH, ROWS, ArraySpec, Program
from jaxlit.strategies.shard_map import ShardMapDDP

_LOCAL = "replica"  # the vmapped axis of the replicas on one device


class Replicas(ShardMapDDP):
    """Compute what `shard_map` computes on `count` devices, with the same bits on any devices that divide them evenly.

    The rows, the random numbers and the order of every sum are those of the replicas. A device computes its replicas
    one after another, so the activations of one are in memory at a time, except those that a collective of the model,
    such as that of BatchNorm, separates from their backward pass.

    Args:
        count: How many replicas; None is one on each device.
        devices: Where the Trainer asks for no number of them; None is as many as divide the replicas. `"simulate:8"` is
            `Replicas(8, devices=1)`.
        sync_batchnorm: BatchNorm takes its statistics over all replicas, as on one device.
        loss_reduction: What the loss is over the rows, "mean" or "sum".

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy="replicas:8", devices=1, max_epochs=1, logger=False)
    """

    takes_mesh = False

    # XLA joins equal operations, see `_apart`, and compiles short loops, of which more devices have more, otherwise.
    compiler_options: ClassVar[dict[str, Any]] = {"xla_disable_hlo_passes": "cse,small-while-loop-hoisting"}

    def __init__(
        self,
        count: int | None = None,
        *,
        devices: int | None = None,
        sync_batchnorm: bool = True,
        loss_reduction: Literal["mean", "sum"] = "mean",
    ) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm, loss_reduction=loss_reduction)
        self.count = check.integer("count", count, low=1, also=(None,), owner="Replicas")
        self.devices = check.integer("devices", devices, low=1, also=(None,), owner="Replicas")

    def setup(self, devices: int | None = None) -> None:
        """Take devices that divide the replicas, None for as many as there are; refuse a number that does not."""
        devices = devices or self.devices
        if devices is None and self.count is not None:
            devices = max(n for n in range(1, jax.device_count() + 1) if self.count % n == 0)
        super().setup(devices)
        if self.num_replicas % self.mesh.size:
            raise ArgumentError(
                f"Trainer(strategy='replicas:{self.count}', devices={devices}): every device computes as many replicas "
                f"as the others. Use a divisor of {self.count}."
            )

    @property
    def num_replicas(self) -> int:
        """How many replicas there are, on all devices."""
        return self.count or self.mesh.size

    def on_replica(self, program: Program, replica: Replica, *args: Any) -> Callable[..., Any]:
        """Return the body of a program, to be mapped over the replicas on one device."""
        closed, treedef = self.traced(partial(program.fn, replica), *args)
        return lambda *args: treedef.unflatten(self._run(closed, *jax.tree.leaves(args)))

    def blocks(self, program: Program, replica: Replica, body: Callable[..., Any], *args: Any) -> Any:
        """Run the body on the blocks of one device, for each of its replicas."""
        *states, batch = args
        size = self.num_replicas // self.mesh.size
        axes = tuple([0 if spec.per_replica else None for spec in state] for state in program.inputs)
        if replica.splits:
            batch = jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]) if x.ndim else x, batch)
        rows = jax.tree.map(lambda x: 0 if replica.splits and x.ndim else None, batch)
        results = jax.vmap(body, in_axes=(*axes, rows), axis_name=_LOCAL, axis_size=size)(*states, batch)

        def join(layout: Any, x: Any) -> Any:  # `layout` may be that of an entire tree
            if layout is ROWS and replica.splits:
                return x.reshape(-1, *x.shape[2:])
            per_replica = layout.per_replica if isinstance(layout, ArraySpec) else layout is EACH
            # A value that is the same on every replica is taken from the first, as on devices.
            return x if per_replica else jax.tree.map(lambda leaf: leaf[0], x)

        return jax.tree.map(join, program.outputs, results)

    def describe(self) -> str:
        """Return one line for people."""
        return f"Replicas: {self.num_replicas} on {self.mesh.size} device{'s' * (self.mesh.size > 1)}"

    def _run(self, closed: Any, *args: Any) -> list[Any]:
        """Run a replica's program: what exchanges something with other replicas, and the segments between."""
        jaxpr, consts = parts_of(closed)
        values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        groups = [(exchanges, list(eqns)) for exchanges, eqns in groupby(jaxpr.eqns, self._exchanges)]
        last = {x: i for i, (_, eqns) in enumerate(groups) for eqn in eqns for x in variables(eqn.invars)}
        last |= dict.fromkeys(variables(jaxpr.outvars), len(groups))
        for i, (exchanges, eqns) in enumerate(groups):
            if exchanges:
                walk(eqns, values, self._exchange)
                continue
            inputs = list(dict.fromkeys(x for eqn in eqns for x in variables(eqn.invars) if x in values))
            outputs = [x for eqn in eqns for x in eqn.outvars if last.get(x, i) > i]
            results = self._segment(eqns, inputs, outputs)(*[values[x] for x in inputs])
            values.update(zip(outputs, results, strict=True))
        return [value_of(x, values) for x in jaxpr.outvars]

    def _exchanges(self, eqn: Any) -> bool:
        """Return whether an equation, or one that it runs, is over the axis of the replicas; or separates others."""
        every = [eqn, *(inner for body in bodies(eqn) for inner in equations(body))]
        names = [x.params.get(key) for x in every for key in ("axes", "axis_name")]
        is_over = any(x == self.axis or (isinstance(x, tuple) and self.axis in x) for x in names)
        return is_over or eqn.primitive.name == "optimization_barrier"

    def _exchange(self, eqn: Any, args: list[Any]) -> list[Any]:
        """Run an equation over the replicas of all devices, by what they have gathered in their order."""
        rerunning = rerun(eqn, args, self._run)
        if rerunning is not None:
            return rerunning
        index = jax.lax.axis_index(self.axis) * (self.num_replicas // self.mesh.size) + jax.lax.axis_index(_LOCAL)
        name = eqn.primitive.name
        if name == "axis_index":
            return [index]
        if name == "optimization_barrier":
            return bind(eqn, args)
        stacks = [jax.lax.all_gather(jax.lax.all_gather(x, _LOCAL), self.axis, tiled=True) for x in args]
        # What is the same on all must not become one value for each.
        is_shared = name.startswith(("psum", "pmax", "pmin", "all_gather")) and not eqn.params.get("axis_index_groups")
        out_axes = None if is_shared else 0
        together = partial(jax.vmap, axis_name=self.axis, axis_size=self.num_replicas, out_axes=out_axes)
        results = together(lambda *xs: jax.lax.optimization_barrier(bind(eqn, xs)))(
            *jax.lax.optimization_barrier(stacks)
        )
        return results if is_shared else [x[index] for x in results]

    def _segment(self, eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> Callable[..., list[Any]]:
        """Return a function of the inputs of equations to their outputs, which loops over the replicas under a vmap."""

        @custom_vmap
        def run(*args: Any) -> list[Any]:
            return self._isolated(eqns, dict(zip(inputs, args, strict=True)), outputs)

        @run.def_vmap
        def loop(size: int, in_batched: list[bool], *args: Any) -> tuple[list[Any], list[bool]]:
            values = dict(zip(inputs, args, strict=True))
            differs = {x for x, batched in zip(inputs, in_batched, strict=True) if batched}
            once, each = [], []  # what is the same for all replicas, such as the optimizer's update, is computed once
            for eqn in eqns:
                reads = not differs.isdisjoint(variables(eqn.invars))
                (each if reads else once).append(eqn)
                differs.update(eqn.outvars if reads else ())
            wanted = {*outputs, *(x for eqn in each for x in variables(eqn.invars))}
            shared = [x for eqn in once for x in eqn.outvars if x in wanted]
            rows = [x for x in values if x in differs]
            own = [x for x in outputs if x in differs]
            values.update(zip(shared, self._isolated(once, values, shared), strict=True))

            def turn(parts: list[Any]) -> list[Any]:
                return self._isolated(each, values | dict(zip(rows, parts, strict=True)), own)

            values.update(zip(own, jax.lax.map(turn, [values[x] for x in rows]), strict=True))
            return [values[x] for x in outputs], [x in differs for x in outputs]

        return run

    def _isolated(self, eqns: Sequence[Any], values: dict[Any, Any], outputs: Sequence[Any]) -> list[Any]:
        """Run equations so that XLA does not fuse them with what is around them, which differs by the devices."""
        if not eqns:
            return []
        inputs = list(dict.fromkeys(x for eqn in eqns for x in variables(eqn.invars) if x in values))
        args = [values[x] for x in inputs]

        def segment(*args: Any) -> list[Any]:
            with set_xla_metadata(inlineable=None):  # the calls in it are inlined
                results = walk(eqns, dict(zip(inputs, args, strict=True)), _apart())
            return [results[x] for x in outputs]

        if self.mesh.devices.flat[0].platform != "cpu":
            return jax.lax.optimization_barrier(segment(*jax.lax.optimization_barrier(args)))
        with set_xla_metadata(inlineable="false"):  # for CPUs XLA drops a barrier before it fuses
            return jax.jit(segment)(*args)


def _apart() -> Callable[[Any, list[Any]], list[Any]]:
    """Return a rule for `walk`: for several devices XLA joins equal equations, and rounds by how often each is used."""
    runs = defaultdict[Any, list](list)  # the inputs of each by what is equal: they live, so that no id comes again

    def rule(eqn: Any, args: list[Any]) -> list[Any]:
        if remat_of(eqn):  # what is computed again is so that the first result need not be kept
            args = jax.lax.optimization_barrier(args)
        if (results := rerun(eqn, args, lambda program, *args: run(*parts_of(program), args, rule))) is not None:
            return results
        name = "mul" if eqn.primitive.name in ("square", "integer_pow") else eqn.primitive.name
        equal = runs[name, frozenset(id(x) if isinstance(x, Tracer) else str(x) for x in args)]
        equal.append(args)
        # A number is broadcast to the shape of an array, which would be joined, too.
        is_number = [isinstance(x, Tracer) and isinstance(x.aval, ShapedArray) and not x.shape for x in args]
        args = [jax.lax.optimization_barrier(x) if known else x for x, known in zip(args, is_number, strict=True)]
        with set_xla_metadata(number=str(len(equal))):
            return bind(eqn, args)

    return rule
