"""The tasks of each rank, by name."""

import pytest
from kit.refusals import refuses

import jaxlit as jl
from jaxlit.errors import ArgumentError
from jaxlit.pipeline.schedules import SCHEDULES

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


def test_along_a_v_the_first_rank_holds_the_last_stage() -> None:
    schedule = S.ZBV(6, 3)
    assert [schedule.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [S.Interleaved1F1B(6, 3).rank_of(stage) for stage in range(6)] == [0, 1, 2, 0, 1, 2]


def test_each_name_is_a_schedule_of_as_many_ranks() -> None:
    result = {name: repr(SCHEDULES[name](4)) for name in SCHEDULES}
    assert result == {
        "gpipe": "GPipe(4)",
        "1f1b": "Std1F1B(4)",
        "eager_1f1b": "Eager1F1B(4)",
        "interleaved_1f1b": "Interleaved1F1B(8, 4)",
        "zb_h1": "ZeroBubbleH1(4)",
        "zbv": "ZBV(8, 4)",
    }


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
