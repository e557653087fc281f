"""The loaders of a run: opened, counted and closed."""

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlit.control import Control
from jaxlit.core.stage import Stage
from jaxlit.data.loaders import Loaders
from jaxlit.data.source import Source
from jaxlit.errors import ArgumentError
from jaxlit.loop.settings import Settings

Loader = tuple[Source, int | None]  # and its limit in batches


class RunData:
    """The loaders of a run.

    Args:
        loaders: Opens them.

    Attributes:
        loaders: See above.
        train: The training loader of a fit, once it is open.
        val: What a fit validates on, or validate, test or predict runs over, once it is open.
        val_every: Batches between validations; None for the end of the epoch.
        validates: Whether a validation loader has batches.
    """

    def __init__(self, loaders: Loaders) -> None:
        self.loaders = loaders
        self.train = list[Loader]()
        self.val: Sequence[Loader] = ()
        self.val_every: int | None = None
        self.validates = False

    @property
    def is_fit(self) -> bool:
        """Whether the run is a fit."""
        return self.loaders.method == "fit"

    @property
    def training(self) -> Loader:
        """The training loader of a fit, with its limit."""
        return self.train[0]

    def open_train(self, settings: Settings) -> Loader:
        """Open the training loader, and return it with its limit.

        Raises:
            ArgumentError: `val_check_interval` does not fit it.
        """
        ((source, limit),) = self.train = self.loaders.open("training", required=True)
        self.val_every = validation_interval(settings, source, limit)
        return source, limit

    def reopen(self, settings: Settings) -> None:
        """Open the loaders of hooks again."""
        if self.train and self.loaders.from_hook("training"):
            self.training[0].close()
            self.open_train(settings)
        if self.val and self.loaders.from_hook("validation"):
            for source, _ in self.val:
                source.close()
            self.val = self.loaders.open("validation", required=True)

    def count(self, control: Control, accumulate: int) -> None:
        """Count the batches that the loaders have, for hooks, schedules and the loop."""
        control.num_training_batches = count(self.training[1])
        # An eighth of an epoch, not of training: a resume with larger limits logs the same rows as one long training.
        steps = control.num_training_batches / accumulate
        control.log_every = int(min(max(math.ceil(steps) / 8, 1), 50)) if steps < math.inf else 10
        control.num_val_batches = [count(limit) for _, limit in self.val]
        self.validates = any(limit != 0 for _, limit in self.val)

    def close(self) -> None:
        """Close the loaders."""
        for source, _ in (*self.train, *self.val):
            source.close()


def count(limit: int | None) -> int | float:
    """Return a loader's batches for users, inf where they are not known."""
    return math.inf if limit is None else limit


def validation_interval(settings: Settings, source: Source, limit: int | None) -> int | None:
    """Return the batches between validations, None for one at the end of each epoch.

    Args:
        settings: The Trainer's arguments.
        source: The training loader.
        limit: Its batches in an epoch, None if unknown.

    Raises:
        ArgumentError: An epoch has too few batches, or an unknown number of them.
    """
    interval = settings.val_check_interval
    if isinstance(interval, datetime.timedelta) or (interval == 1.0 and isinstance(interval, float)):
        return None
    if isinstance(interval, float):
        if limit is None:
            raise ArgumentError(
                f"Trainer(val_check_interval={interval}) is a fraction, but {source.argument} has no length. "
                "Give the number of batches as an int."
            )
        return max(1, int(limit * interval))
    if settings.check_val_every_n_epoch is not None and limit is not None and interval > limit:
        raise ArgumentError(
            f"Trainer(val_check_interval={interval}) is more than the {limit} batches of an epoch. Give at most "
            f"{limit}, or check_val_every_n_epoch=None to count batches across epochs."
        )
    return interval


def make_loaders(settings: Settings, stage: Stage, arguments: Mapping[str, Any], datamodule: Any) -> Loaders:
    """Return the loaders of a run.

    Args:
        settings: The Trainer's arguments.
        stage: What runs.
        arguments: By stage, what was passed to the method and the argument's name.
        datamodule: The DataModule, if one was passed.
    """
    validator = {name: getattr(settings, name) for name in ("host_keys", "max_recompiles", "debug")}
    overfit = stage.method == "fit" and bool(settings.overfit_batches)
    return Loaders(stage.method, arguments, datamodule, settings.limits, validator=validator, overfit=overfit)
