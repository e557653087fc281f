"""Schedules: which rank runs which task, in which order.

Sources: GPipe (Huang et al., arXiv 1811.06965), 1F1B (PipeDream, arXiv 1806.03377), its interleaved form (Megatron-LM,
arXiv 2104.04473), zero bubble (Qi et al., arXiv 2401.10241).
"""

import itertools
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from jaxlit import checks as check
from jaxlit.errors import ArgumentError
from jaxlit.pipeline.tasks import FusedTask, Kind, Task


class Schedule(ABC):
    """The order in which each rank of a pipeline runs its tasks; a subclass returns it from `tasks`.

    A rank is a group of devices, which holds one stage of the model or several. What a subclass returns is checked by
    `simulate` before anything is compiled: each microbatch goes forward and backward once through each stage, on the
    rank that holds it, and no rank waits for ever.

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
    """One forward, one backward, on ranks that hold several stages each: `num_stages / mpmd_dim`.

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

        def done(stage: int, mb: int, kind: Kind) -> bool:
            return begun.get(Task(stage, mb, kind), clock) < clock

        live = sum(counts[stage, Kind.FWD] - counts[stage, Kind.BWD_WEIGHT] for stage in (down, back))
        for kind, stage in itertools.product((Kind.BWD_INPUT, Kind.FWD, Kind.BWD_WEIGHT), (back, down)):
            if (mb := counts[stage, kind]) == count:
                continue
            if kind is Kind.FWD:
                # One place is kept for the way back, without which nothing would ever leave.
                room = live < self.num_stages - (stage == down)
                ready = room and (stage == 0 or done(stage - 1, mb, kind))
            elif kind is Kind.BWD_WEIGHT:
                ready = done(stage, mb, Kind.BWD_INPUT)
            else:
                last = stage + 1 == self.num_stages
                ready = done(stage, mb, Kind.FWD) and (last or done(stage + 1, mb, kind))
            if ready:
                return Task(stage, mb, kind)
        return None


SCHEDULES: Mapping[str, Callable[[int], Schedule]] = MappingProxyType(
    {
        "gpipe": GPipe,
        "1f1b": Std1F1B,
        "eager_1f1b": Eager1F1B,
        "interleaved_1f1b": lambda ranks: Interleaved1F1B(2 * ranks, ranks),
        "zb_h1": ZeroBubbleH1,
        "zbv": lambda ranks: ZBV(2 * ranks, ranks),
    }
)  # by name: the schedule of so many ranks


def count_of(num_microbatches: int, schedule: Schedule) -> int:
    """Return a number of microbatches, checked."""
    return check.integer("num_microbatches", num_microbatches, low=1, owner=f"{schedule!r}.tasks")
