"""The base of callbacks that check a metric after each validation, or after each epoch.

The best value so far of the metric that is monitored, and the checkpoints that are kept, for people to read.
"""

import logging
import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import step_of
from jaxlit.errors import LoggerError, did_you_mean

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")


class MonitorCallback(Callback, ABC):
    """Check a metric, and keep the best value and how many checks have passed since.

    Args:
        monitor: The metric's name in `trainer.callback_metrics`.
        mode: "min" if lower is better, else "max".
        check_on_train_epoch_end: Check at the end of each epoch, or else after each validation. None: at the end of
            each epoch if each validates at its end.
        min_delta: The least change that counts as an improvement.
        strict: A missing metric is an error.
    """

    runs_last = True

    def __init__(
        self, monitor: str, mode: str, check_on_train_epoch_end: bool | None, *, min_delta: float, strict: bool = True
    ) -> None:
        owner, asked = type(self).__name__, check_on_train_epoch_end
        self.monitor, self.mode = check_monitor(monitor, mode, owner=owner)
        if asked is not None:
            check.boolean("check_on_train_epoch_end", asked, owner=owner)
        self.min_delta = check.number("min_delta", min_delta, low=0, owner=owner)
        self.strict = check.boolean("strict", strict, owner=owner)
        self._asked, self._at_epoch_end = asked, False
        self._fitting = self._validated = self._looked = False
        self._first_step = 0
        self._reset()

    def _reset(self) -> None:
        self.wait_count = 0
        self.best_score = self._sign * math.inf

    @abstractmethod
    def check(self, trainer: "Trainer", value: float) -> None:
        """Take a new value of the metric."""

    @property
    def _sign(self) -> int:
        return 1 if self.mode == "min" else -1

    def is_better(self, value: float, than: float, min_delta: float = 0.0) -> bool:
        """Return whether a value is better than another, by more than `min_delta`."""
        return self._sign * value < self._sign * than - min_delta

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Find out when to check; each fit counts from zero."""
        self._fitting, self._validated, self._looked = stage == "fit", False, False
        self._first_step = trainer.global_step
        interval = trainer.val_check_interval  # an int counts batches
        each_epoch = isinstance(interval, float) and interval == 1.0 and trainer.check_val_every_n_epoch == 1
        self._at_epoch_end = each_epoch if self._asked is None else self._asked
        if self._fitting:
            self._reset()

    def on_validation_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Check after a validation of a fit."""
        if self._fitting and not trainer.sanity_checking:
            self._validated = True
            if not self._at_epoch_end:
                self._read(trainer)

    def on_train_epoch_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Check after an epoch."""
        validated, self._validated = self._validated, False
        # An epoch that was interrupted has had no validation: its old value must not count twice.
        due = self._at_epoch_end and (self._asked is not None or validated)
        if due or not trainer.num_val_batches:  # without validations there is no other time
            self._read(trainer)

    def on_train_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Warn if the metric was never checked."""
        if not self._looked and not trainer.interrupted:
            _logger.warning(
                "%s(monitor=%r) was never checked: training ended before a validation or epoch that it watches.",
                type(self).__name__,
                self.monitor,
            )

    def _read(self, trainer: "Trainer") -> None:
        metrics = trainer.callback_metrics
        if self.monitor not in metrics and trainer.global_step == self._first_step:
            return  # a stop inside the first window: no step has logged anything yet
        self._looked = True
        if self.monitor in metrics:
            self.check(trainer, float(metrics[self.monitor]))
        elif self.strict:
            raise no_such_metric(type(self).__name__, self.monitor, metrics)

    @property
    def state_key(self) -> str:
        """The class and its metric: values of another metric mean nothing to it."""
        return f"{type(self).__name__}[{self.monitor}, {self.mode}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the counts and the best value."""
        return {
            "validated": self._validated,
            "wait_count": self.wait_count,
            # An infinity is no JSON value.
            "best_score": self.best_score if math.isfinite(self.best_score) else str(self.best_score),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the counts and the best value."""
        self._validated, self._looked = bool(state_dict.get("validated", False)), True
        self.wait_count, self.best_score = state_dict["wait_count"], float(state_dict["best_score"])


def check_monitor(monitor: Any, mode: Any, *, owner: str) -> tuple[str, str]:
    """Return the name of a metric, and "min" or "max".

    Raises:
        ArgumentError: One of them is none.
    """
    rule = "takes the name of a logged metric"
    check.require(isinstance(monitor, str) and monitor != "", "monitor", monitor, rule, owner=owner)
    return monitor, check.one_of("mode", mode, ("min", "max"), owner=owner)


def no_such_metric(owner: str, name: str, metrics: Any) -> LoggerError:
    """Return the error of a metric that was not logged."""
    return LoggerError(
        f"{owner}(monitor={name!r}): no such metric was logged.{did_you_mean(name, metrics)} "
        f"Logged: {', '.join(sorted(metrics)) or 'nothing'}."
    )


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
