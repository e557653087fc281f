"""What a run has next to its engine: its loaders, its limits of time, and how long its steps took to compile."""

import contextlib
import datetime
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from jaxlit.control import Control
from jaxlit.core.module import STAGES, Stage
from jaxlit.data.loaders import Loaders
from jaxlit.data.source import Source
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError, noted_place
from jaxlit.loop.settings import Settings

Loader = tuple[Source, int | None]  # and its limit in batches
_EVENTS = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")
_STEPS = {stage.program for stage in STAGES.values()} | {"train_step_traced", "micro_step", "train_steps"}


@dataclass(eq=False)
class RunData:
    """The loaders of a run."""

    loaders: Loaders
    train: Sequence[Loader] = ()  # the training loader of a fit, once it is open
    val: Sequence[Loader] = ()  # what a fit validates on, or validate, test or predict runs over, once it is open
    val_every: int | None = None  # batches between validations; None for the end of the epoch
    validates: bool = False  # whether a validation loader has batches

    @property
    def is_fit(self) -> bool:
        """Whether the run is a fit."""
        return self.loaders.method == "fit"

    @property
    def training(self) -> Loader:
        """The training loader of a fit, with its limit."""
        return self.train[0]

    def open_train(self, settings: Settings) -> Loader:
        """Open the training loader, and return it with its limit."""
        ((source, limit),) = self.train = self.loaders.open("training", required=True)
        self.val_every = validation_interval(settings, source, limit)
        return source, limit

    def reopen(self, settings: Settings) -> None:
        """Open the loaders of hooks again."""
        if self.train and self.loaders.from_hook("training"):
            self.training[0].close()
            self.open_train(settings)
        if self.val and self.loaders.from_hook("validation"):
            for source, _ in self.val:
                source.close()
            self.val = self.loaders.open("validation", required=True)

    def count(self, control: Control, accumulate: int) -> None:
        """Count the batches that the loaders have, for hooks, schedules and the loop."""
        source, limit = self.training
        control.training_loader, control.num_training_batches = source.argument, batches_or_inf(limit)
        # An eighth of an epoch, not of training: a resume with larger limits logs the same rows as one long training.
        steps = control.num_training_batches / accumulate
        control.log_every = int(min(max(math.ceil(steps) / 8, 1), 50)) if steps < math.inf else 10
        control.num_val_batches = [batches_or_inf(limit) for _, limit in self.val]
        self.validates = any(limit != 0 for _, limit in self.val)

    def close(self) -> None:
        """Close the loaders."""
        for source, _ in (*self.train, *self.val):
            source.close()


def batches_or_inf(limit: int | None) -> int | float:
    """Return a loader's batches for users, inf where they are not known."""
    return math.inf if limit is None else limit


def validation_interval(settings: Settings, source: Source, limit: int | None) -> int | None:
    """Return the batches between validations, None for one at the end of each epoch."""
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


def make_loaders(
    settings: Settings, stage: Stage, arguments: Mapping[str, Any], datamodule: Any, method: str | None = None
) -> Loaders:
    """Return the loaders of a run, for messages of the Trainer's `method`, by default the stage's."""
    validator = {name: getattr(settings, name) for name in ("host_keys", "max_recompiles", "debug")}
    overfit = stage.method == "fit" and bool(settings.overfit_batches)
    return Loaders(method or stage.method, arguments, datamodule, settings.limits, validator=validator, overfit=overfit)


class Limit(NamedTuple):
    """A time at which training stops."""

    due: float  # seconds since the run began
    reason: str
    at_epoch_end: bool  # or else after the step that runs


class TimeLimits:
    """The times of a run, the same in all of its processes."""

    def __init__(self) -> None:
        self.team = team()  # the processes, and the seconds since the run began
        self.waits = False  # whether something waits for a time; an attribute, because each step reads it
        self._started = time.monotonic()
        self._checked = 0.0  # seconds at the newest check
        self.ended: float | None = None  # when the run ended, by `time.monotonic()`; None while it continues
        self.has_failed = False  # whether it has raised an error
        self._limits: list[Limit] = []
        self._next_validation: float | None = None

    @property
    def seconds_to_look(self) -> float:
        """In how many seconds to look at the limits again; several processes look together, after each step."""
        if self.team.size > 1:
            return -math.inf
        # A limit that is over has asked for its stop. A validation may be late, where others are every n epochs.
        due_times = [limit.due for limit in self._limits if not limit.at_epoch_end and limit.due > self._checked]
        if self._next_validation is not None:
            due_times.append(self._next_validation)
        return min(due_times, default=math.inf) - self.seconds

    @property
    def seconds(self) -> float:
        """How long the run took, or has taken so far."""
        return (time.monotonic() if self.ended is None else self.ended) - self._started

    def fail(self, error: BaseException, place: str) -> None:
        """Note an error, and end the other processes of the job, unless they raise the same."""
        self.has_failed = True
        self.team.fail(error, f"in {noted_place(error)}" if noted_place(error) else place)

    def begin(self, settings: Settings) -> None:
        """Begin to count `max_time` and a `val_check_interval` that is a duration."""
        if settings.max_time is not None:
            self.stop_after(settings.max_time.total_seconds(), f"max_time={settings.max_time} is over")
        self.restart_interval(settings)

    def stop_after(self, seconds: float, reason: str, *, at_epoch_end: bool = False) -> None:
        """Ask for a stop once so many seconds from now are over."""
        self._limits.append(Limit(self.seconds + seconds, reason, at_epoch_end))
        self.waits = True

    def restart_interval(self, settings: Settings) -> None:
        """Count a `val_check_interval` that is a duration again, from the end of a validation."""
        if isinstance(interval := settings.val_check_interval, datetime.timedelta):
            self._next_validation = self.seconds + interval.total_seconds()
            self.waits = True

    @property
    def has_interval(self) -> bool:
        """Whether validations go by the clock."""
        return self._next_validation is not None

    def validation_is_due(self, control: Control) -> bool | None:
        """Return whether to validate by the clock; None if its interval is no duration."""
        if self._next_validation is None:
            return None
        return control.agree("validation by time", self.seconds >= self._next_validation)

    def check(self, control: Control, *, epoch_over: bool = False) -> None:
        """Ask for a stop once a limit is over."""
        if not self.waits:
            return
        self._checked = self.seconds
        for limit in self._limits:
            if self._checked >= limit.due and (epoch_over or not limit.at_epoch_end):
                control.stop(limit.reason)


class CompileLog(dict[str, float]):
    """Seconds of tracing, lowering and compiling of each kind of step, in the order of their first compile.

    `changed` is called with the seconds of each change.
    """

    def __init__(self, changed: Callable[[float], None] = lambda seconds: None) -> None:
        super().__init__()
        self._changed = changed

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to jax inside the block, and add up."""

        def listen(event: str, duration_secs: float, **details: Any) -> None:
            # Named train_step while it is traced, jit(train_step) later.
            name = str(details.get("fun_name")).removeprefix("jit(").removesuffix(")")
            # A strategy may compile a step in parts: train_step_fwd_0.
            step = max((x for x in _STEPS if name == x or name.startswith(f"{x}_")), key=len, default=None)
            if step is not None and event.rpartition("/")[2] in _EVENTS:
                self[step] = self.get(step, 0.0) + duration_secs
                self._changed(duration_secs)

        jax.monitoring.register_event_duration_secs_listener(listen)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(listen)
