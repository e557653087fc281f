"""How far training is: what a checkpoint has of the loop."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Position:
    """How far training is: where the arrays are, and what a checkpoint holds.

    Training continues at one kind of place only: between two batches, or after an epoch. What a batch may leave to do
    there is a validation, and the end of its epoch.
    """

    epoch: int = 0  # epochs finished
    batch_idx: int = 0  # batches of this epoch done
    total_batch_idx: int = 0  # batches of all epochs done
    global_step: int = 0  # optimizer steps taken
    first_step: int = 0  # those taken before this epoch
    filled: int = 0  # batches in the accumulation window
    over: bool = False  # this epoch has no batch left
    validated: bool = True  # no validation is left to do after the last batch
    # The state of the training loader after the last batch that was used.
    data: Any = None
    cut: bool = False  # training has ended in this epoch, which counts for hooks; in no checkpoint

    @property
    def inside(self) -> bool:
        """Whether an epoch has begun and not ended."""
        return self.batch_idx > 0 or self.over

    @property
    def epochs(self) -> int:
        """Epochs finished, with one that a stop has cut."""
        return self.epoch + self.cut

    def advance(self, data: Any, *, stepping: int, last: bool, batches: int = 1) -> None:
        """Move after a dispatch of a batch, or of several; nothing else counts batches or steps.

        Args:
            data: The loader's state after it.
            stepping: How many steps the optimizer took.
            last: Whether it had the last batch of the epoch.
            batches: How many batches it had.
        """
        self.batch_idx, self.total_batch_idx = self.batch_idx + batches, self.total_batch_idx + batches
        self.global_step, self.filled = self.global_step + stepping, 0 if stepping else self.filled + 1
        self.validated, self.over, self.data = False, last, data

    def end_batches(self, data: Any) -> None:
        """End the epoch here; the loader may have more batches."""
        self.over, self.data = True, data

    def drop_window(self) -> None:
        """Forget the batches of an unfinished window; `batch_idx` does not move back."""
        self.filled = 0

    def advance_epoch(self, data: Any) -> None:
        """Move before the next epoch, whose loader continues from `data`."""
        self.epoch, self.batch_idx, self.over = self.epoch + 1, 0, False
        self.data, self.first_step = data, self.global_step

    def move_before(self, step: int, batch_idx: int, data: Any, *, filled: int = 0) -> None:
        """Move before an earlier step of this epoch.

        Args:
            step: The step.
            batch_idx: The batch that comes next.
            data: The loader's state then.
            filled: Batches in the accumulation window then.
        """
        self.total_batch_idx -= self.batch_idx - batch_idx
        self.batch_idx, self.global_step, self.filled = batch_idx, step, filled
        self.validated, self.over, self.data = True, False, data

    def go_back(self, was: "Position") -> bool:
        """Count optimizer steps from an earlier position on; the batches since then stay used.

        Returns:
            Whether that position was in this epoch: then its metrics continue.
        """
        self.global_step, self.filled = was.global_step, 0
        within = was.epoch == self.epoch and not was.over
        if not within:
            self.first_step = was.global_step
        return within
