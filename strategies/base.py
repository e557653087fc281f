"""What a strategy is."""

import math
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import sharding
from jaxlit.configured import Configured
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica, abstract_batch, num_rows
from jaxlit.core.stack import Stack
from jaxlit.core.state import TrainState
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.strategies.create import create
from jaxlit.strategies.program import EACH, SHARED, Program, ReplicatedBatch, jit, named, state_shardings

# By strategy the shardings of each kind of batch; not in its attributes, by which compiled programs are known.
_placements: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_MOST_PLACEMENTS = 256


class Strategy(Configured, ABC):
    """How training is distributed over devices: the mesh, the shardings and the compiled step.

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

    mesh: Mesh

    per_replica = False
    """Whether a step body sees one replica's rows, not the global batch."""

    notes: Mapping[str, str] = MappingProxyType({})
    """What the model's summary prints for a parameter before its sharding, by its path."""

    several_processes = True
    """Whether it can train over the devices of several processes."""

    fuses_steps = True
    """Whether one program may take several steps, `Trainer(steps_per_execution=k)`."""

    takes_mesh = True
    """Whether it can train on a mesh of the user's."""

    mesh_axes: ClassVar[tuple[str, ...]] = ("data",)
    """The axes of such a mesh that split the batch, as far as it has them; an only axis does, whatever its name."""

    _given_mesh: Mesh | dict[str, int] | None = None  # the user's, or the sizes of its axes; None: by `mesh_shape`

    # The mesh

    def use_mesh(self, mesh: Mesh | Mapping[str, int] | None) -> None:
        """Train on a mesh of the user's; to be called before `setup`.

        Args:
            mesh: The mesh, whose axes become automatic (XLA places what no rule places); or the size of each axis by
                its name, one of them -1 at most; or None to build one.

        Raises:
            ArgumentError: The strategy takes no mesh, or it is ambiguous which axis splits the batch.
            ArgumentTypeError: `mesh` is not a mesh or a mapping.
        """
        name = type(self).__name__
        if mesh is None:
            return
        if not isinstance(mesh, (Mesh, Mapping)):
            raise ArgumentTypeError(
                f"{name}(mesh=...) takes a jax.sharding.Mesh or the sizes of its axes, such as {{'data': 2, 'fsdp': "
                f"-1}}, got {mesh!r}."
            )
        if not self.takes_mesh or self._given_mesh is not None:
            why = "has a mesh of its own already" if self.takes_mesh else "builds its own mesh"
            raise ArgumentError(
                f"{name} {why}, got mesh={mesh!r}. Leave mesh out, or use 'ddp', 'fsdp' or 'shard_map'."
            )
        names = mesh.axis_names if isinstance(mesh, Mesh) else tuple(mesh)
        axes = tuple(axis for axis in self.mesh_axes if axis in names)
        if not axes and len(names) > 1:
            raise ArgumentError(
                f"{name}(mesh=...) splits the batch over an axis named {' or '.join(map(repr, self.mesh_axes))}, got "
                f"axes {names}. Rename one of them."
            )
        self.batch_axes = axes or tuple(map(str, names))
        if isinstance(mesh, Mesh):
            self._given_mesh = Mesh(mesh.devices, names, axis_types=(AxisType.Auto,) * len(names))
        else:
            self._given_mesh = dict(mesh)

    def setup(self, devices: int | None = None) -> None:
        """Choose the devices and build the mesh; called once, before anything else.

        Args:
            devices: How many over all processes, None for all.

        Raises:
            ArgumentError: There are fewer, or a process would be left without its share; or a replica strategy splits
                rows by a `batch_spec`.
        """
        given, name = self._given_mesh, type(self).__name__
        _placements[self] = {}
        if self.per_replica and type(self).batch_spec is not Strategy.batch_spec:
            raise ArgumentError(
                f"{name}.batch_spec splits a batch, and each replica sees entire rows. Take a strategy whose step sees "
                "the entire batch: subclass DDP or FSDP."
            )
        if not isinstance(given, Mesh):
            self.mesh = self._build_mesh(sharding.first_devices(devices))
        elif devices in (None, given.size):
            self.mesh = given
        else:
            raise ArgumentError(
                f"Trainer(devices={devices}) with a mesh of {given.size} devices. Leave devices out: the mesh has "
                "the devices to use."
            )
        if (count := jax.process_count()) == 1:
            return
        per_process = Counter(d.process_index for d in self.mesh.devices.flat)
        if not self.several_processes:
            raise ArgumentError(
                f"{name} trains in one process, and there are {count}. Use strategy='ddp', 'fsdp' or 'shard_map', "
                "whose meshes span the processes."
            )
        if len(per_process) < count or len(set(per_process.values())) > 1:
            raise ArgumentError(
                f"{name} would use {self.mesh.size} devices, by process {dict(per_process)}, of {jax.device_count()} "
                f"in {count} processes. Each process must have as many: leave devices out, or give a mesh of them all."
            )

    def mesh_shape(self, device_count: int) -> dict[str, int]:
        """Return the size of each mesh axis, by name; here all devices are on `data`.

        Args:
            device_count: How many devices there are; the sizes multiply to it.
        """
        return {"data": device_count}

    def _build_mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        shape: Any = self.mesh_shape(len(devices)) if self._given_mesh is None else self._given_mesh
        return sharding.build_mesh(shape, devices, f"The mesh of {type(self).__name__}")

    # The state

    @abstractmethod
    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> TrainState:
        """Return the sharding of each leaf of the state.

        Args:
            state: The state, with `jax.ShapeDtypeStruct` leaves. Arrays of callbacks are not in it: they are split as
                the parameters are.
            model: The module taken apart; `model.origin` is the module, whose arrays may be shapes and dtypes only.
            example: The first batch of the training, for `step_program`; None where none is known yet: in an
                evaluation, or where a module is built before its loaders.

        Returns:
            The same tree, with a `NamedSharding` on `self.mesh` for each leaf.
        """

    def grad_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return the shardings of gradients in a step, a tree like `state.params`; None lets XLA choose.

        Args:
            state: See `state_sharding`.
            model: See `state_sharding`.
            example: See `state_sharding`.
        """
        return None

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array of which every device has all: counters, the metrics' sums, the loss scale."""
        return NamedSharding(self.mesh, P())

    def create_state(self, init: Callable[..., Any], shardings: Any, *inputs: Any, donate: bool = False) -> Any:
        """Run `init(*inputs)` so that each result is created in its sharding, which may be on any mesh.

        Args:
            init: A function of arrays to a pytree of arrays.
            shardings: The same pytree, of shardings.
            *inputs: Pytrees of arrays.
            donate: Whether the inputs may be overwritten.
        """
        return create(self.in_mesh(init), shardings, *inputs, donate=donate)

    def on_state(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Compile what runs on the state outside of a step.

        Args:
            fn: A function of (a list of arrays of the state, *pytrees of inputs) to a pytree. An input is split over
                the devices where its rows divide.
        """
        compiled = jit(self.mesh, self.in_mesh(fn))
        return lambda arrays, *inputs: compiled(arrays, *jax.tree.map(self._place_input, inputs))

    def _place_input(self, x: Any) -> Any:
        if self.mesh.size == 1:
            return x
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        split = x.ndim and x.shape[0] % self.num_replicas == 0
        return jax.device_put(x, self._batch_sharding(x) if split else self.replicated)

    def gather(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Return the arrays of a module as a fit leaves them; here in their shardings."""
        return arrays

    # The batch

    @property
    def num_replicas(self) -> int:
        """How many ways the rows of a batch are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    def batch_spec(self, x: Any) -> P:
        """Return how a leaf of a batch is split: its rows over `batch_axes`; a number is on each device.

        The one place that decides it, for a batch that is placed and for one inside a step. A strategy that splits
        another dim as well, for example the positions of a text, overrides it.

        Args:
            x: An array, or its shape and dtype; (rows, ...), where the rows divide by `num_replicas`.
        """
        return sharding.split_dim(0, self.batch_axes) if x.ndim else P()

    def shard_batch(self, batch: Any) -> Any:
        """Place a host batch: rows split over the devices where they divide, otherwise all of them on each.

        On one device the host arrays go straight into the step, which is cheaper.

        Args:
            batch: The batch, or in several processes this process's rows of it; `ReplicatedBatch` if it has them all.
                Of the shapes and dtypes of a global batch, as in a plan, the same with shardings is returned.
        """
        if self.mesh.size == 1:
            return batch
        replicated = isinstance(batch, ReplicatedBatch)
        arrays = batch.batch if replicated else batch
        leaves, treedef = jax.tree.flatten(arrays)
        key = treedef, replicated, *[x.shape for x in leaves]
        placements = _placements[self]
        if (shardings := placements.get(key)) is None:  # they are made once for each kind of batch
            processes = 1 if replicated else jax.process_count()
            split = num_rows(arrays) * processes % self.num_replicas == 0
            sharding_of = self._stack_sharding if isinstance(arrays, Stack) else self._batch_sharding
            shardings = jax.tree.map(sharding_of if split else lambda _: self.replicated, arrays)
            if len(placements) == _MOST_PLACEMENTS:
                placements.clear()
            placements[key] = shardings
        if leaves and leaves[0].__class__ is jax.ShapeDtypeStruct:
            return sharding.place_shapes(arrays, shardings)
        return (sharding.place_replicated if replicated else sharding.place)(arrays, shardings)

    def splits_by_process(self, batch: Any) -> bool:
        """Return whether each process places rows that no other does; otherwise it places what it needs of all rows.

        Args:
            batch: The global batch, or its shapes.
        """
        return num_rows(batch) % self.num_replicas == 0 and all(
            sharding.rows_by_process(self._batch_sharding(x), tuple(x.shape)) for x in jax.tree.leaves(batch) if x.ndim
        )

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

    def _stack_sharding(self, x: Any) -> NamedSharding:
        spec = tuple(self.batch_spec(x[:, 0]))
        return NamedSharding(self.mesh, P(*(spec[:1] or (None,)), None, *spec[1:]))

    # The step

    @property
    def replica(self) -> Replica:
        """What a step body sees."""
        return Replica(constrain_batch=self._constrain_batch)

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
        programs: list[Any] = []

        def keep(replica: Replica, params: Any, frozen: Any, model_state: Any, counters: Any, batch: Any) -> None:
            args = params, frozen, model_state, replica.constrain_batch(batch), *counters[:3]
            programs.append(jax.make_jaxpr(model.body("training", replica))(*args))

        # With the types that the placed state will have: jax keeps a trace by them.
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.replicated), state)
        states = *placed.variables, placed.counters
        self.trace(keep, states, self.replica.part_of(example))
        return programs[0]

    def wrap_body(self, body: Callable[..., Any], shardings: TrainState) -> Callable[..., Any]:
        """Return the user's step as it is to be traced into a program; here as it is.

        Args:
            body: A function of (params, frozen, model_state, ...), as `PureModule.body` returns it.
            shardings: The sharding of each leaf of the state.
        """
        return body

    def compile(self, program: Program) -> Callable[..., Any]:
        """Return a function of `(*states, batch)` that runs the program, compiled at its first call.

        If it has `trace`, as a function of `jax.jit` has, `Trainer.explain` reports what the program costs.
        """
        body = named(program.name, self.in_mesh(partial(program.fn, self.replica)))
        # XLA chooses the shardings of what a step returns next to the state and the metrics.
        out = tuple(
            sharding if sharding is not None else self.replicated if x is SHARED or x is EACH else None
            for sharding, x in zip(state_shardings(program), program.outputs, strict=True)
        )
        return jit(self.mesh, body, out_shardings=out, donate_argnums=program.donate)

    def describe(self) -> str:
        """Return the name, the mesh, and why it was chosen; a strategy may add lines."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"{type(self).__name__} on mesh {mesh}" + (f" ({self.reason})" if self.reason else "")
