"""What a run waits for by the clock: its limits of time, and validations whose interval is a duration."""

import datetime
import math
import time
from typing import NamedTuple

from jaxlit.control import Control
from jaxlit.distributed.team import team
from jaxlit.loop.settings import Settings


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
    """

    def __init__(self) -> None:
        self.team, self.waits, self._started = team(), False, time.monotonic()
        self.ended: float | None = None
        self._limits: list[Limit] = []
        self._next_validation: float | None = None

    @property
    def seconds_to_look(self) -> float:
        """In how many seconds to look at the limits again; several processes look together, after each step."""
        if self.team.size > 1:
            return -math.inf
        # A limit that is over has asked for its stop. A validation may be late, where others are every n epochs.
        left = [due for due in self._dues if due > self.team.now or due == self._next_validation]
        return min(left, default=math.inf) - self.seconds

    @property
    def _dues(self) -> list[float]:
        dues = [limit.due for limit in self._limits if not limit.at_epoch_end]
        return dues if self._next_validation is None else [*dues, self._next_validation]

    @property
    def seconds(self) -> float:
        """How long the run took, or has taken so far."""
        return (time.monotonic() if self.ended is None else self.ended) - self._started

    def begin(self, settings: Settings) -> None:
        """Begin to count `max_time` and a `val_check_interval` that is a duration."""
        if settings.max_time is not None:
            self.stop_after(settings.max_time.total_seconds(), f"max_time={settings.max_time} is over")
        self.restart_interval(settings)

    def stop_after(self, seconds: float, reason: str, *, at_epoch_end: bool = False) -> None:
        """Ask for a stop once so many seconds from now are over; in several processes all must come here."""
        self._limits.append(Limit(self._elapsed(ask=True) + seconds, reason, at_epoch_end))
        self.waits = True

    def restart_interval(self, settings: Settings) -> None:
        """Count a `val_check_interval` that is a duration again, from the end of a validation."""
        if isinstance(interval := settings.val_check_interval, datetime.timedelta):
            self._next_validation, self.waits = self._elapsed(ask=True) + interval.total_seconds(), True

    def validation_is_due(self) -> bool | None:
        """Return whether to validate by the clock; None if its interval is no duration."""
        return None if self._next_validation is None else self.team.now >= self._next_validation

    def check(self, control: Control, *, epoch_over: bool = False) -> None:
        """Ask for a stop once a limit is over."""
        # One process alone may be interrupted: the others would not exchange their times with it.
        if not self.waits or (control.interrupted and not self.team.meets(False)):
            return
        now = self._elapsed(ask=epoch_over)
        for limit in self._limits:
            if now >= limit.due and (epoch_over or not limit.at_epoch_end):
                control.stop(limit.reason)

    def _elapsed(self, *, ask: bool) -> float:
        """Return the seconds; the next limit decides when processes compare their clocks."""
        return self.team.elapsed(min((due for due in self._dues if due > self.team.now), default=None), ask=ask)
