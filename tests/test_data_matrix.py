"""A sample of tests/sweeps/data_matrix.py: data of awkward sizes equals numpy's under every strategy."""

import pytest
from sweeps.data_matrix import largest_error


@pytest.mark.parametrize(("rows", "batch_size"), [(1, 8), (7, 8), (63, 64), (65, 64), (1797, 64)])
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("single", 1), ("ddp", 3), ("fsdp", 8), ("zero1", 3), ("shard_map", 3), ("pmap", 8), ("simulate", 3)],
)
def test_training_metrics_and_predictions_equal_numpys(strategy: str, devices: int, rows: int, batch_size: int) -> None:
    assert largest_error(strategy, devices, rows, batch_size) <= 1e-6
