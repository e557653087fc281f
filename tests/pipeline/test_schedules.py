"""Schedules: the tasks of each rank, what they cost against closed forms and a clock, and their charts."""

from typing import Any

import pytest
from kit.refusals import refuses

import jaxlit as jl
from jaxlit.errors import ArgumentError
from jaxlit.pipeline.schedules import SCHEDULES, flat

S = jl.strategies


def names(schedule: jl.strategies.Schedule, count: int, rank: int) -> list[str]:
    return [str(task) for task in schedule.tasks(count)[rank]]


def passes(kind: str, stage: int, count: int = 4) -> list[str]:
    return [f"{kind}_{stage}__{mb}" for mb in range(count)]


def fused(stage: int) -> list[str]:
    return [f"FusedTask(fwd_{stage}__{mb}, bwd_{stage}__{mb})" for mb in range(4)]


def test_ranks_run_the_tasks_that_jaxpp_prints() -> None:
    four, eight = S.Interleaved1F1B(4, 4), S.Interleaved1F1B(num_stages=8, mpmd_dim=4)
    third = "fwd_2__0 fwd_2__1 fwd_2__2 bwd_2__0 fwd_2__3 bwd_2__1 bwd_2__2 bwd_2__3"
    assert names(four, 4, 2) == third.split() and names(four, 4, 3) == fused(3)
    assert names(eight, 4, 0) == [*passes("fwd", 0), *passes("fwd", 4), *passes("bwd", 4), *passes("bwd", 0)]
    assert names(eight, 4, 3) == [*passes("fwd", 3), *fused(7), *passes("bwd", 3)]


def test_gpipe_and_1f1b_warm_up_by_their_definitions() -> None:
    assert names(S.GPipe(2), 2, 1) == ["fwd_1__0", "fwd_1__1", "bwd_1__0", "bwd_1__1"]
    second = ["fwd_1__0", "fwd_1__1", "bwd_1__0", "fwd_1__2", "bwd_1__1", "fwd_1__3", "bwd_1__2", "bwd_1__3"]
    assert names(S.Std1F1B(3), 4, 1) == second
    assert names(S.Eager1F1B(3), 4, 1) == names(S.Interleaved1F1B(3, 3), 4, 1) != second


def test_zero_bubble_cuts_each_backward_in_two() -> None:
    first = "fwd_0__0 fwd_0__1 bwdA_0__0 bwdW_0__0 bwdA_0__1 bwdW_0__1"
    assert names(S.ZeroBubbleH1(2), 2, 0) == first.split()
    # The last stage runs forward between its first backward's two parts.
    last = "fwd_1__0 bwdA_1__0 fwd_1__1 bwdA_1__1 bwdW_1__0 bwdW_1__1"
    assert names(S.ZeroBubbleH1(2), 2, 1) == last.split()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: S.GPipe(0), r"GPipe\(num_stages=\.\.\.\) takes an int of at least 1, got 0"),
        (lambda: S.Interleaved1F1B(6, 4), "6 stages do not divide among 4 ranks"),
        (lambda: S.Interleaved1F1B(8, 4).tasks(9), "9 microbatches do not divide into 2 rounds over 4 ranks"),
        (lambda: S.Std1F1B(4).tasks(0), r"Std1F1B\(4\)\.tasks\(num_microbatches=\.\.\.\) takes an int of at least 1"),
        (lambda: S.ZBV(4, 4), "has 1 stages a rank, and needs two. Give 8 stages"),
    ],
)
def test_what_makes_no_schedule_is_refused(make, words) -> None:
    refuses(ArgumentError, make, words)


Task, Kind, simulate = jl.pipeline.Task, jl.pipeline.Kind, jl.pipeline.simulate
SIZES = [(ranks, count) for ranks in (1, 2, 3, 4, 8) for count in (1, 2, 3, 4, 8, 16)]


@pytest.mark.parametrize(("ranks", "count"), SIZES)
def test_bubble_and_live_microbatches_are_those_of_the_formulas(ranks: int, count: int) -> None:
    waits = (ranks - 1) / (count + ranks - 1)
    for schedule in (S.GPipe(ranks), S.Std1F1B(ranks), S.Eager1F1B(ranks)):
        assert simulate(schedule, count).bubble == pytest.approx(waits)
    after = [ranks - 1 - rank for rank in range(ranks)]
    assert simulate(S.GPipe(ranks), count).peak_live == (count,) * ranks
    assert simulate(S.Std1F1B(ranks), count).peak_live == tuple(min(count, n + 1) for n in after)
    assert simulate(S.Eager1F1B(ranks), count).peak_live == tuple(min(count, 2 * n + 1) for n in after)
    if count % ranks == 0:
        for chunks in (2, 3):
            result = simulate(S.Interleaved1F1B(chunks * ranks, ranks), count)
            assert result.bubble == pytest.approx((ranks - 1) / (chunks * count + ranks - 1))
    if count >= ranks:  # a third of 1F1B's bubble: what is left are the forwards of the first microbatch
        assert simulate(S.ZeroBubbleH1(ranks), count).makespan == 3 * count + ranks - 1
        # What the second half of a backward needs is held until then.
        assert simulate(S.ZeroBubbleH1(ranks), count).peak_live == (ranks,) * ranks
    assert max(simulate(S.ZBV(2 * ranks, ranks), count).peak_live) <= 2 * ranks


def by_clock(schedule: S.Schedule, count: int) -> tuple[float, dict[Any, float]]:
    """Return when all is done and when each task begins, by a clock whose ticks are a unit of the shortest task."""
    left = [[*flat(tasks)] for tasks in schedule.tasks(count)]
    size = {Kind.FWD: 1, Kind.BWD: 2, Kind.BWD_INPUT: 1, Kind.BWD_WEIGHT: 1}
    every, begun, over, free = {t for tasks in left for t in tasks}, {}, {}, [0] * len(left)

    def ready(task: Any, clock: int) -> bool:
        ahead = [Task(task.stage, task.mb, Kind.FWD)]
        if task.kind is Kind.FWD:
            ahead = [Task(task.stage - 1, task.mb, Kind.FWD)]
        elif task.kind is Kind.BWD_WEIGHT:
            ahead.append(Task(task.stage, task.mb, Kind.BWD_INPUT))
        else:
            ahead += [Task(task.stage + 1, task.mb, kind) for kind in (Kind.BWD, Kind.BWD_INPUT)]
        return all(over.get(t, clock + 1) <= clock for t in ahead if t in every)

    clock = 0
    while any(left):
        for rank, tasks in enumerate(left):
            if tasks and free[rank] <= clock and ready(tasks[0], clock):
                task = tasks.pop(0)
                begun[task], over[task] = clock, clock + size[task.kind]
                free[rank] = over[task]
        clock += 1
    return max(free), begun


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 1), (3, 6), (4, 8), (5, 5)])
def test_tasks_begin_by_a_clock_and_in_order(name, ranks, count) -> None:
    schedule = SCHEDULES[name](ranks)
    result, (makespan, begun) = simulate(schedule, count), by_clock(schedule, count)
    share = ranks / schedule.num_stages
    assert result.makespan == makespan * share
    assert result.start == {task: tick * share for task, tick in begun.items()}
    assert result.bubble == pytest.approx(1 - 3 * count / result.makespan)
    assert result.busy == (3.0 * count,) * ranks
    order = [*flat([*result.order])]
    assert len(order) == len(begun)
    place = {task: i for i, task in enumerate(order)}
    for task in order:
        before = Task(task.stage - 1, task.mb, Kind.FWD)
        assert task.kind is not Kind.FWD or not task.stage or place[before] < place[task]
        assert task.kind is Kind.FWD or place[Task(task.stage, task.mb, Kind.FWD)] < place[task]


def test_sending_costs_time_between_ranks_alone() -> None:
    assert simulate(S.GPipe(1), 4, comm=5.0) == simulate(S.GPipe(1), 4)
    # Two hops forward and two back, of which none is hidden.
    assert simulate(S.GPipe(3), 4, comm=0.5).makespan == simulate(S.GPipe(3), 4).makespan + 4 * 0.5
    assert simulate(S.GPipe(2), 2, latency={Kind.FWD: 2.0, Kind.BWD: 2.0}).makespan == 3 * 4.0


class Given(S.Schedule):
    def __init__(self, *rows: str) -> None:
        super().__init__(2)
        self.rows = rows

    def tasks(self, num_microbatches: int) -> list[list[Any]]:
        kinds = {"F": Kind.FWD, "B": Kind.BWD, "I": Kind.BWD_INPUT, "W": Kind.BWD_WEIGHT}
        return [[Task(int(s), int(mb), kinds[k]) for s, k, mb in row.split()] for row in self.rows]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("0F0 0B0",), r"Given\(2\) with 1 microbatches gives tasks for 1 ranks, and has 2"),
        (("0F0 0B0", "1B0"), r"needs fwd_1__0, and bwd_1__0"),
        (("0F0 0B0", "1F0"), r"needs fwd_1__0, and bwd_1__0 or both bwdA_1__0 and bwdW_1__0"),
        (("0F0 0B0", "1F0 1I0"), r"needs fwd_1__0, and bwd_1__0 or both"),
        (("0F0 0B0", "1F0 1B0 1I0 1W0"), r"needs fwd_1__0, and bwd_1__0 or both"),
        (("0F0 0B0", "1F0 1F0 1B0"), "fwd_1__0 occurs twice"),
        (("0F0 0B0 1B0", "1F0"), "bwd_1__0 is on rank 0, which has no such stage"),
        (("0F0 0B0", "1F0 1B0 1F1"), "fwd_1__1 is on rank 1, which has no such stage and microbatch"),
        (("0B0 0F0", "1F0 1B0"), "rank 0 with bwd_0__0 for fwd_0__0, rank 1 with fwd_1__0 for fwd_0__0"),
    ],
)
def test_an_incomplete_or_deadlocked_schedule_is_refused(rows, words) -> None:
    refuses(ArgumentError, lambda: simulate(Given(*rows), 1), words)


DRAWN = """\
rank 0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
rank 1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .
"""


def test_each_rank_has_a_line_and_each_unit_of_time_a_column() -> None:
    assert jl.pipeline.chart(jl.strategies.Std1F1B(2), 3) + "\n" == DRAWN
    lines = jl.pipeline.chart(jl.strategies.ZBV(4, 2), 1).splitlines()
    assert lines[0].split()[2:] == ["0F0", ".", ".", "3F0", "3I0", "3W0", ".", "0I0", "0W0"]
    assert lines[1].split()[2:5] == [".", "1F0", "2F0"]
