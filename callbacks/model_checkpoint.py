"""`ModelCheckpoint`: when a checkpoint is written during training; then `Kept`, which of them stay, and their names."""

import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.monitor import check_monitor, no_such_metric, read_monitored
from jaxlit.checkpoints import files as disk
from jaxlit.checkpoints.files import Saving
from jaxlit.checkpoints.places import FolderLock, Place, place_of
from jaxlit.distributed.team import error_of_all, team
from jaxlit.errors import ArgumentError, CheckpointError

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")


class ModelCheckpoint(Callback):
    """Write checkpoints while training continues, and keep the newest and the best.

    A checkpoint is complete: training resumed from it takes the same steps bit by bit. It is written in the background
    and verified, and only then older ones are deleted. Whatever `save_top_k` is, the newest one stays until a newer one
    exists, and one is written when training ends or is interrupted. Names are Lightning's.

    Args:
        dirpath: The folder; None for `checkpoints` in `trainer.run_dir`.
        filename: The part after `step_00000040` in a checkpoint's name: "{epoch}-{val/loss:.3f}" gives
            `step_00000040-epoch=3-val_loss=0.120`, with epochs from 0.
        monitor: The metric that decides which are best, by its value at a checkpoint's step; None for the newest.
        mode: "min" if lower is better, else "max".
        save_top_k: How many of the best to keep, -1 for all.
        keep_every_n_steps: Keep the first checkpoint of each so many optimizer steps for ever, besides; None for none.
        save_last: Write a checkpoint also if it is not among the best, so that a crash costs little.
        every_n_train_steps: Optimizer steps between checkpoints; None for none.
        every_n_epochs: Epochs between checkpoints. None, without `every_n_train_steps` and `train_time_interval`: one
            after each epoch; if only the newest is kept, so rarely that writing takes a tenth of the time at most.
        train_time_interval: Time between checkpoints: a timedelta, a dict of its arguments or "DD:HH:MM:SS".
        save_on_exception: Write a checkpoint when training raises, if the state is complete.
        save_weights_only: Write the module's arrays only, for evaluations, `load_from_checkpoint` and
            `fit(init_from=...)`: a third of the size with Adam. No training can be resumed from them.
        trained_only: Leave out the module's arrays that no step changes, the frozen base of LoRA for example, and
            store their hashes: a module that loads the checkpoint must have the same. See `jl.Optimizer(wrt=...)`.
        on_save_error: After a checkpoint that cannot be written, "raise", a step later at most, or "warn".

    Raises:
        ArgumentError: A value is out of its set, or nothing would ever be kept.

    Example:
        >>> import jaxlit as jl
        >>> best = jl.callbacks.ModelCheckpoint(monitor="val/loss", save_top_k=3)
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=best)
    """

    role = "checkpoint"
    runs_last = True
    in_fast_dev_run = False

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        *,
        monitor: str | None = None,
        mode: Literal["min", "max"] = "min",
        save_top_k: int = 1,
        keep_every_n_steps: int | None = None,
        save_last: bool = True,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | dict[str, int] | str | None = None,
        save_on_exception: bool = True,
        save_weights_only: bool = False,
        trained_only: bool = False,
        on_save_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        owner = "ModelCheckpoint"
        check_monitor("loss" if monitor is None else monitor, mode, owner=owner)
        check_filename(filename)
        self.save_top_k = check.integer("save_top_k", save_top_k, low=-1, owner=owner)
        numbers = {"every_n_train_steps": every_n_train_steps, "every_n_epochs": every_n_epochs}
        for name, value in (numbers | {"keep_every_n_steps": keep_every_n_steps}).items():
            check.integer(name, value, low=1, also=(None,), owner=owner)
        if mode != "min" and monitor is None:
            raise ArgumentError(f"{owner}(mode={mode!r}) without monitor= ranks nothing. Pass the metric's name.")
        self.on_save_error = check.one_of("on_save_error", on_save_error, ("raise", "warn"), owner=owner)
        interval = train_time_interval
        self.train_time_interval = None if interval is None else check.duration("train_time_interval", interval, owner)
        if save_top_k == 0 and not (save_last or keep_every_n_steps):
            raise ArgumentError(f"{owner}(save_top_k=0, save_last=False) keeps nothing: set enable_checkpointing=False")
        self.dirpath = None if not dirpath else place_of(check.url("dirpath", dirpath, owner=owner))
        self.filename, self.monitor, self.mode = filename, monitor, mode
        self.save_last = check.boolean("save_last", save_last, owner=owner)
        self._has_no_trigger = every_n_epochs is every_n_train_steps is train_time_interval is None
        self.every_n_train_steps, self.keep_every_n_steps = every_n_train_steps, keep_every_n_steps
        self.every_n_epochs = 1 if self._has_no_trigger else every_n_epochs
        self.save_on_exception = check.boolean("save_on_exception", save_on_exception, owner=owner)
        self.save_weights_only = check.boolean("save_weights_only", save_weights_only, owner=owner)
        self.trained_only = check.boolean("trained_only", trained_only, owner=owner)
        self.exclusive = "folder, the dirpath", self.dirpath
        self._lock: FolderLock | None = None
        self._saving: Saving | None = None
        self._reset()

    def _reset(self) -> None:
        # Several that are ranked by no metric are by their steps.
        mode = self.mode if self.monitor is not None else "max" if self.save_top_k > 1 else None
        self._kept = Kept(mode, self.save_top_k, save_last=self.save_last, keep_every=self.keep_every_n_steps)
        self._step = 0  # of the last trigger by steps
        self._saved_at: Any = None
        self._resumed = self._fitting = self._has_validated = False
        self._existing = set[str]()  # the checkpoints in the folder when the fit began
        self._clock = self._rests_until = 0.0  # when the interval by time began, and until when epochs write none
        self._had_value = set[bool]()  # whether the checkpoints that were due had a value of their step
        self._restored_step: int | None = None  # of the newest checkpoint in the state that was restored

    @property
    def best_model_path(self) -> str:
        """The best checkpoint, without `monitor` the newest; "" if there is none."""
        return self._path(self._kept.best)

    @property
    def best_model_score(self) -> float | None:
        """The best value of `monitor`."""
        return None if self.monitor is None else self._kept.scores.get(self._kept.best)

    @property
    def best_k_models(self) -> dict[str, float]:
        """The value of each of the best checkpoints, by path; the step of each of several without `monitor`."""
        return {self._path(name): score for name, score in self._kept.scores.items()}

    @property
    def last_model_path(self) -> str:
        """The newest checkpoint; "" if there is none."""
        return self._path(self._kept.newest)

    def _path(self, name: str) -> str:
        return str(self._folder / name) if name else ""

    def folder(self, root: Place) -> Place:
        """Return the folder of the checkpoints of a run, given its folder or URL."""
        return self.dirpath or root / disk.FOLDER

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Begin a fit; a resume restores the state afterwards."""
        if stage == "fit":
            self._reset()
            self._folder = self.folder(trainer.saver.root)

    def on_load_checkpoint(self, trainer: "Trainer", module: "TrainModule", checkpoint: dict[str, Any]) -> None:
        """Note that training is resumed: checkpoints at later steps, from before a crash, may be replaced."""
        self._resumed, self._step = True, min(self._step, trainer.global_step)

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Refuse a folder that cannot be written, a state that cannot be saved, or a resume from weights only."""
        writers = trainer.checkpoint_callbacks
        if trainer.resume == "auto" and all(getattr(c, "save_weights_only", False) for c in writers):
            raise ArgumentError(
                "Trainer(resume='auto') has nothing to continue from with ModelCheckpoint(save_weights_only=True) "
                "alone. Add a ModelCheckpoint(dirpath=...) that writes everything, or leave resume= out."
            )
        with error_of_all("the folder of checkpoints"):
            if trainer.is_global_zero:
                self._lock = FolderLock(self._folder)
                disk.sweep(self._folder)
                self._kept.order = disk.last_order(self._folder)
                disk.clear(self._folder / name for name in self._kept.written())  # which a crash has left
            trainer.saver.check()
        self._fitting, step = True, trainer.global_step
        self._clock = time.monotonic()
        self._existing = {*disk.names_in(self._folder)}
        if any(record.step == step for record in self._kept.records[-1:]):
            self._saved_at = trainer.saver.position
        elif self._restored_step not in (None, step):
            # Another ModelCheckpoint wrote the checkpoint that training continues from, before this one was called at
            # that safe point: it is called now, and writes again what its folder has of that step.
            has_one = any(disk.step_of(self._folder / name) == step for name in self._existing)
            at_epoch_end = trainer.saver.epoch < trainer.current_epoch
            self.on_safe_point(trainer, module, epoch_over=at_epoch_end, training_over=has_one)
            self._save_validated(trainer)

    def on_validation_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Save, if no interval was given, also after a validation inside an epoch."""
        if self._fitting and not trainer.sanity_checking:
            self._has_validated = True
            trainer.saver.at_safe_point(lambda: self._save_validated(trainer))

    def due_in(self, step: int) -> int | None:
        """Return the steps to the next checkpoint by steps."""
        return None if self.every_n_train_steps is None else self.every_n_train_steps - step % self.every_n_train_steps

    def due_in_seconds(self) -> float | None:
        """Return the seconds to the next checkpoint by time; 0 once a checkpoint is written."""
        interval, is_written = self.train_time_interval, self._saving is not None and self._saving.is_done
        if is_written if team().size == 1 else interval is not None:  # another process may ask first
            return 0.0
        return None if interval is None else self._clock + interval - time.monotonic()

    def on_safe_point(self, trainer: "Trainer", module: "TrainModule", epoch_over: bool, training_over: bool) -> None:
        """Write a checkpoint if one is due; raise or warn if the one before could not be written."""
        if self._saving is not None and self._saving.is_done and team().size == 1:
            self.finish(trainer)
        step, every = trainer.global_step, self.every_n_train_steps
        due = fires = every is not None and step != self._step and step % every == 0
        if self.every_n_epochs is not None and epoch_over and trainer.current_epoch % self.every_n_epochs == 0:
            # If only the newest is kept, writing takes a tenth of the time at most; several processes, whose clocks
            # differ, write after each epoch.
            may_skip = self._has_no_trigger and self.monitor is None and self.save_top_k in (0, 1) and team().size == 1
            due = due or not may_skip or (self._saving is None and time.monotonic() >= self._rests_until)
        if self.train_time_interval is not None:
            is_time = time.monotonic() >= self._clock + self.train_time_interval
            due |= trainer.agreed(f"{self.state_key}: a checkpoint by time", is_time)
        if due or training_over:
            self._step = step if fires else self._step
            self._save(trainer, epoch_over, due=due, forced=training_over)
            self._clock = time.monotonic()

    def on_exception(self, trainer: "Trainer", module: "TrainModule", exception: BaseException) -> None:
        """Write the state at the error, if it is complete and all processes can write it together."""
        may_save = isinstance(exception, Exception) and not isinstance(exception, CheckpointError)
        # After a failure the other processes are elsewhere, unless all of them raise the error.
        can_save = self._fitting and trainer.saver.has_trained and not team().over
        if self.save_on_exception and may_save and can_save:
            try:
                self._save(trainer, epoch_over=False, due=False, forced=True)
                self.finish(trainer)
            except Exception as error:
                _logger.warning("No checkpoint was written at the error: %s", error)

    def on_train_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Wait for the last checkpoint, before other callbacks print its path; warn if none could be ranked."""
        self.finish(trainer)
        if self._had_value == {False} and not trainer.interrupted:
            text = "ModelCheckpoint(monitor=%r) ranks no checkpoint that was due: it has no value of their steps. Give "
            text += "every_n_... and Trainer(val_check_interval=%s) values that meet."
            _logger.warning(text, self.monitor, trainer.val_check_interval)

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Wait for the checkpoint that is being written."""
        self._fitting = False
        try:
            self.finish(trainer)
        finally:
            if self._lock is not None:
                trainer.saver.when_written(self._lock.close)  # a Ctrl-C has cut the wait
                self._lock = None

    def _save(self, trainer: "Trainer", epoch_over: bool, *, due: bool, forced: bool) -> None:
        """Begin to write a checkpoint, after the one before is written."""
        if trainer.nan_policy == "rollback":
            trainer.saver.check_finite()  # first: it may go back to an earlier checkpoint
        position = trainer.saver.position
        if position == self._saved_at:
            return
        self.finish(trainer)
        is_finite = trainer.nan_policy != "ignore" or trainer.saver.is_finite()
        metrics, name = trainer.callback_metrics, self.monitor
        score = float(trainer.global_step) if name is None and self.save_top_k > 1 and is_finite else None
        if name is not None and is_finite:
            score = self._value(trainer, name)
            if name not in metrics and epoch_over and (self._has_validated or not trainer.num_val_batches):
                raise no_such_metric("ModelCheckpoint", name, metrics)
            if name in metrics and due:
                self._had_value.add(metrics.step(name) in (None, trainer.global_step))
        if not (forced or self._kept.wants(score, trainer.global_step)):
            return
        try:
            suffix = ""
            if self.filename:
                counts = {"epoch": trainer.saver.epoch, "step": trainer.global_step}
                suffix = f"-{filled(self.filename, counts, lambda name: self._value(trainer, name))}"
            new = disk.name_of(trainer.global_step, suffix)
            # Checkpoints of an earlier fit stay; those of a training that crashed are replaced.
            new = new if self._resumed else self._kept.unused(new, self._existing)
            self._kept.add(Record(new, trainer.global_step, score, is_finite))
            path, replaces = self._folder / self._kept.newest, [self._folder / name for name in self._kept.replaced]
            only = {"weights_only": self.save_weights_only, "trained_only": self.trained_only}
            self._saving = trainer.saver.begin(path, self._kept.order, **only, replaces=replaces)
        except BaseException as error:
            return self._failed(error)
        self._saved_at = position

    def _save_validated(self, trainer: "Trainer") -> None:
        """Save after a validation that has logged `monitor`, if no interval was given; one may be inside an epoch."""
        name, metrics = self.monitor, trainer.callback_metrics
        if self._has_no_trigger and name is not None:
            read_monitored(f"ModelCheckpoint(monitor={name!r})", name, metrics)  # refused if processes differ
            if name in metrics and metrics.step(name) == trainer.global_step:
                self._save(trainer, epoch_over=False, due=True, forced=False)

    def finish(self, trainer: "Trainer") -> None:
        """Wait for the checkpoint that is being written; those that it replaces are deleted then."""
        if (saving := self._saving) is None:
            return
        try:
            saving.wait()
        except Exception as error:
            self._saving = None
            return self._failed(error)
        self._saving = None  # only now: after a Ctrl-C in the wait the next call waits
        self._rests_until = time.monotonic() + 9 * saving.seconds  # writing takes a tenth of the time
        self._kept.written()
        trainer.saver.announce(self, saving.path)

    def _failed(self, error: BaseException) -> None:
        """Take back a checkpoint that was not written, and raise the error or warn."""
        self._kept.failed()
        self._saved_at = None
        if self.on_save_error == "raise" or not isinstance(error, CheckpointError):
            raise error
        _logger.warning("%s", error)

    def _value(self, trainer: "Trainer", name: str) -> float:
        """Return a metric's value; NaN if it was not logged, or after an earlier step, and so of other weights."""
        metrics = trainer.callback_metrics
        value = read_monitored(f"ModelCheckpoint(monitor={name!r})", name, metrics)
        return value if value is not None and metrics.step(name) in (None, trainer.global_step) else math.nan

    @property
    def state_key(self) -> str:
        """The class and its metric: the state is not that of another metric."""
        return type(self).__name__ if self.monitor is None else f"{type(self).__name__}[{self.monitor}, {self.mode}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints, by their names in the folder."""
        own = {"step": self._step, "has_validated": self._has_validated, "folder": self.folder(Path()).name}
        return self._kept.state() | own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the checkpoints that still exist."""
        self._kept.restore(state_dict, {*disk.names_in(self._folder)})
        self._restored_step = self._kept.records[-1].step if self._kept.records else 0
        self._step, self._has_validated = int(state_dict["step"]), bool(state_dict["has_validated"])
        self._had_value = {True} if self._kept.scores else set()


class Record(NamedTuple):
    """A checkpoint that stays, or that is being written."""

    name: str  # of its folder
    step: int
    score: float | None  # the monitored value; None if it is not among the best
    is_finite: bool = True  # whether all of its parameters are
    stays: bool = False  # whether it is kept whatever comes later


@dataclass
class Kept:
    """The checkpoints that stay: the newest, the newest whose parameters are finite, and the `save_top_k` best.

    `written` or `failed` is called once the one that was added is, or is not. A score must be better than one of the
    best to replace it; of equal ones the oldest is replaced first.
    """

    mode: str | None = None  # "min" or "max" of the scores is best; None if the newest checkpoint is
    save_top_k: int = 1  # how many of the best stay; with -1 no checkpoint is deleted
    save_last: bool = True  # whether checkpoints that are not among the best are wanted
    keep_every: int | None = None  # of so many steps the first checkpoint stays whatever comes later
    order: int = 0  # of the newest in its folder: larger for what is written later
    records: list[Record] = field(default_factory=list)  # the oldest first
    replaced: list[str] = field(default_factory=list)  # deleted once the newest is written
    _before: list[Record] | None = None  # without the newest, while that is being written

    @property
    def newest(self) -> str:
        """The name of the newest checkpoint; "" if there is none."""
        return self.records[-1].name if self.records else ""

    @property
    def scores(self) -> dict[str, float]:
        """The scores of the best checkpoints, by name."""
        return {x.name: x.score for x in self.records if x.score is not None}

    @property
    def best(self) -> str:
        """The name of the best checkpoint, of equal ones the oldest; "" if there is none."""
        scores = self.scores
        extreme = max if self.mode == "max" else min
        return self.newest if self.mode is None else extreme(scores, key=lambda name: scores[name], default="")

    def is_best(self, score: float | None) -> bool:
        """Return whether a checkpoint with this score would be among the best."""
        if score is None or not math.isfinite(score):
            return False
        as_good = [x for x in self.scores.values() if (x >= score if self.mode == "max" else x <= score)]
        return self.save_top_k == -1 or len(as_good) < self.save_top_k

    def wants(self, score: float | None, step: int) -> bool:
        """Return whether a checkpoint with this score is worth writing if training continues."""
        return self.mode is None or self.save_last or self.is_best(score) or self.is_to_stay(step)

    def is_to_stay(self, step: int) -> bool:
        """Return whether a checkpoint at a step stays whatever comes later."""
        if (every := self.keep_every) is None or step < every:
            return False
        return all(x.step // every < step // every for x in self.records if x.stays)

    def add(self, new: Record) -> None:
        """Add a checkpoint that begins to be written; one of the same name is overwritten."""
        self._before, self.order = self.records, self.order + 1
        has_score = new.score is not None and math.isfinite(new.score)
        if new.name == self.newest and new.is_finite and not has_score:  # the same weights again
            new = new._replace(score=self.scores.get(new.name))
        self.records = [x for x in self.records if x.name != new.name]
        if not self.is_best(new.score):
            new = new._replace(score=None)
        elif len(scores := self.scores) >= self.save_top_k > 0:
            worst = (min if self.mode == "max" else max)(scores, key=lambda name: scores[name])
            self.records = [x._replace(score=None) if x.name == worst else x for x in self.records]
        self.records = [*self.records, new := new._replace(stays=self.is_to_stay(new.step))]
        names = {new.name, *self.scores, *[x.name for x in self.records if x.is_finite][-1:]}
        names |= {x.name for x in self.records if x.stays}
        self.records = [x for x in self.records if x.name in names]
        self.replaced = [] if self.save_top_k == -1 else [x.name for x in self._before if x.name not in names]

    def written(self) -> list[str]:
        """Return the names of the checkpoints to delete now that the newest is written."""
        names, self.replaced, self._before = self.replaced, [], None
        return names

    def failed(self) -> None:
        """Take back the checkpoint that is being written, if there is one."""
        if self._before is not None:
            self.records, self.replaced, self._before = self._before, [], None

    def state(self) -> dict[str, Any]:
        """Return what `restore` takes, as JSON values, and the best for those who only read a checkpoint."""
        return {"checkpoints": [[*x] for x in self.records], "replaced": self.replaced, "best_model": self.best}

    def restore(self, state: Mapping[str, Any], existing: Collection[str]) -> None:
        """Restore the checkpoints that still exist; a crash may have come before the replaced ones were deleted."""
        rows = [row for row in state["checkpoints"] if row[0] in existing]
        self.records = [Record(str(name), int(step), x if x is None else float(x), *y) for name, step, x, *y in rows]
        is_written = [row[0] for row in rows[-1:]] == [row[0] for row in state["checkpoints"][-1:]]
        self.replaced = [name for name in state["replaced"] if name in existing and is_written]

    def unused(self, name: str, existing: Collection[str]) -> str:
        """Return a name, or the first version of it that none of the existing checkpoints has."""
        return next(x for i in itertools.count() if (x := f"{name}-v{i}" if i else name) not in existing)


def check_filename(filename: str | None) -> None:
    """Refuse what is no format of names."""
    try:
        filled(filename or "", {"epoch": 1, "step": 1}, lambda name: 1.0)
    except ValueError as error:
        text = f"ModelCheckpoint(filename={filename!r}) is no format: {error}. Write for example"
        raise ArgumentError(f"{text} '{{epoch}}-{{val/loss:.2f}}'.") from None


def filled(filename: str, counts: Mapping[str, int], metric: Callable[[str], Any]) -> str:
    """Return a filename with the values that it names, from the counts or the metrics, fit for a folder's name."""
    result = ""
    for text, name, form, _ in Formatter().parse(filename):
        if name == "":
            raise ValueError("a pair of braces is empty")
        value = "" if name is None else format(counts[name] if name in counts else metric(name), form or "")
        result += text if name is None else f"{text}{name}={value}"
    return re.sub(r"[^\w=.,+-]", "_", result)
