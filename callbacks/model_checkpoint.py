"""`ModelCheckpoint`: when a checkpoint is written during training, and which of them stay."""

import logging
import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.monitor import check_monitor, no_such_metric, read_monitored
from jaxlit.checkpoints import files as disk
from jaxlit.checkpoints.files import FolderLock, check_filename, filled
from jaxlit.checkpoints.writing import Saving
from jaxlit.distributed.team import team
from jaxlit.errors import ArgumentError, CheckpointError
from jaxlit.reporting.terminal import absolute

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
        monitor: The metric that decides which are best, by its value at a checkpoint's step; None keeps the newest.
        mode: "min" if lower is better, else "max".
        save_top_k: How many of the best to keep, -1 for all.
        save_last: Write a checkpoint also if it is not among the best, so that a crash costs little.
        every_n_train_steps: Optimizer steps between checkpoints; None for none.
        every_n_epochs: Epochs between checkpoints. None, without `every_n_train_steps` and `train_time_interval`: one
            after each epoch; if only the newest is kept, so rarely that writing takes a tenth of the time at most.
        train_time_interval: Time between checkpoints: a timedelta, a dict of its arguments or "DD:HH:MM:SS".
        save_on_exception: Write a checkpoint when training raises, if the state is complete.
        save_weights_only: Write the module's arrays only, for evaluations, `load_from_checkpoint` and
            `fit(init_from=...)`: a third of the size with Adam. No training can be resumed from them.
        on_save_error: After a checkpoint that cannot be written, "raise", a step later at most, or "warn".

    Attributes:
        best_model_path: The best checkpoint, without `monitor` the newest; "" if there is none.
        best_model_score: The best value of `monitor`, or None.
        best_k_models: The value of each of the best checkpoints, by path.
        last_model_path: The newest checkpoint; "" if there is none.

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
        save_last: bool = True,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = None,
        train_time_interval: timedelta | dict[str, int] | str | None = None,
        save_on_exception: bool = True,
        save_weights_only: bool = False,
        on_save_error: Literal["raise", "warn"] = "raise",
    ) -> None:
        owner = "ModelCheckpoint"
        check_monitor("loss" if monitor is None else monitor, mode, owner=owner)
        check_filename(filename)
        self.save_top_k = check.integer("save_top_k", save_top_k, low=-1, owner=owner)
        check.integer("every_n_train_steps", every_n_train_steps, low=1, also=(None,), owner=owner)
        check.integer("every_n_epochs", every_n_epochs, low=1, also=(None,), owner=owner)
        self.on_save_error = check.one_of("on_save_error", on_save_error, ("raise", "warn"), owner=owner)
        if (interval := train_time_interval) is not None:
            interval = check.duration("train_time_interval", interval, owner)
        if monitor is None and save_top_k > 1:
            raise ArgumentError(
                f"{owner}(save_top_k={save_top_k}) without monitor: nothing says which are best. Pass monitor=."
            )
        if save_top_k == 0 and not save_last:
            raise ArgumentError(
                f"{owner}(save_top_k=0, save_last=False) keeps nothing. Pass Trainer(enable_checkpointing=False)."
            )
        self.dirpath = None if not dirpath else Path(os.path.abspath(check.on_disk("dirpath", dirpath, owner=owner)))
        self.filename, self.monitor, self.mode = filename, monitor, mode
        self._sign = 1 if mode == "min" else -1
        self.save_last = check.boolean("save_last", save_last, owner=owner)
        self.every_n_train_steps, self.train_time_interval = every_n_train_steps, interval
        self._has_no_trigger = all(x is None for x in (every_n_epochs, every_n_train_steps, interval))
        self.every_n_epochs = 1 if self._has_no_trigger else every_n_epochs
        # If only the newest is kept, not every epoch must write one.
        self._may_skip_epochs = self._has_no_trigger and monitor is None and save_top_k in (0, 1)
        self.save_on_exception = check.boolean("save_on_exception", save_on_exception, owner=owner)
        self.save_weights_only = check.boolean("save_weights_only", save_weights_only, owner=owner)
        self.exclusive = "folder, the dirpath", self.dirpath
        self._lock: FolderLock | None = None
        self._saving: Saving | None = None
        self._reset()

    def _reset(self) -> None:
        self.best_k_models: dict[str, float] = {}
        self.last_model_path = self._newest_finite = ""
        self._before: dict[str, Any] = {}  # the state before the checkpoint that is being written
        self._replaced: list[str] = []  # the names of checkpoints that are deleted once it is written
        self._step = 0  # of the last trigger by steps
        self._order = 0  # of the newest checkpoint in its folder
        self._saved_at: Any = None
        self._resumed = self._fitting = self._at_epoch_end = False
        self._deadline, self._rests_until = math.inf, 0.0
        self._validated_at = -1  # the step of the last validation
        self._had_value = set[bool]()  # whether the checkpoints that were due had a value of their step
        self._restored_step: int | None = None  # of the newest checkpoint in the state that was restored
        self._steps_in_folder = set[int | None]()  # of checkpoints that the state does not have

    @property
    def best_model_path(self) -> str:
        """The best checkpoint, without `monitor` the newest; "" if there is none."""
        if self.monitor is None:
            return self.last_model_path
        return min(self.best_k_models, key=lambda path: self._sign * self.best_k_models[path], default="")

    @property
    def best_model_score(self) -> float | None:
        """The best value of `monitor`."""
        return self.best_k_models.get(self.best_model_path)

    def folder(self, run_dir: Path) -> Path:
        """Return the folder of the checkpoints of a run whose folder is `run_dir`."""
        return self.dirpath or absolute(run_dir) / disk.FOLDER

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Begin a fit; a resume restores the state afterwards."""
        if stage == "fit":
            self._reset()
            self._folder, self._fitting = self.folder(trainer.run_dir), True

    def on_load_checkpoint(self, trainer: "Trainer", module: "TrainModule", checkpoint: dict[str, Any]) -> None:
        """Note that training is resumed: checkpoints at later steps, from before a crash, may be replaced."""
        self._resumed, self._step = True, min(self._step, trainer.global_step)
        position = checkpoint["position"]
        self._at_epoch_end = trainer.current_epoch > 0 and not (position["batch_idx"] or position["over"])

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Refuse a folder that cannot be written, a state that cannot be saved, or a resume from weights only."""
        writers = trainer.checkpoint_callbacks
        if trainer.resume == "auto" and all(getattr(c, "save_weights_only", False) for c in writers):
            raise ArgumentError(
                "Trainer(resume='auto') has nothing to continue from with ModelCheckpoint(save_weights_only=True) "
                "alone. Add a ModelCheckpoint(dirpath=...) that writes everything, or leave resume= out."
            )
        problem = None
        try:
            if trainer.is_global_zero:
                self._lock = FolderLock(self._folder)
                disk.sweep(self._folder)
                self._order = disk.last_order(self._folder)
                self._delete_replaced(trainer)
            trainer.saver.check()
        except CheckpointError as error:
            problem = error
        team().same_error("the folder of checkpoints", problem)
        self._restart_clock()
        if (step := trainer.global_step) == self._restored_step:
            self._saved_at = trainer.saver.position if self.last_model_path else None
        elif self._restored_step is not None:
            # Another ModelCheckpoint wrote the checkpoint that training continues from, before this one was called at
            # that safe point: it is called now, and writes again what its folder has of that step.
            has_one = step in self._steps_in_folder
            self.on_safe_point(trainer, module, epoch_over=self._at_epoch_end, training_over=has_one)
            self._save_validated(trainer)

    def on_validation_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Note the step of the validation; without an interval, one inside an epoch is followed by a checkpoint."""
        self._validated_at = -1 if trainer.sanity_checking else trainer.global_step
        if self._fitting and self._validated_at >= 0:
            trainer.saver.at_safe_point(lambda: self._save_validated(trainer))

    def due_in(self, step: int) -> int | None:
        """Return the steps to the next checkpoint by steps."""
        return None if self.every_n_train_steps is None else self.every_n_train_steps - step % self.every_n_train_steps

    def due_in_seconds(self) -> float | None:
        """Return the seconds to the next checkpoint by time; 0 once a checkpoint is written."""
        is_written = self._saving is not None and self._saving.is_done
        if is_written if team().size == 1 else self.train_time_interval is not None:  # another process may ask first
            return 0.0
        return self._deadline - time.monotonic()

    def on_safe_point(self, trainer: "Trainer", module: "TrainModule", epoch_over: bool, training_over: bool) -> None:
        """Write a checkpoint if one is due; raise or warn if the one before could not be written."""
        if self._saving is not None and self._saving.is_done and team().size == 1:
            self.finish(trainer)
        step, every = trainer.global_step, self.every_n_train_steps
        due = fires = every is not None and step != self._step and step % every == 0
        if self.every_n_epochs is not None and epoch_over and trainer.current_epoch % self.every_n_epochs == 0:
            # Writing takes a tenth of the time at most; several processes, whose clocks differ, write after each epoch.
            has_rested = self._saving is None and time.monotonic() >= self._rests_until
            due = due or not self._may_skip_epochs or has_rested or team().size > 1
        if self.train_time_interval is not None:
            due |= trainer.agreed(f"{self.state_key}: a checkpoint by time", time.monotonic() >= self._deadline)
        if due or training_over:
            self._step = step if fires else self._step
            self._save(trainer, epoch_over, due=due, forced=training_over)
            self._restart_clock()

    def on_exception(self, trainer: "Trainer", module: "TrainModule", exception: BaseException) -> None:
        """Write the state at the error, if it is complete and all processes can write it together."""
        may_save = isinstance(exception, Exception) and not isinstance(exception, CheckpointError)
        has_begun = trainer.saver.has_trained and (self._lock is not None or not trainer.is_global_zero)
        # After a failure the other processes are elsewhere, unless all of them raise the error.
        if not (self.save_on_exception and self._fitting and may_save and has_begun) or team().over:
            return
        try:
            self._save(trainer, epoch_over=False, due=False, forced=True)
            self.finish(trainer)
        except Exception as error:
            _logger.warning("No checkpoint was written at the error: %s", error)

    def on_train_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Wait for the last checkpoint, before other callbacks print its path; warn if none could be ranked."""
        self.finish(trainer)
        if self._had_value == {False} and not trainer.interrupted:
            text = (
                "ModelCheckpoint(monitor=%r) ranks none of the checkpoints that were due: no value of it is of their "
            )
            text += "steps. Give every_n_... and Trainer(val_check_interval=%s) values that meet."
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

    def _restart_clock(self) -> None:
        self._deadline = time.monotonic() + (math.inf if (interval := self.train_time_interval) is None else interval)

    def _save(self, trainer: "Trainer", epoch_over: bool, *, due: bool, forced: bool) -> None:
        """Begin to write a checkpoint, after the one before is written."""
        trainer.saver.check_finite()  # first: it may go back to an earlier checkpoint
        position = trainer.saver.position
        if position == self._saved_at:
            return
        self.finish(trainer)
        is_finite = trainer.nan_policy != "ignore" or trainer.saver.is_finite()
        score = None if self.monitor is None or not is_finite else self._score(trainer, epoch_over)
        if due and self.monitor is not None and self.monitor in trainer.callback_metrics:
            self._had_value.add(self._is_new(trainer, self.monitor))
        is_best = score is not None and self._is_best(score)
        if self.monitor is not None and not (is_best or self.save_last or forced):
            return
        self._before = self.state_dict()
        try:
            path = str(self._path(trainer))
        except OSError as error:
            self._failed(CheckpointError(f"ModelCheckpoint(filename={self.filename!r}): {error}. Give a shorter name."))
            return
        if score is not None or path != self.last_model_path:  # otherwise it is written again, before any later step
            self.best_k_models.pop(path, None)
        if score is not None and self._is_best(score):  # after the value of the replaced checkpoint is dropped
            self.best_k_models[path] = score
            if len(self.best_k_models) > self.save_top_k >= 0:
                del self.best_k_models[self._worst()]
        self.last_model_path, self._order = path, self._order + 1
        if is_finite:
            self._newest_finite = path
        replaced = self._names(self._before) - self._names(self.state_dict())
        self._replaced = [] if self.save_top_k == -1 else sorted(replaced)
        try:
            self._saving = trainer.saver.begin(path, self._order, weights_only=self.save_weights_only)
        except CheckpointError as error:
            return self._failed(error)
        except BaseException:
            self.load_state_dict(self._before)
            raise
        self._saved_at = position

    def _save_validated(self, trainer: "Trainer") -> None:
        """Save after a validation that has logged `monitor`, if no interval was given; one may be inside an epoch."""
        name, metrics = self.monitor, trainer.callback_metrics
        if self._has_no_trigger and name is not None:
            read_monitored(f"ModelCheckpoint(monitor={name!r})", name, metrics)  # refused if processes differ
            if name in metrics and metrics.step(name) == trainer.global_step:
                self._save(trainer, epoch_over=False, due=True, forced=False)

    def finish(self, trainer: "Trainer") -> None:
        """Wait for the checkpoint that is being written; then delete those that it replaces."""
        if (saving := self._saving) is None:
            return
        try:
            saving.wait()
        except Exception as error:
            self._saving = None
            if isinstance(error, CheckpointError):
                return self._failed(error)
            raise
        self._saving = None  # only now: after a Ctrl-C in the wait the next call waits
        self._rests_until = time.monotonic() + 9 * saving.seconds  # writing takes a tenth of the time
        self._delete_replaced(trainer)
        trainer.saver.announce(self, saving.path)

    def _delete_replaced(self, trainer: "Trainer") -> None:
        """Delete checkpoints that newer ones replace; a failure loses nothing, and is a warning."""
        names, self._replaced = self._replaced, []
        for name in names if trainer.is_global_zero else ():
            try:
                disk.remove(self._folder / name)
            except OSError as error:
                _logger.warning("The old checkpoint %s could not be deleted: %s", self._folder / name, error)

    def _failed(self, error: CheckpointError) -> None:
        """Restore the state from before a checkpoint that was not written."""
        self.load_state_dict(self._before)
        self._saved_at = None
        if self.on_save_error == "raise":
            raise error
        _logger.warning("%s", error)

    def _names(self, state: dict[str, Any]) -> set[str]:
        """Return the checkpoints of a state; unless all are kept, they are deleted once a later state lacks them."""
        return {*(name for name, _ in state["best_k_models"]), state["last_model"], state["newest_finite"]} - {""}

    def _is_best(self, score: float) -> bool:
        if self.save_top_k == -1 or len(self.best_k_models) < self.save_top_k:
            return True
        return self.save_top_k > 0 and self._sign * score < self._sign * self.best_k_models[self._worst()]

    def _worst(self) -> str:
        return max(self.best_k_models, key=lambda path: self._sign * self.best_k_models[path])

    def _score(self, trainer: "Trainer", epoch_over: bool) -> float | None:
        """Return the monitored value, None if these weights have none or it is not finite; refuse an unknown metric."""
        metrics, name = trainer.callback_metrics, str(self.monitor)
        value = self._value(trainer, name, f"ModelCheckpoint(monitor={name!r})")
        if name not in metrics and epoch_over and (self._validated_at >= 0 or not trainer.num_val_batches):
            raise no_such_metric("ModelCheckpoint", name, metrics)
        return value if math.isfinite(value) else None

    def _value(self, trainer: "Trainer", name: str, owner: str) -> float:
        """Return a metric's value; NaN if it was not logged, or after an earlier step, and so of other weights."""
        value = read_monitored(owner, name, trainer.callback_metrics)
        return value if value is not None and self._is_new(trainer, name) else math.nan

    def _is_new(self, trainer: "Trainer", name: str) -> bool:
        return trainer.callback_metrics.step(name) in (None, trainer.global_step)

    def _path(self, trainer: "Trainer") -> Path:
        suffix = ""
        if self.filename:
            counts = {"epoch": trainer.saver.epoch, "step": trainer.global_step}
            owner = f"ModelCheckpoint(filename={self.filename!r})"
            suffix = f"-{filled(self.filename, counts, lambda name: self._value(trainer, name, owner))}"
        name = disk.name_of(trainer.global_step, suffix)
        path, version = self._folder / name, 0
        own_paths = {*self.best_k_models, self.last_model_path, self._newest_finite}
        # Checkpoints of an earlier fit stay; those of a training that crashed are replaced.
        while not self._resumed and str(path) not in own_paths and path.exists():
            version += 1
            path = self._folder / f"{name}-v{version}"
        return path

    @property
    def state_key(self) -> str:
        """The class and its metric: the state is not that of another metric."""
        return type(self).__name__ if self.monitor is None else f"{type(self).__name__}[{self.monitor}, {self.mode}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoints, by their names in the folder."""
        name = os.path.basename
        return {
            "best_k_models": [[name(path), score] for path, score in self.best_k_models.items()],
            "last_model": name(self.last_model_path),
            "best_model": name(self.best_model_path),
            "newest_finite": name(self._newest_finite),
            "replaced": self._replaced,
            "step": self._step,
            "validated_at": self._validated_at,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the checkpoints that still exist."""
        known = {path.name: str(path) for path in disk.candidates(self._folder)}
        self.best_k_models = {known[k]: float(v) for k, v in state_dict["best_k_models"] if k in known}
        self.last_model_path = known.get(state_dict["last_model"], "")
        self._newest_finite = known.get(state_dict["newest_finite"], "")
        # A crash may have come before they were deleted.
        self._replaced = [str(name) for name in state_dict["replaced"] if name in known]
        self._step = state_dict["step"]
        self._restored_step = disk.step_of(Path(state_dict["last_model"])) if state_dict["last_model"] else 0
        self._validated_at = state_dict.get("validated_at", -1)
        self._had_value = {True} if self.best_k_models else set()
        unknown = known.keys() - self._names(state_dict) - {*self._replaced}
        self._steps_in_folder = {disk.step_of(Path(name)) for name in unknown}
