"""What the loops of one run share, and when something other than a step is due.

`Run` first, with what it counts; then `Tracing`, which runs what callbacks compute inside optimizer steps, and `Due`,
which finds the next step at which anything acts.
"""

import logging
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import Resume, Saving
from jaxlit.checkpoints.places import Place
from jaxlit.control import Control, Position
from jaxlit.core.log import Metric
from jaxlit.core.module import TrainModule
from jaxlit.data.prefetcher import Prefetcher
from jaxlit.distributed.job import same_job
from jaxlit.distributed.team import READS_ARE_COMPARED, fetch
from jaxlit.engine.compiled_program import Bound
from jaxlit.engine.engine import Engine
from jaxlit.errors import ArgumentError, LogError, ModuleError
from jaxlit.loop.hooks import Hook, Hooks, fitting, overrides
from jaxlit.loop.results import TRACED, Results
from jaxlit.loop.run_data import RunData, TimeLimits
from jaxlit.loop.settings import Settings
from jaxlit.reporting.terminal import say
from jaxlit.texts import shown

MOST_QUIET = 1024  # optimizer steps after which the loop looks at all in any case
_WRITTEN = "what hooks have written"
_NAMES = ("on_train_batch_start", "on_train_batch_end", "on_safe_point")


class Start(NamedTuple):
    """Where an optimizer step begins. The loop notes it as a plain tuple, which costs no call."""

    step: int
    batch_idx: int
    data: Any  # the loader's state


@dataclass
class Accumulation:
    """How many batches an optimizer step takes."""

    argument: int  # the Trainer's argument, before any hook
    batches: int  # in this epoch
    argument_at_end: int | None = None  # the argument when the loops ended, which a teardown may set back


@dataclass
class Unchecked:
    """The optimizer steps that are not known to be finite yet."""

    starts: list[Any] = field(default_factory=list)  # as `Start` has them
    warned_of: int = -1  # the bad step
    finite_step: int = 0  # the steps after which the parameters were found to be finite last
    bad: dict[str, Any] | None = None  # the step that training ends before, see `jaxlit.loop.rewind`


@dataclass
class Checkpoints:
    """The checkpoints of a training."""

    resume: Resume | None  # the one that the run begins with
    resumed: bool = False  # training continues from it, and has not begun an epoch since
    written: list[Place | Saving] = field(default_factory=list)  # the newest last
    rollbacks: dict[str, int] = field(default_factory=dict)  # by checkpoint, how often training went back to it

    def resume_of_window(self, epoch: int, step: int) -> Resume | None:
        """Return what the run was resumed from if that is inside the accumulation window of an epoch's optimizer step.

        Only that checkpoint has the gradients of the window's first batches.
        """
        if self.resume is None:
            return None
        position = self.resume.checkpoint.state["position"]
        at = (position["epoch"], position["global_step"])
        return self.resume if position["filled"] and at == (epoch, step) else None


@dataclass(kw_only=True)
class Run:
    """One fit, validate, test or predict: what its loops share."""

    settings: Settings
    control: Control
    hooks: Hooks
    results: Results
    position: Position
    data: RunData
    accumulation: Accumulation
    checkpoints: Checkpoints
    times: TimeLimits
    engine: Engine
    prefetcher: Prefetcher
    unchecked: Unchecked = field(default_factory=Unchecked)
    auto_size: int = 0  # the batches of a dispatch that steps_per_execution="auto" has chosen; 0 before that
    is_safe: bool = True  # a checkpoint may be taken now
    requested: list[Callable[[], object]] = field(default_factory=list)  # checkpoints to write at the next safe point
    part: str = "start"  # of the run's time, see `LoopPart`
    spent: dict[str, float] = field(default_factory=dict)  # seconds of the parts before, without what others time

    def __post_init__(self) -> None:
        self.in_flight = Bound(self.settings.steps_in_flight(self.engine.strategy.mesh.size))
        self.tracing = Tracing(self.hooks, self.log_every if self.data.is_fit else 0)
        self.due = Due(self.hooks, self.tracing)

    @property
    def module(self) -> TrainModule:
        """The module."""
        return self.hooks.module

    @property
    def progress(self) -> tuple[Any, ...]:
        """A value that changes whenever the run moves; any thread may read it."""
        return self.hooks.log.hook, self.position.total_batch_idx, self.position.epoch, self.prefetcher.drawn

    @property
    def place(self) -> str:
        """How far the run is, in words."""
        return place_of(self.hooks, self.position)

    @property
    def log_every(self) -> int:
        """The optimizer steps between rows, 0 for none."""
        every = self.settings.log_every_n_steps
        return self.control.log_every if isinstance(every, str) else every

    def begin(self, part: str) -> str:
        """Count the time from now on to another part, and return the part before."""
        before = self.part
        self.part = part
        elsewhere = sum(f.seconds for _, f in self.hooks.functions()) + self.prefetcher.seconds + self.in_flight.seconds
        seconds = self.times.seconds - elsewhere - sum(self.spent.values())
        self.spent[before] = self.spent.get(before, 0.0) + seconds
        return before

    def settle(self, step: int) -> None:
        """Note that the optimizer steps before `step` were finite: they are not undone."""
        starts = self.unchecked.starts
        position = self.position
        log = self.hooks.log
        starts[:] = [start for start in starts if start[0] >= step]
        if log.epoch or log.window:
            # Steps after `step` may not be done yet: reading what their hooks have logged would wait for them.
            later = (position.global_step - step) * self.accumulation.batches + position.filled
            undone = position.batch_idx - starts[0][1] if starts else min(later, position.batch_idx)
            log.settle(position.total_batch_idx - undone)

    @property
    def done(self) -> bool:
        """Whether training is over."""
        return self.control.interrupted or self.is_complete or (self.control.should_stop and self.may_stop)

    @property
    def is_complete(self) -> bool:
        """Whether training has come to its limit."""
        settings, position = self.settings, self.position
        epochs = math.inf if settings.max_epochs is None else settings.max_epochs
        return position.global_step >= settings.max_steps >= 0 or position.epoch >= epochs

    @property
    def may_stop(self) -> bool:
        """Whether `min_epochs` and `min_steps` allow a stop that was asked for."""
        epochs = self.settings.min_epochs
        steps = self.settings.min_steps
        if self.position.epoch >= epochs and self.position.global_step >= steps:
            return True
        text = "Asked to stop (%s), but min_epochs=%d and min_steps=%d are not reached: training continues."
        self.control.log_once(logging.INFO, text, self.control.stop_reason, epochs, steps)
        return False

    def begin_steps(self, batch: Any) -> None:
        """Compile the programs on the first batch of a run, as it is placed; in each epoch show the metrics again.

        The epoch before shows its values under names that steps and epochs share, such as `loss`.
        """
        part = self.begin("compile")
        self.engine.prepare_training(self.prefetcher.example, batch)
        self.begin(part)
        self.results.show_steps(self.engine.step_table)
        self.hooks.log.check_columns()
        self.tracing.check(self.engine, self.results)

    def meet(self) -> None:
        """Do what one of several processes asks for, if all of them do it now.

        Raises:
            PeerError: Another process has failed.
        """
        processes = self.times.team
        control = self.control
        if processes.size == 1:
            return
        processes.check()
        if READS_ARE_COMPARED.get():
            processes.agree(f"the end of step {self.position.global_step}", None)
        if processes.is_preempted():
            control.take([f"signal {int(signal.SIGTERM)}"])
        control.agree(_WRITTEN, bool(self.engine.state.written))
        control.take(processes.decide(control.asked or ()))
        if control.agree(_WRITTEN, False):
            self.compare_writes()

    def compare_writes(self) -> None:
        """Raise a ProcessError in all processes, which call this together, if what hooks have written differs."""
        state = self.engine.state
        rule = "Hooks must write the same weights and hyperparameters in every process, or none."
        same_job(_WRITTEN, lambda: state.written, rule=rule)
        state.written.clear()

    def print_signal(self) -> None:
        """Print once that a signal ends training here, if one does."""
        if (number := self.control.signal) is not None and "signal" not in self.control.noted:
            self.control.noted.add("signal")
            name, again = ("Ctrl-C", " again") if number == signal.SIGINT else (signal.Signals(number).name, "")
            done = f"{name}: stopping after step {self.position.global_step}."
            say(f"{done} Press Ctrl-C{again} to stop now (no checkpoint).", aside=True)

    @property
    def batches_to_validation(self) -> int | None:
        """Batches until a validation inside the epoch; None if there is none, or if a clock decides."""
        position = self.position
        if self.data.val_every is None or not self.data.validates or self.times.has_interval:
            return None
        count = position.total_batch_idx if self.settings.check_val_every_n_epoch is None else position.batch_idx
        return self.data.val_every - count % self.data.val_every

    def validation_is_due(self, last: bool) -> bool:
        """Return whether to validate after a batch, the `last` of its epoch or not; there are validation batches."""
        every = self.settings.check_val_every_n_epoch
        if every is not None and (self.position.epoch + 1) % every:
            return False
        if self.control.should_stop and self.may_stop:
            return True
        if (by_clock := self.times.validation_is_due(self.control)) is not None:
            return by_clock
        if self.data.val_every is None:
            return last
        return self.batches_to_validation == self.data.val_every  # nothing of the interval is used yet


def place_of(hooks: Hooks, position: Position) -> str:
    """Return how far a run is, in words."""
    hook = hooks.log.hook
    return f"{f'in {hook}, ' if hook else ''}after step {position.global_step} of epoch {position.epoch}"


class Tracing:
    """Runs the optimizer steps at which a `trace_step` fires, and gives its values to `on_trace`.

    Callbacks that name no interval have `log_every`.
    """

    def __init__(self, hooks: Hooks, log_every: int) -> None:
        self._hooks = hooks
        self.every: list[tuple[Callback, int]] = []  # the callbacks with their intervals
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
        # values that `on_trace` has not received yet: (callback, step, values on the device)
        self.seen: list[tuple[Callback, int, dict[str, Any]]] = []

    def check(self, engine: Engine, results: Results) -> None:
        """Refuse before the first step a `trace_step` whose values cannot be logged, and drop one that may fail."""
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
            others = [c for c in self._hooks.callbacks if c is not callback]
            self._hooks.bind("on_trace").without(others)({name: fetch(x) for name, x in values.items()}, step)


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
    """When something acts that does not act in each step, and the hooks of a step's batches."""

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
        self.is_stale = True  # whether all of this must be found again before the next step
        self.next_step: float = 0  # the count of optimizer steps at which something is due next
        # the time, by `time.perf_counter()`, at which something acts next; infinite if nothing waits for one
        self.next_time = math.inf
        # the count of optimizer steps that a dispatch of several batches must not pass: a validation, a limit, a
        # callback or a traced step comes there
        self.dispatch_end: float = 0
        self.quiet_hooks = StepHooks()  # the hooks of a step in which no callback with `due_in` acts
        self.is_quiet = False  # whether nothing acts in such a step

    def forget(self) -> None:
        """Ask all again before the next step: an interval has changed, or steps are undone. Any thread may call it."""
        self.is_stale = True

    def find_next(self, run: "Run", step: int) -> None:
        """Find what is due after `step` optimizer steps."""
        now = time.perf_counter()
        max_steps = run.settings.max_steps
        was_stale = self.is_stale
        self.is_stale = False  # first: another thread may set it meanwhile
        if was_stale:
            self._next_callback = 0
            self.quiet_hooks = self._of([])
            self.is_quiet = self.quiet_hooks == (None, None, None)
            self._intervals = [every for _, every in self._tracing.every]
            self._intervals += [run.log_every] * (run.log_every > 0)
            run.engine.log_every(run.log_every, step, after_row=step == run.results.steps_at_row)
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
        for limit in (max_steps, run.settings.min_steps):  # at both, training may end
            if step < limit:
                self.next_step = min(self.next_step, limit)
                self.dispatch_end = min(self.dispatch_end, limit)
        if run.data.val_every is not None and (batches := run.batches_to_validation) is not None:
            # From the start of the current window; rounded up, as a validation may come inside an optimizer step.
            batches += run.position.filled
            self.next_step = min(self.next_step, step - (-batches // run.accumulation.batches))
            # A validation inside a window: its step is dispatched alone.
            self.dispatch_end = min(self.dispatch_end, step + batches // run.accumulation.batches)

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
