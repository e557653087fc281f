"""A sample of tests/sweeps/data_matrix.py: data of awkward sizes equals numpy's under every strategy."""

import pytest
from sweeps.data_matrix import largest_error

SIZES = [(1, 8), (7, 8), (63, 64), (65, 64), (130, 64)]
LAYOUTS = [("single", 1), ("ddp", 3), ("fsdp", 8), ("zero1", 3), ("shard_map", 3), ("pmap", 8), ("simulate", 3)]
EVERY = [(layout, size) for layout in LAYOUTS for size in SIZES]
FEW = [(layout, SIZES[(k + j) % 5]) for k, layout in enumerate(LAYOUTS) for j in (0, 2) if k != 0 or j][:12]


@pytest.mark.parametrize(
    ("layout", "size"), [*FEW, *[pytest.param(*x, marks=pytest.mark.full) for x in EVERY if x not in FEW]]
)
def test_training_metrics_and_predictions_equal_numpys(layout: tuple[str, int], size: tuple[int, int]) -> None:
    assert largest_error(*layout, *size) <= 1e-6
