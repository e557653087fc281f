"""A progress bar in the terminal."""

import contextlib
import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.best_so_far import BestSoFar
from jaxlit.callbacks.closing_lines import closing_lines
from jaxlit.callbacks.traits import Traits
from jaxlit.core.replica import num_rows
from jaxlit.reporting.epoch_line import epoch_line, live_line, number
from jaxlit.reporting.terminal import (
    NotebookLine,
    TerminalLine,
    clock,
    in_notebook,
    is_terminal,
    join,
    say,
    short_path,
    show_picture,
)
from jaxlit.version import __version__

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


_EVALUATION = {"fit": "validat", "validate": "validat", "test": "test"}  # with "ing" and "ed"


class ProgressBar(Callback):
    """Show a header, a live line for each epoch and closing lines; without a terminal plain lines.

    The line shows the metrics logged with `prog_bar=True`, and the training loss unless `training_step` logs a metric
    with "loss" in its name so: during an epoch those of the newest row, at its end the means. An epoch is marked if its
    monitored metric is the best so far; that is the metric of the first ModelCheckpoint, EarlyStopping or the like that
    monitors one. Compiled programs are printed with their seconds, at the start and for a batch of another size. A
    notebook shows the curves of all metrics at the end of a fit, if matplotlib is installed.

    Args:
        refresh_rate: The most refreshes a second, above 0 and at most 10.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=[jl.callbacks.ProgressBar(refresh_rate=2)])
    """

    role = "progress_bar"
    runs_last = True

    def conflict_with(self, other: Traits) -> str | None:
        """Return that only one can draw."""
        if other.role != self.role:
            return None
        return f"The callbacks hold two {type(self).__name__}s, and only one can draw. Leave one of them out."

    def __init__(self, refresh_rate: float = 10.0) -> None:
        rule = "takes a number above 0, at most 10"
        self._interval = 1 / check.positive("refresh_rate", refresh_rate, owner="ProgressBar", rule=rule)
        check.require(refresh_rate <= 10, "refresh_rate", refresh_rate, rule, owner="ProgressBar")
        self._line: TerminalLine | NotebookLine | None = None
        self._next = math.inf  # when to draw next; never where nothing can change in place
        self._active, self._compiled, self._stage = False, False, "fit"
        self._start, self._from_validation = 0.0, set[str]()
        self._error: BaseException | None = None
        self._best, self._header = BestSoFar(), ""
        self._printed: dict[str, float] = {}  # the seconds of compiling that were printed, by program
        self._begin()

    # The run ----------------------------------------------------------------------------------------

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Print the header line."""
        self._active, self._stage, self._compiled = trainer.is_global_zero, stage, False
        self._start = time.monotonic()
        self._next = self._start if self._active and is_terminal() else math.inf
        self._error, self._best, self._from_validation = None, BestSoFar(), set()
        self._line, self._printed = None, {}
        self._begin()
        if stage != "fit":
            return
        devices, used = jax.devices(), trainer.strategy.mesh.size
        writes = trainer.loggers or trainer.checkpoint_callbacks
        parts = [
            f"jaxlit {__version__}",
            f"jax {jax.__version__}",
            f"{used}{'' if used == len(devices) else f' of {len(devices)}'} x {devices[0].device_kind}",
            trainer.strategy.describe().split("\n")[0],
            f"run {short_path(trainer.run_dir)}" if writes else "",
        ]
        if (header := join(parts)) != self._header:  # a second fit prints nothing new
            self._close(header)
        self._header = header

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Take the best value of a training that continues."""
        self._best.recall(trainer)

    def on_train_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Begin, in the middle of an epoch if training continues there."""
        self._begin()

    def on_train_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Give the terminal back."""
        self._close()

    def on_fit_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Print the closing lines: the checkpoints are written by now."""
        self._conclude(trainer)
        if self._active and in_notebook():
            self._safely(lambda: show_picture(trainer.history))

    def on_exception(self, trainer: "Trainer", module: "TrainModule", exception: BaseException) -> None:
        """Give the terminal back before other callbacks print."""
        self._close()
        self._error = exception

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Give the terminal back, and print the closing lines after an error."""
        self._close()
        if self._error is not None and stage == "fit" and trainer.global_step:
            self._conclude(trainer)

    # The epoch --------------------------------------------------------------------------------------

    def on_train_epoch_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Begin the epoch's line."""
        self._begin()
        self._compiling_before = _compiling(trainer)
        if self._mark >= self._next:
            self._next = self._mark + self._interval
            self._draw(trainer, "" if self._compiled else "compiling ...")

    def on_train_batch_end(
        self, trainer: "Trainer", module: "TrainModule", outputs: Mapping[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; draw when it is time."""
        before, self._mark, self._batches = self._mark, time.monotonic(), batch_idx + 1
        if self._compiled:
            self._counted, self._trained = self._counted + 1, self._trained + self._mark - before
        else:  # the time of the first step, which compiles, is not part of the rate
            self._compiled = True
            self._waited_before, self._compiling_before = trainer.data_wait, _compiling(trainer)
        self._print_compiled(trainer, batch)
        if self._mark >= self._next:
            self._next = self._mark + self._interval
            self._draw(trainer)

    def on_log(self, trainer: "Trainer", values: dict[str, float], step: int) -> None:
        """Take the values to show."""
        if self._validating:
            self._from_validation |= set(values)
        names = list(trainer.progress_bar_metrics)
        self._shown |= {k: v for k, v in values.items() if k in names}

    def on_train_epoch_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Print the epoch's line."""
        self._shown = dict(trainer.progress_bar_metrics)
        if not trainer.interrupted:
            self._trained += time.monotonic() - self._mark  # the device has done its steps by now
        # Last in the line, so that they do not move the columns.
        marks = [self._best.mark(trainer, self._shown), self._waiting(trainer)]
        numbers = [*self._numbers(trainer), *marks]
        self._close(epoch_line(_epoch(trainer), self._batches, trainer.num_training_batches, numbers))

    def on_validation_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Stop the clock of the rate: the device has done its steps by now."""
        if self._stage == "fit" and not trainer.sanity_checking:
            self._trained, self._validating = self._trained + time.monotonic() - self._mark, True

    def _on_evaluation_batch_end(
        self,
        trainer: "Trainer",
        module: "TrainModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Count the batch; draw when it is time."""
        if self._compiled or self._stage != "fit":  # programs of the sanity check are printed with the training step
            self._print_compiled(trainer, batch)
        if (now := time.monotonic()) >= self._next and not trainer.sanity_checking:
            self._next = now + self._interval
            doing = "predicting" if self._stage == "predict" else f"{_EVALUATION[self._stage]}ing"
            self._draw(trainer, f"{doing} {batch_idx + 1}")

    on_validation_batch_end = on_test_batch_end = on_predict_batch_end = _on_evaluation_batch_end

    def on_validation_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Print the metrics of an evaluation, or let the clock of the rate continue."""
        if self._stage != "fit":
            metrics = "".join(f"  {name} {value:.4g}" for name, value in trainer.callback_metrics.items())
            self._close(f"{_EVALUATION[self._stage]}ed{metrics}")
        elif not trainer.sanity_checking:
            self._mark, self._validated, self._validating = time.monotonic(), True, False

    on_test_end = on_validation_end

    # Helpers ----------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._batches, self._mark = 0, time.monotonic()  # of this epoch; when the newest was done
        self._counted, self._trained = 0, 0.0  # batches of the rate, and their seconds with those of compiling
        self._waited_before = self._compiling_before = 0.0
        self._validated = self._validating = False  # in this epoch; now
        self._shown: dict[str, float] = {}

    def _draw(self, trainer: "Trainer", doing: str = "") -> None:
        """Draw the live line; if the terminal is gone, draw no more and continue with training."""
        text, total = doing, trainer.num_training_batches
        if self._stage == "fit":
            numbers = doing or "  ".join(filter(None, [*self._numbers(trainer, live=True), self._waiting(trainer)]))
            text = live_line(_epoch(trainer), self._batches, total, numbers)

        def draw() -> None:
            if self._line is None:
                self._line = NotebookLine() if in_notebook() else TerminalLine()
            self._line.show(text)

        self._safely(draw)

    def _close(self, text: str | None = None) -> None:
        """Remove the live line, and print a text."""
        if self._line is not None:
            self._safely(self._line.hide)
        if text is not None and self._active:
            say(text)

    def _numbers(self, trainer: "Trainer", *, live: bool = False) -> list[str]:
        """Return count, rate and metrics, as wide as in other epochs; those of an earlier validation are blank."""
        total, rate = trainer.num_training_batches, self._rate(trainer)
        thousands = f"{rate / 1000:.{1 if rate < 9950 else 0}f}k"  # at most 4 characters, as all rates
        speed = thousands if rate >= 999.5 else f"{rate:#.3g}".rstrip(".")
        parts = [
            f"{self._batches}" + (f"/{total}" if total != math.inf else ""),
            f"{speed:>4} it/s" if rate else " " * 9,
        ]
        if live and rate and total != math.inf and (left := (total - self._batches) / rate) >= 10:
            parts.append(f"{clock(left)} left")
        shown = self._shown
        if (loss := trainer.loss) is not None:  # validation_step may log another loss
            shown = {"train_loss" if "loss" in list(trainer.progress_bar_metrics) else "loss": loss, **shown}
        stale = set() if live or self._validated else self._from_validation
        metrics = {name: f"{name} {number(value)}" for name, value in shown.items()}
        return parts + [" " * len(text) if name in stale else text for name, text in metrics.items()]

    def _rate(self, trainer: "Trainer") -> float:
        """Return batches per second, without validations and compiling; 0 if it is not known."""
        return self._counted / seconds if (seconds := self._seconds(trainer)) > 0 else 0.0

    def _seconds(self, trainer: "Trainer") -> float:
        return self._trained - (_compiling(trainer) - self._compiling_before)

    def _waiting(self, trainer: "Trainer") -> str:
        seconds, waited = self._seconds(trainer), trainer.data_wait - self._waited_before
        # Less than a tenth of the time, or than half a second, needs no faster loader.
        worth = waited >= 0.5 and waited >= 0.1 * seconds > 0
        return f"waits for data {min(waited / seconds, 1.0):.0%}" if worth else ""

    def _print_compiled(self, trainer: "Trainer", batch: Any = None) -> None:
        """Print which programs were compiled since it was printed last; all lines add up to `compile_seconds`."""
        if (seconds := trainer.compile_seconds) == self._printed:
            return
        parts = []
        for name, total in seconds.items():
            more = total - self._printed.get(name, 0.0)
            if name not in self._printed or more >= 0.005:
                rows = num_rows(batch) if name in self._printed and batch is not None else 0
                again = f" for a batch of {rows:,} row{'s' * (rows != 1)}" if rows else ""
                parts.append(f"{name}{again} in {clock(more)}")
                self._printed = {**self._printed, name: total}
        if parts:
            self._close(f"compiled {join(parts, between=', ')}")

    def _conclude(self, trainer: "Trainer") -> None:
        self._print_compiled(trainer)  # if no step came after it
        self._best.recall(trainer)  # a checkpoint in the middle of an epoch may be better
        seconds, best = time.monotonic() - self._start, self._best.describe()
        self._close(closing_lines(trainer, seconds=seconds, error=self._error, best=best))

    def _safely(self, write: Callable[[], None]) -> None:
        try:
            write()
        except (OSError, ValueError):
            line, self._line = self._line, None
            self._active, self._next = False, math.inf
            with contextlib.suppress(OSError, ValueError):  # it still restores sys.stdout
                if line is not None:
                    line.hide()


def _epoch(trainer: "Trainer") -> str:
    epoch, last = trainer.current_epoch + 1, trainer.max_epochs
    return f"epoch {epoch}" if last is None else f"epoch {epoch:>{len(str(last))}}/{last}"


def _compiling(trainer: "Trainer") -> float:
    """Return the seconds that the steps of training have spent on compiling."""
    return sum(s for name, s in trainer.compile_seconds.items() if name.startswith(("train_step", "micro_step")))
