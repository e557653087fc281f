"""The loops of validation, test and prediction."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxlit.core.log import Metric
from jaxlit.core.module import takes_loader
from jaxlit.distributed.team import fetch
from jaxlit.errors import LogError
from jaxlit.loop.rows import log_row
from jaxlit.loop.run import Run
from jaxlit.loop.run_data import Loader, batches_or_inf


@dataclass
class Evaluation:
    """What an evaluation has found so far."""

    metrics: list[dict[str, float]] = field(default_factory=list)  # of the loaders
    row: dict[str, float] = field(default_factory=dict)  # those of them that are logged
    table: Any = None  # the columns of the sums
    sums: list[Any] | None = None  # of the loader at hand, see Engine.eval_program
    before: dict[int, Any] = field(default_factory=dict)  # the module's metrics as they came, by index in the state


def sanity_check(run: Run) -> None:
    """Validate a few batches, so that an error in validation is raised now and not after an epoch."""
    steps = run.settings.num_sanity_val_steps
    if not run.data.val or steps == 0:
        return
    steps = sys.maxsize if steps < 0 else steps
    # Batches that are drawn from an iterator now would be missing in the first validation.
    loaders = [(x, steps if limit is None else min(limit, steps)) for x, limit in run.data.val if not x.is_iterator]
    run.control.sanity_checking = True
    try:
        run.hooks("on_sanity_check_start")
        if run.data.validates and loaders:
            evaluate(run, "validation", loaders)
        run.hooks("on_sanity_check_end")
    finally:
        run.control.sanity_checking = False
        run.results.clear()


def evaluate(run: Run, stage: str, loaders: Sequence[Loader]) -> list[dict[str, float]]:
    """Run the validation or test step over loaders; return the metrics of each, none if the run was interrupted."""
    evaluation = Evaluation()
    try:
        return _evaluate(run, stage, loaders, evaluation)
    finally:
        _put_metrics(run, evaluation.before)


def _evaluate(run: Run, stage: str, loaders: Sequence[Loader], evaluation: Evaluation) -> list[dict[str, float]]:
    hooks = run.hooks
    log = run.hooks.log
    part = run.begin("evaluation")
    log.begin_evaluation()
    hooks(f"on_{stage}_start")
    hooks(f"on_{stage}_epoch_start")
    for idx, loader in enumerate(loaders):
        log.loader = idx if len(loaders) > 1 else None
        run_loader(run, stage, idx, loader, evaluation, keep=False)
        if run.control.interrupted:  # a resume begins it again
            run.begin(part)
            return []
        end_loader(run, idx, evaluation)
    log.loader = None  # the hooks below log for all loaders
    hooks(f"on_{stage}_epoch_end")
    for total in log.take_evaluation(None):  # of hooks outside of the loaders: in the metrics of each
        _put(evaluation, total.metric, total.metric.epoch_name, float(total), evaluation.metrics)
    if not run.control.sanity_checking:
        if run.data.is_fit:
            run.position.validated = True  # before the row, so that an error in a logger brings no second one
        log_row(run, evaluation.row, max(run.position.global_step - 1, 0))
    hooks(f"on_{stage}_end")
    run.begin(part)
    return evaluation.metrics


def end_loader(run: Run, idx: int, evaluation: Evaluation) -> None:
    """Show a loader's metrics, of its steps and of its batch hooks."""
    evaluation.metrics.append({})
    values: list[Any] = [(total.metric, total) for total in run.hooks.log.take_evaluation(idx)]
    if evaluation.sums is not None:  # an empty loader has no metrics
        of_steps = evaluation.table.read(fetch(evaluation.sums[0]))
        values = [*zip(evaluation.table.metrics, of_steps, strict=True), *values]
    for metric, value in values:
        if metric.on_epoch:
            end = run.hooks.log.suffix(metric)
            _put(evaluation, metric, metric.epoch_name + end, float(value), evaluation.metrics[-1:])
            run.results.put_epoch(metric, value, end)
    evaluation.sums = evaluation.table = None


def _put(evaluation: Evaluation, metric: Metric, name: str, value: float, loaders: list[dict[str, float]]) -> None:
    """Add a value to the metrics of some loaders and to the row."""
    if any(name in metrics for metrics in evaluation.metrics):  # of all loaders
        raise LogError(
            f"self.log({metric.name!r}, ...) gives {name!r} to two values, of two loaders or of a step and a hook. "
            "Rename one of them, or leave add_dataloader_idx=False out."
        )
    for metrics in loaders:
        metrics[name] = value
    evaluation.row |= {name: value} if metric.logger else {}


def predict(run: Run, stage: str, loaders: Sequence[Loader], keep: bool) -> list[list[Any]]:
    """Run the predict step over loaders; return the outputs of each batch of each, as numpy, if they are to `keep`."""
    run.begin("evaluation")
    run.control.num_predict_batches = [batches_or_inf(limit) for _, limit in loaders]
    run.hooks("on_predict_start")
    run.hooks("on_predict_epoch_start")
    outputs = [run_loader(run, stage, idx, loader, Evaluation(), keep=keep) for idx, loader in enumerate(loaders)]
    run.hooks("on_predict_epoch_end")
    run.hooks("on_predict_end")
    return outputs


def run_loader(run: Run, stage: str, idx: int, loader: Loader, evaluation: Evaluation, *, keep: bool) -> list[Any]:
    """Run an evaluation step over one loader; return each batch's outputs as numpy, if they are to `keep`."""
    engine = run.engine
    hooks = run.hooks
    prefetcher = run.prefetcher
    (source, limit) = loader
    # None for a hook that no callback has, so that a batch pays no call.
    starts, ends = (hooks.bind(f"on_{stage}_batch_{when}") or None for when in ("start", "end"))
    number = idx if takes_loader(engine.module, stage) else None
    read = np.asarray if run.times.team.size == 1 else fetch
    sums = None
    outputs_on_host = []
    waiting = None
    for batch in prefetcher.batches(source, 0, limit):
        if sums is None:
            # Compiling needs a batch, so an empty loader compiles nothing.
            sums = first_sums(run, evaluation, stage, batch.arrays, number)
            program = engine.eval_program(stage, number)
            arrays = engine.state.evaluated()  # once: hooks of batches may not write to the module
        hooks.log.batch = batch.host
        if starts is not None:
            starts(batch.host, batch.index, idx)
        sums, values, outputs = program.run(arrays, sums, batch.arrays)
        evaluation.sums = sums
        if values is not None:
            run.results.show_evaluation(evaluation.table, values, hooks.log.suffix)
        if ends is not None:
            ends(outputs, batch.host, batch.index, idx)
        if keep:
            outputs_on_host += [_to_host(*waiting)] if waiting is not None else []  # one batch late, when it is ready
            waiting = outputs, batch.host, run.settings.host_keys, read
        prefetcher.token = sums[1]
        # The next step overwrites the sums, so an older token cannot be waited for: wait for all now and then.
        run.in_flight.drain(sums[1])
        if run.times.team.size > 1:
            run.meet()
        if run.control.interrupted:
            break
    if sums is not None and (carried := engine.eval_metrics(stage, sums, number)):
        evaluation.before = {i: engine.state.leaves[i] for i in carried} | evaluation.before
        _put_metrics(run, carried)  # for hooks, and for the next loader
    # A loader that had batches before and none now is used up; one that never had any was warned of at the start.
    if evaluation.sums is None and source.gave and not run.control.interrupted:
        raise source.empty()
    return outputs_on_host + ([_to_host(*waiting)] if waiting is not None else [])


def first_sums(run: Run, evaluation: Evaluation, stage: str, batch: Any, loader: int | None) -> list[Any]:
    """Compile the stage's step for the first batch, as it is placed, and return the sums of metrics that it adds to."""
    engine = run.engine
    part = run.begin("compile")
    engine.prepare_eval(stage, run.prefetcher.example, batch, loader)
    run.begin(part)
    traced = engine.eval_trace(stage, loader)
    run.control.predict_outputs = traced.outputs if stage == "predict" else None
    evaluation.table = traced.table
    evaluation.sums = engine.eval_sums(stage, loader)
    return evaluation.sums


def _put_metrics(run: Run, arrays: dict[int, Any]) -> None:
    """Replace metrics that the module holds, by their index in the state."""
    if arrays:
        run.engine.state.restore(arrays)
        if run.hooks.live is not None:
            run.hooks.live.stale = True


def _to_host(outputs: Any, batch: Any, host_keys: Sequence[str | int], read: Callable[[Any], np.ndarray]) -> Any:
    """Return a step's outputs as numpy; a dict of them also gets the host keys of the batch."""
    outputs = read(outputs) if isinstance(outputs, jax.Array) else jax.tree.map(read, outputs)
    if not host_keys or not isinstance(outputs, dict):
        return outputs
    return {str(key): batch[key] for key in host_keys} | outputs
