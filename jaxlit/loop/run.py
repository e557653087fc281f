"""One run of the loops: what they share, and when it is over."""

import datetime
import logging
import math
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxlit.checkpoints.position import Evaluation, Position
from jaxlit.checkpoints.writing import Saving
from jaxlit.control import Control
from jaxlit.core.module import TrainModule
from jaxlit.core.stage import Stage
from jaxlit.data.loaders import Loaders
from jaxlit.data.prefetcher import Prefetcher
from jaxlit.data.source import Source
from jaxlit.distributed.team import Team, team
from jaxlit.engine.engine import Engine
from jaxlit.errors import ArgumentError
from jaxlit.loop.compile_log import CompileLog
from jaxlit.loop.due import Due
from jaxlit.loop.hooks import Hooks
from jaxlit.loop.host_sums import Logged
from jaxlit.loop.restore import Resume
from jaxlit.loop.results import Results
from jaxlit.loop.settings import Settings
from jaxlit.loop.tracing import Tracing
from jaxlit.reporting.terminal import say

_logger = logging.getLogger("jaxlit")


class Start(NamedTuple):
    """Where an optimizer step begins; after a resume inside its window, where training continues."""

    step: int
    batch_idx: int
    filled: int  # batches of the step that the checkpoint holds
    data: Any  # the loader's state
    latest: Any  # the newest metrics
    logged: Logged | None  # what hooks have logged


class Limit(NamedTuple):
    """A time at which training stops."""

    due: float  # by the run's team
    reason: str
    at_epoch_end: bool  # or else after the step that runs


Loader = tuple[Source, int | None]  # and its limit in batches
# One not yet read: the step's table (None if only hooks have values), what hooks logged, and the step.
Row = tuple[Any, Mapping[str, Any], int]


@dataclass(kw_only=True)
class Setup:
    """What a run has before its loaders are open and its engine is made, as in `prepare_data` and `setup`."""

    stage: Stage
    settings: Settings
    control: Control
    module: TrainModule
    hooks: Hooks
    results: Results
    position: Position
    loaders: Loaders
    resume: Resume | None  # the checkpoint that the run begins with
    take_ownership: bool  # whether the engine may overwrite the module's arrays
    accumulate_given: int  # the Trainer's argument, before any hook
    accumulate_left: int | None = None  # the argument when the loops ended, which a teardown may set back
    train: Loader | None = None
    val: Sequence[Loader] = ()  # what a fit validates on, or validate, test or predict runs over
    validates: bool = False  # a validation loader has batches
    val_every: int | None = None  # batches between validations; None for the end of the epoch
    team: Team = field(default_factory=team)  # the processes, and the seconds since this run began
    compiles: CompileLog = field(default_factory=CompileLog)
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def training(self) -> Loader:
        """The training loader of a fit, with its limit."""
        assert self.train is not None
        return self.train

    @property
    def is_fit(self) -> bool:
        """Whether the run is a fit."""
        return self.stage.method == "fit"

    @property
    def seconds(self) -> float:
        """How long the run took, or has taken so far."""
        return (time.monotonic() if self.ended is None else self.ended) - self.started

    @property
    def progress(self) -> tuple[Any, ...]:
        """A value that changes whenever the run moves; any thread may read it."""
        return self.hooks.log.hook, self.position.total_batch_idx, self.position.phase

    @property
    def place(self) -> str:
        """How far the run is, in words."""
        hook, position = self.hooks.log.hook, self.position
        return f"{f'in {hook}, ' if hook else ''}after step {position.global_step} of epoch {position.epoch}"

    def open_train(self) -> Loader:
        """Open the training loader, and return it with its limit."""
        ((source, limit),) = self.loaders.open("training", required=True)
        self.train, self.val_every = (source, limit), validation_interval(self.settings, source, limit)
        return self.train

    def close(self) -> None:
        """Close the loaders."""
        self.accumulate_left = self.settings.accumulate_grad_batches
        for source, _ in (*([self.train] if self.train else []), *self.val):
            source.close()

    def count_batches(self) -> None:
        """Count the batches that the loaders have, for hooks, schedules and the loop."""
        self.control.num_training_batches = count(self.training[1])
        # An eighth of an epoch, not of training: a resume with larger limits logs the same rows as one long training.
        steps = self.control.num_training_batches / self.accumulate_given
        self.control.log_every = int(min(max(math.ceil(steps) / 8, 1), 50)) if steps < math.inf else 10
        self.control.num_val_batches = [count(limit) for _, limit in self.val]
        self.validates = any(limit != 0 for _, limit in self.val)

    @property
    def log_every(self) -> int:
        """The optimizer steps between rows, 0 for none."""
        every = self.settings.log_every_n_steps
        return self.control.log_every if isinstance(every, str) else every


@dataclass(kw_only=True)
class Run(Setup):
    """One fit, validate, test or predict: what its loops share."""

    engine: Engine
    prefetcher: Prefetcher
    tracing: Tracing
    due: Due
    pending: Row | None = None
    rates_in: str | None = None  # the rows that a callback wants learning rates in, "step" or "epoch"
    evaluation: Evaluation | None = None  # the validation that runs, or that a stop has cut
    resumed: bool = False  # training continues from a checkpoint, and has not begun an epoch since
    accumulate: int = 1  # batches of an optimizer step in this epoch
    ready: bool = False  # the steps of this epoch show their metrics
    cut: bool = False  # training stopped in the middle of an epoch
    written: list[Path | Saving] = field(default_factory=list)  # checkpoints of this training, the newest last
    rollbacks: dict[str, int] = field(default_factory=dict)  # by checkpoint, how often training went back to it
    seen_bad_step: int = -1
    starts: list[Start] = field(default_factory=list)  # of the steps that were not checked yet
    not_finite: dict[str, Any] | None = None  # the bad step that training ends before, see `jaxlit.loop.rewind`
    limits: list[Limit] = field(default_factory=list)  # of time
    is_timed: bool = False  # something waits for a time; an attribute, because each step reads it
    _next_validation: float | None = None  # seconds of the clock, if the interval is a time
    _stop_logged: bool = False
    _signal_printed: bool = False

    @property
    def max_in_flight(self) -> int:
        """How many steps may be dispatched and not finished."""
        return self.settings.steps_in_flight(self.engine.strategy.mesh.size)

    @property
    def progress(self) -> tuple[Any, ...]:
        """A value that changes whenever the run moves; any thread may read it."""
        return *super().progress, self.prefetcher.drawn

    def count_batches(self) -> None:
        """Count the batches of loaders that were opened again."""
        super().count_batches()
        self.tracing = Tracing(self.hooks, self.log_every)

    def start_clocks(self) -> None:
        """Begin to count `max_time` and a `val_check_interval` that is a duration."""
        if self.settings.max_time is not None:
            self.stop_after(self.settings.max_time.total_seconds(), f"max_time={self.settings.max_time} is over")
        self.restart_interval()

    def stop_after(self, seconds: float, reason: str, *, at_epoch_end: bool = False) -> None:
        """Ask for a stop once so many seconds from now are over; in several processes all must come here."""
        self.limits.append(Limit(self._look(ask=True) + seconds, reason, at_epoch_end))
        self.is_timed = True

    def restart_interval(self) -> None:
        """Count a `val_check_interval` that is a duration again, from the end of a validation."""
        if isinstance(interval := self.settings.val_check_interval, datetime.timedelta):
            self._next_validation, self.is_timed = self._look(ask=True) + interval.total_seconds(), True

    def _look(self, *, ask: bool = False) -> float:
        """Return the clock's seconds; the next limit decides when processes compare their clocks."""
        dues = [limit.due for limit in self.limits if not limit.at_epoch_end]
        dues += [] if self._next_validation is None else [self._next_validation]
        return self.team.elapsed(min((due for due in dues if due > self.team.now), default=None), ask=ask)

    @property
    def done(self) -> bool:
        """Whether training is over."""
        settings, control, position = self.settings, self.control, self.position
        return (
            control.interrupted
            or position.global_step >= settings.max_steps >= 0
            or (settings.max_epochs is not None and position.epoch >= settings.max_epochs)
            or (control.should_stop and self.may_stop)
        )

    @property
    def may_stop(self) -> bool:
        """Whether `min_epochs` and `min_steps` allow a stop that was asked for."""
        epochs, steps = self.settings.min_epochs, self.settings.min_steps
        if self.position.epoch >= epochs and self.position.global_step >= steps:
            return True
        if not self._stop_logged:
            self._stop_logged, reason = True, self.control.stop_reason
            text = "Asked to stop (%s), but min_epochs=%d and min_steps=%d are not reached: training continues."
            _logger.info(text, reason, epochs, steps)
        return False

    def check_notice(self) -> None:
        """End training here, as by SIGTERM, if jax announces to all processes that one of them will be preempted."""
        if self.team.decide(False):
            self.control.signal, self.control.interrupted, self.control.together = signal.SIGTERM, True, True

    def print_signal(self) -> None:
        """Print once that a signal ends training here, if one does."""
        if (number := self.control.signal) is not None and not self._signal_printed:
            self._signal_printed = True
            name, again = ("Ctrl-C", " again") if number == signal.SIGINT else (signal.Signals(number).name, "")
            done = f"{name}: stopping after step {self.position.global_step}."
            say(f"{done} Press Ctrl-C{again} to stop now (no checkpoint).", aside=True)

    def found_finite(self, step: int) -> None:
        """Forget the starts of the optimizer steps before `step`: they were finite."""
        self.starts[:] = [start for start in self.starts if start.step >= step]

    def check_time(self, *, epoch_over: bool = False) -> None:
        """Ask for a stop once a limit of time is over."""
        # One process alone may be interrupted: the others would not exchange their times with it.
        if not self.is_timed or not self.team.meets(not self.control.interrupted):
            return
        now = self._look(ask=epoch_over)
        for limit in self.limits:
            if now >= limit.due and (epoch_over or not limit.at_epoch_end):
                self.control.stop(limit.reason)

    def validation_is_due(self, last: bool) -> bool:
        """Return whether to validate after a batch, where there is something to validate on.

        Args:
            last: Whether it is the last batch of the epoch.
        """
        position, every = self.position, self.settings.check_val_every_n_epoch
        if every is not None and (position.epoch + 1) % every:
            return False
        if self.control.should_stop and self.may_stop:
            return True
        if self._next_validation is not None:
            return self.team.now >= self._next_validation
        if self.val_every is None:
            return last
        count = position.total_batch_idx if every is None else position.batch_idx
        return count % self.val_every == 0


def count(limit: int | None) -> int | float:
    """Return a loader's batches for users, inf where they are not known."""
    return math.inf if limit is None else limit


def validation_interval(settings: Settings, source: Source, limit: int | None) -> int | None:
    """Return the batches between validations, None for one at the end of each epoch.

    Args:
        settings: The Trainer's arguments.
        source: The training loader.
        limit: Its batches in an epoch, None if unknown.

    Raises:
        ArgumentError: An epoch has too few batches, or an unknown number of them.
    """
    interval = settings.val_check_interval
    if isinstance(interval, datetime.timedelta) or (interval == 1.0 and isinstance(interval, float)):
        return None
    if isinstance(interval, float):
        if limit is None:
            raise ArgumentError(
                f"Trainer(val_check_interval={interval}) is a fraction, but {source.argument} has no length. "
                "Give the number of batches as an int."
            )
        return max(1, int(limit * interval))
    if settings.check_val_every_n_epoch is not None and limit is not None and interval > limit:
        raise ArgumentError(
            f"Trainer(val_check_interval={interval}) is more than the {limit} batches of an epoch. Give at most "
            f"{limit}, or check_val_every_n_epoch=None to count batches across epochs."
        )
    return interval
