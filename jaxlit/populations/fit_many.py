"""Trains many members of one module at once: `jl.fit_many`.

First the checkpoints of a population, written as a Trainer's are; then its loop: epochs of training steps, validations
and checkpoints; then `fit_many`, which opens the loaders and starts the loop.
"""

import copy
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxlit.callbacks.early_stopping import EarlyStopping
from jaxlit.callbacks.monitor import no_such_metric
from jaxlit.checkpoints import files
from jaxlit.checkpoints.files import Checkpoint, Saving, candidates, last_order, name_of, sweep
from jaxlit.checkpoints.places import FolderLock, Place
from jaxlit.core.module import TrainModule
from jaxlit.core.train_state import Layout, Precision
from jaxlit.data.batch_validator import BatchValidator
from jaxlit.data.loaders import check_rows, each_loader, source_of
from jaxlit.data.prefetcher import Prefetcher
from jaxlit.data.source import Source
from jaxlit.data.watchdog import Watchdog
from jaxlit.engine.compiled_program import Bound
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError
from jaxlit.faces import takes_only_its_arguments
from jaxlit.populations.members import OWNER, Options, build, check_distinct, check_variations
from jaxlit.populations.population import Population, Row, Status
from jaxlit.populations.programs import Programs, members_mesh
from jaxlit.reporting.terminal import say
from jaxlit.sharding import out_of_meshes

_logger = logging.getLogger("jaxlit")

FOLDER = "population"  # next to a Trainer's checkpoints, which have the arrays of one module
_FORMAT = 1


class Saves:
    """Writes the checkpoints of a population to the folder of a run, and keeps the newest; refuses a folder in use.

    Raises:
        ArgumentError: There are checkpoints, and `resume` is False.
        CheckpointError: Another training writes there.
    """

    def __init__(self, root: Path, *, resume: bool) -> None:
        self.folder = Path(os.path.abspath(root)) / FOLDER  # the program may change its directory
        self._saving: Saving | None = None
        if not resume and candidates(self.folder):
            raise ArgumentError(
                f"jl.fit_many(default_root_dir={str(root)!r}) has the checkpoints of a population. Pass resume='auto' "
                "to continue it, or another folder."
            )
        self._lock = FolderLock(self.folder)
        sweep(self.folder)

    def save(self, state: dict[str, Any], step: int, arrays: Sequence[jax.Array]) -> None:
        """Begin to write a checkpoint after the previous one is complete; training continues meanwhile."""
        self.wait()
        saving = Saving(self.folder / name_of(step), lambda: {"format": _FORMAT, **state}, last_order(self.folder) + 1)
        self._saving = saving.begin(arrays, [path for path in candidates(self.folder) if path != saving.path])

    def wait(self) -> None:
        """Wait until the checkpoint is written, and older ones are deleted."""
        if self._saving is not None:
            saving, self._saving = self._saving, None
            saving.wait()

    def close(self) -> None:
        """Release the folder after the current write."""
        try:
            if self._saving is not None:
                self._saving.join()
        finally:
            self._lock.close()

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that verifies; None if there is none, an error if there are others only."""
        checkpoint, skipped = files.newest(self.folder, verified=_verified)
        for problem in skipped:
            _logger.warning("%s The checkpoint before it is used.", problem)
        return checkpoint


def _verified(path: Place) -> Checkpoint:
    with files.fitting(path):
        checkpoint = files.load(path)
        if checkpoint.state["format"] != _FORMAT or "variations" not in checkpoint.state:
            raise CheckpointError(f"{path} is no checkpoint of a population that this version reads.")
    return checkpoint


def described(programs: Programs) -> dict[str, Any]:
    """Return what must be the same when a population is resumed, as JSON values: the members and their arrays."""
    count = len(programs.members)
    return {
        "variations": [dict(m.contents) for m in programs.members],
        "optimizer": programs.spec.optimizer_kind,
        "metrics": [m.name for m in programs.step_table.metrics.metrics],
        "arrays": [[name, [count, *shape], dtype] for name, shape, dtype in programs.spec.entries],
    }


def read_arrays(checkpoint: Checkpoint, programs: Programs) -> list[jax.Array]:
    """Return the arrays of a checkpoint, each read directly onto the devices of its members; refuse one of others.

    Raises:
        CheckpointError: It was written for other members or another module.
    """
    for key, now in described(programs).items():
        was = checkpoint.state[key]
        if was == now:
            continue
        if isinstance(was, list):
            was, now = next((a, b) for a, b in zip_longest(was, now) if a != b)
        raise CheckpointError(
            f"{checkpoint.path} does not fit: of its {key} one is {was}, and now it is {now}. Resume with the "
            "variations, the module and the optimizer that it was written with, or pass another folder."
        )
    arrays = checkpoint.arrays(dict(enumerate(programs.array_specs)))
    return [arrays[i] for i in range(len(arrays))]


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
    """A population that trains."""

    programs: Programs
    leaves: list[jax.Array]  # the newest arrays of all members
    train: Source
    val: Sequence[Source]  # one at most
    prefetcher: Prefetcher
    options: Options
    saves: Saves | None  # None where no checkpoint is written
    progress: Progress = field(default_factory=Progress)
    pending: tuple[jax.Array, int] | None = None  # the table of a step that has a row, and its index, read a step later

    def __post_init__(self) -> None:
        self.progress.statuses = [Status() for _ in self.programs.members]
        # Unbounded, several CPU devices would end the process.
        self.in_flight = Bound(32 if self.programs.mesh.size == 1 else 4)


def restore(run: Run, checkpoint: Checkpoint) -> None:
    """Continue where a checkpoint was taken; its source has the loader's position already."""
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
    # After a bad step the guard changes no array of its member. A member that ends gets such a step.
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
        pairs = zip(table.metrics, table.read(sums), strict=True) if sums[1, 0] else ()  # without a step there is none
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
        sums = eval_step(programs.eval_sums(run.leaves) if sums is None else sums, evaluated, batch.arrays)
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


@takes_only_its_arguments(OWNER)
def fit_many(
    make_module: Callable[..., TrainModule],
    variations: Sequence[Mapping[str, Any]],
    train_dataloaders: Any,
    val_dataloaders: Any = None,
    *,
    max_epochs: int,
    early_stopping: EarlyStopping | None = None,
    log: Callable[[int, int, dict[str, float]], object] | None = None,
    log_every_n_steps: int = 50,
    limit_train_batches: int | None = None,
    default_root_dir: str | Path | None = None,
    every_n_train_steps: int | None = None,
    resume: str | None = None,
    devices: int | str = "auto",
    precision: str = "32-true",
) -> Population:
    """Train many members of one module at once: one compiled step takes a step of all of them.

    Members differ in their seeds, and in every number that their steps read. All see the same batches.

    Args:
        make_module: A subclass of `jl.TrainModule`, or a function that returns a module.
        variations: For each member the arguments of `make_module`; `seed` makes the `rngs`, where it takes them.
        train_dataloaders: As for `Trainer.fit`.
        val_dataloaders: A loader; all members are validated on it after each epoch.
        max_epochs: How many epochs.
        early_stopping: Ends a member whose metric no longer improves; its weights stay as they are.
        log: Called with each row: the member's index, the step and the metrics.
        log_every_n_steps: The steps between rows.
        limit_train_batches: The most batches of an epoch, which a loader without end needs.
        default_root_dir: The folder of the checkpoints of all members, written after each epoch. None for none.
        every_n_train_steps: The steps between further checkpoints.
        resume: "auto" continues from the newest checkpoint, if there is one: the result is bit-identical.
        devices: The most devices, or "auto" for all: as many are used as divide the number of members.
        precision: As for the Trainer, except for "16-mixed".

    Raises:
        JaxlitError: An argument, a module or a loader cannot be used, or members differ in more than numbers.
    """
    stopping = (early_stopping, log, log_every_n_steps, limit_train_batches)
    options = Options(max_epochs, *stopping, default_root_dir, every_n_train_steps, resume, devices, precision)
    return _fit(make_module, variations, train_dataloaders, val_dataloaders, options)


@out_of_meshes
def _fit(
    make_module: Any, variations: Any, train_dataloaders: Any, val_dataloaders: Any, options: Options
) -> Population:
    sources = [_source(train_dataloaders, "train_dataloaders", limit=options.limit_train_batches, may_continue=True)]
    if val_dataloaders is not None:
        sources.append(_source(val_dataloaders, "val_dataloaders"))
    validators = {source.argument: BatchValidator(source.argument) for source in sources}
    saves = checkpoint = None
    if options.default_root_dir is not None:
        saves = Saves(Path(options.default_root_dir), resume=options.resume == "auto")
    try:
        if saves is not None and (checkpoint := saves.newest()) is not None:
            sources[0].load_state_dict(checkpoint.state["loader"])
        examples = [_example(source, validators) for source in sources]
        programs, layout, arrays = _built(make_module, variations, options, examples)
        prefetcher = Prefetcher(
            None if programs.mesh.size == 1 else programs.place_batch,
            validator_of=lambda source: validators[source.argument],
            splits=lambda _: True,
            prefetch="auto",
            watchdog=Watchdog(None),
        )
        run = Run(programs, [], sources[0], sources[1:], prefetcher, options, saves)
        if checkpoint is not None:
            restore(run, checkpoint)
        else:
            run.leaves = programs.init(layout, arrays)
            check_distinct(programs.members, arrays, programs.numbers)
        arrays.clear()  # the devices have them
        try:
            return train(run)
        finally:
            prefetcher.close()
    finally:
        for source in sources:
            source.close()
        if saves is not None:
            saves.close()


def _built(
    make_module: Any, variations: Any, options: Options, examples: list[Any]
) -> tuple[Programs, Layout, list[list[np.ndarray]]]:
    """Return the programs of all members, the layout of a module's arrays, and the arrays of each member."""
    check_variations(make_module, variations)
    most_devices = None if isinstance(options.devices, str) else options.devices
    programs = Programs(members_mesh(len(variations), most_devices), *examples)
    arrays, layouts = list[list[np.ndarray]](), list[Layout]()
    for built in build(make_module, variations, Precision(options.precision), examples[0], options.log_every_n_steps):
        programs.add(built.member)  # traced before the next one is built
        layouts.append(built.layout)
        arrays.append(built.arrays)
    programs.compile()
    return programs, layouts[0], arrays


def _source(loaders: Any, argument: str, *, limit: int | None = None, may_continue: bool = False) -> Source:
    """Return the source of the only loader of an argument; an endless one needs a limit of batches."""
    named_loaders = each_loader(loaders, f"{OWNER}({argument}=...)")
    if len(named_loaders) != 1:
        raise ArgumentError(f"{OWNER}({argument}=...) takes one loader, got {len(named_loaders)}.")
    source = source_of(*named_loaders[0], may_continue=may_continue)
    if source.is_endless and limit is None:
        way = f"Pass {OWNER}(limit_train_batches=...)" if may_continue else "Pass one that ends"
        raise ArgumentError(f"{source.argument} is a loader without end. {way}.")
    return source


def _example(source: Source, validators: Mapping[str, BatchValidator]) -> Any:
    """Draw the first batch ahead of time, and return its shapes and dtypes."""
    first = source.peek()
    if not first and source.peeked:
        raise source.empty()
    if not first:
        raise ArgumentTypeError(
            f"{source.argument} takes a loader that can be iterated again, got an iterator, "
            f"{type(source.loader).__name__}. Pass a list of its batches, or an object whose __iter__ begins again."
        )
    validator = validators[source.argument]
    check_rows(source.loader, first[0], source.argument)
    validator(first[0])
    return validator.kind.example
