"""Schedules as text."""

from jaxlit.pipeline.schedules import Schedule
from jaxlit.pipeline.simulator import LATENCY, simulate
from jaxlit.pipeline.tasks import Kind, flat

_LETTER = {Kind.FWD: "F", Kind.BWD: "B", Kind.BWD_INPUT: "I", Kind.BWD_WEIGHT: "W"}


def chart(schedule: Schedule, num_microbatches: int) -> str:
    """Draw a schedule: a line for each rank, a column for each unit of time, a dot where a rank waits.

    `F2` is the forward pass of microbatch 2, `B2` its backward, or in two parts `I2` (of the inputs) and `W2` (of the
    weights); where ranks hold several stages, the stage comes first: `5F2`.

    Args:
        schedule: The schedule.
        num_microbatches: Into how many microbatches a batch is split.

    Example:
        >>> import jaxlit as jl
        >>> print(jl.pipeline.chart(jl.strategies.Std1F1B(2), 2))
        rank 0  F0 F1 .  .  B0 B0 .  B1 B1
        rank 1  .  F0 B0 B0 F1 B1 B1 .  .
    """
    simulation = simulate(schedule, num_microbatches)
    share = schedule.num_ranks / schedule.num_stages
    unit = min(LATENCY.values()) * share
    several = schedule.num_stages > schedule.num_ranks
    lines = []
    for tasks in schedule.tasks(num_microbatches):
        line = ["."] * round(simulation.makespan / unit)
        for task in flat(tasks):
            begin, length = round(simulation.start[task] / unit), round(LATENCY[task.kind] * share / unit)
            label = f"{task.stage if several else ''}{_LETTER[task.kind]}{task.mb}"
            line[begin : begin + length] = [label] * length
        lines.append(line)
    width = max(len(label) for line in lines for label in line)
    rows = (" ".join(f"{label:<{width}}" for label in line).rstrip() for line in lines)
    places = len(str(len(lines) - 1))
    return "\n".join(f"rank {rank:>{places}}  {row}" for rank, row in enumerate(rows))
