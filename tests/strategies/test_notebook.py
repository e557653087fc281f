"""A sample of tests/sweeps/notebook.py: a transformer trains to the losses that a plain JAX notebook printed."""

import pytest
from kit.notebook import PRINTED, losses


@pytest.mark.sweep
def test_the_losses_equal_those_of_the_notebook() -> None:
    found = losses("ddp", 11)
    assert [*found] == [0, 10]
    assert found == pytest.approx({step: PRINTED[step] for step in found}, abs=2e-4)
