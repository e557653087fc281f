"""`Profiler`, which traces devices and host in a few steps."""

import contextlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.reporting.terminal import absolute

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")


class Profiler(Callback):
    """Trace a window of optimizer steps by jax's profiler, into the run's folder; the closing lines name it.

    Each step is marked by `jax.profiler.StepTraceAnnotation("train", step_num=...)`: from the wait for its batch on,
    with its hooks and its row, without validations and the ends of epochs. Training waits for the devices only at both
    ends of the window. View it by `xprof <folder>`, or open its `.trace.json.gz` in ui.perfetto.dev.

    A window that ends early by an error, an interrupt or the end of training is written as well. Steps are counted from
    the beginning of the training, also after a resume. Each of several processes writes a trace, to `process_<i>`.

    Args:
        start_step: 0-based index of the first optimizer step; 0 would include compiling.
        num_steps: The number of steps.
        dirpath: The folder; None for `profile` in the run's folder.

    Example:
        >>> import jaxlit as jl
        >>> profiler = jl.callbacks.Profiler(start_step=20, num_steps=3)
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=profiler, logger=False)
    """

    runs_last = True
    in_fast_dev_run = False

    def __init__(self, start_step: int = 10, num_steps: int = 5, dirpath: str | Path | None = None) -> None:
        self.start_step = check.integer("start_step", start_step, low=0, owner="Profiler")
        self.num_steps = check.integer("num_steps", num_steps, low=1, owner="Profiler")
        self.dirpath = None if dirpath is None else absolute(Path(check.on_disk("dirpath", dirpath, owner="Profiler")))
        self.location: str | None = None
        self._reset()

    def _reset(self) -> None:
        self._folder: Path | None = None  # of the current trace
        self._annotation: jax.profiler.StepTraceAnnotation | None = None
        self._step = -1  # of the annotation
        self._over = False  # whether the window has ended

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Reset the window for a fit."""
        if stage == "fit":
            self.location = None
            self._reset()

    def on_train_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Begin to trace or to mark a step, if it is in the window."""
        self._move(trainer)

    on_train_epoch_start = on_train_start

    def due_in(self, step: int) -> int | None:
        """Return the steps to the window; 1 inside it."""
        return None if self._over else max(self.start_step - step, 1)

    def on_safe_point(self, trainer: "Trainer", module: "TrainModule", epoch_over: bool, training_over: bool) -> None:
        """End the mark of the step, and begin the next."""
        if epoch_over or training_over:  # the work until the next batch belongs to no step
            self._mark(None)
        else:
            self._move(trainer)

    def on_validation_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """End the mark of the step: a validation does not belong to it."""
        self._mark(None)

    def on_train_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """End the trace; warn if nothing was traced."""
        self._stop(trainer)
        if self.location is None:
            words = "Profiler(start_step=%d, num_steps=%d) has traced nothing: this training ended after step %d."
            _logger.warning(words, self.start_step, self.num_steps, trainer.global_step - 1)

    def on_exception(self, trainer: "Trainer", module: "TrainModule", exception: BaseException) -> None:
        """End the trace, which is written."""
        self._stop(trainer)

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """End the trace."""
        self._stop(trainer)

    def _move(self, trainer: "Trainer") -> None:
        step, end = trainer.global_step, self.start_step + self.num_steps
        if step >= end:
            self._stop(trainer)
        elif step >= self.start_step and not self._over:
            if self._folder is None:
                self._start(trainer)
            self._mark(step)

    def _mark(self, step: int | None) -> None:
        """Begin to mark a step, for all its batches; None to end the mark."""
        if step is not None and self._annotation is not None and self._step == step:
            return
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if step is not None:
            self._step = step
            self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._annotation.__enter__()

    def _start(self, trainer: "Trainer") -> None:
        folder = self.dirpath or absolute(trainer.run_dir) / "profile"
        folder = folder / f"process_{jax.process_index()}" if jax.process_count() > 1 else folder
        _wait_for_devices(trainer)  # earlier steps are not part of the window
        jax.profiler.start_trace(str(folder))
        self._folder = folder  # only now: a trace that other code has begun is not ended

    def _stop(self, trainer: "Trainer") -> None:
        self._mark(None)
        self._over, folder = True, self._folder
        if folder is None:
            return
        self._folder = None
        _wait_for_devices(trainer)
        try:
            jax.profiler.stop_trace()
            self.location = str(folder)
        except Exception as error:
            _logger.warning("Profiler cannot write its trace to %s: %s. Training continues.", folder, error)


def _wait_for_devices(trainer: "Trainer") -> None:
    with contextlib.suppress(Exception):  # an error of the device is raised elsewhere
        jax.block_until_ready(trainer.state.step)
