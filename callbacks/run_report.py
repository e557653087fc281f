"""`RunReport`, which writes a page of HTML about a training."""

import contextlib
import csv
import logging
import time
import traceback
from html import escape
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.csv_logger import CSVLogger
from jaxlit.callbacks.logger import facts_of
from jaxlit.callbacks.monitor import monitored, saved_checkpoints
from jaxlit.reporting import curves as html
from jaxlit.reporting.curves import Curve, colors, curves_svg, together
from jaxlit.reporting.secrets import redacted
from jaxlit.reporting.terminal import absolute, clock, short_path
from jaxlit.texts import count, to_json

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")


class RunReport(Callback):
    """Write a page of HTML into the run's folder when a fit ends, also by an error or an interrupt.

    It contains the curves of all metrics, their last and best values, hyperparameters and the Trainer's arguments
    without secrets, versions, devices, checkpoints, and the text of `trainer.explain()`. The page is one file that
    loads nothing else. A training that is resumed shows its curves from the beginning, if a CSVLogger keeps its rows.
    A page that cannot be written is a warning.

    Args:
        filename: The file's name in `trainer.run_dir`.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=jl.callbacks.RunReport())
    """

    runs_last = True
    in_fast_dev_run = False

    def __init__(self, filename: str = "report.html") -> None:
        self.filename, self.exclusive = filename, (filename, "page")
        self.location: str | None = None
        self._error: BaseException | None = None
        self._began = ""  # when training began; "" if no page is written

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Remember when training began."""
        self.location = self._error = None
        self._began = time.strftime("%Y-%m-%d %H:%M:%S %Z") if trainer.is_global_zero else ""

    def on_exception(self, trainer: "Trainer", module: "TrainModule", exception: BaseException) -> None:
        """Remember the error."""
        self._error = exception

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str = "fit") -> None:
        """Write the page, unless it is written: all checkpoints exist by now, also that of an error."""
        if not self._began:
            return
        path = absolute(trainer.run_dir) / self.filename
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_page(trainer, module, self._error, self._began), encoding="utf-8")
            self.location = str(path)
        except Exception as error:
            _logger.warning("RunReport cannot write %s: %r. Nothing else is lost.", path, error)
        self._began = ""

    on_fit_end = teardown


def _page(trainer: "Trainer", module: "TrainModule", error: BaseException | None, began: str) -> str:
    curves, modes, facts = _curves(trainer), monitored(trainer), redacted(facts_of(trainer, module))
    arguments, num_params = facts.pop("trainer"), facts.pop("num_params")
    defaults = {p.name: str(to_json(p.default, lenient=True)) for p in signature(type(trainer)).parameters.values()}
    arguments = {name: value for name, value in arguments.items() if str(value) != defaults.get(name)}
    state, kind = ("interrupted", "warn") if trainer.interrupted else ("done", "good")
    if error is not None:
        state, kind = f"ended by {type(error).__name__}", "bad"
    explained = None
    with contextlib.suppress(Exception):  # the devices may be what failed
        explained = trainer.explain()
    reason = f" · {trainer.stop_reason}" if trainer.stop_reason else ""
    counts = {"epochs": f"{trainer.current_epoch:,}", "optimizer steps": f"{trainer.global_step:,}"}
    counts |= ({} if explained is None else {"time": clock(explained.seconds)}) | {"parameters": count(num_params)}
    bests = {name: _best(curves[name], mode) for name, mode in modes.items() if name in curves}
    if best := next(((name, point) for name, point in bests.items() if point), None):
        counts[f"best {best[0]}"] = f"{best[1].value:.4g}"
    figures = ""
    for title, names in together(curves).items():
        if svg := curves_svg(title, {name: curves[name] for name in names}):
            key = '<span><i style="background:var(--c{})"></i>{}</span>'
            legend = "".join(key.format(color, escape(name)) for name, color in colors(names).items())
            figures += f"<figure><figcaption>{legend}</figcaption>{svg}</figure>"
    tile = '<div class="tile"><b>{}</b><span>{}</span></div>'
    tiles = "".join(tile.format(escape(x), escape(name)) for name, x in counts.items())
    title = f"{type(module).__name__} · {trainer.run_dir.name}"
    state = f'<span class="state {kind}">{state}</span>'
    return html.page(
        title,
        [
            f'<h1>{escape(title)}</h1><p class="sub">{state}{escape(f" · began {began}{reason}")}</p>',
            f'<div class="tiles">{tiles}</div>',
            "" if error is None else html.text("Error", "".join(traceback.format_exception_only(error))),
            f'<h2>Curves</h2><div class="curves">{figures}</div>' if figures else "",
            html.table("Metrics", ("metric", "last", "least", "largest"), _metrics(curves, modes)),
            html.table("Checkpoints", ("folder", "which", "score"), _checkpoints(trainer)),
            html.pairs("Hyperparameters", redacted(module.hparams.readable())),
            html.pairs("Environment", facts),
            html.pairs("Trainer, where it is not the default", arguments),
            "" if explained is None else html.text("Time, state and the cost of a step", str(explained)),
        ],
    )


def _curves(trainer: "Trainer") -> dict[str, Curve]:
    """Return the rows of a CSV file, which has the rows before a resume as well, or those of the history."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger.path is not None:
            with contextlib.suppress(OSError, ValueError, LookupError):
                with logger.path.open(newline="", encoding="utf-8") as file:
                    rows = list(csv.DictReader(file))
                curves = dict[str, Curve]()
                for name in list(rows[0])[2:]:  # after the step and the epoch
                    if points := [(float(row["step"]), float(row[name])) for row in rows if row[name]]:
                        steps, values = zip(*points, strict=True)
                        curves[name] = np.array(steps, int), np.array(values)
                return curves
    return {name: trainer.history[name] for name in trainer.history}


class _Point(NamedTuple):
    value: float
    step: int


def _best(curve: Curve, mode: str) -> _Point | None:
    """Return the smallest ("min") or largest ("max") finite value and its step; None without a finite value."""
    steps, values = curve[0], np.ma.masked_invalid(curve[1])
    i = values.argmin() if mode == "min" else values.argmax()
    return _Point(values[i], steps[i]) if values.count() else None


def _metrics(curves: dict[str, Curve], modes: dict[str, str]) -> list[list[html.Cell]]:
    rows = []
    for name, curve in curves.items():
        cells = [(name, ""), html.number(curve[1][-1])]
        for mode in ("min", "max"):
            best = _best(curve, mode)
            is_monitored = modes.get(name) == mode
            cells.append(html.number(best.value, f" at {best.step:,}", best=is_monitored) if best else ("-", "n"))
        rows.append(cells)
    return rows


def _checkpoints(trainer: "Trainer") -> list[list[html.Cell]]:
    rows = []
    for callback, path, marks in saved_checkpoints(trainer):
        score = getattr(callback, "best_k_models", {}).get(path)
        cell = ("-", "n") if score is None else html.number(score, f" {callback.monitor}")
        rows.append([(str(short_path(Path(path))), ""), (", ".join(marks) or "kept", ""), cell])
    return rows
