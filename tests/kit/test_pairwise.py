"""Few cases that show what two choices do together."""

import itertools
import math
from typing import Any

import pytest

from kit.pairwise import pairwise

FACTORS: tuple[dict[str, Any], ...] = (
    {"strategy": "abcdefghi", "devices": (1, 2, 8), "accumulate": (1, 3), "clip": (None, 0.1), "precision": (32, 16)},
    {"a": (1, 2), "b": (3,), "c": (4, 5)},
    {f"factor {i}": range(4) for i in range(5)},
    {f"switch {i}": (False, True) for i in range(10)},
    {"unhashable": ([], {}), "other": (1, 2)},
)


@pytest.mark.parametrize("factors", FACTORS)
def test_each_pair_of_values_is_in_one_of_few_cases(factors: dict[str, Any]) -> None:
    cases = pairwise(factors)
    assert all(list(case) == list(factors) for case in cases)
    for (first, values), (second, others) in itertools.combinations(factors.items(), 2):
        for pair in itertools.product(values, others):
            assert pair in [(case[first], case[second]) for case in cases], (first, second, pair)
    assert cases == pairwise(factors)
    *_, second, longest = sorted(map(len, factors.values()))
    least = second * longest  # no fewer can hold these pairs
    assert least <= len(cases) <= max(least + 3, 3 * math.ceil(math.log2(len(factors))))
