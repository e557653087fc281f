"""Schedules of a pipeline: which rank runs which task, in which order; their simulation, and their charts.

Sources: GPipe (Huang et al., arXiv 1811.06965), 1F1B (PipeDream, arXiv 1806.03377), its interleaved form (Megatron-LM,
arXiv 2104.04473), zero bubble (Qi et al., arXiv 2401.10241).
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from jaxlit import checks as check
from jaxlit.errors import ArgumentError


class Kind(Enum):
    """What a task computes of its stage.

    `BWD_INPUT` is the part of a backward pass that the stage before waits for, `BWD_WEIGHT` the rest of it.

    Example:
        >>> import jaxlit as jl
        >>> [kind.value for kind in jl.pipeline.Kind]
        ['fwd', 'bwd', 'bwdA', 'bwdW']
    """

    FWD = "fwd"
    BWD = "bwd"
    BWD_INPUT = "bwdA"
    BWD_WEIGHT = "bwdW"


@dataclass(frozen=True)
class Task:
    """A pass of one microbatch through one stage.

    Args:
        stage: The stage, from 0.
        mb: The microbatch, from 0.
        kind: What is computed.

    Example:
        >>> import jaxlit as jl
        >>> str(jl.strategies.Std1F1B(4).tasks(4)[2][0])
        'fwd_2__0'
    """

    stage: int
    mb: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.kind.value}_{self.stage}__{self.mb}"


class FusedTask(tuple[Task, ...]):
    """Tasks that run as one program, in their order.

    Example:
        >>> import jaxlit as jl
        >>> str(jl.strategies.Std1F1B(4).tasks(4)[3][0])
        'FusedTask(fwd_3__0, bwd_3__0)'
    """

    __slots__ = ()

    def __str__(self) -> str:
        return f"FusedTask({', '.join(map(str, self))})"


def parts(task: Task | FusedTask) -> tuple[Task, ...]:
    """Return the tasks of one program."""
    return (task,) if isinstance(task, Task) else task


def flat(tasks: list[Task | FusedTask]) -> Iterator[Task]:
    """Return the tasks of a rank one by one."""
    return itertools.chain.from_iterable(map(parts, tasks))


class Schedule(ABC):
    """The order in which each rank of a pipeline runs its tasks; a subclass returns it from `tasks`.

    A rank is a group of devices, which holds one or more stages of the model. `simulate` checks the tasks before
    anything is compiled: each microbatch goes forward and backward once through each stage, on the rank that holds it,
    and no rank waits for ever.

    Args:
        num_stages: Stages of the model.
        num_ranks: Ranks; None for as many as stages.

    Raises:
        ArgumentError: The ranks do not divide the stages.

    Example:
        >>> import jaxlit as jl
        >>> Kind, Task = jl.pipeline.Kind, jl.pipeline.Task
        >>> class OneByOne(jl.strategies.Schedule):
        ...     def tasks(self, num_microbatches):
        ...         kinds = [(k, mb) for mb in range(num_microbatches) for k in (Kind.FWD, Kind.BWD)]
        ...         return [[Task(rank, mb, k) for k, mb in kinds] for rank in range(self.num_ranks)]
        >>> jl.pipeline.simulate(OneByOne(2), 4).peak_live
        (1, 1)
    """

    def __init__(self, num_stages: int, num_ranks: int | None = None) -> None:
        owner = type(self).__name__
        self.num_stages = check.integer("num_stages", num_stages, low=1, owner=owner)
        ranks = self.num_stages if num_ranks is None else num_ranks
        self.num_ranks = check.integer("mpmd_dim", ranks, low=1, owner=owner)
        if self.num_stages % self.num_ranks:
            raise ArgumentError(
                f"{owner}: {num_stages} stages do not divide among {num_ranks} ranks. Give a multiple of {num_ranks}."
            )

    def __repr__(self) -> str:
        ranks = f", {self.num_ranks}" if self.num_ranks != self.num_stages else ""
        return f"{type(self).__name__}({self.num_stages}{ranks})"

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage; here stages are dealt out in turn."""
        return stage % self.num_ranks

    @abstractmethod
    def tasks(self, num_microbatches: int) -> list[list[Task | FusedTask]]:
        """Return the tasks of each rank, in their order.

        Args:
            num_microbatches: Into how many microbatches a batch is split.
        """


class Interleaved1F1B(Schedule):
    """One forward, one backward, on ranks that hold `num_stages / mpmd_dim` stages each.

    Each rank first runs forwards until the last stage's gradients can come back, then a forward and a backward in
    turn. The more stages a rank has, the smaller is the bubble, and the more is sent between ranks. Two forwards are
    under way for each hop, so that what is sent arrives while the rank computes.

    Args:
        num_stages: Stages of the model.
        mpmd_dim: Ranks.

    Example:
        >>> import jaxlit as jl
        >>> schedule = jl.strategies.Interleaved1F1B(8, 4)
        >>> [str(task) for task in schedule.tasks(4)[3][4:6]]
        ['FusedTask(fwd_7__0, bwd_7__0)', 'FusedTask(fwd_7__1, bwd_7__1)']
    """

    def __init__(self, num_stages: int, mpmd_dim: int) -> None:
        super().__init__(num_stages, mpmd_dim)

    def warmup(self, rank: int, num_microbatches: int) -> int:
        """Return how many forwards a rank runs before its first backward."""
        chunks = self.num_stages // self.num_ranks
        return (chunks - 1) * self._round(num_microbatches) + 2 * (self.num_ranks - 1 - rank)

    def tasks(self, num_microbatches: int) -> list[list[Task | FusedTask]]:
        """Return the tasks of each rank.

        Raises:
            ArgumentError: The microbatches do not divide into rounds over the ranks.
        """
        return [self._of_rank(rank, count_of(num_microbatches, self)) for rank in range(self.num_ranks)]

    def _of_rank(self, rank: int, count: int) -> list[Task | FusedTask]:
        stages = [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]
        forwards = [*self._passes(stages, count, Kind.FWD)]
        backwards = [*self._passes(stages[::-1], count, Kind.BWD)]
        warmup = min(self.warmup(rank, count), len(forwards))
        steady = len(forwards) - warmup
        tasks: list[Task | FusedTask] = list(forwards[:warmup])
        for fwd, bwd in zip(forwards[warmup:], backwards[:steady], strict=True):
            # The loss is where a backward can follow at once, and nothing has to be kept for it.
            last = fwd.stage == bwd.stage == self.num_stages - 1 and fwd.mb == bwd.mb
            tasks += [FusedTask((fwd, bwd))] if last else [fwd, bwd]
        return [*tasks, *backwards[steady:]]

    def _passes(self, stages: list[int], count: int, kind: Kind) -> Iterator[Task]:
        size = self._round(count)
        for start, stage in itertools.product(range(0, count, size), stages):
            for mb in range(start, start + size):
                yield Task(stage, mb, kind)

    def _round(self, count: int) -> int:
        """Return how many microbatches go through a stage before the rank's next stage has its turn."""
        if self.num_stages == self.num_ranks:
            return 1
        rounds = max(1, count // self.num_ranks)
        if count % rounds:
            raise ArgumentError(
                f"{self!r}: {count} microbatches do not divide into {rounds} rounds over {self.num_ranks} ranks. Give "
                f"a multiple of {self.num_ranks}."
            )
        return count // rounds


class Eager1F1B(Interleaved1F1B):
    """1F1B with two forwards under way for each hop, which hides what is sent, for more memory.

    Args:
        num_stages: Stages, and ranks.

    Example:
        >>> import jaxlit as jl
        >>> jl.pipeline.simulate(jl.strategies.Eager1F1B(4), 8).peak_live
        (7, 5, 3, 1)
    """

    def __init__(self, num_stages: int) -> None:
        super().__init__(num_stages, num_stages)


class Std1F1B(Eager1F1B):
    """One forward, one backward: the bubble of GPipe, and at most as many live microbatches as there are stages.

    Args:
        num_stages: Stages, and ranks.

    Example:
        >>> import jaxlit as jl
        >>> jl.pipeline.simulate(jl.strategies.Std1F1B(4), 8).peak_live
        (4, 3, 2, 1)
    """

    def warmup(self, rank: int, num_microbatches: int) -> int:
        """Return how many stages come after."""
        return self.num_ranks - 1 - rank


class GPipe(Eager1F1B):
    """All forwards, then all backwards: every microbatch is live at once.

    Args:
        num_stages: Stages, and ranks.

    Example:
        >>> import jaxlit as jl
        >>> jl.pipeline.simulate(jl.strategies.GPipe(4), 8).peak_live
        (8, 8, 8, 8)
    """

    def warmup(self, rank: int, num_microbatches: int) -> int:
        """Return all of them."""
        return num_microbatches


class ZeroBubbleH1(Schedule):
    """1F1B whose backward passes are cut in two: what no stage waits for fills the bubble, within 1F1B's memory.

    Args:
        num_stages: Stages, and ranks.

    Example:
        >>> import jaxlit as jl
        >>> round(jl.pipeline.simulate(jl.strategies.ZeroBubbleH1(4), 8).bubble, 3)
        0.111
    """

    def __init__(self, num_stages: int) -> None:
        super().__init__(num_stages)

    def tasks(self, num_microbatches: int) -> list[list[Task | FusedTask]]:
        """Return the tasks of each rank."""
        return [self._of_rank(rank, count_of(num_microbatches, self)) for rank in range(self.num_ranks)]

    def _of_rank(self, rank: int, count: int) -> list[Task | FusedTask]:
        fwd, inner, weight = Kind.FWD, Kind.BWD_INPUT, Kind.BWD_WEIGHT
        warmup = [fwd] * (self.num_ranks - rank) + [inner, fwd] * rank
        done, tasks = dict[Kind, int]({fwd: 0, inner: 0, weight: 0}), list[Task | FusedTask]()
        for kind in itertools.chain(warmup, itertools.cycle((inner, weight, fwd))):
            if len(tasks) == 3 * count:
                break
            if done[kind] < count:
                tasks.append(Task(rank, done[kind], kind))
                done[kind] += 1
        return tasks


class ZBV(Schedule):
    """Zero bubble along a V: rank r holds stage r and, counted from the end, stage r again.

    The rank of the first stage holds the last one too, so that a microbatch's backward begins where its forward did.
    Backward passes are cut in two. No rank holds more live microbatches than 1F1B's first rank. The order is ranks by
    a greedy rule (what the stage before waits for, then forwards, then the rest) where the source has it in closed
    form.

    Args:
        num_stages: Stages of the model, twice as many as ranks.
        mpmd_dim: Ranks.

    Raises:
        ArgumentError: There are not two stages for each rank.

    Example:
        >>> import jaxlit as jl
        >>> simulation = jl.pipeline.simulate(jl.strategies.ZBV(8, 4), 8)
        >>> round(simulation.bubble, 3), simulation.peak_live
        (0.059, (8, 8, 8, 8))
    """

    def __init__(self, num_stages: int, mpmd_dim: int) -> None:
        super().__init__(num_stages, mpmd_dim)
        if num_stages != 2 * mpmd_dim:
            raise ArgumentError(
                f"ZBV({num_stages}, {mpmd_dim}) has {num_stages // mpmd_dim} stages a rank, and needs two. Give "
                f"{2 * mpmd_dim} stages."
            )

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        return min(stage, self.num_stages - 1 - stage)

    def tasks(self, num_microbatches: int) -> list[list[Task | FusedTask]]:
        """Return the tasks of each rank."""
        count = count_of(num_microbatches, self)
        ranks: list[list[Task | FusedTask]] = [[] for _ in range(self.num_ranks)]
        begun, counts = dict[Task, int](), Counter[tuple[int, Kind]]()
        # Each kind of task takes as long as any other, so that the clock goes by tasks.
        for clock in itertools.count():
            if len(begun) == 3 * self.num_stages * count:
                break
            for rank, tasks in enumerate(ranks):
                if task := self._next(rank, count, begun, counts, clock):
                    tasks.append(task)
                    begun[task] = clock
                    counts[task.stage, task.kind] += 1
        return ranks

    def _next(
        self, rank: int, count: int, begun: dict[Task, int], counts: Counter[tuple[int, Kind]], clock: int
    ) -> Task | None:
        """Return what a rank begins now, or None if it waits."""
        down, back = rank, self.num_stages - 1 - rank
        live = sum(counts[stage, Kind.FWD] - counts[stage, Kind.BWD_WEIGHT] for stage in (down, back))
        for kind, stage in itertools.product((Kind.BWD_INPUT, Kind.FWD, Kind.BWD_WEIGHT), (back, down)):
            if (mb := counts[stage, kind]) == count:
                continue
            # A forward pass leaves one place for the way back, without which nothing would ever leave.
            if kind is Kind.FWD and live >= self.num_stages - (stage == down):
                continue
            task = Task(stage, mb, kind)
            if all(begun.get(x, clock) < clock for x in _needs(task, self.num_stages, lambda _: True)):
                return task
        return None


# By name, functions of a number of ranks.
SCHEDULES: Mapping[str, Callable[[int], Schedule]] = {
    "gpipe": GPipe,
    "1f1b": Std1F1B,
    "eager_1f1b": Eager1F1B,
    "interleaved_1f1b": lambda ranks: Interleaved1F1B(2 * ranks, ranks),
    "zb_h1": ZeroBubbleH1,
    "zbv": lambda ranks: ZBV(2 * ranks, ranks),
}


def count_of(num_microbatches: int, schedule: Schedule) -> int:
    """Return a number of microbatches, checked."""
    return check.integer("num_microbatches", num_microbatches, low=1, owner=f"{schedule!r}.tasks")


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
    waiting: dict[Task, list[int]] = {}  # ranks, by the task that they wait for
    ready = [*range(len(programs))]
    while ready:
        rank = ready.pop()
        while at[rank] < len(programs[rank]):
            program = parts(programs[rank][at[rank]])
            needed = [x for task in program for x in _needs(task, schedule.num_stages, every.__contains__)]
            needed = [x for x in needed if x not in program]
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


def _needs(task: Task, num_stages: int, exists: Callable[[Task], bool]) -> list[Task]:
    """Return the tasks that a task waits for."""
    stage, mb = task.stage, task.mb
    if task.kind is Kind.FWD:
        return [Task(stage - 1, mb, Kind.FWD)] if stage else []
    if task.kind is Kind.BWD_WEIGHT:
        return [Task(stage, mb, Kind.BWD_INPUT)]
    needed = [Task(stage, mb, Kind.FWD)]
    if stage + 1 < num_stages:  # whose backward is in one part or in two
        part = Task(stage + 1, mb, Kind.BWD_INPUT)
        needed.append(part if exists(part) else Task(stage + 1, mb, Kind.BWD))
    return needed


def _check(schedule: Schedule, programs: list[list[Task | FusedTask]], count: int) -> set[Task]:
    """Return all tasks of a schedule; refuse one of which any is missing, occurs twice or is on another rank."""
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
    shows_stages = schedule.num_stages > schedule.num_ranks
    lines = []
    for tasks in schedule.tasks(num_microbatches):
        line = ["."] * round(simulation.makespan / unit)
        for task in flat(tasks):
            begin, length = round(simulation.start[task] / unit), round(LATENCY[task.kind] * share / unit)
            label = f"{task.stage if shows_stages else ''}{_LETTER[task.kind]}{task.mb}"
            line[begin : begin + length] = [label] * length
        lines.append(line)
    width = max(len(label) for line in lines for label in line)
    rows = (" ".join(f"{label:<{width}}" for label in line).rstrip() for line in lines)
    places = len(str(len(lines) - 1))
    return "\n".join(f"rank {rank:>{places}}  {row}" for rank, row in enumerate(rows))
