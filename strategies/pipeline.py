"""Pipeline parallelism: each group of devices has some of the layers, and microbatches go from group to group."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit import checks as check
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica, num_rows, with_rows
from jaxlit.core.train_state import TrainState
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.pipeline.executor import Places, Rows, check_processes, mesh_within_processes
from jaxlit.pipeline.placed import Placed
from jaxlit.pipeline.schedules import SCHEDULES, Schedule, simulate
from jaxlit.pipeline.segments import Layers, marking
from jaxlit.pipeline.staged_step import Microbatched, StageFacts, placement_of, stage_table
from jaxlit.reporting.terminal import say
from jaxlit.strategies.base import (
    ROWS,
    ArraySpec,
    Program,
    ReplicatedBatch,
    Strategy,
    jit,
    like_params,
    named,
    remat_policy,
)
from jaxlit.strategies.ddp import DDP
from jaxlit.strategies.fsdp import FSDP


class Pipeline(Strategy):
    """Give each group of devices, a rank, some of the layers, and send microbatches through them in turn.

    `jl.pipeline_yield(x)` in the model, or `layers`, marks where a stage may end. Operations run on the stage of their
    operands: tied weights, skips, masks and losses of single layers need no change of the model. A batch is split into
    microbatches, like the batches of `accumulate_grad_batches`: gradients are those of the mean over all rows, dropout
    and batch statistics those of the microbatches one by one. Within a rank the strategy `inner` distributes the work.
    In several processes each rank has devices of all processes, and only `inner`'s collectives cross processes.

    Sources: GPipe (Huang et al., arXiv 1811.06965), 1F1B (Narayanan et al., arXiv 1806.03377, 2104.04473), zero bubble
    (Qi et al., arXiv 2401.10241), and pipelines of whole programs (JaxPP, arXiv 2412.14374).

    Args:
        stages: Ranks, the size of the mesh axis `stage`; None for as many as a process has devices.
        schedule: "gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zbv", or a `Schedule`; the interleaved
            one and "zbv" cut the model into twice as many stages as there are ranks.
        microbatches: How many parts a batch is split into; None for as many as there are ranks. A batch of fewer rows
            has one for each row.
        layers: The attribute that holds the model's layers, "blocks" or "encoder.blocks": a stage may end after each;
            or the layers after which stages end, ["blocks.1", "blocks.3"]. None if the model calls
            `jl.pipeline_yield`.
        inner: The strategy within a rank, such as "fsdp" or "ddp".
        remat: Recompute a stage's forward pass in its backward pass, and save its inputs only; or the name of one of
            `jax.checkpoint_policies`.
        balance: How parts between marks become stages: "count" for equal numbers, "flops" for about equal
            operations, or the number of each stage.
        accum_dtype: The dtype in which gradients of microbatches add up; those of float64 parameters do in float64.
        loss_reduction: What the step's loss is over its rows, "mean" or "sum".
        mesh: A mesh of the user's with an axis `stage`, or the sizes of its axes.

    Raises:
        ArgumentError: A value is out of its set.
        ArgumentTypeError: `inner` is no strategy, or its step sees the rows of one device.

    Example:
        >>> import jaxlit as jl
        >>> strategy = jl.strategies.Pipeline(stages=4, schedule="interleaved_1f1b", microbatches=8)
        >>> trainer = jl.Trainer(strategy=strategy, max_epochs=1, logger=False)
    """

    fuses_steps = False
    types_arrays = False

    mesh_axes: ClassVar[tuple[str, ...]] = ("stage",)

    def __init__(
        self,
        stages: int | None = None,
        schedule: Literal["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "zb_h1", "zbv"] | Schedule = "1f1b",
        microbatches: int | None = None,
        *,
        layers: str | Sequence[str] | None = None,
        inner: Literal["fsdp", "ddp"] | Strategy = "fsdp",
        remat: bool | str | Callable[..., Any] = False,
        balance: Literal["count", "flops"] | Sequence[int] = "count",
        accum_dtype: Any = "float32",
        loss_reduction: Literal["mean", "sum"] = "mean",
        mesh: Mesh | Mapping[str, int] | None = None,
    ) -> None:
        name = type(self).__name__
        if not isinstance(schedule, Schedule):
            check.one_of("schedule", schedule, [*SCHEDULES], owner=name)
        check.one_of("loss_reduction", loss_reduction, ("mean", "sum"), owner=name)
        is_list = isinstance(balance, Sequence) and not isinstance(balance, str)
        if not (is_list and all(check.is_int(x, low=1) for x in balance)):
            check.one_of("balance", balance, ("count", "flops"), owner=name)
        self.stages = check.integer("stages", stages, low=1, also=(None,), owner=name)
        self.microbatches = check.integer("microbatches", microbatches, low=1, also=(None,), owner=name)
        self.balance, self.remat = balance, remat_policy(remat, name)
        self.accum_dtype, self.loss_reduction = jax.numpy.dtype(accum_dtype), loss_reduction
        valid = jax.numpy.issubdtype(self.accum_dtype, jax.numpy.floating)
        check.require(valid, "accum_dtype", accum_dtype, "takes a floating dtype such as 'float32'", owner=name)
        self._schedule, self._layers = schedule, Layers(layers, owner=name)
        self.sizes: Any = self.balance
        self._facts: list[StageFacts] = []
        self._step: Microbatched | None = None
        if isinstance(inner, str):
            inner = _INNER[check.one_of("inner", inner, [*_INNER], owner=name)]()
        if not isinstance(inner, Strategy) or isinstance(inner, Pipeline) or inner.per_replica:
            raise ArgumentTypeError(
                f"{name}(inner=...) takes a strategy whose step sees the entire batch, such as 'fsdp', 'ddp' or "
                f"TensorParallel(...), not the rows of one device, got {inner!r}."
            )
        is_valid = inner.axis_types == "auto" and getattr(inner, "offload", None) is None
        check.require(
            is_valid, "inner", inner, "takes a strategy without axis_types='explicit' and offload", owner=name
        )
        self._inner = inner
        self.use_mesh(mesh)

    def mesh_shape(self, device_count: int) -> dict[str, int]:
        """Return the axis `stage` and those of the inner strategy; refuse ranks that do not divide the devices."""
        stages = device_count // jax.process_count() if self.stages is None else self.stages
        if device_count % stages:
            raise ArgumentError(
                f"{type(self).__name__}(stages={stages}): {device_count} devices do not divide into {stages} groups. "
                "Give a divisor, or Trainer(devices=...)."
            )
        mesh: Any = self._inner._user_mesh
        shape: Any = getattr(mesh, "shape", mesh) or self._inner.mesh_shape(device_count // stages)
        return {"stage": stages} | dict(shape)

    def _build_mesh(self, devices: Sequence[jax.Device]) -> Mesh:
        shape: Any = self.mesh_shape(len(devices)) if self._user_mesh is None else self._user_mesh
        return mesh_within_processes(devices, shape) or super()._build_mesh(devices)

    def setup(self, devices: int | None = None) -> None:
        """Build the mesh and the mesh of each rank."""
        super().setup(devices)
        if "stage" not in self.mesh.axis_names:
            raise ArgumentError(
                f"{type(self).__name__} takes a mesh with an axis 'stage', whose size is the number of ranks, got axes "
                f"{self.mesh.axis_names}."
            )
        ranks = self.mesh.shape["stage"]
        axes = [axis for axis in self.mesh.axis_names if axis != "stage"]
        schedule = self._schedule
        self.schedule = schedule if isinstance(schedule, Schedule) else SCHEDULES[schedule](ranks)
        if (self.stages or ranks, self.schedule.num_ranks) != (ranks, ranks):
            raise ArgumentError(
                f"{type(self).__name__}(stages={self.stages}, schedule={self.schedule!r}) takes as many "
                f"stages in the mesh and ranks in the schedule, got a mesh of {ranks} stages and a schedule of "
                f"{self.schedule.num_ranks} ranks. Leave stages out where you give a mesh."
            )
        grid = np.moveaxis(self.mesh.devices, self.mesh.axis_names.index("stage"), 0)
        if not axes:
            grid, axes = grid[:, None], ["data"]
        meshes = [Mesh(devices, axes, axis_types=self.mesh.axis_types[:1] * len(axes)) for devices in grid]
        check_processes(meshes)
        self.inner = self._inner_on(meshes[0])
        self.batch_axes = tuple(axis for axis in self.inner.batch_axes if axis in self.mesh.axis_names)
        # On an abstract mesh the constraints hold for each rank.
        self._abstract: Any = copy.copy(self.inner)
        self._abstract.mesh = self.inner.mesh.abstract_mesh
        simulate(self.schedule, self.num_microbatches)  # refuses an incomplete schedule before anything is compiled
        last = self.schedule.rank_of(self.schedule.num_stages - 1)
        self.places = Places(meshes, last, self._jit)

    def _inner_on(self, mesh: Mesh) -> Any:
        """Return the strategy within a rank, on a rank's mesh."""
        inner = copy.copy(self._inner)
        inner._user_mesh = mesh if self._user_mesh is None else None
        if self._user_mesh is not None:  # else the axes are those of the inner strategy
            inner.use_mesh(mesh)
        inner.explicit_axes = ()  # the parts of a step that run on the ranks have no types of their own
        inner.setup()
        inner.step_program = self.step_program  # type: ignore[method-assign]  # with marks, and of one microbatch
        return inner

    @property
    def replicated(self) -> NamedSharding:
        """The sharding on the last stage's rank, which computes the loss: no array is on all ranks."""
        return NamedSharding(self.places.meshes[self.places.home], P())

    def state_sharding(self, state: TrainState, model: PureModule, example: Any) -> TrainState:
        """Return the shardings of the inner strategy, for each array on the first rank that uses it."""
        closed = None if example is None else self.step_program(state, model, example)
        ranks, sizes, facts, stages = placement_of(self.schedule, self.balance, state, closed)
        if facts is not None:
            self.sizes = sizes  # for parts of a batch of any size
            self._facts = facts
            self.notes = {name: f"stage {stage}" for name, stage in stages.items()}
        params, frozen, model_state = ranks
        rank_of = like_params(state, state.params, params, self.places.home)  # type: ignore[arg-type]
        rank_of = replace(rank_of, params=params, frozen=frozen, model_state=model_state)
        return jax.tree.map(self.places.on, self.inner.state_sharding(state, model, example), rank_of)

    def on_state(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of arrays of the state, which runs in parts on the ranks of the arrays."""
        run = Placed(self.in_mesh(fn), self.places, "on_state", follows=True)

        def call(arrays: Any, *inputs: Any) -> Any:
            return run(arrays, *jax.tree.map(lambda x: x if isinstance(x, jax.Array) else np.asarray(x), inputs))

        return call

    def gather(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Return the arrays on the first device, or on the host if the device has no room; print which."""
        if len({self.places.rank_of(x) for x in arrays}) == 1:
            return arrays
        moved, target = self.places.gather(arrays)
        if jax.process_index() == 0:
            say(f"the module is gathered from {len(self.places.meshes)} ranks to {target}")
        return moved

    @property
    def replica(self) -> Replica:
        """What a pass sees: its microbatch, as a batch of the inner strategy."""
        return Replica(
            constrain_batch=self._abstract._constrain_batch,
            prepare=self._layers.mark,
            loss_reduction=self.loss_reduction,
            passes=self.num_microbatches,
        )

    @property
    def num_microbatches(self) -> int:
        """How many parts a batch is split into."""
        return self.schedule.num_ranks if self.microbatches is None else self.microbatches

    def shard_batch(self, batch: Any) -> Any:
        """Return the batch as it is: the executor sends each rank the microbatches that it uses."""
        if isinstance(batch, ReplicatedBatch):
            return batch.batch
        if (count := jax.process_count()) == 1:
            return batch
        sharding_of = self.inner._batch_sharding
        return jax.tree.map(lambda x: Rows(x, count, sharding_of(x)) if x.ndim else x, batch)

    def splits_by_process(self, batch: Any) -> bool:
        """Return whether each process places rows of each microbatch that no other process places."""
        rows, count = num_rows(batch), self.num_microbatches
        return rows % count == 0 and self.inner.splits_by_process(with_rows(batch, rows // count))

    def in_mesh(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return `fn`, traced with the axes within a rank in context, and with marks."""
        inside = self.inner.in_mesh(fn)

        def call(*args: Any) -> Any:
            with marking():
                return inside(*args)

        return call

    def compile(self, program: Program) -> Callable[..., Any]:
        """Return the compiled program; a training step runs as passes of microbatches in the schedule's order."""
        shardings = [x.sharding for x in program.outputs[0] if isinstance(x, ArraySpec)]  # of the state
        if program.passes is None:
            replica = Replica(constrain_batch=self._abstract._constrain_batch)  # an evaluation sees the entire batch
            fn = self.in_mesh(partial(program.fn, replica))
            return Placed(fn, self.places, program.name, follows=True, outputs=shardings)
        count = sum(map(len, program.inputs))
        outputs = jax.tree.map(lambda x: x is ROWS, program.outputs[3]) if len(program.outputs) > 3 else None
        donate = range(count if program.donate else 0)
        fn, name = self.in_mesh(program.passes.finish), f"{program.name}_end"
        finish = Placed(fn, self.places, name, outputs=shardings, donate=donate)
        compiled = Microbatched(self, program.name, program.passes, program.inputs[0], finish, outputs)
        self._step = compiled if program.kind == "train" and program.donate else self._step
        return compiled

    def _jit(self, rank: int, fn: Callable[..., Any], name: str, **options: Any) -> Any:
        return jit(self.places.meshes[rank], named(name, self.inner.in_mesh(fn)), **options)

    def describe(self) -> str:
        """Return the mesh and the schedule, and once a fit has begun a table of the stages."""
        first = f"{super().describe()}, {self.schedule!r} with {self.num_microbatches} microbatches"
        if not self._facts:
            return first
        residuals = self._step.residuals() if self._step is not None and self._step.residuals else None
        return f"{first}\n{stage_table(self._facts, residuals, self.schedule, self.num_microbatches)}"


_INNER: dict[str, Callable[[], Strategy]] = {"fsdp": FSDP, "ddp": DDP}
