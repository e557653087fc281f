"""Monitored metrics: `MonitorCallback`, the base of callbacks that check one after each validation or epoch.

The functions after it check a monitor's arguments, and return what the callbacks of a Trainer monitor and have saved.
"""

import logging
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.distributed.job import same_job
from jaxlit.distributed.team import team
from jaxlit.errors import LoggerError, did_you_mean

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")


class MonitorCallback(Callback, ABC):
    """Check a metric, and store its best value and the number of checks since; the arguments are `EarlyStopping`'s."""

    runs_last = True

    def __init__(
        self, monitor: str, mode: str, check_on_train_epoch_end: bool | None, *, min_delta: float, strict: bool = True
    ) -> None:
        owner = type(self).__name__
        self.monitor, self.mode = check_monitor(monitor, mode, owner=owner)
        if check_on_train_epoch_end is not None:
            check.boolean("check_on_train_epoch_end", check_on_train_epoch_end, owner=owner)
        self.min_delta = check.number("min_delta", min_delta, low=0, owner=owner)
        self.strict = check.boolean("strict", strict, owner=owner)
        self._check_on_train_epoch_end = check_on_train_epoch_end
        self._at_epoch_end = self._fitting = self._validated = self._has_checked = False
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
        """Decide when to check; each fit counts from zero."""
        self._fitting = stage == "fit"
        self._validated = self._has_checked = False
        self._first_step = trainer.global_step
        interval = trainer.val_check_interval  # an int counts batches
        each_epoch = isinstance(interval, float) and interval == 1.0 and trainer.check_val_every_n_epoch == 1
        self._at_epoch_end = each_epoch if self._check_on_train_epoch_end is None else self._check_on_train_epoch_end
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
        # An interrupted epoch has had no validation: its old value must not count twice.
        is_due = self._at_epoch_end and (self._check_on_train_epoch_end is not None or validated)
        if is_due or not trainer.num_val_batches:  # without validations there is no other time
            self._read(trainer)

    def on_train_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Warn if the metric was never checked."""
        if not self._has_checked and not trainer.interrupted:
            text = "%s(monitor=%r) was never checked: training ended before a validation or epoch that it watches."
            _logger.warning(text, type(self).__name__, self.monitor)

    def _read(self, trainer: "Trainer") -> None:
        metrics = trainer.callback_metrics
        # First: of several processes all take part, also one in which nothing was logged.
        value = read_monitored(f"{type(self).__name__}(monitor={self.monitor!r})", self.monitor, metrics)
        if value is None and trainer.global_step == self._first_step:
            return  # a stop inside the first window: no step has logged anything yet
        self._has_checked = True
        if value is not None:
            self.check(trainer, value)
        elif self.strict:
            raise no_such_metric(type(self).__name__, self.monitor, metrics)

    @property
    def state_key(self) -> str:
        """The class and its metric: the state is not that of another metric."""
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
        """Restore the counts and the best value."""
        self._validated, self._has_checked = bool(state_dict.get("validated", False)), True
        self.wait_count, self.best_score = state_dict["wait_count"], float(state_dict["best_score"])


def check_monitor(monitor: Any, mode: Any, *, owner: str) -> tuple[str, str]:
    """Return the name of a metric, and "min" or "max"; raise an ArgumentError for anything else."""
    rule = "takes the name of a logged metric"
    check.require(isinstance(monitor, str) and monitor != "", "monitor", monitor, rule, owner=owner)
    return monitor, check.one_of("mode", mode, ("min", "max"), owner=owner)


def read_monitored(owner: str, name: str, metrics: Any) -> float | None:
    """Return a monitored value, None without one; of several processes all call this, and must have logged the same.

    Raises:
        ProcessError: Hooks have logged others, or not in all processes.
    """
    value = float(metrics[name]) if name in metrics else None
    if team().size > 1 and (value is None or metrics.hook(name) is not None):
        rule = (
            f"{owner} reads {name!r}, which hooks log in each process. Log the same in all, for example the mean of "
            "jax.experimental.multihost_utils.process_allgather(value)."
        )
        same_job(f"{owner}, {name!r}", lambda: {f"self.log({name!r}, ...)": repr(value)}, rule=rule)
    return value


def no_such_metric(owner: str, name: str, metrics: Any) -> LoggerError:
    """Return the error of a metric that was not logged."""
    return LoggerError(
        f"{owner}(monitor={name!r}): no such metric was logged.{did_you_mean(name, metrics)} "
        f"Logged: {', '.join(sorted(metrics)) or 'nothing'}."
    )


def monitored(trainer: "Trainer") -> dict[str, str]:
    """Return the metrics that callbacks monitor, checkpoints before others, and whether "min" or "max" is best."""
    callbacks = (*trainer.checkpoint_callbacks, *trainer.callbacks)
    modes = {getattr(c, "monitor", None): getattr(c, "mode", None) for c in callbacks}
    return {name: mode for name, mode in modes.items() if isinstance(name, str) and mode in ("min", "max")}


class SavedCheckpoint(NamedTuple):
    """A checkpoint that a callback has saved and not deleted."""

    callback: Any
    path: str
    marks: list[str]  # "best" and "last"


def saved_checkpoints(trainer: "Trainer") -> list[SavedCheckpoint]:
    """Return the checkpoints of a Trainer's callbacks."""
    checkpoints = []
    for callback in trainer.checkpoint_callbacks:
        best = callback.best_model_path if callback.monitor is not None else ""
        marked = {"best": best, "last": callback.last_model_path}
        best_k = getattr(callback, "best_k_models", ())  # of a ModelCheckpoint
        for path in dict.fromkeys(filter(None, (best, *best_k, callback.last_model_path))):
            marks = [mark for mark, marked_path in marked.items() if marked_path == path]
            checkpoints.append(SavedCheckpoint(callback, path, marks))
    return checkpoints
