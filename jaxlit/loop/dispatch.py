"""The step of a batch; several without a look between them, or in one dispatch: when, how many, what hooks see."""

import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any

import jax

from jaxlit.data.prefetcher import Batch
from jaxlit.distributed.team import fetch
from jaxlit.errors import ArgumentError
from jaxlit.loop.hooks import Hook
from jaxlit.loop.results import UNREAD_ITEM, LazyDict, Outputs, Row
from jaxlit.loop.rows import rows_of_step
from jaxlit.loop.run import Run

_LONGEST_S = 0.05  # that a dispatch may take under "auto"
_MOST = 32  # batches of one then
_AHEAD_S = 0.005  # that the loop takes steps without a look at anything else
_TIMED = range(4, 12)  # the single steps that are timed before that is decided


class Dispatch:
    """How many batches the loop takes at once: `size`, 1 while that is not `decided`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._steps = 0
        self._began = 0.0
        self.decided = True
        self.size = 1
        self._looked_at = 0.0  # the time, and the batches taken, at the newest look
        self._looked_after = 0

    def begin_epoch(self) -> None:
        """Look at the argument and at the windows of the epoch; refuse dispatches that would cut a step or a window."""
        steps_per_execution = self._run.settings.steps_per_execution
        strategy = self._run.engine.strategy
        self.decided = steps_per_execution != "auto" or self._run.auto_size > 0
        self.size = steps_per_execution if isinstance(steps_per_execution, int) else 1
        if steps_per_execution != 1 and not strategy.fuses_steps:
            raise ArgumentError(
                f"Trainer(steps_per_execution={steps_per_execution!r}): {strategy.describe().splitlines()[0]} runs a "
                "step in parts, which one program cannot repeat. Leave the argument out, or use strategy='ddp', 'fsdp' "
                "or 'shard_map'."
            )
        window = self._run.accumulation.batches
        control = self._run.control
        if steps_per_execution != 1 and (starts := self._run.hooks.bind("on_train_batch_start")):
            # It runs before its step, and may end the epoch there: the steps after it must not have been taken.
            self.decided = True
            self.size = 1
            text = "steps_per_execution=%s: %s.on_train_batch_start runs before each step, so each is a dispatch."
            control.log_once(logging.INFO, text, steps_per_execution, starts.functions[0].owner)
            return
        if steps_per_execution == "auto":
            self.size = max(int(min(self._run.auto_size, _MOST, control.num_training_batches)) // window * window, 1)
            return
        check_size(self.size, window)
        if self.size > control.num_training_batches:
            text = "steps_per_execution=%d is more than an epoch has batches, %d: each step is a dispatch."
            control.log_once(logging.WARNING, text, self.size, control.num_training_batches)

    def fits(self) -> bool:
        """Return whether the next `size` batches may be one dispatch: nothing is due before its end."""
        run = self._run
        position = self._run.position
        due = self._run.due
        # A stop, which may come at any time, ends no dispatch: where the next ends follows from the position alone.
        if self.size == 1 or position.filled:
            return False
        if due.is_stale or position.global_step >= due.next_step or run.prefetcher.now >= due.next_time:
            due.find_next(run, position.global_step)
        return position.global_step + self.size // run.accumulation.batches <= due.dispatch_end

    def take_ahead(self, batches: Iterator[Batch], batch: Batch) -> Batch:
        """Take the steps of batches after `batch`, in which nothing else acts, and return the last batch.

        How long steps take sets their number only; each is a call of the same program.
        """
        run = self._run
        due = run.due
        position = run.position
        control = run.control
        prefetcher = run.prefetcher
        # A row that has arrived, what hooks have logged or requested, and a stop are dealt with after this step.
        acts = run.results.pending or run.hooks.log.window or run.requested or due.is_stale
        if self.size > 1 or run.times.team.size > 1 or acts or control.should_stop or control.interrupted:
            return batch
        before = position.total_batch_idx - 1
        fast = _AHEAD_S * (before - self._looked_after) / max(prefetcher.now - self._looked_at, 1e-9)
        self._looked_after = before
        self._looked_at = prefetcher.now
        until = min(due.next_time, prefetcher.now + _AHEAD_S)
        free = (due.next_step - 1 - position.global_step) * run.accumulation.batches - position.filled
        # Not past where the loop waits for steps in flight.
        to_wait = -position.total_batch_idx % run.in_flight.period
        for batch in itertools.islice(batches, max(int(min(to_wait, fast, free)), 0)):
            take_step(run, batch, None)
            if prefetcher.now >= until or due.is_stale or control.should_stop or control.interrupted or run.requested:
                break
        return batch

    def measure(self, token: jax.Array) -> None:
        """Time a few steps, given a result of each, and decide how many a dispatch takes."""
        self._steps += 1
        if self._steps == _TIMED.start:
            token.block_until_ready()
            self._began = time.perf_counter()
        elif self._steps == _TIMED.stop:
            token.block_until_ready()
            self.decided = True
            window = self._run.accumulation.batches
            fastest = int(_LONGEST_S * len(_TIMED) / max(time.perf_counter() - self._began, 1e-9))
            most = int(min(_MOST, fastest, self._run.control.num_training_batches))
            self._run.auto_size = max(min(self._run.times.team.agree("steps_per_execution", most)), 1)
            self.size = max(self._run.auto_size // window * window, 1)


def check_size(size: int | str, window: int, whose: str = "accumulate_grad_batches") -> None:
    """Refuse dispatches that would cut an optimizer step."""
    if isinstance(size, int) and size > 1 and size % window:
        raise ArgumentError(
            f"Trainer(steps_per_execution={size}) counts batches, and would cut an optimizer step of {window} "
            f"({whose}). Pass a multiple of {window}, or 1."
        )


class StepOutputs(LazyDict):
    """The `outputs` of one batch of a dispatch, on the host: they are read once for all of its batches.

    `logs` are the tables of the steps, `loss` the losses of windows' batches, or None where a step takes one batch,
    `outputs` what else the steps returned, and `is_row` whether each has one row for each row of the batch.
    """

    def __init__(self, logs: Any, loss: Any, outputs: dict[str, Any], is_row: Any, step: int, batch: int) -> None:
        self.logs, self.loss, self.outputs, self.is_row, self.step, self.batch = (
            logs,
            loss,
            outputs,
            is_row,
            step,
            batch,
        )
        dict.update(self, dict.fromkeys(("loss", *outputs), UNREAD_ITEM))

    def read(self, name: str) -> Any:
        """Return the part of the batch."""
        i = self.batch
        if name != "loss":
            return jax.tree.map(
                lambda is_row, x: fetch(x)[:, i] if is_row else fetch(x)[i], self.is_row[name], self.outputs[name]
            )
        if self.loss is not None:
            return fetch(self.loss)[..., i].mean()
        total, weight = fetch(self.logs)[self.step, :2, 0]
        return total / weight


def take_step(run: Run, batch: Batch, ends: Hook | None) -> None:
    """Dispatch the step of a batch, of the accumulation window or of the optimizer, and call the hook that ends it."""
    engine = run.engine
    position = run.position
    # A later check may end training before this step.
    if engine.nan_policy == "raise" and not (position.filled and run.unchecked.starts):
        run.unchecked.starts += ((position.global_step, position.batch_idx, position.data),)
        if engine.window_start is not None:
            engine.window_start.keep()
    stepping = batch.is_last or position.filled + 1 >= run.accumulation.batches
    if not stepping:
        logs, loss, outputs = engine.micro_step(batch.arrays)
    elif position.global_step + 1 < run.due.next_step or not run.tracing.every:
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
    """Take the optimizer steps of several batches in one dispatch, then call the hooks that end each; return the rows.

    The position moves with the hooks, from batch to batch; the arrays are those after all of them. `last` is the
    `on_train_batch_end` of the last step; the steps before it have that of each step.
    """
    position = run.position
    results = run.results
    window = run.accumulation.batches
    count = batch.count
    steps = count // window
    first = position.global_step
    each = run.due.quiet_hooks.end
    if run.engine.nan_policy == "raise":
        data = [position.data, *batch.position[window - 1 : -1 : window]]
        run.unchecked.starts += [(first + i, position.batch_idx + i * window, at) for i, at in enumerate(data)]
    logs, loss, outputs = run.engine.fused_steps(window, batch.arrays)
    results.latest = (logs, steps - 1)
    run.prefetcher.token = logs
    if run.hooks.live is not None:
        run.hooks.live.stale = True
    rows: list[Row] = []
    if each is None and last is None:
        position.advance(batch.position[-1], stepping=steps, last=batch.is_last, batches=count)
        return _rows_without_hooks(run, logs, first, steps)
    is_row, failed = run.engine.outputs_with_rows, None
    for k, (host, data) in enumerate(zip(batch.host, batch.position, strict=True)):
        is_last = k + 1 == count
        i = k // window
        position.advance(data, stepping=(k + 1) % window == 0, last=batch.is_last and is_last)
        results.latest = (logs, i)
        run.hooks.log.batch = host
        ends = last if i + 1 == steps else each
        if ends is not None and failed is None:
            try:
                ends(StepOutputs(logs, loss, outputs, is_row, i, k), host, batch.index + k)
            except BaseException as error:  # the steps are taken: those after it have their rows
                failed = error
        if not position.filled:
            try:
                rows += rows_of_step(run, first + i, last=is_last)
            except BaseException as error:  # of what begins a row
                failed = failed or error
    if failed is not None:
        results.pending = [*results.pending, *rows]
        raise failed
    if run.hooks.live is not None and not run.hooks.live.stale:
        text = "A batch hook has read the module in a dispatch of %d batches: it has the weights after its last step."
        run.control.log_once(logging.INFO, text, count)
    return rows


def _rows_without_hooks(run: Run, logs: Any, first: int, steps: int) -> list[Row]:
    """Return the rows of the steps of a dispatch, given their tables, where no hook is called between them."""
    rows = []
    every = run.log_every
    stops = run.control.should_stop
    for i in range(steps):
        if (every and (first + i + 1) % every == 0) or (stops and i + 1 == steps):
            run.results.latest = logs, i
            rows += rows_of_step(run, first + i)
    run.results.latest = logs, steps - 1
    return rows
