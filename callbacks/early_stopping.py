"""`EarlyStopping`, which stops training when a metric no longer improves."""

import copy
import math
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

from jaxlit import checks as check
from jaxlit.callbacks.monitor import MonitorCallback
from jaxlit.reporting.terminal import say

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


class EarlyStoppingReason(Enum):
    """Why `EarlyStopping` has stopped a training, as in Lightning.

    Example:
        >>> import jaxlit as jl
        >>> stop = jl.callbacks.EarlyStopping("val/loss")
        >>> stop.stopping_reason is jl.callbacks.EarlyStoppingReason.NOT_STOPPED
        True
    """

    NOT_STOPPED = 0
    STOPPING_THRESHOLD = 1
    DIVERGENCE_THRESHOLD = 2
    PATIENCE_EXHAUSTED = 3
    NON_FINITE_METRIC = 4


class EarlyStopping(MonitorCallback):
    """Stop training when a monitored metric has not improved for some checks.

    Arguments and attributes are Lightning's. Checks that `min_epochs` or `min_steps` block only take the best value. A
    resume is stopped again, unless the rule that stopped training holds no longer, for example a larger `patience`.

    Args:
        monitor: The metric's name in `trainer.callback_metrics`.
        min_delta: The least change that counts as an improvement.
        patience: Checks without improvement after which to stop.
        mode: "min" if lower is better, else "max".
        check_finite: Stop when the metric is NaN or infinite.
        stopping_threshold: Stop as soon as the metric is better than this.
        divergence_threshold: Stop as soon as the metric is worse than this.
        check_on_train_epoch_end: Whether to check at the end of each epoch, or after each validation. None, as in
            Lightning: at the end of each epoch if each one ends with a validation.
        strict: A missing metric is an error.
        verbose: Print each improvement of the metric.

    Attributes:
        wait_count: Checks since the last improvement.
        stopped_epoch: The epoch in which it stopped training, 0 if it did not.
        best_score: The best value so far.
        stopping_reason: Why it stopped training, an `EarlyStoppingReason`.
        stopping_reason_message: The same in words, as in `trainer.stop_reason`; None if it did not stop training.

    Example:
        >>> import jaxlit as jl
        >>> stop = jl.callbacks.EarlyStopping("val/loss", patience=5)
    """

    role = "early_stopping"
    in_fast_dev_run = False

    def __init__(
        self,
        monitor: str,
        *,
        min_delta: float = 0.0,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        strict: bool = True,
        verbose: bool = False,
    ) -> None:
        super().__init__(monitor, mode, check_on_train_epoch_end, min_delta=min_delta, strict=strict)
        self.patience = check.integer("patience", patience, low=0, owner="EarlyStopping")
        self.check_finite, self.verbose = check_finite, verbose
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold

    def _reset(self) -> None:
        super()._reset()
        self.stopped_epoch = 0
        self._value = math.nan  # the newest
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None

    def on_load_checkpoint(self, trainer: "Trainer", module: "TrainModule", checkpoint: dict[str, Any]) -> None:
        """Let training continue if the rule that has stopped it holds no longer."""
        if self.stopping_reason_message is None:
            return
        again = copy.copy(self)
        again.wait_count = max(self.wait_count - 1, 0)  # the last value is judged again
        if not again.judge(self._value, blocked=self._is_blocked(trainer))[1]:
            trainer.should_stop &= trainer.stop_reason != self.stopping_reason_message  # another reason stays
        if not trainer.should_stop:
            self.stopped_epoch = 0
            self.stopping_reason, self.stopping_reason_message = EarlyStoppingReason.NOT_STOPPED, None

    def check(self, trainer: "Trainer", value: float) -> None:
        """Take a new value, and stop training if a rule applies."""
        former_best, self._value = self.best_score, value
        reason, message = self.judge(value, blocked=self._is_blocked(trainer))
        if self.verbose and self.best_score != former_best and trainer.is_global_zero:
            change = f" by {abs(value - former_best):.4g}" if math.isfinite(former_best) else ""
            say(f"{self.monitor} improved{change} to {value:.4g}.")
        if message:
            self.stopping_reason, self.stopping_reason_message = reason, message
            self.stopped_epoch = trainer.current_epoch
            trainer.stop(message)

    def _is_blocked(self, trainer: "Trainer") -> bool:
        epochs = trainer.current_epoch + trainer.epoch_is_over
        return epochs < trainer.min_epochs or trainer.global_step < trainer.min_steps

    def judge(self, value: float, *, blocked: bool = False) -> tuple[EarlyStoppingReason, str]:
        """Take a new value, and return why to stop, with a message that is empty if training continues.

        Args:
            value: The metric's value.
            blocked: Whether training continues anyway, and only the best value is taken.
        """
        is_better, name, reasons = self.is_better, self.monitor, EarlyStoppingReason
        if blocked:
            if math.isfinite(value) and is_better(value, self.best_score, self.min_delta):
                self.best_score, self.wait_count = value, 0
            return reasons.NOT_STOPPED, ""
        if self.check_finite and not math.isfinite(value):
            return reasons.NON_FINITE_METRIC, f"{name} = {value} is not finite; the best was {self.best_score:.4g}"
        if self.stopping_threshold is not None and is_better(value, self.stopping_threshold):
            return reasons.STOPPING_THRESHOLD, f"{name} = {value:.4g} reached the threshold {self.stopping_threshold}"
        if self.divergence_threshold is not None and is_better(self.divergence_threshold, value):
            passed = f"{name} = {value:.4g} passed the divergence threshold {self.divergence_threshold}"
            return reasons.DIVERGENCE_THRESHOLD, passed
        if is_better(value, self.best_score, self.min_delta):
            self.best_score, self.wait_count = value, 0
        else:
            self.wait_count += 1
            if self.wait_count >= self.patience:
                checks = f"{name} did not improve in the last {self.wait_count} checks"
                return reasons.PATIENCE_EXHAUSTED, f"{checks}; the best was {self.best_score:.4g}"
        return reasons.NOT_STOPPED, ""

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, the best value and why training was stopped."""
        return super().state_dict() | {
            "stopped_epoch": self.stopped_epoch,
            "value": str(self._value),  # NaN is no JSON value
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts, the best value and why training was stopped."""
        super().load_state_dict(state_dict)
        self.stopped_epoch = state_dict["stopped_epoch"]
        self._value = float(state_dict.get("value", self.best_score))
        self.stopping_reason = EarlyStoppingReason(state_dict["stopping_reason"])
        self.stopping_reason_message = state_dict["stopping_reason_message"]
