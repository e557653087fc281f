"""The best value so far of the metric that is monitored, for people to read."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlit.callbacks.wandb_config import monitored
from jaxlit.checkpoints.files import step_of
from jaxlit.reporting.epoch_line import number

if TYPE_CHECKING:
    from jaxlit.trainer import Trainer


class BestSoFar:
    """Follows the metric of the first ModelCheckpoint, EarlyStopping or the like that monitors one."""

    def __init__(self) -> None:
        self._name, self._sign = "", 1  # "" if nothing is monitored
        self._best, self._step = math.inf, 0  # times the sign; the optimizer steps until then, 0 if unknown

    def recall(self, trainer: "Trainer") -> None:
        """Take the best value that a callback knows: of a resumed training, or of the middle of an epoch."""
        self._name, mode = next(iter(monitored(trainer).items()), ("", "min"))
        self._sign = 1 if mode == "min" else -1
        for callback in (*trainer.checkpoint_callbacks, *trainer.callbacks):
            score = getattr(callback, "best_model_score", getattr(callback, "best_score", None))
            if score is not None and math.isfinite(score) and getattr(callback, "monitor", None) == self._name:
                self._take(score, step_of(Path(getattr(callback, "best_model_path", ""))) or 0)
                return

    def mark(self, trainer: "Trainer", shown: Collection[str]) -> str:
        """Take the newest value, and return an epoch's mark, or as many spaces; "" if nothing is monitored.

        Args:
            trainer: The Trainer.
            shown: The metrics of the line; the mark names another one, with its value.
        """
        if not self._name:
            return ""
        metrics = trainer.callback_metrics
        is_best = self._name in metrics and self._take(float(metrics[self._name]), trainer.global_step)
        text = "* best" + ("" if self._name in shown else f" {self._name} {number(self._sign * self._best)}")
        return text if is_best else " " * len(text)

    def describe(self) -> str:
        """Return the best value in words; "" if there is none."""
        if self._best == math.inf:
            return ""
        return f"best {self._name} {self._sign * self._best:.4g}" + (f" at step {self._step}" if self._step else "")

    def _take(self, value: float, step: int) -> bool:
        is_better = self._sign * value < self._best  # False for NaN
        if is_better:
            self._best, self._step = self._sign * value, step
        return is_better
