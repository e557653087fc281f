"""What a run waits for by the clock: its limits of time, and validations whose interval is a duration."""

import datetime
import math
import time
from typing import NamedTuple

from jaxlit.control import Control
from jaxlit.distributed.team import team
from jaxlit.loop.settings import Settings
from jaxlit.notes import noted_place


class Limit(NamedTuple):
    """A time at which training stops."""

    due: float  # seconds since the run began
    reason: str
    at_epoch_end: bool  # or else after the step that runs


class TimeLimits:
    """The times of a run, the same in all of its processes.

    Attributes:
        team: The processes, and the seconds since the run began.
        waits: Whether something waits for a time; an attribute, because each step reads it.
        ended: When the run ended, by `time.monotonic()`; None while it continues.
        has_failed: Whether it has raised an error.
    """

    def __init__(self) -> None:
        self.team = team()
        self.waits = False
        self._started = time.monotonic()
        self._checked = 0.0  # seconds at the newest check
        self.ended: float | None = None
        self.has_failed = False
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
