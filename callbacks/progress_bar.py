"""`ProgressBar`: a header, a live line for each epoch, and closing lines.

`_BestSoFar` marks the best epochs. `closing_lines` say how a training ended, where its files are, and how to continue.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback, Traits
from jaxlit.callbacks.logger import Logger
from jaxlit.callbacks.monitor import monitored, saved_checkpoints
from jaxlit.callbacks.profiler import Profiler
from jaxlit.callbacks.run_report import RunReport
from jaxlit.checkpoints.files import FOLDER, step_of
from jaxlit.checkpoints.places import place_of
from jaxlit.core.module import TrainModule
from jaxlit.reporting.terminal import TerminalLine, clock, epoch_line, is_terminal, join, live_line, say, short_path
from jaxlit.version import __version__

if TYPE_CHECKING:
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")
_STAGES = {"fit": "validat", "validate": "validat", "test": "test", "predict": "predict"}  # with "ing" and "ed"
_BY_PATH = "the path of a checkpoint as resume="  # after a stop
_MIN_COMPILE_SECONDS = 0.005  # of a program that is printed


class ProgressBar(Callback):
    """Show a header, a live line for each epoch and closing lines; plain lines without a terminal and in notebooks.

    The line shows the metrics logged with `prog_bar=True`, and the training loss unless `training_step` logs a metric
    with "loss" in its name so: during an epoch the values of the newest row, at its end the means. An epoch is marked
    if its monitored metric is the best so far; that is the metric of the first ModelCheckpoint, EarlyStopping or the
    like. The programs of the first step are printed with the seconds of their compilation.

    Args:
        refresh_rate: The most refreshes a second, above 0 and at most 10.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=[jl.callbacks.ProgressBar(refresh_rate=2)])
    """

    role = "progress_bar"

    def conflict_with(self, other: Traits) -> str | None:
        """Return that only one bar can draw."""
        if other.role != self.role:
            return None
        return f"The callbacks hold two progress bars, {type(other).__name__} and {type(self).__name__}. Leave one out."

    runs_last = True

    def __init__(self, refresh_rate: float = 10.0) -> None:
        check.positive("refresh_rate", refresh_rate, owner="ProgressBar")
        check.require(refresh_rate <= 10, "refresh_rate", refresh_rate, "takes at most 10", owner="ProgressBar")
        self._interval = 1 / refresh_rate
        self._line: TerminalLine | None = None
        self._header = ""
        self._reset("fit", active=False)

    def _reset(self, stage: str, *, active: bool) -> None:
        self._stage, self._active, self._trained = stage, active, False
        self._start = time.monotonic()
        # When to draw next; never if no line can change in place.
        self._next = self._start if active and is_terminal() else math.inf
        self._error: BaseException | None = None
        self._best = _BestSoFar()
        self._begin(0)

    def setup(self, trainer: "Trainer", module: TrainModule, stage: str) -> None:
        """Print the header line."""
        self._reset(stage, active=trainer.is_global_zero)
        if stage != "fit":
            return
        devices, used = jax.devices(), trainer.strategy.mesh.size
        writes, root = trainer.loggers or trainer.checkpoint_callbacks, trainer.default_root_dir
        parts = [
            f"jaxlit {__version__}",
            f"jax {jax.__version__}",
            f"{used}{'' if used == len(devices) else f' of {len(devices)}'} x {devices[0].device_kind}",
            trainer.strategy.describe().split("\n")[0],
            f"run {f'{root} in ' if check.is_url(root) else ''}{short_path(trainer.run_dir)}" if writes else "",
        ]
        if (header := join(parts)) != self._header:  # a second fit prints nothing new
            self._print(header)
        self._header = header

    def on_fit_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Take the best value of a resumed training."""
        self._best.recall(trainer)

    def on_train_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Begin, in the middle of an epoch if training resumes there."""
        self._begin(trainer.batches_done)

    def on_train_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Give the terminal back."""
        self._close()

    def on_fit_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Print the closing lines: the checkpoints are written by now."""
        self._conclude(trainer)

    def on_exception(self, trainer: "Trainer", module: TrainModule, exception: BaseException) -> None:
        """Give the terminal back before other callbacks print."""
        self._close()
        self._error = exception

    def teardown(self, trainer: "Trainer", module: TrainModule, stage: str) -> None:
        """Give the terminal back, and print the closing lines after an error."""
        self._close()
        if self._error is not None and stage == "fit" and trainer.global_step:
            self._conclude(trainer)

    def on_train_epoch_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Begin the epoch's line."""
        self._begin(0)
        self._compiling_before = _compiling(trainer)
        if self._last >= self._next:
            self._draw(trainer, "" if self._trained else "compiling ...")

    def due_in(self, step: int) -> int | None:
        """Return None: no step is due by its number."""

    def due_in_seconds(self) -> float | None:
        """Return the seconds to the next refresh; the first dispatch is due, to print what was compiled."""
        return self._next - time.monotonic() if self._trained else -math.inf

    def on_train_batch_end(
        self, trainer: "Trainer", module: TrainModule, outputs: Mapping[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Print the programs that the first step compiled; draw when it is time."""
        self._last = time.monotonic()
        if not self._trained:
            self._trained = True
            self._print_compiled(trainer)
        if self._last >= self._next:
            self._draw(trainer)

    def on_log(self, trainer: "Trainer", values: dict[str, float], step: int) -> None:
        """Take the values to show."""
        self._shown |= values

    def on_train_epoch_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Print the epoch's line."""
        self._shown, self._last = dict(trainer.progress_bar_metrics), time.monotonic()
        # Last in the line, so that they do not move the columns.
        marks = [self._best.mark(trainer), self._waiting(trainer)]
        numbers = [*self._numbers(trainer), *marks]
        self._close(epoch_line(_epoch(trainer), trainer.batches_done, trainer.num_training_batches, numbers))

    def on_validation_start(self, trainer: "Trainer", module: TrainModule) -> None:
        """Stop the clock of the rate: the device has finished its steps."""
        if self._stage == "fit" and not trainer.sanity_checking:
            self._last = time.monotonic()

    def _on_evaluation_batch_end(
        self, trainer: "Trainer", module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Draw when it is time."""
        if time.monotonic() >= self._next and not trainer.sanity_checking:
            most = trainer.num_val_batches[dataloader_idx] if self._stage == "fit" else math.inf
            total = f"/{most}" if most < math.inf else ""
            self._draw(trainer, f"{_STAGES[self._stage]}ing {batch_idx + 1}{total}")

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _on_evaluation_batch_end

    def on_validation_end(self, trainer: "Trainer", module: TrainModule) -> None:
        """Print the metrics of an evaluation, or let the clock of the rate continue."""
        if self._stage != "fit":
            self._print_compiled(trainer)
            metrics = "".join(f"  {name} {value:.4g}" for name, value in trainer.callback_metrics.items())
            self._close(f"{_STAGES[self._stage]}ed{metrics}" if trainer.verbose else None)
        elif not trainer.sanity_checking:
            now = time.monotonic()
            self._epoch_start, self._last = self._epoch_start + now - self._last, now

    on_test_end = on_validation_end

    def _begin(self, first: int) -> None:
        self._first, self._epoch_start = first, time.monotonic()  # a resume may begin in the middle of an epoch
        self._compiling_before = 0.0
        self._shown: dict[str, float] = {}
        self._last = self._epoch_start  # when the newest batch was done, as far as known

    def _draw(self, trainer: "Trainer", activity: str = "") -> None:
        """Draw the live line; if the terminal is gone, draw no more and continue with training."""
        self._next = time.monotonic() + self._interval
        text = activity
        if self._stage == "fit":
            parts = [*self._numbers(trainer, live=True), self._waiting(trainer)]
            numbers = activity or "  ".join(filter(None, parts))
            text = live_line(_epoch(trainer), trainer.batches_done, trainer.num_training_batches, numbers)

        def draw() -> None:
            if self._line is None:
                self._line = TerminalLine()
            self._line.show(text)

        self._safely(draw)

    def _close(self, text: str | None = None) -> None:
        """Remove the live line, and print a text."""
        line, self._line = self._line, None
        if line is not None:
            self._safely(line.close)
        if text is not None:
            self._print(text)

    def _numbers(self, trainer: "Trainer", *, live: bool = False) -> list[str]:
        """Return count, rate and metrics, with the same widths in all epochs."""
        total, done, seconds = trainer.num_training_batches, trainer.batches_done, self._seconds(trainer)
        rate = (done - self._first) / seconds if seconds > 0 else 0.0
        speed = f"{rate / 1000:.1f}k" if rate >= 999.5 else f"{rate:#.3g}".rstrip(".")
        parts = [f"{done}" + (f"/{total}" if total != math.inf else ""), f"{speed:>4} it/s" if rate else " " * 9]
        if live and rate and total != math.inf and (remaining := (total - done) / rate) >= 10:
            parts.append(f"{clock(remaining)} left")
        names = list(trainer.progress_bar_metrics)
        shown = {name: value for name, value in self._shown.items() if name in names}
        if (loss := trainer.loss) is not None:  # validation_step may log another loss
            shown = {"train_loss" if "loss" in names else "loss": loss, **shown}
        # As wide as the longest number with four significant digits, such as -1.234e-05.
        return parts + [f"{name} {value:<10.4g}" for name, value in shown.items()]

    def _seconds(self, trainer: "Trainer") -> float:
        """Return the seconds of the epoch's steps, without validations and compiling."""
        return self._last - self._epoch_start - (_compiling(trainer) - self._compiling_before)

    def _waiting(self, trainer: "Trainer") -> str:
        seconds, waited = self._seconds(trainer), trainer.data_wait
        # Less than a tenth of the time, or than half a second, needs no faster loader.
        is_slow = waited >= 0.5 and waited >= 0.1 * seconds > 0
        return f"waits for data {min(waited / seconds, 1.0):.0%}" if is_slow else ""

    def _print_compiled(self, trainer: "Trainer") -> None:
        """Print the seconds of each program that was compiled so far."""
        seconds = {name: x for name, x in trainer.compile_seconds.items() if x >= _MIN_COMPILE_SECONDS}
        if seconds:
            programs = ", ".join(f"{name} in {clock(x)}" for name, x in seconds.items())
            self._close(join(f"compiled {programs}".split(), between=" "))

    def _conclude(self, trainer: "Trainer") -> None:
        self._best.recall(trainer)  # a checkpoint in the middle of an epoch may be better
        seconds = time.monotonic() - self._start
        self._print(closing_lines(trainer, seconds=seconds, error=self._error, best=self._best.describe()))

    def _print(self, line: str) -> None:
        if self._active:
            say(line)

    def _safely(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError):
            line, self._line = self._line, None
            self._active, self._next = False, math.inf
            with contextlib.suppress(OSError, ValueError):  # it still restores sys.stdout
                if line is not None:
                    line.close()


def _epoch(trainer: "Trainer") -> str:
    epoch, last = trainer.current_epoch + 1, trainer.max_epochs
    return f"epoch {epoch}" if last is None else f"epoch {epoch:>{len(str(last))}}/{last}"


def _compiling(trainer: "Trainer") -> float:
    """Return the seconds that the steps of training have spent on compiling."""
    return sum(s for name, s in trainer.compile_seconds.items() if name.startswith(("train_step", "micro_step")))


class _BestSoFar:
    """The best value of the metric of the first ModelCheckpoint, EarlyStopping or the like."""

    def __init__(self) -> None:
        self._name, self._mode = "", "min"  # "" if nothing is monitored
        self._best: tuple[float, int] | None = None  # the value, and the optimizer steps until then, 0 if unknown

    def recall(self, trainer: "Trainer") -> None:
        """Take the best value that a callback knows: from before a resume, or from the middle of an epoch."""
        self._name, self._mode = next(iter(monitored(trainer).items()), ("", "min"))
        for callback in (*trainer.checkpoint_callbacks, *trainer.callbacks):
            score = getattr(callback, "best_model_score", getattr(callback, "best_score", None))
            if getattr(callback, "monitor", None) == self._name and score is not None and math.isfinite(score):
                self._update(score, step_of(Path(getattr(callback, "best_model_path", ""))) or 0)
                return

    def mark(self, trainer: "Trainer") -> str:
        """Take the newest value, and return an epoch's mark, or spaces; "" if nothing is monitored."""
        metrics = trainer.callback_metrics
        is_best = self._name in metrics and self._update(float(metrics[self._name]), trainer.global_step)
        return f"{'* best' if is_best else '':6}" if self._name else ""

    def describe(self) -> str:
        """Return the best value in words; "" if there is none."""
        if self._best is None:
            return ""
        value, step = self._best
        return f"best {self._name} {value:.4g}" + (f" at step {step}" if step else "")

    def _update(self, value: float, step: int) -> bool:
        sign = 1 if self._mode == "min" else -1
        if math.isnan(value) or (self._best is not None and sign * value >= sign * self._best[0]):
            return False
        self._best = value, step
        return True


def closing_lines(trainer: "Trainer", *, seconds: float, error: BaseException | None, best: str) -> str:
    """Return the last lines of a training: how it ended, `best` in words, where its files are, how to continue."""
    epoch, compiling = trainer.current_epoch, sum(trainer.compile_seconds.values())
    duration = clock(seconds) + (f" ({clock(compiling)} compiling)" if compiling >= 0.05 else "")
    ended = f"done {_count(epoch, 'epoch')}"
    if error is not None:
        ended = f"ended by {type(error).__name__} in epoch {epoch + 1}"
    elif trainer.interrupted:
        ended = f"interrupted in epoch {max(epoch, 1)}"
    lines = [join([ended, _count(trainer.global_step, "step"), duration, best, trainer.stop_reason or ""])]
    saved = saved_checkpoints(trainer)
    checkpoints = [f"{short_path(x.path)} ({', '.join(x.marks)})" for x in saved if x.marks]
    reports, loggers, traces = (
        [_location(callback) for callback in trainer.callbacks if isinstance(callback, kind)]
        for kind in (RunReport, Logger, Profiler)
    )
    folders = [x for x in loggers if x is not None and Path(x).is_dir()]  # of event files, which another program shows
    reports += [x for x in loggers if x not in folders]
    locations = {"checkpoint": checkpoints, "report": reports, "logs": folders, "trace": traces}
    for name, paths in locations.items():
        if parts := [x if name == "checkpoint" else str(short_path(x)) for x in paths if x]:
            lines.append(join([f"  {name:<10}  {parts[0]}", *parts[1:]], indent=" " * 14))
    if checkpoints and (resume := _resume(trainer, is_cut=error is not None or trainer.interrupted)):
        lines.append(f"  {'resume':<10}  {resume}")
    return "\n".join(lines)


def _location(callback: Any) -> str | None:
    """Return the location of a callback's files; None if the callback raises, which may not end training."""
    try:
        return callback.location
    except Exception as error:
        if not callback.may_fail:
            raise
        _logger.warning("%s.location failed: %r.", type(callback).__name__, error)
        return None


def _resume(trainer: "Trainer", *, is_cut: bool) -> str:
    """Return how to continue, with what ended the training changed; "" if only weights were saved."""
    callbacks = [c for c in trainer.checkpoint_callbacks if not getattr(c, "save_weights_only", False)]
    if not (paths := [place_of(callback.last_model_path) for callback in callbacks if callback.last_model_path]):
        return ""
    ends = {  # an epoch that max_steps has cut counts for `current_epoch`
        "a larger max_epochs": trainer.max_epochs == trainer.current_epoch and not trainer.batches_done,
        "a larger max_steps": trainer.max_steps == trainer.global_step,
        _BY_PATH: trainer.is_finished,
    }
    changes = [change for change, was_reached in ends.items() if was_reached and not is_cut]
    if trainer.resume == "auto":
        return "run the same command" + (f" with {' and '.join(changes)}" if changes else " again")
    in_run = any(path.parent == trainer.saver.root / FOLDER for path in paths)
    place, root = short_path(trainer.run_dir if in_run else paths[0]), trainer.default_root_dir
    arguments = f"resume={str(place)!r}"
    if check.is_url(root):
        arguments = f"default_root_dir={root!r}, resume={root if _BY_PATH in changes else 'auto'!r}"
    # Not as a call: the Trainer needs its other arguments again.
    return " and ".join([f"pass {arguments}", *(x for x in changes if x != _BY_PATH)])


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
