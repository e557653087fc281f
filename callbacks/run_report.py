"""A page that tells of a whole training."""

import contextlib
import csv
import inspect
import logging
import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.csv_logger import CSVLogger
from jaxlit.callbacks.wandb_config import config_of, monitored
from jaxlit.errors import ArgumentError, LoggerError
from jaxlit.reporting import html_page as html
from jaxlit.reporting.curves import curves_svg, together
from jaxlit.reporting.terminal import absolute, clock, short_path
from jaxlit.table import count

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")

_MEASURED = ("device/", "host/", "train/samples", "train/lengths", "train/mfu")

_Curves = dict[str, tuple[np.ndarray, np.ndarray]]


class RunReport(Callback):
    """Write a page of HTML into the run's folder when a fit ends, also by an error or an interrupt.

    It has the curves of all metrics, their last and best values, hyperparameters and the Trainer's arguments without
    secrets, versions, devices, checkpoints, and what `trainer.explain()` tells. It is one file that loads nothing: it
    can be sent or kept. A training that is resumed shows its curves from the beginning, if a CSVLogger keeps its rows.

    Args:
        filename: The file's name in `trainer.run_dir`.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(max_epochs=1, callbacks=jl.callbacks.RunReport())
    """

    runs_last = True
    in_fast_dev_run = False

    def __init__(self, filename: str = "report.html") -> None:
        allowed = isinstance(filename, str) and Path(filename).name == filename and filename.endswith(".html")
        check.require(allowed, "filename", filename, "takes a file name that ends in .html", owner="RunReport")
        self.filename = filename
        self.location: str | None = None
        self._error: BaseException | None = None
        self._open = False
        self._began = ""

    def setup(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Begin again.

        Raises:
            ArgumentError: Another report writes to the same file.
        """
        same = [c for c in trainer.callbacks if isinstance(c, RunReport) and c.filename == self.filename]
        if len(same) > 1:
            raise ArgumentError(
                f"The callbacks hold two RunReports that write to {self.filename}. Leave one of them out, or give it "
                "another filename."
            )
        self._error, self._open = None, False

    def on_fit_start(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Make the run's folder.

        Raises:
            LoggerError: It cannot be made.
        """
        self._began, self._open = time.strftime("%Y-%m-%d %H:%M:%S %Z"), trainer.is_global_zero
        if not self._open:
            return
        path = absolute(trainer.run_dir) / self.filename
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LoggerError(
                f"RunReport writes to {path}, and the folder cannot be made: {error}. Pass another "
                "Trainer(default_root_dir=...), or leave it out of the callbacks."
            ) from error
        self.location = str(path)

    def on_fit_end(self, trainer: "Trainer", module: "TrainModule") -> None:
        """Write the page: the checkpoints are written by now."""
        self._write(trainer, module)

    def on_exception(self, trainer: "Trainer", module: "TrainModule", exception: BaseException) -> None:
        """Note the error."""
        self._error = exception

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Write the page after an error, when its checkpoint is known."""
        self._write(trainer, module)

    def _write(self, trainer: "Trainer", module: "TrainModule") -> None:
        if not self._open or self.location is None:
            return
        self._open, path = False, Path(self.location)
        try:
            text = report(trainer, module, self._error, self._began)
            temporary = path.with_name(f"{path.name}.tmp")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
        except Exception as error:  # nothing of the training is lost
            self.location = None
            _logger.warning("RunReport cannot write %s: %r. Nothing else is lost.", path, error)


def report(trainer: "Trainer", module: "TrainModule", error: BaseException | None, began: str) -> str:
    """Return the page of a training.

    Args:
        trainer: Its Trainer.
        module: Its module.
        error: What ended it; None if nothing was raised.
        began: When it began, in words.
    """
    curves, config, watched = _curves(trainer), config_of(trainer, module, {}), monitored(trainer)
    hparams = {name: config[name] for name in module.hparams if name in config}
    given = config["jaxlit/trainer"] if "trainer" in hparams else config["trainer"]
    defaults = {p.name: p.default for p in inspect.signature(type(trainer).__init__).parameters.values()}
    chosen = {name: value for name, value in given.items() if str(value) != str(defaults.get(name))}
    state, kind = "done", "good"
    if error is not None:
        state, kind = f"ended by {type(error).__name__}", "bad"
    elif trainer.interrupted:
        state, kind = "interrupted", "warn"
    explained = None
    with contextlib.suppress(Exception):  # the devices may be what failed
        explained = trainer.explain()
    reason = f" · {trainer.stop_reason}" if trainer.stop_reason else ""
    seen = {"epochs": f"{trainer.current_epoch:,}", "optimizer steps": f"{trainer.global_step:,}"}
    seen |= {} if explained is None else {"time": clock(explained.seconds)}
    num_params = config["jaxlit/num_params" if "num_params" in hparams else "num_params"]
    seen |= {"parameters": count(num_params)} | _best(watched, curves)
    pictures = {
        title: (curves_svg(title, {name: curves[name] for name in names}), names)
        for title, names in together(sorted(curves, key=_is_measured)).items()
    }
    return html.page(
        f"{trainer.run_dir.name} · {type(module).__name__}",
        [
            html.heading(f"{type(module).__name__} · {trainer.run_dir.name}", state, kind, f" · began {began}{reason}"),
            html.tiles(seen),
            "" if error is None else html.text("Error", "\n".join([repr(error), *getattr(error, "__notes__", [])])),
            html.figures("Curves", pictures),
            html.table("Metrics", ("metric", "last", "least", "largest"), _metrics(curves, watched)),
            html.table("Checkpoints", ("folder", "which", "score"), _checkpoints(trainer)),
            html.pairs("Hyperparameters", hparams),
            html.pairs("Environment", _environment(trainer, config)),
            html.pairs("Trainer, where it is not the default", chosen),
            html.folded(html.pairs("Trainer, the rest", {k: v for k, v in given.items() if k not in chosen})),
            ""
            if explained is None
            else html.text("Where the time went, how the state lies, what a step costs", str(explained)),
        ],
    )


def _is_measured(name: str) -> bool:
    """Tell what callbacks have measured, whose curves come last."""
    return name.startswith(_MEASURED) or name.endswith("_per_sec")


def _curves(trainer: "Trainer") -> _Curves:
    """Return the rows of a CSV file, which has those before a resume as well, or the history."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger) and logger.path is not None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                with logger.path.open(newline="") as file:
                    rows = list(csv.DictReader(file))
                names = [name for name in (rows[0] if rows else {}) if name not in ("step", "epoch")]
                return {name: _column(rows, name) for name in names}
    return {name: trainer.history[name] for name in trainer.history}


def _column(rows: list[dict[str, str]], name: str) -> tuple[np.ndarray, np.ndarray]:
    found = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
    return np.array([step for step, _ in found], np.int64), np.array([value for _, value in found], np.float64)


def _best(watched: dict[str, str], curves: _Curves) -> dict[str, str]:
    """Return the best value of what the first callback watches, by its name."""
    for name, mode in watched.items():
        if name in curves and np.isfinite(values := curves[name][1]).any():
            at = int(np.nanargmin(values) if mode == "min" else np.nanargmax(values))
            return {f"best {name}": f"{values[at]:.4g}"}
    return {}


def _metrics(curves: _Curves, watched: dict[str, str]) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for name, (steps, values) in curves.items():
        row: list[object] = [name, html.number(values[-1])]
        for mode, best_of in (("min", np.nanargmin), ("max", np.nanargmax)):
            if not np.isfinite(values).any():
                row.append(html.Cell("-", "n"))
                continue
            at = int(best_of(np.where(np.isfinite(values), values, np.nan)))
            row.append(html.number(values[at], f" at {steps[at]:,}", best=watched.get(name) == mode))
        rows.append(tuple(row))
    return rows


def _checkpoints(trainer: "Trainer") -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for callback in trainer.checkpoint_callbacks:
        best = callback.best_model_path if callback.monitor is not None else ""
        scores: dict[str, Any] = dict(callback.best_k_models)
        for path in dict.fromkeys(filter(None, (best, *scores, callback.last_model_path))):
            marks = ", ".join(m for m, p in (("best", best), ("last", callback.last_model_path)) if p == path)
            score = scores.get(path)
            shown = html.Cell("-", "n") if score is None else html.number(float(score), f" {callback.monitor}")
            rows.append((str(short_path(Path(path))), marks or "kept", shown))
    return rows


def _environment(trainer: "Trainer", config: dict[str, Any]) -> dict[str, Any]:
    mesh, known = trainer.strategy.mesh, config.get("jaxlit/versions", config.get("versions", {}))
    versions = known if isinstance(known, dict) else {}
    return {
        "devices": f"{mesh.size} x {mesh.devices.flat[0].device_kind}",
        "processes": jax.process_count(),
        "strategy": trainer.strategy.describe(),
        "precision": trainer.precision,
        "versions": versions | {"numpy": np.__version__, "Python": platform.python_version()},
        "system": platform.platform(),
        "folder": str(absolute(trainer.run_dir)),
    }
