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
    found = {}
    for key, callback in keyed(callbacks, failed).items():
        own = [name for name in _METHODS if overrides(callback, name)]
        if len(own) == 1:
            name, (missing,) = type(callback).__name__, {*_METHODS} - {*own}
            raise ModuleError(
                f"{name} defines {own[0]} and no {missing}: a callback's arrays are made by the one and changed by the "
                f"other. Define {missing} too."
            )
        if not own and overrides(callback, "eval_params"):
            raise ModuleError(
                f"{type(callback).__name__} defines eval_params, and neither init_arrays nor update_arrays, whose "
                "arrays it would choose from. Define both too."
            )
        for name in own:
            fitting(callback, name)  # refused now: inside the traced step the error would be jax's
        if own:
            found[key] = callback
    return found
