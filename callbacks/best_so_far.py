"""The best value so far of the metric that is monitored, and the checkpoints that are kept, for people to read."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit.checkpoints.files import step_of

if TYPE_CHECKING:
    from jaxlit.trainer import Trainer


class BestSoFar:
    """Follows the metric of the first ModelCheckpoint, EarlyStopping or the like that monitors one."""

    def __init__(self) -> None:
        self._name, self._mode = "", "min"  # "" if nothing is monitored
        self._best: tuple[float, int] | None = None  # the value, and the optimizer steps until then, 0 if unknown

    def recall(self, trainer: "Trainer") -> None:
        """Take the best value that a callback knows: of a resumed training, or of the middle of an epoch."""
        self._name, self._mode = next(iter(monitored(trainer).items()), ("", "min"))
        for callback in (*trainer.checkpoint_callbacks, *trainer.callbacks):
            score = getattr(callback, "best_model_score", getattr(callback, "best_score", None))
            if getattr(callback, "monitor", None) == self._name and score is not None and math.isfinite(score):
                self._take(score, step_of(Path(getattr(callback, "best_model_path", ""))) or 0)
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


def monitored(trainer: "Trainer") -> dict[str, str]:
    """Return the metrics that callbacks monitor, checkpoints before others, and whether "min" or "max" is best."""
    callbacks = (*trainer.checkpoint_callbacks, *trainer.callbacks)
    modes = {getattr(c, "monitor", None): getattr(c, "mode", None) for c in callbacks}
    return {name: mode for name, mode in modes.items() if isinstance(name, str) and mode in ("min", "max")}


def kept_checkpoints(trainer: "Trainer") -> list[tuple[Any, str, list[str]]]:
    """Return the callback, the path and the marks "best" and "last" of each checkpoint that is kept."""
    kept = []
    for callback in trainer.checkpoint_callbacks:
        marks = {"best": callback.best_model_path if callback.monitor is not None else ""}
        marks["last"] = callback.last_model_path
        others = getattr(callback, "best_k_models", ())  # of a ModelCheckpoint
        for path in dict.fromkeys(filter(None, (marks["best"], *others, marks["last"]))):
            kept.append((callback, path, [mark for mark, at in marks.items() if at == path]))
    return kept
