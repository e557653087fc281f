"""`Timer`, which stops a training when its time is over, and measures each stage."""

import logging
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")
_STAGES = ("train", "validate", "test", "predict")


def _hooks_of(stage: str) -> tuple[Any, Any]:
    def begin(self: "Timer", trainer: "Trainer", module: "TrainModule") -> None:
        """Begin to count."""
        self._start[stage] = time.monotonic()
        self._end.pop(stage, None)

    def end(self: "Timer", trainer: "Trainer", module: "TrainModule") -> None:
        """Note the end."""
        self._end[stage] = time.monotonic()

    return begin, end


class Timer(Callback):
    """Stop training after a duration, over all runs of a resumed training, and measure stages.

    Arguments and methods are Lightning's. `Trainer(max_time=...)` counts each `fit` from zero; here the time before a
    checkpoint counts as well. Several processes all stop at the same step. As with every stop, training continues until
    `min_epochs` and `min_steps` are reached.

    Args:
        duration: The time after which to stop: a timedelta, a dict of its arguments or "DD:HH:MM:SS"; None to measure
            only.
        interval: "step" to stop after the step that runs, "epoch" at the end of the epoch.
        verbose: Log when it has stopped the training.

    Raises:
        ArgumentError: An argument is out of its set.
        ArgumentTypeError: The duration has the wrong type.

    Example:
        >>> import jaxlit as jl
        >>> timer = jl.callbacks.Timer("00:12:00:00", interval="epoch")
        >>> trainer = jl.Trainer(max_epochs=100, callbacks=timer, logger=False)
        >>> timer.time_elapsed("train"), timer.time_remaining("train")
        (0.0, 43200.0)
    """

    def __init__(
        self,
        duration: str | timedelta | dict[str, int] | None = None,
        *,
        interval: Literal["step", "epoch"] = "step",
        verbose: bool = True,
    ) -> None:
        self.duration = None if duration is None else check.duration("duration", duration, owner="Timer")
        self.limits_time = self.duration is not None
        self.interval = check.one_of("interval", interval, ("step", "epoch"), owner="Timer")
        self.verbose = check.boolean("verbose", verbose, owner="Timer")
        self._start: dict[str, float] = {}
        self._end: dict[str, float] = {}
        self._before = 0.0  # seconds of training before the checkpoint

    def start_time(self, stage: str = "train") -> float | None:
        """Return when a stage began last, by `time.monotonic()`; None if it has not.

        Args:
            stage: "train", "validate" (also of a fit), "test" or "predict".
        """
        return self._start.get(self._known(stage))

    def end_time(self, stage: str = "train") -> float | None:
        """Return when a stage ended last, by `time.monotonic()`; None while it continues."""
        return self._end.get(self._known(stage))

    def time_elapsed(self, stage: str = "train") -> float:
        """Return the seconds of a stage; for training with those before a resume."""
        start, end = self.start_time(stage), self.end_time(stage)
        before = self._before if stage == "train" else 0.0
        return before if start is None else before + (time.monotonic() if end is None else end) - start

    def time_remaining(self, stage: str = "train") -> float | None:
        """Return the seconds that a stage has left; None without a duration."""
        return None if self.duration is None else self.duration - self.time_elapsed(stage)

    def _known(self, stage: str) -> str:
        return check.one_of("stage", stage, _STAGES, owner="Timer.time_elapsed")

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Count each fit from zero; a checkpoint adds the time before it."""
        if stage == "fit":
            self._start, self._end, self._before = {}, {}, 0.0

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Train no step if no time is left after a checkpoint."""
        if self.duration is not None and self._before >= self.duration:
            trainer.stop(self._reason, final=False)

    def on_train_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Begin to count."""
        self._start["train"] = time.monotonic()
        if self.duration is not None:
            # The loop checks the clock, not a hook: several processes must stop at the same step.
            trainer.stop_after(self.duration - self._before, self._reason, at_epoch_end=self.interval == "epoch")

    def on_train_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Note the end."""
        self._end["train"] = time.monotonic()
        if self.verbose and trainer.is_global_zero and trainer.stop_reason == self._reason:
            _logger.info("%s: training took %s.", self._reason, timedelta(seconds=round(self.time_elapsed())))

    @property
    def _reason(self) -> str:
        return f"Timer(duration={timedelta(seconds=self.duration or 0)}) is over"

    on_validation_start, on_validation_end = _hooks_of("validate")
    on_test_start, on_test_end = _hooks_of("test")
    on_predict_start, on_predict_end = _hooks_of("predict")

    def state_dict(self) -> dict[str, Any]:
        """Return the seconds of training so far."""
        return {"time_elapsed": {"train": self.time_elapsed()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Count the seconds of a checkpoint as well."""
        self._before = float(state_dict["time_elapsed"]["train"])
