"""The metrics of a run as callbacks see them, and what hooks log on the host."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from jaxlit.core.device_sums import StepRow, StepTable, Table, loss_of
from jaxlit.core.log import Metric, active_collector
from jaxlit.distributed.exchange import fetch
from jaxlit.errors import StateError, did_you_mean
from jaxlit.loop.history import History

# A row that is not yet read: the step's table (None if only hooks have values; see `fetch`), what hooks logged, and
# the step.
Row = tuple[Any, Mapping[str, Any], int]
_loss_of = jax.jit(loss_of)  # one dispatch
_NO_STEPS = StepTable(Table([]), (), guarded=False)


@dataclass(frozen=True)
class Slot:
    """One name in the metric mappings."""

    metric: Metric
    value: Any  # a float, a () array, or a function that returns one of them
    callback: bool = True  # shows in callback_metrics
    logged: bool = True  # shows in logged_metrics and progress_bar_metrics, if the metric does
    number: int | None = None  # which value of all this is; None for one that every step changes

    def __float__(self) -> float:
        value = self.value() if callable(self.value) else self.value
        return float(value)  # type: ignore[arg-type]


class MetricView(Mapping[str, float]):
    """A read-only mapping of metrics; a value comes from the device when its key is read."""

    def __init__(self, slots: Mapping[str, Slot], shows: Callable[[Slot], bool]) -> None:
        self._slots = slots
        self._shows = shows

    def version(self, name: str) -> int | None:
        """Return a number that is another for each new value of a metric; None for one that every step changes."""
        return self._slots[name].number

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
    """The metrics of a run as callbacks see them.

    `latest` is the newest training step's table, still on device: storing it is all that a step pays. `newest_loss` is
    the loss of the epoch's newest row, or a function that returns the mean of the epoch that has ended. `pending` are
    the rows of the dispatch before, `rates_in` the rows that a callback wants learning rates in, "step" or "epoch".
    """

    def __init__(self) -> None:
        self.latest: Any = None
        self.newest_loss: float | Callable[[], float] | None = None
        self.pending = list[Row]()
        self.rates_in: str | None = None
        self._shows_loss = False
        self.history = History()
        self._layout = _NO_STEPS
        self._newest_read: tuple[Any, StepRow | None] = (None, None)  # of a step: on the device, and on the host
        self._slots: dict[str, Slot] = {}
        self._count = 0  # values of epochs put here
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
                read = lambda i=i: table.read(fetch(values))[i]  # noqa: E731
                self.put_step(metric, read, suffix(metric), evaluating=True)

    def put_step(self, metric: Metric, value: Any, suffix: str = "", *, evaluating: bool = False) -> None:
        """Show the value of a step; that of an evaluation step is not in `callback_metrics`, as in Lightning."""
        self._slots[metric.step_name + suffix] = Slot(metric, value, callback=not evaluating)
        if metric.on_epoch and not evaluating:
            self._slots[metric.name + suffix] = Slot(metric, value, logged=False)

    def put_epoch(self, metric: Metric, value: Any, suffix: str = "") -> None:
        """Show the value of an epoch."""
        self._count += 1
        self._slots[metric.epoch_name + suffix] = Slot(metric, value, number=self._count)
        if metric.on_step:
            self._slots[metric.name + suffix] = Slot(metric, value, logged=False, number=self._count)

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
        return [[k, asdict(s.metric), float(s), s.callback, s.logged, s.number] for k, s in self._slots.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Show what `state_dict` returned."""
        for name, metric, value, callback, logged, number in state:
            self._slots[name] = Slot(Metric(**metric), float(value), bool(callback), bool(logged), number)
            self._count = max(self._count, number or 0)

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


class Outputs(Mapping[str, Any]):
    """The `outputs` of a training step, device arrays; the loss is computed when it is asked for.

    Args:
        logs: The step's array, see `StepTable`.
        loss: The loss of the batch in each replica, if the table is of a window.
        outputs: What else the step returned.
    """

    def __init__(self, logs: jax.Array, loss: jax.Array | None, outputs: dict[str, Any]) -> None:
        self.logs = logs
        self._loss = loss
        self._outputs = outputs

    def __getitem__(self, name: str) -> Any:
        if name != "loss":
            return self._outputs[name]
        return _loss_of(self.logs) if self._loss is None else self._loss.mean()

    def __iter__(self) -> Iterator[str]:
        return iter(("loss", *self._outputs))

    def __len__(self) -> int:
        return 1 + len(self._outputs)
