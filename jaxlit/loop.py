"""The loops: plain functions, and the only callers of hooks.

`fit` is the training loop. Its order stands as pseudocode in `jaxlit.Callback`.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxlit.data import Source
from jaxlit.errors import LogError, NonFiniteError
from jaxlit.exchange import fetch
from jaxlit.results import Total
from jaxlit.run import Bound, Outputs, Run, validation_interval

_logger = logging.getLogger("jaxlit")


def fit(run: Run) -> None:
    """Train until a limit or a stop."""
    run.start_clocks()
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
        run.trainer.sanity_checking = False
        run.results.clear()


def train_epoch(run: Run) -> None:
    """Train one epoch, validate where it is due, and log the epoch's metrics."""
    reload(run)
    assert run.train is not None
    trainer, engine, position, results, hooks = run.trainer, run.engine, run.position, run.results, run.hooks
    source, limit = run.train
    starts, ends = hooks.bind("on_train_batch_start"), hooks.bind("on_train_batch_end")
    accumulate, log_every = trainer.accumulate_grad_batches, trainer.log_every_n_steps
    wait = Bound(run.trainer.max_in_flight)

    engine.begin_epoch(position.epoch)
    first_step = position.global_step
    hooks("on_train_epoch_start")
    last, skipped = False, run.done  # the hook may have asked to stop
    filled = 0  # batches in the accumulation window
    feeder = run.feeder
    for batch, host_batch, last, at in () if skipped else feeder.batches(source, position.epoch, limit):
        i = position.batch_idx
        hooks.log.batch = host_batch
        if starts and starts(host_batch, i):
            skipped, position.data = True, at
            break
        if i == 0:
            engine.prepare_training(feeder.example)
            results.show_steps(engine.model.table("training"))
        filled += 1
        stepping = last or filled == accumulate
        logs, loss, outputs = engine.train_step(batch) if stepping else engine.micro_step(batch)
        results.latest = feeder.token = logs
        position.data, position.batch_idx = at, i + 1
        position.total_batch_idx += 1
        if hooks.live is not None:
            hooks.live.stale = True
        if stepping:
            position.global_step, filled = position.global_step + 1, 0
        if ends:
            ends(Outputs(logs, loss, outputs), host_batch, i)
        wait(logs)
        if run.pending is not None:
            publish(run)
        run.check_time()
        if stepping:
            window = hooks.log.take_window() if hooks.log.window else {}
            if log_every and (position.global_step % log_every == 0 or trainer.should_stop):
                run.pending = (logs, window, position.global_step - 1)  # read one step late, when it is ready
        if run.every_check:
            check_finite(run)
        if run.validation_due(last):
            publish(run)
            check_finite(run)
            evaluate(run, "validation", run.val)
            run.restart_interval()
        if run.done:
            break
    if not position.batch_idx and not skipped and not trainer.interrupted:
        raise source.empty()
    if last and not skipped and not trainer.fast_dev_run and limit is not None and position.batch_idx < limit:
        _warn_short(run, source, limit)
    if last or skipped:
        position.data = source.between_epochs(position.data)
    end_epoch(run, stepped=position.global_step > first_step, unfinished=filled > 0)


def end_epoch(run: Run, *, stepped: bool, unfinished: bool) -> None:
    """Run the end hooks of an epoch and log its metrics.

    Args:
        run: The run.
        stepped: Whether the epoch took an optimizer step: without one it has no metrics.
        unfinished: Whether it left an accumulation window half full, which is dropped.
    """
    engine, position, results, log = run.engine, run.position, run.results, run.hooks.log
    if unfinished:
        engine.clear_window()
        log.take_window()
    publish(run)
    check_finite(run)
    row: dict[str, Any] = {}
    if stepped:
        metrics = engine.model.table("training").metrics
        values = engine.epoch_values() if any(m.on_epoch for m in metrics) else [0.0] * len(metrics)
        for metric, value in zip(metrics, values, strict=True):
            if metric.on_epoch:
                results.put_epoch(metric, value)
                row |= {metric.epoch_name: value} if metric.logger else {}
    log.show_epoch()
    run.hooks("on_train_epoch_end")
    log_row(run, {**row, **log.take_epoch()}, max(position.global_step - 1, 0))
    position.epoch, position.batch_idx = position.epoch + 1, 0
    run.check_time()  # an epoch whose batches were all skipped has not looked


def reload(run: Run) -> None:
    """Open the loaders of hooks again where `reload_dataloaders_every_n_epochs` says so."""
    trainer, every = run.trainer, run.trainer.reload_dataloaders_every_n_epochs
    if not every or not run.position.epoch or run.position.epoch % every:
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
    engine, hooks, results, log = run.engine, run.hooks, run.results, run.hooks.log
    hooks(f"on_{stage}_start")
    hooks(f"on_{stage}_epoch_start")
    found: list[dict[str, float]] = []
    row: dict[str, Any] = {}

    def put(metric: Any, value: Any, suffix: str) -> None:
        name = metric.epoch_name + suffix
        if any(name in other for other in found):
            raise LogError(
                f"self.log({metric.name!r}, ...) in {stage} gives {name!r} to two values, of two loaders or of a step "
                "and a hook. Rename one of them, or leave add_dataloader_idx=False out."
            )
        found[-1][name] = value
        results.put_epoch(metric, value, suffix)
        row.update({name: value} if metric.logger else {})

    for idx, (source, limit) in enumerate(loaders):
        several = len(loaders) > 1
        log.loader = idx if several else None
        asked = idx if engine.takes_loader(stage) else None
        sums, _ = run_loader(run, stage, idx, source, limit, keep=False)
        if run.trainer.interrupted:
            return []
        found.append({})
        suffixes = {True: f"/dataloader_idx_{idx}" if several else "", False: ""}
        if sums is not None:  # an empty loader has no metrics
            values = engine.eval_values(stage, sums[0], asked)
            for metric, value in zip(engine.model.table(stage, asked).metrics, values, strict=True):
                if metric.on_epoch:
                    put(metric, value, suffixes[metric.add_dataloader_idx])
        for total in log.take_evaluation(idx):
            put(total.metric, float(total), suffixes[total.metric.add_dataloader_idx])
    log.loader = None
    hooks(f"on_{stage}_epoch_end")
    for total in log.take_evaluation(None):
        for metrics in found:
            if total.metric.epoch_name in metrics:
                raise LogError(
                    f"self.log({total.metric.name!r}, ...) in {total.hook}: a {stage} step or batch hook logs this "
                    "name. Use another."
                )
            metrics[total.metric.epoch_name] = float(total)
        row |= {total.metric.epoch_name: float(total)} if total.metric.logger else {}
    if not run.trainer.sanity_checking:
        log_row(run, row, max(run.position.global_step - 1, 0))
    hooks(f"on_{stage}_end")
    return found


def predict(run: Run, loaders: Sequence[tuple[Source, int | None]], keep: bool) -> list[list[Any]]:
    """Run the predict step over loaders.

    Returns:
        What the step returned for each batch of each loader, as numpy; empty lists unless `keep`.
    """
    run.hooks("on_predict_start")
    run.hooks("on_predict_epoch_start")
    found = [
        run_loader(run, "predict", idx, source, limit, keep=keep)[1] for idx, (source, limit) in enumerate(loaders)
    ]
    run.hooks("on_predict_epoch_end")
    run.hooks("on_predict_end")
    return found


def run_loader(
    run: Run, stage: str, idx: int, source: Source, limit: int | None, *, keep: bool
) -> tuple[list[jax.Array] | None, list[Any]]:
    """Run an evaluation step over one loader.

    Returns:
        The metrics' sums, None if the loader was empty, and with `keep` each batch's outputs as numpy.
    """
    trainer, engine, hooks, results = run.trainer, run.engine, run.hooks, run.results
    starts, ends = hooks.bind(f"on_{stage}_batch_start"), hooks.bind(f"on_{stage}_batch_end")
    loader = idx if engine.takes_loader(stage) else None
    suffix = "" if hooks.log.loader is None else f"/dataloader_idx_{idx}"
    wait = Bound(run.trainer.max_in_flight)
    sums, kept, waiting = None, [], None
    feeder = run.feeder
    for i, (batch, host_batch, _, _) in enumerate(feeder.batches(source, 0, limit)):
        if sums is None:
            engine.prepare_eval(stage, feeder.example, loader)
            sums = engine.eval_sums(stage, loader)
        hooks.log.batch = host_batch
        starts(host_batch, i, idx)
        sums, table, outputs = engine.eval_step(stage, sums, batch, loader)
        if table is not None:
            results.show_evaluation(engine.model.table(stage, loader), table, suffix)
        ends(outputs, host_batch, i, idx)
        if keep:
            kept += [_to_host(*waiting)] if waiting is not None else []  # one batch late, when it is ready
            waiting = outputs, host_batch, trainer.host_keys
        feeder.token = sums[1]
        # The next step overwrites the sums: a full wait now and then takes the place of an older token.
        wait.drain(sums[1])
        if trainer.interrupted:
            break
    if sums is None and source.gave and not trainer.interrupted:
        raise source.empty()
    return sums, kept + ([_to_host(*waiting)] if waiting is not None else [])


def publish(run: Run) -> None:
    """Read the pending row and log it."""
    if run.pending is None:
        return
    (logs, window, step), run.pending = run.pending, None
    values = run.results.steps(logs)
    names = run.engine.model.table("training").row_names
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
        NonFiniteError: Under nan_policy="raise", if a step was not finite. The parameters are those before it.
    """
    policy = run.engine.nan_policy
    if policy == "ignore" or (bad := run.engine.bad_step()) == run.noted_bad_step:
        return
    run.noted_bad_step = bad
    what = f"The loss or a gradient was NaN or infinite at optimizer step {bad} (epoch {run.position.epoch})."
    if policy == "skip":
        _logger.warning("%s The update was skipped.", what)
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
