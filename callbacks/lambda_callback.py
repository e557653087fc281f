"""`LambdaCallback`, whose hooks are plain functions."""

from collections.abc import Callable
from typing import Any

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError, ArgumentTypeError, did_you_mean

_HOOKS = [
    name for name, x in vars(Callback).items() if callable(x) and name[0] != "_" and name not in ("log", "log_dict")
]


class LambdaCallback(Callback):
    """Make a callback of functions, each passed by the name of its hook.

    Args:
        **functions: Functions of the hooks' arguments, `trainer` and `module` first in most, by the hooks' names.

    Raises:
        ArgumentError: No hook has this name.
        ArgumentTypeError: A value is no function.

    Example:
        >>> import jaxlit as jl
        >>> echo = jl.callbacks.LambdaCallback(on_train_epoch_end=lambda trainer, module: print(trainer.current_epoch))
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=echo, logger=False)
    """

    def __init__(self, **functions: Callable[..., Any]) -> None:
        for name, function in functions.items():
            if name not in _HOOKS:
                raise ArgumentError(f"LambdaCallback has no hook {name!r}.{did_you_mean(name, _HOOKS)}")
            if not callable(function):
                raise ArgumentTypeError(f"LambdaCallback({name}=...) takes a function, got {function!r}.")
            setattr(self, name, function)
