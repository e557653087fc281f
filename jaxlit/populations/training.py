"""The loop of a population: epochs of training steps, validations, and checkpoints of all members."""

import copy
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np

from jaxlit.callbacks.early_stopping import EarlyStopping
from jaxlit.callbacks.monitor import no_such_metric
from jaxlit.checkpoints.files import Checkpoint
from jaxlit.data.prefetcher import Prefetcher
from jaxlit.data.source import Source
from jaxlit.engine.in_flight import Bound
from jaxlit.populations.options import Options
from jaxlit.populations.population import Population, Row, Status
from jaxlit.populations.programs import Programs
from jaxlit.populations.saves import Saves, described, read_arrays
from jaxlit.reporting.terminal import say

_logger = logging.getLogger("jaxlit")

_, _EPOCH, _BATCH_IDX, _BAD_STEP = range(4)  # columns of the counters, see `TrainState`


@dataclass
class Progress:
    """How far the training is; a checkpoint has its fields."""

    epoch: int = 0
    batch_idx: int = 0
    step: int = 0
    statuses: list[Status] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


@dataclass
class Run:
    """A population that trains.

    Attributes:
        programs: The compiled programs; the training step was traced.
        leaves: The newest arrays of all members.
        train: The training loader.
        val: The validation loader, or none.
        prefetcher: Draws their batches.
        options: How to train.
        saves: Where checkpoints are written; None for nowhere.
        progress: How far it is.
        pending: The table of a step that has a row, and the step's index: it is read one step later.
    """

    programs: Programs
    leaves: list[jax.Array]
    train: Source
    val: Sequence[Source]
    prefetcher: Prefetcher
    options: Options
    saves: Saves | None
    progress: Progress = field(default_factory=Progress)
    pending: tuple[jax.Array, int] | None = None

    def __post_init__(self) -> None:
        self.progress.statuses = [Status() for _ in self.programs.members]
        # Unbounded, several CPU devices would end the process.
        self.in_flight = Bound(32 if self.programs.mesh.size == 1 else 4)


def restore(run: Run, checkpoint: Checkpoint) -> None:
    """Continue where a checkpoint was taken, but for the loader's position, which its source has already."""
    state = checkpoint.state
    run.leaves = read_arrays(checkpoint, run.programs)
    statuses, rows = [Status(**x) for x in state["statuses"]], [Row(*x) for x in state["rows"]]
    run.progress = Progress(state["epoch"], state["batch_idx"], state["step"], statuses, rows)


def train(run: Run) -> Population:
    """Train to the last epoch, or until every member has ended."""
    now = run.progress
    while now.epoch < run.options.max_epochs and any(x.ended is None for x in now.statuses):
        if now.batch_idx == 0:
            begin_epoch(run)
        at = train_epoch(run)
        log_epoch(run)
        for source in run.val:
            validate(run, source)
        if run.options.early_stopping is not None:
            stop_members(run, run.options.early_stopping)
        now.epoch, now.batch_idx = now.epoch + 1, 0
        save(run, run.train.between_epochs(at))
    if run.saves is not None:
        run.saves.wait()
    return Population(run.programs.members, run.leaves, now.statuses, now.rows, now.step)


def begin_epoch(run: Run) -> None:
    """Set the epoch and forget the last one's metrics; members that have ended take no more steps."""
    now, index = run.progress, run.programs.spec.index
    counters = read_counters(run)
    counters[:, _EPOCH], counters[:, _BATCH_IDX] = now.epoch, 0
    # After a bad step the guard keeps every array of its member as it is. A member that ends gets such a step.
    ended = np.array([x.ended is not None for x in now.statuses])
    counters[:, _BAD_STEP] = np.where(ended & (counters[:, _BAD_STEP] < 0), now.step, counters[:, _BAD_STEP])
    run.leaves[index.counters] = run.programs.place(counters)  # type: ignore[call-overload]
    sums = run.programs.step_table.metrics.empty_sums()
    run.leaves[index.sums] = run.programs.repeat(sums)  # type: ignore[call-overload]


def train_epoch(run: Run) -> Any:
    """Take the steps of an epoch, or the rest of them, and return the loader's position after it."""
    now, options, prefetcher = run.progress, run.options, run.prefetcher
    example, train_step, position = None, None, None
    for batch in prefetcher.batches(run.train, now.epoch, options.limit_train_batches, now.batch_idx):
        if train_step is None or prefetcher.example is not example:
            example = prefetcher.example
            train_step = run.programs.train_step(example)
        run.leaves, prefetcher.token = train_step(run.leaves, batch.arrays)
        run.in_flight(prefetcher.token)
        log_pending(run)  # that of the step before, which is done or nearly so
        now.step, now.batch_idx, position = now.step + 1, batch.index + 1, batch.position
        if now.step % options.log_every_n_steps == 0:
            run.pending = prefetcher.token, now.step - 1
        if options.every_n_train_steps and now.step % options.every_n_train_steps == 0 and not batch.is_last:
            save(run, position)
    if now.batch_idx == 0:
        raise run.train.empty()
    return position


def log_pending(run: Run) -> None:
    """Log the row of each member of a step that has one."""
    if run.pending is None:
        return
    (tables, step), run.pending = run.pending, None
    layout = run.programs.step_table
    for i, table in enumerate(np.asarray(tables)):
        read = layout.decode(table)
        if read.bad_step < 0 or step <= read.bad_step:  # a member takes no step after a bad one
            log_row(run, i, step, {**read.rates, **read.row})


def log_row(run: Run, member: int, step: int, metrics: dict[str, float]) -> None:
    """Log a row of a member, unless it has ended or the row is empty."""
    status = run.progress.statuses[member]
    if status.ended is not None or not metrics:
        return
    run.progress.rows.append(Row(member, step, run.progress.epoch, metrics))
    status.metrics |= metrics
    if run.options.log is not None:
        run.options.log(member, step, dict(metrics))


def log_epoch(run: Run) -> None:
    """Log the epoch's row of each member, and end those that had a step which was not finite."""
    log_pending(run)
    table, index = run.programs.step_table.metrics, run.programs.spec.index
    for i, sums in enumerate(np.asarray(run.leaves[index.sums])):  # type: ignore[call-overload]
        pairs = zip(table.metrics, table.read(sums), strict=True)
        log_row(run, i, run.progress.step - 1, {m.epoch_name: x for m, x in pairs if m.on_epoch and m.logger})
    for i, bad in enumerate(read_counters(run)[:, _BAD_STEP].tolist()):
        status, member = run.progress.statuses[i], run.programs.members[i]
        if bad >= 0 and status.ended is None:
            status.end(f"step {bad} was not finite", bad, finite=False)
            _logger.warning("%s: step %d was not finite. It keeps the weights before it.", member.name, bad)


def validate(run: Run, source: Source) -> None:
    """Validate all members, and log a row of each."""
    prefetcher, programs = run.prefetcher, run.programs
    example, eval_step, sums = None, None, None
    evaluated = [run.leaves[i] for i in programs.spec.eval_index]
    for batch in prefetcher.batches(source, 0, None):
        if eval_step is None or prefetcher.example is not example:
            example = prefetcher.example
            eval_step = programs.eval_step(example)
        sums = eval_step(programs.eval_sums() if sums is None else sums, evaluated, batch.arrays)
        run.in_flight.drain(sums[1])
    if sums is None:
        raise source.empty()
    table = programs.val_table
    for i, total in enumerate(np.asarray(sums[0])):
        pairs = zip(table.metrics, table.read(total), strict=True)
        log_row(run, i, run.progress.step - 1, {m.epoch_name: x for m, x in pairs if m.on_epoch})


def stop_members(run: Run, stop: EarlyStopping) -> None:
    """End the members whose monitored metric meets a rule of `early_stopping`."""
    for member, status in zip(run.programs.members, run.progress.statuses, strict=True):
        if status.ended is not None:
            continue
        if (value := status.metrics.get(stop.monitor)) is None:
            if stop.strict:
                raise no_such_metric("EarlyStopping", stop.monitor, status.metrics)
            continue
        rule = copy.copy(stop)  # a count and a best value for each member
        rule.wait_count = status.wait_count
        worst = math.inf if stop.mode == "min" else -math.inf
        rule.best_score = before = worst if status.best_score is None else status.best_score
        _, message = rule.judge(value)
        if stop.verbose and rule.best_score != before:
            say(f"{member.name}: {stop.monitor} improved to {value:.4g}.")
        status.wait_count, status.best_score = rule.wait_count, rule.best_score
        if message:
            status.end(message, run.progress.step)


def save(run: Run, position: Any) -> None:
    """Begin to write a checkpoint, with the loader's position."""
    if run.saves is None:
        return
    log_pending(run)
    now, source = run.progress, run.train
    state = {
        **described(run.programs),
        "loader": source.state_dict(now.epoch, position),
        "epoch": now.epoch,
        "batch_idx": now.batch_idx,
        "step": now.step,
        "statuses": [asdict(x) for x in now.statuses],
        "rows": [list(row) for row in now.rows],
    }
    run.saves.save(state, now.step, run.leaves)


def read_counters(run: Run) -> np.ndarray:
    """Return the counters of each member, (members, 4) int32; waits for the devices."""
    return np.array(run.leaves[run.programs.spec.index.counters])  # type: ignore[call-overload]
