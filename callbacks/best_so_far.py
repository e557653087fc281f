"""The best value so far of the metric that is monitored, for people to read."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlit.trainer import Trainer


class BestSoFar:
    """Follows the metric of the first ModelCheckpoint, EarlyStopping or the like that monitors one."""

    def __init__(self) -> None:
        self._name, self._mode = "", "min"  # "" if nothing is monitored
        self._best: tuple[float, int] | None = None  # the value, and the optimizer steps until then, 0 if unknown

    def recall(self, trainer: "Trainer") -> None:
        """Take the best value that a callback knows: of a resumed training, or of the middle of an epoch."""
        # Checkpoints before others.
        callbacks: list[Any] = [*trainer.checkpoint_callbacks, *trainer.callbacks]
        callbacks = [c for c in callbacks if isinstance(getattr(c, "monitor", None), str)]
        if not callbacks:
            return
        self._name, self._mode = callbacks[0].monitor, getattr(callbacks[0], "mode", "min")
        for callback in (c for c in callbacks if c.monitor == self._name):
            score = getattr(callback, "best_model_score", getattr(callback, "best_score", None))
            if score is not None and math.isfinite(score):
                digits = Path(getattr(callback, "best_model_path", "")).name.removeprefix("step_").split("-")[0]
                self._take(score, int(digits) if digits.isdigit() else 0)
                return

    def mark(self, trainer: "Trainer") -> str:
        """Take the newest value, and return an epoch's mark, or as many spaces; "" if nothing is monitored."""
        metrics = trainer.callback_metrics
        best = self._name in metrics and self._take(float(metrics[self._name]), trainer.global_step)
        return f"{'* best' if best else '':6}" if self._name else ""

    def describe(self) -> str:
        """Return the best value in words; "" if there is none."""
        if self._best is None:
            return ""
        value, step = self._best
        return f"best {self._name} {value:.4g}" + (f" at step {step}" if step else "")

    def _take(self, value: float, step: int) -> bool:
        sign = 1 if self._mode == "min" else -1
        if math.isnan(value) or (self._best is not None and sign * value >= sign * self._best[0]):
            return False
        self._best = value, step
        return True
