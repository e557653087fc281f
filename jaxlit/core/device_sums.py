"""How metrics add up on device, in which array they leave a step, and how the host reads it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.core.log import Metric


class Table:
    """Adds up metrics on device, all of them in one float32 array.

    Row 0 holds totals (the weighted sum of a mean, the sum, the minimum or the maximum so far), row 1
    the sum of weights. The sums of an epoch have two rows more, what rounding has cut off the first two:
    without them a mean over a million batches is wrong in its third digit.

    Args:
        metrics: The metrics, one a column.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = tuple(metrics)
        # Once here, as a row is made at every logged step: the name of each column in it, None for those not in rows.
        self.row_names = [m.step_name if m.on_step and m.logger else None for m in metrics]
        kinds = [m.reduce_fx for m in metrics]
        self._mean, self._min, self._max = (np.array([k == w for k in kinds], bool) for w in ("mean", "min", "max"))
        self._extreme, self.means = self._min | self._max, self._mean.tolist()

    @property
    def has_steps(self) -> bool:
        """Whether a metric shows the values of single steps."""
        return any(m.on_step for m in self.metrics)

    def empty(self) -> np.ndarray:
        """Return the table of no batch."""
        table = np.zeros((2, len(self.metrics)), np.float32)
        table[0, self._min], table[0, self._max] = np.inf, -np.inf
        return table

    def empty_sums(self) -> np.ndarray:
        """Return the sums of no batch, (4, num_metrics)."""
        return np.concatenate([self.empty(), np.zeros((2, len(self.metrics)), np.float32)])

    def entry(self, values: Sequence[jax.Array], weights: Sequence[jax.Array], share: float = 1.0) -> jax.Array:
        """Return the table of one batch.

        Args:
            values: One () float32 a metric.
            weights: One () float32 a metric.
            share: The part of this batch that counts; 1/n where n replicas see the same rows.
        """
        if not self.metrics:
            return jnp.zeros((2, 0), jnp.float32)
        value, weight = jnp.stack(list(values)), jnp.stack(list(weights))
        # A value without weight counts nothing, even if it is NaN, as the mean over an empty mask is.
        weighted = jnp.where(weight == 0, 0.0, value * weight * share)
        total = jnp.where(self._mean, weighted, jnp.where(self._extreme, value, value * share))
        return jnp.stack([total, weight * share])

    def add(self, sums: jax.Array, table: jax.Array) -> jax.Array:
        """Return the sums, (4, num_metrics), with the table of one batch or window in them.

        What an addition rounds off is kept (Knuth's two-sum), and put back as soon as it counts.
        """
        old, lost = sums[:2], sums[2:]
        new = self.combine(old, table)
        part = new - old
        lost = lost + ((old - (new - part)) + (table - part))
        total = new + lost
        lost = lost - (total - new)
        # Nothing is rounded off an extreme. Of an infinity inf - inf would be, which is NaN.
        exact = ~jnp.isfinite(new) | np.stack([self._extreme, np.zeros_like(self._extreme)])
        return jnp.concatenate([jnp.where(exact, new, total), jnp.where(exact, 0.0, lost)])

    def combine(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return the table of the batches of both."""
        if not self._extreme.any():
            return a + b
        total = jnp.where(self._min, jnp.minimum(a[0], b[0]), jnp.maximum(a[0], b[0]))
        return jnp.stack([jnp.where(self._extreme, total, a[0] + b[0]), a[1] + b[1]])

    def reduce(self, table: jax.Array, psum: Callable[[jax.Array], jax.Array], axis: str) -> jax.Array:
        """Return the table of all replicas, given the sum of their tables."""
        if not self._extreme.any():
            return psum(table)
        low, high = jax.lax.pmin(table[0], axis), jax.lax.pmax(table[0], axis)
        # An infinity among the extremes must not meet another in the sum.
        summed = psum(jnp.where(np.stack([self._extreme, np.zeros_like(self._extreme)]), 0.0, table))
        return summed.at[0].set(jnp.where(self._min, low, jnp.where(self._max, high, summed[0])))

    def refit(self, table: np.ndarray, replicas: int | None) -> np.ndarray:
        """Return the tables of some replicas, or one of them all, for another number of replicas.

        Args:
            table: (rows, num_metrics), or with a leading dim of replicas.
            replicas: The leading dim to return, None for none. The first replica takes what the others had.
        """
        if (len(table) if table.ndim == 3 else None) == replicas:
            return table
        table = self._joined(table) if table.ndim == 3 else table
        if replicas is None:
            return table
        empty = self.empty() if len(table) == 2 else self.empty_sums()
        return np.stack([table, *[empty] * (replicas - 1)]).astype(np.float32)

    def read(self, table: np.ndarray) -> list[float]:
        """Return one float a metric of a table or of sums; a leading dim of replicas is reduced first."""
        if table.shape[:-1] == (2,):  # a row's few numbers: numpy would take longer
            totals, weights = table.tolist()
            columns = zip(self.means, totals, weights, strict=True)
            return [
                total / weight if mean and weight else math.nan if mean else total for mean, total, weight in columns
            ]
        table = np.array(table, np.float64, ndmin=3)
        with np.errstate(invalid="ignore", divide="ignore"):
            if table.shape[1] == 4:  # past an infinity or NaN there is nothing to put back
                table = table[:, :2] + np.where(np.isfinite(table[:, 2:]), table[:, 2:], 0.0)
            total, weight = self._joined(table)
            return np.where(self._mean, total / weight, total).tolist()

    def value(self, table: jax.Array, column: int) -> jax.Array:
        """Return the value of one metric of a table, () float32."""
        return table[0, column] / table[1, column] if self._mean[column] else table[0, column]

    def _joined(self, tables: np.ndarray) -> np.ndarray:
        """Return the table of all replicas, given one of each."""
        table = tables.sum(0)
        table[0] = np.where(self._min, tables[:, 0].min(0), np.where(self._max, tables[:, 0].max(0), table[0]))
        return table


def loss_of(table: jax.Array) -> jax.Array:
    """Return the loss, () float32, of a training step's table."""
    return table[0, 0] / table[1, 0]


_RATE, _BAD_STEP = 1.0, 0.0  # kinds of columns after those of the metrics


class StepRow(NamedTuple):
    """What the host reads of a training step.

    Attributes:
        values: One a metric, the loss first.
        row: Those of them that are in rows, by name.
        rates: The learning rates of an optimizer step, by name.
        bad_step: The non-finite step that the guard names, see `TrainState`; -1 for none.
    """

    values: list[float]
    row: dict[str, float]
    rates: dict[str, float]
    bad_step: int


@dataclass(frozen=True)
class StepTable:
    """The array that leaves a training step: all that the host reads of it is in one transfer.

    It is (2, num_columns) float32: a column for each metric as in `Table`, then in row 0 the learning rates, which the
    batch of a window that continues does not have, and the guard's `bad_step`; row 1 says which of the two it is. So
    an array that a checkpoint holds is read whatever had rates or a guard then. Leading dims are of replicas, or steps.

    Args:
        metrics: The metrics.
        rates: The names of the rates, None for one that is in no row.
        guarded: Whether there is a guard.
    """

    metrics: Table
    rates: tuple[str | None, ...]
    guarded: bool

    def encode(self, table: jax.Array, rates: Sequence[jax.Array], bad_step: jax.Array) -> jax.Array:
        """Return the array of one step, (2, num_columns) or with replicas (num_replicas, 2, num_columns).

        Args:
            table: The metrics' table.
            rates: One () float32 a rate, or none.
            bad_step: () int32, see `TrainState`.
        """
        numbers = [(x, _RATE) for x in rates]
        numbers += [(bad_step.astype(jnp.float32), _BAD_STEP)] if self.guarded else []
        columns = (jnp.stack([x, jnp.float32(kind)])[:, None] for x, kind in numbers)
        return jnp.concatenate([table, *columns], axis=1)

    def decode(self, array: np.ndarray) -> StepRow:
        """Return one step, given its array."""
        table = self.metrics
        columns = len(table.metrics)
        numbers, kinds = (array if array.ndim == 2 else array[0])[:, columns:].tolist()  # the same in every replica
        bad_step = int(numbers.pop()) if kinds and kinds[-1] == _BAD_STEP else -1
        values = table.read(array[..., :columns])
        # What another optimizer left in a checkpoint may have fewer rates, or more.
        row = {name: x for name, x in zip(table.row_names, values, strict=True) if name is not None}
        rates = {name: x for name, x in zip(self.rates, numbers, strict=False) if name is not None}
        return StepRow(values, row, rates, bad_step)


def table_of(metrics: Any) -> Table:
    """Return the table of metrics that were saved."""
    return Table([Metric(**metric) for metric in metrics])
