"""What `self.log` collects, from the step that is traced or the hook that runs, and the tables that metrics add up in.

`Table` adds metrics up on device; `StepTable` is the array in which they leave a step, and how the host reads it.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlit.errors import LogError
from jaxlit.texts import shown

REDUCTIONS = ("mean", "sum", "min", "max")

# Where `self.log` may be called: what on_step and on_epoch are there when left out. A hook with no step of
# its own has only epoch values.
_STEPWISE, _EPOCHWISE, _EPOCH_ONLY = (True, False), (False, True), (None, True)
HOOKS: dict[str, tuple[bool | None, bool]] = {
    **dict.fromkeys(("training_step", "on_train_batch_start", "on_train_batch_end"), _STEPWISE),
    **dict.fromkeys(("on_train_start", "on_train_epoch_start", "on_train_epoch_end"), _EPOCH_ONLY),
}
for _stage in ("validation", "test"):
    HOOKS |= dict.fromkeys((f"{_stage}_step", f"on_{_stage}_batch_start", f"on_{_stage}_batch_end"), _EPOCHWISE)
    HOOKS |= {f"on_{_stage}_{when}": _EPOCH_ONLY for when in ("start", "epoch_start", "epoch_end")}


@dataclass(frozen=True)
class Metric:
    """How one logged name is reduced, and where it appears."""

    name: str
    prog_bar: bool = False
    logger: bool = True
    on_step: bool = True
    on_epoch: bool = False
    reduce_fx: str = "mean"
    add_dataloader_idx: bool = True
    is_integer: bool = False  # whose bits are divided, see `Table`
    of_rows: bool = False  # whether its value of a step is the mean of the steps since the last row

    @property
    def step_name(self) -> str:
        """The name of the value of a step."""
        return f"{self.name}_step" if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        """The name of the value of an epoch."""
        return f"{self.name}_epoch" if self.on_step else self.name

    @property
    def names(self) -> set[str]:
        """Every name under which its values appear."""
        return {self.name, *([self.step_name] * self.on_step), *([self.epoch_name] * self.on_epoch)}


def metric_of(caller: str, name: Any, **how: Any) -> Metric:
    """Return how a name is logged from a step or hook, given arguments of `TrainModule.log`; with Lightning's defaults.

    Raises:
        LogError: Nothing can be logged there, or not so.
    """
    if not isinstance(name, str) or not name:
        raise LogError(f"self.log(name, value) in {caller} takes a str as name, got {name!r}.")
    if caller not in HOOKS:
        raise LogError(
            f"self.log({name!r}, ...) is called in {caller}, where nothing can be logged. Log in a training, "
            "validation or test step, in a batch hook or at the start or end of an epoch."
        )
    if name in ("step", "epoch") or "/dataloader_idx_" in name:
        raise LogError(
            f"self.log({name!r}, ...): jaxlit adds 'step', 'epoch' and '/dataloader_idx_<i>' to rows itself."
        )
    by_step, by_epoch = HOOKS[caller]
    if how.get("reduce_fx", "mean") not in REDUCTIONS:
        raise LogError(f"self.log({name!r}, reduce_fx=...) must be one of {REDUCTIONS}, got {how['reduce_fx']!r}.")
    if how.get("on_step") and by_step is None:
        raise LogError(f"self.log({name!r}, on_step=True) in {caller}: there is no step there. Leave on_step out.")
    of_rows = how.get("on_step") == "mean"
    if isinstance(how.get("on_step"), str) and not of_rows:
        raise LogError(f"self.log({name!r}, on_step={how['on_step']!r}) takes a bool or 'mean'.")
    if of_rows and caller != "training_step":
        raise LogError(f"self.log({name!r}, on_step='mean') in {caller}: log it in training_step.")
    options: dict = {"on_step": bool(by_step), "on_epoch": by_epoch, "of_rows": of_rows}
    options |= {key: x if key == "reduce_fx" else bool(x) for key, x in how.items() if x is not None}
    metric = Metric(name, **options)
    if not metric.on_step and not metric.on_epoch:
        raise LogError(f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing. Set one of them.")
    return metric


@dataclass
class Collector:
    """Gathers what one traced step logs; `self.log` fills it."""

    stage: str  # "training", "validation", "test", "predict"
    rows: int  # rows in the batch of this trace, the default weight
    step: jax.Array  # () int32, traced
    epoch: jax.Array  # () int32, traced
    # The module's own nnx metrics as they came, by the id of their variables.
    held: dict[int, jax.Array] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)
    values: dict[str, jax.Array] = field(default_factory=dict)
    weights: dict[str, jax.Array] = field(default_factory=dict)
    by_rows: dict[str, Any] = field(default_factory=dict)  # the values that weigh as many as there are rows
    # A value made inside scan, vmap, grad or another jit may not leave it: only the trace in which
    # the step itself runs may log.
    trace: Any = field(default_factory=jax.extend.core.get_opaque_trace_state)

    @property
    def hook(self) -> str:
        """The step that is traced."""
        return f"{self.stage}_step"

    def add(self, metric: Metric, value: Any, batch_size: Any) -> None:
        """Take one value.

        Raises:
            LogError: The value is no scalar number, the name is taken, or the call is inside a nested trace.
        """
        name, step = metric.name, self.hook
        if jax.extend.core.get_opaque_trace_state() != self.trace:
            raise LogError(
                f"self.log({name!r}, ...) is called inside a function that jax transforms (scan, vmap, grad, remat, "
                f"cond or jit) in {step}. Return the value from that function and log it in {step} itself."
            )
        if name in self.metrics:
            raise LogError(f"self.log({name!r}, ...) is called twice in {step}. Log each name once a step.")
        for other in self.metrics.values():
            if clash := metric.names & other.names:
                raise LogError(
                    f"self.log({name!r}, ...) and self.log({other.name!r}, ...) in {step} both make {clash.pop()!r}. "
                    "Rename one of them."
                )
        if isinstance(value, nnx.metrics.Metric):
            self.values[name], self.weights[name] = self._take(metric, value, batch_size)
        else:
            check_value(name, value, batch_size, step)
            adds_up = metric.reduce_fx in ("mean", "sum") and jnp.result_type(float) == jnp.float32
            metric = replace(metric, is_integer=adds_up and getattr(value, "dtype", None) in (jnp.int32, jnp.uint32))
            self.values[name] = jnp.asarray(value, None if metric.is_integer else float)
            self.weights[name] = jnp.asarray(self.rows if batch_size is None else batch_size, float)
            self.by_rows |= {} if batch_size is not None else {name: value}
        self.metrics[name] = metric

    def _take(self, metric: Metric, value: Any, batch_size: Any) -> tuple[jax.Array, jax.Array]:
        """Return what an nnx metric gathered in this step: its mean and its count, which add up exactly."""
        check_average(metric, value, batch_size, self.hook)
        parts = []
        for variable in (value.total, value.count):
            now = variable.get_value()
            # One that the module holds is left as it came, so that each step adds its own share.
            if (before := self.held.get(id(variable))) is not None:
                variable.set_value(before)
                now = now - before
            parts.append(jnp.asarray(now, float))
        total, count = parts
        return jnp.where(count > 0, total / jnp.where(count > 0, count, 1.0), 0.0), count


def check_value(name: str, value: Any, batch_size: Any, caller: str) -> None:
    """Refuse a value that is no real number, and a weight that is none or is not positive.

    Raises:
        LogError: Saying what it is.
    """
    is_number, is_weight = [
        x.shape == () and any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.bool_, jnp.integer, jnp.floating))
        if hasattr(x, "dtype")
        else isinstance(x, (bool, int, float))
        for x in (value, batch_size)
    ]
    if not is_number:
        raise LogError(
            f"self.log({name!r}, value) in {caller} takes a real scalar number, got {shown(value)}. Log value.mean() "
            "or abs(value). Return an array from the step, {'loss': loss, 'confusion': matrix}: the hook at the end of "
            "the batch gets it as `outputs`, and trainer.logger.log_table and log_image take more than a number."
        )
    if batch_size is None:
        return
    traced = isinstance(batch_size, jax.Array)  # in a hook too: it must not wait for the device
    if not is_weight or not (traced or batch_size > 0):
        raise LogError(f"self.log({name!r}, batch_size=...) must be a positive scalar, got {shown(batch_size)}.")


def check_average(metric: Metric, value: nnx.metrics.Metric, batch_size: Any, caller: str) -> nnx.metrics.Average:
    """Return an nnx metric that adds up over batches and replicas; others are refused.

    Raises:
        LogError: Saying which do.
    """
    name, kind = metric.name, type(value)
    if not isinstance(value, nnx.metrics.Average) or kind.compute is not nnx.metrics.Average.compute:
        raise LogError(
            f"self.log({name!r}, {kind.__name__}()) in {caller}: only nnx.metrics.Average and its subclasses, "
            "such as Accuracy, add up over batches and replicas. Log the parts as Averages; for an nnx.MultiMetric use "
            "self.log_dict."
        )
    if metric.reduce_fx != "mean" or batch_size is not None:
        raise LogError(
            f"self.log({name!r}, {kind.__name__}()): a metric has its own weights. Leave batch_size and reduce_fx out."
        )
    return value


ACTIVE: ContextVar[Any] = ContextVar("jaxlit_collector", default=None)


def active_collector() -> Collector | None:
    """Return the collector of the step that is being traced, if any."""
    collector = ACTIVE.get()
    return collector if isinstance(collector, Collector) else None


@contextlib.contextmanager
def collecting(collector: Any) -> Iterator[Any]:
    """Make `collector`, of a traced step or of the hooks, the one that `self.log` fills."""
    token = ACTIVE.set(collector)
    try:
        yield collector
    finally:
        ACTIVE.reset(token)


def named_values(dictionary: Any) -> dict[str, Any]:
    """Return what `log_dict` logs: a mapping, or the parts of an nnx.MultiMetric.

    Raises:
        LogError: It is neither.
    """
    if isinstance(dictionary, nnx.MultiMetric):
        return {name: x for name, x in vars(dictionary).items() if isinstance(x, nnx.metrics.Metric)}
    if not isinstance(dictionary, Mapping):
        raise LogError(f"self.log_dict(dictionary) takes names and values, got {type(dictionary).__name__}.")
    return dict(dictionary)


class Table:
    """Adds up metrics on device, all of them in one array of float32; of float64 under `jax_enable_x64`.

    Row 0 holds totals (the weighted sum of a mean, the sum, the minimum or the maximum so far), row 1
    the sum of weights. The sums of an epoch have two rows more, what rounding has cut off the first two:
    without them a mean over a million batches is wrong in its third digit. If a metric asks for them, two rows follow,
    the table of the steps since the last row.

    Args:
        metrics: The metrics, one a column; an integer has four, for its bytes: float32 has the digits of each, also
            times a weight of up to 65,536.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = tuple(metrics)
        # Once here, as a row is made at every logged step: the name of each column in it, None for those not in rows.
        self.row_names = [m.step_name if m.on_step and m.logger else None for m in metrics]
        self._ends = np.cumsum([0, *(4 if m.is_integer else 1 for m in metrics)]).tolist()  # of columns, from 0
        kinds = [m.reduce_fx for m in metrics for _ in range(4 if m.is_integer else 1)]
        self._mean, self._min, self._max = (np.array([k == w for k in kinds], bool) for w in ("mean", "min", "max"))
        self._extreme, self.means = self._min | self._max, self._mean.tolist()
        self._of_rows = np.array([m.of_rows for m in metrics for _ in range(4 if m.is_integer else 1)], bool)
        self.has_row_means = bool(self._of_rows.any())
        self._extreme_totals = np.stack([self._extreme, np.zeros_like(self._extreme)])  # in a table

    @property
    def has_steps(self) -> bool:
        """Whether a metric has values of single steps."""
        return any(m.on_step for m in self.metrics)

    def empty(self) -> np.ndarray:
        """Return the table of no batch."""
        table = np.zeros((2, len(self.means)), jax.dtypes.canonicalize_dtype(float))
        table[0, self._min], table[0, self._max] = np.inf, -np.inf
        return table

    def empty_sums(self) -> np.ndarray:
        """Return the sums of no batch, (4, num_metrics), or (6, num_metrics) with those since the last row."""
        return np.concatenate([empty := self.empty(), np.zeros_like(empty), *[empty] * self.has_row_means])

    def entry(self, values: Sequence[jax.Array], weights: Sequence[jax.Array], share: float = 1.0) -> jax.Array:
        """Return the table of one batch.

        Args:
            values: One () float or integer a metric.
            weights: One () float a metric.
            share: The part of this batch that counts; 1/n where n replicas see the same rows.
        """
        if not self.metrics:
            return jnp.zeros((2, 0), float)
        parts = [_by_bits(x) if m.is_integer else (x,) for m, x in zip(self.metrics, values, strict=True)]
        value = jnp.stack([jnp.asarray(x, float) for part in parts for x in part])
        weight = jnp.stack([w for part, w in zip(parts, weights, strict=True) for _ in part])
        # A value without weight counts nothing, even if it is NaN, as the mean over an empty mask is.
        weighted = jnp.where(weight == 0, 0.0, value * weight * share)
        total = jnp.where(self._mean, weighted, jnp.where(self._extreme, value, value * share))
        return jnp.stack([total, weight * share])

    def begin_row(self, sums: jax.Array, after_row: jax.Array | bool) -> jax.Array:
        """Return the sums, with no step since the last row if the step that begins is the first `after_row`."""
        return jnp.concatenate([sums[:4], jnp.where(after_row, self.empty(), sums[4:])])

    def add(self, sums: jax.Array, table: jax.Array) -> jax.Array:
        """Return the sums with the table of one batch or window in them.

        What an addition rounds off is kept (Knuth's two-sum), and put back as soon as it counts.
        """
        old, lost = sums[:2], sums[2:4]
        new = self.combine(old, table)
        part = new - old
        lost = lost + ((old - (new - part)) + (table - part))
        total = new + lost
        lost = lost - (total - new)
        # Nothing is rounded off an extreme. Of an infinity inf - inf would be, which is NaN.
        exact = ~jnp.isfinite(new) | self._extreme_totals
        parts = [jnp.where(exact, new, total), jnp.where(exact, 0.0, lost)]
        if self.has_row_means:
            parts.append(self.combine(sums[4:], table))
        return jnp.concatenate(parts)

    def of_row(self, table: jax.Array, sums: jax.Array) -> jax.Array:
        """Return the table of a step with that of the steps since the last row for the metrics that ask for it."""
        return jnp.where(self._of_rows, sums[4:], table) if self.has_row_means else table

    def combine(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return the table of the batches of both."""
        if not self._extreme.any():
            return a + b
        total = jnp.where(self._min, jnp.minimum(a[0], b[0]), jnp.maximum(a[0], b[0]))
        return jnp.stack([jnp.where(self._extreme, total, a[0] + b[0]), a[1] + b[1]])

    def reduce(self, table: jax.Array, psum: Callable[..., Any], axis: str) -> jax.Array:
        """Return the table of all replicas, given the sum of their tables."""
        if not self._extreme.any():
            return psum(table)
        low, high = jax.lax.pmin(table[0], axis), jax.lax.pmax(table[0], axis)
        # An infinity among the extremes must not meet another in the sum.
        summed = psum(jnp.where(self._extreme_totals, 0.0, table))
        return summed.at[0].set(jnp.where(self._min, low, jnp.where(self._max, high, summed[0])))

    def refit(self, table: np.ndarray, replicas: int | None) -> np.ndarray:
        """Return a table, (rows, num_metrics) or with a leading dim of replicas, for another number of them, or None.

        The first replica takes the values of all.
        """
        if (len(table) if table.ndim == 3 else None) == replicas:
            return table
        table = self._joined(table) if table.ndim == 3 else table
        empty = self.empty() if len(table) == 2 else self.empty_sums()
        return table if replicas is None else np.stack([table, *[empty] * (replicas - 1)])

    def read(self, table: np.ndarray) -> list[float]:
        """Return one float a metric of a table or of sums; a leading dim of replicas is reduced first."""
        if table.shape[:-1] == (2,):  # a row's few numbers: numpy would take longer
            totals, weights = table.tolist()
            columns = zip(self.means, totals, weights, strict=True)
            values = [
                total / weight if mean and weight else math.nan if mean else total for mean, total, weight in columns
            ]
        else:
            table = np.array(table, np.float64, ndmin=3)
            with np.errstate(invalid="ignore", divide="ignore"):
                if table.shape[1] > 2:  # past an infinity or NaN there is nothing to put back
                    table = table[:, :2] + np.where(np.isfinite(table[:, 2:4]), table[:, 2:4], 0.0)
                total, weight = self._joined(table)
                values = np.where(self._mean, total / weight, total).tolist()
        return values if len(values) == len(self.metrics) else np.add.reduceat(values, self._ends[:-1]).tolist()

    def value(self, table: jax.Array, index: int) -> jax.Array:
        """Return the value of one metric of a table, ()."""
        first, end = self._ends[index : index + 2]
        total = table[0, first:end].sum()
        return total / table[1, first] if self._mean[first] else total

    def _joined(self, tables: np.ndarray) -> np.ndarray:
        """Return the table of all replicas, given one of each."""
        table = tables.sum(0)
        table[0] = np.where(self._min, tables[:, 0].min(0), np.where(self._max, tables[:, 0].max(0), table[0]))
        return table


def _by_bits(x: jax.Array) -> Sequence[Any]:
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)  # no mean of replicas
    return (x - (x & 0xFFFFFF), x & 0xFF0000, x & 0xFF00, x & 0xFF) if is_integer else (x, 0, 0, 0)


NO_WEIGHT = 1e-30  # of a loss that is a mean over nothing: next to any other it vanishes, and nothing is divided by 0


def weight_of(table: jax.Array) -> jax.Array:
    """Return the weight of the loss, (), of a training step's table: rows, or the step's `total_weight`."""
    return table[1, 0]


def loss_of(table: jax.Array) -> jax.Array:
    """Return the loss, (), of a training step's table."""
    return table[0, 0] / weight_of(table)


_RATE, _BAD_STEP = 1.0, 0.0  # kinds of columns after those of the metrics


class StepRow(NamedTuple):
    """What the host reads of a training step."""

    values: list[float]  # one a metric, the loss first
    row: dict[str, float]  # those of them that are in rows, by name
    rates: dict[str, float]  # the learning rates of an optimizer step, by name
    bad_step: int  # the non-finite step that the guard names, see `TrainState`; -1 for none


@dataclass(frozen=True)
class StepTable:
    """The array that leaves a training step: all that the host reads of it is in one transfer.

    It is (2, num_columns): a column for each metric as in `Table`, then in row 0 the learning rates, which the
    batch of a window that continues does not have, and the guard's `bad_step`; row 1 says which of the two it is. So
    an array that a checkpoint holds is read whatever had rates or a guard then. Leading dims are of replicas, or steps.
    """

    metrics: Table  # the metrics
    rates: tuple[str | None, ...]  # the names of the rates, None for one that is in no row
    guarded: bool  # whether there is a guard

    def encode(self, table: jax.Array, rates: Sequence[jax.Array], bad_step: jax.Array) -> jax.Array:
        """Return the array of one step, (2, num_columns), given the metrics' table and () arrays."""
        numbers = [(x, _RATE) for x in rates]
        numbers += [(bad_step.astype(float), _BAD_STEP)] if self.guarded else []
        columns = (jnp.stack([x, jnp.asarray(kind, float)])[:, None] for x, kind in numbers)
        return jnp.concatenate([table, *columns], axis=1)

    def decode(self, array: np.ndarray) -> StepRow:
        """Return one step, given its array."""
        table = self.metrics
        columns = len(table.means)
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
