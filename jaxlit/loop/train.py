"""The training loop; `jaxlit.Callback` has its order as pseudocode.

The loops are plain functions, and `run.position` is how far training is. Do not change the order: the phase of the
position moves *before* a hook runs, so that a checkpoint which the hook takes, or which an error in it leaves,
continues after the hook.
"""

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jaxlit.checkpoints.position import Evaluation, Phase
from jaxlit.data.prefetcher import Batch, Batches
from jaxlit.loop.dispatch import Dispatch, take_steps
from jaxlit.loop.due import Due
from jaxlit.loop.evaluate import evaluate, sanity_check
from jaxlit.loop.hooks import Hook
from jaxlit.loop.results import Outputs, Row
from jaxlit.loop.rewind import MOST_STARTS, check_finite, end_before_bad_step
from jaxlit.loop.rows import bind_measures, log_pending, log_row, note_monitor, row_of_epoch, row_of_step
from jaxlit.loop.run import Run
from jaxlit.loop.tracing import Tracing

_logger = logging.getLogger("jaxlit")


def fit(run: Run) -> None:
    """Train until a limit or a stop."""
    run.begin("steps")
    run.times.begin(run.settings)
    bind_measures(run.hooks)
    if not run.checkpoints.resumed:
        sanity_check(run)
    source, limit = run.data.training
    # Training that stopped inside an epoch was saved before its end: rows, and a validation, may be left to do.
    inside = run.checkpoints.resumed and run.position.phase > Phase.EPOCH_START and not run.control.interrupted
    # As in Lightning no train hook is called where a limit leaves nothing; a loader that is empty itself is an error.
    if (run.done and not inside) or (limit == 0 and source.length != 0):
        run.print_signal()
        return
    note_monitor(run)
    run.hooks("on_train_start")
    run.meet()
    dispatch = Dispatch(run)
    try:
        while inside or not run.done:
            inside = False
            train_epoch(run, dispatch)
        run.print_signal()  # one that came when the epoch had ended
    except BaseException as error:
        run.fail(error)  # first: what follows may wait for the device, and so for the other processes
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):  # the last row, if the device still has it
                log_pending(run)
        with contextlib.suppress(Exception):  # the device may be what failed
            end_before_bad_step(run, error)
        raise
    run.hooks("on_train_end")


def train_epoch(run: Run, dispatch: Dispatch) -> None:
    """Train one epoch, or what a checkpoint has left of it."""
    reload(run)  # first: the loader hook may return other data now, whose length the rest uses
    position, hooks = run.position, run.hooks
    hooks.clock.follow(position)
    if position.phase <= Phase.EPOCH_START:
        position.phase = Phase.BATCH_START
        run.engine.begin_epoch(position.epoch)
        run.results.newest_loss = None
        hooks("on_train_epoch_start")
        run.meet()
        # After the hook, which may set it; all windows of an epoch have one length.
        run.window.batches = run.settings.accumulate_grad_batches
    dispatch.begin_epoch()
    if position.phase > Phase.STEP:  # resumed after a step: its row, validation or safe point may be left to do
        step = position.global_step + (position.filled > 0)
        run.due.forget()
        run.due.move(run, step - 1)
        after_step(run, run.due.at(step)[2])
    take_batches(run, dispatch)
    run.print_signal()
    if not position.over or run.evaluation is not None:
        # Training stops inside an epoch. Checkpoints are taken now: the end of the epoch changes states of callbacks.
        safe_point(run, hooks.bind("on_safe_point"), training_over=True)
    end_epoch(run)


def take_batches(run: Run, dispatch: Dispatch) -> None:
    """Take the batches that are left of an epoch, until it is over or training is."""
    position, control, log, results = run.position, run.control, run.hooks.log, run.results
    in_flight, due, acts = run.in_flight, run.due, True
    due.forget()
    batches, shows_steps, run.checkpoints.resumed = batches_left(run, dispatch), False, False
    for batch in batches:
        if type(batch) is Batches:
            if take_together(run, batch, begin=not shows_steps):
                break
            shows_steps = acts = True
            continue
        if acts or not due.next:
            due.move(run, position.global_step)
        # Whether something acts in the batch's step. Most steps pay for the comparison of two numbers, and no more.
        acts = position.global_step + 1 >= due.next or run.prefetcher.now >= due.time
        # None for a hook that no callback has in this step, so that it pays no call.
        starts, ends, saves = due.at(position.global_step + 1) if acts else due.each
        log.batch = batch.host
        if position.phase <= Phase.BATCH_START:
            position.phase = Phase.STEP
            if starts is not None and starts(batch.host, batch.index):
                position.end_batches(batch.position)
                break
        if not shows_steps:
            run.begin_steps()
            shows_steps = True
        logs, loss, outputs = take_step(run, batch)
        # The step is dispatched, not done: the hooks run while the device computes.
        if ends is not None:
            ends(Outputs(logs, loss, outputs), batch.host, batch.index)
        if not dispatch.decided:
            dispatch.measure(logs)
        # At most `max_in_flight` steps are dispatched, so that the host does not run ahead of the memory.
        if not position.total_batch_idx % in_flight.period:
            in_flight.wait(logs)
        asked = control.interrupted or control.should_stop or log.window or not due.next
        # A time that is over counts after this step already.
        if due.time < math.inf and time.perf_counter() >= due.time:
            asked, saves = True, due.at(position.global_step)[2]
        if acts or asked or batch.is_last or saves is not None or results.pending:
            if after_step(run, saves):
                break
        else:
            position.phase = Phase.BATCH_START
    else:
        end_batches(run)


def batches_left(run: Run, dispatch: Dispatch) -> Iterable[Batch | Batches]:
    """Return what is left of the epoch."""
    (source, limit), position = run.data.training, run.position
    if position.over or run.done:
        return ()
    if position.batch_idx and not (run.checkpoints.resumed or source.continues):
        # Training had stopped in this epoch, and a rollback has undone the last step.
        source.load_state_dict(source.state_dict(position.epoch, position.data))
    if dispatch.size > 1 or not dispatch.decided:
        return run.prefetcher.dispatches(source, position.epoch, limit, position.batch_idx, dispatch)
    return run.prefetcher.batches(source, position.epoch, limit, position.batch_idx)


def take_together(run: Run, batches: Batches, *, begin: bool) -> bool:
    """Take several batches in one dispatch; returns whether no further batch is taken.

    Args:
        run: The run.
        batches: The batches.
        begin: Whether they are the first of the epoch.
    """
    position, hooks = run.position, run.hooks
    saves: list[Callable[[], None]] = []
    hooks.deferred = saves
    try:
        rows = take_steps(run, batches, begin=begin)
    except Exception:
        hooks.deferred = None
        for save in saves:
            save()
        raise
    finally:
        hooks.deferred = None
    if isinstance(rows, list):
        safe = run.due.at(position.global_step)[2]
        return after_step(run, safe, rows, saves)
    # A hook ends the epoch at one of them: those before it, whose hooks have begun them, are taken one by one.
    if rows.batch and begin:
        run.begin_steps()
    for batch, logged in zip(run.prefetcher.one_by_one(batches, rows.batch), rows.logged, strict=False):
        hooks.log.give(logged)
        hooks.log.batch, position.phase = batch.host, Phase.STEP
        run.due.move(run, position.global_step)
        _, ends, safe = run.due.at(position.global_step + 1)
        logs, loss, outputs = take_step(run, batch)
        if ends is not None:
            ends(Outputs(logs, loss, outputs), batch.host, batch.index)
        run.in_flight.wait(logs)
        if after_step(run, safe):
            return True
    hooks.log.give(rows.logged[-1])
    position.phase = Phase.STEP
    position.end_batches(batches.positions[rows.batch])
    for save in saves:
        save()
    return True


def take_step(run: Run, batch: Batch) -> tuple[jax.Array, Any, Any]:
    """Dispatch one step, of the accumulation window or of the optimizer, and move the position after it.

    Returns:
        The table of metrics, the loss of a window's batch, and the other outputs of the step; all on the device.
    """
    engine, position = run.engine, run.position
    # At the first batch of a window, or of what a resume has left of one: a later check may end training before it.
    if engine.nan_policy == "raise" and not (position.filled and run.unchecked.starts):
        log, at = run.hooks.log, position
        logged = log.so_far() if log.window or log.epoch else None
        run.unchecked.starts += ((at.global_step, at.batch_idx, at.filled, at.data, run.results.latest, logged),)
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
    # Before the hook: a checkpoint in it has this batch.
    position.advance(batch.position, stepping=stepping, last=batch.is_last)
    clock = run.hooks.clock
    clock.global_step, clock.batch_idx = position.global_step, position.batch_idx
    if run.hooks.live is not None:
        run.hooks.live.stale = True
    return logs, loss, outputs


def after_step(
    run: Run, hook: Hook | None, rows: list[Row] | None = None, saves: Iterable[Callable[[], None]] = ()
) -> bool:
    """Log the rows of the dispatch before, keep this one's, validate if it is due.

    Args:
        run: The run.
        hook: The `on_safe_point` of this step.
        rows: Those of the steps of a dispatch of several; None of a single one.
        saves: Write the checkpoints that its hooks asked for.

    Returns:
        Whether training is over.
    """
    position = run.position
    if run.results.pending:
        log_pending(run)  # one step late, when its values have arrived; a rollback in it leaves this step without a row
    if run.times.waits and (not run.due.next or time.perf_counter() >= run.due.time):
        run.times.check(run.control)
    if run.times.team.size > 1:
        run.meet()
    if position.phase <= Phase.ROW:
        position.phase = Phase.VALIDATION
        is_due = position.global_step >= run.due.next or run.control.should_stop or run.hooks.log.window
        if rows is None and is_due and not position.filled:
            rows = [row for row in [row_of_step(run)] if row is not None]
        run.results.pending = rows or []
        for save in saves:
            save()
    # In debug mode this waits for each step, so that an error names it at once; else where nothing is logged.
    if run.settings.debug or len(run.unchecked.starts) >= MOST_STARTS:
        check_finite(run)
    if position.phase <= Phase.VALIDATION:
        position.phase = Phase.SAFE_POINT
        if run.data.validates and run.validation_is_due(position.over):
            run.evaluation = Evaluation()
    if run.evaluation is not None and not run.control.interrupted:  # an interrupted one stays for the resume
        validate(run)
        run.meet()
    done = run.done
    if not (position.over or done):
        safe_point(run, hook, training_over=False)
    return done


def validate(run: Run) -> None:
    """Validate during training, after all earlier steps are logged and checked."""
    log_pending(run)
    check_finite(run)
    evaluate(run, "validation", run.data.val)
    run.times.restart_interval(run.settings)


def safe_point(run: Run, hook: Hook | None, *, training_over: bool) -> None:
    """Call `on_safe_point` after a batch; only a validation that a stop has cut may be left to do."""
    if run.evaluation is None and run.position.phase == Phase.SAFE_POINT:
        run.position.phase = Phase.BATCH_START  # what is saved here continues with the next batch
    if hook is not None:
        hook(False, training_over)


def end_batches(run: Run) -> None:
    """Mark the epoch as over: the loader has no batch left for it.

    Raises:
        DataError: It had no batch at all.
    """
    (source, limit), position = run.data.training, run.position
    if not position.over:
        if run.done:  # a hook has asked for a stop, or a signal ended the wait for a batch
            return
        if not position.batch_idx:
            raise source.empty()
        # The last batch was not marked: a limit may be smaller than what a checkpoint has seen.
        position.end_batches(position.data)
    if limit is not None and position.batch_idx < limit and position.epoch == 0 and not run.settings.fast_dev_run:
        text = "%s gave %d batches where its length or limit_train_batches promises %d: the last one ended the epoch."
        _logger.warning(text, source.argument, position.batch_idx, limit)


def end_epoch(run: Run) -> None:
    """Call the end hooks of an epoch and log its metrics; the position stays in an epoch that a stop has cut."""
    position, log = run.position, run.hooks.log
    cut = not position.over or run.evaluation is not None  # a resume continues in this epoch
    if position.over and position.filled:  # a hook skipped the rest of the window: its gradients are dropped
        run.engine.clear_window()
        log.take_window()
        position.drop_window()
        run.unchecked.starts.clear()
    log_pending(run)
    check_finite(run)
    row = row_of_epoch(run)  # before the hooks, which may read the epoch's metrics
    if cut or position.phase <= Phase.EPOCH_END:
        position.phase = position.phase if cut else Phase.EPOCH_ROW
        log.show_epoch()
        run.hooks("on_train_epoch_end")
        run.meet()
    if cut or position.phase <= Phase.EPOCH_ROW:
        position.phase = position.phase if cut else Phase.DONE
        log_row(run, {**row, **log.take_epoch()}, max(run.hooks.clock.global_step - 1, 0))
    run.times.check(run.control, epoch_over=True)
    run.meet()
    if cut:
        run.hooks.clock.epoch += 1
    else:
        # Before the hook, where checkpoints are taken: they continue with the next epoch.
        position.advance_epoch(run.data.training[0].between_epochs(position.data))
        run.hooks.clock.follow(position)
        run.hooks("on_safe_point", True, run.done)


def reload(run: Run) -> None:
    """Open the loaders of hooks again where `reload_dataloaders_every_n_epochs` says so."""
    every = run.settings.reload_dataloaders_every_n_epochs
    if not every or not run.position.epoch or run.position.epoch % every or run.checkpoints.resumed:
        return
    run.data.reopen(run.settings)
    run.data.count(run.control, run.window.given)
    run.tracing = Tracing(run.hooks, run.log_every)
    run.due = Due(run.hooks, run.tracing)
