"""Runs a batch through a pipeline: forward and backward passes of its microbatches, in the order of a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.pipeline.cut import Cut
from jaxlit.pipeline.stages import Kept, Stage
from jaxlit.pipeline.tasks import FusedTask, Kind, Task, parts

if TYPE_CHECKING:
    from jaxlit.pipeline.training import Microbatched


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


_Boxes = dict[tuple[int, int], dict[int, list[Any]]]  # by (stage, microbatch): arrays by slot, several of a cotangent


class BatchRun:
    """Runs the passes of one batch.

    Args:
        program: The training program.
        leaves: The state.
        microbatches: The parts of the batch.
        sets: The programs for each of them.
    """

    def __init__(
        self,
        program: "Microbatched",
        leaves: Sequence[Any],
        microbatches: Sequence[Microbatch],
        sets: Sequence[StageSet],
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
        # peak of live microbatches is the most entries of `kept` at a time.
        self.kept: dict[tuple[int, int], Kept] = {}
        self.inbox: _Boxes = {}  # the arrays that a stage was sent for a microbatch
        self.cotangents: _Boxes = {}
        self.halves: dict[tuple[int, int], tuple[Any, Any]] = {}
        self.results: dict[tuple[int, int], Any] = {}  # outputs by microbatch and index

    def run(self, order: Sequence[Task | FusedTask]) -> tuple[list[Any], list[Any], list[Any], list[list[Any]]]:
        """Run the tasks in an order in which none waits for a later one.

        Returns:
            The newest arrays of what the step writes, in the order of `MicrobatchStep.written`; the sum of each
            parameter's gradients, in the order of `MicrobatchStep.params`; each microbatch's table; and by output those
            of each microbatch.
        """
        run = {Kind.FWD: self.forward, Kind.BWD: self.backward}
        run |= {Kind.BWD_INPUT: self.backward_input, Kind.BWD_WEIGHT: self.backward_weight}
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
        written = [self.state[updates[1 + k]][place] for k, place in enumerate(self.passes.written)]
        tables = [self.results[mb, 1 + n] for mb in range(len(self.microbatches))]
        rest = range(2 + n, len(cut.made_at))
        outputs = [[self.results[mb, i] for mb in range(len(self.microbatches))] for i in rest]
        return written, self._grads(), tables, outputs

    # Tasks ------------------------------------------------------------------------------------------

    def forward(self, task: Task) -> None:
        """Run a forward pass, and keep what its backward pass needs."""
        stage, inputs, ins = self._given(task)
        outs, results, residuals = stage.forward(inputs, ins)
        self._results(task, results)
        self.kept[task.stage, task.mb] = stage.keep(inputs, ins, residuals)
        self._push(task, outs)

    def fused(self, task: Task) -> None:
        """Run a forward pass of the last stage and its backward pass in one program."""
        stage, inputs, ins = self._given(task)
        results, sent, self.totals[task.stage] = stage.fused(inputs, ins, *self._sums(task))
        self._results(task, results)
        self._push_back(task, sent)

    def backward(self, task: Task) -> None:
        """Run a backward pass."""
        stage, given = self._returned(task)
        sent, self.totals[task.stage] = stage.backward(*given, *self._sums(task))
        self._push_back(task, sent)

    def backward_input(self, task: Task) -> None:
        """Run the part of a backward pass that the stage before waits for."""
        stage, given = self._returned(task)
        # `crossing` is what the second half needs of the first; it keeps the residuals alive until then.
        sent, crossing = stage.backward_input(*given)
        self.halves[task.stage, task.mb] = (given, crossing)
        self._push_back(task, sent)

    def backward_weight(self, task: Task) -> None:
        """Run the rest of a backward pass: the gradients of the weights."""
        stage, (given, crossing) = self._stage(task), self.halves.pop((task.stage, task.mb))
        self.totals[task.stage] = stage.backward_weight(given, crossing, *self._sums(task))

    def _fuses(self, tasks: Sequence[Task]) -> bool:
        """Return whether tasks are one program: a forward pass whose backward can follow at once."""
        first, stage = tasks[0], self._stage(tasks[0])
        pair = first, Task(first.stage, first.mb, Kind.BWD)
        return first.kind is Kind.FWD and tasks == pair and stage.ends and not stage.piece.outs

    # Inputs and results of tasks --------------------------------------------------------------------

    def _stage(self, task: Task) -> Stage:
        return self.sets[task.mb].stages[task.stage]

    def _sums(self, task: Task) -> tuple[list[Any], np.float32, Any]:
        """Return the gradients so far, and the rows and the loss scale of those that are added to them."""
        return self.totals[task.stage], np.float32(self.microbatches[task.mb].rows), self.scale[task.stage]

    def _given(self, task: Task) -> tuple[Stage, list[Any], list[Any]]:
        stage, state, key = self._stage(task), self.state[task.stage], (task.stage, task.mb)
        # Popped: a microbatch's arrays are freed once the last stage that uses them has them.
        first, batch = self.sets[task.mb].num_leaves, self.batch.pop(key, {})
        inputs = [state[i] if i < first else batch[i] for i in stage.piece.inputs]
        return stage, inputs, [x for _, (x,) in sorted(self.inbox.pop(key, {}).items())]

    def _returned(self, task: Task) -> tuple[Stage, tuple[Any, list[Any], list[list[Any]]]]:
        """Return a stage, and what its backward pass takes: the kept inputs, the residuals and the cotangents."""
        stage, key = self._stage(task), (task.stage, task.mb)
        kept = self.kept.pop(key)
        # A value that several stages use has a cotangent from each; the program adds them up.
        parts = self.cotangents.pop(key, {})
        return stage, ((kept.inputs, kept.ins), kept.residuals, [parts.get(k, []) for k in stage.outs])

    def _results(self, task: Task, results: Sequence[Any]) -> None:
        """Keep the results of a pass: state for the next microbatch of this stage, the rest for the end."""
        cut, n, places = self.sets[task.mb].cut, self.sets[task.mb].num_written, self.passes.written
        for i, x in zip(self._stage(task).piece.results, results, strict=True):
            if 1 <= i <= n:  # batch statistics: microbatches update them in order
                self.state[task.stage][places[i - 1]] = x
            elif cut.made_at[i] == task.stage:  # other stages may compute a copy of it
                self.results[task.mb, i] = x

    def _push(self, task: Task, outs: Sequence[Any]) -> None:
        """Send the results of a pass to the stages that use them."""
        users, pairs = self.sets[task.mb].users, zip(self._stage(task).piece.outs, outs, strict=True)
        self._send(self.inbox, task.mb, [(user, x) for var, x in pairs for user in users[var]])

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

    # The beginning and the end ----------------------------------------------------------------------

    def _spread(self, leaves: Sequence[Any]) -> list[dict[int, Any]]:
        """Return for each stage the arrays of the state that it uses, copies of those of other ranks."""
        ranks, different = self.program.ranks, {*self.sets}
        always = set() if self.passes.scale is None else {self.passes.scale}
        used = [always.union(*(x.of_state[s] for x in different)) for s in range(self.count)]
        arrays = [{i: leaves[i] for i in mine} for mine in used]
        to = [(s, i) for s, mine in enumerate(used) for i in mine if ranks[i] != self.rank_of(s)]
        sent = self.places.send([leaves[i] for _, i in to], [self.rank_of(s) for s, _ in to])
        for (s, i), x in zip(to, sent, strict=True):
            arrays[s][i] = x
        return arrays

    def _placed(self) -> dict[tuple[int, int], dict[int, Any]]:
        """Return by stage and microbatch the arrays of the batch that it uses, all of them sent at once."""
        # All at once, before the first task: no stage then waits for the host.
        wanted = {(s, mb): x.of_batch[s] for mb, x in enumerate(self.sets) for s in range(self.count) if x.of_batch[s]}
        first = self.sets[0].num_leaves
        arrays = [[self.microbatches[mb].leaves[i - first] for i in which] for (_, mb), which in wanted.items()]
        placed = self.program.place_batch([self.rank_of(s) for s, _ in wanted], arrays)
        pairs = zip(wanted.items(), placed, strict=True)
        return {key: dict(zip(which, xs, strict=True)) for (key, which), xs in pairs}

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
