"""What a batch takes of a pipeline: operations and transfers from traces, memory from the schedule."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxlit.pipeline.executor import StageSet
from jaxlit.pipeline.simulator import simulate
from jaxlit.programs.collectives import Collective
from jaxlit.programs.cost import Memory, ProgramCost
from jaxlit.programs.flops import Flops, count_flops
from jaxlit.reporting.placement import bytes_of, bytes_per_device

if TYPE_CHECKING:
    from jaxlit.pipeline.training import Microbatched


class _Pass(NamedTuple):
    """What a microbatch takes on one stage."""

    flops: Flops  # of its forward and its backward pass
    kept: int  # bytes between the two
    sent: int  # bytes to other ranks
    sends: int


def estimate(program: "Microbatched", leaves: Sequence[Any], batch: Any) -> ProgramCost:
    """Return what a call takes; nothing is compiled.

    The temporaries are the gradients' sums and what microbatches keep for their backward passes, as many as the
    schedule has alive at most; those within a stage's program come in addition. Collectives within a rank are not
    counted.

    Args:
        program: The training program.
        leaves: The state, or its shapes, dtypes and shardings.
        batch: A batch, or its shapes and dtypes.
    """
    strategy, schedule, places = program.strategy, program.schedule, program.places
    # Arrays of the batch's size that take no memory.
    empty = jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), batch)
    microbatches, sets = program.prepare(leaves, empty)
    shapes = {mb.shape: _passes(program, one, leaves, mb.leaves) for mb, one in zip(microbatches, sets, strict=True)}
    largest = max(microbatches, key=lambda mb: mb.rows)
    replicas = strategy.inner.num_replicas
    share = 1 if largest.rows % replicas else replicas
    live = simulate(schedule, len(microbatches)).peak_live
    sums, kept, sent, sends = Counter[int](), Counter[int](), Counter[int](), Counter[int]()
    for stage, one in enumerate(sets[0].stages):
        rank = schedule.rank_of(stage)
        like = [jax.ShapeDtypeStruct(leaves[i].shape, strategy.accum_dtype) for i in one.params]
        to = [places.on(leaves[i].sharding, rank) for i in one.params]
        sums[rank] += bytes_per_device([x.update(sharding=s) for x, s in zip(like, to, strict=True)])
        kept[rank] = max(kept[rank], shapes[largest.shape][stage].kept)
        sent[rank] += sum(shapes[mb.shape][stage].sent for mb in microbatches)
        sends[rank] += sum(shapes[mb.shape][stage].sends for mb in microbatches)
    temporaries = max(sums[rank] + kept[rank] * live[rank] // share for rank in sums)
    state = bytes_per_device(leaves)
    flops = sum((one.flops for mb in microbatches for one in shapes[mb.shape]), Flops())
    busiest = max(sent, key=lambda rank: sent[rank])
    between = sent[busiest] // share
    send = Collective("send", sends[busiest], between, exact=False, sent_by_span={strategy.mesh.size: between})
    memory = Memory(state + bytes_of(jax.tree.leaves(batch)), state, temporaries, state, exact=False)
    return ProgramCost(program.name, flops, memory, (send,) if sends[busiest] else ())


def _passes(program: "Microbatched", one: StageSet, leaves: Sequence[Any], batch: Sequence[Any]) -> list[_Pass]:
    """Return what each stage takes of a microbatch."""
    as_shape = lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))  # noqa: E731
    shapes = [as_shape(x) for x in (*leaves, *batch)]
    scale = None if program.passes.scale is None else shapes[program.passes.scale]
    rank_of, made, passes = program.schedule.rank_of, dict[Any, Any](), list[_Pass]()
    for k, stage in enumerate(one.stages):
        inputs, ins = [shapes[i] for i in stage.piece.inputs], [made[x] for x in stage.piece.ins]
        forward = stage.forward.trace(inputs, ins)
        outs, _, residuals = jax.tree.map(as_shape, forward.out_info)
        made |= zip(stage.piece.outs, outs, strict=True)
        kept = stage.keep(inputs, ins, residuals)
        totals = [jax.ShapeDtypeStruct(shapes[i].shape, program.strategy.accum_dtype) for i in stage.params]
        returned = (kept.inputs, kept.ins), residuals, [[outs[i]] for i in stage.outs]
        backward = stage.backward.trace(*returned, totals, np.float32(1), scale)
        crossing = [
            (var, x)
            for var, x in zip(stage.piece.outs, outs, strict=True)
            for user, _ in one.users[var]
            if rank_of(user) != rank_of(k)
        ]
        returns = [made[stage.piece.ins[i]] for i in stage.ins]
        back = [
            x
            for i, x in zip(stage.ins, returns, strict=True)
            if rank_of(one.producer[stage.piece.ins[i]][0]) != rank_of(k)
        ]
        moved = [*(x for _, x in crossing), *back]
        flops = count_flops(forward.jaxpr.jaxpr) + count_flops(backward.jaxpr.jaxpr)
        passes.append(_Pass(flops, kept.nbytes, bytes_of(moved), len(moved)))
    return passes
