"""Several steps in one dispatch: when, how many, and what their hooks see."""

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxlit.checkpoints.position import Phase
from jaxlit.data.prefetcher import Batches
from jaxlit.distributed.exchange import fetch
from jaxlit.errors import ArgumentError
from jaxlit.loop.due import StepHooks
from jaxlit.loop.host_sums import Logged
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
        window, epoch = self._run.window.batches, self._run.control.num_training_batches
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
        if self.size == 1 or position.filled or position.phase > Phase.BATCH_START:
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


class Refused(NamedTuple):
    """A dispatch of which nothing was taken: at one of its batches a hook ends the epoch."""

    batch: int  # its number in the dispatch
    logged: list[Logged]  # what the hooks that begin the batches have logged, those of this batch last


def take_steps(run: Run, batches: Batches, *, begin: bool) -> list[Row] | Refused:
    """Take the optimizer steps of several batches in one dispatch, between the hooks of all of them.

    Args:
        run: The run.
        batches: The batches.
        begin: Whether they are the first of the epoch.

    Returns:
        The rows of its steps.
    """
    position, hooks, results = run.position, run.hooks, run.results
    window, first, step = run.window.batches, position.batch_idx, position.global_step
    count, latest, data = len(batches.positions), results.latest, position.data
    steps = count // window
    each = run.due.of_steps(step, steps)
    begun = start_batches(run, batches, each) if each else []
    if isinstance(begun, Refused):
        return begun
    if begin:
        run.begin_steps()
    logs, loss, outputs = run.engine.fused_steps(window, batches.arrays)
    results.latest, run.prefetcher.token = (logs, steps - 1), logs
    position.advance(batches.positions[-1], stepping=steps, last=batches.is_last, batches=count)
    if hooks.live is not None:
        hooks.live.stale = True
    period = run.in_flight.period
    if position.total_batch_idx // period > (position.total_batch_idx - count) // period:
        run.in_flight.wait(logs)
    log = hooks.log
    logged = log.so_far() if log.window or log.epoch else None
    if run.engine.nan_policy == "raise":
        places = [data, *batches.positions[window - 1 : -1 : window]]
        run.unchecked.starts += [
            [step + i, first + i * window, 0, at, (logs, i - 1) if i else latest, logged] for i, at in enumerate(places)
        ]
    rows: list[Row] = []
    try:
        end_batches(run, batches, each, begun, rows, StepOutputs(logs, loss, outputs, run.engine.outputs_with_rows))
    except BaseException:
        results.pending = [*results.pending, *rows]
        raise
    finally:
        results.latest = (logs, steps - 1)
        hooks.clock.follow(position)
    if hooks.live is not None and not hooks.live.stale and "module" not in run.control.noted:
        run.control.noted.add("module")
        text = (
            "A batch hook has read the module in a dispatch of %d batches: it has the weights after all of its steps."
        )
        _logger.info(text, count)
    return rows


def start_batches(run: Run, batches: Batches, each: list[StepHooks]) -> list[Logged] | Refused:
    """Call the hooks that begin the batches of a dispatch, and return what each batch's have logged."""
    log, clock, position, window = run.hooks.log, run.hooks.clock, run.position, run.window.batches
    before, begun = log.take(), list[Logged]()
    try:
        for k, host in enumerate(batches.host):
            if (starts := each[k // window][0]) is not None:
                clock.global_step, clock.batch_idx = position.global_step + k // window, position.batch_idx + k
                log.batch = host
                if starts(host, batches.index + k):
                    return Refused(k, [*begun, log.take()])
            begun.append(log.take())
    finally:  # after an error as well: what is saved then is the state before the dispatch
        log.go_back(before)
        clock.follow(position)
    return begun


def end_batches(
    run: Run,
    batches: Batches,
    each: list[StepHooks],
    begun: list[Logged],
    rows: list[Row],
    outputs: StepOutputs,
) -> None:
    """Call the hooks that end the batches of a dispatch, and make the rows of its steps.

    Args:
        run: The run, whose position is after the dispatch.
        batches: The batches.
        each: The hooks of each step; nothing if there are none.
        begun: What the hooks that begin the batches have logged.
        rows: Takes the rows.
        outputs: What the steps have returned.
    """
    results, log, clock, window = run.results, run.hooks.log, run.hooks.clock, run.window.batches
    count, every = len(batches.positions), run.log_every
    steps = count // window
    step, first = run.position.global_step - steps, run.position.batch_idx - count
    starts = run.unchecked.starts[-steps:] if run.engine.nan_policy == "raise" else None
    failed: BaseException | None = None
    if not each:  # only rows
        for i in range(every - step % every - 1, steps, every) if every else ():
            results.latest, clock.global_step = (outputs.logs, i), step + i + 1
            rows += [row for row in [row_of_step(run)] if row is not None]
    for k, host in enumerate(batches.host) if each else ():
        i, ends = k // window, each[k // window][1]
        log.give(begun[k])
        if k % window == 0:
            results.latest = (outputs.logs, i)
            if starts is not None and (log.window or log.epoch):
                starts[i][5] = log.so_far()
        clock.global_step, clock.batch_idx = step + (k + 1) // window, first + k + 1
        if ends is not None and failed is None:
            log.batch = host
            try:
                ends(replace(outputs, step=i, batch=k), host, first + k)
            except BaseException as error:  # the steps are taken: those after it have their rows
                failed = error
        if (k + 1) % window == 0:
            rows += [row for row in [row_of_step(run, last=k + 1 == count)] if row is not None]
    if failed is not None:
        raise failed
    if not each and run.control.should_stop:
        clock.global_step, results.latest = step + steps, (outputs.logs, steps - 1)
        if not (every and clock.global_step % every == 0):
            rows += [row for row in [row_of_step(run)] if row is not None]
