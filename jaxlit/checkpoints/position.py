"""How far training is: what a checkpoint has of the loop."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any


class Phase(IntEnum):
    """What of an epoch comes next, in the order of the loop; a batch goes from BATCH_START to SAFE_POINT."""

    EPOCH_START = 0
    BATCH_START = 1
    STEP = 2
    ROW = 3
    VALIDATION = 4
    SAFE_POINT = 5
    EPOCH_END = 6
    EPOCH_ROW = 7
    DONE = 8


class Validating(IntEnum):
    """What of a validation comes next; a batch goes from BATCH_START to STEP."""

    START = 0
    EPOCH_START = 1
    BATCH_START = 2
    STEP = 3
    EPOCH_END = 4
    ROW = 5
    DONE = 6


@dataclass
class Position:
    """How far training is: where the arrays are, and what a checkpoint holds.

    `phase` is what comes next. The loops set it before a hook runs, never after it: a checkpoint that is taken in a
    hook continues after that hook, and does not call it again.
    """

    epoch: int = 0  # epochs finished
    batch_idx: int = 0  # batches of this epoch done
    total_batch_idx: int = 0  # batches of all epochs done
    global_step: int = 0  # optimizer steps taken
    first_step: int = 0  # those taken before this epoch
    filled: int = 0  # batches in the accumulation window
    over: bool = False  # this epoch has no batch left
    phase: Phase = Phase.EPOCH_START
    # The state of the training loader after the last batch that was used.
    data: Any = None

    def __post_init__(self) -> None:
        self.phase = Phase(self.phase)  # a checkpoint holds its number

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
        self.phase, self.over, self.data = Phase.ROW, last, data

    def end_batches(self, data: Any) -> None:
        """End the epoch here; the loader may have more batches."""
        self.over, self.data = True, data

    def drop_window(self) -> None:
        """Forget the batches of an unfinished window; `batch_idx` does not move back."""
        self.filled = 0

    def advance_epoch(self, data: Any) -> None:
        """Move before the next epoch, whose loader continues from `data`."""
        self.epoch, self.batch_idx, self.over = self.epoch + 1, 0, False
        self.phase, self.data, self.first_step = Phase.EPOCH_START, data, self.global_step

    def move_before(self, step: int, batch_idx: int, filled: int, data: Any) -> None:
        """Move before an earlier step of this epoch, after the hook that begins its batch.

        Args:
            step: The step.
            batch_idx: The batch.
            filled: Batches in the accumulation window.
            data: The loader's state then.
        """
        self.total_batch_idx -= self.batch_idx - batch_idx
        self.batch_idx, self.global_step, self.filled = batch_idx, step, filled
        self.phase, self.over, self.data = Phase.STEP, False, data

    def go_back(self, was: "Position") -> bool:
        """Count optimizer steps from an earlier position on; the batches since then stay used.

        Returns:
            Whether that position was in this epoch: then its metrics continue.
        """
        self.global_step, self.filled = was.global_step, 0
        if self.phase == Phase.ROW:
            self.phase = Phase.VALIDATION  # the step at hand is undone, and has no row
        within = was.epoch == self.epoch and not was.over
        if not within:
            self.first_step = was.global_step
        return within


@dataclass
class HookClock:
    """How far training is for hooks and `trainer.global_step`. With one step a dispatch it is where the arrays are.

    Attributes:
        global_step: Optimizer steps taken.
        epoch: Epochs finished; after a fit with one that a stop has cut.
        batch_idx: Batches of this epoch done.
    """

    global_step: int = 0
    epoch: int = 0
    batch_idx: int = 0

    def follow(self, position: Position) -> None:
        """Move to where the arrays are."""
        self.global_step, self.epoch, self.batch_idx = position.global_step, position.epoch, position.batch_idx


@dataclass
class Evaluation:
    """How far a validation, in a fit or alone, or a test is; `phase` is what comes next, as in a `Position`."""

    loader: int = 0  # the loader at hand
    batch_idx: int = 0  # its batches done
    found: list[dict[str, float]] = field(default_factory=list)  # the metrics of the loaders that are done
    row: dict[str, float] = field(default_factory=dict)  # those of them that are logged
    phase: Validating = Validating.START
    data: Any = None  # the loader's state
    sums: list[Any] | None = None  # its metrics so far, see Engine.eval_step
    table: Any = None  # the columns of the sums

    def __post_init__(self) -> None:
        self.phase = Validating(self.phase)

    def advance(self, sums: list[Any], data: Any) -> None:
        """Move after a batch whose step was dispatched."""
        self.sums, self.data, self.batch_idx = sums, data, self.batch_idx + 1
        self.phase = Validating.BATCH_START

    def advance_loader(self) -> None:
        """Move before the next loader."""
        self.loader, self.batch_idx = self.loader + 1, 0
        self.data = self.sums = self.table = None
