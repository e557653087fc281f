"""One run of the loops: what they share, and when it is over."""

import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from jaxlit.checkpoints.position import Position
from jaxlit.checkpoints.writing import Saving
from jaxlit.control import Control
from jaxlit.core.module import TrainModule
from jaxlit.data.prefetcher import Prefetcher
from jaxlit.distributed.exchange import READS_ARE_COMPARED
from jaxlit.engine.engine import Engine
from jaxlit.engine.in_flight import Bound
from jaxlit.loop.due import Due
from jaxlit.loop.hooks import Hooks
from jaxlit.loop.restore import Resume
from jaxlit.loop.results import Results
from jaxlit.loop.run_data import RunData
from jaxlit.loop.settings import Settings
from jaxlit.loop.time_limits import TimeLimits
from jaxlit.loop.tracing import Tracing
from jaxlit.reporting.terminal import say


class Start(NamedTuple):
    """Where an optimizer step begins. The loop notes it as a plain tuple, which costs no call."""

    step: int
    batch_idx: int
    data: Any  # the loader's state


@dataclass
class Window:
    """How many batches an optimizer step takes."""

    argument: int  # the Trainer's argument, before any hook
    batches: int  # in this epoch
    argument_at_end: int | None = None  # the argument when the loops ended, which a teardown may set back

    @classmethod
    def of(cls, settings: Settings) -> "Window":
        """Return the window of a run that begins."""
        return cls(settings.accumulate_grad_batches, settings.accumulate_grad_batches)


@dataclass
class Unchecked:
    """The optimizer steps that are not known to be finite yet."""

    starts: list[Any] = field(default_factory=list)  # as `Start` has them
    warned_of: int = -1  # the bad step
    bad: dict[str, Any] | None = None  # the step that training ends before, see `jaxlit.loop.rewind`


@dataclass
class Checkpoints:
    """The checkpoints of a training."""

    resume: Resume | None  # the one that the run begins with
    resumed: bool = False  # training continues from it, and has not begun an epoch since
    written: list[Path | Saving] = field(default_factory=list)  # the newest last
    rollbacks: dict[str, int] = field(default_factory=dict)  # by checkpoint, how often training went back to it

    def resume_of_window(self, step: int) -> Resume | None:
        """Return what the run was resumed from if that is inside the accumulation window of an optimizer step.

        Only that checkpoint has the gradients of the window's first batches.
        """
        if self.resume is None:
            return None
        position = self.resume.checkpoint.state["position"]
        return self.resume if position["filled"] and position["global_step"] == step else None


@dataclass(kw_only=True)
class Run:
    """One fit, validate, test or predict: what its loops share."""

    settings: Settings
    control: Control
    hooks: Hooks
    results: Results
    position: Position
    data: RunData
    window: Window
    checkpoints: Checkpoints
    times: TimeLimits
    engine: Engine
    prefetcher: Prefetcher
    unchecked: Unchecked = field(default_factory=Unchecked)
    is_safe: bool = True  # a checkpoint may be taken now
    requested: list[Callable[[], None]] = field(default_factory=list)  # checkpoints to write at the next safe point
    part: str = "start"  # of the run's time, see `LoopPart`
    spent: dict[str, float] = field(default_factory=dict)  # seconds of the parts before, without what others time

    def __post_init__(self) -> None:
        self.in_flight = Bound(self.settings.steps_in_flight(self.engine.strategy.mesh.size))
        self.tracing = Tracing(self.hooks, self.log_every if self.data.is_fit else 0)
        self.due = Due(self.hooks, self.tracing)
        self._counted = 0.0  # seconds that are in a part

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
        seconds = self.times.seconds - elsewhere - self._counted
        self.spent[before] = self.spent.get(before, 0.0) + seconds
        self._counted += seconds
        return before

    def settle(self, step: int) -> None:
        """Note that the optimizer steps before `step` were finite: they are not undone."""
        starts = self.unchecked.starts
        position = self.position
        log = self.hooks.log
        starts[:] = [start for start in starts if start[0] >= step]
        if log.epoch or log.window:
            undone = position.batch_idx - starts[0][1] if starts else 0
            log.settle(position.total_batch_idx - undone)

    @property
    def done(self) -> bool:
        """Whether training is over."""
        settings = self.settings
        control = self.control
        position = self.position
        return (
            control.interrupted
            or position.global_step >= settings.max_steps >= 0
            or (settings.max_epochs is not None and position.epoch >= settings.max_epochs)
            or (control.should_stop and self.may_stop)
        )

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

    def begin_steps(self) -> None:
        """Compile the programs on the first batch of a run; in each epoch show the steps' metrics again.

        The epoch before shows its values under names that steps and epochs share, such as `loss`.
        """
        part = self.begin("compile")
        self.engine.prepare_training(self.prefetcher.example)
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
        control.take(processes.decide(control.asked or ()))

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
        every = self.settings.check_val_every_n_epoch
        if self.data.val_every is None or not self.data.validates or self.times.has_interval:
            return None
        count = position.total_batch_idx if every is None else position.batch_idx
        return self.data.val_every - count % self.data.val_every

    def validation_is_due(self, last: bool) -> bool:
        """Return whether to validate after a batch, where there is something to validate on.

        Args:
            last: Whether it is the last batch of the epoch.
        """
        position = self.position
        every = self.settings.check_val_every_n_epoch
        if every is not None and (position.epoch + 1) % every:
            return False
        if self.control.should_stop and self.may_stop:
            return True
        if (by_clock := self.times.validation_is_due(self.control)) is not None:
            return by_clock
        if self.data.val_every is None:
            return last
        return self.batches_to_validation == self.data.val_every


def place_of(hooks: Hooks, position: Position) -> str:
    """Return how far a run is, in words."""
    hook = hooks.log.hook
    return f"{f'in {hook}, ' if hook else ''}after step {position.global_step} of epoch {position.epoch}"
