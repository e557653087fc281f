"""What hooks log, added up on the host."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.checkpoints.position import Position
from jaxlit.core.log import Metric, check_average, check_value
from jaxlit.core.replica import num_rows
from jaxlit.errors import LogError
from jaxlit.loop.results import Results

TRACED = "trace_step"  # where a callback's traced values come from
_REDUCE: dict[str, Callable[[float, float], float]] = {"min": min, "max": max}  # all others add up
_UNREAD = 64  # values of a metric that stay on the device: an older one is ready, and reading it waits for nothing
_LATER = 8192  # values of a metric that may still be undone, at least as many as steps are not known to be finite
# The batch that a value belongs to, counted from the one that comes next: that of an end hook is done, and what hooks
# log after the last batch of an epoch is logged again by a resume from there.
_BATCH_OF = {"on_train_batch_end": -1, TRACED: -1, "on_train_epoch_end": 1, "on_train_end": 1}


class Logged(NamedTuple):
    """One value that a hook has logged, a number or an array of the device."""

    batch: int  # of all epochs
    value: Any
    weight: Any

    def read(self) -> "Logged":
        """Return it on the host; waits for the device."""
        return Logged(self.batch, float(self.value), float(self.weight))


@dataclass
class Total:
    """The running sum of a metric that hooks log.

    Values of batches that a resume may run again, or whose step may turn out not to be finite, wait beside the sum.
    """

    metric: Metric
    hook: str  # where it is logged
    total: float | None = None
    weight: float = 0.0
    waiting: list[Logged] = field(default_factory=list)

    def add(self, value: Any, weight: Any, batch: int) -> None:
        """Take one value."""
        self.waiting.append(Logged(batch, value, weight))
        if len(self.waiting) > _UNREAD:
            self.waiting[-_UNREAD] = self.waiting[-_UNREAD].read()
        if len(self.waiting) > _LATER:
            self.settle(self.waiting[_LATER // 2].batch)

    def __float__(self) -> float:
        total, weight = self._sum(math.inf)
        assert total is not None
        if self.metric.reduce_fx != "mean":
            return total
        return total / weight if weight else math.nan

    def settle(self, batch: float) -> None:
        """Add the values of the batches before one to the sum for good; waits for the device."""
        self.total, self.weight = self._sum(batch)
        self.waiting = [logged for logged in self.waiting if logged.batch >= batch]

    def forget(self, batch: int) -> None:
        """Drop the values of a batch and of those after it."""
        self.waiting = [logged for logged in self.waiting if logged.batch < batch]

    @property
    def is_empty(self) -> bool:
        """Whether no value is left."""
        return self.total is None and not self.waiting

    def state_dict(self, batch: int) -> dict[str, Any] | None:
        """Return the sum over the batches before one, None if they have no value; waits for the device."""
        total, weight = self._sum(batch)
        if total is None:
            return None
        return {"metric": asdict(self.metric), "hook": self.hook, "total": total, "weight": weight}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Total":
        """Return the total that `state_dict` was called on."""
        return cls(**{**state, "metric": Metric(**state["metric"])})

    def _sum(self, batch: float) -> tuple[float | None, float]:
        """Return the sum, and the sum of weights, with the values of the batches before one."""
        reduce = _REDUCE.get(self.metric.reduce_fx, operator.add)
        is_mean = self.metric.reduce_fx == "mean"
        total = self.total
        weight = self.weight
        for logged in self.waiting:
            if logged.batch >= batch:
                continue
            _, value, share = logged.read()
            value = value * share if is_mean else value
            total = value if total is None else reduce(total, value)
            weight += share
        return total, weight


class HostLog:
    """Takes what `self.log` is given in hooks, adds it up on the host, and shows it in `results`.

    Args:
        results: The metrics of the run.
        position: How far it is.
    """

    def __init__(self, results: Results, position: Position) -> None:
        self._position = position
        self.hook = ""  # the one that runs
        self.batch: Any = None  # the one at hand, whose rows are the default weight
        self.loader: int | None = None  # the loader at hand, if there are several
        self._results = results
        self.named: set[str] = set()  # what the hook that runs has logged
        self.window: dict[str, Total] = {}  # since the last optimizer step
        self.epoch: dict[str, Total] = {}  # since the epoch began
        self._evaluation: dict[tuple[str, int | None], Total] = {}

    def add(self, metric: Metric, value: Any, batch_size: Any) -> None:
        """Take one value.

        Raises:
            LogError: The value is not a scalar number, or the name is logged elsewhere or in another way.
        """
        name = metric.name
        batch = "_batch_" in self.hook
        if name in self.named:
            raise LogError(f"self.log({name!r}, ...) is called twice in one {self.hook}. Log a name once.")
        self.named.add(name)
        if isinstance(value, nnx.metrics.Metric):
            average = check_average(metric, value, batch_size, self.hook)
            value = average.compute()
            weight = average.count.get_value()
        else:
            check_value(name, value, batch_size, self.hook)
            weight = batch_size if batch_size is not None else num_rows(self.batch) if batch else 1
        if isinstance(value, jax.Array):
            value = jnp.copy(value)  # it may be the module's, which a later step overwrites
        training = self.hook.startswith("on_train")
        if training:
            self._check_column(metric, self.hook)
        if metric.on_step and training:
            self._results.put_step(metric, self._into(self.window, name, metric, value, weight))
        elif metric.on_step:
            self._results.put_step(metric, value, self.suffix(metric), evaluating=True)
        if metric.on_epoch:
            key = name if training else (name, (self.loader or 0) if batch else None)
            total = self._into(self.epoch if training else self._evaluation, key, metric, value, weight)
            if not batch:  # there is no more to come
                self._results.put_epoch(metric, total)

    def check_columns(self) -> None:
        """Refuse what hooks have logged before the first step under a name that the step logs too.

        Raises:
            LogError: Naming it.
        """
        for total in (*self.window.values(), *self.epoch.values()):
            self._check_column(total.metric, total.hook)

    def _check_column(self, metric: Metric, hook: str) -> None:
        if hook != TRACED and self._results.has_column(metric):
            raise LogError(f"self.log({metric.name!r}, ...) in {hook}: training_step logs this name. Use another.")

    def suffix(self, metric: Metric) -> str:
        """Return what is appended to a metric's name for the loader at hand."""
        return f"/dataloader_idx_{self.loader}" if self.loader is not None and metric.add_dataloader_idx else ""

    def _into(self, totals: Any, key: Any, metric: Metric, value: Any, weight: Any) -> Total:
        if (total := totals.get(key)) is None:
            if any(metric.names & other.metric.names for other in totals.values() if other.metric.name != metric.name):
                raise LogError(f"self.log({metric.name!r}, ...) in {self.hook}: another metric already has this name.")
            total = totals[key] = Total(metric, self.hook)
        if (total.metric, total.hook) != (metric, self.hook):
            raise LogError(
                f"self.log({metric.name!r}, ...) in {self.hook}: it was logged with other arguments, or in "
                f"{total.hook}. Log a name in one way."
            )
        total.add(value, weight, self._batch_of(self.hook))
        return total

    def _batch_of(self, hook: str) -> int:
        return self._position.total_batch_idx + _BATCH_OF.get(hook, 0)

    def add_traced(self, values: Mapping[str, Any]) -> None:
        """Take scalars of an optimizer step, device arrays: they are in its row whether it would be logged or not."""
        for name, value in values.items():
            if name in self.window:
                raise LogError(
                    f"A trace_step returns {name!r}, which something else logs in the same step. Rename one."
                )
            total = self.window[name] = Total(Metric(name), TRACED)
            total.add(value, 1, self._batch_of(TRACED))
            self._results.put_step(total.metric, total)

    def state_dict(self) -> dict[str, Any]:
        """Return what hooks have logged and no row has taken, but for hooks that a resume from here calls again."""
        # A start hook may have ended the epoch before its batch, and is not called again then.
        batch = self._position.total_batch_idx + self._position.over
        return {
            name: [[key, state] for key, total in totals.items() if (state := total.state_dict(batch)) is not None]
            for name, totals in (("window", self.window), ("epoch", self.epoch))
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.window = {name: Total.from_state(total) for name, total in state["window"]}
        self.epoch = {name: Total.from_state(total) for name, total in state["epoch"]}

    def settle(self, batch: int) -> None:
        """Note that the batches before one are not undone any more."""
        for total in (*self.window.values(), *self.epoch.values()):
            total.settle(batch)

    def forget(self, batch: int) -> None:
        """Drop what hooks have logged in a batch and after it, which are undone."""
        for totals in (self.window, self.epoch):
            for name, total in list(totals.items()):
                total.forget(batch)
                if total.is_empty:
                    del totals[name]

    def take_window(self) -> dict[str, Total]:
        """Return the values of the optimizer step that ended, by their names in rows, and begin the next."""
        totals = self.window
        self.window = {}
        return {t.metric.step_name: t for t in totals.values() if t.metric.logger}

    def show_epoch(self) -> None:
        """Show the epoch's values of what batch hooks logged."""
        for total in self.epoch.values():
            self._results.put_epoch(total.metric, total)

    def row_of_epoch(self) -> dict[str, Total]:
        """Return the epoch's values by their names in rows."""
        return {t.metric.epoch_name: t for t in self.epoch.values() if t.metric.logger}

    def begin_epoch(self) -> None:
        """Forget the epoch before."""
        self.epoch = {}

    def begin_evaluation(self) -> None:
        """Forget an evaluation that was cut."""
        self._evaluation = {}

    def take_evaluation(self, loader: int | None) -> list[Total]:
        """Return what was logged for the batches of a loader, None for all else, and forget it."""
        keys = [key for key in self._evaluation if key[1] == loader]
        return [self._evaluation.pop(key) for key in keys]
