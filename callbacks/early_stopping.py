"""Stop when a metric no longer improves."""

import logging
import math
from enum import Enum
from typing import TYPE_CHECKING, Any

from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.monitor import Monitor, is_blocked
from jaxlit.errors import ArgumentError

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


_logger = logging.getLogger("jaxlit")


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


class EarlyStopping(Callback):
    """Stop training when a monitored metric has not improved for some checks.

    Arguments and attributes are Lightning's. While `min_epochs` keeps training going, patience does
    not run.

    Args:
        monitor: The metric's name in `trainer.callback_metrics`.
        min_delta: The least change that counts as an improvement.
        patience: Checks without improvement after which to stop.
        mode: "min" if lower is better, else "max".
        check_finite: Stop when the metric is NaN or infinite.
        stopping_threshold: Stop as soon as the metric is better than this.
        divergence_threshold: Stop as soon as it is worse than this.
        check_on_train_epoch_end: Check at the end of each epoch, or else after each validation. None, as in Lightning:
            at the end of each epoch if each validates at its end.
        strict: A missing metric is an error.
        verbose: Say when the metric has improved, and by how much.

    Attributes:
        wait_count: Checks since the last improvement.
        stopped_epoch: The epoch in which it stopped, 0 if it did not.
        best_score: The best value so far.
        stopping_reason: Why it stopped, an `EarlyStoppingReason`.
        stopping_reason_message: The same in words, None if it did not stop; it is `trainer.stop_reason` then.

    Example:
        >>> import jaxlit as jl
        >>> stop = jl.callbacks.EarlyStopping("val/loss", patience=5)
    """

    role = "early_stopping"
    runs_last = True
    in_fast_dev_run = False

    def __init__(
        self,
        monitor: str,
        *,
        min_delta: float = 0.0,
        patience: int = 3,
        mode: str = "min",
        check_finite: bool = True,
        stopping_threshold: float | None = None,
        divergence_threshold: float | None = None,
        check_on_train_epoch_end: bool | None = None,
        strict: bool = True,
        verbose: bool = False,
    ) -> None:
        for name, value in (("strict", strict), ("check_finite", check_finite), ("verbose", verbose)):
            if not isinstance(value, bool):
                raise ArgumentError(f"EarlyStopping({name}=...) takes True or False, got {value!r}.")
        self._monitor = Monitor("EarlyStopping", monitor, mode, check_on_train_epoch_end, strict)
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 0:
            raise ArgumentError(f"EarlyStopping(patience=...) takes an int of at least 0, got {patience!r}.")
        if not _is_number(min_delta) or not min_delta >= 0:
            raise ArgumentError(f"EarlyStopping(min_delta=...) takes a number of at least 0, got {min_delta!r}.")
        for name, value in (("stopping", stopping_threshold), ("divergence", divergence_threshold)):
            if value is not None and not _is_number(value):
                raise ArgumentError(f"EarlyStopping({name}_threshold=...) takes a number or None, got {value!r}.")
        self.monitor, self.min_delta, self.patience, self.mode = monitor, min_delta, patience, mode
        self.check_finite, self.strict, self.verbose = check_finite, strict, verbose
        self.stopping_threshold, self.divergence_threshold = stopping_threshold, divergence_threshold
        self._reset()

    def _reset(self) -> None:
        self.wait_count, self.stopped_epoch = 0, 0
        self.best_score = self._monitor.worst
        self.stopping_reason = EarlyStoppingReason.NOT_STOPPED
        self.stopping_reason_message: str | None = None

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Find out when to check; each fit counts from zero."""
        self._monitor.begin(trainer, stage)
        if stage == "fit":
            self._reset()

    def on_load_checkpoint(self, trainer: "Trainer", module: "TrainModule", checkpoint: dict[str, Any]) -> None:
        """Stop at once if that training was stopped, unless there is more patience now."""
        if self.stopping_reason_message is not None and self.wait_count >= self.patience:
            trainer.stop(self.stopping_reason_message)

    def on_validation_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Check after a validation of a fit."""
        self._check(trainer, self._monitor.after_validation(trainer))

    def on_train_epoch_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Check after an epoch."""
        self._check(trainer, self._monitor.after_epoch(trainer))

    def on_train_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Tell if there was nothing to check."""
        self._monitor.warn_if_unseen(trainer)

    def _check(self, trainer: "Trainer", value: float | None) -> None:
        if value is None:
            return
        before = self.best_score
        reason, message = self._judge(value, blocked=is_blocked(trainer))
        if self.verbose and self.best_score != before and trainer.is_global_zero:
            by = f" by {abs(value - before):.4g}" if math.isfinite(before) else ""
            _logger.info("%s improved%s to %.4g.", self.monitor, by, value)
        if message:
            self.stopping_reason, self.stopping_reason_message = reason, message
            self.stopped_epoch = trainer.current_epoch
            trainer.stop(message)

    def _judge(self, value: float, blocked: bool) -> tuple[EarlyStoppingReason, str]:
        """Take a new value, and return why to stop; the words are empty if training continues."""
        is_better, name, why = self._monitor.is_better, self.monitor, EarlyStoppingReason
        if self.check_finite and not math.isfinite(value):
            return why.NON_FINITE_METRIC, f"{name} = {value} is not finite; the best was {self.best_score:.4g}"
        if self.stopping_threshold is not None and is_better(value, self.stopping_threshold):
            return why.STOPPING_THRESHOLD, f"{name} = {value:.4g} reached the threshold {self.stopping_threshold}"
        if self.divergence_threshold is not None and is_better(self.divergence_threshold, value):
            passed = f"{name} = {value:.4g} passed the divergence threshold {self.divergence_threshold}"
            return why.DIVERGENCE_THRESHOLD, passed
        if is_better(value, self.best_score, self.min_delta):
            self.best_score, self.wait_count = value, 0
        elif not blocked:
            self.wait_count += 1
            if self.wait_count >= self.patience:
                checks = f"{name} did not improve in the last {self.wait_count} checks"
                return why.PATIENCE_EXHAUSTED, f"{checks}; the best was {self.best_score:.4g}"
        return why.NOT_STOPPED, ""

    @property
    def state_key(self) -> str:
        """The class, with what it monitors: values of another metric mean nothing to it."""
        return f"{type(self).__name__}[{self.monitor}, {self.mode}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the best value."""
        return {
            "validated": self._monitor.state,
            "wait_count": self.wait_count,
            "stopped_epoch": self.stopped_epoch,
            # An infinity is no JSON value.
            "best_score": self.best_score if math.isfinite(self.best_score) else str(self.best_score),
            "stopping_reason": self.stopping_reason.value,
            "stopping_reason_message": self.stopping_reason_message,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the counts and the best value."""
        self._monitor.state = state_dict.get("validated", False)
        self.wait_count, self.stopped_epoch = state_dict["wait_count"], state_dict["stopped_epoch"]
        self.best_score = float(state_dict["best_score"])
        self.stopping_reason = EarlyStoppingReason(state_dict["stopping_reason"])
        self.stopping_reason_message = state_dict["stopping_reason_message"]


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)
