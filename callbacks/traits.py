"""What the loop and the Trainer ask a callback about; a callback of yours can set each of them."""

from collections.abc import Sequence
from typing import Any

from jaxlit.configured import Configured


class Traits(Configured):
    """The attributes of a `jl.Callback` that the loop and the Trainer read."""

    runs_last: bool = False
    """Whether `on_train_epoch_end` and `on_safe_point` come after the module's own: they see what it logged and did."""

    limits_time: bool = False
    """Whether it ends every fit, for example by `trainer.stop_after(...)`: no other limit is needed then."""

    in_fast_dev_run: bool = True
    """Whether it takes part in `Trainer(fast_dev_run=...)`; loggers and early stopping do not."""

    role: str = ""
    """Which of the Trainer's own callbacks it replaces: "progress_bar", "model_summary", "checkpoint" or
    "csv_logger". A "checkpoint" has the attributes of a `ModelCheckpoint`, and its hooks run after all others, except
    those of a "mirror"; "early_stopping" is `trainer.early_stopping_callback`."""

    is_logger: bool = False
    """Whether it is one of `trainer.loggers`, with the methods of a `jl.callbacks.Logger`."""

    may_fail: bool = False
    """Whether training continues after an error in one of its hooks: with a warning, and without its other hooks for
    the rest of the run, except `teardown`. Otherwise an error ends training."""

    row_files: Sequence[str] = ()
    """The files in the run's folder that only it may write to."""

    rates_in: str | None = None
    """Which rows it wants the learning rates in, also if nothing else is logged there: "step" or "epoch"."""

    changes_step: bool = False
    """Whether it changes what an optimizer step computes: `jl.lr_find` keeps such callbacks, and no others."""

    frozen_part: Any = None
    """The part of the parameters that it leaves untrained for some epochs, as a `BackboneFreeze` does with its
    `names`, `unfreeze_at_epoch` and `tx`; None for none."""

    exclusive: tuple[str, Any] | None = None
    """What no two callbacks of a Trainer may have, in words, and which one: ("folder", path); None for nothing."""

    def conflict_with(self, other: "Traits") -> str | None:
        """Return why a Trainer cannot have both this callback and an earlier one, as an error says it; None if it can.

        Args:
            other: Each callback before this one.
        """
        if self.exclusive is not None and self.exclusive == other.exclusive:
            return f"The callbacks hold two {type(self).__name__}s of one {self.exclusive[0]}. Leave one of them out."
        if shared := sorted({*self.row_files} & {*other.row_files}):
            return (
                f"The callbacks hold two loggers that write to {shared[0]}. Leave one of them out, give it another "
                "filename, or pass Trainer(logger=False)."
            )
        return None

    def batches_per_step(self, epoch: int) -> int | None:
        """Return how many batches an optimizer step of an epoch takes; None if the Trainer's argument says it."""
        return None


def steps_of(callbacks: Sequence[Traits], accumulate_grad_batches: int, batches: int, epochs: int) -> int:
    """Return the number of optimizer steps of the first epochs.

    Args:
        callbacks: The callbacks of a fit.
        accumulate_grad_batches: The Trainer's argument, which holds unless a callback has `batches_per_step`.
        batches: Batches of an epoch.
        epochs: How many epochs.
    """
    if all(c.batches_per_step(0) is None for c in callbacks):
        return epochs * -(-batches // accumulate_grad_batches)
    every = (max(c.batches_per_step(epoch) or 1 for c in callbacks) for epoch in range(epochs))
    return sum(-(-batches // n) for n in every)
