"""The result of `jl.fit_many`: the members, their metrics, and their modules."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit import checks as check
from jaxlit.callbacks.monitor import check_monitor, no_such_metric
from jaxlit.errors import ArgumentError
from jaxlit.populations.members import Member, argument_text
from jaxlit.texts import table
from jaxlit.variables import merge


class Row(NamedTuple):
    """What one member logged after a step."""

    member: int
    step: int  # the index of the optimizer step that made the values
    epoch: int
    metrics: dict[str, float]


@dataclass
class Status:
    """How far one member is."""

    metrics: dict[str, float] = field(default_factory=dict)  # the newest value of each
    ended: str | None = None  # why it no longer trains
    steps: int | None = None  # the optimizer steps that its weights have taken; None while it trains
    finite: bool = True  # whether all of its steps were
    wait_count: int = 0  # checks of `early_stopping` since the last improvement
    best_score: float | None = None  # the best value that `early_stopping` has seen; None before the first check

    def end(self, reason: str, steps: int, *, finite: bool = True) -> None:
        """End the member's training: its weights stay as they are."""
        self.ended, self.steps, self.finite = reason, steps, finite


class Population:
    """The members that `jl.fit_many` has trained.

    Print it for a table with a line for each member.

    Args:
        members: The members.
        leaves: Their arrays, each with a first dim of members.
        statuses: How far each is.
        rows: What they have logged.
        step: The optimizer steps taken.

    Attributes:
        variations: The arguments of each member's module.
        metrics: The newest value of each metric, by member.
        ended: Why a member ended before the others, by member; None for those that trained to the end.
    """

    def __init__(
        self, members: Sequence[Member], leaves: list[jax.Array], statuses: Sequence[Status], rows: list[Row], step: int
    ) -> None:
        self._members, self._leaves, self._statuses, self._rows, self._step = members, leaves, statuses, rows, step
        self.variations = [dict(member.variation) for member in members]
        self.metrics = [dict(status.metrics) for status in statuses]
        self.ended = [status.ended for status in statuses]

    def __len__(self) -> int:
        return len(self._members)

    def rows(self) -> list[dict[str, Any]]:
        """Return everything that was logged, a dict a row.

        Each has the member's index and variation, the index of the optimizer step, the epoch, and the metrics. A
        metric of the name of an argument takes its place, as the rate `lr` of the step does.
        """
        return [
            {"member": row.member, **self.variations[row.member], "step": row.step, "epoch": row.epoch, **row.metrics}
            for row in self._rows
        ]

    def table(self) -> list[dict[str, Any]]:
        """Return how each member ended, a dict each, for example for `pandas.DataFrame`.

        Each has the member's index, its variation, the optimizer steps of its weights, the newest value of each metric,
        and in "ended" why it ended before the others, or None.
        """
        return [
            {"member": i, **variation, "steps": self._step if status.steps is None else status.steps}
            | {name: x for name, x in status.metrics.items() if name not in variation}
            | {"ended": status.ended}
            for i, (variation, status) in enumerate(zip(self.variations, self._statuses, strict=True))
        ]

    def plot(self, names: Sequence[str] | None = None) -> Any:
        """Draw the curves of the members, a picture for each metric.

        Args:
            names: Which metrics; None for all.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            ArgumentError: There is no metric, or none of a name.
            LoggerError: matplotlib is not installed.
        """
        matplotlib = check.import_package("matplotlib.figure", owner="Population.plot", install="matplotlib")
        known = list(dict.fromkeys(name for row in self._rows for name in row.metrics))
        chosen = known if names is None else [names] if isinstance(names, str) else list(names)
        are_known = bool(chosen) and {*chosen} <= {*known}
        check.require(are_known, "names", names, f"takes names of {known}", owner="Population.plot")
        figure = matplotlib.Figure(figsize=(4.5 * len(chosen), 3), layout="constrained")
        for k, name in enumerate(chosen):
            axes = figure.add_subplot(1, len(chosen), k + 1, title=name, xlabel="step")
            for i, variation in enumerate(self.variations):
                points = [
                    (row.step, row.metrics[name]) for row in self._rows if row.member == i and name in row.metrics
                ]
                text = ", ".join(f"{x}={argument_text(value, 20)}" for x, value in variation.items())
                axes.plot(*np.reshape(points, (-1, 2)).T, f"C{i}", label=text, linewidth=1)
            axes.grid(alpha=0.25)
        if len(self) <= 12:
            texts = [x for axes in figure.axes for x in zip(*axes.get_legend_handles_labels(), strict=True)]
            lines = {text: line for line, text in texts}  # a member may have ended before the first value of one
            figure.legend(lines.values(), lines.keys(), loc="outside right", fontsize="small")
        return figure

    def best_index(self, metric: str, mode: str = "min") -> int:
        """Return the index of the member whose newest value of a metric is the best.

        A member that had a step which was not finite is never the best.

        Args:
            metric: The metric's name.
            mode: "min" if lower is better, else "max".

        Raises:
            LoggerError: No such metric was logged.
            ArgumentError: No member has a finite value of it.
        """
        metric, mode = check_monitor(metric, mode, owner="Population.best")
        known = {name for metrics in self.metrics for name in metrics}
        if metric not in known:
            raise no_such_metric("Population.best", metric, known)
        values = [metrics.get(metric, math.nan) for metrics in self.metrics]
        finite = [i for i, x in enumerate(values) if math.isfinite(x) and self._statuses[i].finite]
        if not finite:
            raise ArgumentError(f"Population.best({metric!r}): no member has a finite value. Print the population.")
        return (min if mode == "min" else max)(finite, key=values.__getitem__)

    def best(self, metric: str, mode: str = "min") -> Any:
        """Return the module of the member whose newest value of a metric is the best; see `best_index`."""
        return self.module(self.best_index(metric, mode))

    def module(self, index: int) -> Any:
        """Return a member's module with its trained weights: an ordinary module, on one device.

        Raises:
            ArgumentError: There is no such member.
        """
        index = check.integer("index", index, low=0, owner="Population.module")
        check.require(index < len(self), "index", index, f"takes an int below {len(self)}", owner="Population.module")
        pure, spec = self._members[index].pure, self._members[index].training.spec
        leaves = [jnp.asarray(np.asarray(self._leaves[i][index])) for i in spec.eval_index]
        _, *variables = spec.eval_layout.unflatten(leaves)
        return merge(pure.graphdef, *variables)

    def __str__(self) -> str:
        arguments = list(dict.fromkeys(name for variation in self.variations for name in variation))
        metrics = list(dict.fromkeys(name for values in self.metrics for name in values if name not in arguments))
        lines = [["member", *arguments, "steps", *metrics, "ended"]]
        for i, status in enumerate(self._statuses):
            variation = self.variations[i]
            texts = [argument_text(variation[x], 20) if x in variation else "" for x in arguments]
            values = [f"{status.metrics[x]:.4g}" if x in status.metrics else "" for x in metrics]
            steps = self._step if status.steps is None else status.steps
            lines.append([str(i), *texts, str(steps), *values, status.ended or ""])
        return "\n".join(table(lines, texts=0))

    __repr__ = __str__
