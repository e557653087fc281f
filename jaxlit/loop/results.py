"""The metrics of a run: as callbacks see them (`Results`), as hooks log them (`HostLog`), and all rows (`History`)."""

import io
import math
import operator
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxlit import checks as check
from jaxlit.control import Position
from jaxlit.core.log import Metric, StepRow, StepTable, Table, active_collector, check_average, check_value, loss_of
from jaxlit.core.replica import num_rows
from jaxlit.distributed.team import fetch
from jaxlit.errors import ArgumentError, LogError, LoggerError, StateError, did_you_mean
from jaxlit.reporting.curves import colors, spans_decades, together

MOST = 10_000  # values of a metric
_loss_of = jax.jit(loss_of)  # one dispatch
_NO_STEPS = StepTable(Table([]), (), guarded=False)
TRACED = "trace_step"  # where a callback's traced values come from
_REDUCE: dict[str, Callable[[float, float], float]] = {"min": min, "max": max}  # all others add up
UNREAD = 64  # values of a metric that stay on the device: an older one is ready, and reading it waits for nothing
# The batch that a value belongs to, counted from the one that comes next: that of an end hook is done, and what hooks
# log after the last batch of an epoch is logged again by a resume from there.
_BATCH_OF = {"on_train_batch_end": -1, TRACED: -1, "on_train_epoch_end": 1}


class Row(NamedTuple):
    """The row of an optimizer step, which is read one step late."""

    logs: Any  # the step's table, see `fetch`; None if only hooks have values
    hook_values: Mapping[str, Any]
    step: int


@dataclass(frozen=True)
class Slot:
    """One name in the metric mappings."""

    metric: Metric
    value: Any  # a float, a () array, or a function that returns one of them
    callback: bool = True  # shows in callback_metrics
    logged: bool = True  # shows in logged_metrics and progress_bar_metrics, if the metric does
    step: int | None = None  # optimizer steps taken when it was logged; None for one that every step changes

    def __float__(self) -> float:
        value = self.value() if callable(self.value) else self.value
        return float(value)  # type: ignore[arg-type]


class MetricView(Mapping[str, float]):
    """A read-only mapping of metrics; a value comes from the device when its key is read."""

    def __init__(self, slots: Mapping[str, Slot], shows: Callable[[Slot], bool]) -> None:
        self._slots = slots
        self._shows = shows

    def step(self, name: str) -> int | None:
        """Return the optimizer steps taken when a metric was logged; None for one that every step changes."""
        return self._slots[name].step

    def hook(self, name: str) -> str | None:
        """Return the hook that has logged a metric, whose value is this process's own; None for one of a step."""
        return getattr(self._slots[name].value, "hook", None)

    def __getitem__(self, name: str) -> float:
        if active_collector() is not None:
            raise StateError(
                f"The metric {name!r} is read inside a step, which is traced once: it would stay what it was then. "
                "Read it in a hook, and pass what depends on it in the batch or in an nnx.Variable."
            )
        if (slot := self._slots.get(name)) is None or not self._shows(slot):
            names = sorted(self)
            raise KeyError(f"No metric {name!r} was logged.{did_you_mean(name, names)} Logged: {names}.")
        return float(slot)

    def __contains__(self, name: object) -> bool:  # without a read, for which a mapping's own would wait
        return (slot := self._slots.get(name)) is not None and self._shows(slot)  # type: ignore[call-overload]

    def __iter__(self) -> Iterator[str]:
        return (name for name, slot in self._slots.items() if self._shows(slot))

    def __len__(self) -> int:
        return sum(map(self._shows, self._slots.values()))

    def __repr__(self) -> str:
        return repr(dict(self))


class Results:
    """The metrics of a run as callbacks see them; `step` returns the optimizer steps taken.

    `latest` is the newest training step's table, still on device: storing it is all that a step pays. `newest_loss` is
    the loss of the epoch's newest row, or a function that returns the mean of the epoch that has ended. `pending` are
    the rows of the dispatch before, `rates_in` the rows that a callback wants learning rates in, "step" or "epoch".
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self.latest: Any = None
        self.newest_loss: float | Callable[[], float] | None = None
        self.pending = list[Row]()
        self.steps_at_row = -1  # the optimizer steps taken when the newest row was made
        self.rates_in: str | None = None
        self._shows_loss = False
        self.history = History()
        self._layout = _NO_STEPS
        self._newest_read: tuple[Any, StepRow | None] = (None, None)  # of a step: on the device, and on the host
        self._slots: dict[str, Slot] = {}
        self.callback_metrics = MetricView(self._slots, lambda slot: slot.callback)
        self.logged_metrics = MetricView(self._slots, lambda slot: slot.logged and slot.metric.logger)
        self.progress_bar_metrics = MetricView(self._slots, lambda slot: slot.logged and slot.metric.prog_bar)

    def show_steps(self, layout: StepTable) -> None:
        """From now on show the values of `latest`, which has this layout."""
        metrics = layout.metrics.metrics
        # A name that the module logs means the module's value in all rows.
        taken = {name for metric in metrics[1:] if metric.logger for name in metric.names}
        self._layout = replace(layout, rates=tuple(None if name in taken else name for name in layout.rates))
        self._shows_loss = not any(metric.prog_bar and "loss" in metric.name.lower() for metric in metrics[1:])
        for column, metric in enumerate(metrics):
            if column and metric.on_step:  # column 0 is the loss, which is no logged metric
                self.put_step(metric, lambda column=column: self.read(self.latest).values[column])

    def show_evaluation(self, table: Table, values: Any, suffix: Callable[[Metric], str]) -> None:
        """Show the values of an evaluation step, given as its table, with a suffix of each metric's name."""
        for i, metric in enumerate(table.metrics):
            if metric.on_step:
                self.put_step(metric, lambda i=i: table.read(fetch(values))[i], suffix(metric), evaluating=True)

    def put_step(self, metric: Metric, value: Any, suffix: str = "", *, evaluating: bool = False) -> None:
        """Show the value of a step; that of an evaluation step is not in `callback_metrics`, as in Lightning."""
        # An end hook may log in some batches only.
        step = self._step() if getattr(value, "hook", "") == "on_train_batch_end" else None
        self._slots[metric.step_name + suffix] = Slot(metric, value, callback=not evaluating, step=step)
        if metric.on_epoch and not evaluating:
            self._slots[metric.name + suffix] = Slot(metric, value, logged=False, step=step)

    def put_epoch(self, metric: Metric, value: Any, suffix: str = "") -> None:
        """Show the value of an epoch."""
        self._slots[metric.epoch_name + suffix] = Slot(metric, value, step=self._step())
        if metric.on_step:
            self._slots[metric.name + suffix] = Slot(metric, value, logged=False, step=self._step())

    def drop(self, value: Any) -> None:
        """Forget a metric's value that hooks had logged."""
        for name in [name for name, slot in self._slots.items() if slot.value is value]:
            del self._slots[name]

    def clear(self) -> None:
        """Forget everything."""
        self.latest = self.newest_loss = None
        self._slots.clear()
        self.show_steps(_NO_STEPS)
        self._newest_read = None, None

    @property
    def loss(self) -> float | None:
        """The training loss for the progress bar; None where `training_step` logs a metric named so for it."""
        if callable(self.newest_loss):  # it is read from the device for those who ask
            self.newest_loss = self.newest_loss()
        return self.newest_loss if self._shows_loss else None

    def state_dict(self) -> list[Any]:
        """Return every value as a float; waits for the device."""
        return [[k, asdict(s.metric), float(s), s.callback, s.logged, s.step] for k, s in self._slots.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Show what `state_dict` returned."""
        for name, metric, value, callback, logged, step in state:
            self._slots[name] = Slot(Metric(**metric), float(value), bool(callback), bool(logged), step)

    def read(self, logs: Any) -> StepRow:
        """Return what a step has returned for the host; waits for the device."""
        of, row = self._newest_read
        if row is None or of is not logs:  # read once
            row = self._layout.decode(fetch(logs))
            self._newest_read = logs, row
        return row

    def has_column(self, metric: Metric) -> bool:
        """Return whether the training step itself logs one of a metric's names."""
        return any(metric.names & other.names for other in self._layout.metrics.metrics[1:])


UNREAD_ITEM: Any = object()


class LazyDict(MutableMapping[str, Any], dict[str, Any]):  # type: ignore[misc]
    """A dict whose values `read` gives when they are first asked for; a pytree, of which `tree.map` makes a dict."""

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_with_keys(
            cls,
            lambda x: ([(jax.tree_util.DictKey(name), x[name]) for name in sorted(x)], tuple(sorted(x))),
            lambda names, values: cast(Any, dict(zip(names, values, strict=True))),
        )

    def read(self, name: str) -> Any:
        """Return a value."""
        raise NotImplementedError

    def __getitem__(self, name: str) -> Any:
        if (value := dict.__getitem__(self, name)) is UNREAD_ITEM:
            value = self[name] = self.read(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        dict.__delitem__(self, name)

    def __iter__(self) -> Iterator[str]:  # also what has dict() read, in place of copying what is unread
        return dict.__iter__(self)

    def __len__(self) -> int:
        return dict.__len__(self)

    def __reversed__(self) -> Iterator[str]:
        return dict.__reversed__(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __repr__(self) -> str:
        return repr(dict(self))

    def copy(self) -> dict[str, Any]:
        """Return a dict with all values."""
        return dict(self)


class Outputs(LazyDict):
    """The `outputs` of a training step, device arrays; the loss is computed when it is asked for.

    `logs` is the step's table. If that is of a window, `loss` is the loss of the batch in each replica.
    """

    def __init__(self, logs: jax.Array, loss: jax.Array | None, outputs: dict[str, Any]) -> None:
        self.logs = logs
        self._loss = loss
        dict.update(self, {"loss": UNREAD_ITEM, **outputs})

    def read(self, name: str) -> Any:
        """Return the loss."""
        return _loss_of(self.logs) if self._loss is None else self._loss.mean()


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

    Values of batches that a resume may run again, or whose step may turn out not to be finite, wait next to the sum.
    """

    metric: Metric
    hook: str  # where it is logged
    total: float | None = None
    weight: float = 0.0
    waiting: list[Logged] = field(default_factory=list)

    def add(self, value: Any, weight: Any, batch: int) -> None:
        """Take one value."""
        self.waiting.append(Logged(batch, value, weight))
        if len(self.waiting) > UNREAD:
            self.waiting[-UNREAD] = self.waiting[-UNREAD].read()

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
    """Takes what `self.log` is given in hooks, adds it up on the host, and shows it in `results`."""

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
        """Take one value; refuse one that is no scalar number, or a name that is logged elsewhere or in another way."""
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
        """Refuse what hooks have logged before the first step under a name that the step logs too."""
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
                if total.total is None and not total.waiting:
                    del totals[name]
                    self._results.drop(total)

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


class _Curve:
    """The values of one metric, and their steps; half of them are left out whenever there are too many."""

    def __init__(self) -> None:
        self.steps = list[int]()
        self.values = list[float]()
        self.seen = 0
        self.every = 1


class History(Mapping[str, tuple[np.ndarray, np.ndarray]]):
    """Every metric of the newest fit's rows, and of the evaluations after it: its steps and its values, by name.

    At most 10,000 values of each are kept: of more, only every second, every fourth and so on. It is filled as rows are
    logged, which reads nothing from a device. A training that is resumed begins where it continues.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1)
        >>> steps, values = trainer.history.get("train/loss", ((), ()))
    """

    def __init__(self) -> None:
        self._curves: dict[str, _Curve] = {}

    def __getitem__(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        if name not in self._curves:
            raise KeyError(f"No row has {name!r}.{did_you_mean(name, self._curves)} Logged: {sorted(self._curves)}.")
        curve = self._curves[name]
        return np.array(curve.steps, np.int64), np.array(curve.values, np.float64)

    def __iter__(self) -> Iterator[str]:
        return iter(self._curves)

    def __len__(self) -> int:
        return len(self._curves)

    def __repr__(self) -> str:
        return f"History({ {name: len(curve.steps) for name, curve in self._curves.items()} })"

    def _repr_png_(self) -> bytes | None:
        """Return a picture for a notebook, None where there is nothing to draw or nothing to draw with."""
        if not self._curves:
            return None
        try:
            self.plot().savefig(picture := io.BytesIO(), format="png")
        except LoggerError:
            return None
        return picture.getvalue()

    def add(self, row: Mapping[str, float], step: int) -> None:
        """Take a row."""
        for name in row:  # without a call for each: a row may come with every step
            if name not in self._curves:
                self._curves[name] = _Curve()
            curve = self._curves[name]
            if curve.seen % curve.every == 0:
                curve.steps += (step,)
                curve.values += (row[name],)
            curve.seen += 1
            if curve.seen > MOST * curve.every:
                curve.steps = curve.steps[::2]
                curve.values = curve.values[::2]
                curve.every = 2 * curve.every

    def clear(self, step: int = 0) -> None:
        """Forget the rows from a step on."""
        for curve in self._curves.values():
            num_left = sum(at < step for at in curve.steps)
            del curve.steps[num_left:], curve.values[num_left:]
            curve.seen = num_left * curve.every
        self._curves = {name: curve for name, curve in self._curves.items() if curve.steps}

    def plot(self, names: Sequence[str] | None = None) -> Any:
        """Draw the curves, with those in one picture whose names end alike, such as `train/loss` and `val/loss`.

        The first curve of training has the same color in each picture, and so has that of validation; `loss_epoch`
        comes before `loss_step`, which has another color. Values above 0 that span more than a factor of 30 have a
        logarithmic axis.

        Args:
            names: Which metrics; None for all.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            ArgumentError: There is no metric.
            KeyError: A name was never logged.
            LoggerError: matplotlib is not installed.
        """
        matplotlib = check.import_package("matplotlib.figure", owner="History.plot", install="matplotlib")
        ticker = check.import_package("matplotlib.ticker", owner="History.plot", install="matplotlib")
        chosen = list(self) if names is None else list(names)
        if not chosen:
            raise ArgumentError("History.plot draws logged metrics. There is none: call self.log in a step.")
        pictures = together(chosen)
        columns = min(len(pictures), 3)
        rows = -(-len(pictures) // columns)
        figure = matplotlib.Figure(figsize=(4.5 * columns, 3 * rows), layout="constrained")
        for k, group in enumerate(pictures.values()):
            axes = figure.add_subplot(rows, columns, k + 1)
            for name, color in colors(group).items():
                steps, values = self[name]
                axes.plot(steps, values, f"C{color}", label=name, marker="o" if len(steps) < 30 else "", markersize=4)
            every = np.concatenate([self[name][1] for name in group])
            every = every[np.isfinite(every)]
            if spans_decades(every):
                axes.set_yscale("log")
            axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
            axes.set_xlabel("step")
            axes.grid(alpha=0.25)
            axes.legend()
        return figure
