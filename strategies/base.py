"""What a strategy is."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import sharding
from jaxlit.core.replica import Replica, num_rows
from jaxlit.core.state import TrainState
from jaxlit.errors import ArgumentError, StateError
from jaxlit.leaf_names import is_key
from jaxlit.strategies.program import Out, Program, named, state_shardings


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Whole:
    """A batch of which every replica, or in several processes every process, has all rows: they do not divide."""

    batch: Any


class Strategy(ABC):
    """How training is laid out over devices: the mesh, the shardings and the compiled step.

    A subclass that shards the state in its own way overrides `state_sharding` only: the step is then
    compiled by `jax.jit`, sees the global batch, and XLA adds the collectives.

    Example:
        >>> import jax, jaxlit as jl
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> @jl.register_strategy("copies")
        ... class Copies(jl.Strategy):
        ...     def state_sharding(self, state):
        ...         return jax.tree.map(lambda _: NamedSharding(self.mesh, P()), state)
        >>> trainer = jl.Trainer(strategy="copies", max_epochs=1, logger=False)
    """

    batch_axes: tuple[str, ...] = ("data",)
    """The mesh axes that the batch's rows are split over, together."""

    reason = ""
    """Why "auto" chose this strategy; empty if it was named."""

    mesh: jax.sharding.Mesh

    several_processes = True
    """Whether it can train over the devices of several processes."""

    given_mesh: jax.sharding.Mesh | None = None
    """A mesh of the user's own; None builds one over the devices."""

    def setup(self, devices: Sequence[jax.Device]) -> None:
        """Build the mesh over `devices`; called once a fit, before anything else."""
        if self.given_mesh is not None:
            self.mesh = self.given_mesh
            return
        self.mesh = sharding.mesh(self.mesh_shape(len(devices)), devices)

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
        if (mesh := self.given_mesh) is not None:
            if devices not in (None, mesh.size):
                raise ArgumentError(
                    f"Trainer(devices={devices}) with a mesh of {mesh.size} devices. Leave devices out: the mesh says "
                    "which to use."
                )
            return list(mesh.devices.flat)
        present = jax.devices()
        if devices is None:
            return present
        if devices > len(present):
            hint = f" Set XLA_FLAGS=--xla_force_host_platform_device_count={devices} to simulate them."
            raise ArgumentError(
                f"Trainer(devices={devices}) asks for more devices than the {len(present)} "
                f"{present[0].platform} devices here.{hint if present[0].platform == 'cpu' else ''}"
            )
        return present[:devices]

    @abstractmethod
    def state_sharding(self, state: TrainState) -> TrainState:
        """Return the sharding of each leaf of the state.

        Args:
            state: The state, with `jax.ShapeDtypeStruct` leaves. Arrays of callbacks are not in it: they are split as
                the parameters are.

        Returns:
            The same tree, with a `NamedSharding` on `self.mesh` for each leaf.
        """

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
        return Replica(constrain_batch=self._constrain_batch, constrain_grads=self.constrain_grads)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device holds whole."""
        return NamedSharding(self.mesh, P())

    @property
    def home(self) -> NamedSharding:
        """Where the counters, the metrics' sums and the loss scale lie."""
        return self.replicated

    def constrain_grads(self, grads: Any) -> Any:
        """Shard gradients inside the step; here XLA decides."""
        return grads

    def create_state(self, init: Callable[..., Any], shardings: Any, *inputs: Any, donate: bool = False) -> Any:
        """Run `init(*inputs)` so that each result is born in its sharding.

        Args:
            init: A function of arrays to a pytree of arrays.
            shardings: The same pytree, of shardings.
            *inputs: Pytrees of arrays.
            donate: Whether the inputs may be overwritten.
        """
        if inputs and not donate:
            # Arrays that the caller holds may be committed to other devices.
            inputs = jax.tree.map(self._here, inputs)
        leaves, treedef = jax.tree.flatten(inputs)
        # What holds a typed key comes out as raw data, for which its buffer cannot be used again.
        kept = [x if is_key(x) else None for x in leaves]

        def build(given: list[Any], kept: list[Any]) -> Any:
            return init(*treedef.unflatten(y if x is None else x for x, y in zip(kept, given, strict=True)))

        given = [None if is_key(x) else x for x in leaves]
        build = named("create_state", self.in_mesh(build))
        made = jax.jit(build, out_shardings=shardings, donate_argnums=0 if donate else ())(given, kept)
        # Without jit nothing follows out_shardings.
        return jax.device_put(made, shardings) if jax.config.jax_disable_jit else made  # type: ignore[attr-defined]

    def _here(self, x: Any) -> jax.Array:
        # What lies on these devices already stays as it is split: whole on each, it might not fit.
        if isinstance(x, jax.Array) and x.sharding.device_set == set(self.mesh.devices.flat):
            return x
        if self.num_processes == 1:
            return jax.device_put(x, self.replicated)
        key = is_key(x)  # which jax does not put onto the devices of other processes
        try:
            data = jax.device_put(jax.random.key_data(x) if key else x, self.replicated)
        except AssertionError as error:
            raise StateError(
                "The module's weights are not the same in every process. Build it with the same seed everywhere."
            ) from error
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x)) if key else data

    @property
    def num_processes(self) -> int:
        """How many processes hold the devices; each places its own rows of a batch."""
        return jax.process_count() if self.mesh.is_multi_process else 1

    def shard_batch(self, batch: Any) -> Any:
        """Place a host batch: rows split over the devices where they divide, otherwise whole on each.

        On one device the host arrays go straight into the step, which is cheaper.

        Args:
            batch: The batch, or in several processes this process's rows of it; `Whole` if it has them all.
        """
        if self.mesh.size == 1:
            return batch
        whole = isinstance(batch, Whole) or num_rows(batch) * self.num_processes % self.num_replicas
        batch = batch.batch if isinstance(batch, Whole) else batch
        lies = (lambda _: self.replicated) if whole else self._batch_sharding
        return sharding.place(batch, jax.tree.map(lies, batch))

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
        """Return `fn` with the mesh in context while it is traced, so that what it runs may name the mesh's axes.

        A mesh that is in context already, by `jax.set_mesh`, stays.
        """

        def call(*args: Any) -> Any:
            if not jax.sharding.get_abstract_mesh().empty:
                return fn(*args)
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
        """Return a function of `(*states, batch)` that runs the program, compiled at its first call."""
        body = named(program.name, self.in_mesh(partial(program.fn, self.replica)))
        # What a step returns beside the state and the metrics may lie as XLA likes.
        out = tuple(
            held if held is not None else self.replicated if isinstance(x, Out) else None
            for held, x in zip(state_shardings(program), program.outputs, strict=True)
        )
        return jax.jit(body, out_shardings=out, donate_argnums=program.donate)

    def canonical(self, state: TrainState) -> TrainState:
        """Return the state as global arrays on the mesh, one copy of each."""
        return state

    def describe(self) -> str:
        """Return one line for people: the name, the mesh, and why it was chosen."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"{type(self).__name__} on mesh {mesh}" + (f" ({self.reason})" if self.reason else "")


def own_mesh(strategy: Strategy, mesh: Any, known: tuple[str, ...] = ("data",)) -> None:
    """Make a strategy use a mesh of the user's own, whose batch axes it takes over.

    Args:
        strategy: The strategy.
        mesh: The mesh, or None. Its axes become automatic: XLA places what no rule places.
        known: The names of axes that split the batch; an only axis splits it whatever its name.

    Raises:
        ArgumentError: It is no mesh, or it does not tell which axis splits the batch.
    """
    if mesh is None:
        return
    name = type(strategy).__name__
    if not isinstance(mesh, jax.sharding.Mesh):
        raise ArgumentError(f"{name}(mesh=...) takes a jax.sharding.Mesh, got {mesh!r}. Make one by jax.make_mesh.")
    axes = tuple(axis for axis in known if axis in mesh.axis_names)
    if not axes and len(mesh.axis_names) > 1:
        raise ArgumentError(
            f"{name}(mesh=...) splits the batch over an axis named {' or '.join(map(repr, known))}, got axes "
            f"{mesh.axis_names}. Rename one of them."
        )
    strategy.batch_axes = axes or tuple(map(str, mesh.axis_names))
    automatic = (AxisType.Auto,) * len(mesh.axis_names)
    strategy.given_mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=automatic)


def abstract_batch(batch: Any) -> Any:
    """Return the shapes and dtypes that a batch has inside a step, where 64-bit numbers are 32."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)), batch)


def with_rows(batch: Any, rows: int) -> Any:
    """Return the shapes and dtypes of a batch of another number of rows."""
    resized = lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) if x.shape else x  # noqa: E731
    return jax.tree.map(resized, abstract_batch(batch))
