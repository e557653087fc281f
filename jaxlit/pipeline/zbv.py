"""Zero bubble on ranks that hold two stages each, one on the way down the model and one on the way back."""

import itertools
from collections import Counter

from jaxlit.errors import ArgumentError
from jaxlit.pipeline.schedules import Schedule, count_of
from jaxlit.pipeline.tasks import FusedTask, Kind, Task


class ZBV(Schedule):
    """Zero bubble along a V: rank r holds stage r and, counted from the end, stage r again.

    The rank of the first stage holds the last one too, so that a microbatch's backward begins where its forward did.
    Backward passes are cut in two. No rank holds more live microbatches than 1F1B's first rank. The order is found by
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
        found: list[list[Task | FusedTask]] = [[] for _ in range(self.num_ranks)]
        begun, counts = dict[Task, int](), Counter[tuple[int, Kind]]()
        # Each kind of task takes as long as any other, so that the clock goes by tasks.
        for clock in itertools.count():
            if len(begun) == 3 * self.num_stages * count:
                break
            for rank, tasks in enumerate(found):
                if task := self._next(rank, count, begun, counts, clock):
                    tasks.append(task)
                    begun[task] = clock
                    counts[task.stage, task.kind] += 1
        return found

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
