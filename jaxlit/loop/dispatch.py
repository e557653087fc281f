"""Several steps in one dispatch: when, how many, and what their hooks see."""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxlit.checkpoints.position import Phase
from jaxlit.data.prefetcher import Batches
from jaxlit.distributed.exchange import fetch
from jaxlit.errors import ArgumentError
from jaxlit.loop.due import StepHooks
from jaxlit.loop.results import Row
from jaxlit.loop.rows import row_of_step
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
        window = self._run.window.batches
        if given == "auto":
            self.size = max(self.size // window * window, 1)
        elif self.size > 1 and self.size % window:
            raise ArgumentError(
                f"Trainer(steps_per_execution={self.size}) counts batches, and would cut an optimizer step of {window} "
                f"(accumulate_grad_batches). Pass a multiple of {window}, or 1."
            )

    def fits(self) -> bool:
        """Return whether the next `size` batches may be one dispatch: nothing is due before its end."""
        run, position, due, control = self._run, self._run.position, self._run.due, self._run.control
        if position.filled or position.phase > Phase.BATCH_START or control.interrupted or control.should_stop:
            return False
        if not due.next or position.global_step >= due.next:
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
            counts = self._run.times.team.agree("steps_per_execution", min(_MOST, fastest))
            self.size = max(min(counts) // window * window, 1)


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


def take_steps(run: Run, batches: Batches, *, begin: bool) -> list[Row] | int:
    """Take the optimizer steps of several batches in one dispatch, between the hooks of all of them.

    Args:
        run: The run.
        batches: The batches.
        begin: Whether they are the first of the epoch.

    Returns:
        The rows of its steps; or how many batches come before the one at which a hook ends the epoch, none of which
        was taken yet.
    """
    position, hooks, results, log = run.position, run.hooks, run.results, run.hooks.log
    clock, window, first, step = hooks.clock, run.window.batches, position.batch_idx, position.global_step
    count = len(batches.positions)
    each = run.due.of_steps(run, step, count // window)
    before = log.so_far() if log.window or log.epoch else None
    windows = start_batches(run, batches, each) if each else []
    if isinstance(windows, int):
        return windows
    if begin:
        run.begin_steps()
    latest, data = results.latest, position.data
    logs, loss, outputs = run.engine.fused_steps(window, batches.arrays)
    results.latest, run.prefetcher.token = (logs, count // window - 1), logs
    position.advance(batches.positions[-1], stepping=count // window, last=batches.is_last, batches=count)
    if hooks.live is not None:
        hooks.live.stale = True
    period = run.in_flight.period
    if position.total_batch_idx // period > (position.total_batch_idx - count) // period:
        run.in_flight.wait(logs)
    starts: list[list[Any]] = []
    is_row = run.engine.outputs_with_rows
    if run.engine.nan_policy == "raise":
        places = [data, *batches.positions[window - 1 : -1 : window]]
        starts = [
            [step + i, first + i * window, 0, at, (logs, i - 1) if i else latest, before] for i, at in enumerate(places)
        ]
        run.unchecked.starts += starts
    rows = end_batches(run, batches, each, windows, starts, StepOutputs(logs, loss, outputs, is_row))
    results.latest = (logs, count // window - 1)
    clock.follow(position)
    if hooks.live is not None and not hooks.live.stale and "module" not in run.control.noted:
        run.control.noted.add("module")
        text = (
            "A batch hook has read the module in a dispatch of %d batches: it holds the weights after all of its steps."
        )
        _logger.info(text, count)
    if run.control.should_stop and not (run.log_every and position.global_step % run.log_every == 0):
        rows += [row for row in [row_of_step(run)] if row is not None]  # the last one of a training has its row
    return rows


def end_batches(
    run: Run,
    batches: Batches,
    each: list[StepHooks],
    windows: list[dict[str, Any]],
    starts: list[list[Any]],
    outputs: "StepOutputs",
) -> list[Row]:
    """Call the hooks that end the batches of a dispatch, and return the rows of its steps.

    Args:
        run: The run, whose position is after the dispatch.
        batches: The batches.
        each: The hooks of each step; nothing if there are none.
        windows: What the hooks that begin the batches have logged, by step.
        starts: Where the steps begin, if that is noted.
        outputs: What the steps have returned.
    """
    results, log, clock, window = run.results, run.hooks.log, run.hooks.clock, run.window.batches
    rows: list[Row] = []
    steps, every = len(batches.positions) // window, run.log_every
    step, first = run.position.global_step - steps, run.position.batch_idx - len(batches.positions)
    begin, stride = (0, 1) if each or not every else (every - step % every - 1, every)  # without hooks only rows
    for i in range(begin, steps, stride) if each or every else ():
        ends = each[i][1] if each else None
        results.latest, log.window = (outputs.logs, i), windows[i] if windows else log.window
        if starts and (log.window or log.epoch):
            starts[i][5] = log.so_far()
        for k in range(i * window, (i + 1) * window):
            if ends is None:
                break
            clock.global_step, clock.batch_idx = step + (k + 1) // window, first + k + 1
            log.batch = batches.host[k]
            ends(replace(outputs, step=i, batch=k), log.batch, first + k)
        clock.global_step = step + i + 1
        if (log.window or (every and clock.global_step % every == 0)) and (row := row_of_step(run)) is not None:
            rows.append(row)
    return rows


def start_batches(run: Run, batches: Batches, each: list[StepHooks]) -> list[dict[str, Any]] | int:
    """Call the hooks that begin the batches of a dispatch.

    Returns:
        What they have logged, by optimizer step, nothing if there are none; or the number of the batch at which one
        ends the epoch.
    """
    log, clock, position, window = run.hooks.log, run.hooks.clock, run.position, run.window.batches
    windows = []
    for i, (starts, _, _) in enumerate(each):
        for k in range(i * window, (i + 1) * window):
            if starts is None:
                break
            clock.global_step, clock.batch_idx = position.global_step + i, position.batch_idx + k
            log.batch = batches.host[k]
            if starts(log.batch, batches.index + k):
                clock.follow(position)
                return k
        windows += (log.window,)
        log.window = {}
    clock.follow(position)
    return windows
