"""A sample of tests/sweeps/notebook.py: a transformer trains to the losses that a plain JAX notebook printed."""

import pytest
from kit.notebook import PRINTED, losses


@pytest.mark.sweep
def test_the_losses_equal_those_of_the_notebook() -> None:
    result = losses("ddp", 11)
    assert [*result] == [0, 10]
    assert result == pytest.approx({step: PRINTED[step] for step in result}, abs=2e-4)
