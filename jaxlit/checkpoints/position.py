"""Where training stands: what a checkpoint holds of the loop."""

from dataclasses import dataclass, field
from typing import Any


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
    table: Any = None  # the columns of the sums
    found: list[dict[str, float]] = field(default_factory=list)  # the metrics of the loaders that are done
    row: dict[str, float] = field(default_factory=dict)  # those of them that are logged
    ended: int = 0  # 1 on_validation_epoch_end has run, 2 the row is logged as well
