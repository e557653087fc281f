"""The arguments of a Trainer as its attributes, and which attributes may be set."""

import dataclasses
import functools
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from jaxlit.callbacks.base import Callback
from jaxlit.control import Control
from jaxlit.core.reads import READS
from jaxlit.errors import did_you_mean
from jaxlit.loop.settings import Settings
from jaxlit.porting import advice
from jaxlit.shown import shown
from jaxlit.strategies.base import Strategy
from jaxlit.trainer.session import Session

_C = TypeVar("_C", bound=type)
_ARGUMENTS = {field.name for field in dataclasses.fields(Settings)}
_CONTROL = {field.name for field in dataclasses.fields(Control)}
_FIXED = ("strategy", "logger")  # arguments that stay as they were given


def check_settable(trainer: Any, name: str, value: Any) -> None:
    """Refuse to set what is fixed, what only runs change, and a misspelt attribute, which nothing would read.

    Raises:
        AttributeError: With what to do.
    """
    known = hasattr(type(trainer), name)
    if name in _ARGUMENTS and (name in _FIXED or not known):
        raise AttributeError(
            f"Trainer.{name} is fixed when a Trainer is made, and would be set to {shown(value)}. Make another one "
            f"with Trainer({name}=...)."
        )
    if isinstance(getattr(type(trainer), name, None), property) and name not in _ARGUMENTS | _CONTROL:
        raise AttributeError(
            f"Trainer.{name} is a result of the runs, and would be set to {shown(value)}. Set an argument of the "
            "Trainer instead, or call what changes it: fit, validate, test, predict, stop."
        )
    if known:
        return
    problem = f"Trainer has no attribute {name!r}, which would be set to {shown(value)}."
    if text := advice("Trainer").get(name):
        raise AttributeError(f"{problem} {text}")
    if hint := did_you_mean(name, [x for x in dir(trainer) if not x.startswith("_")]):
        raise AttributeError(f"{problem}{hint} Store your values in a callback, in the module, or under another name.")


def notes_reads(cls: _C) -> _C:
    """Let the properties of a class note that a step reads them while it is traced: it is compiled for their values."""

    def noting(name: str, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(read)
        def get(trainer: Any) -> Any:
            value = read(trainer)
            if (reads := READS.get()) is not None:
                reads.note(trainer, name, value)
            return value

        return get

    for name, known in [*vars(cls).items()]:
        if isinstance(known, property) and known.fget is not None:
            setattr(cls, name, property(noting(name, known.fget), known.fset, doc=known.__doc__))
    return cls


@notes_reads
class TrainerArguments:
    """The arguments, as the runs use them; one that is set holds from then on."""

    _session: Session

    @property
    def settings(self) -> Settings:
        """Every argument, checked and brought to one form; frozen."""
        return self._session.settings

    @property
    def strategy(self) -> Strategy:
        """The strategy, set up on its devices."""
        return self._session.strategy

    @property
    def config(self) -> dict[str, Any]:
        """The arguments as they were given, as JSON values, for loggers."""
        return self._session.config

    @property
    def callbacks(self) -> list[Callback]:
        """Every callback in order, those that the module adds after the others."""
        return self._session.callbacks

    @callbacks.setter
    def callbacks(self, value: list[Callback]) -> None:
        self._session.set("callbacks", value)

    @property
    def max_epochs(self) -> int | None:
        """Epochs to train; None for no limit."""
        return self._session.settings.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int | None) -> None:
        self._session.set("max_epochs", value)

    @property
    def min_epochs(self) -> int:
        """Epochs before which `stop` does not end training."""
        return self._session.settings.least[0]

    @property
    def max_steps(self) -> int:
        """Optimizer steps to train, -1 for no limit."""
        return self._session.settings.max_steps

    @max_steps.setter
    def max_steps(self, value: int) -> None:
        self._session.set("max_steps", value)

    @property
    def min_steps(self) -> int:
        """Optimizer steps before which `stop` does not end training."""
        return self._session.settings.least[1]

    @property
    def max_time(self) -> timedelta | None:
        """The timedelta after which training stops, or None."""
        return self._session.settings.max_time

    @property
    def limit_train_batches(self) -> int | float:
        """Batches of a training epoch, as a count or a fraction."""
        return self._session.settings.limit_train_batches

    @limit_train_batches.setter
    def limit_train_batches(self, value: int | float) -> None:
        self._session.set("limit_train_batches", value)

    @property
    def limit_val_batches(self) -> int | float:
        """The same for validation; 0 turns it off."""
        return self._session.settings.limit_val_batches

    @limit_val_batches.setter
    def limit_val_batches(self, value: int | float) -> None:
        self._session.set("limit_val_batches", value)

    @property
    def limit_test_batches(self) -> int | float:
        """The same for `test`."""
        return self._session.settings.limit_test_batches

    @property
    def limit_predict_batches(self) -> int | float:
        """The same for `predict`."""
        return self._session.settings.limit_predict_batches

    @property
    def overfit_batches(self) -> int | float:
        """The few batches that are trained on, or their fraction; 0.0 is off."""
        return self._session.settings.overfit_batches

    @property
    def fast_dev_run(self) -> int:
        """Batches of a trial run, 0 if it is none."""
        return self._session.settings.fast_dev_run

    @property
    def accumulate_grad_batches(self) -> int:
        """Loader batches of an optimizer step."""
        return self._session.settings.accumulate_grad_batches

    @accumulate_grad_batches.setter
    def accumulate_grad_batches(self, value: int) -> None:
        self._session.set("accumulate_grad_batches", value)

    @property
    def gradient_clip_val(self) -> float | None:
        """What gradients are clipped to, or None."""
        return self._session.settings.gradient_clip_val

    @property
    def gradient_clip_algorithm(self) -> str | None:
        """How they are clipped, 'norm' or 'value'; None for 'norm'."""
        return self._session.settings.gradient_clip_algorithm

    @property
    def check_val_every_n_epoch(self) -> int | None:
        """Epochs between validations; None counts batches across epochs."""
        return self._session.settings.check_val_every_n_epoch

    @check_val_every_n_epoch.setter
    def check_val_every_n_epoch(self, value: int | None) -> None:
        self._session.set("check_val_every_n_epoch", value)

    @property
    def val_check_interval(self) -> int | float | timedelta:
        """Batches, a fraction or a time between validations."""
        return self._session.settings.val_check_interval

    @val_check_interval.setter
    def val_check_interval(self, value: int | float | timedelta) -> None:
        self._session.set("val_check_interval", value)

    @property
    def num_sanity_val_steps(self) -> int:
        """Validation batches of each loader before training, -1 for all."""
        return self._session.settings.num_sanity_val_steps

    @property
    def log_every_n_steps(self) -> int:
        """Optimizer steps between logged rows, 0 for none."""
        every = self._session.settings.log_every_n_steps
        return self._session.control.log_every if isinstance(every, str) else every

    @property
    def prefetch(self) -> int | str:
        """Batches that a thread draws ahead of the step."""
        return self._session.settings.prefetch

    @property
    def data_timeout(self) -> float | None:
        """Seconds that a loader may take for a batch."""
        return self._session.settings.data_timeout

    @property
    def hang_timeout(self) -> float | None:
        """Seconds for which nothing may move."""
        return self._session.settings.hang_timeout

    @property
    def max_in_flight(self) -> int | str:
        """The most steps dispatched and not finished, or 'auto'."""
        return self._session.settings.max_in_flight

    @property
    def max_recompiles(self) -> int | None:
        """How often batches of another shape may compile a step again, or None."""
        return self._session.settings.max_recompiles

    @property
    def compile_cache(self) -> bool | str | Path:
        """Where compiled programs are stored: True, a folder, or False."""
        return self._session.settings.compile_cache

    @property
    def reload_dataloaders_every_n_epochs(self) -> int:
        """Epochs after which a loader hook is called again, 0 for never."""
        return self._session.settings.reload_dataloaders_every_n_epochs

    @property
    def host_keys(self) -> tuple[str | int, ...]:
        """Keys of a batch that stay on the host."""
        return self._session.settings.host_keys

    @property
    def nan_policy(self) -> str:
        """What a non-finite loss or gradient does."""
        return self._session.settings.nan_policy

    @property
    def precision(self) -> str:
        """The dtypes of a step."""
        return self._session.settings.precision

    @property
    def resume(self) -> str | Path | None:
        """Which checkpoint a fit continues from, None for none."""
        return self._session.settings.resume

    @property
    def seed(self) -> int:
        """The seed of a lazy module's `rngs`."""
        return self._session.settings.seed

    @property
    def debug(self) -> bool:
        """Whether every batch and step is checked."""
        return self._session.settings.debug
