"""What is derived from the training step: programs of several batches, microbatches and evaluation.

`Stack` and `FusedSteps` take several optimizer steps in one program, `MicrobatchStep` takes one in several passes over
parts of a batch, and `eval_step` adds a batch to the metrics of an evaluation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.core.log import loss_of, weight_of
from jaxlit.core.pure_module import PureModule
from jaxlit.core.replica import Replica, num_rows, reduced
from jaxlit.core.step import TrainStep, count_bad, mean_of
from jaxlit.core.train_state import Layout, TrainState, Window


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Stack:
    """Batches of one kind, stacked along dim 1 of their arrays: rows stay the leading dim, which strategies split."""

    arrays: Any  # a pytree like a batch, of arrays (rows, count, ...); one of (rows, count) for a number
    count: int = field(metadata={"static": True})  # how many batches
    numbers: tuple[bool, ...] = field(metadata={"static": True})  # whether each leaf is a number, which has no rows

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        """Return a batch, of views; raises IndexError past the last, so that the batches can be iterated."""
        if i >= self.count:
            raise IndexError(i)
        return self.map(lambda x: x[:, i], lambda x: x[0, i])

    def traced(self, i: jax.Array) -> Any:
        """Return a batch inside a program."""
        take = partial(jax.lax.dynamic_index_in_dim, index=i, axis=1, keepdims=False)
        return self.map(take, lambda x: take(x)[0])

    def map(self, array: Callable, number: Callable) -> Any:
        """Return the pytree with `array` of each array, and `number` of each number."""
        leaves, treedef = jax.tree.flatten(self.arrays)
        pairs = zip(leaves, self.numbers, strict=True)
        return treedef.unflatten([number(x) if is_number else array(x) for x, is_number in pairs])


def stacked(batches: Sequence[Any]) -> Stack:
    """Stack host batches of one kind."""
    first, treedef = jax.tree.flatten(batches[0])
    numbers = tuple([not x.ndim for x in first])
    rows = next(len(x) for x in first if x.ndim)
    columns = zip(*map(treedef.flatten_up_to, batches), strict=True)
    arrays = [np.stack(x, axis=1) if x[0].ndim else np.tile(np.stack(x), (rows, 1)) for x in columns]
    return Stack(treedef.unflatten(arrays), len(batches), numbers)


@dataclass(frozen=True)
class FusedSteps:
    """The body of a program that takes the optimizer steps of several batches, one after another."""

    step: TrainStep  # the training step
    window: int  # how many batches an optimizer step takes
    counters: int  # the index of the counters in the state
    written: tuple[int, ...]  # the indices of what is backed up where a window begins, see `WindowBackup`
    is_row: Any  # a pytree like the step's outputs: whether each has one row for each row of the batch

    def __call__(self, replica: Replica, leaves: list, backup: list, stack: Stack) -> tuple:
        """Take the steps of the batches in `stack`, one or more complete windows.

        `backup` has the `written` leaves as they were where the newest window began.

        Returns:
            The state, the backup, and of each optimizer step the table, (num_steps, ...); of each batch the loss if
            steps take windows, and the outputs: those with rows (rows, num_batches, ...), others (num_batches, ...).
        """

        def arguments(leaves: list, i: jax.Array) -> Any:
            # Like the arguments of a single step: else XLA fuses what computes them into it, and rounds it otherwise.
            return jax.lax.optimization_barrier((leaves, stack.traced(i)))

        def micro(leaves: list, i: jax.Array) -> Any:
            leaves, _, loss, outputs = self.step.micro(replica, *arguments(leaves, i))
            return leaves, (loss, outputs)

        def window(carry: Any, first: jax.Array) -> Any:
            leaves, backup = carry
            good = leaves[self.counters][3] < 0  # after a bad step the backup from before it stays
            backup = [jnp.where(good, leaves[i], x) for i, x in zip(self.written, backup, strict=True)]
            results = None
            if self.window > 1:
                leaves, results = jax.lax.scan(micro, leaves, first + jnp.arange(self.window - 1))
            leaves, logs, *last = self.step.update(replica, *arguments(leaves, first + self.window - 1))
            last = jax.tree.map(lambda x: x[None], tuple(last))
            results = last if results is None else jax.tree.map(lambda *x: jnp.concatenate(x), results, last)
            return (leaves, backup), (logs, results)

        starts = jnp.arange(0, stack.count, self.window)
        (leaves, backup), (logs, results) = jax.lax.scan(window, (leaves, backup), starts)
        loss, outputs = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), results)
        outputs = jax.tree.map(lambda rows, x: jnp.moveaxis(x, 0, 1) if rows else x, self.is_row, outputs)
        return leaves, backup, logs, loss, outputs


@dataclass(frozen=True)
class MicrobatchStep:
    """What a training program is made of, for a strategy that takes the gradient itself, pass by pass.

    The order is `forward` and `add` for each part of the batch, then `finish`.
    """

    step: TrainStep  # the training step
    written: tuple[int, ...]  # the indices in the state of what the user's step writes
    # what follows the last pass: "train" for the optimizer's step, "micro" for a window that continues, "diagnose" for
    # nothing that lasts
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

    def forward(self, replica: Replica, leaves: list, batch: Any) -> tuple[jax.Array, list[jax.Array], jax.Array, Any]:
        """Run the user's step on a part of the batch.

        Returns:
            What is to be differentiated by the parameters, () float, what is at the `written` indices after it, the
            part's table, and its outputs.
        """
        old = self.step.layout.unflatten(leaves)
        objective = self.step.objective(replica, old, old.frozen, old.model_state, replica.constrain_batch(batch))
        value, (loss, aux) = objective(old.params)
        new, table, outputs = self.step.after_batch(replica, old, loss, aux, 1.0)
        if self.step.is_weighted:  # `add` multiplies by rows
            value = value * (weight_of(table) / num_rows(batch))
        flat = self.step.layout.flatten(self.step.only_finite(old, new))
        return value, [flat[i] for i in self.written], table, outputs

    def add(self, total: jax.Array, grad: jax.Array, rows: jax.Array, scale: jax.Array | None) -> jax.Array:
        """Return the sum of a parameter's gradients with that of `forward` for another part, of `rows` rows, added."""
        grad = grad if scale is None else grad / scale[0].astype(grad.dtype)
        return total + rows.astype(total.dtype) * grad.astype(total.dtype)

    def finish(self, leaves: list, written: list, grads: list, table: jax.Array, outputs: Any) -> tuple:
        """Return what the program returns, after the last pass.

        `leaves` is the state before the batch, `written` what is at these indices after it, and `grads` has the sum of
        `add` for each parameter. The table and the outputs are those of the batch.
        """
        step = self.step
        old = step.layout.unflatten(leaves)
        leaves = list(leaves)
        for i, x in zip(self.written, written, strict=True):
            leaves[i] = x
        new = step.layout.unflatten(leaves)
        total = jax.tree.unflatten(jax.tree.structure(old.params), grads)
        if self.end == "diagnose":
            flat = step.layout.flatten(new.advance(steps=0))
            return [flat[i] for i in (self.at.counters, *self.written)], table, count_bad(grads)  # type: ignore[call-overload]
        loss = None if old.window is None else loss_of(table)
        if old.window is not None:
            total = jax.tree.map(lambda a, b: a + b.astype(a.dtype), old.window.grads, total)
            table = step.table.combine(old.window.metrics, table)
            window = Window(total, table)
            window = window if self.end == "micro" else step.empty_window(window)
            new = replace(new, window=window, window_start=old.next_start())
        if self.end == "micro":
            new = new.advance(steps=0)
            return step.layout.flatten(new), step.logs(table, new), loss, outputs
        new_leaves, logs, *seen = step.apply(old, new, mean_of(total, table, old.params), table)
        return new_leaves, logs, loss, outputs, *seen


def eval_step(pure: PureModule, stage: str, loader: int | None, layout: Layout, wrap: Callable) -> Callable:
    """Return the body of a validation, test or predict step, which adds one batch to the metrics.

    It takes the replica; the flat state, which is only read; the metrics so far, (4, num_metrics) of this
    replica, () int32 batches seen, and the arrays of the module's metrics that the step writes; and the batch. It
    returns the new metrics, the batch's table if a metric shows its steps, and what the user's step returned.

    `loader` is the `dataloader_idx` for a step that takes one, `layout` makes (counters, params, frozen, model_state)
    of a flat list, and `wrap` is what the strategy makes of the user's step.
    """

    def run(
        replica: Replica, leaves: list, sums: list[jax.Array], batch: Any
    ) -> tuple[list[jax.Array], jax.Array | None, Any]:
        counters, *variables = layout.unflatten(leaves)
        totals, batch_idx, *before = sums
        traced = pure.trace_of(stage, loader)
        states, treedef = jax.tree.flatten(variables)
        for i, x in zip(traced.carried, before, strict=True):
            states[i] = x
        body = wrap(pure.body(stage, replica, loader))
        batch = replica.constrain_batch(batch)
        variables = treedef.unflatten(states)
        _, results = body(*variables, batch, counters[0], counters[1], batch_idx)
        written, values, weights, outputs = reduced(replica, results, traced.reduction)
        carried = [written[i].astype(x.dtype) for i, x in zip(traced.carried, before, strict=True)]
        metrics = traced.table
        table = metrics.entry(values, weights, replica.share)
        return [metrics.add(totals, table), batch_idx + 1, *carried], table if metrics.has_steps else None, outputs

    return run
