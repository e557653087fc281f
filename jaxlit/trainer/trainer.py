"""The Trainer: arguments become objects, and the loops run."""

import datetime
import inspect
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.early_stopping import EarlyStopping
from jaxlit.callbacks.file_logger import FileLogger
from jaxlit.callbacks.logger import Logger, NoLogger
from jaxlit.callbacks.model_checkpoint import ModelCheckpoint
from jaxlit.checkpoints.files import Checkpoint, last_order
from jaxlit.core.log import active_collector
from jaxlit.core.module import STEPS, TrainModule, call_step, is_overridden
from jaxlit.core.precision import PRECISIONS
from jaxlit.core.state import TrainState
from jaxlit.data.datamodule import DataModule
from jaxlit.data.loaders import Loaders
from jaxlit.engine.creation import check_variables
from jaxlit.engine.hyperparams import Hyperparams
from jaxlit.engine.lazy import build_lazy, lazy
from jaxlit.errors import ArgumentError, ArgumentTypeError, ModuleError, did_you_mean
from jaxlit.loop import train as loop
from jaxlit.loop.restore import Resume
from jaxlit.loop.results import MetricView
from jaxlit.loop.run import Run
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.registry import resolve_strategy
from jaxlit.trainer import settings
from jaxlit.trainer.choose import check_resume, find
from jaxlit.trainer.defaults import all_callbacks, callbacks_of
from jaxlit.trainer.explanation import Explanation, explain
from jaxlit.trainer.run_folder import RunFolder
from jaxlit.trainer.session import Session
from jaxlit.trainer.settings import batch_limits, loop_settings
from jaxlit.trainer.signals import interruptible


class Trainer:
    """Trains a `TrainModule` under a strategy.

    Names, meanings and defaults are Lightning's unless said. `fit` wants a limit: `max_epochs`, `max_steps`,
    `max_time` or `fast_dev_run`.

    Args:
        strategy: A name ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8", "auto" or a
            registered one) or a `Strategy`.
        devices: How many devices, or "auto" for all; `single` uses one.
        precision: "32-true"; "bf16-mixed" or "16-mixed", whose steps compute in 16 bits while parameters, optimizer,
            loss and metrics stay in float32 ("16-mixed" scales the loss); or "bf16-true", whose parameters are
            bfloat16 as well.
        max_epochs: Epochs to train; None or -1 for no limit.
        min_epochs: Epochs before which `stop` does not end training.
        max_steps: Optimizer steps to train, -1 for no limit.
        min_steps: Optimizer steps before which `stop` does not end training, nor before the end of the first epoch
            unless `min_epochs` is given.
        max_time: The time after which to stop: a timedelta, a dict of its arguments or "DD:HH:MM:SS".
        callbacks: A callback or a list of them.
        logger: True for a CSVLogger unless the callbacks hold one, False, or loggers (which are callbacks). Beside a
            WandbLogger here or in `callbacks` stand a CSVLogger and a JSONLLogger, unless it is False: W&B loses rows
            when a process is killed.
        limit_train_batches: Batches an epoch: an int counts, a float is a fraction.
        limit_val_batches: The same for validation; 0 turns it off.
        limit_test_batches: The same for `test`.
        limit_predict_batches: The same for `predict`.
        overfit_batches: Train on these few batches, the same in every epoch, and validate on as many: an int counts,
            a float is a fraction, 0.0 is off. An ArrayLoader is taken without its shuffling.
        fast_dev_run: Run this many batches (True: one) of everything once, without loggers and early stopping.
        num_sanity_val_steps: Validation batches of each loader before training, -1 for all.
        val_check_interval: Training batches between validations as an int, or as a fraction of an epoch; or a
            duration like `max_time`.
        check_val_every_n_epoch: Epochs between those that validate; None counts the batches of `val_check_interval`
            across epochs.
        accumulate_grad_batches: Loader batches an optimizer step, weighted by their rows.
        gradient_clip_val: What the gradients of an optimizer step are clipped to; None for no clipping.
        gradient_clip_algorithm: "norm" (the default: the norm of all gradients together) or "value".
        log_every_n_steps: Optimizer steps between logged rows, 0 for none.
        reload_dataloaders_every_n_epochs: Epochs after which a loader hook is called again, 0 for never.
        enable_checkpointing: Add a ModelCheckpoint, which writes one after every epoch, unless the callbacks hold one.
        enable_progress_bar: Add a ProgressBar unless the callbacks hold one.
        enable_model_summary: Add a ModelSummary unless the callbacks hold one.
        default_root_dir: The run's folder; None for a fresh `runs/<time>-<id>`, made at the first write.
        resume: "auto" to go on from the newest checkpoint in `default_root_dir`, if there is one: then the same command
            starts a training and continues it. Or a checkpoint, or a run's folder, to go on from.
        seed: The seed of a lazy module's `rngs`.
        nan_policy: What a non-finite loss or gradient does: "raise" (the parameters stay those before it),
            "skip" (no update for that step), "rollback" (back to the newest checkpoint, without the batches since)
            or "ignore" (nothing is checked).
        prefetch: Batches that a thread draws ahead of the step; 0 for no thread, "auto" for one (two batches) if the
            first batches are slow to come.
        host_keys: Keys of dict batches that stay on the host, strings or objects say. Hooks find them in their batch,
            and predictions that are dicts take them over.
        max_recompiles: How many times batches of another shape or dtype may make a loader's step compile again; None
            for no limit, with a warning from the third on.
        data_timeout: Seconds that a loader may take for a batch before the stacks are printed and the process ends
            with code 76; None for no limit.
        max_in_flight: The most steps dispatched and not finished; "auto": 32 on one device, 4 on several.
        debug: Check every batch and, unless nan_policy="ignore", every step's loss, wait for each step, overwrite no
            array, and warn of a step that draws from numpy or a clock. Slow; `jax.disable_jit` works as well.

    Raises:
        ArgumentError: A value is out of its set, or does not fit another.
        ArgumentTypeError: A value has the wrong type, or no argument has this name.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy="ddp", max_epochs=3, logger=False)
    """

    max_epochs: int | None
    min_epochs: int
    max_steps: int
    min_steps: int
    max_time: float | None  # seconds
    num_sanity_val_steps: int
    val_check_interval: int | float | datetime.timedelta
    check_val_every_n_epoch: int | None
    accumulate_grad_batches: int
    log_every_n_steps: int
    reload_dataloaders_every_n_epochs: int

    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        devices: int | str = "auto",
        precision: str = "32-true",
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | datetime.timedelta | dict[str, int] | None = None,
        callbacks: Callback | Sequence[Callback] | None = None,
        logger: bool | Callback | Sequence[Callback] = True,
        limit_train_batches: int | float = 1.0,
        limit_val_batches: int | float = 1.0,
        limit_test_batches: int | float = 1.0,
        limit_predict_batches: int | float = 1.0,
        overfit_batches: int | float = 0.0,
        fast_dev_run: bool | int = False,
        num_sanity_val_steps: int = 2,
        val_check_interval: int | float | str | datetime.timedelta | dict[str, int] = 1.0,
        check_val_every_n_epoch: int | None = 1,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
        log_every_n_steps: int = 50,
        reload_dataloaders_every_n_epochs: int = 0,
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = True,
        default_root_dir: str | Path | None = None,
        resume: str | Path | None = None,
        seed: int = 0,
        nan_policy: str = "raise",
        prefetch: int | str = "auto",
        host_keys: Sequence[str] = (),
        max_recompiles: int | None = None,
        data_timeout: float | None = None,
        max_in_flight: int | str = "auto",
        debug: bool = False,
        **unknown: Any,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "unknown", "__class__")}
        for name in unknown:
            known = [p for p in inspect.signature(Trainer).parameters if p != "unknown"]
            raise ArgumentTypeError(
                f"Trainer has no argument {name!r}.{did_you_mean(name, known)} help(jaxlit.Trainer) lists those it has."
            )
        vars(self).update(loop_settings(given))
        self._limits, self.overfit_batches = batch_limits(given)
        self.fast_dev_run, once = settings.fast_dev_run(fast_dev_run)
        if self.fast_dev_run:
            self._limits = dict.fromkeys(self._limits, self.fast_dev_run)
            vars(self).update(once)
        self.seed = check.integer("seed", seed, low=0)
        self.nan_policy = check.one_of("nan_policy", nan_policy, ("raise", "skip", "rollback", "ignore"))
        self.precision = check.one_of("precision", precision, PRECISIONS)
        clip = settings.clipping(gradient_clip_val, gradient_clip_algorithm)
        self.debug = check.boolean("debug", debug)
        self._devices = None if devices == "auto" else check.integer("devices", devices, low=1)
        self.strategy = resolve_strategy(strategy, self._devices)
        # Before anything is trained, so that a wrong count is refused here.
        self.strategy.use(self._devices)
        in_flight = 32 if self.strategy.mesh.size == 1 else 4  # unbounded, several CPU devices would end the process
        if max_in_flight != "auto":
            in_flight = check.integer("max_in_flight", max_in_flight, low=1)
        self.max_in_flight = 1 if debug else in_flight
        self.prefetch = prefetch if prefetch == "auto" else check.integer("prefetch", prefetch, low=0)
        self.data_timeout = None if data_timeout is None else check.positive("data_timeout", data_timeout)
        self.host_keys = check.names("host_keys", host_keys)
        if max_recompiles is not None:
            check.integer("max_recompiles", max_recompiles, low=0)
        self._intake = {"host_keys": self.host_keys, "max_recompiles": max_recompiles, "debug": debug}
        if default_root_dir is not None and not isinstance(default_root_dir, (str, Path)):
            raise ArgumentTypeError(f"Trainer(default_root_dir=...) takes a path, got {default_root_dir!r}.")
        self._folder = RunFolder(None if default_root_dir is None else Path(default_root_dir))
        self.resume = check_resume(resume, self._folder.root, self.fast_dev_run)
        found, self._extra_loggers = all_callbacks(
            callbacks, logger, enable_progress_bar, enable_model_summary, enable_checkpointing
        )
        if self.fast_dev_run:
            found = [c for c in found if c.in_fast_dev_run and c not in self._extra_loggers]
        self.callbacks = found
        given_ones = callbacks_of("callbacks", callbacks) + self._extra_loggers
        ours = [c for c in found if isinstance(c, ModelCheckpoint) and all(c is not other for other in given_ones)]
        self._default_checkpoint = ours[0] if ours else None
        if self.nan_policy == "rollback" and self.checkpoint_callback is None and not self.fast_dev_run:
            raise ArgumentError(
                "Trainer(nan_policy='rollback', enable_checkpointing=False) has nothing to go back to. Leave "
                "enable_checkpointing out."
            )
        self.config = {k: v if isinstance(v, (bool, int, float, str, type(None))) else str(v) for k, v in given.items()}
        self.config |= {"callbacks": [type(c).__name__ for c in self.callbacks], "logger": bool(self.loggers)}

        self.should_stop, self.stop_reason = False, None
        self.interrupted = self.sanity_checking = False
        self.module: TrainModule | None = None
        self.num_training_batches: int | float = 0
        self.num_val_batches: list[int | float] = []
        self._built_last: tuple[lazy, TrainModule] | None = None  # the newest module that was built, and of what
        self._session = Session(self, clip)

    # What runs --------------------------------------------------------------------------------------

    def fit(
        self,
        model: TrainModule | lazy,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        *,
        strict: bool = True,
        reset_optimizer: bool = False,
    ) -> None:
        """Train a module; afterwards it holds the trained weights.

        A second call starts again at epoch 0, unless `Trainer(resume=...)` says where to go on.

        Ctrl-C ends training after the step that runs, with a checkpoint and `trainer.interrupted` set; a second one
        raises KeyboardInterrupt.

        Args:
            model: The module, or `jl.lazy(...)`; then the built module is `trainer.module`.
            train_dataloaders: A `jl.ArrayLoader`, a grain dataset of batches or another re-iterable of pytrees of
                numpy arrays; a batch holds global rows. Left out, the module's own `train_dataloader` hook is asked.
            val_dataloaders: The same for validation, or a list of several.
            datamodule: A `jl.DataModule` in place of loaders.
            ckpt_path: Go on from a checkpoint: its path, a run's folder, "last" for the newest one in this Trainer's
                folder, or "best" for the best. A finished run ends at once; a larger `max_epochs` continues it.
            strict: Refuse a checkpoint that is not exactly of this model and optimizer; otherwise what fits is taken,
                and the rest named.
            reset_optimizer: Take the optimizer as it is at step 0, not from the checkpoint.

        Raises:
            JaxlitError: An argument, the module, the data or the checkpoint cannot be used.
        """
        check.boolean("strict", strict)
        check.boolean("reset_optimizer", reset_optimizer)
        if ckpt_path is None and self.resume is None and (reset_optimizer or not strict):
            raise ArgumentError(
                "Trainer.fit(strict=False) and reset_optimizer=True say how a checkpoint is taken, and there is none. "
                "Pass ckpt_path=..., or Trainer(resume=...)."
            )
        if self.max_epochs is None and self.max_steps < 0 and self.max_time is None:
            raise ArgumentError(
                "Trainer.fit has no limit. Pass Trainer(max_epochs=...), Trainer(max_steps=...) or "
                "Trainer(max_time=...)."
            )
        given = {
            "training": (train_dataloaders, "train_dataloaders"),
            "validation": (val_dataloaders, "val_dataloaders"),
        }
        loaders = self._loaders("fit", given, datamodule, pinned=bool(self.overfit_batches))
        self._check_idle("fit")
        found = find(self, "fit", ckpt_path)
        self._claim_folder(found)
        module, own = self._build(model, "fit", "training", loaders)
        if found is not None and self.max_epochs is not None and found.state["epoch"] > self.max_epochs:
            raise ArgumentError(
                f"Trainer(max_epochs={self.max_epochs}) is less than the {found.state['epoch']} epochs that "
                f"{found.path} has seen. Raise max_epochs."
            )
        if val_dataloaders is not None and not is_overridden(module, "validation_step"):
            raise ModuleError(
                f"{type(module).__name__} has no validation_step, and Trainer.fit got val_dataloaders. "
                "Define validation_step(self, batch), or leave val_dataloaders out."
            )
        with interruptible(self):
            resume = None if found is None else Resume(found, strict, reset_optimizer)
            self._session.run(module, "fit", loaders, loop.fit, own=own, resume=resume)

    def validate(
        self,
        model: TrainModule | lazy | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> list[dict[str, float]]:
        """Run the validation step over loaders.

        Args:
            model: The module; None for the one of the last fit.
            dataloaders: A loader, or a list of several.
            datamodule: A `jl.DataModule` in place of loaders.
            ckpt_path: Take the weights of a checkpoint, as in `fit`; the module keeps its own.

        Returns:
            The metrics of each loader.
        """
        return self._evaluate(model, dataloaders, datamodule, "validate", "validation", ckpt_path)

    def test(
        self,
        model: TrainModule | lazy | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
    ) -> list[dict[str, float]]:
        """Run the test step over loaders; otherwise like `validate`."""
        return self._evaluate(model, dataloaders, datamodule, "test", "test", ckpt_path)

    def predict(
        self,
        model: TrainModule | lazy | None = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        *,
        return_predictions: bool = True,
    ) -> list[Any] | None:
        """Run the predict step over loaders.

        Args:
            model: The module; None for the one of the last fit.
            dataloaders: A loader, or a list of several.
            datamodule: A `jl.DataModule` in place of loaders.
            ckpt_path: Take the weights of a checkpoint, as in `fit`; the module keeps its own.
            return_predictions: Whether to keep and return what the step returns.

        Returns:
            One entry a batch: what `predict_step` returned, as numpy, with the real rows in loader order. For
            several loaders a list of such lists. None without `return_predictions`.
        """
        check.boolean("return_predictions", return_predictions)
        if return_predictions and self.host_keys and self.strategy.num_processes > 1:
            raise ArgumentError(
                f"Trainer(host_keys={self.host_keys}): in several processes predictions are of all rows, and host keys "
                "of this process's. Pass return_predictions=False and write them in on_predict_batch_end."
            )
        work = partial(loop.predict, keep=return_predictions)
        found = self._evaluate(model, dataloaders, datamodule, "predict", "predict", ckpt_path, work)
        if not return_predictions:
            return None
        return found if len(found) != 1 else found[0]

    def apply(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Run `fn(module, *inputs)` compiled under the strategy, on the newest weights; from a callback, say.

        The module is a copy of `trainer.module` with the arrays that it has now, in evaluation mode, in the precision
        of a step; what `fn` writes to it is dropped. It is compiled once for each function, so pass the same function
        again, not a new lambda.

        Args:
            fn: A function of a module and arrays to a pytree of arrays.
            *inputs: Pytrees of arrays, split over the devices along their first dim where it divides.

        Returns:
            What `fn` returned, as device arrays.

        Raises:
            ArgumentError: Nothing has run yet.

        Example:
            >>> import jax, jaxlit as jl
            >>> def mean_output(module, x):
            ...     return module(x).mean()
            >>> class Watch(jl.Callback):
            ...     def __init__(self, x):
            ...         self.x = x
            ...     def on_train_epoch_end(self, trainer, module):
            ...         print(float(trainer.apply(mean_output, self.x)))
        """
        if not callable(fn):
            raise ArgumentTypeError(f"Trainer.apply(fn, *inputs) takes a function of a module, got {fn!r}.")
        return self._session.apply(fn, *inputs)

    def callback_arrays(self, callback: Callback) -> Any:
        """Return the arrays that a callback keeps in the training state, in a hook of `fit` or after it.

        They are global arrays, split over the devices as the parameters are. The next step overwrites them, so copy
        what you keep.

        Args:
            callback: A callback with `init_arrays` and `update_arrays`.

        Raises:
            ArgumentError: It took no part in the newest fit, or keeps no arrays.

        Example:
            >>> import jax, jaxlit as jl
            >>> class Counts(jl.Callback):
            ...     def init_arrays(self, params):
            ...         return {"steps": jax.numpy.zeros((), "int32")}
            ...     def update_arrays(self, arrays, params, grads, global_step):
            ...         return {"steps": arrays["steps"] + 1}, params
            ...     def on_train_end(self, trainer, module):
            ...         print(int(trainer.callback_arrays(self)["steps"]))
        """
        extras = {} if self._session.engine is None else self._session.engine.extras
        for key, keeper in extras.items():
            if keeper is callback:
                return self.state.extras[key]
        raise ArgumentError(
            f"Trainer.callback_arrays takes a callback of the newest fit that keeps arrays, {list(extras)} here, got "
            f"{callback!r}. Call it from fit on, with a callback that defines init_arrays and update_arrays."
        )

    def save_checkpoint(self, path: str | Path) -> None:
        """Write a checkpoint of everything, from a hook of `fit` or after it, and wait until it is there.

        In several processes all must call it. In a hook, the callbacks whose hook comes later count as if it had run;
        `on_safe_point` is where nothing is left to do.

        Args:
            path: Its folder; a checkpoint that is there is replaced once the new one is whole.

        Raises:
            CheckpointError: It cannot be written, or nothing was trained.
            ArgumentError: Something else than a checkpoint stands at `path`.

        Example:
            >>> import jaxlit as jl
            >>> class Twice(jl.Callback):
            ...     def on_safe_point(self, trainer, module, epoch_over, training_over):
            ...         if trainer.global_step in (100, 1000):
            ...             trainer.save_checkpoint(f"kept/at_{trainer.global_step}")
        """
        if not isinstance(path, (str, Path)) or not str(path):
            raise ArgumentTypeError(f"Trainer.save_checkpoint(path) takes a path, got {path!r}.")
        where = Path(os.path.abspath(path))
        self._session.save(where, last_order(where.parent) + 1).wait()

    def explain(self) -> Explanation:
        """Tell where the time of the newest run went, by callback and hook; may be called while it runs.

        Returns:
            The seconds that each hook kept the loop waiting; printed, it is a table.

        Raises:
            ArgumentError: Nothing has run yet.

        Example:
            >>> import jaxlit as jl
            >>> class TellAtTheEnd(jl.Callback):
            ...     def on_train_end(self, trainer, module):
            ...         print(trainer.explain())
        """
        if self._session.current is None:
            raise ArgumentError("Trainer.explain has nothing to tell. Call it after fit, or from a hook.")
        return explain(self._session.current)

    def stop(self, reason: str) -> None:
        """End training after the current step and a last validation, once `min_epochs` and `min_steps` are reached."""
        self.should_stop, self.stop_reason = True, self.stop_reason or reason

    # What callbacks read ----------------------------------------------------------------------------

    @property
    def current_epoch(self) -> Any:
        """The epoch, from 0, traced inside a step; after `fit` the number of epochs."""
        collector = active_collector()  # a step is traced once: a plain number would stay what it was then
        position = self._session.position
        return position.epoch + position.cut if collector is None else collector.epoch

    @property
    def global_step(self) -> Any:
        """Optimizer steps taken; traced inside a step."""
        collector = active_collector()
        return self._session.position.global_step if collector is None else collector.step

    @property
    def callback_metrics(self) -> MetricView:
        """Every logged metric; reading a key fetches it from the device."""
        return self._session.results.callback_metrics

    @property
    def logged_metrics(self) -> MetricView:
        """The metrics that go to loggers."""
        return self._session.results.logged_metrics

    @property
    def progress_bar_metrics(self) -> MetricView:
        """The metrics logged with `prog_bar=True`."""
        return self._session.results.progress_bar_metrics

    @property
    def state(self) -> TrainState:
        """The training state as global arrays; the next step overwrites them, so copy what you keep."""
        if self._session.engine is None:
            raise AttributeError("trainer.state is there from fit on. Call trainer.fit(module, ...) first.")
        return self.strategy.canonical(self._session.engine.state.unflatten())

    @property
    def hyperparams(self) -> Hyperparams:
        """The optimizer's hyperparameters of `optax.inject_hyperparams`; setting one holds from the next step on.

        `trainer.hyperparams["learning_rate"] *= 0.5` in a hook, for one; reading waits for the device.
        """
        if self._session.engine is None:
            raise AttributeError("trainer.hyperparams is there from fit on. Call trainer.fit(module, ...) first.")
        return Hyperparams(self._session.engine.state)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps that a fit will take, for schedules in `configure_optimizers`; inf if nothing bounds them."""
        if self.num_training_batches == math.inf or self.max_epochs is None:
            return math.inf if self.max_steps < 0 else self.max_steps
        steps = math.ceil(self.num_training_batches / self.accumulate_grad_batches) * max(self.max_epochs, 1)
        return steps if self.max_steps < 0 else min(steps, self.max_steps)

    @property
    def data_wait(self) -> float:
        """Seconds of the epoch at hand in which the devices had nothing to do but wait for a batch."""
        run = self._session.current
        return 0.0 if run is None or run.train is None else run.train[0].waited

    @property
    def compile_seconds(self) -> dict[str, float]:
        """Seconds that the newest run has spent on compiling, by the kind of step: "train_step" and others."""
        run = self._session.current
        return {} if run is None else dict(run.compiles.seconds)

    @property
    def run_dir(self) -> Path:
        """The run's folder; whoever writes first makes it."""
        return self._folder.path

    @property
    def log_dir(self) -> Path:
        """The same as `run_dir`."""
        return self.run_dir

    @property
    def loggers(self) -> list[Callback]:
        """The callbacks that log rows to somewhere."""
        return [c for c in self.callbacks if isinstance(c, Logger) or c in self._extra_loggers]

    @property
    def logger(self) -> Any:
        """The first of `loggers`; without one, a `jl.callbacks.NoLogger`, which takes everything and keeps nothing."""
        return next(iter(self.loggers), NoLogger())

    @property
    def checkpoint_callback(self) -> ModelCheckpoint | None:
        """The first ModelCheckpoint."""
        return next((c for c in self.callbacks if isinstance(c, ModelCheckpoint)), None)

    @property
    def checkpoint_callbacks(self) -> list[ModelCheckpoint]:
        """Every ModelCheckpoint."""
        return [c for c in self.callbacks if isinstance(c, ModelCheckpoint)]

    @property
    def early_stopping_callback(self) -> Callback | None:
        """The first EarlyStopping."""
        return next((c for c in self.callbacks if isinstance(c, EarlyStopping)), None)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes files."""
        return jax.process_index() == 0

    # Helpers ----------------------------------------------------------------------------------------

    def _evaluate(
        self, model: Any, dataloaders: Any, datamodule: Any, verb: str, stage: str, ckpt_path: Any, work: Any = None
    ) -> list[Any]:
        loaders = self._loaders(verb, {stage: (dataloaders, "dataloaders")}, datamodule)
        self._check_idle(verb)
        checkpoint = find(self, verb, ckpt_path)
        self._claim_folder(checkpoint, refuse=False)
        module, own = self._build(self._given(model, verb), verb, stage, loaders)
        found: list[Any] = []

        def run_loops(run: Run) -> None:
            found.extend(work(run, run.evaluated) if work else loop.evaluate(run, stage, run.evaluated))

        resume = None if checkpoint is None else Resume(checkpoint)
        self._session.run(module, verb, loaders, run_loops, own=own, resume=resume)
        return found

    def _claim_folder(self, found: Checkpoint | None, *, refuse: bool = True) -> None:
        files = [c.filename for c in self.callbacks if isinstance(c, FileLogger)]
        several = self.strategy.num_processes > 1
        self._folder.claim(files, self.resume, found, several=several, refuse=refuse)

    def _loaders(self, verb: str, given: Any, datamodule: Any, pinned: bool = False) -> Loaders:
        asked = not self.fast_dev_run
        return Loaders(verb, given, datamodule, None, self._limits, intake=self._intake, pinned=pinned, asked=asked)

    def _given(self, model: Any, verb: str) -> TrainModule | lazy:
        if model is None and self.module is None:
            raise ArgumentError(f"Trainer.{verb}(model, ...) has no model. Pass one, or call fit first.")
        return self.module if model is None else model  # type: ignore[return-value]

    def _check_idle(self, verb: str) -> None:
        if self._session.running:
            raise ArgumentError(
                f"Trainer.{verb} is called from a hook of a run of the same Trainer. Use a second Trainer for it."
            )

    def _build(self, model: Any, verb: str, stage: str, loaders: Loaders) -> tuple[TrainModule, bool]:
        """Return the module, and whether its arrays are the Trainer's to overwrite."""
        loaders.module, own = self._built(model, verb, stage, loaders)
        return loaders.module, own

    def _built(self, model: Any, verb: str, stage: str, loaders: Loaders) -> tuple[TrainModule, bool]:
        if not isinstance(model, (TrainModule, lazy)):
            kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
            hint = " Pass an instance, or jl.lazy(cls, ...)." if isinstance(model, type) else ""
            raise ArgumentTypeError(f"Trainer takes a jaxlit.TrainModule as model, got {kind}.{hint}")
        cls = model.cls if isinstance(model, lazy) else type(model)
        if getattr(cls, STEPS[stage]) is getattr(TrainModule, STEPS[stage]):
            raise ModuleError(f"{cls.__name__} has no {STEPS[stage]}. Define {STEPS[stage]}(self, batch).")
        # Another Trainer with the same strategy object may have set it up for other devices.
        self.strategy.use(self._devices)
        if isinstance(model, lazy):
            if stage != "training" and self._built_last is not None and model is self._built_last[0]:
                return self._built_last[1], False  # the one that fit has trained
            loaders.look(model.cls, self.data_timeout)  # building it may take minutes
            self._built_last = (model, build_lazy(model, self.strategy, self.seed))
            return self._built_last[1], True
        call_step(model, stage)
        check_variables(model)
        return model, False
