"""Models of public packages train as in a plain loop of nnx and optax, without a change to them."""

import logging

import numpy as np
import pytest
from kit.pages import needing
from sweeps.packages import PACKAGES, QUICK, batches_of, by_hand, trained

MODULES = {PACKAGES[name].module.partition(".")[0]: name for name in QUICK}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # packages call what flax has deprecated
@pytest.mark.parametrize("module", needing(*MODULES))
def test_a_model_of_a_package_trains_as_by_hand(module: str, caplog: pytest.LogCaptureFixture) -> None:
    name = MODULES[module]
    package = PACKAGES[name]
    batches = batches_of(package, 5)
    expected = by_hand(package, batches)
    assert trained(package, batches, strategy="single") == expected
    sharded = trained(package, batches, strategy="fsdp", devices=2)
    # Scales of int8 are the largest entries, and what is rounded differs with the order of a sum.
    np.testing.assert_allclose(sharded, expected, rtol=1e-2 if name == "qwix" else 1e-5)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING and record.name == "jaxlit"]
    assert all("by arrays that are in no nnx.Variable" in record.message for record in warnings)
