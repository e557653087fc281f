"""A metric that a callback watches: when it is looked at, and what is better."""

import logging
import math
from typing import TYPE_CHECKING, Any

from jaxlit.errors import ArgumentError, LoggerError, did_you_mean

if TYPE_CHECKING:
    from jaxlit.trainer import Trainer


_logger = logging.getLogger("jaxlit")


class Monitor:
    """Reads one metric after each validation, or after each epoch.

    Args:
        owner: The callback's class name, for messages.
        name: The metric's name in `trainer.callback_metrics`.
        mode: "min" if lower is better, else "max".
        check_on_train_epoch_end: Look at the end of each epoch; None: where each epoch ends with a validation.
        strict: A missing metric is an error.
    """

    def __init__(
        self, owner: str, name: Any, mode: Any, check_on_train_epoch_end: bool | None = None, strict: bool = True
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"{owner}(monitor=...) takes the name of a logged metric, got {name!r}.")
        if mode not in ("min", "max"):
            raise ArgumentError(f"{owner}(mode=...) takes 'min' or 'max', got {mode!r}.")
        if not isinstance(check_on_train_epoch_end, bool | None):
            raise ArgumentError(
                f"{owner}(check_on_train_epoch_end=...) takes True, False or None, got {check_on_train_epoch_end!r}."
            )
        self.owner, self.name, self.sign, self.strict = owner, name, 1 if mode == "min" else -1, strict
        self._asked, self._at_epoch_end = check_on_train_epoch_end, False
        self._fitting = self._validated = self._looked = False

    @property
    def worst(self) -> float:
        """What every value is better than."""
        return self.sign * math.inf

    def is_better(self, value: float, than: float, min_delta: float = 0.0) -> bool:
        """Return whether a value is better than another, by more than `min_delta`."""
        return self.sign * value < self.sign * than - min_delta

    @property
    def state(self) -> bool:
        """Whether a validation has come whose epoch is not over: what a checkpoint must keep."""
        return self._validated

    @state.setter
    def state(self, validated: bool) -> None:
        self._validated, self._looked = bool(validated), True

    def begin(self, trainer: "Trainer", stage: str) -> None:
        """Begin a run: `trainer.validate` is no check."""
        self._fitting, self._validated, self._looked = stage == "fit", False, False
        interval = trainer.val_check_interval  # an int counts batches
        each_epoch = isinstance(interval, float) and interval == 1.0 and trainer.check_val_every_n_epoch == 1
        self._at_epoch_end = each_epoch if self._asked is None else self._asked

    def after_validation(self, trainer: "Trainer") -> float | None:
        """Return the value that a validation of a fit has made; None if this is not the time."""
        if not self._fitting or trainer.sanity_checking:
            return None
        self._validated = True
        return None if self._at_epoch_end else self._read(trainer)

    def after_epoch(self, trainer: "Trainer") -> float | None:
        """Return the value at the end of an epoch; None if this is not the time."""
        validated, self._validated = self._validated, False
        if not self._at_epoch_end:
            # Without validations the end of an epoch is the only time that there is.
            return None if trainer.num_val_batches else self._read(trainer)
        # An epoch that was cut short has had no validation: its old value must not count twice.
        if self._asked is None and trainer.num_val_batches and not validated:
            return None
        return self._read(trainer)

    def warn_if_unseen(self, trainer: "Trainer") -> None:
        """Tell at the end of training that the metric was never looked at."""
        if not self._looked and not trainer.interrupted:
            _logger.warning(
                "%s(monitor=%r) was never checked: training ended before a validation or epoch that it watches.",
                self.owner,
                self.name,
            )

    def _read(self, trainer: "Trainer") -> float | None:
        self._looked, metrics = True, trainer.callback_metrics
        if self.name in metrics:
            return float(metrics[self.name])
        if not self.strict:
            return None
        raise LoggerError(
            f"{self.owner}(monitor={self.name!r}): no such metric was logged.{did_you_mean(self.name, metrics)} "
            f"Logged: {', '.join(sorted(metrics)) or 'nothing'}."
        )


def is_blocked(trainer: "Trainer") -> bool:
    """Return whether `min_epochs` or `min_steps` keep training going after the epoch that runs."""
    return trainer.current_epoch + 1 < trainer.min_epochs or trainer.global_step < trainer.min_steps
