"""The compiled programs of a population: each runs one member's program for all members, divided over the devices."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import sharding
from jaxlit.core.derived_steps import eval_step
from jaxlit.core.inspection import inspect_evaluation, inspect_step
from jaxlit.core.log import StepTable, Table
from jaxlit.core.module import takes_loader
from jaxlit.core.train_state import Layout
from jaxlit.engine.state import StateSpec
from jaxlit.engine.training import trace_step
from jaxlit.errors import ArgumentError
from jaxlit.populations.members import (
    OWNER,
    Kind,
    Member,
    abstract,
    check_same_logs,
    check_same_state,
    kind_of,
    trace_of,
)
from jaxlit.programs.lifting import DifferentError, is_same, lift
from jaxlit.strategies.base import named

_logger = logging.getLogger("jaxlit")

_AXIS = "members"
_TRAINING = ("training", None)


def members_mesh(count: int, devices: int | None) -> Mesh:
    """Return a mesh of the most devices over which the members divide, at most `devices`."""
    present = sharding.first_devices(devices)
    size = max(n for n in range(1, len(present) + 1) if count % n == 0)
    if size < min(count, len(present)):
        _logger.warning(
            "jl.fit_many: %d members use %d of %d devices, the most that divide them. A multiple of %d uses all.",
            *(count, size, len(present), len(present)),
        )
    return sharding.build_mesh({_AXIS: size}, present[:size], "The mesh of jl.fit_many")


class Programs:
    """The programs of a population, one for each kind of batch.

    Given are the mesh that the members are spread over, and the shapes and dtypes of the first batches.

    Attributes:
        members: The members; their specs have the metrics of the training step.
        numbers: The numbers in which the programs so far differ between members, (members, ...) each.
    """

    def __init__(self, mesh: Mesh, train_example: Any, val_example: Any = None) -> None:
        self.members, self.mesh, self.numbers = list[Member](), mesh, list[np.ndarray]()
        self._first_batches = (train_example, val_example)
        self._split, self._shared = NamedSharding(mesh, P(_AXIS)), NamedSharding(mesh, P())
        self._compiled = dict[Any, Callable[..., Any]]()
        self._kinds = dict[int, Kind]()  # by the first member of each

    def add(self, member: Member) -> None:
        """Add a member, before the next one is built; refuse other arrays or metrics than those of the first member."""
        if self.members:
            check_same_state(self.members[0], member)
        kind = kind_of(member.training, self._examples(member))
        if self._kinds:
            check_same_logs(self.members[0].name, self._kinds[0], member.name, kind)
        else:
            for stage, example in self._examples(member).items():
                inspect = inspect_step if stage == _TRAINING else partial(inspect_evaluation, *stage)
                self._inspect(member, stage, inspect, example)
        table = (self.members or [member])[0].pure.table(*_TRAINING)
        spec = member.training.spec.with_metrics(table)
        member = replace(member, training=replace(member.training, spec=spec))
        like = next((i for i, other in self._kinds.items() if kind.is_same(other)), member.index)
        self._kinds.setdefault(like, kind)
        self.members.append(replace(member, like=like))

    def compile(self) -> None:
        """Compare the programs of all members for the first batches; they are compiled when they are first called."""
        for i, kind in self._kinds.items():
            member = self.members[i]
            if not kind.is_same(kind_of(member.training, self._examples(member))):
                raise ArgumentError(
                    f"{OWNER}: the steps of {member.name} are not the same when they are traced again. They read "
                    "something that make_module changed when it built a later member, such as a global or an object "
                    "that they share: make one for each member. Or they hold something that is new in each trace, such "
                    "as a random number of numpy, or the module in a function on the host: let it hold numbers alone."
                )
        train_example, val_example = self._first_batches
        self.train_step(train_example)
        if val_example is not None:
            self.eval_step(val_example)

    def _examples(self, member: Member) -> dict[tuple[str, int | None], Any]:
        train_example, val_example = self._first_batches
        return {_TRAINING: train_example} | ({} if val_example is None else {_validation(member): val_example})

    @property
    def spec(self) -> StateSpec:
        """The spec of the arrays of one member."""
        return self.members[0].training.spec

    @property
    def step_table(self) -> StepTable:
        """The layout of what a training step returns of one member."""
        first = self.members[0]
        return StepTable(first.pure.table(*_TRAINING), first.training.rates.names, guarded=True)

    @property
    def val_table(self) -> Table:
        """The metrics of the validation step."""
        return self.members[0].pure.table(*_validation(self.members[0]))

    @property
    def array_specs(self) -> list[jax.ShapeDtypeStruct]:
        """The shapes, dtypes and shardings of the arrays of all members, whose first dim is members."""
        count = len(self.members)
        return [jax.ShapeDtypeStruct((count, *x.shape), x.dtype, sharding=self._split) for x in self.spec.arrays]

    def place(self, x: np.ndarray) -> jax.Array:
        """Put an array of all members onto their devices."""
        return jax.device_put(x, self._split)

    def repeat(self, x: np.ndarray) -> jax.Array:
        """Put a copy of an array for each member onto the devices."""
        return self.place(np.broadcast_to(x, (len(self.members), *x.shape)))

    @property
    def _carried(self) -> tuple[int, ...]:
        """The metrics that the validation step writes, see `Traced`."""
        return self.members[0].pure.trace_of(*_validation(self.members[0])).carried

    def eval_sums(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Return the metrics before the first validation batch, the count of batches, and the module's metrics."""
        carried = (jnp.copy(leaves[i]) for i in self.spec.places(self._carried))
        return [*map(self.repeat, _empty_sums(self.val_table)), *carried]

    def place_batch(self, batch: Any) -> Any:
        """Put a batch onto all devices; a single device takes host arrays."""
        return batch if self.mesh.size == 1 else jax.device_put(batch, self._shared)

    def init(self, layout: Layout, arrays: Sequence[Sequence[np.ndarray]]) -> list[jax.Array]:
        """Return the state of step 0 of all members, given the layout of a module's arrays and those of each member."""

        def init(member: Member, leaves: list[Any]) -> list[Any]:
            return member.training.spec.layout.flatten(member.training.init(*layout.unflatten(leaves)))

        stacked = [self.place(np.stack(column)) for column in zip(*arrays, strict=True)]
        shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacked]
        return self._program("init", init, (shapes,))(stacked)

    def train_step(self, example: Any) -> Callable[[list[jax.Array], Any], tuple[list[jax.Array], jax.Array]]:
        """Return a function of (state, batch) to the next state and the tables of the step, of all members.

        `example` has the shapes and dtypes of the batch.
        """

        def update(member: Member, leaves: list[Any], batch: Any) -> tuple[list[Any], jax.Array]:
            # Trace the user's step first: the optimizer step is built from the result of the trace.
            self._inspect(member, _TRAINING, lambda pure, of, *args: pure.body("training", of).trace(*args), example)
            return member.training.step.update(member.strategy.replica, leaves, batch)[:2]

        states = (list(map(abstract, self.spec.arrays)),)
        return self._program("train_step", update, states, example, stage=_TRAINING)

    def eval_step(self, example: Any) -> Callable[[list[jax.Array], list[jax.Array], Any], list[jax.Array]]:
        """Return a function of (metrics so far, arrays of the state, batch) to the metrics, of all members."""

        def add(member: Member, sums: list[Any], leaves: list[Any], batch: Any) -> list[Any]:
            spec, stage = member.training.spec, _validation(member)
            member.pure.trace_of(*stage).carried = self._carried  # of the first member, which is inspected
            step = eval_step(member.pure, *stage, spec.eval_layout, spec.wrap)
            return step(member.strategy.replica, leaves, sums, batch)[0]

        leaves = [abstract(self.spec.arrays[i]) for i in self.spec.eval_index]
        carried = (self.spec.arrays[i] for i in self.spec.places(self._carried))
        states = list(map(abstract, (*_empty_sums(self.val_table), *carried))), leaves
        return self._program("eval_step", add, states, example, stage=_validation(self.members[0]))

    def _inspect(self, member: Member, stage: tuple[str, int | None], inspect: Callable[..., None], batch: Any) -> None:
        spec = member.training.spec
        spec = replace(spec, tree=jax.tree.map(abstract, spec.tree))
        trace_step(member.pure, spec, stage, partial(inspect, member.pure), batch)

    def _alike(self, stage: tuple[str, int | None], example: Any) -> list[int]:
        """Return for each member the index of the first one that has the same step for such a batch."""
        members = self.members
        if example == self._examples(members[0])[stage]:
            return [member.like for member in members]
        like, traces = list[int](), dict[int, Any]()
        for i, member in enumerate(members):
            # Members that were alike may differ: a step can read other numbers for a batch of another shape.
            trace = trace_of(member.training, *stage, example)
            alike = (k for k, x in traces.items() if members[k].like == member.like and is_same(x, trace))
            like.append(next(alike, i))
            traces.setdefault(like[i], trace)
        return like

    def _program(
        self, name: str, fn: Callable, states: tuple, *shared: Any, stage: tuple[str, int | None] | None = None
    ) -> Callable[..., Any]:
        """Return a function for all members, whose results have a dim of members; it is compiled when first called.

        Args:
            name: The name of the program.
            fn: A function of (member, *states, *shared).
            states: Shapes and dtypes of one member's arrays; those of the first are overwritten.
            *shared: Shapes and dtypes of what all members share.
            stage: The stage and the loader of the step that is run for a batch, `shared[0]`; None for no step.
        """
        leaves, treedef = jax.tree.flatten(shared)
        key = (name, treedef, *((x.shape, x.dtype) for x in leaves))
        if key in self._compiled:
            return self._compiled[key]
        members = self.members

        def trace(i: int) -> tuple[Any, Any]:
            return jax.make_jaxpr(partial(fn, members[i]), return_shape=True)(*states, *shared)

        try:
            like = [member.like for member in members] if stage is None else self._alike(stage, *shared)
            lifted = lift(trace, like)
        except DifferentError as error:
            first, other = members[0], members[error.index or 0]
            zero, hint = [{k for k, x in m.variation.items() if type(x) is float and not x} for m in (first, other)], ""
            if zero[0] != zero[1]:
                hint = f" Where {min(zero[0] ^ zero[1])} is 0.0 of an optimizer, optax may leave the term out; "
                hint += "optax.inject_hyperparams(optax.adamw)(...) keeps it."
            raise ArgumentError(
                f"{OWNER} trains all members by one program, and that of {other.name} differs from that of "
                f"{first.name}: {error}. Variations may change seeds and numbers, but not what is computed, such as "
                f"dropout of rate 0.0 and of others: call jl.fit_many once for each kind of members.{hint}"
            ) from None
        self.numbers += lifted.numbers
        split = 1 + len(states)
        run = jax.vmap(lifted, in_axes=(*[0] * split, *[None] * len(shared)))
        if self.mesh.size > 1:
            # Each device runs only its own members: without shard_map, XLA may add communication.
            specs = (*[P(_AXIS)] * split, *[P()] * len(shared))
            run = jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=P(_AXIS), check_vma=False)
        program = jax.jit(named(name, run), donate_argnums=1, out_shardings=self._split)
        self._compiled[key] = partial(program, [self.place(x) for x in lifted.numbers])
        return self._compiled[key]


def _validation(member: Member) -> tuple[str, int | None]:
    return "validation", 0 if takes_loader(member.pure.origin, "validation") else None


def _empty_sums(table: Table) -> list[np.ndarray]:
    return [table.empty_sums(), np.zeros((), np.int32)]
