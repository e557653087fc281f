"""What the terminal shows of training."""

import contextlib
import math
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError

if TYPE_CHECKING:
    from rich.progress import Progress

    from jaxlit.module import TrainModule
    from jaxlit.trainer import Trainer


class ProgressBar(Callback):
    """Show a live bar for each epoch; without a terminal one plain line.

    Metrics logged with `prog_bar=True` are shown. No value is read for it during an epoch: the bar
    shows those of the last logged row.

    Args:
        refresh_rate: The most refreshes a second, above 0 and at most 10.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=[jl.callbacks.ProgressBar(refresh_rate=2)])
    """

    runs_last = True

    def __init__(self, refresh_rate: float = 10.0) -> None:
        if isinstance(refresh_rate, bool) or not isinstance(refresh_rate, (int, float)) or not 0 < refresh_rate <= 10:
            raise ArgumentError(
                f"ProgressBar(refresh_rate=...) takes a number above 0, at most 10, got {refresh_rate!r}."
            )
        self._interval = 1 / refresh_rate
        self._progress: Progress | None = None
        self._batches, self._next = 0, math.inf
        self._first: int | None = None  # batch of this epoch that the bar has seen
        self._shown: dict[str, float] = {}

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Print the header line."""
        from jaxlit import __version__

        self._active, self._terminal = trainer.is_global_zero, _is_terminal()
        self._start, self._epochs = time.monotonic(), 0
        count, platform = jax.device_count(), jax.devices()[0].platform
        self._print(
            f"jaxlit {__version__} | jax {jax.__version__} | {count} {platform} device{'s' * (count > 1)} | "
            f"{trainer.strategy.describe()}"
        )

    def on_train_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Begin in the middle of an epoch, if training goes on there."""
        self._begin()

    def on_train_epoch_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Begin the epoch's bar."""
        self._begin()
        if self._next < math.inf:
            self._open(trainer)

    def _begin(self) -> None:
        self._batches, self._first, self._epoch_start, self._shown = 0, None, time.monotonic(), {}
        self._last = self._epoch_start  # of the newest batch: validation is no part of the rate
        self._next = self._epoch_start if self._terminal and self._active else math.inf

    def on_train_batch_end(
        self, trainer: "Trainer", module: "TrainModule", outputs: Mapping[str, Any], batch: Any, batch_idx: int
    ) -> None:
        """Count the batch; draw when it is time."""
        self._batches, self._last = batch_idx + 1, time.monotonic()
        if self._first is None:
            self._first = batch_idx
        if self._last >= self._next:
            self._next = self._last + self._interval
            if self._progress is None:
                self._open(trainer)
            self._draw(trainer)

    def on_log(self, trainer: "Trainer", values: dict[str, float], step: int) -> None:
        """Take the values to show."""
        names = list(trainer.progress_bar_metrics)
        self._shown |= {k: v for k, v in values.items() if k in names}

    def on_train_epoch_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Leave the epoch's line behind."""
        self._shown = dict(trainer.progress_bar_metrics)
        self._close()
        self._epochs += 1
        total = trainer.num_training_batches
        of = f"/{total}" if total != math.inf else ""
        self._print(f"{_epoch_text(trainer)}  {self._batches}{of}  {self._numbers(trainer)}")

    def on_train_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Print the closing line."""
        seconds = time.monotonic() - self._start
        why = f" | {trainer.stop_reason}" if trainer.stop_reason else ""
        plural = "s" * (self._epochs != 1)
        self._print(f"done {self._epochs} epoch{plural}, {trainer.global_step} steps in {seconds:.1f} s{why}")

    def on_exception(self, trainer: "Trainer", module: "TrainModule", exception: BaseException) -> None:
        """Give the terminal back before other callbacks speak of the error."""
        self._close()

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Give the terminal back, also after an error."""
        self._close()

    def _open(self, trainer: "Trainer") -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        class QuietConsole(Console):
            # Rich's own ends the process.
            def on_broken_pipe(self) -> None:
                raise BrokenPipeError

        total = trainer.num_training_batches
        numbers = TextColumn("{task.fields[numbers]}", markup=False)  # a metric's name may hold brackets
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), numbers)
        # No thread of rich's own: it would wake up beside the training loop. Drawn from the hook.
        self._progress = Progress(*columns, console=QuietConsole(), auto_refresh=False, transient=True)
        self._task = self._progress.add_task(
            _epoch_text(trainer), total=None if total == math.inf else total, numbers=""
        )
        self._safely(self._progress.start)
        if not self._active:
            self._progress = None  # half started, it cannot be stopped

    def _draw(self, trainer: "Trainer") -> None:
        if self._progress is not None:
            total = self._progress.tasks[0].total
            of = f"/{int(total)}" if total is not None else ""
            self._progress.update(
                self._task, completed=self._batches, numbers=f"{self._batches}{of}  {self._numbers(trainer)}"
            )
            self._safely(self._progress.refresh)

    def _close(self) -> None:
        if self._progress is not None:
            self._safely(self._progress.stop)
            self._progress = None

    def _numbers(self, trainer: "Trainer") -> str:
        seconds = max(self._last - self._epoch_start, 1e-9)
        rate, waited = (self._batches - (self._first or 0)) / seconds, min(trainer.data_wait / seconds, 1.0)
        # Less than a tenth is no reason to look for a faster loader.
        wait = f"  waits for data {waited:.0%}" if waited >= 0.1 else ""
        values = "".join(f"  {name} {value:.4g}" for name, value in self._shown.items())
        return f"{f'{rate / 1000:.1f}k' if rate >= 1000 else f'{rate:.3g}'} it/s{wait}{values}"

    def _print(self, line: str) -> None:
        if self._active:
            say(line)

    def _safely(self, write: Any) -> None:
        """Write to the terminal; one that is gone ends the showing, never the training."""
        try:
            write()
        except (OSError, ValueError):
            self._active, self._next = False, math.inf


def say(text: str) -> None:
    """Print a line; a stdout that is gone never ends training."""
    # ValueError is what a closed Python file raises.
    with contextlib.suppress(OSError, ValueError):
        print(text, flush=True)


def _is_terminal() -> bool:
    from rich.console import Console

    return Console().is_terminal or "ipykernel" in sys.modules


def _epoch_text(trainer: "Trainer") -> str:
    epoch, last = trainer.current_epoch + 1, trainer.max_epochs
    return f"epoch {epoch}" if last is None else f"epoch {epoch:>{len(str(last))}}/{last}"
