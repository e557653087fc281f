"""When rows, traces and callbacks act that do not act in each step: the loop compares one number."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError
from jaxlit.loop.hooks import Hook, Hooks, fitting, overrides
from jaxlit.loop.tracing import Tracing
from jaxlit.shown import shown

_NAMES = ("on_train_batch_start", "on_train_batch_end", "on_safe_point")
StepHooks: TypeAlias = tuple[Hook | None, Hook | None, Hook | None]  # in that order; None without functions


class Due:
    """When something acts that does not act in each step, and the hooks of a step's batches.

    Args:
        hooks: The hooks of the run, of which callbacks with `due_in` have some steps only.
        tracing: The callbacks inside the optimizer step.

    Attributes:
        next: After how many optimizer steps something acts next; infinite if nothing does, 0 before it was asked.
        each: The hooks of a step in which none of those callbacks acts.
    """

    def __init__(self, hooks: Hooks, tracing: Tracing) -> None:
        self._hooks, self._tracing = hooks, tracing
        asked = [c for c in hooks.callbacks if overrides(c, "due_in")]
        self._asked = {c: partial(self._wait_of, c, fitting(c, "due_in", ["step"])) for c in asked}
        self._steps: list[tuple[Callback, int]] = []
        self._made: dict[tuple[int, ...], StepHooks] = {}  # by the ids of the callbacks that act
        self._intervals, self._next_callback = list[int](), 0.0
        self.next: float = 0
        self.each: StepHooks = (None, None, None)

    def forget(self) -> None:
        """Ask all again before the next step: an interval has changed, or steps are undone."""
        self.next = 0

    def move(self, step: int) -> None:
        """Find what acts next, after so many optimizer steps."""
        if not self.next:
            every = self._hooks.trainer.log_every_n_steps
            self._intervals = [*self._tracing.intervals, *([every] if every else [])]
            self._next_callback, self.each = 0, self._of([])
        if step >= self._next_callback:
            ask = self._hooks.ask
            waits = [(c, ask(c, "due_in", partial(wait_of, step))) for c, wait_of in self._asked.items()]
            self._steps = [(c, step + wait) for c, wait in waits if wait is not None]
            self._next_callback = min((at for _, at in self._steps), default=math.inf)
        self.next = self._next_callback
        for every in self._intervals:  # no call: a row may be due in each step
            if (at := step + every - step % every) < self.next:
                self.next = at

    @staticmethod
    def _wait_of(callback: Callback, due_in: Callable[[int], Any], step: int) -> Any:
        if (wait := due_in(step)) is None or (isinstance(wait, (int, np.integer)) and wait >= 1):
            return wait
        raise ArgumentError(
            f"{type(callback).__name__}.due_in({step}) returned {shown(wait)}. Return a number of optimizer steps, at "
            "least 1, or None for not before the epoch's end."
        )

    def at(self, step: int) -> StepHooks:
        """Return the hooks of an optimizer step, counted from 1."""
        return self.each if step < self._next_callback else self._of([c for c, at in self._steps if at <= step])

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
