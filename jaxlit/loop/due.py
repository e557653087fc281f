"""When rows, traces and callbacks act that do not act in each step: the loop compares one number."""

import math
import time
from typing import TYPE_CHECKING, NamedTuple

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


class StepHooks(NamedTuple):
    """The hooks of the batches of a step; None for one that nobody has, which costs no call."""

    start: Hook | None = None
    end: Hook | None = None
    safe_point: Hook | None = None


class Wait(NamedTuple):
    """What a callback waits for."""

    callback: Callback
    step: float
    time: float  # by `time.perf_counter()`


class Due:
    """When something acts that does not act in each step, and the hooks of a step's batches.

    Args:
        hooks: The hooks of the run, of which callbacks with `due_in` have some steps only.
        tracing: The callbacks inside the optimizer step.

    Attributes:
        next_step: After how many optimizer steps something acts next.
        next_time: The time, by `time.perf_counter()`, at which something acts next; infinite if nothing waits for one.
        dispatch_end: After how many optimizer steps a dispatch of several has to end: a validation, a limit or a
            callback comes then, or a step that is taken alone.
        quiet_hooks: The hooks of a step in which none of those callbacks acts.
        is_stale: Whether these have to be found again before the next step.
    """

    def __init__(self, hooks: Hooks, tracing: Tracing) -> None:
        self._hooks = hooks
        self._tracing = tracing
        asked = [c for c in hooks.callbacks if overrides(c, "due_in") or overrides(c, "due_in_seconds")]
        self._due_in = {callback: fitting(callback, "due_in", ["step"]) for callback in asked}
        self._waits: list[Wait] = []
        self._step_hooks: dict[tuple[int, ...], StepHooks] = {}  # by the ids of the callbacks that act
        self._next_callback = 0.0
        self._time_callback = math.inf
        self._intervals = list[int]()
        self.is_stale = True
        self.next_step: float = 0
        self.next_time = math.inf
        self.dispatch_end: float = 0
        self.quiet_hooks = StepHooks()

    def forget(self) -> None:
        """Ask all again before the next step: an interval has changed, or steps are undone. Any thread may call it."""
        self.is_stale = True

    def move(self, run: "Run", step: int) -> None:
        """Find what acts next, after so many optimizer steps."""
        now = time.perf_counter()
        max_steps = run.settings.max_steps
        was_stale = self.is_stale
        self.is_stale = False  # first: another thread may set it meanwhile
        if was_stale:
            self._next_callback = 0
            self.quiet_hooks = self._of([])
            self._intervals = [every for _, every in self._tracing.every]
            if run.log_every:
                self._intervals.append(run.log_every)
        if step >= self._next_callback or now >= self._time_callback:
            self._waits = [self._wait_of(callback, step, now) for callback in self._due_in]
            self._next_callback = min((wait.step for wait in self._waits), default=math.inf)
            self._time_callback = min((wait.time for wait in self._waits), default=math.inf)
        self.next_time = self._time_callback
        if run.times.waits or run.times.team.size > 1:
            self.next_time = min(self.next_time, now + run.times.seconds_to_look)
        self.next_step = min(self._next_callback, step + MOST_QUIET)
        self.dispatch_end = self._next_callback
        for _, every in self._tracing.every:
            self.dispatch_end = min(self.dispatch_end, step + every - step % every - 1)
        for every in self._intervals:  # no call: a row may be due in each step
            if (at := step + every - step % every) < self.next_step:
                self.next_step = at
        if run.settings.debug:
            self.next_step = step + 1
            self.dispatch_end = step
        if step < max_steps:
            self.next_step = min(self.next_step, max_steps)
            self.dispatch_end = min(self.dispatch_end, max_steps)
        if run.data.val_every is not None and (batches := run.batches_to_validation) is not None:
            batches += run.position.filled
            self.next_step = min(self.next_step, step - (-batches // run.window.batches))
            # One that comes inside a window is of a step that is taken alone.
            self.dispatch_end = min(self.dispatch_end, step + batches // run.window.batches)

    def _wait_of(self, callback: Callback, step: int, now: float) -> Wait:
        """Return the step and the time at which a callback acts next."""
        never = Wait(callback, math.inf, math.inf)

        def ask() -> Wait:
            steps = self._due_in[callback](step)
            seconds = callback.due_in_seconds()
            if steps is not None and not (isinstance(steps, (int, np.integer)) and steps >= 1):
                raise ArgumentError(
                    f"{type(callback).__name__}.due_in({step}) returned {shown(steps)}. Return a number of optimizer "
                    "steps, at least 1, or None for not before the epoch's end."
                )
            at = math.inf if seconds is None else now + seconds
            return Wait(callback, math.inf if steps is None else step + steps, at)

        return self._hooks.ask(callback, "due_in", ask, never)

    def at(self, step: int) -> StepHooks:
        """Return the hooks of an optimizer step, counted from 1, in which something acts."""
        now = time.perf_counter()
        if step < self._next_callback and now < self._time_callback:
            return self.quiet_hooks
        return self._of([wait.callback for wait in self._waits if step >= wait.step or now >= wait.time])

    def _of(self, acting: list[Callback]) -> StepHooks:
        key = tuple(map(id, acting))
        if key not in self._step_hooks:
            resting = [c for c in self._due_in if id(c) not in key]
            hooks = [self._hooks.bind(name).without([c for c in resting if _is_covered(c, name)]) for name in _NAMES]
            self._step_hooks[key] = StepHooks(*[hook or None for hook in hooks])
        return self._step_hooks[key]


def _is_covered(callback: Callback, name: str) -> bool:
    """Return whether `due_in` speaks for a hook; one that was set on the object or by a subclass comes each step."""
    if name in vars(callback) or "due_in" in vars(callback):
        return name not in vars(callback)
    by, hook = (next(cls for cls in type(callback).__mro__ if x in vars(cls)) for x in ("due_in", name))
    return issubclass(by, hook)
