"""The loops: plain functions, and the only callers of hooks.

`fit` is the training loop. Its order stands as pseudocode in `jaxlit.Callback`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlit.data import Source, feed
from jaxlit.engine import Engine
from jaxlit.errors import DataError, LogError, NonFiniteError
from jaxlit.hooks import Hooks
from jaxlit.metrics import Results

if TYPE_CHECKING:
    from jaxlit.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")


@dataclass
class Position:
    """Where training stands: what a checkpoint holds of the loop."""

    epoch: int = 0  # epochs finished
    batch_idx: int = 0  # batches of this epoch done
    global_step: int = 0  # optimizer steps taken


@dataclass
class Run:
    """One fit, validate, test or predict: what its loops share."""

    trainer: "Trainer"
    module: "TrainModule"
    engine: Engine
    hooks: Hooks
    results: Results
    position: Position
    max_in_flight: int
    train: tuple[Source, int | None] | None = None  # a loader and its limit in batches
    val: Sequence[tuple[Source, int | None]] = ()
    pending: tuple[jax.Array, int] | None = None  # a row not yet read, and its step
    noted_bad_step: int = field(default=-1)

    @property
    def done(self) -> bool:
        """Whether training is over."""
        trainer, position = self.trainer, self.position
        return (
            trainer.should_stop
            or (trainer.max_epochs is not None and position.epoch >= trainer.max_epochs)
            or position.global_step >= trainer.max_steps >= 0
        )


def fit(run: Run) -> None:
    """Train until a limit or a stop."""
    sanity_check(run)
    if run.done:  # there is nothing to train, and so no train hook
        return
    run.hooks("on_train_start")
    while not run.done:
        train_epoch(run)
    run.hooks("on_train_end")


def sanity_check(run: Run) -> None:
    """Validate a few batches, so that what would fail after an epoch fails now."""
    steps = run.trainer.num_sanity_val_steps
    if not run.val or steps == 0:
        return
    loaders = [(source, _smaller(limit, steps if steps > 0 else None)) for source, limit in run.val]
    run.trainer.sanity_checking = True
    try:
        run.hooks("on_sanity_check_start")
        evaluate(run, "validation", loaders)
        run.hooks("on_sanity_check_end")
    finally:
        run.trainer.sanity_checking = False
        run.results.clear()


def train_epoch(run: Run) -> None:
    """Train one epoch, validate where it is due, and log the epoch's metrics."""
    assert run.train is not None
    trainer, engine, position, results = run.trainer, run.engine, run.position, run.results
    source, limit = run.train
    hooks, starts, ends = run.hooks, run.hooks.bind("on_train_batch_start"), run.hooks.bind("on_train_batch_end")
    accumulate, log_every = trainer.accumulate_grad_batches, trainer.log_every_n_steps
    wait = Bound(run.max_in_flight)

    engine.begin_epoch(position.epoch)
    hooks("on_train_epoch_start")
    last = skipped = False
    filled = 0  # batches in the accumulation window
    for batch, host_batch, last in feed(source, position.epoch, limit, engine.place):
        i = position.batch_idx
        if starts and _skips(run, starts, host_batch, i):
            skipped = True
            break
        if i == 0:
            engine.prepare_training(host_batch)
            results.show_steps(engine.model.traced["training"].table)
        filled += 1
        stepping = last or filled == accumulate
        logs, loss, outputs = engine.train_step(batch) if stepping else engine.micro_step(batch)
        results.latest, position.batch_idx = logs, i + 1
        if hooks.live is not None:
            hooks.live.stale = True
        if stepping:
            position.global_step, filled = position.global_step + 1, 0
        for owner, hook in ends:
            hook(trainer, run.module, Outputs(logs, loss, outputs), host_batch, i)
            hooks.settle(owner, "on_train_batch_end")
        wait(logs)
        if run.pending is not None:
            publish(run)
        if stepping and log_every and (position.global_step % log_every == 0 or trainer.should_stop):
            run.pending = (logs, position.global_step - 1)  # read one step late, when it is ready
        if trainer.should_stop or position.global_step >= trainer.max_steps >= 0:
            break
    if not position.batch_idx and not skipped:
        raise DataError(_empty(source, position.epoch))
    if filled:
        engine.clear_window()
    publish(run)
    check_finite(run)
    if (last or trainer.should_stop) and not skipped and _validation_due(run):
        evaluate(run, "validation", run.val)
    end_epoch(run)


def end_epoch(run: Run) -> None:
    """Run the end hooks of an epoch and log its metrics."""
    engine, position, results = run.engine, run.position, run.results
    row: dict[str, float] = {}
    if position.batch_idx:
        metrics = engine.model.traced["training"].table.metrics
        values = engine.epoch_values() if any(m.on_epoch for m in metrics) else [0.0] * len(metrics)
        for metric, value in zip(metrics, values, strict=True):
            if metric.on_epoch:
                results.put_epoch(metric, value)
                row |= {metric.epoch_name: value} if metric.logger else {}
    run.hooks("on_train_epoch_end")
    log_row(run, row, position.global_step - 1)
    position.epoch, position.batch_idx = position.epoch + 1, 0


def evaluate(run: Run, stage: str, loaders: Sequence[tuple[Source, int | None]]) -> list[dict[str, float]]:
    """Run the validation or test step over loaders.

    Returns:
        The metrics of each loader.
    """
    engine, hooks, results = run.engine, run.hooks, run.results
    hooks(f"on_{stage}_start")
    hooks(f"on_{stage}_epoch_start")
    found: list[dict[str, float]] = []
    row: dict[str, float] = {}
    for idx, (source, limit) in enumerate(loaders):
        sums, _ = run_loader(run, stage, idx, source, limit, keep=False)
        found.append({})
        if sums is None:
            continue  # an empty loader has no metrics
        for metric, value in zip(
            engine.model.traced[stage].table.metrics, engine.eval_values(stage, sums), strict=True
        ):
            suffix = f"/dataloader_idx_{idx}" if len(loaders) > 1 and metric.add_dataloader_idx else ""
            name = metric.epoch_name + suffix
            if any(name in other for other in found[:-1]):
                raise LogError(
                    f"self.log({name!r}, add_dataloader_idx=False) in {stage}_step gives one name to the values of "
                    "several loaders. Leave add_dataloader_idx out."
                )
            found[-1][name] = value
            results.put_epoch(metric, value, suffix)
            row |= {name: value} if metric.logger else {}
    hooks(f"on_{stage}_epoch_end")
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
    trainer, module, engine, hooks = run.trainer, run.module, run.engine, run.hooks
    starts, ends = hooks.bind(f"on_{stage}_batch_start"), hooks.bind(f"on_{stage}_batch_end")
    wait = Bound(run.max_in_flight)
    sums, kept, waiting = None, [], None
    for i, (batch, host_batch, _) in enumerate(feed(source, 0, limit, engine.place)):
        if sums is None:
            engine.prepare_eval(stage, host_batch)
            sums = engine.eval_sums(stage)
        for owner, hook in starts:
            hook(trainer, module, host_batch, i, idx)
            hooks.settle(owner, f"on_{stage}_batch_start")
        sums, outputs = engine.eval_step(stage, sums, batch)
        for owner, hook in ends:
            hook(trainer, module, outputs, host_batch, i, idx)
            hooks.settle(owner, f"on_{stage}_batch_end")
        if keep:
            kept += [_to_host(waiting)] if waiting is not None else []  # one batch late, when it is ready
            waiting = outputs
        # The next step overwrites the sums: a full wait now and then takes the place of an older token.
        wait.drain(sums[1])
    return sums, kept + ([_to_host(waiting)] if waiting is not None else [])


class Bound:
    """Keeps the steps in flight bounded by one wait a period: a wait each step costs more than a step's Python.

    Args:
        limit: The most steps in flight.
    """

    def __init__(self, limit: int) -> None:
        self._period = max(1, limit // 2)
        self._count, self._token, self._each = 0, None, limit == 1

    def __call__(self, token: jax.Array) -> None:
        """Note a step by one of its results, and wait for the one a period ago."""
        self._count += 1
        if self._count == self._period:
            self._count = 0
            if self._each:
                token.block_until_ready()
            elif self._token is not None:
                self._token.block_until_ready()
            self._token = token

    def drain(self, token: jax.Array) -> None:
        """Note a step, and once a period wait for it."""
        self._count += 1
        if self._count == self._period:
            self._count = 0
            token.block_until_ready()


def publish(run: Run) -> None:
    """Read the pending row and log it."""
    if run.pending is None:
        return
    (logs, step), run.pending = run.pending, None
    values = run.results.steps(logs)
    metrics = run.engine.model.traced["training"].table.metrics
    log_row(run, {m.step_name: v for m, v in zip(metrics, values, strict=True) if m.on_step and m.logger}, step)
    if run.engine.nan_policy != "ignore" and np.asarray(logs)[0, -1]:
        check_finite(run)


def log_row(run: Run, row: dict[str, float], step: int) -> None:
    """Give a row to `on_log`, unless it is empty."""
    if row:
        run.hooks("on_log", {**row, "epoch": run.position.epoch}, step)


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
        "the batch, or pass Trainer(nan_policy='skip')."
    )


class Outputs(Mapping[str, Any]):
    """The `outputs` of a training step, device arrays; the loss is computed when it is asked for.

    Args:
        logs: The table of metrics, whose column 0 is the loss.
        loss: The batch's own loss, of each replica, if the table is that of a window.
        outputs: What else the step returned.
    """

    def __init__(self, logs: jax.Array, loss: jax.Array | None, outputs: dict[str, Any]) -> None:
        self._logs, self._loss, self._outputs = logs, loss, outputs

    def __getitem__(self, name: str) -> Any:
        if name != "loss":
            return self._outputs[name]
        return self._logs[0, 0] / self._logs[1, 0] if self._loss is None else self._loss.mean()

    def __iter__(self) -> Iterator[str]:
        return iter(("loss", *self._outputs))

    def __len__(self) -> int:
        return 1 + len(self._outputs)


def _skips(run: Run, starts: list[tuple[str, Callable[..., Any]]], batch: Any, batch_idx: int) -> bool:
    skip = False
    for owner, hook in starts:
        skip |= hook(run.trainer, run.module, batch, batch_idx) == -1
        run.hooks.settle(owner, "on_train_batch_start")
    return skip


def _validation_due(run: Run) -> bool:
    every = run.trainer.check_val_every_n_epoch
    return bool(run.val) and (run.position.epoch + 1) % every == 0


def _smaller(limit: int | None, other: int | None) -> int | None:
    return other if limit is None else limit if other is None else min(limit, other)


def _to_host(outputs: Any) -> Any:
    return jax.tree.map(np.asarray, outputs)


def _empty(source: Source, epoch: int) -> str:
    if epoch:
        return (
            f"{source.argument} gave no batch in epoch {epoch}: it is an iterator that the first epoch used up. "
            "Pass an object that can be iterated again, a list or a jl.ArrayLoader say."
        )
    return f"{source.argument} gave no batch. Check that it is not empty and that its batch size fits its length."
