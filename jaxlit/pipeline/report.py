"""The stages of a pipeline as a table."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxlit.pipeline.cut import Cut
from jaxlit.pipeline.schedules import Schedule
from jaxlit.pipeline.simulator import simulate
from jaxlit.programs.flops import count_flops
from jaxlit.table import size, table


class StageFacts(NamedTuple):
    """What is known about a stage.

    Attributes:
        names: The parameters that it holds.
        params: Their elements.
        flops: Operations of a forward pass of one microbatch.
    """

    names: list[str]
    params: int
    flops: int


def facts_of(cut: Cut, names: Sequence[str], stages: Sequence[int], leaves: Sequence[Any]) -> list[StageFacts]:
    """Return what is known about each stage.

    Args:
        cut: The user's step, cut.
        names: The names of the parameters.
        stages: The stage that holds each.
        leaves: Their shapes.
    """
    facts = []
    for piece in cut.pieces:
        mine = [i for i, stage in enumerate(stages) if stage == piece.stage]
        flops = count_flops(cut.closed.jaxpr.replace(eqns=piece.eqns)).count
        facts.append(StageFacts([names[i] for i in mine], sum(leaves[i].size for i in mine), flops))
    return facts


def stage_table(
    facts: Sequence[StageFacts], residuals: Sequence[int] | None, schedule: Schedule, num_microbatches: int
) -> str:
    """Return a row for each stage, and the predicted bubble.

    Args:
        facts: Of each stage.
        residuals: Bytes that a microbatch keeps on each for its backward pass; None until the step is built.
        schedule: The schedule.
        num_microbatches: Into how many microbatches a batch is split.
    """
    simulation = simulate(schedule, num_microbatches)
    rows = [("stage", "rank", "layers", "params", "GFLOP", "kept a microbatch", "live at most")]
    for stage, (names, params, flops) in enumerate(facts):
        rank, kept = schedule.rank_of(stage), "-" if residuals is None else size(residuals[stage])
        figures = f"{params:,}", f"{flops / 1e9:.3g}", kept, str(simulation.peak_live[rank])
        rows.append((str(stage), str(rank), layers_of(names), *figures))
    lines = "\n".join(table(rows, texts=3))
    return f"{lines}\npredicted bubble {simulation.bubble:.1%}: the part of their time in which ranks wait"


def layers_of(names: Sequence[str]) -> str:
    """Return the layers that parameters belong to, at most three: "embed, blocks[0] ... blocks[7]"."""
    layers = [*dict.fromkeys(name.split(".")[0] for name in names)] or ["-"]
    return ", ".join(layers) if len(layers) <= 3 else f"{layers[0]}, {layers[1]} ... {layers[-1]}"


def residuals_of(stages: Sequence[Any], shapes: Sequence[Any]) -> list[int]:
    """Return the bytes that each stage keeps of one microbatch, given the shapes of all inputs of the step."""
    sent: dict[Any, Any] = {}
    sizes = []
    for stage in stages:
        inputs, ins = [shapes[i] for i in stage.piece.inputs], [sent[x] for x in stage.piece.ins]
        outs, _, kept = jax.eval_shape(stage.forward, inputs, ins)
        sent |= dict(zip(stage.piece.outs, outs, strict=True))
        sizes.append(stage.keep(inputs, ins, kept).nbytes)
    return sizes
