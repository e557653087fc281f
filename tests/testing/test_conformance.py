"""The check that a strategy's author runs, on the strategies that there are and pairs of all that it is given."""

from collections.abc import Sequence
from typing import Any

import pytest
from flax import nnx
from kit.batches import sized
from kit.inside import own_strategies
from kit.modules import Wide
from kit.pairwise import pairwise
from kit.trainers import thinned

import jaxlit as jl

FACTORS: dict[str, Sequence[Any]] = {
    "accumulate_grad_batches": (1, 3),
    "gradient_clip_val": (None, 0.1),
    "precision": ("32-true", "bf16-mixed"),
}
# A pipeline wants a model with marks: tests/strategies/test_pipeline.py has some.
OTHERS = [name for name in own_strategies() if name not in ("single", "pipeline")]
CASES = [tuple(case.values()) for case in pairwise({"strategy": OTHERS, "devices": (1, 2, 8), **FACTORS})]


def check(strategy: str, devices: int, *values: Any, **arguments: Any) -> dict[str, float]:
    factors = {name: [value] for name, value in zip(FACTORS, values, strict=True)}
    arguments |= {"strategies": [strategy], "devices": [devices], "steps": 3, "factors": factors}
    return jl.testing.assert_same_training(lambda: Wide(rngs=nnx.Rngs(0)), sized(16, 16, 16), **arguments)


@pytest.mark.parametrize(
    ("strategy", "devices", "accumulate", "clip", "precision"), thinned(CASES, CASES[4], full=CASES[1::7])
)
def test_a_strategy_trains_like_a_single_device(
    strategy: str, devices: int, accumulate: int, clip: float | None, precision: str
) -> None:
    assert len(check(strategy, devices, accumulate, clip, precision)) == 1
