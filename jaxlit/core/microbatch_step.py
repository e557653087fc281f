"""An optimizer step in several passes, each of which sees a part of the batch."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jaxlit.core.device_sums import loss_of
from jaxlit.core.replica import Replica
from jaxlit.core.state import TrainState, Window
from jaxlit.core.step import TrainStep, count_bad, over_rows


@dataclass(frozen=True)
class MicrobatchStep:
    """What a training program is made of, for a strategy that takes the gradient itself, pass by pass.

    The order is `forward` and `add` for each part of the batch, then `finish`.

    Args:
        step: The training step.
        written: The indices in the state of what the user's step writes.
        end: What follows the last pass: "train" for the optimizer's step, "micro" for a window that continues,
            "diagnose" for nothing that lasts.

    Attributes:
        params: The indices in the state of the parameters.
        scale: That of the loss scale, None without one.
    """

    step: TrainStep
    written: tuple[int, ...]
    end: str = "train"

    @cached_property
    def at(self) -> TrainState:
        """The indices of the state's arrays in the flat list."""
        treedef = self.step.layout.treedef
        return jax.tree.unflatten(treedef, range(treedef.num_leaves))

    @cached_property
    def params(self) -> list[int]:
        """The indices of the parameters."""
        return jax.tree.leaves(self.at.params)

    @property
    def scale(self) -> int | None:
        """The index of the loss scale, None without one."""
        return self.at.loss_scale  # type: ignore[return-value]

    def forward(
        self, replica: Replica, leaves: list[Any], batch: Any
    ) -> tuple[jax.Array, list[jax.Array], jax.Array, Any]:
        """Run the user's step on a part of the batch.

        Args:
            replica: What the pass sees.
            leaves: The flat state.
            batch: The part.

        Returns:
            What is to be differentiated by the parameters, () float32, what is at the `written` indices after it, the
            part's table, and its outputs.
        """
        old = self.step.layout.unflatten(leaves)
        objective = self.step.objective(replica, old, old.frozen, old.model_state, replica.constrain_batch(batch))
        value, (loss, aux) = objective(old.params)
        new, table, outputs = self.step.made(replica, old, loss, aux, 1.0)
        flat = self.step.layout.flatten(self.step.kept_finite(old, new))
        return value, [flat[i] for i in self.written], table, outputs

    def add(self, total: jax.Array, grad: jax.Array, rows: jax.Array, scale: jax.Array | None) -> jax.Array:
        """Return the sum of the gradients of a parameter, with that of another part in it.

        Args:
            total: The sum.
            grad: The gradient of `forward`'s first result.
            rows: () float32, rows of the part.
            scale: The loss scale.
        """
        grad = grad if scale is None else grad / scale[0].astype(grad.dtype)
        return total + rows.astype(total.dtype) * grad.astype(total.dtype)

    def finish(
        self, leaves: list[Any], written: list[Any], grads: list[Any], rows: jax.Array, table: jax.Array, outputs: Any
    ) -> tuple[Any, ...]:
        """Return what the program returns, after the last pass.

        Args:
            leaves: The flat state as it was before the batch.
            written: What is at the `written` indices now.
            grads: The sum of `add` for each parameter.
            rows: () float32, rows of the batch.
            table: Its table.
            outputs: Its outputs, which are handed on.
        """
        step, old, now = self.step, self.step.layout.unflatten(leaves), list(leaves)
        for i, x in zip(self.written, written, strict=True):
            now[i] = x
        new = step.layout.unflatten(now)
        total = jax.tree.unflatten(jax.tree.structure(old.params), grads)
        if self.end == "diagnose":
            flat = step.layout.flatten(new.advance(steps=0))
            return [flat[i] for i in (self.at.counters, *self.written)], table, count_bad(grads)  # type: ignore[call-overload]
        loss = None if old.window is None else loss_of(table)
        if old.window is not None:
            total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), old.window.grads, total)
            rows, table = old.window.rows + rows, step.table.combine(old.window.metrics, table)
            window = Window(total, rows, table)
            window = window if self.end == "micro" else step.empty_window(window)
            new = replace(new, window=window, window_start=old.next_start())
        if self.end == "micro":
            new = new.advance(steps=0)
            return step.layout.flatten(new), step.logs(table, new), loss, outputs
        mean = over_rows(total, rows, old.params)
        made, logs, *seen = step.apply(old, new, mean, table)
        return made, logs, loss, outputs, *seen
