"""Where the learning rate is logged."""

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError


class LearningRateMonitor(Callback):
    """Log the learning rate in rows of its own, or once an epoch; without it, it stands in the rows that there are.

    A rate is `lr`, or with `jl.Optimizer(by=...)` `lr/<group>` for each group. It is computed in the compiled step, and
    comes to the host with the row. Where it cannot be read off the optimizer, a line says what to do.

    Args:
        logging_interval: "step" or None: in the row of each `log_every_n_steps`, also where the module logs nothing.
            "epoch": in the row of the epoch only, the rate of its last step.

    Raises:
        ArgumentError: `logging_interval` is something else.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=jl.callbacks.LearningRateMonitor("epoch"), logger=False)
    """

    def __init__(self, logging_interval: str | None = None) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise ArgumentError(
                f"LearningRateMonitor(logging_interval=...) takes 'step', 'epoch' or None, got {logging_interval!r}."
            )
        self.logging_interval = logging_interval or "step"
