"""The metrics of a run as callbacks see them, and what hooks log on the host."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlit.errors import LogError, StateError, did_you_mean
from jaxlit.exchange import fetch
from jaxlit.metrics import Metric, active_collector, check_average, check_scalar, check_weight
from jaxlit.replica import num_rows
from jaxlit.table import Table

TRACED = "trace_step"  # where a callback's traced values come from


class MetricView(Mapping[str, float]):
    """A read-only mapping of metrics; a value comes from the device when its key is read."""

    def __init__(self, names: Callable[[], Sequence[str]], read: Callable[[str], float]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> float:
        if active_collector() is not None:
            raise StateError(
                f"The metric {name!r} is read inside a step, which is traced once: it would stay what it was then. "
                "Read it in a hook, and pass what depends on it in the batch or in an nnx.Variable."
            )
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


@dataclass(frozen=True)
class Slot:
    """One name in the metric mappings."""

    metric: Metric
    value: Any  # a float, a () array, or a function that returns one of them
    callback: bool = True  # shows in callback_metrics
    logged: bool = True  # shows in logged_metrics and progress_bar_metrics, if the metric does
    number: int | None = None  # which value of all this is; None for one that every step changes


class Results:
    """The metrics of a run as callbacks see them.

    `latest` is the newest training step's table, still on device: storing it is all that a step pays.
    """

    def __init__(self) -> None:
        self.latest: jax.Array | None = None
        self._table = Table([])
        self._read_of: tuple[Any, list[float]] = (None, [])
        self._slots: dict[str, Slot] = {}
        self._count = 0  # values of epochs put here
        self.callback_metrics = self._view(lambda slot: slot.callback)
        self.logged_metrics = self._view(lambda slot: slot.logged and slot.metric.logger)
        self.progress_bar_metrics = self._view(lambda slot: slot.logged and slot.metric.prog_bar)

    def show_steps(self, table: Table) -> None:
        """From now on show the values of `latest`, whose columns are those of `table`."""
        self._table = table
        for column, metric in enumerate(table.metrics):
            if column and metric.on_step:  # column 0 is the loss, which is no logged metric
                self.put_step(metric, lambda column=column: self.steps(self.latest)[column])

    def show_evaluation(self, table: Table, values: Any, suffix: str) -> None:
        """Show the values of an evaluation step, given as its own table."""
        for column, metric in enumerate(table.metrics):
            if metric.on_step:
                end = suffix if metric.add_dataloader_idx else ""
                self.put_step(metric, lambda i=column: table.read(np.asarray(values))[i], end, evaluating=True)

    def put_step(self, metric: Metric, value: Any, suffix: str = "", *, evaluating: bool = False) -> None:
        """Show the value of a step; that of an evaluation step is not in `callback_metrics`, as in Lightning."""
        split = metric.on_epoch
        self._slots[metric.step_name + suffix] = Slot(metric, value, callback=not evaluating)
        if split and not evaluating:
            self._slots[metric.name + suffix] = Slot(metric, value, logged=False)

    def put_epoch(self, metric: Metric, value: Any, suffix: str = "") -> None:
        """Show the value of an epoch."""
        self._count += 1
        self._slots[metric.epoch_name + suffix] = Slot(metric, value, number=self._count)
        if metric.on_step:
            self._slots[metric.name + suffix] = Slot(metric, value, logged=False, number=self._count)

    def clear(self) -> None:
        """Forget everything."""
        self.latest, self._read_of = None, (None, [])
        self._slots.clear()

    @property
    def row_names(self) -> list[str | None]:
        """The name in a row of each column of a step's table, None for those that are not in rows."""
        return self._table.row_names

    def number(self, name: str) -> int | None:
        """Return which value of all this one is; None for one that every step changes."""
        return self._slots[name].number

    def state_dict(self) -> list[Any]:
        """Return every value as a float; waits for the device."""
        return [[k, asdict(s.metric), self._value(k), s.callback, s.logged, s.number] for k, s in self._slots.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Show what `state_dict` returned."""
        for name, metric, value, callback, logged, number in state:
            self._slots[name] = Slot(Metric(**metric), float(value), bool(callback), bool(logged), number)
            self._count = max(self._count, number or 0)

    def steps(self, logs: Any) -> list[float]:
        """Return the values of a step's table, read once."""
        if self._read_of[0] is not logs:
            # The columns behind the table's own are flags of the engine.
            self._read_of = (logs, self._table.read(fetch(logs)[..., : len(self._table.metrics)]))
        return self._read_of[1]

    def has_column(self, metric: Metric) -> bool:
        """Tell whether the training step itself logs one of a metric's names."""
        return any(metric.names & other.names for other in self._table.metrics[1:])

    def _view(self, where: Callable[[Slot], bool]) -> MetricView:
        return MetricView(lambda: [name for name, slot in self._slots.items() if where(slot)], self._value)

    def _value(self, name: str) -> float:
        value: Any = self._slots[name].value
        return float(value() if callable(value) else value)  # type: ignore[arg-type]


class Total:
    """A metric that hooks log, as it adds up; device values are read late, when they are ready.

    Args:
        metric: How it is reduced.
        hook: Where it is logged.
    """

    def __init__(self, metric: Metric, hook: str) -> None:
        self.metric, self.hook = metric, hook
        self._waiting: list[tuple[Any, Any]] = []
        self._total: float | None = None
        self._weight = 0.0

    def add(self, value: Any, weight: Any) -> None:
        """Take one value."""
        self._waiting.append((value, weight))
        if len(self._waiting) >= 64:
            self._fold()

    def __float__(self) -> float:
        self._fold()
        assert self._total is not None
        if self.metric.reduce_fx != "mean":
            return self._total
        return self._total / self._weight if self._weight else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Return what has come so far; waits for the device."""
        self._fold()
        return {"metric": asdict(self.metric), "hook": self.hook, "total": self._total, "weight": self._weight}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "Total":
        """Return the total that `state_dict` was taken of."""
        found = cls(Metric(**state["metric"]), state["hook"])
        found._total, found._weight = state["total"], float(state["weight"])
        return found

    def _fold(self) -> None:
        kind = self.metric.reduce_fx
        for waiting, share in self._waiting:
            value, weight = float(waiting), float(share)
            value = value * weight if kind == "mean" else value
            if self._total is None:
                self._total = value
            else:
                self._total = {"min": min, "max": max}.get(kind, lambda a, b: a + b)(self._total, value)
            self._weight += weight
        self._waiting.clear()


class HostLog:
    """Takes what `self.log` is given in hooks, and adds it up on the host.

    Args:
        results: Where the values show.
    """

    def __init__(self, results: Results) -> None:
        self.hook = ""  # the one that runs
        self.batch: Any = None  # the one at hand, whose rows are the default weight
        self.loader: int | None = None  # the loader at hand, if there are several
        self._results = results
        self.named: set[str] = set()  # what the hook that runs has logged
        self.window: dict[str, Total] = {}  # since the last optimizer step
        self._epoch: dict[str, Total] = {}
        self._evaluation: dict[tuple[str, int | None], Total] = {}

    def add(self, metric: Metric, value: Any, batch_size: Any) -> None:
        """Take one value.

        Raises:
            LogError: It is no scalar number, or the name is logged elsewhere or in another way.
        """
        name, batch = metric.name, "_batch_" in self.hook
        if name in self.named:
            raise LogError(f"self.log({name!r}, ...) is called twice in one {self.hook}. Log a name once.")
        self.named.add(name)
        if isinstance(value, nnx.metrics.Metric):
            average = check_average(metric, value, batch_size, self.hook)
            value, weight = average.compute(), average.count.get_value()
        else:
            check_scalar(name, value, self.hook)
            check_weight(name, batch_size)
            weight = batch_size if batch_size is not None else num_rows(self.batch) if batch else 1
        if isinstance(value, jax.Array):
            value = jnp.copy(value)  # it may be the module's, which a later step overwrites
        training = self.hook.startswith("on_train")
        if training and self._results.has_column(metric):
            raise LogError(f"self.log({name!r}, ...) in {self.hook}: training_step logs this name. Use another.")
        suffix = f"/dataloader_idx_{self.loader}" if self.loader is not None and metric.add_dataloader_idx else ""
        if metric.on_step and training:
            total = self._into(self.window, name, metric)
            total.add(value, weight)
            self._results.put_step(metric, total)
        elif metric.on_step:
            self._results.put_step(metric, value, suffix, evaluating=True)
        if metric.on_epoch:
            key: Any = name if training else (name, (self.loader or 0) if batch else None)
            total = self._into(self._epoch if training else self._evaluation, key, metric)  # type: ignore[arg-type]
            total.add(value, weight)
            if not batch:  # there is no more to come
                self._results.put_epoch(metric, total)

    def _into(self, totals: dict[Any, Total], key: Any, metric: Metric) -> Total:
        if (total := totals.get(key)) is None:
            if any(metric.names & other.metric.names for other in totals.values() if other.metric.name != metric.name):
                raise LogError(f"self.log({metric.name!r}, ...) in {self.hook}: another metric shows under this name.")
            total = totals[key] = Total(metric, self.hook)
        if total.metric != metric:
            raise LogError(
                f"self.log({metric.name!r}, ...) in {self.hook} has other arguments than before. Log a name in one way."
            )
        if total.hook != self.hook:
            raise LogError(f"self.log({metric.name!r}, ...) in {self.hook}: {total.hook} logs this name. Use another.")
        return total

    def add_traced(self, values: Mapping[str, Any]) -> None:
        """Take scalars of an optimizer step, device arrays: they are in its row whether it would be logged or not."""
        for name, value in values.items():
            if name in self.window:
                raise LogError(
                    f"self.log({name!r}, ...) in {self.window[name].hook}: a trace_step returns this name. Use another."
                )
            total = self.window[name] = Total(Metric(name), TRACED)
            total.add(value, 1)
            self._results.put_step(total.metric, total)

    def state_dict(self) -> dict[str, Any]:
        """Return what the hooks have logged and no row has taken."""
        return {
            "window": [[name, total.state_dict()] for name, total in self.window.items()],
            "epoch": [[name, total.state_dict()] for name, total in self._epoch.items()],
            "evaluation": [[*key, total.state_dict()] for key, total in self._evaluation.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned."""
        self.window = {name: Total.from_state(total) for name, total in state["window"]}
        self._epoch = {name: Total.from_state(total) for name, total in state["epoch"]}
        self._evaluation = {(name, loader): Total.from_state(total) for name, loader, total in state["evaluation"]}

    def take_window(self) -> dict[str, Total]:
        """Return the values of the optimizer step that ended, by their names in rows, and begin the next."""
        totals, self.window = self.window, {}
        return {t.metric.step_name: t for t in totals.values() if t.metric.logger}

    def show_epoch(self) -> None:
        """Show the epoch's values of what batch hooks logged."""
        for total in self._epoch.values():
            self._results.put_epoch(total.metric, total)

    def take_epoch(self) -> dict[str, Total]:
        """Return the epoch's values by their names in rows, and begin the next epoch."""
        totals, self._epoch = self._epoch, {}
        return {t.metric.epoch_name: t for t in totals.values() if t.metric.logger}

    def take_evaluation(self, loader: int | None) -> list[Total]:
        """Return what was logged for the batches of a loader, None for all else, and forget it."""
        keys = [key for key in self._evaluation if key[1] == loader]
        return [self._evaluation.pop(key) for key in keys]
