"""Errors in hooks: each is noted with its place, and a callback that may fail is disabled."""

import logging
from collections.abc import Callable
from typing import Any

from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.position import Position
from jaxlit.errors import JaxlitError, NonFiniteError
from jaxlit.notes import note_place

_logger = logging.getLogger("jaxlit")

# What a logger refuses there is a mistake in what it was given, and nothing has been trained yet.
_BEFORE_TRAINING = ("setup", "log_hyperparams", "on_load_checkpoint", "on_fit_start")


class Failures:
    """The errors in the hooks of a run, and the callbacks that they disabled.

    Args:
        position: How far training is, for messages.
        disable: Called with a callback: its hooks are not called from now on.
    """

    def __init__(self, position: Position, disable: Callable[[Callback], None]) -> None:
        self._position, self._disable = position, disable
        self._disabled: list[Callback] = []

    def may_run(self, callback: Callback, hook: str) -> bool:
        """Return whether a hook is called: of a disabled callback only the one that closes what it has opened."""
        return hook == "teardown" or all(callback is not x for x in self._disabled)

    def tolerates(self, error: BaseException, owner: Any, hook: str, args: tuple[Any, ...] = ()) -> bool:
        """Return whether the run continues without the callback that has raised, with one warning.

        Args:
            error: What was raised; if the run ends, its place is noted on it.
            owner: The callback, module or DataModule that raised.
            hook: The hook.
            args: Its arguments.
        """
        position, name = self._position, f"{type(owner).__name__}.{hook}"
        batch = args[1 + hook.endswith("_end")] if "_batch_" in hook else position.batch_idx
        at = f"in epoch {position.epoch}, batch {batch} (global_step {position.global_step})"
        # A NonFiniteError is not the logger's: it may have saved a checkpoint, which checks the steps.
        ends = isinstance(error, NonFiniteError) or (isinstance(error, JaxlitError) and hook in _BEFORE_TRAINING)
        if ends or not (isinstance(owner, Callback) and owner.may_fail and isinstance(error, Exception)):
            note_place(error, f"{name} {at}")
            return False
        if all(owner is not x for x in self._disabled):
            self._disabled.append(owner)
            self._disable(owner)
            _logger.warning(
                "%s failed %s: %r. The logger is disabled for the rest of this run, and training continues; with "
                "on_error='raise' it ends training.",
                name,
                at,
                error,
            )
        return True

    def ask(self, owner: Any, hook: str, function: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return the result of a callback's method, or `otherwise` if it raises and the run continues without it.

        Args:
            owner: The callback, module or DataModule.
            hook: The method's name.
            function: Calls it.
            otherwise: What is returned in place of its result.
        """
        try:
            return function()
        except Exception as error:
            if not self.tolerates(error, owner, hook):
                raise
            return otherwise
