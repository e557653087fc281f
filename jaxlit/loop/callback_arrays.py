"""Which callbacks keep arrays in the training state."""

from collections.abc import Sequence

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ModuleError
from jaxlit.loop.failures import Failures
from jaxlit.loop.hooks import fitting, overrides
from jaxlit.loop.snapshot import keyed

_METHODS = ("init_arrays", "update_arrays")


def array_keepers(callbacks: Sequence[Callback], failed: Failures) -> dict[str, Callback]:
    """Return the callbacks that keep arrays, by the keys of their states.

    Raises:
        ModuleError: One has only one of the two methods, or a method takes other arguments.
    """
    keepers = {}
    for key, callback in keyed(callbacks, failed).items():
        defined = [name for name in _METHODS if overrides(callback, name)]
        if len(defined) == 1:
            name, (missing,) = type(callback).__name__, {*_METHODS} - {*defined}
            raise ModuleError(
                f"{name} defines {defined[0]} and no {missing}: a callback's arrays are made by one and changed by the "
                f"other. Define {missing} too."
            )
        for name in defined:
            fitting(callback, name)  # refused now: inside the traced step the error would be jax's
        if defined:
            keepers[key] = callback
    return keepers
