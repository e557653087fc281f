"""Simulates a schedule: whether it is complete, how long ranks wait, how much they hold."""

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from jaxlit.errors import ArgumentError
from jaxlit.pipeline.schedules import Schedule
from jaxlit.pipeline.tasks import FusedTask, Kind, Task, flat, parts

# For one stage a rank; a backward pass takes about twice as long as a forward pass.
LATENCY: Mapping[Kind, float] = {Kind.FWD: 1.0, Kind.BWD: 2.0, Kind.BWD_INPUT: 1.0, Kind.BWD_WEIGHT: 1.0}


@dataclass(frozen=True)
class Simulation:
    """The times of a schedule, in units of one forward pass through all stages of a rank, and what ranks hold.

    Args:
        makespan: When the last rank is done.
        busy: How long each rank computes.
        bubble: The part of their time in which ranks wait, from 0 to 1.
        peak_live: For each rank the most (stage, microbatch) pairs that have gone forward, and not yet back.
        start: When each task begins.
        order: All programs by the time when they begin: none comes before what it waits for.

    Example:
        >>> import jaxlit as jl
        >>> jl.pipeline.simulate(jl.strategies.GPipe(4), 4).makespan
        21.0
    """

    makespan: float
    busy: tuple[float, ...]
    bubble: float
    peak_live: tuple[int, ...]
    start: Mapping[Task, float]
    order: tuple[Task | FusedTask, ...]


def simulate(
    schedule: Schedule, num_microbatches: int, *, latency: Mapping[Kind, float] = LATENCY, comm: float = 0.0
) -> Simulation:
    """Simulate a schedule.

    Args:
        schedule: The schedule.
        num_microbatches: Into how many microbatches a batch is split.
        latency: How long each kind of task takes if a rank has one stage; with n stages, each takes one n-th.
        comm: How long it takes to send an array from rank to rank; ranks compute meanwhile.

    Returns:
        Its times and what ranks hold.

    Raises:
        ArgumentError: A task is missing, occurs twice, is on a rank that does not hold its stage, or is never run.

    Example:
        >>> import jaxlit as jl
        >>> round(jl.pipeline.simulate(jl.strategies.Std1F1B(4), 8).bubble, 3)
        0.273
    """
    programs = schedule.tasks(num_microbatches)
    every = _check(schedule, programs, num_microbatches)
    share = schedule.num_ranks / schedule.num_stages
    start, end = dict[Task, float](), dict[Task, float]()
    begun: list[tuple[float, int, int]] = []  # when each program of a rank began
    at, free = [0] * len(programs), [0.0] * len(programs)
    waiting: dict[Task, list[int]] = {}  # ranks, by the task they wait for
    ready = [*range(len(programs))]
    while ready:
        rank = ready.pop()
        while at[rank] < len(programs[rank]):
            program = parts(programs[rank][at[rank]])
            needed = [x for task in program for x in _needs(task, schedule.num_stages, every) if x not in program]
            if missing := next((x for x in needed if x not in end), None):
                waiting.setdefault(missing, []).append(rank)
                break
            now = max([free[rank], *(end[x] + comm * (schedule.rank_of(x.stage) != rank) for x in needed)])
            begun.append((now, rank, at[rank]))
            for task in program:
                start[task], now = now, now + latency[task.kind] * share
                end[task] = now
                ready += waiting.pop(task, ())
            free[rank], at[rank] = now, at[rank] + 1
    if waiting:
        pairs = sorted((rank, task) for task, ranks in waiting.items() for rank in ranks)
        waits = [f"rank {rank} with {programs[rank][at[rank]]} for {task}" for rank, task in pairs]
        raise ArgumentError(f"{schedule!r}: ranks wait for each other: {', '.join(waits)}.")
    busy = tuple(share * sum(latency[task.kind] for task in flat(tasks)) for tasks in programs)
    makespan = max(free)
    bubble = 1 - sum(busy) / (makespan * len(busy))
    order = tuple(programs[rank][i] for _, rank, i in sorted(begun))
    live = {Kind.FWD: 1, Kind.BWD: -1, Kind.BWD_INPUT: 0, Kind.BWD_WEIGHT: -1}
    changes = ([live[task.kind] for task in flat(tasks)] for tasks in programs)
    peaks = tuple(max(itertools.accumulate(x), default=0) for x in changes)
    return Simulation(makespan, busy, bubble, peaks, start, order)


def _needs(task: Task, num_stages: int, every: set[Task]) -> list[Task]:
    """Return the tasks that a task waits for."""
    stage, mb = task.stage, task.mb
    if task.kind is Kind.FWD:
        return [Task(stage - 1, mb, Kind.FWD)] if stage else []
    if task.kind is Kind.BWD_WEIGHT:
        return [Task(stage, mb, Kind.BWD_INPUT)]
    needed = [Task(stage, mb, Kind.FWD)]
    if stage + 1 < num_stages:  # whose backward is in one part or in two
        part = Task(stage + 1, mb, Kind.BWD_INPUT)
        needed.append(part if part in every else Task(stage + 1, mb, Kind.BWD))
    return needed


def _check(schedule: Schedule, programs: list[list[Task | FusedTask]], count: int) -> set[Task]:
    """Return all tasks of a schedule.

    Raises:
        ArgumentError: One is missing, occurs twice or is on another rank.
    """
    owner = f"{schedule!r} with {count} microbatches"
    if len(programs) != schedule.num_ranks:
        raise ArgumentError(f"{owner} gives tasks for {len(programs)} ranks, and has {schedule.num_ranks}.")
    tasks = [(rank, task) for rank, tasks in enumerate(programs) for task in flat(tasks)]
    every = {task for _, task in tasks}
    for rank, task in tasks:
        if not (0 <= task.stage < schedule.num_stages and 0 <= task.mb < count) or schedule.rank_of(task.stage) != rank:
            raise ArgumentError(f"{owner}: {task} is on rank {rank}, which has no such stage and microbatch.")
    if len(every) < len(tasks):
        raise ArgumentError(f"{owner}: {Counter(tasks).most_common(1)[0][0][1]} occurs twice.")
    for stage, mb in itertools.product(range(schedule.num_stages), range(count)):
        fwd, bwd, first, second = (Task(stage, mb, kind) for kind in Kind)
        if every & {fwd, bwd, first, second} not in ({fwd, bwd}, {fwd, first, second}):
            raise ArgumentError(f"{owner}: needs {fwd}, and {bwd} or both {first} and {second}.")
    return every
