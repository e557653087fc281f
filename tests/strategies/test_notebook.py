"""A transformer language model trains to the losses that a plain data-parallel JAX notebook printed."""

import pytest
from kit.notebook import PRINTED, losses


@pytest.mark.sweep
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1", "shard_map", "pmap"])
def test_the_losses_equal_those_of_the_notebook(strategy: str) -> None:
    assert losses(strategy, 50) == pytest.approx(PRINTED, abs=2e-4)
