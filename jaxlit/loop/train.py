"""The loops: plain functions, and the only callers of hooks.

`fit` is the training loop. Its order stands as pseudocode in `jaxlit.Callback`.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlit.checkpoints.position import Evaluation
from jaxlit.data.source import Source
from jaxlit.distributed.exchange import fetch
from jaxlit.engine.in_flight import Bound
from jaxlit.errors import LogError, NonFiniteError
from jaxlit.loop.host_sums import TRACED, Total
from jaxlit.loop.results import Outputs
from jaxlit.loop.rollback import roll_back
from jaxlit.loop.run import Run, validation_interval

_logger = logging.getLogger("jaxlit")


def fit(run: Run) -> None:
    """Train until a limit or a stop."""
    run.start_clocks()
    if not run.resumed:
        sanity_check(run)
    if run.done or not run.trains:  # and so no train hook
        return
    run.hooks("on_train_start")
    try:
        while not run.done:
            train_epoch(run)
    except Exception:
        with contextlib.suppress(Exception):  # the last row, if the device still has it
            publish(run)
        raise
    run.hooks("on_train_end")


def sanity_check(run: Run) -> None:
    """Validate a few batches, so that what would fail after an epoch fails now."""
    steps = run.trainer.num_sanity_val_steps
    if not run.val or steps == 0:
        return
    # What is taken from an iterator would be missing in the first validation.
    pairs = [(source, limit) for source, limit in run.val if not source.is_iterator]
    loaders = [(source, _smaller(limit, steps if steps > 0 else None)) for source, limit in pairs]
    run.trainer.sanity_checking = True
    try:
        run.hooks("on_sanity_check_start")
        if run.validates and loaders:
            evaluate(run, "validation", loaders)
        run.hooks("on_sanity_check_end")
    finally:
        run.trainer.sanity_checking, run.evaluation = False, None
        run.results.clear()


def train_epoch(run: Run) -> None:
    """Train one epoch, validate where it is due, and log the epoch's metrics."""
    reload(run)
    assert run.train is not None
    trainer, engine, position, results, hooks = run.trainer, run.engine, run.position, run.results, run.hooks
    source, limit = run.train
    starts, ends = hooks.bind("on_train_batch_start"), hooks.bind("on_train_batch_end")
    safe, accumulate = hooks.bind("on_safe_point"), trainer.accumulate_grad_batches
    wait, tracing = Bound(run.trainer.max_in_flight), run.tracing
    tracing.seek(position.global_step)

    if not position.begun:
        position.begun, position.first_step = True, position.global_step
        engine.begin_epoch(position.epoch)
        hooks("on_train_epoch_start")
    elif position.left:  # for the batch in whose hooks the checkpoint was taken
        publish(run)
        if position.left == 2:
            settle(run, results.latest)
        if safe and not (position.over or run.done):
            position.left = 0
            safe(False, False)
    run.resumed = ready = False
    stopped = run.done  # a hook may have asked for it
    feeder, skipped, finished = run.feeder, False, position.over
    draws = feeder.batches(source, position.epoch, limit, position.batch_idx)
    for batch, host_batch, last, at in () if position.over or stopped else draws:
        i = position.batch_idx
        hooks.log.batch = host_batch
        if starts and not position.starting:
            position.starting = True
            if starts(host_batch, i):
                skipped, position.data = True, at
                break
        if not ready:
            ready = True
            engine.prepare_training(feeder.example)
            results.show_steps(engine.training_table)
            tracing.check(engine, results)
        stepping = last or position.filled + 1 >= accumulate
        if not stepping:
            logs, loss, outputs = engine.micro_step(batch)
        elif position.global_step != tracing.next:
            logs, loss, outputs = engine.train_step(batch)
        else:
            logs, loss, outputs = tracing.step(engine, batch)
        results.latest = feeder.token = logs
        position.data, position.batch_idx, position.over = at, i + 1, last
        position.total_batch_idx += 1
        position.starting, position.left = False, 2
        if hooks.live is not None:
            hooks.live.stale = True
        if stepping:
            position.global_step, position.filled = position.global_step + 1, 0
        else:
            position.filled += 1
        step = position.global_step
        if ends:
            ends(Outputs(logs, loss, outputs), host_batch, i)
        wait(logs)
        if run.pending is not None:
            publish(run)
        run.check_time()
        settle(run, logs if position.global_step == step else None)  # after a rollback it has no row
        if run.done:
            break
        position.left = 0
        if safe and not last:
            safe(False, False)
    else:
        # Without a batch too, if a limit is smaller than what a checkpoint has seen.
        position.over |= not (stopped or trainer.interrupted)
    if position.over and not (position.batch_idx or finished):
        raise source.empty()
    if position.over and not trainer.fast_dev_run and limit is not None and position.batch_idx < limit:
        _warn_short(run, source, limit)
    position.over |= skipped
    if run.evaluation is None:
        position.left = 0
    if safe and (not position.over or run.evaluation is not None):
        safe(False, True)  # training stops here: what its end does to callbacks is not part of the epoch
    end_epoch(run)
    if safe and not position.cut:
        safe(True, run.done)


def settle(run: Run, logs: Any) -> None:
    """Do what follows a training step: note its row, and validate if it is time.

    Args:
        run: The run.
        logs: The step's table of metrics.
    """
    trainer, position, log = run.trainer, run.position, run.hooks.log
    if logs is not None and not position.filled and run.evaluation is None:
        window = log.take_window() if log.window else {}
        every = trainer.log_every_n_steps
        # Read one step late, when it is ready.
        if every and (position.global_step % every == 0 or trainer.should_stop):
            run.pending = (logs, window, position.global_step - 1)
        elif traced := {name: total for name, total in window.items() if total.hook == TRACED}:
            run.pending = (None, traced, position.global_step - 1)
        elif run.tracing.seen:
            run.pending = (None, {}, position.global_step - 1)
    if run.every_check:
        check_finite(run)
    if run.evaluation is None and run.validation_due(position.over):
        run.evaluation = Evaluation()
    if run.evaluation is not None and not trainer.interrupted:  # else it is left for the resume
        publish(run)
        check_finite(run)
        evaluate(run, "validation", run.val)
        run.restart_interval()
    if run.evaluation is None:
        position.left = 1


def end_epoch(run: Run) -> None:
    """Run the end hooks of an epoch and log its metrics; one that a stop has cut keeps its place."""
    engine, position, results, log = run.engine, run.position, run.results, run.hooks.log
    if position.over and position.filled:  # the rest was skipped
        engine.clear_window()
        log.take_window()
        position.filled = 0
    publish(run)
    check_finite(run)
    row: dict[str, Any] = {}
    if position.global_step > position.first_step:  # without a step there are no metrics
        metrics = engine.training_table.metrics
        values = engine.epoch_values() if any(m.on_epoch for m in metrics) else [0.0] * len(metrics)
        for metric, value in zip(metrics, values, strict=True):
            if metric.on_epoch:
                results.put_epoch(metric, value)
                row |= {metric.epoch_name: value} if metric.logger else {}
    if not position.ended:
        log.show_epoch()
        position.ended = 1
        run.hooks("on_train_epoch_end")
    if position.ended == 1:
        position.ended = 2
        log_row(run, {**row, **log.take_epoch()}, max(position.global_step - 1, 0))
    position.ended = 0
    if position.over and run.evaluation is None:
        assert run.train is not None
        position.data = run.train[0].between_epochs(position.data)
        position.epoch, position.batch_idx = position.epoch + 1, 0
        position.begun = position.starting = position.over = False
    else:
        position.cut = True
    run.check_time()  # an epoch whose batches were all skipped has not looked


def reload(run: Run) -> None:
    """Open the loaders of hooks again where `reload_dataloaders_every_n_epochs` says so."""
    trainer, every = run.trainer, run.trainer.reload_dataloaders_every_n_epochs
    if not every or not run.position.epoch or run.position.epoch % every or run.resumed:
        return
    if run.train is not None and run.loaders.from_hook("training"):
        run.train[0].close()
        ((source, limit),) = run.loaders.open("training", required=True)
        run.train, run.val_every = (source, limit), validation_interval(trainer, source, limit)
    if run.val and run.loaders.from_hook("validation"):
        for source, _ in run.val:
            source.close()
        run.val = run.loaders.open("validation", required=True)
    run.note_lengths()


def evaluate(run: Run, stage: str, loaders: Sequence[tuple[Source, int | None]]) -> list[dict[str, float]]:
    """Run the validation or test step over loaders.

    Returns:
        The metrics of each loader; none if the run was interrupted.
    """
    hooks, results, log = run.hooks, run.results, run.hooks.log
    now = run.evaluation = run.evaluation or Evaluation()
    for hook in ("start", "epoch_start")[now.begun :]:
        now.begun += 1
        hooks(f"on_{stage}_{hook}")

    def put(metric: Any, value: Any, suffix: str) -> None:
        name = metric.epoch_name + suffix
        if any(name in other for other in now.found):
            raise LogError(
                f"self.log({metric.name!r}, ...) in {stage} gives {name!r} to two values, of two loaders or of a step "
                "and a hook. Rename one of them, or leave add_dataloader_idx=False out."
            )
        now.found[-1][name] = value
        results.put_epoch(metric, value, suffix)
        now.row.update({name: value} if metric.logger else {})

    several = len(loaders) > 1
    for idx, (source, limit) in [*enumerate(loaders)][now.loader :]:
        log.loader = idx if several else None
        run_loader(run, stage, idx, source, limit, keep=False)
        if run.trainer.interrupted:
            return []
        now.found.append({})
        suffixes = {True: f"/dataloader_idx_{idx}" if several else "", False: ""}
        if now.sums is not None:  # an empty loader has no metrics
            assert now.table is not None
            for metric, value in zip(now.table.metrics, now.table.read(fetch(now.sums[0])), strict=True):
                if metric.on_epoch:
                    put(metric, value, suffixes[metric.add_dataloader_idx])
        for total in log.take_evaluation(idx):
            put(total.metric, float(total), suffixes[total.metric.add_dataloader_idx])
        now.loader, now.batch_idx, now.data, now.sums, now.table = idx + 1, 0, None, None, None
    log.loader = None
    if not now.ended:
        now.ended = 1
        hooks(f"on_{stage}_epoch_end")
    for total in log.take_evaluation(None):
        for metrics in now.found:
            if total.metric.epoch_name in metrics:
                raise LogError(
                    f"self.log({total.metric.name!r}, ...) in {total.hook}: a {stage} step or batch hook logs this "
                    "name. Use another."
                )
            metrics[total.metric.epoch_name] = float(total)
        now.row |= {total.metric.epoch_name: float(total)} if total.metric.logger else {}
    if now.ended == 1 and not run.trainer.sanity_checking:
        now.ended = 2
        log_row(run, now.row, max(run.position.global_step - 1, 0))
    run.evaluation, run.position.left = None, min(run.position.left, 1)
    hooks(f"on_{stage}_end")
    return now.found


def predict(run: Run, loaders: Sequence[tuple[Source, int | None]], keep: bool) -> list[list[Any]]:
    """Run the predict step over loaders.

    Returns:
        What the step returned for each batch of each loader, as numpy; empty lists unless `keep`.
    """
    run.hooks("on_predict_start")
    run.hooks("on_predict_epoch_start")
    found = [run_loader(run, "predict", idx, source, limit, keep=keep) for idx, (source, limit) in enumerate(loaders)]
    run.hooks("on_predict_epoch_end")
    run.hooks("on_predict_end")
    return found


def run_loader(run: Run, stage: str, idx: int, source: Source, limit: int | None, *, keep: bool) -> list[Any]:
    """Run an evaluation step over one loader, from where the evaluation at hand stands in it.

    Returns:
        With `keep` each batch's outputs as numpy.
    """
    trainer, engine, hooks, results = run.trainer, run.engine, run.hooks, run.results
    starts, ends = hooks.bind(f"on_{stage}_batch_start"), hooks.bind(f"on_{stage}_batch_end")
    loader = idx if engine.takes_loader(stage) else None
    suffix = "" if hooks.log.loader is None else f"/dataloader_idx_{idx}"
    wait = Bound(run.trainer.max_in_flight)
    now = run.evaluation or Evaluation()
    sums, kept, waiting, feeder = None, [], None, run.feeder
    for i, (batch, host_batch, _, at) in enumerate(feeder.batches(source, 0, limit, now.batch_idx), now.batch_idx):
        if sums is None:
            engine.prepare_eval(stage, feeder.example, loader)
            table = engine.model.table(stage, loader)
            # Those of a checkpoint, unless the step logs other metrics since.
            known = now.sums is not None and now.table is not None and now.table.metrics == table.metrics
            now.table = table
            now.sums = sums = engine.place_sums(*now.sums) if known else engine.eval_sums(stage, loader)  # type: ignore[misc]
        hooks.log.batch = host_batch
        if not now.starting:
            now.starting = True
            starts(host_batch, i, idx)
        sums, values, outputs = engine.eval_step(stage, sums, batch, loader)
        now.sums, now.batch_idx, now.data, now.starting = sums, i + 1, at, False
        if values is not None:
            results.show_evaluation(engine.model.table(stage, loader), values, suffix)
        ends(outputs, host_batch, i, idx)
        if keep:
            kept += [_to_host(*waiting)] if waiting is not None else []  # one batch late, when it is ready
            waiting = outputs, host_batch, trainer.host_keys
        feeder.token = sums[1]
        # The next step overwrites the sums: a full wait now and then takes the place of an older token.
        wait.drain(sums[1])
        if trainer.interrupted:
            break
    if now.sums is None and source.gave and not trainer.interrupted:
        raise source.empty()
    return kept + ([_to_host(*waiting)] if waiting is not None else [])


def publish(run: Run) -> None:
    """Read the pending row and log it."""
    if run.pending is None:
        return
    logs, window, step = run.pending
    run.tracing.deliver(step)  # first: a checkpoint that on_trace writes holds the row
    run.pending = None
    if logs is None:  # only what was traced
        log_row(run, window, step)
        return
    values = run.results.steps(logs)
    names = run.results.row_names
    row: dict[str, Any] = {name: value for name, value in zip(names, values, strict=True) if name}
    log_row(run, row | dict(window), step)
    if run.engine.nan_policy != "ignore" and np.asarray(logs)[0, -1]:
        check_finite(run)


def log_row(run: Run, row: Mapping[str, float | Total], step: int) -> None:
    """Give a row to `on_log`, unless it is empty."""
    if row:
        run.hooks("on_log", {**{k: float(v) for k, v in row.items()}, "epoch": run.position.epoch}, step)


def check_finite(run: Run) -> None:
    """Look at the guard's mark; waits for the device.

    Raises:
        NonFiniteError: Under nan_policy="raise", if a step was not finite. The parameters are those before it. Under
            "rollback" only if there is nothing to go back to.
    """
    policy = run.trainer.nan_policy
    if policy == "ignore" or (bad := run.engine.bad_step()) == run.noted_bad_step:
        return
    run.noted_bad_step = bad
    what = f"The loss or a gradient was NaN or infinite at optimizer step {bad} (epoch {run.position.epoch})."
    if policy == "skip":
        _logger.warning("%s The update was skipped.", what)
        return
    if policy == "rollback":
        roll_back(run, what)
        return
    raise NonFiniteError(
        f"{what} The parameters are still those before that step. Lower the learning rate, clip gradients, look at "
        "the batch (Trainer(debug=True) refuses one that holds NaN), or pass Trainer(nan_policy='skip')."
    )


def _warn_short(run: Run, source: Source, limit: int) -> None:
    if run.position.epoch == 0:
        _logger.warning(
            "%s gave %d batches where %s %d. The last one ended the epoch.",
            source.argument,
            run.position.batch_idx,
            "limit_train_batches asks for" if source.length is None else "its length promises",
            limit,
        )


def _smaller(limit: int | None, other: int | None) -> int | None:
    return other if limit is None else limit if other is None else min(limit, other)


def _to_host(outputs: Any, batch: Any, host_keys: Sequence[str]) -> Any:
    """Return a step's outputs as numpy; a dict of them takes what the step did not see of the batch."""
    found = jax.tree.map(fetch, outputs)
    return {**{key: batch[key] for key in host_keys}, **found} if host_keys and isinstance(found, dict) else found
