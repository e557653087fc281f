"""What becomes of an error in a hook: it says where it was raised, and a logger that raises stands aside."""

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
    """The errors in the hooks of a run, and the loggers that stand aside since.

    Args:
        position: Where training stands.
        silence: Leaves out the hooks of a logger from now on.
    """

    def __init__(self, position: Position, silence: Callable[[Callback], None]) -> None:
        self._position, self._silence = position, silence
        self._aside: list[Callback] = []

    def may_run(self, callback: Callback, hook: str) -> bool:
        """Return whether a hook is called: of a disabled logger only the one that closes what it has opened."""
        return hook == "teardown" or all(callback is not logger for logger in self._aside)

    def goes_on(
        self, error: BaseException, owner: Any, hook: str, args: tuple[Any, ...] = (), *, note: bool = True
    ) -> bool:
        """Return whether the run continues without the logger that has raised; it is told of once.

        Args:
            error: What was raised; where the run does not continue it is noted with its place.
            owner: Whose hook it was.
            hook: The hook.
            args: What it was given.
            note: Whether it is noted; not if it will be a note itself.
        """
        position, name = self._position, f"{type(owner).__name__}.{hook}"
        batch = args[1 + hook.endswith("_end")] if "_batch_" in hook else position.batch_idx
        at = f"in epoch {position.epoch}, batch {batch} (global_step {position.global_step})"
        if not (isinstance(owner, Callback) and isinstance(error, Exception) and _forgives(owner, hook, error)):
            if note:
                note_place(error, f"{name} {at}")
            return False
        if all(owner is not logger for logger in self._aside):
            self._aside.append(owner)
            self._silence(owner)
            _logger.warning(
                "%s failed %s: %r. The logger stands aside for the rest of this run, and training continues; with "
                "on_error='raise' it ends training.",
                name,
                at,
                error,
            )
        return True

    def ask(self, owner: Any, hook: str, function: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return what a function of somebody's returns, or `otherwise` if it is a logger's and raises.

        Args:
            owner: Whose it is.
            hook: Its name.
            function: What is called.
            otherwise: What is returned in place of its result.
        """
        try:
            return function()
        except Exception as error:
            if not self.goes_on(error, owner, hook):
                raise
            return otherwise


def _forgives(logger: Callback, hook: str, error: Exception) -> bool:
    if not logger.may_fail or isinstance(error, NonFiniteError):  # which it met, saving a checkpoint say
        return False
    return not (isinstance(error, JaxlitError) and hook in _BEFORE_TRAINING)
