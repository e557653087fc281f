"""A case trained both ways, and compared."""

from dataclasses import replace

from sweeps.mixed import hand_loop, trainer_run
from sweeps.mixed.case import Case
from sweeps.mixed.record import assert_same

TOLERANCE = {"32-true": 1e-5, "bf16-mixed": 2e-2}


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
        by_hand = trainer_run.train(replace(case, strategy="shard_map" if case.strategy == "simulate" else "simulate"))
    assert_same(by_hand, record, TOLERANCE[case.precision])
