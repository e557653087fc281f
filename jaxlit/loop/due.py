"""When rows, traces and callbacks act that do not act in each step: the loop compares one number."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError
from jaxlit.loop.hooks import Hook, Hooks, fitting, overrides
from jaxlit.loop.tracing import Tracing
from jaxlit.shown import shown

if TYPE_CHECKING:
    from jaxlit.loop.run import Run

MOST_QUIET = 1024  # optimizer steps after which the loop looks at all in any case
_NAMES = ("on_train_batch_start", "on_train_batch_end", "on_safe_point")
StepHooks: TypeAlias = tuple[Hook | None, Hook | None, Hook | None]  # in that order; None without functions


class Due:
    """When something acts that does not act in each step, and the hooks of a step's batches.

    Args:
        hooks: The hooks of the run, of which callbacks with `due_in` have some steps only.
        tracing: The callbacks inside the optimizer step.

    Attributes:
        next: After how many optimizer steps something acts next; 0 before it was asked.
        cut: After how many optimizer steps a dispatch of several has to end: a validation, a limit or a callback comes
            then, or a step that is taken alone.
        time: The time, by `time.perf_counter()`, at which something acts next; infinite if nothing waits for one.
        each: The hooks of a step in which none of those callbacks acts.
    """

    def __init__(self, hooks: Hooks, tracing: Tracing) -> None:
        self._hooks, self._tracing = hooks, tracing
        asked = [c for c in hooks.callbacks if overrides(c, "due_in") or overrides(c, "due_in_seconds")]
        self._asked = {c: partial(self._wait_of, c, fitting(c, "due_in", ["step"])) for c in asked}
        self._waits: list[tuple[Callback, float, float]] = []  # with the step and the time
        self._made: dict[tuple[int, ...], StepHooks] = {}  # by the ids of the callbacks that act
        self._next_callback, self._time_callback = 0.0, math.inf
        self._intervals = list[int]()
        self._forgotten = 0  # how often
        self.next: float = 0
        self.cut: float = 0
        self.time = math.inf
        self.each: StepHooks = (None, None, None)

    def forget(self) -> None:
        """Ask all again before the next step: an interval has changed, or steps are undone. Any thread may call it."""
        self._forgotten += 1
        self.next = 0

    def move(self, run: "Run", step: int) -> None:
        """Find what acts next, after so many optimizer steps."""
        now, forgotten = time.perf_counter(), self._forgotten
        if not self.next:
            self._next_callback, self.each = 0, self._of([])
            self._intervals = [
                every for every in (run.log_every, *[every for _, every in self._tracing.every]) if every
            ]
        if step >= self._next_callback or now >= self._time_callback:
            ask = self._hooks.ask
            waits = [
                (c, *ask(c, "due_in", partial(wait_of, step, now), (math.inf,) * 2))
                for c, wait_of in self._asked.items()
            ]
            self._waits = waits
            self._next_callback = min((at for _, at, _ in waits), default=math.inf)
            self._time_callback = min((at for _, _, at in waits), default=math.inf)
        self.time, steps = self._time_callback, run.settings.max_steps
        if run.times.waits or run.times.team.size > 1:
            self.time = min(self.time, now + run.times.seconds_to_look)
        self.next = min(self._next_callback, step + MOST_QUIET)
        self.cut = self._next_callback
        for _, every in self._tracing.every:
            self.cut = min(self.cut, step + every - step % every - 1)
        for every in self._intervals:  # no call: a row may be due in each step
            if (at := step + every - step % every) < self.next:
                self.next = at
        if run.settings.debug:
            self.next, self.cut = step + 1, step
        if step < steps:
            self.next, self.cut = min(self.next, steps), min(self.cut, steps)
        if run.data.val_every is not None and (batches := run.batches_to_validation) is not None:
            batches += run.position.filled
            self.next = min(self.next, step - (-batches // run.window.batches))
            # One that comes inside a window is of a step that is taken alone.
            self.cut = min(self.cut, step + batches // run.window.batches)
        if self._forgotten != forgotten:  # meanwhile
            self.next = 0

    @staticmethod
    def _wait_of(callback: Callback, due_in: Callable[[int], Any], step: int, now: float) -> tuple[float, float]:
        """Return the step and the time at which a callback acts next."""
        wait, seconds = due_in(step), callback.due_in_seconds()
        if wait is not None and not (isinstance(wait, (int, np.integer)) and wait >= 1):
            raise ArgumentError(
                f"{type(callback).__name__}.due_in({step}) returned {shown(wait)}. Return a number of optimizer steps, "
                "at least 1, or None for not before the epoch's end."
            )
        return math.inf if wait is None else step + wait, math.inf if seconds is None else now + seconds

    def at(self, step: int) -> StepHooks:
        """Return the hooks of an optimizer step, counted from 1, in which something acts."""
        now = time.perf_counter()
        if step < self._next_callback and now < self._time_callback:
            return self.each
        return self._of([c for c, due, due_time in self._waits if step >= due or now >= due_time])

    def _of(self, acting: list[Callback]) -> StepHooks:
        key = tuple(map(id, acting))
        if key not in self._made:
            resting = [c for c in self._asked if id(c) not in key]
            hooks = [self._hooks.bind(name).without([c for c in resting if _is_covered(c, name)]) for name in _NAMES]
            self._made[key] = tuple(hook or None for hook in hooks)  # type: ignore[assignment]
        return self._made[key]


def _is_covered(callback: Callback, name: str) -> bool:
    """Return whether `due_in` speaks for a hook; one that was set on the object or by a subclass comes each step."""
    if name in vars(callback) or "due_in" in vars(callback):
        return name not in vars(callback)
    by, hook = (next(cls for cls in type(callback).__mro__ if x in vars(cls)) for x in ("due_in", name))
    return issubclass(by, hook)
