"""`ReduceLROnPlateau`, which lowers a hyperparameter when a metric no longer improves."""

import logging
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxlit import checks as check
from jaxlit.callbacks.base import hyperparams_named
from jaxlit.callbacks.monitor import MonitorCallback

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")


class ReduceLROnPlateau(MonitorCallback):
    """Multiply the learning rate by a factor when a metric has not improved for some checks.

    Arguments are those of Keras. The optimizer must have its learning rate in its state:
    `optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(learning_rate=1e-3)`.

    Args:
        monitor: The metric's name in `trainer.callback_metrics`.
        mode: "min" if lower is better, else "max".
        factor: The factor of a reduction, between 0 and 1.
        patience: Checks without improvement before a reduction.
        min_delta: The least change that counts as an improvement.
        cooldown: Checks after a reduction that do not count.
        min_lr: The lowest value.
        hyperparam: The hyperparameter to lower, one of `trainer.hyperparams`, under all its labels.
        check_on_train_epoch_end: Whether to check at the end of each epoch, or after each validation. None: at the end
            of each epoch if each one ends with a validation.

    Attributes:
        wait_count: Checks since the last improvement or reduction.
        cooldown_count: Checks that still do not count.
        best_score: The best value so far.
        num_reductions: The number of reductions.

    Raises:
        ArgumentError: An argument is out of its set, or at the start of a fit the optimizer has no such
            hyperparameter.

    Example:
        >>> import jaxlit as jl
        >>> plateau = jl.callbacks.ReduceLROnPlateau("val/loss", factor=0.5, patience=2)
    """

    def __init__(
        self,
        monitor: str,
        *,
        mode: Literal["min", "max"] = "min",
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
        hyperparam: str = "learning_rate",
        check_on_train_epoch_end: bool | None = None,
    ) -> None:
        super().__init__(monitor, mode, check_on_train_epoch_end, min_delta=min_delta)
        owner = "ReduceLROnPlateau"
        self.patience = check.integer("patience", patience, low=1, owner=owner)
        self.cooldown = check.integer("cooldown", cooldown, low=0, owner=owner)
        self.min_lr = check.number("min_lr", min_lr, low=0, owner=owner)
        self.factor = check.number("factor", factor, low=0, owner=owner)
        check.require(0 < factor < 1, "factor", factor, "takes a number between 0 and 1", owner=owner)
        self.hyperparam = hyperparam

    def _reset(self) -> None:
        super()._reset()
        self.cooldown_count = self.num_reductions = 0

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Refuse an optimizer that has no such hyperparameter."""
        self._names = hyperparams_named(self.hyperparam, trainer, "ReduceLROnPlateau")

    def check(self, trainer: "Trainer", value: float) -> None:
        """Take a new value, and lower the hyperparameter if patience is exhausted."""
        is_cooling = self.cooldown_count > 0
        self.cooldown_count = max(self.cooldown_count - 1, 0)
        if self.is_better(value, self.best_score, self.min_delta):
            self.best_score, self.wait_count = value, 0
            return
        self.wait_count = 0 if is_cooling else self.wait_count + 1
        if self.wait_count >= self.patience:
            self.wait_count, self.cooldown_count = 0, self.cooldown
            self._reduce(trainer)

    def _reduce(self, trainer: "Trainer") -> None:
        lowered = False
        for name in self._names:
            old = trainer.hyperparams[name]
            new = max(old * self.factor, self.min_lr)
            if np.float32(new) >= np.float32(old):  # in the dtype of the state, to which min_lr is rounded
                continue
            trainer.hyperparams[name] = new
            lowered = True
            words = "%s lowered from %.4g to %.4g: %s did not improve on %.4g."
            _logger.info(words, name, old, new, self.monitor, self.best_score)
        self.num_reductions += lowered

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the best value."""
        return super().state_dict() | {"cooldown_count": self.cooldown_count, "num_reductions": self.num_reductions}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the counts and the best value."""
        super().load_state_dict(state_dict)
        self.cooldown_count, self.num_reductions = state_dict["cooldown_count"], state_dict["num_reductions"]
