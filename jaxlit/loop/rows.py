"""The rows of steps, epochs and validations, and the guard that is read with them."""

import logging
import math
import time
from collections.abc import Mapping
from typing import Any

from jaxlit.callbacks.base import Measured
from jaxlit.loop.hooks import Hook, Hooks, TimedFunction
from jaxlit.loop.results import TRACED, Row, Total
from jaxlit.loop.rewind import check_finite
from jaxlit.loop.run import Run

_logger = logging.getLogger("jaxlit")


def rows_of_step(run: Run, step: int, *, last: bool = True) -> list[Row]:
    """Return the row of an optimizer step, to be read one step late, when its values are ready; nothing for no row.

    `last` is whether training stops after it if a stop was asked for: the last step has a row.
    """
    control = run.control
    log = run.hooks.log
    window = log.take_window() if log.window else {}
    every = run.settings.log_every_n_steps  # `run.log_every` without a call in each step
    every = control.log_every if isinstance(every, str) else every
    # The table stays on the device: reading it now would wait for the step, and the device for the next dispatch.
    if every and ((step + 1) % every == 0 or (last and control.should_stop)):
        if (hook := run.hooks.bound.get("begin_row")) is not None:  # no call where nothing measures
            hook(step)
        run.results.steps_at_row = step + 1
        return [Row(run.results.latest, window, step)]
    # Values of a trace_step have the interval of their callback: they get a row even if the step would have none.
    if traced := {name: total for name, total in window.items() if total.hook == TRACED}:
        return [Row(None, traced, step)]
    return [Row(None, {}, step)] if run.tracing.seen else []


def log_pending(run: Run) -> None:
    """Read the pending rows and log them."""
    while run.results.pending:
        logs, window, step = run.results.pending[0]
        if run.tracing.seen:
            run.tracing.deliver(step)  # first: a checkpoint that on_trace writes holds the row
        run.results.pending = run.results.pending[1:]
        if logs is None:  # only what was traced
            log_row(run, window, step)
            continue
        begun = time.perf_counter()
        read = run.results.read(logs)  # waits for the device
        run.in_flight.seconds += time.perf_counter() - begun
        run.results.newest_loss = read.values[0]
        row: dict[str, Any] = {**read.row, **window}
        # A step that logs nothing else gets no row for its rates, unless a callback asks for it.
        if run.results.rates_in == "step" or (run.results.rates_in is None and row):
            # The first row gives the order of the names, the last the values: a user may log under a rate's name.
            row = {**row, **read.rates, **row}
        if (hook := run.hooks.bound.get("fill_row")) is not None:  # the row's values have arrived, so its step is done
            hook(added := Measured(row), step)
            row |= added
        log_row(run, row, step)
        if read.bad_step >= 0 and read.bad_step != run.unchecked.warned_of:
            if run.settings.nan_policy != "skip":  # later steps of the same dispatch are undone
                run.results.pending = []
            check_finite(run)
        else:
            run.settle(step + 1)


def bind_measures(hooks: Hooks) -> None:
    """Bind the hooks of callbacks that add to rows, which only those have."""
    owners: list[Any] = [c for c in hooks.callbacks if callable(getattr(type(c), "fill_row", None))]
    for name in ("begin_row", "fill_row") if owners else ():
        hooks.bound[name] = Hook(hooks, name, [TimedFunction(c, getattr(c, name)) for c in owners])


def row_of_epoch(run: Run) -> dict[str, Any]:
    """Show the metrics of an epoch, summed over its steps, and return those that are logged."""
    engine = run.engine
    row = dict[str, Any]()
    if run.position.global_step == run.position.first_step:  # without a step there are no metrics
        return row
    metrics = engine.training_table.metrics
    values = engine.epoch_values() if any(m.on_epoch for m in metrics) else []
    run.results.newest_loss = lambda: (engine.epoch_values() or [math.nan])[0]
    for metric, value in zip(metrics, values or [math.nan] * len(metrics), strict=True):
        if metric.on_epoch:
            run.results.put_epoch(metric, value)
            row |= {metric.epoch_name: value} if metric.logger and values else {}
    return {**row, **run.results.read(run.results.latest).rates, **row} if run.results.rates_in == "epoch" else row


def note_monitor(run: Run) -> None:
    """Note which rows have the learning rate, and warn if it cannot be read from the optimizer."""
    monitor = next((c for c in run.hooks.callbacks if c.rates_in is not None), None)
    run.results.rates_in = None if monitor is None else monitor.rates_in
    if monitor is not None and not run.engine.rates.names:
        _logger.warning(
            "%s: the learning rate cannot be read from what %s.configure_optimizers returns, and is in no row. Return "
            "jl.Optimizer(tx, lr_schedule=schedule), or keep it in the optimizer's state: "
            "optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(learning_rate=schedule).",
            type(monitor).__name__,
            type(run.module).__name__,
        )


def log_row(run: Run, row: Mapping[str, float | Total], step: int) -> None:
    """Give a row to `on_log`, unless it is empty, and keep that of a fit in the history."""
    if row:
        values = {k: float(v) for k, v in row.items()}
        if run.data.is_fit:
            run.results.history.add(values, step)
        run.hooks.bind("on_log")({**values, "epoch": run.position.epochs}, step)
