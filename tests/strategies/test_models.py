"""A sample of tests/sweeps/hand_loops.py: models train as in a loop that is written by hand."""

import dataclasses
from functools import cache
from typing import Any

import numpy as np
import optax
import pytest
from kit.trainers import thinned
from sweeps.hand_loops import Checked, Wrong, check_draws, compare
from sweeps.models import CASES
from sweeps.models.by_hand import by_hand
from sweeps.models.case import Case

BY_NAME = {case.name: case for case in CASES}
EQUAL = [
    ("target set by lax.cond", "single", 1),
    ("target set by lax.cond", "shard_map", 2),
    ("target held in bfloat16", "zero1", 8),
    ("frozen layers that change places", "ddp", 2),
    ("trained decoder set to the encoder", "fsdp", 8),
    ("trained variable scaled after use", "pmap", 8),
    ("scan carry of trained and frozen", "simulate", 2),
    ("sum loss, added up", "shard_map", 8),
    ("contrast within a batch", "pmap", 2),
    ("int count of steps", "shard_map", 8),
    ("metric of weight 0", "ddp", 2),
    ("metric of weight 0", "shard_map", 8),
    ("SpectralNorm with validation", "single", 1),
    ("SpectralNorm with validation", "shard_map", 2),
    ("WeightNorm", "fsdp", 2),
    ("backbone in evaluation mode with validation", "single", 1),
    ("backbone in evaluation mode with validation", "simulate", 8),
    ("BatchNorm masked, replicas without a valid row", "ddp", 8),
    ("own key split in each step", "shard_map", 8),
    ("dropout", "pmap", 8),
    ("recurrent, GRU", "shard_map", 2),
    ("graph network by segment_sum", "shard_map", 8),
]
EQUAL_OR_REFUSED = [
    ("float count of tokens", "shard_map", 8),
    ("int count of rows", "simulate", 8),
    ("Welford held", "shard_map", 2),
    ("BatchNorm masked, replicas without a valid row", "shard_map", 8),
]


@cache
def checked(name: str) -> Checked:
    return Checked(BY_NAME[name])


@pytest.mark.parametrize(("name", "strategy", "devices"), thinned(EQUAL, EQUAL[1], full=[*EQUAL[10::9], *EQUAL[::4]]))
def test_a_model_trains_as_in_a_hand_written_loop(name: str, strategy: str, devices: int) -> None:
    outcome = checked(name).outcome(strategy, devices)
    assert outcome.startswith("equal"), outcome


@pytest.mark.parametrize(("name", "strategy", "devices"), thinned(EQUAL_OR_REFUSED, EQUAL_OR_REFUSED[1]))
def test_what_replicas_cannot_count_truly_is_refused_before_the_first_step(
    name: str, strategy: str, devices: int
) -> None:
    outcome = checked(name).outcome(strategy, devices)
    assert not outcome.startswith("FAILED"), outcome


def test_a_sum_over_rows_is_refused_by_replicas_that_would_average_it() -> None:
    outcome = checked("sum loss").outcome("shard_map", 2)
    assert outcome.startswith("refused"), outcome


def test_the_sweep_tells_of_a_loop_that_trains_otherwise() -> None:
    def slower(case: Case, batches: Any, replicas: int | None) -> Any:
        made = case.make()
        type(made).tx = lambda self: optax.sgd(0.0999)
        try:
            return by_hand(case, batches)
        finally:
            del type(made).tx

    case = dataclasses.replace(BY_NAME["int count of steps"], by_hand=slower)
    assert Checked(case).outcome("single", 1).startswith("FAILED losses loss")


def test_the_sweep_tells_of_replicas_that_draw_the_same() -> None:
    drawn = np.arange(8.0).reshape(4, 2)
    check_draws([drawn, drawn[:3]], replicas=2)
    with pytest.raises(Wrong, match="step 1"):
        check_draws([drawn, np.tile(drawn[:2], (2, 1))], replicas=2)


def test_the_sweep_compares_ints_exactly_and_floats_by_the_largest() -> None:
    assert compare("state", {"a": np.array([4.0, 0.5])}, {"a": np.array([4.0, 0.5 + 2e-6])}, 1e-6) == pytest.approx(
        5e-7
    )
    for other in (np.array([3, 2]), np.array([3.0, 1.0]), np.array([3])):
        with pytest.raises(Wrong, match="state a"):
            compare("state", {"a": np.array([3, 1])}, {"a": other}, 1e-6)


def test_names_of_cases_are_unique() -> None:
    assert len(BY_NAME) == len(CASES)
