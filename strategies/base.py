"""What a strategy is."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import sharding
from jaxlit.configured import Configured
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica, abstract_batch, num_rows
from jaxlit.core.state import TrainState
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.strategies.create import create
from jaxlit.strategies.program import Out, Program, ReplicatedBatch, constrain, named, state_shardings


class Strategy(Configured, ABC):
    """How training is laid out over devices: the mesh, the shardings and the compiled step.

    A subclass that shards the state in its own way overrides `state_sharding` only: the step is then
    compiled by `jax.jit`, sees the global batch, and XLA adds the collectives.

    Example:
        >>> import jax, jaxlit as jl
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> @jl.register_strategy("copies")
        ... class Copies(jl.Strategy):
        ...     def state_sharding(self, state, model, example):
        ...         return jax.tree.map(lambda _: NamedSharding(self.mesh, P()), state)
        >>> trainer = jl.Trainer(strategy="copies", max_epochs=1, logger=False)
    """

    batch_axes: tuple[str, ...] = ("data",)
    """The mesh axes that the batch's rows are split over, together."""

    reason = ""
    """Why "auto" chose this strategy; empty if it was named."""

    mesh: jax.sharding.Mesh

    notes: Mapping[str, str] = MappingProxyType({})
    """What the model's summary says of a parameter before how it is split, by its path."""

    several_processes = True
    """Whether it can train over the devices of several processes."""

    takes_mesh = True
    """Whether it can train on a mesh of the user's own."""

    mesh_axes: ClassVar[tuple[str, ...]] = ("data",)
    """The axes of such a mesh that split the batch, as far as it has them; an only axis does, whatever its name."""

    given_mesh: jax.sharding.Mesh | dict[str, int] | None = None
    """A mesh of the user's own, or the sizes of its axes; None builds one by `mesh_shape`."""

    def use_mesh(self, mesh: jax.sharding.Mesh | Mapping[str, int] | None) -> None:
        """Train on a mesh of the user's own; to be called before `use`.

        Args:
            mesh: The mesh, whose axes become automatic (XLA places what no rule places); or the size of each axis by
                its name, one of them -1 at most; or None to build one.

        Raises:
            ArgumentError: The strategy takes none, or it does not tell which axis splits the batch.
            ArgumentTypeError: It is no mesh.
        """
        name = type(self).__name__
        if mesh is None:
            return
        if not isinstance(mesh, (jax.sharding.Mesh, Mapping)):
            raise ArgumentTypeError(
                f"{name}(mesh=...) takes a jax.sharding.Mesh or the sizes of its axes, {{'data': 2, 'fsdp': -1}} say, "
                f"got {mesh!r}."
            )
        if not self.takes_mesh or self.given_mesh is not None:
            why = "has a mesh of its own already" if self.takes_mesh else "builds its own mesh"
            raise ArgumentError(
                f"{name} {why}, got mesh={mesh!r}. Leave mesh out, or use 'ddp', 'fsdp' or 'shard_map'."
            )
        names = mesh.axis_names if isinstance(mesh, jax.sharding.Mesh) else tuple(mesh)
        axes = tuple(axis for axis in self.mesh_axes if axis in names)
        if not axes and len(names) > 1:
            raise ArgumentError(
                f"{name}(mesh=...) splits the batch over an axis named {' or '.join(map(repr, self.mesh_axes))}, got "
                f"axes {names}. Rename one of them."
            )
        self.batch_axes = axes or tuple(map(str, names))
        if isinstance(mesh, jax.sharding.Mesh):
            self.given_mesh = jax.sharding.Mesh(mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
        else:
            self.given_mesh = dict(mesh)

    def setup(self, devices: Sequence[jax.Device]) -> None:
        """Build the mesh over `devices`; called once a fit, before anything else."""
        given = self.given_mesh
        if isinstance(given, jax.sharding.Mesh):
            self.mesh = given
        else:
            owner = f"The mesh of {type(self).__name__}"
            shape = self.mesh_shape(len(devices)) if given is None else given
            self.mesh = sharding.build_mesh(shape, devices, owner)

    def mesh_shape(self, device_count: int) -> dict[str, int]:
        """Return the size of each mesh axis, by name; here all devices stand on `data`.

        Args:
            device_count: How many devices there are; the sizes multiply to it.
        """
        return {"data": device_count}

    def use(self, devices: int | None) -> None:
        """Choose devices and build the mesh.

        Args:
            devices: How many over all processes, None for all.

        Raises:
            ArgumentError: There are fewer, or a process would be left without its share.
        """
        self.setup(self.choose_devices(devices))
        if (count := jax.process_count()) == 1:
            return
        name, held = type(self).__name__, Counter(d.process_index for d in self.mesh.devices.flat)
        if not self.several_processes:
            raise ArgumentError(
                f"{name} trains in one process, and there are {count}. Use strategy='ddp', 'fsdp' or 'shard_map', "
                "whose meshes span the processes."
            )
        if len(held) < count or len(set(held.values())) > 1:
            raise ArgumentError(
                f"{name} would use {self.mesh.size} devices, by process {dict(held)}, of {jax.device_count()} in "
                f"{count} processes. Each process must hold as many: leave devices out, or give a mesh of them all."
            )

    def choose_devices(self, devices: int | None) -> list[jax.Device]:
        """Return the devices to use.

        Args:
            devices: How many, None for all.

        Raises:
            ArgumentError: There are fewer.
        """
        if isinstance(mesh := self.given_mesh, jax.sharding.Mesh):
            if devices not in (None, mesh.size):
                raise ArgumentError(
                    f"Trainer(devices={devices}) with a mesh of {mesh.size} devices. Leave devices out: the mesh says "
                    "which to use."
                )
            return list(mesh.devices.flat)
        return sharding.first_devices(devices)

    @abstractmethod
    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> TrainState:
        """Return the sharding of each leaf of the state.

        Args:
            state: The state, with `jax.ShapeDtypeStruct` leaves. Arrays of callbacks are not in it: they are split as
                the parameters are.
            model: The module taken apart; `model.origin` is the module, whose arrays may be mere shapes and dtypes.
            example: The first batch of the training, for `step_program`; None where none is known yet: in an
                evaluation, or where a module is built before its loaders.

        Returns:
            The same tree, with a `NamedSharding` on `self.mesh` for each leaf.
        """

    def grad_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return how gradients lie in a step, as a tree like `state.params`, or None for as XLA decides.

        Args:
            state: See `state_sharding`.
            model: See `state_sharding`.
            example: See `state_sharding`.
        """
        return None

    def reduce_grads(self, replica: Replica, grads: Any, how: str, to: Any) -> Any:
        """Return a replica's gradients summed or averaged over all of them, inside the step.

        Args:
            replica: The replica; one that sees the global batch has the gradients of all.
            grads: Its gradients, a tree like the parameters.
            how: "sum" or "mean".
            to: What `grad_sharding` returned.
        """
        return constrain(replica.reduce(grads, how), to)

    def wrap_body(self, body: Callable[..., Any], shardings: TrainState) -> Callable[..., Any]:
        """Return the user's step as it is to be traced into a program; here as it is.

        Args:
            body: A function of (params, frozen, model_state, ...), as `PureModule.body` returns it.
            shardings: That of each leaf of the state.
        """
        return body

    def part_of(self, batch: Any) -> Any:
        """Return a batch, or shapes, of as many rows as one pass of a training step sees of it; here of all."""
        return batch

    def step_program(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Trace the user's training step; what is traced again later is not traced twice.

        Args:
            state: See `state_sharding`.
            model: See `state_sharding`.
            example: See `state_sharding`; not None.

        Returns:
            Its program, a `jax.extend.core.ClosedJaxpr`, whose first inputs are the leaves of params, frozen and
            model_state.
        """
        found: list[Any] = []

        def keep(replica: Replica, params: Any, frozen: Any, model_state: Any, counters: Any, batch: Any) -> None:
            args = params, frozen, model_state, replica.constrain_batch(batch), *counters[:3]
            found.append(jax.make_jaxpr(model.body("training", replica))(*args))

        # Of the types that the placed state will have, which a trace is kept for.
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.replicated), state)
        states = placed.params, placed.frozen, placed.model_state, placed.counters
        self.trace(keep, states, self.part_of(example))
        return found[0]

    @property
    def num_replicas(self) -> int:
        """How many ways the rows of a batch are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    def batch_spec(self, x: Any) -> P:
        """Return how a leaf of a batch is split: its rows over `batch_axes`, and a number on each device.

        The one place that says how a batch lies, whether it is placed, or met inside a step. A strategy that splits
        another dim as well, over the words of a text say, overrides it.

        Args:
            x: An array, or its shape and dtype; (rows, ...), where the rows divide by `num_replicas`.
        """
        return sharding.split_dim(0, self.batch_axes) if x.ndim else P()

    @property
    def window_replicas(self) -> int | None:
        """The size of the accumulation window's leading dim; None if it has none."""
        return None

    @property
    def replica(self) -> Replica:
        """What a step body sees."""
        return Replica(constrain_batch=self._constrain_batch)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
        return NamedSharding(self.mesh, P())

    @property
    def home(self) -> NamedSharding:
        """Where the counters, the metrics' sums and the loss scale lie."""
        return self.replicated

    def create_state(self, init: Callable[..., Any], shardings: Any, *inputs: Any, donate: bool = False) -> Any:
        """Run `init(*inputs)` so that each result is born in its sharding, which may be on any mesh.

        Args:
            init: A function of arrays to a pytree of arrays.
            shardings: The same pytree, of shardings.
            *inputs: Pytrees of arrays.
            donate: Whether the inputs may be overwritten.
        """
        return create(self.in_mesh(init), shardings, *inputs, donate=donate)

    @property
    def num_processes(self) -> int:
        """How many processes hold the devices; each places its own rows of a batch."""
        return jax.process_count() if self.mesh.is_multi_process else 1

    def shard_batch(self, batch: Any) -> Any:
        """Place a host batch: rows split over the devices where they divide, otherwise whole on each.

        On one device the host arrays go straight into the step, which is cheaper.

        Args:
            batch: The batch, or in several processes this process's rows of it; `ReplicatedBatch` if it has them all.
        """
        if self.mesh.size == 1:
            return batch
        given, processes = (batch.batch, 1) if isinstance(batch, ReplicatedBatch) else (batch, self.num_processes)
        split = num_rows(given) * processes % self.num_replicas == 0
        lies = jax.tree.map(self._batch_sharding if split else lambda _: self.replicated, given)
        return sharding.place_whole(given, lies) if isinstance(batch, ReplicatedBatch) else sharding.place(given, lies)

    def splits_by_process(self, batch: Any) -> bool:
        """Return whether each process places rows that no other does; otherwise it places what it needs of all rows.

        Args:
            batch: The global batch, or its shapes.
        """
        lies = [(self._batch_sharding(x), tuple(x.shape)) for x in jax.tree.leaves(batch) if x.ndim]
        return num_rows(batch) % self.num_replicas == 0 and all(sharding.rows_by_process(*x) for x in lies)

    def place_inputs(self, inputs: Any) -> Any:
        """Place the inputs of `Trainer.apply`: each split over the devices where its rows divide."""
        if self.mesh.size == 1:
            return inputs

        def place(x: Any) -> jax.Array:
            x = x if isinstance(x, jax.Array) else np.asarray(x)
            split = x.ndim and x.shape[0] % self.num_replicas == 0
            return jax.device_put(x, self._batch_sharding(x) if split else self.replicated)

        return jax.tree.map(place, inputs)

    def _constrain_batch(self, batch: Any) -> Any:
        if self.mesh.size == 1:
            return batch
        if num_rows(batch) % self.num_replicas and self.num_replicas < self.mesh.size:
            # XLA adds what pads an uneven part into the gradient of a lookup, where several devices hold that part.
            return jax.lax.with_sharding_constraint(batch, self.replicated)
        # Else a sharding may be uneven inside a step: a batch that does not divide is computed sharded too.
        split = lambda x: jax.lax.with_sharding_constraint(x, self._batch_sharding(x)) if x.ndim else x  # noqa: E731
        return jax.tree.map(split, batch)

    def _batch_sharding(self, x: Any) -> NamedSharding:
        return NamedSharding(self.mesh, self.batch_spec(x))

    def in_mesh(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn` with the mesh in context while it is traced, so that what it runs may name the mesh's axes."""

        def call(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return fn(*args)

        return call

    def trace(self, fn: Callable[..., None], states: tuple[Any, ...], batch: Any) -> None:
        """Run `fn(replica, *states, batch)` on abstract values, as the compiled step will run it.

        Args:
            fn: A function that returns nothing.
            states: Pytrees of arrays or `jax.ShapeDtypeStruct`s.
            batch: The host batch.
        """
        jax.eval_shape(self.in_mesh(partial(fn, self.replica)), *states, abstract_batch(batch))

    def compile(self, program: Program) -> Callable[..., Any]:
        """Return a function of `(*states, batch)` that runs the program, compiled at its first call.

        If it has `trace`, as a function of `jax.jit` has, `Trainer.explain` tells what the program costs.
        """
        body = named(program.name, self.in_mesh(partial(program.fn, self.replica)))
        # What a step returns beside the state and the metrics may lie as XLA likes.
        out = tuple(
            held if held is not None else self.replicated if isinstance(x, Out) else None
            for held, x in zip(state_shardings(program), program.outputs, strict=True)
        )
        return self.jit(body, out_shardings=out, donate_argnums=program.donate)

    def jit(self, fn: Callable[..., Any], **options: Any) -> Any:
        """Compile a program with collectives by `jax.jit`.

        Args:
            fn: The function.
            **options: Other arguments of `jax.jit`.
        """
        if self.mesh.devices.flat[0].platform == "cpu" and self.mesh.size > 1:
            # Collectives of one loop run at once otherwise, for which simulated devices have too few threads: they wait
            # for each other, and the process is ended.
            options["compiler_options"] = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
        return jax.jit(fn, **options)

    def on_state(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of arrays of the state, and inputs, compiled: what runs on the state outside of a step.

        Args:
            fn: A function of (a list of arrays, *pytrees) to a pytree.
        """
        return self.jit(self.in_mesh(fn))

    def canonical(self, state: TrainState) -> TrainState:
        """Return the state as global arrays on the mesh, one copy of each."""
        return state

    def gather(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Return the arrays of a module as it is left by a fit; here as they lie."""
        return arrays

    def describe(self) -> str:
        """Return the name, the mesh, and why it was chosen; a strategy that has more to tell adds lines."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"{type(self).__name__} on mesh {mesh}" + (f" ({self.reason})" if self.reason else "")
