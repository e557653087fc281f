"""Checks for users: simulated devices, equal training under every strategy, injected faults; a model to try."""

from jaxlit.faces import lazy_imports

with lazy_imports(globals()):
    from jaxlit.testing.devices import fake_devices
    from jaxlit.testing.fault_injection import Crash, faults
    from jaxlit.testing.line import Line, line_data
    from jaxlit.testing.same_training import FACTORS, assert_same_training
    from jaxlit.testing.training import KeepFirstGrads, Training, keep_first_grads, train

__all__ = [
    "FACTORS",
    "Crash",
    "KeepFirstGrads",
    "Line",
    "Training",
    "assert_same_training",
    "fake_devices",
    "faults",
    "keep_first_grads",
    "line_data",
    "train",
]
