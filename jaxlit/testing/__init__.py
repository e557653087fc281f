"""Checks for users: simulated devices, equal training under every strategy, and a model to try."""

from jaxlit.faces import lazy_imports

with lazy_imports(globals()):
    from jaxlit.testing.line import Line, fake_devices, line_data
    from jaxlit.testing.same_training import assert_same_training

__all__ = ["Line", "assert_same_training", "fake_devices", "line_data"]
