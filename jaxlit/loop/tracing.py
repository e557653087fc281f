"""Callbacks that compute something inside the optimizer step: it is compiled into the steps on which they fire."""

from functools import partial
from typing import Any

import jax

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.core.log import Metric
from jaxlit.distributed.exchange import fetch
from jaxlit.engine.engine import Engine
from jaxlit.errors import LogError, ModuleError
from jaxlit.loop.hooks import Hooks, fitting, overrides
from jaxlit.loop.host_sums import TRACED
from jaxlit.loop.results import Results
from jaxlit.shown import shown


class Tracing:
    """Runs the optimizer steps at which a `trace_step` fires, and gives its values to `on_trace`.

    Args:
        hooks: The hooks; each callback that overrides `trace_step` takes part.
        log_every: The interval of those that name none.

    Attributes:
        every: The callbacks with their intervals.
        seen: Values that `on_trace` has not received yet: (callback, step, values on the device).
    """

    def __init__(self, hooks: Hooks, log_every: int) -> None:
        self._hooks = hooks
        self.every: list[tuple[Callback, int]] = []
        for callback in hooks.callbacks:
            if not overrides(callback, "trace_step"):
                continue
            every_n_steps = callback.trace_every_n_steps
            owner = type(callback).__name__
            every = check.integer("trace_every_n_steps", every_n_steps, low=0, also=(None,), owner=owner)
            if every := log_every if every is None else every:
                fitting(callback, "trace_step")
                self.every.append((callback, every))
        self._checked = False
        self.seen: list[tuple[Callback, int, dict[str, Any]]] = []

    def check(self, engine: Engine, results: Results) -> None:
        """Refuse before the first step a `trace_step` whose values cannot be logged, and drop one that may fail.

        Raises:
            ModuleError: It returns no dict of arrays.
            LogError: A scalar's name is taken.
        """
        state = engine.state.unflatten()
        failed = object()
        names = list[str]()
        for callback, every in [] if self._checked else list(self.every):
            # By shapes alone: gradients and updates have those of the parameters, and nothing is compiled.
            trace = partial(jax.eval_shape, callback.trace_step, *[state.params] * 3, state.opt_state)
            shapes = self._hooks.ask(callback, TRACED, trace, failed)
            if shapes is failed:
                self.every.remove((callback, every))
            elif not isinstance(shapes, dict) or not all(hasattr(x, "shape") for x in shapes.values()):
                raise ModuleError(
                    f"{type(callback).__name__}.{TRACED} must return a dict of names and arrays, got {shown(shapes)}."
                )
            else:
                names += [name for name, x in shapes.items() if not x.shape]
        for name in () if self._checked else names:
            if results.has_column(Metric(name)) or names.count(name) > 1:
                raise LogError(
                    f"A trace_step returns {name!r}, which something else logs in the same step. Rename one."
                )
        self._checked = True

    def step(self, engine: Engine, batch: Any, step: int) -> Any:
        """Take an optimizer step, counted from 0: scalars go to its row, and all values to `on_trace`."""
        # One program for each set of callbacks that come due together: few, as intervals repeat.
        due = [callback for callback, every in self.every if (step + 1) % every == 0]
        if not due:
            return engine.train_step(batch)
        logs, loss, outputs, seen = engine.traced_step(tuple(callback.trace_step for callback in due), batch)
        for callback, values in zip(due, seen, strict=True):
            self._hooks.log.add_traced({name: x for name, x in values.items() if not x.ndim})
            if overrides(callback, "on_trace"):
                self.seen.append((callback, step, values))
        return logs, loss, outputs

    def forget(self, step: int) -> None:
        """Drop the values of a step and of those after it, which are undone."""
        self.seen = [x for x in self.seen if x[1] < step]

    def deliver(self, until: int | None = None) -> None:
        """Call `on_trace` with the values up to a step, or with all of them; waits for the device."""
        # Removed before a hook runs: a checkpoint that the hook writes must not deliver them again.
        seen = [x for x in self.seen if until is None or x[1] <= until]
        self.seen = self.seen[len(seen) :]
        for callback, step, values in seen:
            self._hooks.call_one(callback, "on_trace", {name: fetch(x) for name, x in values.items()}, step)
