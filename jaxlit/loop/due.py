"""Which callbacks act in a step: those with `due_in` say when they do, and the loop compares one number."""

import math
from functools import partial
from typing import TypeAlias

from jaxlit.callbacks.base import Callback
from jaxlit.loop.hooks import Hook, Hooks, overrides

_NAMES = ("on_train_batch_start", "on_train_batch_end", "on_safe_point")
StepHooks: TypeAlias = tuple[Hook | None, Hook | None, Hook | None]  # in that order; None without functions


class Due:
    """The hooks of a step's batches, with those of callbacks that act at some steps only.

    Args:
        hooks: The hooks of the run.

    Attributes:
        next: The number of optimizer steps after which one of those callbacks acts next; infinite if none does.
        each: The hooks of a step in which none of them acts.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks, self.next = hooks, math.inf
        self._asked = [c for c in hooks.callbacks if overrides(c, "due_in")]
        self._steps: list[tuple[Callback, int]] = []
        self.each = self._of([])

    def seek(self, step: int) -> None:
        """Ask the callbacks when they act next, after so many optimizer steps."""
        ask = self._hooks.ask
        waits = [(c, ask(c, "due_in", partial(c.due_in, step))) for c in self._asked]
        self._steps = [(c, step + max(wait, 1)) for c, wait in waits if wait is not None]
        self.next = min((at for _, at in self._steps), default=math.inf)

    def at(self, step: int) -> StepHooks:
        """Return the hooks of an optimizer step, counted from 1."""
        return self.each if step < self.next else self._of([c for c, at in self._steps if at <= step])

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
