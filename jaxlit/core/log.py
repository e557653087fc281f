"""What `self.log` collects, from the step that is traced or the hook that runs."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from flax import nnx

from jaxlit.errors import LogError
from jaxlit.shown import shown

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

    @property
    def names(self) -> set[str]:
        """Every name under which its values show."""
        return {self.name, *([self.step_name] * self.on_step), *([self.epoch_name] * self.on_epoch)}


def metric_of(where: str, name: Any, **how: Any) -> Metric:
    """Return how a name is logged from a step or hook, with Lightning's defaults there.

    Args:
        where: The step or hook.
        name: The metric's name.
        **how: Arguments of `TrainModule.log`: what `Metric` has.

    Raises:
        LogError: Nothing can be logged there, or not so.
    """
    if not isinstance(name, str) or not name:
        raise LogError(f"self.log(name, value) in {where} takes a str as name, got {name!r}.")
    if where not in HOOKS:
        raise LogError(
            f"self.log({name!r}, ...) is called in {where}, where nothing can be logged. Log in a training, validation "
            "or test step, in a batch hook or at the start or end of an epoch."
        )
    if name in ("step", "epoch") or "/dataloader_idx_" in name:
        raise LogError(
            f"self.log({name!r}, ...): jaxlit adds 'step', 'epoch' and '/dataloader_idx_<i>' to rows itself."
        )
    by_step, by_epoch = HOOKS[where]
    if how.get("reduce_fx", "mean") not in REDUCTIONS:
        raise LogError(f"self.log({name!r}, reduce_fx=...) must be one of {REDUCTIONS}, got {how['reduce_fx']!r}.")
    if how.get("on_step") and by_step is None:
        raise LogError(f"self.log({name!r}, on_step=True) in {where}: there is no step there. Leave on_step out.")
    given: dict[str, Any] = {"on_step": bool(by_step), "on_epoch": by_epoch}
    given |= {key: x if key == "reduce_fx" else bool(x) for key, x in how.items() if x is not None}
    metric = Metric(name, **given)
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
            LogError: The value is not a scalar number, the name is taken or was logged before in this step,
                or the call is inside a nested trace.
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
            self.values[name] = jnp.asarray(value, jnp.float32)
            self.weights[name] = jnp.asarray(self.rows if batch_size is None else batch_size, jnp.float32)
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
            parts.append(jnp.asarray(now, jnp.float32))
        total, count = parts
        return jnp.where(count > 0, total / jnp.where(count > 0, count, 1.0), 0.0), count


def check_value(name: str, value: Any, batch_size: Any, where: str) -> None:
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
            f"self.log({name!r}, value) in {where} takes a real scalar number, got {shown(value)}. Log value.mean() or "
            "abs(value). Return an array from the step, {'loss': loss, 'confusion': matrix}: the hook at the end of "
            "the batch gets it as `outputs`, and trainer.logger.log_table and log_image take more than a number."
        )
    if batch_size is None:
        return
    traced = isinstance(batch_size, jax.Array)  # in a hook too: it must not wait for the device
    if not is_weight or not (traced or batch_size > 0):
        raise LogError(f"self.log({name!r}, batch_size=...) must be a positive scalar, got {shown(batch_size)}.")


def check_average(metric: Metric, value: nnx.metrics.Metric, batch_size: Any, where: str) -> nnx.metrics.Average:
    """Return an nnx metric that adds up over batches and replicas; others are refused.

    Raises:
        LogError: Saying which do.
    """
    name, kind = metric.name, type(value)
    if not isinstance(value, nnx.metrics.Average) or kind.compute is not nnx.metrics.Average.compute:
        raise LogError(
            f"self.log({name!r}, {kind.__name__}()) in {where}: only nnx.metrics.Average and its subclasses, "
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
