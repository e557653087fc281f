"""A sample of tests/sweeps/notebook.py: a transformer trains to the losses that a plain JAX notebook printed."""

import pytest
from kit.notebook import PRINTED, losses


@pytest.mark.sweep
def test_the_first_steps_give_the_losses_that_the_notebook_printed() -> None:
    found = losses("ddp", 11)
    assert [*found] == [0, 10]
    assert found == pytest.approx({step: PRINTED[step] for step in found}, abs=2e-4)
