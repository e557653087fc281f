"""Several optimizer steps in one program."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxlit.core.replica import Replica
from jaxlit.core.stack import Stack
from jaxlit.core.step import TrainStep


@dataclass(frozen=True)
class FusedSteps:
    """The body of a program that takes the optimizer steps of several batches, one after another.

    Args:
        step: The training step.
        window: How many batches an optimizer step takes.
        counters: The index of the counters in the state.
        written: The indices of what is kept where a window begins, see `WindowBackup`.
        is_row: A pytree like the step's outputs: whether each has one row for each row of the batch.
    """

    step: TrainStep
    window: int
    counters: int
    written: tuple[int, ...]
    is_row: Any

    def __call__(self, replica: Replica, leaves: list[Any], kept: list[Any], stack: Stack) -> tuple[Any, ...]:
        """Take the steps.

        Args:
            replica: What the body sees.
            leaves: The flat state.
            kept: What was kept where the newest window began.
            stack: The batches, whole windows of them.

        Returns:
            The state, what was kept, and of each optimizer step the table, (num_steps, ...); of each batch the loss if
            steps take windows, and the outputs: those with rows (rows, num_batches, ...), others (num_batches, ...).
        """

        def given(leaves: list[Any], i: jax.Array) -> Any:
            # Like the arguments of a single step: else XLA fuses what makes them into it, and rounds it otherwise.
            return jax.lax.optimization_barrier((leaves, stack.traced(i)))

        def one(carry: Any, first: jax.Array) -> Any:
            leaves, kept = carry
            good = leaves[self.counters][3] < 0  # after a bad step what was kept before it stays
            kept = [jnp.where(good, leaves[i], x) for i, x in zip(self.written, kept, strict=True)]

            def micro(leaves: list[Any], i: jax.Array) -> Any:
                leaves, _, loss, outputs = self.step.micro(replica, *given(leaves, i))
                return leaves, (loss, outputs)

            leaves, each = (
                jax.lax.scan(micro, leaves, first + jnp.arange(self.window - 1)) if self.window > 1 else (leaves, None)
            )
            leaves, logs, *last = self.step.update(replica, *given(leaves, first + self.window - 1))
            last = jax.tree.map(lambda x: x[None], tuple(last))
            each = last if each is None else jax.tree.map(lambda *x: jnp.concatenate(x), each, last)
            return (leaves, kept), (logs, each)

        starts = jnp.arange(0, stack.count, self.window)
        (leaves, kept), (logs, each) = jax.lax.scan(one, (leaves, kept), starts)
        loss, outputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), each)
        outputs = jax.tree.map(lambda rows, x: jnp.moveaxis(x, 0, 1) if rows else x, self.is_row, outputs)
        return leaves, kept, logs, loss, outputs
