"""Which checkpoints stay after any history of scores, failures and crashes, against the rule said about the history."""

import json
import math
from collections.abc import Collection
from typing import Any, NamedTuple

import pytest
from kit.refusals import refuses

from jaxlit.callbacks.model_checkpoint import Kept, Record, check_filename, filled
from jaxlit.errors import ArgumentError

NAN, INF = math.nan, math.inf


class Write(NamedTuple):
    """A checkpoint that is due, and how its writing ends."""

    score: float | None
    fate: str = "written"  # or "failed", "killed" while it is written, or "killed after", before others are deleted
    is_finite: bool = True


MIXED = [3.0, 1.0, NAN, 2.0, 1.0, INF, -INF, 0.5, 4.0, 4.0, 2.0]
EQUAL = [2.0, 2.0, 3.0, 1.0, 2.0, 2.0, 1.0, 1.0, 0.0, 3.0, 1.0, 3.0, 3.0]
FATES = ["written", "failed", "killed", "killed after"]
STORIES = {
    "scores of all kinds": [Write(x) for x in MIXED],
    "equal scores": [Write(x) for x in EQUAL],
    "better and better": [Write(float(x)) for x in range(9, 0, -1)],
    "no score": [Write(x) for x in (None, 2.0, None, None, 1.0, None)],
    "weights that are not finite": [Write(x, is_finite=i % 3 == 0) for i, x in enumerate(MIXED)],
    "never finite": [Write(None, is_finite=False)] * 4,
    "failures": [Write(x, "failed" if i % 3 == 1 else "written") for i, x in enumerate(EQUAL)],
    "crashes": [Write(x, FATES[i * (i + 1) // 2 % 4]) for i, x in enumerate(EQUAL)],
    "all at once": [Write(x, FATES[i * 7 % 4], i % 4 != 1) for i, x in enumerate(MIXED + EQUAL)],
}
SETTINGS = [(mode, k, last) for mode in ("min", "max") for k in (-1, 0, 1, 2, 3, 9) for last in (True, False)]
SETTINGS += [(None, k, True) for k in (-1, 0, 1)] + [(None, 1, False)]


def best_by_rule(history: list[Record], mode: str | None, top_k: int) -> list[Record]:
    """Return the best of all that was written, from the limit that the k-th best score sets.

    All scores better than the limit are among them. So are equal ones that came before there were k as good ones, of
    which those are left that came last.
    """
    scored = [x for x in history if mode and x.is_finite and x.score is not None and math.isfinite(x.score)]
    if top_k == -1 or len(scored) <= top_k:
        return scored
    cost = {x.name: -x.score if mode == "max" else x.score for x in scored if x.score is not None}
    limit = sorted([*cost.values(), INF])[max(top_k - 1, 0)]
    better = [x for x in scored if cost[x.name] < limit]
    as_good = [x for x in scored if cost[x.name] <= limit][:top_k]
    equal = [x for x in as_good if cost[x.name] == limit]
    equal = equal[max(len(equal) - (top_k - len(better)), 0) :]
    return [x for x in scored if top_k and (x in better or x in equal)]


def left_by_rule(history: list[Record], mode: str | None, top_k: int) -> list[str]:
    """Return the names of all that is left on the disk."""
    best = best_by_rule(history, mode, top_k)
    finite = [x for x in history if x.is_finite]
    return [x.name for x in history if top_k == -1 or x in best or x in history[-1:] or x in finite[-1:]]


@pytest.mark.parametrize(("mode", "top_k", "save_last"), [x for x in SETTINGS if x[1] or x[2]])
def test_what_is_left_follows_from_what_was_written(mode: Any, top_k: int, save_last: bool) -> None:
    for story, writes in STORIES.items():
        follow(story, writes, mode, top_k, save_last)


def follow(story: str, writes: list[Write], mode: Any, top_k: int, save_last: bool) -> None:
    """Write a story's checkpoints, and compare what is left after each with the rule."""

    def resumed() -> Kept:
        fresh = Kept(mode, top_k, save_last=save_last)
        if history:
            fresh.restore(disk[history[-1].name], disk)
        return fresh

    disk: dict[str, Any] = {}  # the states in the checkpoints, by name
    history: list[Record] = []
    kept = resumed()
    for step, (score, fate, is_finite) in enumerate(writes, 1):
        new = Record(f"step_{step}", step, score if is_finite and mode else None, is_finite)
        wanted = mode is None or save_last or new in best_by_rule([*history, new], mode, top_k)
        place = f"{story}, after step {step}"
        assert kept.wants(new.score, new.step) == wanted, place
        if wanted or step == len(writes):  # where training ends, one is written
            kept.add(new)
            if fate.startswith("written") or fate == "killed after":
                disk[new.name] = json.loads(json.dumps(kept.state()))
                history.append(new)
            kept = resumed() if fate.startswith("killed") else kept
            if fate == "failed":
                kept.failed()
        for name in kept.written():
            del disk[name]
        best = best_by_rule(history, mode, top_k)
        assert list(disk) == left_by_rule(history, mode, top_k), place
        assert list(kept.scores.items()) == [(x.name, x.score) for x in best], place
        newest = history[-1].name if history else ""
        assert kept.newest == newest, place
        find: Any = max if mode == "max" else min
        assert kept.best == (find(best, key=lambda x: x.score).name if best else "" if mode else newest), place


A, B, C = "step_1", "step_2", "step_3"
REWRITES = {
    "the same weights again keep their score": ([(A, 1.0), (A, None)], {A: 1.0}, [A]),
    "a value that is not finite takes none away": ([(A, 1.0), (A, NAN), (B, NAN)], {A: 1.0}, [A, B]),
    "a second value replaces the first": ([(A, 5.0), (B, 1.0), (B, 2.0)], {B: 2.0}, [B]),
    "a second value that is the worst of all": ([(A, 5.0), (B, 1.0), (B, 9.0)], {B: 9.0}, [B]),
    "an older name has other weights now": ([(A, 1.0), (B, 2.0), (A, None)], {}, [A]),
    "an older name is the newest": ([(A, 1.0), (B, 2.0), (A, 3.0)], {A: 3.0}, [A]),
}


@pytest.mark.parametrize("case", REWRITES)
def test_a_checkpoint_that_is_written_again_replaces_itself(case: str) -> None:
    writes, scores, left = REWRITES[case]
    kept, disk = Kept("min", 1), set[str]()
    for name, score in writes:
        kept.add(Record(name, int(name[-1]), score))
        disk.add(name)
        disk -= {*kept.written()}
    assert kept.scores == scores
    assert sorted(disk) == left


def test_a_failed_rewrite_changes_nothing() -> None:
    kept = Kept("min", 1)
    kept.add(Record(A, 1, 1.0))
    kept.written()
    before = kept.state()
    kept.failed()  # nothing is being written
    assert kept.state() == before
    kept.add(Record(A, 1, 7.0))
    kept.failed()
    assert kept.state() == before
    assert kept.written() == []


def test_weights_that_are_not_finite_take_the_score_away() -> None:
    kept = Kept("min", 1)
    kept.add(Record(A, 1, 1.0))
    kept.add(Record(A, 1, None, is_finite=False))
    assert kept.scores == {}


STATE: Any = {"checkpoints": [[A, 1, 1.0, True], [B, 2, 2.0, True], [C, 3, None, False]], "replaced": ["step_0"]}
RESTORES: dict[str, tuple[Collection[str], str, str, list[str]]] = {
    "all there": ([A, B, C, "step_0"], A, C, ["step_0"]),
    "replaced ones are gone": ([A, B, C], A, C, []),
    "the best is gone": ([B, C], B, C, []),
    "the newest is gone": ([A, B], A, B, []),
    "others are there": ([A, B, C, "step_7", "step_0-v1"], A, C, []),
    "nothing is there": ([], "", "", []),
}


@pytest.mark.parametrize("case", RESTORES)
def test_a_restore_takes_what_the_folder_has(case: str) -> None:
    existing, best, newest, deleted = RESTORES[case]
    kept = Kept("min", 2)
    kept.restore(STATE, existing)
    assert kept.best == best
    assert kept.newest == newest
    assert kept.written() == deleted
    kept.add(Record("step_9", 9, 0.0))
    assert {*kept.written()} <= {A, B, C}  # never one that it does not know


@pytest.mark.parametrize("row", [7, [A], [A, 1, "x", True], [A, "x", 1.0, True], [[A], 1, 1.0, True], None])
def test_a_state_of_another_kind_is_an_error(row: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        Kept("min").restore(STATE | {"checkpoints": [row]}, {A})


def test_fewer_of_the_best_let_one_go_for_each_new_one() -> None:
    kept = Kept("min", 1)
    kept.restore(STATE | {"checkpoints": [[A, 1, 1.0, True], [B, 2, 2.0, True]]}, [A, B])
    kept.add(Record(C, 3, 1.5))
    assert kept.scores == {A: 1.0, B: 2.0}
    kept.add(Record("step_4", 4, 0.5))
    assert kept.written() == [B, C]
    assert kept.scores == {A: 1.0, "step_4": 0.5}


def test_what_a_checkpoint_that_was_never_written_replaces_stays() -> None:
    """Another callback's checkpoint has the state, and the newest of this one was lost: what it replaced is all."""
    kept = Kept()
    kept.add(Record(A, 1, None))
    kept.written()
    kept.add(Record(B, 2, None))
    again = Kept()
    again.restore(json.loads(json.dumps(kept.state())), {A})
    assert again.written() == []
    again.restore(json.loads(json.dumps(kept.state())), {A, B})
    assert again.written() == [A]


def test_orders_grow_also_after_a_failure() -> None:
    kept = Kept()
    kept.order = 4  # of what the folder has
    kept.add(Record(A, 1, None))
    kept.failed()
    kept.add(Record(A, 1, None))
    assert kept.order == 6


@pytest.mark.parametrize(
    ("existing", "name"), [([], C), ([C], f"{C}-v1"), ([C, f"{C}-v1"], f"{C}-v2"), ([A, B], C), ([f"{C}-v1"], C)]
)
def test_a_name_that_exists_gets_a_version(existing: list[str], name: str) -> None:
    assert Kept().unused(C, existing) == name


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("{epoch}-{val/loss:.3f}", "epoch=3-val_loss=0.123"),
        ("{step:04d}", "step=0040"),
        ("best of/{epoch:02d} é", "best_of_epoch=03_é"),
        ("../../up", ".._.._up"),
        ("{val/loss:.1e}+{val/loss}", "val_loss=1.2e-01+val_loss=0.12345"),
        ("{bad:.2f},{epoch}", "bad=nan,epoch=3"),
    ],
)
def test_a_filename_is_filled_and_fit_for_a_folders_name(filename, name):
    check_filename(filename)
    assert filled(filename, {"epoch": 3, "step": 40}, {"val/loss": 0.12345, "bad": math.nan}.get) == name


def test_a_filename_that_is_no_format_is_refused():
    cases = {"{epoch:.3q}": "is no format: .*code 'q' .*'int'", "{epoch:.2f}{step:x}{val:d}": "code 'd' .*'float'"}
    cases |= {"{epoch:d": "'}'|unmatched", "{}": "a pair of braces is empty", "a}": "Single '}'"}
    for filename, words in cases.items():
        refuses(ArgumentError, lambda filename=filename: check_filename(filename), words)


@pytest.mark.parametrize(("mode", "top_k"), [(None, 1), ("min", 1), ("max", 5)])
def test_one_of_so_many_steps_stays_for_ever(mode: Any, top_k: int) -> None:
    steps = [3, 8, 11, 14, 19, 22, 31, 33, 39, 55, 58, 61]
    forever = [11, 22, 31, 55, 61]  # the first from each 10 steps on, and none of the first 10
    kept = Kept(mode, top_k, keep_every=10)
    for i, step in enumerate(steps, 1):
        kept.add(Record(f"step_{step}", step, float(step) if mode else None))
        kept.written()
        fresh = Kept(mode, top_k, keep_every=10)
        fresh.restore(json.loads(json.dumps(kept.state())), [x.name for x in kept.records])
        kept = fresh
        best = [3] if mode == "min" else sorted(steps[:i])[-5:] if mode == "max" else []
        expected = {*best, step, *(x for x in forever if x <= step)}
        assert [x.step for x in kept.records] == sorted(expected)


def test_a_state_from_before_there_were_such_is_restored() -> None:
    kept = Kept("min", 2)
    kept.restore({"checkpoints": [["a", 1, 2.0, True], ["b", 2, None, False]], "replaced": []}, ["a", "b"])
    assert kept.records == [Record("a", 1, 2.0), Record("b", 2, None, is_finite=False)]
