"""What hooks log, added up on the host."""

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxlit.core.log import Metric, check_average, check_value
from jaxlit.core.replica import num_rows
from jaxlit.errors import LogError
from jaxlit.loop.results import Results

TRACED = "trace_step"  # where a callback's traced values come from
_REDUCE: dict[str, Callable[[float, float], float]] = {"min": min, "max": max}  # all others add up


@dataclass
class Total:
    """The running sum of a metric that hooks log; device values are read late, when they are ready."""

    metric: Metric
    hook: str  # where it is logged
    total: float | None = None
    weight: float = 0.0
    waiting: list[tuple[Any, Any]] = field(default_factory=list)  # values and weights that are not in the sum yet

    def add(self, value: Any, weight: Any) -> None:
        """Take one value."""
        self.waiting.append((value, weight))
        if len(self.waiting) >= 64:
            self._fold()

    def __float__(self) -> float:
        self._fold()
        assert self.total is not None
        if self.metric.reduce_fx != "mean":
            return self.total
        return self.total / self.weight if self.weight else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return the sum so far; waits for the device."""
        self._fold()
        return {name: x for name, x in asdict(self).items() if name != "waiting"}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Total":
        """Return the total that `state_dict` was called on."""
        return cls(**{**state, "metric": Metric(**state["metric"])})

    def _fold(self) -> None:
        reduce, is_mean = _REDUCE.get(self.metric.reduce_fx, operator.add), self.metric.reduce_fx == "mean"
        for waiting, share in self.waiting:
            value, weight = float(waiting), float(share)
            value = value * weight if is_mean else value
            self.total = value if self.total is None else reduce(self.total, value)
            self.weight += weight
        self.waiting.clear()


class HostLog:
    """Takes what `self.log` is given in hooks, adds it up on the host, and shows it in `results`."""

    def __init__(self, results: Results) -> None:
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
        name, batch = metric.name, "_batch_" in self.hook
        if name in self.named:
            raise LogError(f"self.log({name!r}, ...) is called twice in one {self.hook}. Log a name once.")
        self.named.add(name)
        if isinstance(value, nnx.metrics.Metric):
            average = check_average(metric, value, batch_size, self.hook)
            value, weight = average.compute(), average.count.get_value()
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
        total.add(value, weight)
        return total

    def add_traced(self, values: Mapping[str, Any]) -> None:
        """Take scalars of an optimizer step, device arrays: they are in its row whether it would be logged or not."""
        for name, value in values.items():
            if name in self.window:
                raise LogError(
                    f"A trace_step returns {name!r}, which something else logs in the same step. Rename one."
                )
            total = self.window[name] = Total(Metric(name), TRACED)
            total.add(value, 1)
            self._results.put_step(total.metric, total)

    def state_dict(self) -> dict[str, Any]:
        """Return what the hooks have logged and no row has taken."""
        return {
            "window": [[name, total.state_dict()] for name, total in self.window.items()],
            "epoch": [[name, total.state_dict()] for name, total in self.epoch.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.window = {name: Total.from_state(total) for name, total in state["window"]}
        self.epoch = {name: Total.from_state(total) for name, total in state["epoch"]}

    def take_window(self) -> dict[str, Total]:
        """Return the values of the optimizer step that ended, by their names in rows, and begin the next."""
        totals, self.window = self.window, {}
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
