"""Lower a hyperparameter of the optimizer when a metric no longer improves."""

import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.monitor import Monitor
from jaxlit.errors import ArgumentError, did_you_mean

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")


class ReduceLROnPlateau(Callback):
    """Multiply the learning rate by a factor when a metric has not improved for some checks.

    Arguments are those of Keras. The optimizer must keep its learning rate in its state:
    `optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)`.

    Args:
        monitor: The metric's name in `trainer.callback_metrics`.
        mode: "min" if lower is better, else "max".
        factor: What the learning rate is multiplied by.
        patience: Checks without improvement after which it is lowered.
        min_delta: The least change that counts as an improvement.
        cooldown: Checks after a reduction that do not count.
        min_lr: What it is never lowered below.
        hyperparam: The hyperparameter to lower, one of `trainer.hyperparams`; of several labels, all.
        check_on_train_epoch_end: Check at the end of each epoch, or else after each validation. None: at the end of
            each epoch if each validates at its end.

    Attributes:
        wait_count: Checks since the last improvement or reduction.
        cooldown_count: Checks that still do not count.
        best_score: The best value so far.
        num_reductions: How often it was lowered.

    Raises:
        ArgumentError: An argument is out of its set, or at the start of a fit the optimizer has no such
            hyperparameter.

    Example:
        >>> import jaxlit as jl
        >>> plateau = jl.callbacks.ReduceLROnPlateau("val/loss", factor=0.5, patience=2)
    """

    runs_last = True

    def __init__(
        self,
        monitor: str,
        *,
        mode: str = "min",
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
        hyperparam: str = "learning_rate",
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        self._monitor = Monitor("ReduceLROnPlateau", monitor, mode, check_on_train_epoch_end)
        for name, value, low in (("patience", patience, 1), ("cooldown", cooldown, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                raise ArgumentError(f"ReduceLROnPlateau({name}=...) takes an int of at least {low}, got {value!r}.")
        for name, value in (("factor", factor), ("min_delta", min_delta), ("min_lr", min_lr)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ArgumentError(f"ReduceLROnPlateau({name}=...) takes a number of at least 0, got {value!r}.")
        if not 0 < factor < 1:
            raise ArgumentError(f"ReduceLROnPlateau(factor=...) takes a number between 0 and 1, got {factor!r}.")
        self.monitor, self.mode, self.factor, self.patience = monitor, mode, factor, patience
        self.min_delta, self.cooldown, self.min_lr, self.hyperparam = min_delta, cooldown, min_lr, hyperparam
        self._reset()

    def _reset(self) -> None:
        self.wait_count = self.cooldown_count = self.num_reductions = 0
        self.best_score = self._monitor.worst

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Find out when to check; each fit counts from zero."""
        self._monitor.begin(trainer, stage)
        if stage == "fit":
            self._reset()

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Refuse an optimizer that has no such hyperparameter."""
        if not self._names(trainer):
            known = list(trainer.hyperparams)
            raise ArgumentError(
                f"ReduceLROnPlateau(hyperparam={self.hyperparam!r}): the optimizer keeps no such hyperparameter."
                f"{did_you_mean(self.hyperparam, known)} It keeps: {', '.join(known) or 'none'}. Build it in "
                f"configure_optimizers as optax.inject_hyperparams(optax.adam)(learning_rate=1e-3)."
            )

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
        cooling, self.cooldown_count = self.cooldown_count > 0, max(self.cooldown_count - 1, 0)
        if self._monitor.is_better(value, self.best_score, self.min_delta):
            self.best_score, self.wait_count = value, 0
            return
        self.wait_count = 0 if cooling else self.wait_count + 1
        if self.wait_count >= self.patience:
            self.wait_count, self.cooldown_count = 0, self.cooldown
            self._reduce(trainer)

    def _names(self, trainer: "Trainer") -> list[str]:
        """Return the hyperparameter's names, several if several transforms have one."""
        return [x for x in trainer.hyperparams if x == self.hyperparam or x.startswith(f"{self.hyperparam}/")]

    def _reduce(self, trainer: "Trainer") -> None:
        lowered = False
        for name in self._names(trainer):
            old = trainer.hyperparams[name]
            new = max(old * self.factor, self.min_lr)
            if np.float32(new) >= np.float32(old):  # as it is kept: min_lr comes back rounded
                continue
            trainer.hyperparams[name] = new
            lowered = True
            _logger.info(
                "%s lowered from %.4g to %.4g: %s did not improve on %.4g.",
                name,
                old,
                new,
                self.monitor,
                self.best_score,
            )
        self.num_reductions += lowered

    @property
    def state_key(self) -> str:
        """The class, with what it monitors: values of another metric mean nothing to it."""
        return f"{type(self).__name__}[{self.monitor}, {self.mode}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the best value."""
        return {
            "validated": self._monitor.state,
            "wait_count": self.wait_count,
            "cooldown_count": self.cooldown_count,
            "num_reductions": self.num_reductions,
            # An infinity is no JSON value.
            "best_score": self.best_score if math.isfinite(self.best_score) else str(self.best_score),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the counts and the best value."""
        self._monitor.state = state_dict.get("validated", False)
        self.wait_count, self.cooldown_count = state_dict["wait_count"], state_dict["cooldown_count"]
        self.num_reductions, self.best_score = state_dict["num_reductions"], float(state_dict["best_score"])
