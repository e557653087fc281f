"""Several steps in one dispatch: when, how many, and what their hooks see."""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxlit.data.prefetcher import Batch
from jaxlit.distributed.exchange import fetch
from jaxlit.errors import ArgumentError
from jaxlit.loop.hooks import Hook
from jaxlit.loop.results import Outputs, Row
from jaxlit.loop.rows import rows_of_step
from jaxlit.loop.run import Run

_logger = logging.getLogger("jaxlit")

_LONGEST_S = 0.05  # that a dispatch may take under "auto"
_MOST = 32  # batches of one then
_TIMED = range(4, 12)  # the single steps that are timed before that is decided


class Dispatch:
    """How many batches the loop takes at once.

    Args:
        run: The fit.

    Attributes:
        size: The batches of a dispatch, 1 while that is not decided.
        decided: Whether it is.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._given, self._steps, self._began = run, None, 0, 0.0
        self.decided, self.size = True, 1

    def begin_epoch(self) -> None:
        """Look at the argument and at the windows of the epoch.

        Raises:
            ArgumentError: The strategy runs a step in parts, or a dispatch would cut a window.
        """
        given, strategy = self._run.settings.steps_per_execution, self._run.engine.strategy
        if given != self._given:
            self._given, self._steps = given, 0
            self.decided, self.size = given != "auto", given if isinstance(given, int) else 1
        if given != 1 and not strategy.fuses_steps:
            raise ArgumentError(
                f"Trainer(steps_per_execution={given!r}): {strategy.describe().splitlines()[0]} runs a step in parts, "
                "which one program cannot repeat. Leave the argument out, or use strategy='ddp', 'fsdp' or 'shard_map'."
            )
        window, epoch = self._run.window.batches, self._run.control.num_training_batches
        if given != 1 and (starts := self._run.hooks.bind("on_train_batch_start")):
            # It runs before its step, and may end the epoch there: the steps after it must not have been taken.
            self.decided, self.size = True, 1
            if "steps" not in self._run.control.noted:
                self._run.control.noted.add("steps")
                text = "steps_per_execution=%s: %s.on_train_batch_start runs before each step, so each is a dispatch."
                _logger.info(text, given, starts.functions[0].owner)
            return
        if given == "auto":
            self.size = max(int(min(self.size, epoch)) // window * window, 1)
            return
        check_size(self.size, window)
        if self.size > epoch and "steps" not in self._run.control.noted:
            self._run.control.noted.add("steps")
            text = "steps_per_execution=%d is more than an epoch has batches, %d: each step is a dispatch."
            _logger.warning(text, self.size, epoch)

    def fits(self) -> bool:
        """Return whether the next `size` batches may be one dispatch: nothing is due before its end."""
        run, position, due, control = self._run, self._run.position, self._run.due, self._run.control
        if self.size == 1 or position.filled:
            return False
        if control.interrupted or control.should_stop:
            return False
        if not due.next or position.global_step >= due.next or run.prefetcher.now >= due.time:
            due.move(run, position.global_step)
        return position.global_step + self.size // run.window.batches <= due.cut

    def measure(self, token: jax.Array) -> None:
        """Time a few steps, given a result of each, and decide how many a dispatch takes."""
        self._steps += 1
        if self._steps == _TIMED.start:
            token.block_until_ready()
            self._began = time.perf_counter()
        elif self._steps == _TIMED.stop:
            token.block_until_ready()
            self.decided, window = True, self._run.window.batches
            fastest = int(_LONGEST_S * len(_TIMED) / max(time.perf_counter() - self._began, 1e-9))
            most = int(min(_MOST, fastest, self._run.control.num_training_batches))
            self.size = max(min(self._run.times.team.agree("steps_per_execution", most)) // window * window, 1)


def check_size(size: int | str, window: int, whose: str = "accumulate_grad_batches") -> None:
    """Refuse dispatches that would cut an optimizer step.

    Args:
        size: `steps_per_execution`.
        window: Batches of an optimizer step.
        whose: What sets it.

    Raises:
        ArgumentError: Saying which sizes are possible.
    """
    if isinstance(size, int) and size > 1 and size % window:
        raise ArgumentError(
            f"Trainer(steps_per_execution={size}) counts batches, and would cut an optimizer step of {window} "
            f"({whose}). Pass a multiple of {window}, or 1."
        )


@dataclass(frozen=True, eq=False)
class StepOutputs(Mapping[str, Any]):
    """The `outputs` of one batch of a dispatch, on the host: they are read once for all of its batches.

    Args:
        logs: The tables of the steps.
        loss: The losses of windows' batches; None where a step takes one batch.
        outputs: What else the steps returned.
        is_row: Whether each output has one row for each row of the batch, a pytree like them.
        step: Which step of the dispatch.
        batch: Which batch.
    """

    logs: Any
    loss: Any
    outputs: dict[str, Any]
    is_row: Any
    step: int = 0
    batch: int = 0

    def __getitem__(self, name: str) -> Any:
        i = self.batch
        if name != "loss":
            one = lambda rows, x: fetch(x)[:, i] if rows else fetch(x)[i]  # noqa: E731
            return jax.tree.map(one, self.is_row[name], self.outputs[name])
        if self.loss is not None:
            return fetch(self.loss)[..., i].mean()
        total, weight = fetch(self.logs)[self.step, :2, 0]
        return np.float32(total / weight)

    def __iter__(self) -> Iterator[str]:
        return iter(("loss", *self.outputs))

    def __len__(self) -> int:
        return 1 + len(self.outputs)


def take_step(run: Run, batch: Batch, ends: Hook | None) -> None:
    """Dispatch the step of a batch, of the accumulation window or of the optimizer, and call the hook that ends it.

    Args:
        run: The run, whose position moves after the batch.
        batch: The batch.
        ends: Its `on_train_batch_end`, if anything has one.
    """
    engine, position = run.engine, run.position
    # A later check may end training before this step.
    if engine.nan_policy == "raise" and not (position.filled and run.unchecked.starts):
        run.unchecked.starts += ((position.global_step, position.batch_idx, position.data),)
        if engine.window_start is not None:
            engine.window_start.keep()
    stepping = batch.is_last or position.filled + 1 >= run.window.batches
    if not stepping:
        logs, loss, outputs = engine.micro_step(batch.arrays)
    elif position.global_step + 1 < run.due.next or not run.tracing.every:
        logs, loss, outputs = engine.train_step(batch.arrays)
    else:
        logs, loss, outputs = run.tracing.step(engine, batch.arrays, position.global_step)
    # Only reading one of these waits for the device; the prefetcher waits for its token before it reuses a host buffer.
    run.results.latest = run.prefetcher.token = logs
    position.advance(batch.position, stepping=stepping, last=batch.is_last)
    if run.hooks.live is not None:
        run.hooks.live.stale = True
    if ends is None:
        return
    try:
        ends(Outputs(logs, loss, outputs), batch.host, batch.index)
    except Exception:
        if stepping:  # it is taken, and has its row
            run.results.pending = [*run.results.pending, *rows_of_step(run, position.global_step - 1)]
        raise


def take_steps(run: Run, batch: Batch, last: Hook | None) -> list[Row]:
    """Take the optimizer steps of several batches in one dispatch, then call the hooks that end each of them.

    Args:
        run: The run, whose position moves with the hooks, from batch to batch; the arrays are those after all of them.
        batch: The batches.
        last: The `on_train_batch_end` of the last step; the steps before it have that of each step.

    Returns:
        The rows of the steps.
    """
    position, results, window, count = run.position, run.results, run.window.batches, batch.count
    steps, first, each = count // window, position.global_step, run.due.each[1]
    if run.engine.nan_policy == "raise":
        data = [position.data, *batch.position[window - 1 : -1 : window]]
        run.unchecked.starts += [(first + i, position.batch_idx + i * window, at) for i, at in enumerate(data)]
    logs, loss, outputs = run.engine.fused_steps(window, batch.arrays)
    results.latest, run.prefetcher.token = (logs, steps - 1), logs
    if run.hooks.live is not None:
        run.hooks.live.stale = True
    rows: list[Row] = []
    if each is None and last is None:
        position.advance(batch.position[-1], stepping=steps, last=batch.is_last, batches=count)
        every, stops = run.log_every, run.control.should_stop
        for i in range(steps):
            if (every and (first + i + 1) % every == 0) or (stops and i + 1 == steps):
                results.latest = logs, i
                rows += rows_of_step(run, first + i)
        results.latest = logs, steps - 1
        return rows
    seen, failed = StepOutputs(logs, loss, outputs, run.engine.outputs_with_rows), None
    for k, (host, data) in enumerate(zip(batch.host, batch.position, strict=True)):
        is_last, i = k + 1 == count, k // window
        position.advance(data, stepping=(k + 1) % window == 0, last=batch.is_last and is_last)
        results.latest, run.hooks.log.batch = (logs, i), host
        ends = last if i + 1 == steps else each
        if ends is not None and failed is None:
            try:
                ends(replace(seen, step=i, batch=k), host, batch.index + k)
            except BaseException as error:  # the steps are taken: those after it have their rows
                failed = error
        if not position.filled:
            rows += rows_of_step(run, first + i, last=is_last)
    if failed is not None:
        results.pending = [*results.pending, *rows]
        raise failed
    if run.hooks.live is not None and not run.hooks.live.stale and "module" not in run.control.noted:
        run.control.noted.add("module")
        text = (
            "A batch hook has read the module in a dispatch of %d batches: it has the weights after all of its steps."
        )
        _logger.info(text, count)
    return rows
