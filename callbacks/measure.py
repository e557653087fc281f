"""The base of callbacks that measure a training and add their values to its rows."""

from collections import UserDict
from typing import TYPE_CHECKING, NoReturn

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError, LogError

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


class Measured(UserDict[str, float]):
    """Values that callbacks add to a row, by names that are not logged otherwise; only `put` writes to it.

    Args:
        row: The row.
    """

    def __init__(self, row: dict[str, float]) -> None:
        super().__init__()
        self._taken = {*row, "step", "epoch"}

    def put(self, owner: Callback, values: dict[str, float]) -> None:
        """Add values.

        Raises:
            LogError: A name is taken, or a value is no number.
        """
        name = type(owner).__name__
        if taken := sorted(values.keys() & (self._taken | self.keys())):
            raise LogError(f"{name} adds {taken[0]!r} to rows, which is logged already. Rename yours.")
        for key, value in values.items():
            try:
                self.data[key] = float(value)
            except (TypeError, ValueError):
                raise LogError(f"{name} adds {key!r} to rows, which takes a number, got {value!r:.60}.") from None

    def __setitem__(self, key: str, value: float) -> NoReturn:
        """Refuse to overwrite a value."""
        raise LogError(f"row[{key!r}] = ... could overwrite a value of the row. Write row.put(self, {{{key!r}: ...}}).")


class Measure(Callback):
    """Adds values to the rows of steps, those of every `log_every_n_steps`.

    They cost no wait for a device: a row comes a step late, when its values have arrived and its step is done.

    Example:
        >>> import jaxlit as jl
        >>> class Queue(jl.callbacks.Measure):
        ...     def __init__(self, queue):
        ...         self.queue = queue
        ...     def fill_row(self, trainer, module, row, step):
        ...         row.put(self, {"waiting": len(self.queue)})
    """

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Refuse a training without rows.

        Raises:
            ArgumentError: There are none.
        """
        if stage == "fit" and not trainer.log_every_n_steps:
            raise ArgumentError(
                f"{type(self).__name__} adds to the rows of steps, and Trainer(log_every_n_steps=0) makes none. Pass "
                "log_every_n_steps=50, or leave it out of the callbacks."
            )

    def begin_row(self, trainer: "Trainer", module: "TrainModule", step: int) -> None:
        """Run when an optimizer step was dispatched that has a row."""

    def fill_row(self, trainer: "Trainer", module: "TrainModule", row: Measured, step: int) -> None:
        """Run when the row's values have arrived.

        Args:
            trainer: The trainer.
            module: The module.
            row: Takes values.
            step: 0-based index of the optimizer step.
        """
