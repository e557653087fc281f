"""What a Trainer shows: its arguments as the runs use them, and what its runs have come to."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax

from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.logger import NoLogger
from jaxlit.callbacks.traits import steps_of
from jaxlit.core.log import active_collector
from jaxlit.core.module import TrainModule
from jaxlit.core.reads import READS
from jaxlit.core.state import TrainState
from jaxlit.engine.hyperparams import Hyperparams
from jaxlit.errors import did_you_mean
from jaxlit.loop.history import History
from jaxlit.loop.results import MetricView
from jaxlit.loop.run import Run
from jaxlit.loop.settings import Settings
from jaxlit.porting import advice
from jaxlit.programs.flops import Flops
from jaxlit.reporting.terminal import short_path
from jaxlit.shown import shown
from jaxlit.strategies.base import Strategy
from jaxlit.trainer.explanation import step_flops
from jaxlit.trainer.saver import Saver
from jaxlit.trainer.session import Session

if TYPE_CHECKING:
    from jaxlit.callbacks.early_stopping import EarlyStopping
    from jaxlit.callbacks.model_checkpoint import ModelCheckpoint

_C = TypeVar("_C", bound=type)


def _stored(path: str, doc: str = "The argument as the runs use it; see `jaxlit.Trainer`.") -> Any:
    """Return a property that reads a path from the session; annotated with its type, which an editor then knows."""
    return property(operator.attrgetter(f"_session.{path}"), doc=doc)


def notes_reads(cls: _C) -> _C:
    """Let the properties of a class note that a step reads them while it is traced: it is compiled for their values.

    What is annotated and has no value becomes a property that reads the argument of this name.
    """

    def noting(name: str, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(read)
        def get(trainer: Any) -> Any:
            value = read(trainer)
            if (reads := READS.get()) is not None:
                reads.note(trainer, name, value)
            return value

        return get

    known = {**vars(cls)}
    known |= {name: _stored(f"settings.{name}") for name in {*cls.__annotations__} - {*known, "_session"}}
    for name, value in known.items():
        if isinstance(value, property) and value.fget is not None:
            setattr(cls, name, property(noting(name, value.fget), doc=value.__doc__))
    return cls


@notes_reads
class TrainerProperties:
    """What a Trainer shows: its arguments as the runs use them, and what its runs have come to."""

    _session: Session

    # Arguments; one that is set holds from then on.
    max_epochs: int | None
    max_steps: int
    max_time: timedelta | None
    limit_train_batches: int | float
    limit_val_batches: int | float
    limit_test_batches: int | float
    limit_predict_batches: int | float
    overfit_batches: int | float
    fast_dev_run: int
    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: str | None
    check_val_every_n_epoch: int | None
    val_check_interval: int | float | timedelta
    num_sanity_val_steps: int
    prefetch: int | str
    data_timeout: float | timedelta | None
    hang_timeout: float | timedelta | None
    max_in_flight: int | str
    max_recompiles: int | None
    compile_cache: bool | str | Path
    reload_dataloaders_every_n_epochs: int
    host_keys: tuple[str | int, ...]
    nan_policy: str
    precision: str
    resume: str | Path | None
    seed: int
    debug: bool
    min_epochs: int = _stored("settings.least_epochs", "Epochs before which `stop` does not end training.")
    min_steps: int = _stored("settings.least_steps", "Optimizer steps before which `stop` does not end training.")
    callbacks: list[Callback] = _stored("callbacks", "All callbacks in order, those that the module adds at the end.")
    strategy: Strategy = _stored("strategy", "The strategy, set up on its devices.")
    settings: Settings = _stored("settings", "Every argument, checked and brought to one form; frozen.")
    config: dict[str, Any] = _stored("config", "The arguments as they were given, as JSON values, for loggers.")

    # What runs change.
    should_stop: bool = _stored("control.should_stop", "Whether a stop was asked for.")
    stop_reason: str | None = _stored("control.stop_reason", "Why, as the first `stop` said.")
    interrupted: bool = _stored("control.interrupted", "Whether Ctrl-C, SIGTERM or another signal has ended the run.")
    sanity_checking: bool = _stored("control.sanity_checking", "Whether a validation before training runs.")
    num_training_batches: int | float = _stored(
        "control.num_training_batches", "Batches of an epoch; inf if the loader has no length."
    )
    num_val_batches: list[int | float] = _stored("control.num_val_batches", "Batches of each validation loader.")
    num_predict_batches: list[int | float] = _stored(
        "control.num_predict_batches", "Batches of each loader of predict."
    )
    predict_outputs: Any = _stored(
        "control.predict_outputs", "What the predict step returns, as jax.ShapeDtypeStructs, from its first batch on."
    )
    module: TrainModule | None = _stored("module", "The module of the newest run.")
    model: Any = _stored("module", "The module of the newest run, as `module`.")
    saver: Saver = _stored("saver", "Writes checkpoints piece by piece, for callbacks such as `ModelCheckpoint`.")
    callback_metrics: MetricView = _stored(
        "results.callback_metrics", "Every logged metric; reading a key waits for the device."
    )
    logged_metrics: MetricView = _stored("results.logged_metrics", "The metrics that go to loggers.")
    progress_bar_metrics: MetricView = _stored(
        "results.progress_bar_metrics", "The metrics logged with `prog_bar=True`."
    )
    loss: float | None = _stored("results.loss", "The training loss of the bar; None if the step logs one for it.")
    history: History = _stored("results.history", "Every metric's steps and values, also to plot; of the newest fit.")
    run_dir: Path = _stored("folder.path", "The run's folder, made by the first write.")
    log_dir: Path = _stored("folder.path", "The same as `run_dir`.")

    def __repr__(self) -> str:
        try:
            session = vars(self)["_session"]
            settings, mesh, folder = session.settings, session.strategy.mesh, session.folder.known
            parts = [
                session.strategy.describe().split("\n")[0],
                f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
                f"{session.epoch}{'' if settings.max_epochs is None else f' of {settings.max_epochs}'} epochs",
                f"{session.position.global_step}{f' of {settings.max_steps}' if settings.max_steps >= 0 else ''} steps",
                f"run {short_path(folder)}" if folder is not None else "",
            ]
            return f"<{type(self).__name__}: {', '.join(filter(None, parts))}>"
        except Exception:  # a debugger shows a Trainer that is not complete yet, and a user's strategy may raise
            return object.__repr__(self)

    @property
    def log_every_n_steps(self) -> int:
        """Optimizer steps between logged rows, 0 for none."""
        every = self._session.settings.log_every_n_steps
        return self._session.control.log_every if isinstance(every, str) else every

    @property
    def datamodule(self) -> Any:
        """The DataModule of the newest run, None without one."""
        return None if self._session.current is None else self._session.current.loaders.datamodule

    @property
    def is_running(self) -> bool:
        """Whether the loops of `fit`, `validate`, `test` or `predict` run; not yet in `prepare_data` and `setup`."""
        return self._session.active is not None

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes files."""
        return jax.process_index() == 0

    @property
    def current_epoch(self) -> Any:
        """The epoch, from 0, traced inside a step; after `fit` the number of epochs."""
        collector = active_collector()  # a step is traced once: a plain number would be a constant of it
        return self._session.epoch if collector is None else collector.epoch

    @property
    def global_step(self) -> Any:
        """Optimizer steps taken; traced inside a step."""
        collector = active_collector()
        return self._session.position.global_step if collector is None else collector.step

    @property
    def state(self) -> TrainState:
        """The training state as global arrays; the next step overwrites them, so copy what you keep."""
        if (engine := self._session.engine) is None:
            raise AttributeError("trainer.state is there from fit on. Call trainer.fit(module, ...) first.")
        return engine.state.unflatten()

    @property
    def hyperparams(self) -> Hyperparams:
        """The optimizer's hyperparameters of `optax.inject_hyperparams`; setting one holds from the next step on.

        For example `trainer.hyperparams["learning_rate"] *= 0.5` in a hook; reading waits for the device.
        """
        if (engine := self._session.engine) is None:
            raise AttributeError("trainer.hyperparams is there from fit on. Call trainer.fit(module, ...) first.")
        return Hyperparams(engine.state)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Optimizer steps that a fit will take, for schedules in `configure_optimizers`; inf if nothing bounds them."""
        settings, batches = self._session.settings, self._session.control.num_training_batches
        limit = math.inf if settings.max_steps < 0 else settings.max_steps
        if batches == math.inf or settings.max_epochs is None:
            return limit
        epochs, accumulate = max(settings.max_epochs, 1), settings.accumulate_grad_batches
        return min(steps_of(self._session.callbacks, accumulate, int(batches), epochs), limit)

    @property
    def data_wait(self) -> float:
        """Seconds of this epoch in which the devices only waited for a batch."""
        run = self._session.current
        return run.feeder.waited(run.train[0]) if isinstance(run, Run) and run.train is not None else 0.0

    @property
    def compile_seconds(self) -> dict[str, float]:
        """Seconds that the newest run has spent on compiling, by the kind of step: "train_step" and others."""
        return {} if self._session.current is None else dict(self._session.current.compiles.seconds)

    @property
    def step_flops(self) -> dict[str, Flops]:
        """Floating-point operations of each step that the newest run has taken, by its name, as in `explain`."""
        return step_flops(self._session.current)

    @property
    def loggers(self) -> list[Callback]:
        """The callbacks that log rows somewhere."""
        return [c for c in self._session.callbacks if c.is_logger or c in self._session.given.loggers]

    @property
    def logger(self) -> Any:
        """The first of `loggers`; without one, a `jl.callbacks.NoLogger`, which keeps pictures and the like only."""
        for logger in self.loggers:
            return logger
        no_logger = NoLogger()
        no_logger._media = self._session.media
        return no_logger

    # Any stands for None: a program knows whether it has one, and a check for None is allowed but not asked for.
    @property
    def checkpoint_callback(self) -> "ModelCheckpoint | Any":
        """The first ModelCheckpoint with a monitor, or else the first."""
        return min(self.checkpoint_callbacks, key=lambda c: c.monitor is None, default=None)

    @property
    def checkpoint_callbacks(self) -> "list[ModelCheckpoint]":
        """Every ModelCheckpoint."""
        return [c for c in self._session.callbacks if c.role == "checkpoint"]  # type: ignore[misc]

    @property
    def early_stopping_callback(self) -> "EarlyStopping | Any":
        """The first EarlyStopping."""
        return next((c for c in self._session.callbacks if c.role == "early_stopping"), None)

    @property
    def train_dataloader(self) -> Any:
        """The loader that the newest fit trains on, None before it."""
        run = self._session.fitted
        return None if run is None or run.train is None else run.train[0].loader

    @property
    def val_dataloaders(self) -> list[Any]:
        """The loaders that the newest fit validates on."""
        return [] if self._session.fitted is None else [source.loader for source, _ in self._session.fitted.val]


def check_settable(trainer: Any, name: str, value: Any) -> None:
    """Refuse to set what is fixed, what only runs change, and a misspelt attribute, which nothing would read.

    Raises:
        AttributeError: With what to do.
    """
    known, arguments = hasattr(type(trainer), name), {field.name for field in dataclasses.fields(Settings)}
    if name in arguments and (name == "strategy" or not known or name == "logger"):
        raise AttributeError(
            f"Trainer.{name} is fixed when a Trainer is made, and would be set to {shown(value)}. Make another one "
            f"with Trainer({name}=...)."
        )
    if isinstance(getattr(type(trainer), name, None), property) and name not in {*arguments, "should_stop"}:
        raise AttributeError(
            f"Trainer.{name} is a result of the runs, and would be set to {shown(value)}. Set an argument of the "
            "Trainer instead, or call what changes it: fit, validate, test, predict, stop."
        )
    if known:
        return
    text = advice("Trainer").get(name, "") or did_you_mean(name, [x for x in dir(trainer) if not x.startswith("_")])
    if text:
        raise AttributeError(f"Trainer has no attribute {name!r}, which would be set to {shown(value)}. {text.strip()}")
