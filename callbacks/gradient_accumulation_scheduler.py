"""`GradientAccumulationScheduler`, which changes by epochs how many batches an optimizer step takes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


class GradientAccumulationScheduler(Callback):
    """Take another number of batches an optimizer step from some epochs on.

    Each epoch has the number of the nearest key at or below it, 1 below all keys. The callback sets
    `trainer.accumulate_grad_batches`, so leave that argument out. A resumed run continues with the number of its epoch,
    also in the middle of a window. `trainer.estimated_stepping_batches` follows it. For another rule, override
    `get_accumulate_grad_batches` in a subclass.

    Args:
        scheduling: Batches an optimizer step, by the first epoch that takes this number.

    Raises:
        ArgumentError: It is empty, or has an epoch below 0 or a number below 1; or before the first step: the Trainer
            has another number, or two such callbacks.
        ArgumentTypeError: `scheduling` is not a dict of ints.

    Example:
        >>> import jaxlit as jl
        >>> windows = jl.callbacks.GradientAccumulationScheduler({0: 8, 4: 4, 8: 1})
        >>> [windows.get_accumulate_grad_batches(epoch) for epoch in (0, 3, 4, 20)]
        [8, 8, 4, 1]
    """

    changes_step = True
    exclusive = "training", "accumulate_grad_batches"

    def __init__(self, scheduling: Mapping[int, int]) -> None:
        rule = "GradientAccumulationScheduler(scheduling=...) takes a dict of batches by epochs, like {0: 8, 4: 1}"
        if not isinstance(scheduling, Mapping) or not all(type(x) is int for kv in scheduling.items() for x in kv):
            raise ArgumentTypeError(f"{rule}, got {scheduling!r}.")
        if not scheduling or min(scheduling) < 0 or min(scheduling.values()) < 1:
            raise ArgumentError(f"{rule}: epochs of at least 0 and at least 1 batch. Got {dict(scheduling)!r}.")
        self.scheduling = dict(scheduling)
        self._sets = False  # whether the Trainer has the number of this callback

    def get_accumulate_grad_batches(self, epoch: int) -> int:
        """Return the batches that an optimizer step of an epoch takes."""
        below = [start for start in self.scheduling if start <= epoch]
        return self.scheduling[max(below)] if below else 1

    def batches_per_step(self, epoch: int) -> int:
        """Return the same, for the Trainer."""
        return self.get_accumulate_grad_batches(epoch)

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Set the number of the epoch that a fit begins or continues in."""
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ArgumentError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) with a "
                "GradientAccumulationScheduler, which sets it. Leave one of them out."
            )
        self._sets = True
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    def on_train_epoch_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Set the epoch's number."""
        trainer.accumulate_grad_batches = self.get_accumulate_grad_batches(trainer.current_epoch)

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Restore the Trainer's number."""
        if self._sets:
            self._sets, trainer.accumulate_grad_batches = False, 1
