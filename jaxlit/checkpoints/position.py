"""How far training is, as a checkpoint has it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Position:
    """How far training is. It continues between two batches, or after an epoch: a validation may be left to do."""

    epoch: int = 0  # epochs finished
    batch_idx: int = 0  # batches of this epoch done
    total_batch_idx: int = 0  # batches of all epochs done
    global_step: int = 0  # optimizer steps taken
    first_step: int = 0  # those taken before this epoch
    filled: int = 0  # batches in the accumulation window
    over: bool = False  # this epoch has no batch left
    validated: bool = True  # no validation is left to do after the last batch
    data: Any = None  # the state of the training loader after the last batch that was used
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
        """Move after batches of `stepping` optimizer steps, maybe the epoch's last, to a state of the loader."""
        self.batch_idx += batches
        self.total_batch_idx += batches
        self.global_step += stepping
        self.filled = 0 if stepping else self.filled + 1
        self.validated, self.over, self.data = False, last, data

    def advance_epoch(self, data: Any) -> None:
        """Move before the next epoch, whose loader continues from `data`."""
        self.epoch, self.batch_idx, self.over = self.epoch + 1, 0, False
        self.data, self.first_step = data, self.global_step


# The fields of `Position` in state.json; `jaxlit.loop.snapshot` saves `data` as the loader's state, and not `cut`.
POSITION = ("epoch", "batch_idx", "total_batch_idx", "global_step", "first_step", "filled", "over", "validated")


def position_of(state: Mapping[str, Any]) -> Position:
    """Return the position in a state; raise an error of any class if it is none."""
    saved = state["position"]
    stated = {name: type(saved[name]) is type(getattr(Position, name)) and saved[name] >= 0 for name in POSITION}
    if not all(stated.values()) or any(state[name] != saved[name] for name in ("global_step", "epoch")):
        raise ValueError(f"no training is at {saved}")
    return Position(**saved)
