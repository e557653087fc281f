"""Trainings equal a plain NNX loop, number by number, or are refused before they begin."""

from dataclasses import replace

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from kit.trainers import thinned
from sweeps.mixed import hand_loop, trainer_run
from sweeps.mixed.case import Case, is_sound
from sweeps.mixed.generate import cases
from sweeps.mixed.record import assert_same


def check(case: Case) -> None:
    """Train a case both ways and compare.

    Raises:
        Refused: jaxlit cannot train it, though it does not follow from the case.
    """
    by_hand = hand_loop.train(case)
    try:
        record = trainer_run.train(case)
    except trainer_run.Refused as refusal:
        if case.may_be_refused and "replica" in str(refusal):
            return
        raise
    if case.draws_apart:
        # Replicas draw numbers of their own: the other way of mapping them draws the same, and takes a sum for a mean
        # as this one does.
        a_sum = case.per_replica and case.loss == "sum" and not case.loss_reduction and case.divides
        assert not a_sum, "a sum over rows was not refused"
        assert_same(by_hand.drawn(), record.drawn(), 0.0)
        by_hand = trainer_run.train(replace(case, strategy="shard_map" if case.strategy == "replicas" else "replicas"))
    assert_same(by_hand, record, {"32-true": 1e-5, "bf16-mixed": 2e-2}[case.precision])


# Together they touch each option, each strategy, and each way in which a part holds or writes state.
CASES = (
    Case(("norm",), sizes=(8, 8, 8), accumulate=2, val=((8,), (8,)), val_every=1, strategy="ddp", devices=2),
    Case(parts=("scan_dropout",), optimizer="momentum", schedule="by_epoch", cut=1, strategy="fsdp", devices=8),
    Case(parts=("lora", "ema_mean"), wrt="lora", clip="norm", again="ddp", strategy="shard_map", devices=2),
    Case(parts=("masked_norm", "own_key"), loss="masked_mean", mask="half", sizes=(5,), strategy="zero1", devices=3),
    Case(parts=("tied",), precision="bf16-mixed", clip="value", limit=1, nested=True),
    Case(parts=("dropout",), sizes=(8,), epochs=2, strategy="pmap", devices=2),
    Case(parts=("eval_norm", "copied"), optimizer="adamw"),
    Case(parts=("weight_norm", "soft_target"), wrt="online", strategy="fsdp", devices=2),
    Case(parts=("average",), loss="sum", loss_reduction="sum", sizes=(8,), strategy="replicas", devices=2),
    Case(parts=("gru", "own_hard_target"), sizes=(8,), strategy="shard_map", devices=2),
)


@pytest.mark.parametrize("case", thinned(CASES, CASES[1], full=CASES[::2]), ids=repr)
def test_a_training_equals_the_plain_loop(case: Case) -> None:
    assert is_sound(case)
    check(case)


def test_a_sum_loss_is_refused_under_replicas() -> None:
    with pytest.raises(trainer_run.Refused, match="replica"):
        trainer_run.train(Case(loss="sum", sizes=(8,), strategy="shard_map", devices=2))


def test_a_loop_that_differs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand_loop, "CLIP", 2 * hand_loop.CLIP)
    with pytest.raises(AssertionError, match="parameter"):
        check(Case(clip="norm", sizes=(8,)))


@pytest.mark.parametrize("count", thinned([12, 200], full=[12]))
def test_drawn_trainings_equal_the_plain_loop(count: int) -> None:
    @settings(database=None, deadline=None, derandomize=True, max_examples=count, suppress_health_check=[*HealthCheck])
    @given(cases())
    def each(case: Case) -> None:
        test_a_training_equals_the_plain_loop(case)
        jax.clear_caches()  # one case's programs are of no use to the next

    each()
