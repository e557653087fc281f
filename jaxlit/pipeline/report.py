"""The stages of a pipeline as a table."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from jaxlit.pipeline.cut import Cut
from jaxlit.pipeline.schedules import Schedule
from jaxlit.pipeline.simulator import simulate
from jaxlit.programs.flops import count_flops
from jaxlit.table import size, table


@dataclass(frozen=True)
class StageFacts:
    """What is known about a stage.

    Attributes:
        stage: Its index.
        names: The parameters that it holds.
        params: Their elements.
        flops: Operations of a forward pass of one microbatch.
        residuals: Bytes that a microbatch keeps for its backward pass; None until the step is built.
    """

    stage: int
    names: list[str] = field(default_factory=list)
    params: int = 0
    flops: int = 0
    residuals: int | None = None


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
        facts.append(StageFacts(piece.stage, [names[i] for i in mine], sum(leaves[i].size for i in mine), flops))
    return facts


def with_residuals(facts: Sequence[StageFacts], residuals: Sequence[int]) -> list[StageFacts]:
    """Return the facts with the bytes that a microbatch keeps on each stage."""
    return [replace(one, residuals=num_bytes) for one, num_bytes in zip(facts, residuals, strict=True)]


def stage_table(facts: Sequence[StageFacts], schedule: Schedule, num_microbatches: int) -> str:
    """Return a row for each stage, and the predicted bubble."""
    simulation = simulate(schedule, num_microbatches)
    rows = [("stage", "rank", "layers", "params", "GFLOP", "kept a microbatch", "live at most")]
    for one in facts:
        rank = schedule.rank_of(one.stage)
        kept = "-" if one.residuals is None else size(one.residuals)
        live = str(simulation.peak_live[rank])
        gflop = f"{one.flops / 1e9:.3g}"
        rows.append((str(one.stage), str(rank), layers_of(one.names), f"{one.params:,}", gflop, kept, live))
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
