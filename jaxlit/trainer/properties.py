"""What hooks read of a Trainer, its arguments and what its runs have come to, and how they end a training."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from jaxlit.callbacks.base import Callback, steps_of
from jaxlit.core.log import active_collector
from jaxlit.core.module import TrainModule
from jaxlit.core.pure_module import READS
from jaxlit.core.train_state import TrainState
from jaxlit.engine.state import Hyperparams
from jaxlit.errors import ArgumentError, did_you_mean
from jaxlit.faces import advice
from jaxlit.loop.results import History, MetricView
from jaxlit.loop.settings import Arguments, Settings
from jaxlit.programs.costs import Flops
from jaxlit.sharding import out_of_meshes
from jaxlit.strategies.base import Strategy
from jaxlit.texts import shown
from jaxlit.trainer.defaults import callbacks_of, check_callbacks, no_logger
from jaxlit.trainer.explanation import step_flops
from jaxlit.trainer.saver import Saver
from jaxlit.trainer.session import Session

if TYPE_CHECKING:
    from jaxlit.callbacks.early_stopping import EarlyStopping
    from jaxlit.callbacks.model_checkpoint import ModelCheckpoint

_FIXED = {"strategy", "devices", "mesh", "logger", "default_root_dir"}  # arguments that stay as they were given
_FIXED |= {"enable_checkpointing", "enable_progress_bar", "enable_model_summary"}


class TrainerProperties(Arguments):
    """What a Trainer shows: its arguments as the runs use them (one that is set holds from then on), and results."""

    _session: Session

    def __repr__(self) -> str:
        return f"{type(self).__name__}(epoch={self.current_epoch}, global_step={self.global_step})"

    @property
    def settings(self) -> Settings:
        """Every argument, checked and brought to one form; frozen."""
        return self._session.settings

    @property
    def strategy(self) -> Strategy:
        """The strategy on its devices, which are chosen when a run begins, or when it is read before one.

        Raises:
            ArgumentError: There are fewer devices than it needs.
        """
        return self._session.strategy

    @property
    def callbacks(self) -> list[Callback]:
        """All callbacks in order, those that the module adds at the end."""
        return self._session.callbacks

    @callbacks.setter
    def callbacks(self, value: Callback | Sequence[Callback] | None) -> None:
        self._session.callbacks = check_callbacks(callbacks_of("callbacks", value))

    @property
    def config(self) -> dict[str, Any]:
        """The arguments as they were given, as JSON values, for loggers."""
        return self._session.config

    @property
    def module(self) -> TrainModule | None:
        """The module of the newest run."""
        return self._session.module

    @property
    def model(self) -> Any:
        """The module of the newest run, as `module`."""
        return self._session.module

    @property
    def saver(self) -> Saver:
        """Writes checkpoints piece by piece, for callbacks such as `ModelCheckpoint`."""
        return self._session.saver

    @property
    def should_stop(self) -> bool:
        """Whether a stop was asked for; may be set."""
        return self._session.control.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        control = self._session.control
        if value:
            control.stop(None, final=True)
        else:
            control.should_stop, control.is_final, control.stop_reason = False, False, None
            control.asked = control.asked and [x for x in control.asked if x.split()[0] not in ("stop", "finish")]

    @property
    def stop_reason(self) -> str | None:
        """Why, as the first `stop` said."""
        return self._session.control.stop_reason

    @property
    def is_finished(self) -> bool:
        """Whether a final `stop` was asked for: a resume trains nothing, unless it names a checkpoint by its path."""
        return self._session.control.is_final

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C, SIGTERM or another signal has ended the run."""
        return self._session.control.interrupted

    @property
    def sanity_checking(self) -> bool:
        """Whether the validation that runs is the one before training."""
        return self._session.control.sanity_checking

    @property
    def num_training_batches(self) -> int | float:
        """Batches of an epoch; inf if the loader has no length."""
        return self._session.control.num_training_batches

    @property
    def num_val_batches(self) -> list[int | float]:
        """Batches of each validation loader."""
        return self._session.control.num_val_batches

    @property
    def num_predict_batches(self) -> list[int | float]:
        """Batches of each loader that is predicted."""
        return self._session.control.num_predict_batches

    @property
    def predict_outputs(self) -> Any:
        """What the predict step returns, as `jax.ShapeDtypeStruct`s, from its first batch on."""
        return self._session.control.predict_outputs

    @property
    def callback_metrics(self) -> MetricView:
        """Every logged metric; reading a key waits for the device."""
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
    def loss(self) -> float | None:
        """The training loss of the bar; None if the step logs one for it."""
        return self._session.results.loss

    @property
    def history(self) -> History:
        """Every logged metric's steps and values, also to plot; of the newest fit."""
        return self._session.results.history

    @property
    def run_dir(self) -> Path:
        """The run's folder, made by the first write."""
        return self._session.folder.path

    log_dir = run_dir

    @property
    def log_every_n_steps(self) -> int:
        """Optimizer steps between logged rows, 0 for none."""
        every = self._session.settings.log_every_n_steps
        return self._session.control.log_every if isinstance(every, str) else every

    @log_every_n_steps.setter
    def log_every_n_steps(self, value: int | str) -> None:
        self._session.set("log_every_n_steps", value)

    @property
    def datamodule(self) -> Any:
        """The DataModule of the newest run, None without one."""
        return None if self._session.loaders is None else self._session.loaders.datamodule

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
        return self._session.position.epochs if collector is None else collector.epoch

    @property
    def global_step(self) -> Any:
        """Optimizer steps taken; traced inside a step."""
        collector = active_collector()
        return self._session.position.global_step if collector is None else collector.step

    @property
    def batches_done(self) -> int:
        """Batches of this epoch whose steps were taken."""
        return self._session.position.batch_idx

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
        """Optimizer steps that a fit will take, for schedules in `configure_optimizers`; inf if nothing bounds them.

        Raises:
            ArgumentError: `max_epochs` bounds them, but the training loader has no length.
        """
        settings = self._session.settings
        batches = self._session.control.num_training_batches
        limit = math.inf if settings.max_steps < 0 else settings.max_steps
        loader = self._session.control.training_loader  # a plan has none
        if loader and limit == batches == math.inf and settings.max_epochs is not None:
            raise ArgumentError(
                f"trainer.estimated_stepping_batches: {loader} has no length, so that max_epochs={settings.max_epochs} "
                "is no number of steps. Pass Trainer(limit_train_batches=...), the batches of an epoch, or max_steps."
            )
        if batches == math.inf or settings.max_epochs is None:
            return limit
        epochs = max(settings.max_epochs, 1)
        return min(steps_of(self._session.callbacks, settings.accumulate_grad_batches, int(batches), epochs), limit)

    @property
    def verbose(self) -> bool:
        """Whether the newest `validate` or `test` prints its metrics at its end."""
        return self._session.control.verbose

    @property
    def data_wait(self) -> float:
        """Seconds of this epoch in which the devices only waited for a batch."""
        run = self._session.current
        return run.data.training[0].waited if run is not None and run.data.train else 0.0

    @property
    def compile_seconds(self) -> dict[str, float]:
        """Seconds that the newest run has spent on compiling, by the kind of step: "train_step" and others."""
        return dict(self._session.compiles)

    @property
    def batch_changes(self) -> dict[str, str]:
        """By loader, how its batches have last changed in shape or dtype, for which a step is compiled again."""
        return {} if self._session.loaders is None else self._session.loaders.changes

    @property
    def step_flops(self) -> dict[str, Flops]:
        """Floating-point operations of each step that the newest run has taken, by its name, as in `explain`."""
        return step_flops(self._session.current)

    @property
    def loggers(self) -> list[Callback]:
        """The callbacks that log rows somewhere."""
        return [c for c in self._session.callbacks if c.is_logger or c in self._session.trainer_callbacks.loggers]

    @property
    def logger(self) -> Any:
        """The first of `loggers`; without one, a `jl.callbacks.NoLogger`, which keeps pictures and the like only."""
        return next(iter(self.loggers), None) or no_logger(self._session.media)

    # Any in place of None: a program knows whether it has one, and a check for None is allowed but not asked for.
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
        return None if run is None or not run.data.train else run.data.training[0].loader

    @property
    def val_dataloaders(self) -> list[Any]:
        """The loaders that the newest fit validates on."""
        return [] if self._session.fitted is None else [source.loader for source, _ in self._session.fitted.data.val]

    @out_of_meshes
    def callback_arrays(self, callback: Callback) -> Any:
        """Return the arrays that a callback keeps in the training state, in a hook of `fit` or after it.

        These global arrays are split as the parameters are. The next step overwrites them, so copy what you keep.

        Args:
            callback: A callback with `init_arrays` and `update_arrays`.

        Raises:
            ArgumentError: It took no part in the newest fit, or keeps no arrays.
        """
        if (engine := self._session.engine) is not None:
            for key, keeper in engine.extras.items():
                if keeper is callback:
                    return engine.state.unflatten().extras[key]
        raise ArgumentError(
            f"Trainer.callback_arrays takes a callback of the newest fit that keeps arrays, got {callback!r}. Call it "
            "from fit on, with a callback that defines init_arrays and update_arrays."
        )

    @property
    def epoch_is_over(self) -> bool:
        """Whether the epoch has no batch left; its last validation and its end may still come."""
        return self._session.position.over

    def stop(self, reason: str, *, final: bool = True) -> None:
        """End training after the current step and a last validation, once `min_epochs` and `min_steps` are reached.

        A `final` stop finishes the run: a resume by "auto" or "last" ends at once, one by a path continues.
        """
        self._session.control.stop(reason, final=final)

    def request_stop(self, reason: str) -> None:
        """End training after the step that runs, with a checkpoint, as a first Ctrl-C does; any thread may call this.

        Where training runs in another thread than the main one, Python delivers it no signals: the program's own
        handler calls this. `fit` then returns, with `trainer.interrupted` and `trainer.stop_reason` set.

        Args:
            reason: Why, for the last lines.
        """
        self._session.control.interrupt(reason)

    def agreed(self, name: str, wanted: bool) -> bool:
        """Return whether something is done now that goes by a clock, or by anything else that processes do not share.

        In one process that is `wanted`. In several processes, each of which calls this in a hook of each step, it is
        True in all of them at the same step, after one of them has wanted it.

        Args:
            name: A name for it, the same in all processes.
            wanted: Whether this process wants it; repeated until it is done.
        """
        return self._session.control.agree(name, wanted)

    def stop_after(self, seconds: float, reason: str, *, at_epoch_end: bool = False) -> None:
        """Stop once so many seconds from now are over, from a hook of `fit`; all processes do so at the same step."""
        self._session.stop_after(seconds, reason, at_epoch_end)


def _noting(name: str, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Note that a step reads a property while it is traced: the step is compiled for its value."""

    @functools.wraps(read)
    def get(trainer: Any) -> Any:
        value = read(trainer)
        if (reads := READS.get()) is not None:
            reads.note(trainer, name, value)
        return value

    return get


for _name in Arguments.__annotations__.keys() - vars(TrainerProperties).keys():
    _get = operator.attrgetter("_session.strategy.model_mesh" if _name == "mesh" else f"_session.settings.{_name}")
    _doc = f"The argument `{_name}`, as the runs use it."
    _argument = property(_get, lambda trainer, value, name=_name: trainer._session.set(name, value), doc=_doc)
    setattr(TrainerProperties, _name, _argument)
for _name, _value in [*vars(TrainerProperties).items()]:
    if isinstance(_value, property) and _value.fget is not None:
        setattr(TrainerProperties, _name, property(_noting(_name, _value.fget), _value.fset, doc=_value.__doc__))


def check_settable(trainer: Any, name: str, value: Any) -> None:
    """Refuse to set what is fixed, what only runs change, and a misspelt attribute, which nothing would read."""
    known = getattr(type(trainer), name, None)
    what = f"Trainer.{name} is a result of the runs"
    text = "Set an argument of the Trainer instead, or call what changes it: fit, validate, test, predict, stop."
    if name in _FIXED:
        what = f"Trainer.{name} is fixed when a Trainer is made"
        text = f"Make another one with Trainer({name}=...)."
    elif not hasattr(type(trainer), name):
        what = f"Trainer has no attribute {name!r}"
        text = advice("Trainer").get(name, "") or did_you_mean(name, [x for x in dir(trainer) if not x.startswith("_")])
    elif not isinstance(known, property) or known.fset is not None:
        return
    if text:
        raise AttributeError(f"{what}, and would be set to {shown(value)}. {text.strip()}")
