"""The training loop: `train_epoch` is that of the pseudocode of `jaxlit.Callback`, line by line.

`run.position` is how far training is. It moves where a step is dispatched and where an epoch is over. Checkpoints are
taken at safe points (`safe_point`): between two batches, and after an epoch, where nothing of a batch is at hand.
"""

import contextlib
import logging
import math
import time
from collections.abc import Iterable

from jaxlit.data.prefetcher import Batch
from jaxlit.errors import NonFiniteError, add_note
from jaxlit.loop.dispatch import Dispatch, take_step, take_steps
from jaxlit.loop.evaluate import evaluate, sanity_check
from jaxlit.loop.hooks import Hook
from jaxlit.loop.results import UNREAD, Row
from jaxlit.loop.rewind import MOST_STARTS, check_finite, end_before_bad_step
from jaxlit.loop.rows import bind_measures, log_pending, log_row, note_monitor, row_of_epoch, rows_of_step
from jaxlit.loop.run import Due, Run, Tracing
from jaxlit.loop.snapshot import check_loader, warn_of_hyperparams

_logger = logging.getLogger("jaxlit")


def fit(run: Run) -> None:
    """Train until a limit or a stop."""
    run.begin("steps")
    run.times.begin(run.settings)
    bind_measures(run.hooks)
    run.is_safe = False  # until the first safe point
    try:
        has_trained = train_epochs(run)
        run.is_safe = True
        write_requested(run)
        if has_trained:
            run.hooks("on_train_end")
            run.compare_writes()
        run.engine.state.use_averages()
        if run.hooks.live is not None:
            run.hooks.live.stale = True
    except BaseException as error:
        run.times.fail(error, run.place)  # first: what follows may wait for the device, and so for the other processes
        try:  # a second Ctrl-C may come while these wait for the device
            if isinstance(error, Exception):
                while run.results.pending:  # the last rows, if the device still has them
                    with contextlib.suppress(Exception):
                        log_pending(run)
            with contextlib.suppress(Exception):  # the device may be what failed
                end_before_bad_step(run, error)
        finally:
            end_at_safe_point(run)
            write_requested_at(run, error)
        raise


def train_epochs(run: Run) -> bool:
    """Train the remaining epochs. Return False if there were none, and so no train hook was called."""
    if not run.checkpoints.resumed:
        sanity_check(run)
    source, limit = run.data.training
    # Training that stopped inside an epoch was saved before its end: a validation, and the epoch's row, may be left.
    resumes_epoch = run.checkpoints.resumed and run.position.inside and not run.control.interrupted
    if run.checkpoints.resumed and run.control.is_final and run.may_stop:
        text = "Nothing is trained: the run was stopped (%s). A path as resume= continues it; after EarlyStopping, "
        text += "another patience or threshold does as well."
        _logger.warning(text, run.control.stop_reason)
    # As in Lightning no train hook is called where a limit leaves nothing; a loader that is empty itself is an error.
    if (run.done and not resumes_epoch) or (limit == 0 and source.length != 0):
        run.print_signal()
        return False
    note_monitor(run)
    run.hooks("on_train_start")
    if run.settings.nan_policy != "ignore" or run.hooks.bind("on_safe_point"):  # where it is asked for
        run.engine.state.infinities_at_start = run.engine.state.infinities()
    run.unchecked.finite_step = run.position.global_step
    run.meet()
    dispatch = Dispatch(run)
    while resumes_epoch or not run.done:
        reload(run)  # first: the loader hook may return other data now, whose length the rest uses
        run.position.cut = False
        train_epoch(run, dispatch, resumes_epoch=resumes_epoch)
        if run.done:
            check_finite(run, params=True)
        # A rollback at the end may have undone the step with which training ended: then the epoch continues.
        resumes_epoch = run.position.cut and not run.done
    run.print_signal()  # one that came when the epoch had ended
    return True


def train_epoch(run: Run, dispatch: Dispatch, *, resumes_epoch: bool) -> None:
    """Train one epoch; with `resumes_epoch`, the part after the checkpoint."""
    position = run.position
    hooks = run.hooks
    due = run.due
    begin_epoch(run, dispatch, resumes_epoch=resumes_epoch)  # on_train_epoch_start
    shows_steps = False
    something_is_due = True
    batches = iter(draw_rest_of_epoch(run, dispatch))
    for batch in batches:
        # Callbacks with `due_in`, rows, validations and limits act in few steps: most steps compare two numbers.
        if something_is_due or due.is_stale:
            due.find_next(run, position.global_step)
        step = position.global_step + (1 if batch.count == 1 else batch.count // run.accumulation.batches)
        something_is_due = step >= due.next_step or run.prefetcher.now >= due.next_time
        step_hooks = due.at(step) if something_is_due else due.quiet_hooks
        hooks.log.batch = batch.host

        # on_train_batch_start: -1 skips the rest of the epoch.
        if step_hooks.start is not None and step_hooks.start(batch.host, batch.index):
            position.over, position.data = True, batch.position
            break
        if not shows_steps:  # the first batch compiles
            check_loader(run, batch.position if batch.count == 1 else batch.position[-1])
            run.begin_steps(batch.arrays)
            shows_steps = True
        # training_step and on_train_batch_end. The step is dispatched, not done: hooks run while the device computes.
        # The position is after it from here on, also for what an error leaves.
        take = take_step if batch.count == 1 else take_steps
        rows = take(run, batch, step_hooks.end)
        if not dispatch.decided:
            dispatch.measure(run.results.latest)
        elif due.is_quiet and not something_is_due:  # small steps: what follows is needed once for several
            batch = dispatch.take_ahead(batches, batch)
        # At most `max_in_flight` steps are dispatched, so that the host does not run ahead of the memory.
        if position.total_batch_idx % run.in_flight.period < batch.count:
            run.in_flight.wait(run.prefetcher.token)

        if due.next_time < math.inf and time.perf_counter() >= due.next_time:  # counts after this step already
            something_is_due = True
            step_hooks = due.at(position.global_step)
        must_look = something_is_due or due.is_stale or run.control.interrupted or run.control.should_stop
        has_rows = rows or run.results.pending or hooks.log.window
        if not (must_look or has_rows or run.requested or batch.is_last or step_hooks.safe_point is not None):
            position.validated = True  # no validation is due
            continue
        log_step(run, rows)  # log(row); row = row_of_step()
        if not (run.data.validates and run.validation_is_due(position.over)):
            position.validated = True
        elif not run.control.interrupted:  # else a resume does it
            validate(run)
        if run.done:
            break
        if not position.over:  # the end of the epoch has its own
            safe_point(run, step_hooks.safe_point, epoch_over=False, training_over=False)
    else:
        end_batches(run)
    run.print_signal()
    end_epoch(run)


def begin_epoch(run: Run, dispatch: Dispatch, *, resumes_epoch: bool) -> None:
    """Reset the sums and call `on_train_epoch_start`; in an epoch that is resumed, do the validation that was left."""
    if not resumes_epoch:
        run.engine.begin_epoch(run.position.epoch)
        run.results.newest_loss = None
        run.hooks("on_train_epoch_start")
        run.meet()
        # After the hook, which may set it; all windows of an epoch have one length.
        run.accumulation.batches = run.settings.accumulate_grad_batches
    run.engine.hold(run.position.epoch)
    dispatch.begin_epoch()
    run.due.forget()
    if not run.position.validated:
        resume_validation(run)


def draw_rest_of_epoch(run: Run, dispatch: Dispatch) -> Iterable[Batch]:
    """Set the loader to where the epoch continues, and return its remaining batches.

    From here on the run does not count as resumed.
    """
    (source, limit) = run.data.training
    position = run.position
    resumed = run.checkpoints.resumed
    run.checkpoints.resumed = False
    if position.over or run.done:
        return ()
    if resumed and run.checkpoints.resume is not None:  # after the hooks that may set them
        warn_of_hyperparams(run, run.checkpoints.resume.checkpoint.state)
    if position.batch_idx and not (resumed or source.continues):
        # Training had stopped in this epoch, and a rollback has undone the last step.
        source.load_state_dict(source.state_dict(position.epoch, position.data))
    if dispatch.size > 1 or not dispatch.decided:
        return run.prefetcher.dispatches(source, position.epoch, limit, position.batch_idx, dispatch)
    return run.prefetcher.batches(source, position.epoch, limit, position.batch_idx)


def log_step(run: Run, rows: list[Row] | None) -> None:
    """Log the pending rows of the previous dispatch, and make the rows of this dispatch pending.

    They are None for a single batch, whose row is made here, if one is due.
    """
    position = run.position
    step = run.position.global_step
    failed = None
    try:
        if run.results.pending:
            log_pending(run)
        if run.times.waits and (run.due.is_stale or time.perf_counter() >= run.due.next_time):
            run.times.check(run.control)
        if run.times.team.size > 1:
            run.meet()
    except NonFiniteError:  # which undoes the newest step
        raise
    except Exception as error:
        failed = error  # the newest step keeps its row
    if position.global_step == step:  # else a rollback has undone it
        is_due = run.due.is_stale or step >= run.due.next_step or run.control.should_stop or run.hooks.log.window
        if rows is None and is_due and not position.filled:
            rows = rows_of_step(run, step - 1)
        run.results.pending = [*run.results.pending, *(rows or [])]
    if failed is not None:
        raise failed
    # In debug mode this waits for each step, so that an error names it at once; else where nothing is logged.
    if run.settings.debug or len(run.unchecked.starts) >= MOST_STARTS:
        check_finite(run)
    elif run.engine.nan_policy != "raise":  # no step is undone: what hooks logged, and was read since, is added up
        run.hooks.log.settle(position.total_batch_idx - UNREAD)


def validate(run: Run) -> None:
    """Validate during training, after all earlier steps are logged and checked."""
    log_pending(run)
    check_finite(run)
    evaluate(run, "validation", run.data.val)
    run.times.restart_interval(run.settings)
    run.meet()


def end_batches(run: Run) -> None:
    """Mark the epoch as over: the loader has no batch left for it."""
    (source, limit) = run.data.training
    position = run.position
    if not position.over:
        if run.done:  # a hook has asked for a stop, or a signal ended the wait for a batch
            return
        if not position.batch_idx:
            raise source.empty()
        # The last batch was not marked: a limit may be smaller than what a checkpoint has seen.
        position.over = True
    if limit is not None and position.batch_idx < limit and position.epoch == 0 and not run.settings.fast_dev_run:
        text = "%s gave %d batches where its length or limit_train_batches promises %d: the last one ended the epoch."
        _logger.warning(text, source.argument, position.batch_idx, limit)


def end_epoch(run: Run) -> None:
    """End an epoch, or the part of it that a stop has left, in which a resume continues."""
    position = run.position
    hooks = run.hooks
    cut = not (position.over and position.validated)
    if cut:  # checkpoints are taken now: the end of the epoch changes states of callbacks
        safe_point(run, hooks.bind("on_safe_point"), epoch_over=False, training_over=True)
    drop_window(run)
    log_pending(run)  # log(row)
    check_finite(run)
    row = row_of_epoch(run)  # before the hooks, which may read the epoch's metrics
    hooks.log.show_epoch()
    hooks("on_train_epoch_end")
    run.meet()
    try:
        log_row(run, {**row, **hooks.log.row_of_epoch()}, max(position.global_step - 1, 0))
        run.times.check(run.control, epoch_over=True)
        run.meet()
    finally:  # also after an error in a logger: a resume brings no second row
        position.cut = cut
        if not cut:  # before the hook, where checkpoints are taken: they continue with the next epoch
            position.advance_epoch(run.data.training[0].between_epochs(position.data))
            hooks.log.begin_epoch()
    if not cut:
        safe_point(run, hooks.bind("on_safe_point"), epoch_over=True, training_over=run.done)


def resume_validation(run: Run) -> None:
    """Validate where a checkpoint was taken: a stop has cut the validation there, or an error came before it."""
    step = run.position.global_step
    run.due.find_next(run, step - 1)
    if run.data.validates:
        validate(run)
    else:  # no longer
        run.position.validated = True
    if not (run.position.over or run.done):
        safe_point(run, run.due.at(step).safe_point, epoch_over=False, training_over=False)


def drop_window(run: Run) -> None:
    """Drop the gradients of a window whose rest a hook has skipped."""
    if run.position.over and run.position.filled:
        run.engine.clear_window()
        run.hooks.log.take_window()
        run.position.filled = 0  # `batch_idx` does not move back
        run.unchecked.starts.clear()


def reload(run: Run) -> None:
    """Open the loaders of hooks again where `reload_dataloaders_every_n_epochs` says so."""
    every = run.settings.reload_dataloaders_every_n_epochs
    if not every or not run.position.epoch or run.position.epoch % every or run.checkpoints.resumed:
        return
    run.data.reopen(run.settings)
    run.data.count(run.control, run.accumulation.argument)
    run.tracing = Tracing(run.hooks, run.log_every)
    run.due = Due(run.hooks, run.tracing)


def safe_point(run: Run, hook: Hook | None, *, epoch_over: bool, training_over: bool) -> None:
    """Call `on_safe_point`, and write the checkpoints that other hooks have requested.

    Only a validation that a stop has cut may be left to do.
    """
    run.is_safe = True
    if hook is not None:
        hook(epoch_over, training_over)
    write_requested(run)
    run.is_safe = False


def write_requested(run: Run) -> None:
    """Write the checkpoints that hooks have requested since the last safe point."""
    while run.requested:
        run.requested.pop(0)()


def end_at_safe_point(run: Run) -> None:
    """Make where an error ends training a safe point: after the newest step, or before the epoch that begins."""
    position = run.position
    by_clock = run.times.has_interval and run.times.team.size > 1  # on which the processes would have to agree
    if not position.validated:
        position.validated = by_clock or not (run.data.validates and run.validation_is_due(position.over))
    run.is_safe = True


def write_requested_at(run: Run, error: BaseException) -> None:
    """Write the requested checkpoints where an error has ended training, unless a user ends it at once."""
    # The other processes may be elsewhere, and would not take part.
    if isinstance(error, Exception) and not run.times.team.over:
        while run.requested:
            try:
                run.requested.pop(0)()
            except Exception as problem:
                add_note(error, f"A checkpoint that a hook had requested was not written: {problem!r}")
    if run.requested:
        text = "%d checkpoints that hooks had requested were not written: training ended at once."
        _logger.warning(text, len(run.requested))
