"""Runs a batch through a pipeline: forward and backward passes of its microbatches, in the order of a schedule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.core.passes import Passes
from jaxlit.pipeline.cut import Cut
from jaxlit.pipeline.places import Places
from jaxlit.pipeline.schedules import Schedule
from jaxlit.pipeline.stages import Kept, Stage
from jaxlit.pipeline.tasks import FusedTask, Kind, Task, parts


@dataclass
class Microbatch:
    """A part of a batch.

    Attributes:
        leaves: The arrays of the batch that it has, on the host.
        rows: How many rows.
        shape: The key of its programs.
    """

    leaves: list[Any]
    rows: int
    shape: Any


@dataclass
class Made:
    """The results of the passes over a batch.

    Attributes:
        written: The newest arrays of what the step writes, in the order of `Passes.written`.
        grads: The sum of each parameter's gradients, in the order of `Passes.params`.
        tables: Each microbatch's table.
        outputs: The outputs of each microbatch.
    """

    written: list[Any] = field(default_factory=list)
    grads: list[Any] = field(default_factory=list)
    tables: list[Any] = field(default_factory=list)
    outputs: list[list[Any]] = field(default_factory=list)


class StageSet:
    """The programs of all stages, for microbatches of one shape.

    Args:
        cut: The step, cut.
        stages: The programs of each stage.
        num_leaves: How many of the cut's inputs are of the state; the others are of the batch.
        num_written: How many of its outputs, after the first, are state.
    """

    def __init__(self, cut: Cut, stages: Sequence[Stage], num_leaves: int, num_written: int) -> None:
        self.cut, self.stages, self.num_leaves, self.num_written = cut, stages, num_leaves, num_written
        self.producer = {x: (p.stage, k) for p in cut.pieces for k, x in enumerate(p.outs)}
        self.users = {x: [(u, cut.pieces[u].ins.index(x)) for u in cut.users(x)] for x in self.producer}
        self.of_state = [{i for i in p.inputs if i < num_leaves} for p in cut.pieces]
        self.of_batch = [[i for i in p.inputs if i >= num_leaves] for p in cut.pieces]


class Executor:
    """Runs the passes of one batch.

    Args:
        places: The ranks.
        schedule: The order of the tasks.
        passes: The functions of a pass.
        place_batch: Puts lists of host arrays onto a rank each.
        zeros: Returns arrays that gradients are added to, given a rank and the indices of parameters.
        homes: The rank that holds each array of the state.
    """

    def __init__(
        self,
        places: Places,
        schedule: Schedule,
        passes: Passes,
        place_batch: Callable[[Sequence[int], list[list[Any]]], list[list[Any]]],
        zeros: Callable[[int, Sequence[int]], list[jax.Array]],
        homes: Sequence[int],
    ) -> None:
        self.places, self.schedule, self.passes, self.homes = places, schedule, passes, homes
        self._place_batch, self._zeros = place_batch, zeros

    def __call__(
        self,
        order: Sequence[Task | FusedTask],
        leaves: Sequence[Any],
        parts_of_batch: Sequence[Microbatch],
        sets: Sequence[StageSet],
    ) -> Made:
        """Run a batch.

        Args:
            order: The tasks, none before what it waits for.
            leaves: The state.
            parts_of_batch: The microbatches.
            sets: The programs for each of them.
        """
        return _Batch(self, leaves, parts_of_batch, sets).run(order)

    def rank(self, stage: int) -> int:
        """Return the rank of a stage."""
        return self.schedule.rank_of(stage)


class _Batch:
    def __init__(
        self, of: Executor, leaves: Sequence[Any], microbatches: Sequence[Microbatch], sets: Sequence[StageSet]
    ) -> None:
        self.of, self.microbatches, self.sets = of, microbatches, sets
        self.count = len(sets[0].stages)
        self.state, self.batch = self._spread(leaves), self._placed()
        scale = of.passes.scale
        self.scale = [None if scale is None else self.state[s][scale] for s in range(self.count)]
        # Gradients add up per stage, and are sent to the ranks of the parameters once, after the last task.
        self.totals = [of._zeros(of.rank(s), sets[0].stages[s].params) for s in range(self.count)]
        # By (stage, microbatch). Each entry is removed by the task that uses it, which bounds the memory: a schedule's
        # peak of live microbatches is the most entries of `kept` at a time.
        self.kept: dict[tuple[int, int], Kept] = {}
        self.inbox: dict[tuple[int, int], list[Any]] = {}  # the arrays that a stage was sent for a microbatch
        self.cotangents: dict[tuple[int, int], dict[int, list[Any]]] = {}
        self.halves: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.results: dict[tuple[int, int], Any] = {}  # outputs by microbatch and index

    def run(self, order: Sequence[Task | FusedTask]) -> Made:
        run = {
            Kind.FWD: self.forward,
            Kind.BWD: self.backward,
            Kind.BWD_INPUT: self.backward_input,
            Kind.BWD_WEIGHT: self.backward_weight,
        }
        for program in order:
            tasks = parts(program)
            if self._fuses(tasks):  # one program, which keeps no residuals between its halves
                self.fused(tasks[0])
                continue
            for task in tasks:
                run[task.kind](task)
        # The first output is the loss, then come the written arrays, the table and the user's outputs.
        cut, n = self.sets[0].cut, self.sets[0].num_written
        updates = {i: at for i, at in enumerate(cut.made_at)}
        written = [self.state[updates[1 + k]][place] for k, place in enumerate(self.of.passes.written)]
        tables = [self.results[mb, 1 + n] for mb in range(len(self.microbatches))]
        rest = range(2 + n, len(cut.made_at))
        outputs = [[self.results[mb, i] for mb in range(len(self.microbatches))] for i in rest]
        return Made(written, self._grads(), tables, outputs)

    # Tasks ------------------------------------------------------------------------------------------

    def forward(self, task: Task) -> None:
        stage, inputs, ins = self._given(task)
        outs, results, residuals = stage.forward(inputs, ins)
        self._results(task, results)
        self.kept[task.stage, task.mb] = stage.keep(inputs, ins, residuals)
        self._push(task, outs)

    def fused(self, task: Task) -> None:
        stage, inputs, ins = self._given(task)
        totals, scale = self.totals[task.stage], self.scale[task.stage]
        results, sent, self.totals[task.stage] = stage.fused(inputs, ins, totals, self._rows(task), scale)
        self._results(task, results)
        self._push_back(task, sent)

    def backward(self, task: Task) -> None:
        stage, kept, cotangents = self._returned(task)
        given, totals, scale = (kept.inputs, kept.ins), self.totals[task.stage], self.scale[task.stage]
        sent, self.totals[task.stage] = stage.backward(
            given, kept.residuals, cotangents, totals, self._rows(task), scale
        )
        self._push_back(task, sent)

    def backward_input(self, task: Task) -> None:
        stage, kept, cotangents = self._returned(task)
        given = (kept.inputs, kept.ins), kept.residuals, cotangents
        # `crossing` is what the second half needs of the first; it keeps the residuals alive until then.
        sent, crossing = stage.backward_input(*given)
        self.halves[task.stage, task.mb] = (given, crossing)
        self._push_back(task, sent)

    def backward_weight(self, task: Task) -> None:
        stage, (given, crossing) = self._stage(task), self.halves.pop((task.stage, task.mb))
        totals, scale = self.totals[task.stage], self.scale[task.stage]
        self.totals[task.stage] = stage.backward_weight(given, crossing, totals, self._rows(task), scale)

    def _fuses(self, tasks: Sequence[Task]) -> bool:
        """Return whether tasks are one program: a forward pass whose backward can follow at once."""
        if [x.kind for x in tasks] != [Kind.FWD, Kind.BWD] or tasks[0].stage != tasks[1].stage:
            return False
        stage = self._stage(tasks[0])
        return tasks[0].mb == tasks[1].mb and stage.ends and not stage.piece.outs

    # Inputs and results of tasks --------------------------------------------------------------------

    def _stage(self, task: Task) -> Stage:
        return self.sets[task.mb].stages[task.stage]

    def _rows(self, task: Task) -> np.float32:
        return np.float32(self.microbatches[task.mb].rows)

    def _given(self, task: Task) -> tuple[Stage, list[Any], list[Any]]:
        stage, state, key = self._stage(task), self.state[task.stage], (task.stage, task.mb)
        # Popped: a microbatch's arrays are freed once the last stage that uses them has them.
        first, batch = self.sets[task.mb].num_leaves, self.batch.pop(key, {})
        inputs = [state[i] if i < first else batch[i] for i in stage.piece.inputs]
        return stage, inputs, self.inbox.pop(key, [])

    def _returned(self, task: Task) -> tuple[Stage, Kept, list[list[Any]]]:
        stage, key = self._stage(task), (task.stage, task.mb)
        # A value that several stages use has a cotangent from each; the program adds them up.
        parts = self.cotangents.pop(key, {k: [] for k in stage.outs})
        return stage, self.kept.pop(key), [parts[k] for k in stage.outs]

    def _results(self, task: Task, results: Sequence[Any]) -> None:
        """Keep the results of a pass: state for the next microbatch of this stage, the rest for the end."""
        cut, n, places = self.sets[task.mb].cut, self.sets[task.mb].num_written, self.of.passes.written
        for i, x in zip(self._stage(task).piece.results, results, strict=True):
            if 1 <= i <= n:  # batch statistics: microbatches update them in order
                self.state[task.stage][places[i - 1]] = x
            elif cut.made_at[i] == task.stage:  # other stages may compute a copy of it
                self.results[task.mb, i] = x

    def _push(self, task: Task, outs: Sequence[Any]) -> None:
        """Send the results of a pass to the stages that use them."""
        # One transfer for all receivers: starting one costs more than its bytes.
        which, to = self.sets[task.mb], []
        for var, x in zip(self._stage(task).piece.outs, outs, strict=True):
            to += [(stage, k, x) for stage, k in which.users[var]]
        sent = self.of.places.send([x for _, _, x in to], [self.of.rank(stage) for stage, _, _ in to])
        for (stage, k, _), x in zip(to, sent, strict=True):
            box = self.inbox.setdefault((stage, task.mb), [None] * len(which.stages[stage].piece.ins))
            box[k] = x

    def _push_back(self, task: Task, sent: Sequence[Any]) -> None:
        """Send gradients to the stages that made the values."""
        which, stage = self.sets[task.mb], self._stage(task)
        to = [which.producer[stage.piece.ins[k]] for k in stage.ins]
        arrays = self.of.places.send(sent, [self.of.rank(s) for s, _ in to])
        for (s, k), x in zip(to, arrays, strict=True):
            box = self.cotangents.setdefault((s, task.mb), {j: [] for j in which.stages[s].outs})
            box[k].append(x)

    # The beginning and the end ----------------------------------------------------------------------

    def _spread(self, leaves: Sequence[Any]) -> list[dict[int, Any]]:
        """Return for each stage the arrays of the state that it uses, copies of those of other ranks."""
        of, different = self.of, {*self.sets}
        always = set() if of.passes.scale is None else {of.passes.scale}
        used = [always.union(*(x.of_state[s] for x in different)) for s in range(self.count)]
        arrays = [{i: leaves[i] for i in mine} for mine in used]
        to = [(s, i) for s, mine in enumerate(used) for i in mine if of.homes[i] != of.rank(s)]
        sent = of.places.send([leaves[i] for _, i in to], [of.rank(s) for s, _ in to])
        for (s, i), x in zip(to, sent, strict=True):
            arrays[s][i] = x
        return arrays

    def _placed(self) -> dict[tuple[int, int], dict[int, Any]]:
        """Return by stage and microbatch the arrays of the batch that it uses, all of them sent at once."""
        # All at once, before the first task: no stage then waits for the host.
        wanted = {(s, mb): x.of_batch[s] for mb, x in enumerate(self.sets) for s in range(self.count) if x.of_batch[s]}
        first = self.sets[0].num_leaves
        arrays = [[self.microbatches[mb].leaves[i - first] for i in which] for (_, mb), which in wanted.items()]
        placed = self.of._place_batch([self.of.rank(s) for s, _ in wanted], arrays)
        pairs = zip(wanted.items(), placed, strict=True)
        return {key: dict(zip(which, xs, strict=True)) for (key, which), xs in pairs}

    def _grads(self) -> list[Any]:
        """Return the sum over all stages of each parameter's gradients, on the rank that holds it."""
        # A parameter that several stages use has a sum on each.
        params, homes = [i for x in self.sets[0].stages for i in x.params], self.of.homes
        arrays = self.of.places.send([x for totals in self.totals for x in totals], [homes[i] for i in params])
        grads: dict[int, list[Any]] = {i: [] for i in self.of.passes.params}
        for i, x in zip(params, arrays, strict=True):
            grads[i].append(x)
        zeros = self.of._zeros
        return [_sum(xs) if len(xs) > 1 else (xs or zeros(homes[i], [i]))[0] for i, xs in grads.items()]


@jax.jit
def _sum(arrays: list[jax.Array]) -> jax.Array:
    return reduce(jnp.add, arrays)
