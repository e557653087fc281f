"""The best value so far of what is monitored, for people to see."""

import math
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlit.reporting.epoch_line import number

if TYPE_CHECKING:
    from jaxlit.trainer import Trainer


class BestSoFar:
    """Follows the metric of the first ModelCheckpoint, EarlyStopping or the like that monitors one."""

    def __init__(self) -> None:
        self._best: tuple[float, int] | None = None  # the value, and the optimizer steps until then, 0 if unknown

    def recall(self, trainer: "Trainer") -> None:
        """Take the best value that a callback knows: of a resumed training, or of the middle of an epoch."""
        found = _monitored(trainer)
        for callback in (*trainer.checkpoint_callbacks, *trainer.callbacks):
            if found is not None and getattr(callback, "monitor", None) == found[0]:
                score = getattr(callback, "best_model_score", getattr(callback, "best_score", None))
                if score is not None and math.isfinite(score):
                    self._take(score, _step_of(getattr(callback, "best_model_path", "")), found[1])
                    return

    def update(self, trainer: "Trainer") -> bool:
        """Take the newest value, and tell whether it is the best."""
        if (found := _monitored(trainer)) is None or found[0] not in trainer.callback_metrics:
            return False
        return self._take(float(trainer.callback_metrics[found[0]]), trainer.global_step, found[1])

    def mark(self, trainer: "Trainer", shown: Collection[str]) -> str:
        """Take the newest value; returns an epoch's mark, or as many spaces, and "" where nothing is monitored.

        Args:
            trainer: The Trainer.
            shown: The metrics that stand beside the mark; of another one it tells the name and the value.
        """
        if (found := _monitored(trainer)) is None:
            return ""
        best, name = self.update(trainer), found[0]
        told = "" if name in shown else f" {name} {number(self._best[0] if self._best else math.nan)}"
        return f"* best{told}" if best else " " * len(f"* best{told}")

    def describe(self, trainer: "Trainer") -> str:
        """Return it in words; "" if there is none."""
        if (found := _monitored(trainer)) is None or self._best is None:
            return ""
        value, step = self._best
        return f"best {found[0]} {value:.4g}" + (f" at step {step}" if step else "")

    def _take(self, value: float, step: int, mode: str) -> bool:
        sign = 1 if mode == "min" else -1
        if math.isnan(value) or (self._best is not None and sign * value >= sign * self._best[0]):
            return False
        self._best = value, step
        return True


def _monitored(trainer: "Trainer") -> tuple[str, str] | None:
    """Return the (metric, mode) that the first callback with one monitors, checkpoints before others."""
    for callback in (*trainer.checkpoint_callbacks, *trainer.callbacks):
        if isinstance(name := getattr(callback, "monitor", None), str):
            return name, getattr(callback, "mode", "min")
    return None


def _step_of(path: str) -> int:
    digits = Path(path).name.removeprefix("step_").split("-")[0]
    return int(digits) if digits.isdigit() else 0
