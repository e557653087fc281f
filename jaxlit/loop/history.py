"""What was logged, kept to be looked at."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlit import checks as check
from jaxlit.errors import ArgumentError, LoggerError, did_you_mean
from jaxlit.reporting.curves import colors, spans_decades, together

MOST = 10_000  # values of a metric


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
