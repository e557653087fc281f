"""The compiled programs of a population: each runs one member's program for all members, spread over the devices."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import sharding
from jaxlit.core.device_sums import StepTable, Table
from jaxlit.core.eval_step import eval_step
from jaxlit.core.inspection import inspect_evaluation, inspect_step
from jaxlit.core.module import takes_loader
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica
from jaxlit.core.state import Layout
from jaxlit.engine.state import StateSpec
from jaxlit.engine.step_traces import trace_step
from jaxlit.errors import ArgumentError
from jaxlit.populations.lifting import lift
from jaxlit.populations.members import Member
from jaxlit.strategies.program import named

_logger = logging.getLogger("jaxlit")

_AXIS = "members"
_TRAINING = ("training", None)


def members_mesh(count: int, devices: int | None) -> Mesh:
    """Return a mesh of the most devices over which the members divide.

    Args:
        count: How many members there are.
        devices: How many devices to use at most; None for all.
    """
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

    Args:
        members: The members.
        mesh: The mesh that they are spread over.

    Attributes:
        members: See above; once the training step was traced, their specs have its metrics.
        mesh: See above.
        numbers: (members, ...) each, in what the programs so far differ between members.
    """

    def __init__(self, members: list[Member], mesh: Mesh) -> None:
        self.members, self.mesh, self.numbers = members, mesh, list[np.ndarray]()
        self._split, self._shared = NamedSharding(mesh, P(_AXIS)), NamedSharding(mesh, P())
        self._train_steps, self._eval_steps = dict[Any, Callable[..., Any]](), dict[Any, Callable[..., Any]]()

    @property
    def spec(self) -> StateSpec:
        """What the arrays of one member are."""
        return self.members[0].training.spec

    @property
    def step_table(self) -> StepTable:
        """The layout of what a training step, which must have been traced, returns of one member."""
        first = self.members[0]
        return StepTable(first.pure.table(*_TRAINING), first.training.rates.names, guarded=True)

    @property
    def val_table(self) -> Table:
        """The metrics of the validation step, which must have been traced."""
        return self.members[0].pure.table(*self._validation)

    @property
    def array_specs(self) -> list[jax.ShapeDtypeStruct]:
        """What the arrays of all members are: the first dim is that of the members."""
        count = len(self.members)
        return [jax.ShapeDtypeStruct((count, *x.shape), x.dtype, sharding=self._split) for x in self.spec.arrays]

    # Arrays

    def place(self, x: np.ndarray) -> jax.Array:
        """Put an array of all members onto their devices."""
        return jax.device_put(x, self._split)

    def repeat(self, x: np.ndarray) -> jax.Array:
        """Put a copy of an array for each member onto the devices."""
        return self.place(np.broadcast_to(x, (len(self.members), *x.shape)))

    @property
    def place_batch(self) -> Callable[[Any], Any] | None:
        """What puts a batch onto all devices, which share it; None where a step takes host arrays."""
        return None if self.mesh.size == 1 else lambda batch: jax.device_put(batch, self._shared)

    # Programs

    def init(self, layout: Layout, arrays: Sequence[Sequence[np.ndarray]]) -> list[jax.Array]:
        """Return the state of step 0 of all members.

        Args:
            layout: How the arrays of a module become its trained, frozen and other variables.
            arrays: Those of each member's module.
        """

        def init(member: Member, leaves: list[Any]) -> list[Any]:
            return member.training.spec.layout.flatten(member.training.init(*layout.unflatten(leaves)))

        stacked = [self.place(np.stack(column)) for column in zip(*arrays, strict=True)]
        shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacked]
        return self._compile("init", init, (shapes,))(stacked)

    def train_step(self, example: Any) -> Callable[[list[jax.Array], Any], tuple[list[jax.Array], jax.Array]]:
        """Return a function of (state, batch) to the next state and what the host reads of the step, of all members.

        Args:
            example: The shapes and dtypes of the batch.
        """
        if (key := _key(example)) not in self._train_steps:
            self._trace_training(example)
            update = lambda member, *args: member.training.step.update(member.strategy.replica, *args)[:2]  # noqa: E731
            state = list(map(_abstract, self.spec.arrays))
            self._train_steps[key] = self._compile("train_step", update, (state,), example, stage=_TRAINING)
        return self._train_steps[key]

    def eval_step(self, example: Any) -> Callable[[list[jax.Array], list[jax.Array], Any], list[jax.Array]]:
        """Return a function of (metrics so far, what an evaluation reads, batch) to the metrics, of all members.

        Args:
            example: See `train_step`.
        """
        if (key := _key(example)) not in self._eval_steps:
            first, stage = self.members[0], self._validation
            if not self._eval_steps:
                inspect = partial(inspect_evaluation, first.pure, *stage)
                trace_step(first.pure, first.strategy, self._tree, stage, inspect, example)

            def add(member: Member, sums: list[Any], leaves: list[Any], batch: Any) -> list[Any]:
                spec = member.training.spec
                step = eval_step(member.pure, *stage, spec.eval_layout, spec.wrap)
                return step(member.strategy.replica, leaves, sums, batch)[0]

            leaves = [_abstract(self.spec.arrays[i]) for i in self.spec.eval_index]
            sums = list(map(_abstract, self._empty_sums))
            self._eval_steps[key] = self._compile("eval_step", add, (sums, leaves), example, stage=stage)
        return self._eval_steps[key]

    def eval_sums(self) -> list[jax.Array]:
        """Return the metrics of no validation batch, and the count of batches."""
        return list(map(self.repeat, self._empty_sums))

    @property
    def _empty_sums(self) -> list[np.ndarray]:
        return [self.val_table.empty_sums(), np.zeros((), np.int32)]

    @property
    def _validation(self) -> tuple[str, int | None]:
        return "validation", 0 if takes_loader(self.members[0].pure.origin, "validation") else None

    @property
    def _tree(self) -> Any:
        return jax.tree.map(_abstract, self.spec.tree)

    def _trace_training(self, example: Any) -> None:
        """Trace the training step of each member, and give the specs its metrics."""
        for i, member in enumerate(self.members):
            if member.like < i:  # it has the program of that member
                continue
            # Mistakes that the trace of one member shows are in all of them: the programs will be compared.
            is_first = i == 0 and not self._train_steps
            inspect = partial(inspect_step if is_first else _trace, member.pure)
            trace_step(member.pure, member.strategy, self._tree, _TRAINING, inspect, example)
        spec = self.spec.with_metrics(self.members[0].pure.table(*_TRAINING))
        self.members = [member.with_spec(spec) for member in self.members]

    def _compile(
        self,
        name: str,
        fn: Callable[..., Any],
        states: tuple[Any, ...],
        *shared: Any,
        stage: tuple[str, int | None] | None = None,
    ) -> Callable[..., Any]:
        """Compile a function for all members; what it returns has a dim of members.

        Args:
            name: The name of the program.
            fn: A function of (member, *states, *shared).
            states: Shapes and dtypes of one member's arrays; those of the first are overwritten.
            *shared: Shapes and dtypes of what all members share.
            stage: The step in it, whose metrics must be the same in all members.
        """

        def trace_of(i: int) -> tuple[Any, Any]:
            made = jax.make_jaxpr(partial(fn, self.members[i]), return_shape=True)(*states, *shared)
            if stage is not None:
                self._check_metrics(self.members[i], stage)
            return made

        lifted = lift(trace_of, [member.name for member in self.members], [member.like for member in self.members])
        self.numbers += lifted.numbers
        numbers = [self.place(x) for x in lifted.numbers]
        split = 1 + len(states)
        run = jax.vmap(lifted, in_axes=(*[0] * split, *[None] * len(shared)))
        if self.mesh.size > 1:
            # Each device runs its own members: nothing is communicated, whatever XLA would choose.
            specs = (*[P(_AXIS)] * split, *[P()] * len(shared))
            run = jax.shard_map(run, mesh=self.mesh, in_specs=specs, out_specs=P(_AXIS), check_vma=False)
        return partial(jax.jit(named(name, run), donate_argnums=1, out_shardings=self._split), numbers)

    def _check_metrics(self, member: Member, stage: tuple[str, int | None]) -> None:
        first = self.members[0]
        a, b = (x.pure.table(*stage).metrics for x in (first, member))
        if a != b:
            raise ArgumentError(
                f"jl.fit_many: all members must log the same metrics in {stage[0]}_step. {first.name} logs "
                f"{[m.name for m in a]}, and {member.name} logs {[m.name for m in b]}."
            )


def _trace(pure: PureModule, replica: Replica, *args: Any) -> None:
    pure.body("training", replica).trace(*args)


def _abstract(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _key(example: Any) -> Any:
    leaves, treedef = jax.tree.flatten(example)
    return treedef, *[(x.shape, x.dtype) for x in leaves]
