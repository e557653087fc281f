"""`LearningRateMonitor`, which chooses the rows that have the learning rate."""

from typing import TYPE_CHECKING, Literal

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


class LearningRateMonitor(Callback):
    """Log the learning rate also in rows without other values, or once an epoch; by default it is in existing rows.

    A rate is `lr`, with `jl.Optimizer(by=...)` `lr/<group>` for each group, and for a part of `BackboneFreeze`
    `lr/<part>`. It is computed in the compiled step, and arrives at the host with the row. If it cannot be read from
    the optimizer, a line says what to do.

    Args:
        logging_interval: "step" or None: in the row of each `log_every_n_steps`, also if the module logs nothing.
            "epoch": in the row of the epoch only, the rate of its last step.

    Raises:
        ArgumentError: `logging_interval` is something else; or before the first step: two such callbacks, or "step" and
            a Trainer that makes no rows of steps.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=jl.callbacks.LearningRateMonitor("epoch"), logger=False)
    """

    exclusive = "training", "learning rates"

    def __init__(self, logging_interval: Literal["step", "epoch"] | None = None) -> None:
        interval = "step" if logging_interval is None else logging_interval
        check.one_of("logging_interval", interval, ("step", "epoch"), owner="LearningRateMonitor")
        self.logging_interval = self.rates_in = interval

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Refuse a Trainer that logs no rows of steps."""
        if stage == "fit" and self.logging_interval == "step" and not trainer.log_every_n_steps:
            raise ArgumentError(
                'LearningRateMonitor("step") adds to the rows of steps, and Trainer(log_every_n_steps=0) makes none. '
                'Pass log_every_n_steps=50 or LearningRateMonitor("epoch").'
            )
