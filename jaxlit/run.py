"""One run of the loops: what they share, and when it is over."""

import datetime
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax

from jaxlit.compile_log import CompileLog
from jaxlit.data import Source
from jaxlit.datamodule import Loaders
from jaxlit.engine import Engine
from jaxlit.errors import ArgumentError
from jaxlit.feed import Feeder
from jaxlit.hooks import Hooks
from jaxlit.results import Results
from jaxlit.table import Table
from jaxlit.tracing import Tracing

if TYPE_CHECKING:
    from jaxlit.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")


@dataclass
class Position:
    """Where training stands: what a checkpoint holds of the loop."""

    epoch: int = 0  # epochs finished
    batch_idx: int = 0  # batches of this epoch done
    total_batch_idx: int = 0  # batches of all epochs done
    global_step: int = 0  # optimizer steps taken
    first_step: int = 0  # those taken before this epoch
    filled: int = 0  # batches in the accumulation window
    begun: bool = False  # this epoch's start hooks have run
    starting: bool = False  # the next batch's start hooks have run
    left: int = 0  # to do for the last batch: 2 its row, a validation and the safe point, 1 the safe point, 0 nothing
    over: bool = False  # this epoch has no batch left
    ended: int = 0  # 1 its end hooks have run, 2 its row is logged as well
    cut: bool = False  # training stopped in its middle
    data: Any = None  # where the training loader's iteration stands behind the last batch that was used


@dataclass
class Evaluation:
    """Where the validation of a fit stands: what a checkpoint in its middle holds."""

    begun: int = 0  # how many of the two start hooks have run
    loader: int = 0  # the loader at hand
    batch_idx: int = 0  # its batches done
    starting: bool = False  # the next batch's start hooks have run
    data: Any = None  # where its iteration stands
    sums: list[Any] | None = None  # its metrics so far, see Engine.eval_step
    table: Table | None = None  # the columns of the sums
    found: list[dict[str, float]] = field(default_factory=list)  # the metrics of the loaders that are done
    row: dict[str, float] = field(default_factory=dict)  # those of them that are logged
    ended: int = 0  # 1 on_validation_epoch_end has run, 2 the row is logged as well


@dataclass
class Run:
    """One fit, validate, test or predict: what its loops share."""

    trainer: "Trainer"
    module: "TrainModule"
    hooks: Hooks
    results: Results
    position: Position
    loaders: Loaders
    engine: Engine = field(init=False)
    feeder: Feeder = field(init=False)
    train: tuple[Source, int | None] | None = None  # a loader and its limit in batches
    val: Sequence[tuple[Source, int | None]] = ()
    evaluated: Sequence[tuple[Source, int | None]] = ()  # what validate, test or predict runs over
    val_every: int | None = None  # batches between validations; None for the end of the epoch
    # A row not yet read: the step's table (None if only hooks have values), what hooks logged, and the step.
    pending: tuple[Any, Mapping[str, Any], int] | None = None
    tracing: Tracing = field(init=False)
    evaluation: Evaluation | None = None  # the validation that runs, or that a stop has cut
    resumed: bool = False  # training goes on from a checkpoint, and has not begun an epoch since
    rollbacks: dict[str, int] = field(default_factory=dict)  # by checkpoint, how often training went back to it
    noted_bad_step: int = -1
    every_check: bool = False  # look at the guard's mark after every step
    compiles: CompileLog = field(default_factory=CompileLog)
    _started: float = field(default_factory=time.monotonic)
    _ended: float | None = None
    _deadline: float | None = None
    _next_validation: float | None = None  # where validation goes by the clock
    _told: bool = False

    def start_clocks(self) -> None:
        """Begin to count `max_time` and a `val_check_interval` that is a duration."""
        if self.trainer.max_time is not None:
            self._deadline = time.monotonic() + self.trainer.max_time
        self.restart_interval()

    def restart_interval(self) -> None:
        """Count a `val_check_interval` that is a duration anew, from the end of a validation."""
        if isinstance(interval := self.trainer.val_check_interval, datetime.timedelta):
            self._next_validation = time.monotonic() + interval.total_seconds()

    def end_clock(self) -> None:
        """Note that the run is over."""
        self._ended = self._ended or time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the run took, or has taken so far."""
        return (time.monotonic() if self._ended is None else self._ended) - self._started

    def close(self) -> None:
        """Let go of the loaders."""
        for source, _ in (*([self.train] if self.train else []), *self.val, *self.evaluated):
            source.close()

    def note_lengths(self) -> None:
        """Tell the Trainer how many batches the loaders have."""
        assert self.train is not None
        self.trainer.num_training_batches = _count(self.train[1])
        self.trainer.num_val_batches = [_count(limit) for _, limit in self.val]

    @property
    def trains(self) -> bool:
        """Whether `limit_train_batches` leaves anything to train on."""
        # A loader that is empty itself is no such limit, but an error.
        return self.train is not None and (self.train[1] != 0 or self.train[0].length == 0)

    @property
    def validates(self) -> bool:
        """Whether a validation loader has batches."""
        return any(limit != 0 for _, limit in self.val)

    @property
    def done(self) -> bool:
        """Whether training is over."""
        trainer, position = self.trainer, self.position
        return (
            trainer.interrupted
            or position.global_step >= trainer.max_steps >= 0
            or (trainer.max_epochs is not None and position.epoch >= trainer.max_epochs)
            or self.may_stop
        )

    @property
    def may_stop(self) -> bool:
        """Whether a stop was asked for that `min_epochs` and `min_steps` allow."""
        trainer, position = self.trainer, self.position
        if not trainer.should_stop:
            return False
        if position.epoch >= trainer.min_epochs and position.global_step >= trainer.min_steps:
            return True
        if not self._told:
            self._told = True
            _logger.info(
                "Asked to stop (%s), but min_epochs=%d and min_steps=%d are not reached: training goes on.",
                trainer.stop_reason,
                trainer.min_epochs,
                trainer.min_steps,
            )
        return False

    def check_time(self) -> None:
        """Ask for a stop once `max_time` is over."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.trainer.stop(f"max_time={datetime.timedelta(seconds=self.trainer.max_time or 0)} is over")

    def validation_due(self, last: bool) -> bool:
        """Tell whether to validate after a batch.

        Args:
            last: Whether it is the last batch of the epoch.
        """
        trainer, position = self.trainer, self.position
        if not self.validates:
            return False
        every = trainer.check_val_every_n_epoch
        if every is not None and (position.epoch + 1) % every:
            return False
        if self.may_stop:
            return True
        if self._next_validation is not None:
            return time.monotonic() >= self._next_validation
        if self.val_every is None:
            return last
        count = position.total_batch_idx if every is None else position.batch_idx
        return count % self.val_every == 0


def _count(limit: int | None) -> int | float:
    return math.inf if limit is None else limit


def validation_interval(trainer: "Trainer", source: Source, limit: int | None) -> int | None:
    """Return the batches between validations, None for one at the end of each epoch.

    Args:
        trainer: The trainer.
        source: The training loader.
        limit: Its batches in an epoch, None if unknown.

    Raises:
        ArgumentError: An epoch has too few batches, or an unknown number of them.
    """
    interval = trainer.val_check_interval
    if isinstance(interval, datetime.timedelta) or (interval == 1.0 and isinstance(interval, float)):
        return None
    if isinstance(interval, float):
        if limit is None:
            raise ArgumentError(
                f"Trainer(val_check_interval={interval}) is a fraction, but {source.argument} has no length. "
                "Give the number of batches as an int."
            )
        return max(1, int(limit * interval))
    if trainer.check_val_every_n_epoch is not None and limit is not None and interval > limit:
        raise ArgumentError(
            f"Trainer(val_check_interval={interval}) is more than the {limit} batches of an epoch. Give at most "
            f"{limit}, or check_val_every_n_epoch=None to count batches across epochs."
        )
    return interval


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
