"""What `self.log` collects while a step is traced, how it adds up on device, and where it is read."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from jaxlit.errors import LogError, did_you_mean

REDUCTIONS = ("mean", "sum", "min", "max")


@dataclass(frozen=True)
class Metric:
    """How one logged name is reduced and where it shows."""

    name: str
    prog_bar: bool = False
    logger: bool = True
    on_step: bool = True
    on_epoch: bool = False
    reduce_fx: str = "mean"
    add_dataloader_idx: bool = True

    @property
    def step_name(self) -> str:
        """The name of the value of a step."""
        return f"{self.name}_step" if self.on_epoch else self.name

    @property
    def epoch_name(self) -> str:
        """The name of the value of an epoch."""
        return f"{self.name}_epoch" if self.on_step else self.name


@dataclass
class Collector:
    """Gathers what one traced step logs; `self.log` fills it."""

    stage: str  # "training", "validation", "test", "predict"
    rows: int  # rows in the batch of this trace, the default weight
    step: jax.Array  # () int32, traced
    epoch: jax.Array  # () int32, traced
    metrics: dict[str, Metric] = field(default_factory=dict)
    values: dict[str, jax.Array] = field(default_factory=dict)
    weights: dict[str, jax.Array] = field(default_factory=dict)
    # A value made inside scan, vmap, grad or another jit may not leave it: only the trace in which
    # the step itself runs may log.
    trace: Any = field(default_factory=jax.extend.core.get_opaque_trace_state)

    def add(self, metric: Metric, value: Any, batch_size: Any) -> None:
        """Take one value.

        Raises:
            LogError: The value is not a scalar number, the name is taken or was logged before in this step,
                or the call stands inside a nested trace.
        """
        name, step = metric.name, f"{self.stage}_step"
        if jax.extend.core.get_opaque_trace_state() != self.trace:
            raise LogError(
                f"self.log({name!r}, ...) stands inside a function that jax transforms (scan, vmap, grad, remat, "
                f"cond or jit) in {step}. Return the value from that function and log it in {step} itself."
            )
        if name in self.metrics:
            raise LogError(f"self.log({name!r}, ...) is called twice in {step}. Log each name once a step.")
        if name in ("step", "epoch"):
            raise LogError(f"self.log({name!r}, ...): every row has a {name!r} of its own. Log it under another name.")
        self.values[name] = _scalar(name, value, step)
        self.weights[name] = _weight(name, self.rows if batch_size is None else batch_size)
        self.metrics[name] = metric


def _scalar(name: str, value: Any, step: str) -> jax.Array:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None and not isinstance(value, (bool, int, float)):
        raise LogError(f"self.log({name!r}, value) in {step} takes a scalar number, got {type(value).__name__}.")
    if shape:
        raise LogError(f"self.log({name!r}, value) in {step} takes a scalar, got shape {shape}. Log value.mean().")
    if dtype is not None and not (jnp.issubdtype(dtype, jnp.number) or dtype == jnp.bool_):
        raise LogError(f"self.log({name!r}, value) in {step} takes a number, got dtype {dtype}.")
    if dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating):
        raise LogError(f"self.log({name!r}, value) in {step} takes a real number, got {dtype}. Log abs(value).")
    return jnp.asarray(value, jnp.float32)


def _weight(name: str, batch_size: Any) -> jax.Array:
    if isinstance(batch_size, (int, float, np.integer, np.floating)) and not float(batch_size) > 0:
        raise LogError(f"self.log({name!r}, batch_size={batch_size!r}): batch_size must be positive.")
    if getattr(batch_size, "shape", ()) != () or isinstance(batch_size, str):
        raise LogError(f"self.log({name!r}, batch_size=...) must be a scalar, got {batch_size!r}.")
    return jnp.asarray(batch_size, jnp.float32)


_active: ContextVar[Collector | None] = ContextVar("jaxlit_collector", default=None)


def active_collector() -> Collector | None:
    """Return the collector of the step that is being traced, if any."""
    return _active.get()


@contextlib.contextmanager
def collecting(collector: Collector) -> Iterator[Collector]:
    """Make `collector` the one that `self.log` fills."""
    token = _active.set(collector)
    try:
        yield collector
    finally:
        _active.reset(token)


class Table:
    """Adds up metrics on device, all of them in one float32 array of shape (2, num_metrics).

    Row 0 holds totals (the weighted sum of a mean, the sum, the minimum or the maximum so far), row 1
    the sum of weights.

    Args:
        metrics: The metrics, one a column.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = tuple(metrics)
        kinds = [m.reduce_fx for m in metrics]
        self._mean, self._min, self._max = (np.array([k == w for k in kinds], bool) for w in ("mean", "min", "max"))
        self._extreme = self._min | self._max

    def empty(self) -> np.ndarray:
        """Return the table of no batch."""
        table = np.zeros((2, len(self.metrics)), np.float32)
        table[0, self._min], table[0, self._max] = np.inf, -np.inf
        return table

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
        total = jnp.where(self._mean, value * weight * share, jnp.where(self._extreme, value, value * share))
        return jnp.stack([total, weight * share])

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

    def read(self, table: np.ndarray) -> list[float]:
        """Return one float a metric; a leading dim of replicas is reduced first."""
        if table.ndim == 3:
            total = np.where(self._min, table[:, 0].min(0), np.where(self._max, table[:, 0].max(0), 0))
            table = np.stack([np.where(self._extreme, total, table[:, 0].sum(0)), table[:, 1].sum(0)])
        with np.errstate(invalid="ignore", divide="ignore"):
            return [float(x) for x in np.where(self._mean, table[0] / table[1], table[0])]


class MetricView(Mapping[str, float]):
    """A read-only mapping of metrics; a value comes from the device when its key is read."""

    def __init__(self, names: Callable[[], Sequence[str]], read: Callable[[str], float]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> float:
        names = self._names()
        if name not in names:
            raise KeyError(f"No metric {name!r} was logged.{did_you_mean(name, names)} Logged: {sorted(names)}.")
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        return repr(dict(self))


class Results:
    """The metrics of a run as callbacks see them.

    `latest` is the newest training step's table, still on device: storing it is all that a step pays.
    """

    def __init__(self) -> None:
        self.latest: jax.Array | None = None
        self._table = Table([])
        self._read_of: tuple[Any, list[float]] = (None, [])
        self._slots: dict[str, tuple[Metric, float | int, bool]] = {}  # an int is a column of `latest`
        self.callback_metrics = MetricView(lambda: list(self._slots), self._value)
        self.logged_metrics = MetricView(lambda: self._shown(lambda m: m.logger), self._value)
        self.progress_bar_metrics = MetricView(lambda: self._shown(lambda m: m.prog_bar), self._value)

    def show_steps(self, table: Table) -> None:
        """From now on show the values of `latest`, whose columns are those of `table`."""
        self._table = table
        for column, metric in enumerate(table.metrics):
            if column and metric.on_step:  # column 0 is the loss, which is no logged metric
                self._slots[metric.step_name] = (metric, column, False)
                if metric.on_epoch:
                    self._slots[metric.name] = (metric, column, True)

    def put_epoch(self, metric: Metric, value: float, suffix: str = "") -> None:
        """Show the value of an epoch."""
        self._slots[metric.epoch_name + suffix] = (metric, float(value), False)
        if metric.on_step:
            self._slots[metric.name + suffix] = (metric, float(value), True)

    def clear(self) -> None:
        """Forget everything."""
        self.latest, self._read_of = None, (None, [])
        self._slots.clear()

    def steps(self, logs: Any) -> list[float]:
        """Return the values of a step's table, read once."""
        if self._read_of[0] is not logs:
            # The columns behind the table's own are flags of the engine.
            self._read_of = (logs, self._table.read(np.asarray(logs)[..., : len(self._table.metrics)]))
        return self._read_of[1]

    def _shown(self, where: Callable[[Metric], bool]) -> list[str]:
        return [name for name, (metric, _, bare) in self._slots.items() if where(metric) and not bare]

    def _value(self, name: str) -> float:
        _, value, _ = self._slots[name]
        return value if isinstance(value, float) else self.steps(self.latest)[value]
