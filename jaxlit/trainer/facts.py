"""What a Trainer tells of its session: each function is an attribute of the Trainer."""

import math
from pathlib import Path
from typing import Any

import jax

from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.early_stopping import EarlyStopping
from jaxlit.callbacks.gradient_accumulation_scheduler import steps_of
from jaxlit.callbacks.logger import Logger, NoLogger
from jaxlit.callbacks.model_checkpoint import ModelCheckpoint
from jaxlit.core.log import active_collector
from jaxlit.core.state import TrainState
from jaxlit.engine.hyperparams import Hyperparams
from jaxlit.programs.flops import Flops
from jaxlit.reporting.terminal import short_path
from jaxlit.trainer.attributes import argument, fact
from jaxlit.trainer.explanation import step_flops as step_flops_of
from jaxlit.trainer.session import Session


def min_epochs(session: Session) -> int:
    """Epochs before which `stop` does not end training."""
    return session.settings.least[0]


def min_steps(session: Session) -> int:
    """Optimizer steps before which `stop` does not end training."""
    return session.settings.least[1]


def current_epoch(session: Session) -> Any:
    """The epoch, from 0, traced inside a step; after `fit` the number of epochs."""
    collector = active_collector()  # a step is traced once: a plain number would stay what it was then
    return session.epoch if collector is None else collector.epoch


def global_step(session: Session) -> Any:
    """Optimizer steps taken; traced inside a step."""
    collector = active_collector()
    return session.position.global_step if collector is None else collector.step


def state(session: Session) -> TrainState:
    """The training state as global arrays; the next step overwrites them, so copy what you keep."""
    if session.engine is None:
        raise AttributeError("trainer.state is there from fit on. Call trainer.fit(module, ...) first.")
    return session.engine.state.unflatten()


def hyperparams(session: Session) -> Hyperparams:
    """The optimizer's hyperparameters of `optax.inject_hyperparams`; setting one holds from the next step on.

    `trainer.hyperparams["learning_rate"] *= 0.5` in a hook, for one; reading waits for the device.
    """
    if session.engine is None:
        raise AttributeError("trainer.hyperparams is there from fit on. Call trainer.fit(module, ...) first.")
    return Hyperparams(session.engine.state)


def log_every_n_steps(session: Session) -> int:
    """Optimizer steps between logged rows, 0 for none."""
    every = session.settings.log_every_n_steps
    return session.control.log_every if isinstance(every, str) else every


def estimated_stepping_batches(session: Session) -> int | float:
    """Optimizer steps that a fit will take, for schedules in `configure_optimizers`; inf if nothing bounds them."""
    settings, batches = session.settings, session.control.num_training_batches
    if batches == math.inf or settings.max_epochs is None:
        return math.inf if settings.max_steps < 0 else settings.max_steps
    given = session.callbacks, settings.accumulate_grad_batches, int(batches)
    steps = steps_of(*given, max(settings.max_epochs, 1))
    return steps if settings.max_steps < 0 else min(steps, settings.max_steps)


def is_running(session: Session) -> bool:
    """Whether the loops of `fit`, `validate`, `test` or `predict` run; not yet in `prepare_data` and `setup`."""
    return session.active is not None


def data_wait(session: Session) -> float:
    """Seconds of the epoch at hand in which the devices had nothing to do but wait for a batch."""
    run = session.current
    feeder = getattr(run, "feeder", None)  # a run that has not begun its loops has none
    return 0.0 if run is None or run.train is None or feeder is None else feeder.waited(run.train[0])


def compile_seconds(session: Session) -> dict[str, float]:
    """Seconds that the newest run has spent on compiling, by the kind of step: "train_step" and others."""
    run = session.current
    return {} if run is None else dict(run.compiles.seconds)


def step_flops(session: Session) -> dict[str, Flops]:
    """Floating-point operations of each step that the newest run has taken, as `explain` counts them, by its name."""
    return step_flops_of(session.current)


def run_dir(session: Session) -> Path:
    """The run's folder; whoever writes first makes it."""
    return session.folder.path


def log_dir(session: Session) -> Path:
    """The same as `run_dir`."""
    return session.folder.path


def loggers(session: Session) -> list[Callback]:
    """The callbacks that log rows to somewhere."""
    return [c for c in session.callbacks if isinstance(c, Logger) or c in session.given.loggers]


def logger(session: Session) -> Any:
    """The first of `loggers`; without one, a `jl.callbacks.NoLogger`, which keeps pictures and the like only."""
    if found := loggers(session):
        return found[0]
    (none := NoLogger())._media = session.media
    return none


def checkpoint_callback(session: Session) -> ModelCheckpoint | None:
    """The first ModelCheckpoint with a monitor, or else the first."""
    return min(checkpoint_callbacks(session), key=lambda c: c.monitor is None, default=None)


def checkpoint_callbacks(session: Session) -> list[ModelCheckpoint]:
    """Every ModelCheckpoint."""
    return [c for c in session.callbacks if isinstance(c, ModelCheckpoint)]


def early_stopping_callback(session: Session) -> Callback | None:
    """The first EarlyStopping."""
    return next((c for c in session.callbacks if isinstance(c, EarlyStopping)), None)


def is_global_zero(session: Session) -> bool:
    """Whether this is the process that writes files."""
    return jax.process_index() == 0


def model(session: Session) -> Any:
    """The module of the newest run, as `module`."""
    return session.module


def datamodule(session: Session) -> Any:
    """The DataModule of the newest run, None without one."""
    return None if session.current is None else session.current.loaders.datamodule


def train_dataloader(session: Session) -> Any:
    """The loader that the newest fit trains on, None before it."""
    run = session.fitted
    return None if run is None or run.train is None else run.train[0].loader


def val_dataloaders(session: Session) -> list[Any]:
    """The loaders that the newest fit validates on."""
    return [] if session.fitted is None else [source.loader for source, _ in session.fitted.val]


def described(session: Session) -> str:
    """Return in a line what a Trainer is and what it has done; nothing is computed for it."""
    settings, mesh, folder = session.settings, session.strategy.mesh, session.folder.known
    parts = [
        session.strategy.describe().split("\n")[0],
        f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        f"{session.epoch}{'' if settings.max_epochs is None else f' of {settings.max_epochs}'} epochs",
        f"{session.position.global_step}{f' of {settings.max_steps}' if settings.max_steps >= 0 else ''} steps",
        f"run {short_path(folder)}" if folder is not None else "",
    ]
    return ", ".join(filter(None, parts))


def title(session: Session) -> str:
    """Return what a picture of the newest run is called: its module and its folder, if anything is in that."""
    folder = session.folder.known
    return type(session.module).__name__ + ("" if folder is None else f" · {folder.name}")


class Facts:
    """Those attributes of a Trainer that its session is asked for."""

    def __repr__(self) -> str:
        try:
            return f"<{type(self).__name__}: {described(vars(self)['_session'])}>"
        except Exception:  # a debugger shows one that is not made yet, and strategies are users' own
            return object.__repr__(self)

    min_epochs: int = argument("Epochs before which `stop` does not end training.", min_epochs)
    min_steps: int = argument("Optimizer steps before which `stop` does not end training.", min_steps)
    current_epoch: Any = fact(current_epoch)
    global_step: Any = fact(global_step)
    max_in_flight: int | str = argument("The most steps dispatched and not finished, or 'auto'.")
    compile_cache: bool | str | Path = argument("Where compiled programs are stored: True, a folder, or False.")
    log_every_n_steps: int = argument("Optimizer steps between logged rows, 0 for none.", log_every_n_steps)
    state: TrainState = fact(state)
    hyperparams: Hyperparams = fact(hyperparams)
    estimated_stepping_batches: int | float = fact(estimated_stepping_batches)
    is_running: bool = fact(is_running)
    data_wait: float = fact(data_wait)
    compile_seconds: dict[str, float] = fact(compile_seconds)
    step_flops: dict[str, Flops] = fact(step_flops)
    run_dir: Path = fact(run_dir)
    log_dir: Path = fact(log_dir)
    loggers: list[Callback] = fact(loggers)
    logger: Any = fact(logger)
    # Any stands for None: a program knows whether it has one, and a check for None is allowed but not asked for.
    checkpoint_callback: ModelCheckpoint | Any = fact(checkpoint_callback)
    checkpoint_callbacks: list[ModelCheckpoint] = fact(checkpoint_callbacks)
    early_stopping_callback: EarlyStopping | Any = fact(early_stopping_callback)
    is_global_zero: bool = fact(is_global_zero)
    model: Any = fact(model)
    datamodule: Any = fact(datamodule)
    train_dataloader: Any = fact(train_dataloader)
    val_dataloaders: list[Any] = fact(val_dataloaders)
