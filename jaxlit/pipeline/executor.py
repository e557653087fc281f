"""Runs a batch through a pipeline: forward and backward passes of its microbatches, in the order of a schedule.

`BatchRun` has the passes. `Places` has the devices of the ranks and sends arrays between them, in one process or in
more. `estimate` returns what a batch costs: operations and transfers from traces, memory from the schedule.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.core.replica import abstract_batch
from jaxlit.errors import ArgumentError
from jaxlit.pipeline.cut import Cut
from jaxlit.pipeline.schedules import FusedTask, Kind, Task, parts, simulate
from jaxlit.pipeline.stages import Saved, Stage
from jaxlit.programs.costs import Collective, Flops, Memory, ProgramCost, count_flops
from jaxlit.reporting.terminal import bytes_of, bytes_per_device
from jaxlit.sharding import carry, place, place_replicated

if TYPE_CHECKING:
    from jaxlit.pipeline.staged_step import Microbatched


@dataclass
class Microbatch:
    """A part of a batch."""

    leaves: list[Any]  # its arrays, on the host
    rows: int
    shape: Any  # the key of its programs


class StageSet:
    """The programs of all stages, for microbatches of one shape.

    The first `num_leaves` inputs of the cut are of the state, the rest of the batch; the first output is followed by
    `num_written` outputs of the state.
    """

    def __init__(self, cut: Cut, stages: Sequence[Stage], num_leaves: int, num_written: int) -> None:
        self.cut, self.stages, self.num_leaves, self.num_written = cut, stages, num_leaves, num_written
        self.producer = {x: (p.stage, k) for p in cut.pieces for k, x in enumerate(p.outs)}
        self.users = {x: [(u, cut.pieces[u].ins.index(x)) for u in cut.users(x)] for x in self.producer}
        self.of_state = [{i for i in p.inputs if i < num_leaves} for p in cut.pieces]
        self.of_batch = [[i for i in p.inputs if i >= num_leaves] for p in cut.pieces]


_Boxes = dict[tuple[int, int], dict[int, list[Any]]]  # by (stage, microbatch): arrays by slot, several of a cotangent


class BatchRun:
    """Runs the passes of one batch, given the state, the microbatches, and the programs for each of these."""

    def __init__(
        self, program: "Microbatched", leaves: Sequence[Any], microbatches: list[Microbatch], sets: list[StageSet]
    ) -> None:
        self.program, self.microbatches, self.sets = program, microbatches, sets
        self.places, self.passes, self.rank_of = program.places, program.passes, program.schedule.rank_of
        self.count = len(sets[0].stages)
        self.state, self.batch = self._spread(leaves), self._placed()
        scale = self.passes.scale
        self.scale = [None if scale is None else self.state[s][scale] for s in range(self.count)]
        # Gradients add up per stage, and are sent to the ranks of the parameters once, after the last task.
        self.totals = [program.zeros(self.rank_of(s), sets[0].stages[s].params) for s in range(self.count)]
        # By (stage, microbatch). Each entry is removed by the task that uses it, which bounds the memory: a schedule's
        # peak of live microbatches is the most entries of `saved` at a time.
        self.saved: dict[tuple[int, int], Saved] = {}
        self.inbox: _Boxes = {}  # the arrays that a stage was sent for a microbatch
        self.cotangents: _Boxes = {}
        self.halves: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.results: dict[tuple[int, int], Any] = {}  # outputs by microbatch and index

    def run(self, order: Sequence[Task | FusedTask]) -> tuple[list[Any], list[Any], list[Any], list[list[Any]]]:
        """Run the tasks in an order in which none waits for a later one.

        Return the newest arrays of what the step writes, in the order of `MicrobatchStep.written`; the sum of each
        parameter's gradients, in that of `MicrobatchStep.params`; each microbatch's table; and by output those of each.
        """
        run = {
            Kind.FWD: self.forward,
            Kind.BWD: self.backward,
            Kind.BWD_INPUT: self.backward_input,
            Kind.BWD_WEIGHT: self.backward_weight,
        }
        for program in order:
            tasks = parts(program)
            first, stage = tasks[0], self._stage(tasks[0])
            is_pair = first.kind is Kind.FWD and tasks == (first, Task(first.stage, first.mb, Kind.BWD))
            # A backward pass that can follow at once: one program, which keeps no residuals between its halves.
            if is_pair and stage.ends and not stage.piece.outs:
                self.fused(first)
                continue
            for task in tasks:
                run[task.kind](task)
        # The first output is the loss, then come the written arrays, the table and the user's outputs.
        made_at = self.sets[0].cut.made_at
        written = [self.state[made_at[1 + k]][place] for k, place in enumerate(self.passes.written)]
        after_written = range(1 + self.sets[0].num_written, len(made_at))
        tables, *outputs = [[self.results[mb, i] for mb in range(len(self.microbatches))] for i in after_written]
        return written, self._grads(), tables, outputs

    def forward(self, task: Task) -> None:
        """Run a forward pass, and keep what its backward pass needs."""
        stage, inputs, ins = self._arguments(task)
        outs, results, residuals = stage.forward(inputs, ins)
        self._keep_results(task, results)
        self.saved[task.stage, task.mb] = stage.keep(inputs, ins, residuals)
        users, pairs = self.sets[task.mb].users, zip(stage.piece.outs, outs, strict=True)
        self._send(self.inbox, task.mb, [(user, x) for var, x in pairs for user in users[var]])

    def fused(self, task: Task) -> None:
        """Run a forward pass of the last stage and its backward pass in one program."""
        stage, inputs, ins = self._arguments(task)
        results, sent, self.totals[task.stage] = stage.fused(inputs, ins, *self._sums(task))
        self._keep_results(task, results)
        self._push_back(task, sent)

    def backward(self, task: Task) -> None:
        """Run a backward pass."""
        stage, returned = self._returned(task)
        sent, self.totals[task.stage] = stage.backward(*returned, *self._sums(task))
        self._push_back(task, sent)

    def backward_input(self, task: Task) -> None:
        """Run the part of a backward pass that the stage before waits for."""
        stage, returned = self._returned(task)
        # `crossing` is what the second half needs of the first; it keeps the residuals alive until then.
        sent, crossing = stage.backward_input(*returned)
        self.halves[task.stage, task.mb] = (returned, crossing)
        self._push_back(task, sent)

    def backward_weight(self, task: Task) -> None:
        """Run the rest of a backward pass: the gradients of the weights."""
        halves = self.halves.pop((task.stage, task.mb))
        self.totals[task.stage] = self._stage(task).backward_weight(*halves, *self._sums(task))

    def _stage(self, task: Task) -> Stage:
        return self.sets[task.mb].stages[task.stage]

    def _sums(self, task: Task) -> tuple[list[Any], np.float32, Any]:
        """Return the gradients so far, and the rows and the loss scale of those that are added to them."""
        return self.totals[task.stage], np.float32(self.microbatches[task.mb].rows), self.scale[task.stage]

    def _arguments(self, task: Task) -> tuple[Stage, list[Any], list[Any]]:
        stage, state, key = self._stage(task), self.state[task.stage], (task.stage, task.mb)
        # Popped: a microbatch's arrays are freed once the last stage that uses them has them.
        first, batch = self.sets[task.mb].num_leaves, self.batch.pop(key, {})
        inputs = [state[i] if i < first else batch[i] for i in stage.piece.inputs]
        return stage, inputs, [x for _, (x,) in sorted(self.inbox.pop(key, {}).items())]

    def _returned(self, task: Task) -> tuple[Stage, tuple[Any, list[Any], list[list[Any]]]]:
        """Return a stage, and what its backward pass takes: the saved inputs, the residuals and the cotangents."""
        stage, key = self._stage(task), (task.stage, task.mb)
        saved = self.saved.pop(key)
        # A value that several stages use has a cotangent from each; the program adds them up.
        parts = self.cotangents.pop(key, {})
        return stage, ((saved.inputs, saved.ins), saved.residuals, [parts.get(k, []) for k in stage.outs])

    def _keep_results(self, task: Task, results: Sequence[Any]) -> None:
        """Keep the results of a pass: state for the next microbatch of this stage, the rest for the end."""
        cut, n, places = self.sets[task.mb].cut, self.sets[task.mb].num_written, self.passes.written
        for i, x in zip(self._stage(task).piece.results, results, strict=True):
            if 1 <= i <= n:  # batch statistics: microbatches update them in order
                self.state[task.stage][places[i - 1]] = x
            elif cut.made_at[i] == task.stage:  # other stages may compute a copy of it
                self.results[task.mb, i] = x

    def _push_back(self, task: Task, sent: Sequence[Any]) -> None:
        """Send gradients to the stages that made the values."""
        producer, stage = self.sets[task.mb].producer, self._stage(task)
        pairs = zip(stage.ins, sent, strict=True)
        self._send(self.cotangents, task.mb, [(producer[stage.piece.ins[k]], x) for k, x in pairs])

    def _send(self, boxes: _Boxes, mb: int, arrays: list[tuple[tuple[int, int], Any]]) -> None:
        """Send arrays to the stages and slots that they come with."""
        # One transfer for all receivers: starting one costs more than its bytes.
        sent = self.places.send([x for _, x in arrays], [self.rank_of(stage) for (stage, _), _ in arrays])
        for ((stage, slot), _), x in zip(arrays, sent, strict=True):
            boxes.setdefault((stage, mb), {}).setdefault(slot, []).append(x)

    def _spread(self, leaves: Sequence[Any]) -> list[dict[int, Any]]:
        """Return for each stage the arrays of the state that it uses, copies of those of other ranks."""
        always = set() if self.passes.scale is None else {self.passes.scale}
        used = [always.union(*(x.of_state[s] for x in {*self.sets})) for s in range(self.count)]
        arrays = [{i: leaves[i] for i in inputs} for inputs in used]
        ranks = self.program.ranks
        away = [(s, i) for s, inputs in enumerate(used) for i in inputs if ranks[i] != self.rank_of(s)]
        sent = self.places.send([leaves[i] for _, i in away], [self.rank_of(s) for s, _ in away])
        for (s, i), x in zip(away, sent, strict=True):
            arrays[s][i] = x
        return arrays

    def _placed(self) -> dict[tuple[int, int], dict[int, Any]]:
        """Return by stage and microbatch the arrays of the batch that it uses, all of them sent at once."""
        # All at once, before the first task: no stage then waits for the host.
        wanted = {(s, mb): x.of_batch[s] for mb, x in enumerate(self.sets) for s in range(self.count) if x.of_batch[s]}
        first = self.sets[0].num_leaves
        arrays = [[self.microbatches[mb].leaves[i - first] for i in inputs] for (_, mb), inputs in wanted.items()]
        placed = self.program.place_batch([self.rank_of(s) for s, _ in wanted], arrays)
        pairs = zip(wanted.items(), placed, strict=True)
        return {key: dict(zip(inputs, xs, strict=True)) for (key, inputs), xs in pairs}

    def _grads(self) -> list[Any]:
        """Return the sum over all stages of each parameter's gradients, on the rank that holds it."""
        # A parameter that several stages use has a sum on each.
        params, ranks = [i for x in self.sets[0].stages for i in x.params], self.program.ranks
        arrays = self.places.send([x for totals in self.totals for x in totals], [ranks[i] for i in params])
        grads: dict[int, list[Any]] = {i: [] for i in self.passes.params}
        for i, x in zip(params, arrays, strict=True):
            grads[i].append(x)
        zeros = self.program.zeros
        return [_sum(xs) if len(xs) > 1 else (xs or zeros(ranks[i], [i]))[0] for i, xs in grads.items()]


@jax.jit
def _sum(arrays: list[jax.Array]) -> jax.Array:
    return reduce(jnp.add, arrays)


@dataclass(frozen=True)
class Rows:
    """An array of a batch of which each process has its own rows."""

    local: np.ndarray  # (rows / processes, ...), those of this process
    processes: int  # how many there are
    sharding: NamedSharding  # on the first rank

    @property
    def shape(self) -> tuple[int, ...]:
        """That of all rows."""
        return (self.processes * len(self.local), *self.local.shape[1:])

    ndim = property(lambda self: self.local.ndim)
    dtype = property(lambda self: self.local.dtype)

    def __getitem__(self, rows: slice) -> "Rows":
        """Return a part, whose first row and end divide by the processes."""
        part = self.local[rows.start // self.processes : rows.stop // self.processes]
        return Rows(part, self.processes, self.sharding)


class Places:
    """The ranks of a pipeline, given their meshes, which are of one shape and have the same axes.

    `home` is the rank of the loss, on which numbers of several ranks are combined. `jit` compiles a function for the
    devices of a rank, given (rank, function, name, **options of `jax.jit`).
    """

    def __init__(self, meshes: Sequence[Mesh], home: int, jit: Callable[..., Any]) -> None:
        self.meshes, self.home, self.jit = list(meshes), home, jit
        self._rank_of = {device: rank for rank, mesh in enumerate(meshes) for device in mesh.devices.flat}
        self.is_multi_process = self.meshes[0].is_multi_process
        self._moved: dict[tuple[Any, int], NamedSharding] = {}
        self._ranks: dict[Any, int | None] = {}

    def rank_of(self, x: Any) -> int | None:
        """Return the rank of an array or a `jax.ShapeDtypeStruct`; None for what is on no device yet."""
        sharding = None if isinstance(x, Rows) else getattr(x, "sharding", None)
        return None if sharding is None or (isinstance(x, jax.Array) and not x.committed) else self.rank_at(sharding)

    def rank_at(self, sharding: Any) -> int | None:
        """Return the rank of a sharding."""
        if sharding not in self._ranks:
            self._ranks[sharding] = self._rank_of.get(next(iter(sharding.device_set)))
        return self._ranks[sharding]

    def on(self, sharding: Any, rank: int) -> NamedSharding:
        """Return a sharding as it is on the devices of another rank."""
        if (sharding, rank) not in self._moved:
            mesh: Any = self.meshes[rank]
            spec = P()
            if isinstance(sharding, NamedSharding):  # its mesh may have other axes than the rank's
                old: Any = sharding.mesh
                mesh = Mesh(mesh.devices.reshape(old.devices.shape), old.axis_names, axis_types=old.axis_types)
                spec = sharding.spec
            self._moved[sharding, rank] = NamedSharding(mesh, spec)
        return self._moved[sharding, rank]

    def send(self, arrays: Sequence[Any], ranks: Sequence[int]) -> list[Any]:
        """Return arrays on other ranks, with the same partition; those that are there already stay."""
        going = [i for i, (x, rank) in enumerate(zip(arrays, ranks, strict=True)) if self.rank_of(x) != rank]
        moved = list(arrays)
        if len(going) == 1:  # most tasks send one array, for which a list takes 1.5 times as long
            x = arrays[going[0]]
            moved[going[0]] = self.put(x, self.on(getattr(x, "sharding", None), ranks[going[0]]))
        elif going:
            to = [self.on(getattr(arrays[i], "sharding", None), ranks[i]) for i in going]
            for i, x in zip(going, self.put([arrays[i] for i in going], to), strict=True):
                moved[i] = x
        return moved

    def put(self, arrays: Any, shardings: Any) -> Any:
        """Place a pytree of arrays, on the host or on a rank, in a pytree of shardings."""
        return (
            jax.tree.map(self._put, arrays, shardings) if self.is_multi_process else jax.device_put(arrays, shardings)
        )

    def gather(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], str]:
        """Return arrays of all ranks on the first device, or in several processes on the first rank, and where that is.

        Where there is no room they go to the host; if jax has no host device they stay.
        """
        mesh, needed = self.meshes[0], 0
        devices = [*mesh.local_devices] if self.is_multi_process else [mesh.devices.flat[0]]
        for x in arrays:
            part = math.prod(x.sharding.shard_shape(x.shape)) if self.is_multi_process else x.size
            needed += part * (x.nbytes // max(x.size, 1))
        if all(needed <= _room(device) for device in devices):
            if self.is_multi_process:
                return self.send(arrays, [0] * len(arrays)), "the devices of the first"
            return jax.device_put(list(arrays), devices[0]), str(devices[0])
        if self.is_multi_process or (host := _host()) is None:
            return list(arrays), "no device, none of which has room for all of it: each array stays where it is"
        return jax.device_put(list(arrays), host), "the host: no device has room for all of it"

    def _put(self, x: Any, to: NamedSharding) -> jax.Array:
        if isinstance(x, Rows):
            return place(x.local, to)
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            return carry(x, to)
        return place_replicated(x, to)


def _room(device: jax.Device) -> float:
    """Return the free bytes of a device, inf where it does not report them."""
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)


def _host() -> jax.Device | None:
    """Return the host as a device of jax, None where jax was started without it."""
    try:
        return jax.devices("cpu")[0]
    except RuntimeError:
        return None


def mesh_within_processes(devices: Sequence[jax.Device], shape: Mapping[str, int]) -> Mesh | None:
    """Return a mesh of which each rank has some devices of every process; None where there is one process.

    The shape has the size of each axis, "stage" among them, one of them -1 at most.
    """
    by_process: dict[int, list[jax.Device]] = {}
    for device in devices:
        by_process.setdefault(device.process_index, []).append(device)
    if len(by_process) == 1:
        return None
    rest = len(devices) // -math.prod(shape.values())
    sizes = {axis: rest if size == -1 else size for axis, size in shape.items()}
    if "stage" not in sizes or math.prod(sizes.values()) != len(devices):
        return None
    count, stages = min(map(len, by_process.values())), sizes["stage"]
    if count % stages:
        raise ArgumentError(
            f"Pipeline(stages={stages}): each of the {len(by_process)} processes has {count} devices, which do not "
            f"divide into {stages} stages. A pipeline goes through the devices of each process, and its ranks span "
            f"them all: give stages={count} or a divisor, or start one process for all devices of a host."
        )
    # Not by jax.make_mesh, which may order devices by their network.
    grid = np.array([*by_process.values()]).reshape(len(by_process), stages, -1).swapaxes(0, 1)
    grid = grid.reshape(stages, *(size for axis, size in sizes.items() if axis != "stage"))
    grid = np.moveaxis(grid, 0, [*sizes].index("stage"))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def check_processes(meshes: Sequence[Mesh]) -> None:
    """Raise an ArgumentError if the k-th devices of ranks are of different processes: no array can be sent then."""
    processes = [[device.process_index for device in mesh.devices.flat] for mesh in meshes]
    if any(row != processes[0] for row in processes):
        raise ArgumentError(
            f"Pipeline: the devices of its ranks are of processes {processes}. The k-th device of each rank must be of "
            "the same process, which sends from one to the next: give a mesh whose axis 'stage' is within processes, "
            "or leave mesh out."
        )


class _Pass(NamedTuple):
    """The cost of a microbatch on one stage."""

    flops: Flops  # of its forward and its backward pass
    saved: int  # bytes between the two
    sent: int  # bytes to other ranks
    sends: int


def estimate(program: "Microbatched", leaves: Sequence[Any], batch: Any) -> ProgramCost:
    """Return the cost of a call, given the state and a batch, or their shapes; nothing is compiled.

    The temporaries are the gradients' sums and what microbatches keep for their backward passes, as many as the
    schedule has alive at most; those within a stage's program come in addition. Collectives within a rank are not
    counted.
    """
    strategy, schedule, places = program.strategy, program.schedule, program.places
    # Arrays of the batch's size that take no memory.
    empty = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), batch)
    microbatches, sets = program.prepare(leaves, empty)
    pairs = zip(microbatches, sets, strict=True)
    passes = {mb.shape: _passes(program, stage_set, leaves, mb.leaves) for mb, stage_set in pairs}
    largest = max(microbatches, key=lambda mb: mb.rows)
    replicas = strategy.inner.num_replicas
    share = 1 if largest.rows % replicas else replicas
    live = simulate(schedule, len(microbatches)).peak_live
    sums, saved, sent, sends = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
    for stage, programs in enumerate(sets[0].stages):
        rank = schedule.rank_of(stage)
        params = [leaves[i] for i in programs.params]
        pairs = zip(program.sums(params), params, strict=True)
        likes = [x.update(sharding=places.on(param.sharding, rank)) for x, param in pairs]
        sums[rank] += bytes_per_device(likes)
        saved[rank] = max(saved[rank], passes[largest.shape][stage].saved)
        sent[rank] += sum(passes[mb.shape][stage].sent for mb in microbatches)
        sends[rank] += sum(passes[mb.shape][stage].sends for mb in microbatches)
    temporaries = max(sums[rank] + saved[rank] * live[rank] // share for rank in sums)
    state = bytes_per_device(leaves)
    flops = sum((one.flops for mb in microbatches for one in passes[mb.shape]), Flops())
    busiest = max(sent, key=lambda rank: sent[rank])
    between = sent[busiest] // share
    send = Collective("send", sends[busiest], between, exact=False, sent_by_span={strategy.mesh.size: between})
    memory = Memory(state + bytes_of(jax.tree.leaves(batch)), state, temporaries, state, exact=False)
    return ProgramCost(program.name, flops, memory, (send,) if sends[busiest] else ())


def forwards(stages: Sequence[Stage], shapes: Sequence[Any]) -> Iterator[tuple[Any, list[Any], Saved]]:
    """Yield each stage's forward pass, traced, its outs, and what it keeps, given the shapes of the step's inputs."""
    sent: dict[Any, Any] = {}
    for stage in stages:
        inputs, ins = [shapes[i] for i in stage.piece.inputs], [sent[x] for x in stage.piece.ins]
        forward = stage.forward.trace(inputs, ins)
        outs, _, residuals = abstract_batch(forward.out_info)
        sent |= zip(stage.piece.outs, outs, strict=True)
        yield forward, outs, stage.keep(inputs, ins, residuals)


def _passes(program: "Microbatched", stage_set: StageSet, leaves: Sequence[Any], batch: Sequence[Any]) -> list[_Pass]:
    """Return the cost of a microbatch on each stage."""
    shapes = abstract_batch([*leaves, *batch])
    scale = None if program.passes.scale is None else shapes[program.passes.scale]
    rank_of, shape_of, passes = program.schedule.rank_of, dict[Any, Any](), list[_Pass]()
    for k, (forward, outs, saved) in enumerate(forwards(stage_set.stages, shapes)):
        stage = stage_set.stages[k]
        shape_of |= zip(stage.piece.outs, outs, strict=True)
        totals = program.sums(shapes[i] for i in stage.params)
        returned = (saved.inputs, saved.ins), saved.residuals, [[outs[i]] for i in stage.outs]
        backward = stage.backward.trace(*returned, totals, np.float32(1), scale)
        # Each result to the stages that use it, and each gradient to the stage that computed its value.
        routes = [(var, user) for var in stage.piece.outs for user, _ in stage_set.users[var]]
        routes += [(var, stage_set.producer[var][0]) for var in (stage.piece.ins[i] for i in stage.ins)]
        moved = [shape_of[var] for var, receiver in routes if rank_of(receiver) != rank_of(k)]
        flops = count_flops(forward.jaxpr.jaxpr) + count_flops(backward.jaxpr.jaxpr)
        passes.append(_Pass(flops, saved.nbytes, bytes_of(moved), len(moved)))
    return passes
