"""What a step has besides its batch: rows, traces and callbacks say when they act, and the loop compares one number."""

import math
from functools import partial
from typing import TypeAlias

from jaxlit.callbacks.base import Callback
from jaxlit.loop.hooks import Hook, Hooks, overrides
from jaxlit.loop.tracing import Tracing

_NAMES = ("on_train_batch_start", "on_train_batch_end", "on_safe_point")
StepHooks: TypeAlias = tuple[Hook | None, Hook | None, Hook | None]  # in that order; None without functions


class Due:
    """When something acts that does not act in each step, and the hooks of a step's batches.

    Args:
        hooks: The hooks of the run, of which callbacks with `due_in` have some steps only.
        tracing: The callbacks inside the optimizer step.

    Attributes:
        next: After how many optimizer steps something acts next; infinite if nothing does.
        each: The hooks of a step in which none of those callbacks acts.
    """

    def __init__(self, hooks: Hooks, tracing: Tracing) -> None:
        self._hooks, self._tracing, self.next = hooks, tracing, math.inf
        self._asked = [c for c in hooks.callbacks if overrides(c, "due_in")]
        self._steps: list[tuple[Callback, int]] = []
        self._intervals, self._asked_at = list[int](), math.inf
        self.each = self._of([])

    def seek(self, step: int) -> None:
        """Ask anew what acts next, after so many optimizer steps: an interval may have changed, or steps are undone."""
        every = self._hooks.trainer.log_every_n_steps
        self._intervals = [*self._tracing.intervals, *([every] if every else [])]
        self._asked_at = step
        self.move(step)

    def move(self, step: int) -> None:
        """Find what acts next, after a step in which something acted."""
        if step >= self._asked_at:
            ask = self._hooks.ask
            waits = [(c, ask(c, "due_in", partial(c.due_in, step))) for c in self._asked]
            self._steps = [(c, step + max(wait, 1)) for c, wait in waits if wait is not None]
            self._asked_at = min((at for _, at in self._steps), default=math.inf)
        self.next = self._asked_at
        for every in self._intervals:  # no call: a row may be due in each step
            if (at := step + every - step % every) < self.next:
                self.next = at

    def at(self, step: int) -> StepHooks:
        """Return the hooks of an optimizer step, counted from 1."""
        return self.each if step < self._asked_at else self._of([c for c, at in self._steps if at <= step])

    def _of(self, acting: list[Callback]) -> StepHooks:
        resting = [c for c in self._asked if all(c is not x for x in acting)]
        made = []
        for name in _NAMES:
            left_out = [c for c in resting if _depth(c, name) >= _depth(c, "due_in")]
            made.append(self._hooks.bind(name).without(left_out) or None)
        return tuple(made)  # type: ignore[return-value]


def _depth(callback: Callback, name: str) -> int:
    """Return how far up its bases a callback's method is from: one that a subclass overrides comes each step."""
    if name in vars(callback):
        return -1
    return next(i for i, cls in enumerate(type(callback).__mro__) if name in vars(cls))
