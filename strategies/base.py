"""What a strategy is: the `Strategy` base class, and before it the `Program`, a step that a strategy compiles.

The functions after it compile programs, find shardings of arrays that belong to parameters, and create arrays in their
shardings.
"""

import contextlib
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import checks as check
from jaxlit import sharding
from jaxlit.core.derived_steps import MicrobatchStep, Stack
from jaxlit.core.optimizer import RealParts
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica, abstract_batch, num_rows
from jaxlit.core.train_state import TrainState
from jaxlit.distributed.job import same_program
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.faces import Configured
from jaxlit.programs.jaxpr import reaches
from jaxlit.sharding import carry, over_axes, place_replicated
from jaxlit.strategies.rules import Rules, placed_by_names
from jaxlit.texts import is_key, keys_of


@dataclass(frozen=True)
class Program:
    """A step to compile: `fn(replica, *states, batch)`, where a state is a flat list of arrays.

    Attributes:
        name: The name under which it compiles, for example `train_step`.
        kind: "train" for an optimizer step, "micro" for a batch of a window that continues, "eval" for an evaluation.
        fn: The body.
        inputs: The spec of each array of each state.
        outputs: A list of `ArraySpec` for a state, else a pytree of `EACH`, `ROWS` and `SHARED`.
        donate: Indices of the states that the step may overwrite.
        passes: The passes over parts of a batch, for a strategy that takes gradients itself; else None.
    """

    name: str
    kind: str
    fn: Callable[..., Any]
    inputs: tuple[list["ArraySpec"], ...]
    outputs: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    passes: MicrobatchStep | None = None


@dataclass(frozen=True)
class ArraySpec:
    """How an array of the state is stored on the devices.

    Attributes:
        sharding: The sharding of the global array.
        per_replica: Each replica has its own part along a leading dim, which the step body does not see.
    """

    sharding: NamedSharding
    per_replica: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ReplicatedBatch:
    """A batch whose rows do not divide: every replica, or each of several processes, has all rows."""

    batch: Any


class Out:
    """The kind of an output that is not a state."""


AXIS_TYPES = ("auto", "explicit")  # of the axes of a mesh, by jax's names

SHARED = Out()  # the same on every replica
EACH = Out()  # one value a replica, stacked along a new leading dim
ROWS = Out()  # one row for each row of the batch


# The members of jax.checkpoint_policies that are policies; the others return one for arguments.
_POLICIES = ("everything_saveable", "nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")

# By strategy the shardings of each kind of batch; not in its attributes, by which compiled programs are identified.
_placements: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()
_MOST_PLACEMENTS = 256


class Strategy(Configured):
    """How training is distributed over devices: the mesh, the shardings and the compiled step.

    A subclass that shards the state in another way overrides `state_sharding` only: the step is then compiled by
    `jax.jit`, sees the global batch, and XLA adds the collectives.

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
    """Whether the strategy can train over the devices of several processes."""

    fuses_steps = True
    """Whether one program may take several steps, `Trainer(steps_per_execution=k)`."""

    takes_mesh = True
    """Whether the strategy can train on a mesh of the user's."""

    mesh_axes: ClassVar[tuple[str, ...]] = ("data", "batch")
    """The axes of a user's mesh that split the batch, if it has them; a single axis does, whatever its name."""

    axis_types: str = "auto"
    """ "explicit" makes all axes of the mesh Explicit; "auto" those that a `Mesh` of the user's has as such."""

    explicit_axes: tuple[str, ...] = ()
    """The mesh axes that are Explicit in the model: how an array is split over them is part of its type."""

    types_arrays = True
    """Whether a step can have Explicit axes; otherwise those of a user's mesh are Auto."""

    _user_mesh: Mesh | dict[str, int] | None = None  # the mesh, or the sizes of its axes; None: by `mesh_shape`

    def use_mesh(self, mesh: Mesh | Mapping[str, int] | None) -> None:
        """Train on a mesh of the user's; call this before `setup`.

        Args:
            mesh: The mesh, whose axes keep their types in a step; or the size of each axis by name, one of them -1 at
                most; or None to build a mesh.

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
        if not self.takes_mesh or self._user_mesh is not None:
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
            self.explicit_axes = sharding.explicit_axes(mesh) if self.types_arrays else ()
            self._user_mesh = sharding.with_types(mesh, ())
        else:
            self._user_mesh = dict(mesh)

    def setup(self, devices: int | None = None) -> None:
        """Choose the devices and build the mesh; called once, before anything else.

        Args:
            devices: How many devices over all processes, None for all.

        Raises:
            ArgumentError: There are fewer devices, or a process would have no share of them; or a replica strategy
                splits rows by a `batch_spec`.
        """
        mesh, name = self._user_mesh, type(self).__name__
        _placements[self] = {}
        if self.per_replica and type(self).batch_spec is not Strategy.batch_spec:
            raise ArgumentError(
                f"{name}.batch_spec splits a batch, and each replica sees entire rows. Take a strategy whose step sees "
                "the entire batch: subclass DDP or FSDP."
            )
        if not isinstance(mesh, Mesh):
            self.mesh = self._build_mesh(sharding.first_devices(devices))
        elif devices in (None, mesh.size):
            self.mesh = mesh
        else:
            raise ArgumentError(
                f"Trainer(devices={devices}) with a mesh of {mesh.size} devices. Leave devices out: the mesh has "
                "the devices to use."
            )
        if self.axis_types == "explicit":
            self.explicit_axes = self.mesh.axis_names
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
        """Return the size of each mesh axis, by name; the sizes multiply to `device_count`. Here all are on `data`."""
        return {"data": device_count}

    def _build_mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        shape: Any = self.mesh_shape(len(devices)) if self._user_mesh is None else self._user_mesh
        return sharding.build_mesh(shape, devices, f"The mesh of {type(self).__name__}")

    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return the sharding of each leaf of the state: here every device has all of it.

        On Explicit axes an array to which the module gives a sharding has that one.

        Args:
            state: The state, with `jax.ShapeDtypeStruct` leaves, without arrays of callbacks: these are split like the
                parameters.
            model: The module taken apart; `model.origin` is the module, whose arrays may be shapes and dtypes only.
            example: The first batch of the training, for `step_program`; None if it is not known: in an evaluation, or
                for a module that is built before its loaders.

        Returns:
            The same tree, with a `NamedSharding` on `self.mesh` for each leaf.
        """
        if not self.explicit_axes:
            return jax.tree.map(lambda _: self.replicated, state)
        placed = placed_by_names(Rules(), model.origin, state.variables, self.mesh, lambda _: self.replicated)
        params, frozen, model_state = placed
        shardings = like_params(state, state.params, params, self.replicated)
        return replace(shardings, params=params, frozen=frozen, model_state=model_state)

    def used_sharding(self, shardings: TrainState, model: PureModule) -> Any:
        """Return the shardings of (params, frozen, model_state) while a step uses them; here as they are stored.

        Args:
            shardings: What `state_sharding` has returned.
            model: The module taken apart.
        """
        return shardings.variables

    def grad_sharding(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Return the shardings of gradients in a step, a tree like `state.params`; None lets XLA choose.

        The arguments are those of `state_sharding`.
        """
        return None

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device has entirely: counters, sums of metrics, the loss scale."""
        return NamedSharding(self.mesh, P())

    def create_state(self, init: Callable[..., Any], shardings: Any, *inputs: Any, donate: bool = False) -> Any:
        """Run `init(*inputs)` so that each result is created in its sharding, which may be on any mesh.

        If the results are on several sets of devices, each set computes its own: no device ever holds another's.

        Args:
            init: A function of arrays to a pytree of arrays.
            shardings: The same pytree, of shardings.
            *inputs: Pytrees of arrays.
            donate: Whether the inputs may be overwritten.
        """
        targets, treedef = jax.tree.flatten(shardings)
        groups: dict[Any, list[int]] = {}
        for i, target in enumerate(targets):
            groups.setdefault(tuple(target.mesh.devices.flat), []).append(i)
        arrays: list[Any] = [None] * len(targets)
        for indices in groups.values():
            part, part_inputs = partial(_leaves_at, tuple(indices), self.in_mesh(init)), inputs
            if len(groups) > 1:
                part, part_inputs = _of_used_inputs(part, inputs)
            part_shardings = [targets[i] for i in indices]
            part_arrays = _create_on_mesh(part, part_shardings, part_inputs, donate=donate and len(groups) == 1)
            for i, array in zip(indices, part_arrays, strict=True):
                arrays[i] = array
        return treedef.unflatten(arrays)

    def on_state(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a function of (a list of arrays of the state, *pytrees of inputs), to run outside of a step.

        An input is split over the devices if its rows divide.
        """

        def run(arrays: Any, *inputs: Any) -> Any:
            return fn(arrays, *(jax.sharding.reshard(inputs, self.replicated) if self.mesh.size == 1 else inputs))

        compiled = self.under_mesh(jit(self.mesh, self.in_mesh(run)))
        return lambda arrays, *inputs: compiled(arrays, *jax.tree.map(self._place_input, inputs))

    def _place_input(self, x: Any) -> Any:
        if self.mesh.size == 1:
            return x
        x = x if isinstance(x, jax.Array) else np.asarray(x)
        divides = x.ndim and x.shape[0] % self.num_replicas == 0
        return jax.device_put(x, self._batch_sharding(x) if divides else self.replicated)

    def gather(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Return the arrays of a module as they are after a fit; here in their shardings."""
        return arrays

    @property
    def num_replicas(self) -> int:
        """How many ways the rows of a batch are split."""
        return math.prod(self.mesh.shape[axis] for axis in self.batch_axes)

    def batch_spec(self, x: Any) -> P:
        """Return how a leaf of a batch is split: its rows over `batch_axes`; a number is on each device.

        This decides for a batch that is placed and for a batch inside a step. A strategy that splits another dim as
        well, for example the positions of a text, overrides it.

        Args:
            x: An array, or its shape and dtype; (rows, ...), where the rows divide by `num_replicas`.
        """
        return sharding.split_dim(0, self.batch_axes) if x.ndim else P()

    def shard_batch(self, batch: Any) -> Any:
        """Place a host batch: rows are split over the devices if they divide, otherwise all rows are on each device.

        On one device the host arrays go directly into the step, which is cheaper.

        Args:
            batch: The batch, or in several processes this process's rows of it; `ReplicatedBatch` if it has all rows.
                The shapes and dtypes of a global batch, as in a plan, are returned with shardings.
        """
        if self.mesh.size == 1:
            return batch
        replicated = isinstance(batch, ReplicatedBatch)
        arrays = batch.batch if replicated else batch
        leaves, treedef = jax.tree.flatten(arrays)
        key = treedef, replicated, *[x.shape for x in leaves]
        placements = _placements[self]
        if (shardings := placements.get(key)) is None:  # they are built once for each kind of batch
            processes = 1 if replicated else jax.process_count()
            divides = num_rows(arrays) * processes % self.num_replicas == 0
            sharding_of = self._stack_sharding if isinstance(arrays, Stack) else self._batch_sharding
            shardings = jax.tree.map(sharding_of if divides else lambda _: self.replicated, arrays)
            if len(placements) == _MOST_PLACEMENTS:
                placements.clear()
            placements[key] = shardings
        if leaves and leaves[0].__class__ is jax.ShapeDtypeStruct:
            return sharding.place_shapes(arrays, shardings)
        return (sharding.place_replicated if replicated else sharding.place)(arrays, shardings)

    def splits_by_process(self, batch: Any) -> bool:
        """Return whether each process places rows that no other does, by a global batch or its shapes.

        Otherwise each process has all rows, and places those that its devices need.
        """
        return num_rows(batch) % self.num_replicas == 0 and all(
            sharding.rows_by_process(self._batch_sharding(x), tuple(x.shape)) for x in jax.tree.leaves(batch) if x.ndim
        )

    def _constrain_batch(self, batch: Any) -> Any:
        if self.mesh.size == 1:  # no constraint, but a type: that of a host array names no mesh
            is_in_context = jax.sharding.get_abstract_mesh().axis_names == self.mesh.axis_names
            return jax.sharding.reshard(batch, P()) if is_in_context else batch
        if num_rows(batch) % self.num_replicas and self.num_replicas < self.mesh.size:
            # XLA adds the padding of an uneven part to the gradient of a lookup if several devices hold that part.
            return jax.lax.with_sharding_constraint(batch, self.replicated)
        # Otherwise a sharding may be uneven inside a step: a batch that does not divide is computed sharded too.
        return jax.tree.map(
            lambda x: jax.lax.with_sharding_constraint(x, self._batch_sharding(x)) if x.ndim else x, batch
        )

    def _batch_sharding(self, x: Any) -> NamedSharding:
        return NamedSharding(self.mesh, self.batch_spec(x))

    def _stack_sharding(self, x: Any) -> NamedSharding:
        spec = tuple(self.batch_spec(x[:, 0]))
        return NamedSharding(self.mesh, P(*(spec[:1] or (None,)), None, *spec[1:]))

    @property
    def replica(self) -> Replica:
        """What a step body sees."""
        return Replica(constrain_batch=self._constrain_batch)

    def in_mesh(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn` with the mesh in context while it is traced, so that its code may name the mesh's axes."""

        def call(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
                return fn(*args)

        return call

    @property
    def model_mesh(self) -> Mesh:
        """The mesh as a model sees it, with the user's axis types; those of `mesh`, which the state is on, are Auto."""
        return sharding.with_types(self.mesh, self.explicit_axes) if self.explicit_axes else self.mesh

    def typed(self, fn: Callable[..., Any], variables: Any) -> Callable[..., Any]:
        """Return `fn(params, frozen, model_state, batch, ...)` run where the user's Explicit axes are such.

        State and batch get types by their shardings; results leave without types. Without such axes it is `fn` itself.

        Args:
            fn: The function, or one without arguments.
            variables: The shardings of its first three arguments, () for none.
        """
        if not self.explicit_axes:
            return fn

        def call(*args: Any) -> Any:
            rows, numbers = jax.tree.map(self._type_of_rows, args[3:4]), jax.tree.map(lambda _: P(), args[4:])
            specs = *jax.tree.map(self._type_of, variables), *rows, *numbers
            return jax.sharding.explicit_axes(fn, axes=self.explicit_axes, in_sharding=specs)(*args)

        return call

    def under_mesh(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that traces, called where a mesh with Explicit axes is set, if the model has such axes."""
        return sharding.under(self.model_mesh, fn) if self.explicit_axes else fn

    def _type_of(self, sharding: NamedSharding) -> P:
        # The axes of another mesh, into which `by_size` has divided an axis, are not those of the model.
        return over_axes(sharding.spec, self.explicit_axes) if sharding.mesh == self.mesh else P()

    def _type_of_rows(self, x: Any) -> P:
        divides = x.ndim and x.shape[0] % self.num_replicas == 0
        return self._type_of(self._batch_sharding(x)) if divides else P()  # a type may not be uneven

    def trace(self, fn: Callable[..., None], states: tuple[Any, ...], batch: Any, used: Any) -> None:
        """Run `fn(replica, *states, batch)` on abstract values of a host batch, as the compiled step will run it.

        Args:
            fn: The function.
            states: Params, frozen, model_state and counters, or their shapes and dtypes.
            batch: The batch.
            used: The shardings of the first three, as `used_sharding` returns them.
        """

        def run(params: Any, frozen: Any, model_state: Any, batch: Any, counters: Any) -> None:
            fn(self.replica, params, frozen, model_state, counters, batch)

        def call(batch: Any, counters: Any, *variables: Any) -> None:
            self.typed(run, used)(*variables, self.replica.constrain_batch(batch), counters)

        *variables, counters = states
        self.under_mesh(jax.eval_shape)(self.in_mesh(call), abstract_batch(batch), counters, *variables)

    def step_program(self, state: TrainState, model: PureModule, example: Any) -> Any:
        """Trace the user's training step; jax reuses the trace later.

        The arguments are those of `state_sharding`, with an `example`.

        Returns:
            A `jax.extend.core.ClosedJaxpr`, whose first inputs are the leaves of params, frozen and model_state.
        """
        programs: list[Any] = []

        def append(replica: Replica, params: Any, frozen: Any, model_state: Any, counters: Any, batch: Any) -> None:
            args = params, frozen, model_state, batch, *counters[:3]
            programs.append(jax.make_jaxpr(model.body("training", replica))(*args))

        # With the types that the placed state will have: jax caches a trace by them.
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.replicated), state)
        used = None
        if self.explicit_axes:
            used = self.used_sharding(self.state_sharding(state, model, None), model)
        self.trace(append, (*placed.variables, placed.counters), self.replica.part_of(example), used)
        return programs[0]

    def wrap_body(self, body: Callable[..., Any], stored: Any, used: Any) -> Callable[..., Any]:
        """Return the function to trace for the user's step; on Auto axes `body` itself.

        Args:
            body: A function of (params, frozen, model_state, batch, ...), as `PureModule.body` returns it.
            stored: The shardings of the first three.
            used: What `used_sharding` returns for them.
        """
        return self.typed(body, used)

    def compile(self, program: Program) -> Callable[..., Any]:
        """Return a function of `(*states, batch)` that runs the program, compiled at its first call.

        If it has `trace`, as a function of `jax.jit` has, `Trainer.explain` reports what the program costs.
        """
        body = named(program.name, self.in_mesh(partial(program.fn, self.replica)))
        # XLA chooses the shardings of results other than the state and the metrics.
        out = tuple(
            sharding if sharding is not None else self.replicated if x is SHARED or x is EACH else None
            for sharding, x in zip(state_shardings(program), program.outputs, strict=True)
        )
        return self.under_mesh(jit(self.mesh, body, out_shardings=out, donate_argnums=program.donate))

    def describe(self) -> str:
        """Return the name, the mesh, and why the strategy was chosen; a subclass may add lines."""
        mesh = " x ".join(f"{axis}={size}" for axis, size in self.mesh.shape.items())
        return f"{type(self).__name__} on mesh {mesh}" + (f" ({self.reason})" if self.reason else "")


def state_shardings(program: Program) -> tuple[Any, ...]:
    """Return the shardings of the states that a program returns, and None, XLA's choice, for its other results.

    A sharding that XLA chose for a state could differ from the former one, for example for an array without elements,
    and the next call would compile again.
    """
    return tuple(
        # A user's step may return another list.
        [spec.sharding for spec in x] if isinstance(x, list) and all(isinstance(y, ArraySpec) for y in x) else None
        for x in program.outputs
    )


def jit(mesh: jax.sharding.Mesh, fn: Callable[..., Any], **options: Any) -> Any:
    """Compile a program with collectives over a mesh by `jax.jit`, which takes the options."""
    if mesh.devices.flat[0].platform == "cpu" and mesh.size > 1:
        # Otherwise the collectives of a loop run at once, for which simulated devices have too few threads: they wait
        # for each other, and the process is ended.
        scheduling = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
        options["compiler_options"] = scheduling | options.get("compiler_options", {})
    return jax.jit(fn, **options)


def remat_policy(remat: bool | str | Callable[..., Any], owner: str) -> Any:
    """Return a policy of `jax.checkpoint`, what a backward pass saves; None for False, to save everything."""
    if callable(remat):
        return remat
    valid = isinstance(remat, bool) or remat in _POLICIES
    rule = f"takes True, False or one of {', '.join(_POLICIES)}, or a policy of jax.checkpoint_policies"
    check.require(valid, "remat", remat, rule, owner=owner)
    name = "nothing_saveable" if remat is True else remat
    return getattr(jax.checkpoint_policies, name) if name else None


def named(name: str, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` under another name, by which its compiled program is reported."""

    def call(*args: Any) -> Any:
        return fn(*args)

    call.__name__ = call.__qualname__ = name
    return call


def like_params(state: Any, params: Any, shardings: Any, default: NamedSharding) -> Any:
    """Give each leaf of a state the sharding of the parameter that it belongs to.

    A leaf belongs to the parameter that has its shape, and a path that its own path ends with, but for the part of a
    complex number. This holds for optimizers that mask, partition or factor as well, where optax's map over parameters
    fails.

    Args:
        state: A state of an optimizer or a callback, or the training state, of `jax.ShapeDtypeStruct`s.
        params: The parameters, of `jax.ShapeDtypeStruct`s.
        shardings: The shardings of the parameters.
        default: The sharding of the other leaves.

    Returns:
        A tree of shardings like `state`.

    Example:
        >>> import jax, jaxlit as jl, optax
        >>> from jax.sharding import NamedSharding, PartitionSpec as P
        >>> mesh = jl.sharding.mesh({"data": -1})
        >>> split, replicated = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
        >>> params = {"w": jax.ShapeDtypeStruct((64, 2), "float32")}
        >>> state = jax.eval_shape(optax.adam(1e-3).init, params)
        >>> adam, _ = jl.strategies.like_params(state, params, {"w": split}, replicated)
        >>> adam.mu["w"] == split, adam.count == replicated
        (True, True)
    """
    pairs = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(shardings), strict=True)
    known = {_keys(path): (x.shape, sharding) for (path, x), sharding in pairs}
    known = {(*keys, part): x for keys, x in known.items() for part in RealParts._fields} | known

    def sharding_of(path: tuple[Any, ...], x: Any) -> NamedSharding:
        keys = _keys(path)
        for start in range(len(keys)):
            shape, sharding = known.get(keys[start:], (None, default))
            if shape == x.shape:
                return sharding
        return default

    return jax.tree_util.tree_map_with_path(sharding_of, state)


def _keys(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(map(str, keys_of(path)))


def _leaves_at(indices: tuple[int, ...], init: Callable[..., Any], *inputs: Any) -> list[jax.Array]:
    leaves = jax.tree.leaves(init(*inputs))  # XLA drops what only the other leaves need
    return [leaves[i] for i in indices]


def _of_used_inputs(init: Callable[..., Any], inputs: Any) -> tuple[Callable[..., Any], Any]:
    """Return a function of only the inputs that the results depend on, and these inputs: no others are sent."""
    leaves, treedef = jax.tree.flatten(inputs)
    closed = jax.make_jaxpr(lambda *x: init(*treedef.unflatten(x)))(*leaves)
    is_used = reaches(closed.jaxpr, range(len(closed.jaxpr.outvars)))
    indices = [i for i in range(len(leaves)) if is_used[i]]

    def call(*used: Any) -> Any:
        values = dict(zip(indices, used, strict=True))
        zeros_or_values = (values[i] if i in values else jnp.zeros(x.shape, x.dtype) for i, x in enumerate(leaves))
        return jaxpr_as_fun(closed)(*zeros_or_values)

    return call, tuple(leaves[i] for i in indices)


def _create_on_mesh(init: Callable[..., Any], shardings: list[Any], inputs: Any, *, donate: bool) -> list[jax.Array]:
    # Arrays that the caller holds may be committed to other devices.
    inputs = jax.tree.map(sharding.untyped if donate else lambda x: _onto(x, shardings[0].mesh), inputs)
    leaves, treedef = jax.tree.flatten(inputs)
    # Typed keys are not donated: they become raw data, for which a buffer cannot be reused.
    keys = [x if is_key(x) else None for x in leaves]
    arrays = [None if is_key(x) else x for x in leaves]

    def build(arrays: list[Any], keys: list[Any]) -> Any:
        return init(*treedef.unflatten(y if x is None else x for x, y in zip(keys, arrays, strict=True)))

    build = named("create_state", build)
    program = jax.jit(build, out_shardings=shardings, donate_argnums=0 if donate else ())
    with _kernel_of_random_bits(shardings[0].mesh):
        same_program("create_state", lambda: program.trace(arrays, keys))
        results = program(arrays, keys)
    # Without jit, out_shardings have no effect.
    return jax.device_put(results, shardings) if jax.config.jax_disable_jit else results  # type: ignore[attr-defined]


@contextlib.contextmanager
def _kernel_of_random_bits(mesh: Mesh) -> Iterator[None]:
    """Draw random bits on a single GPU by jax's own kernel, which draws the same bits.

    Otherwise XLA unrolls the drawing, and takes minutes to compile the weights of a few dozen layers. On several
    devices it could not split the kernel.
    """
    name, config = "jax_threefry_gpu_kernel_lowering", jax.config
    is_set = getattr(config, name, True)  # True: a jax that has no such flag chooses by itself
    if is_set or mesh.size > 1 or mesh.devices.flat[0].platform != "gpu":
        yield
        return
    config.update(name, True)
    try:
        yield
    finally:
        config.update(name, False)


def _onto(x: Any, mesh: jax.sharding.Mesh) -> jax.Array:
    # An array on these devices keeps its sharding: replicated, it might not fit.
    if isinstance(x, jax.Array) and x.sharding.device_set == set(mesh.devices.flat):
        return sharding.untyped(x)
    replicated = NamedSharding(mesh, P())
    if not mesh.is_multi_process:
        return jax.device_put(x, replicated)
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return carry(x, replicated)
    # The processes have compared their arrays: jax would send all of them around to compare them.
    if is_key(x):  # which jax does not put onto the devices of other processes
        data = place_replicated(jax.random.key_data(x), replicated)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return place_replicated(x, replicated)
