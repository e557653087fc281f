"""The last lines of a training: how it ended, where its files are, and how to continue."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlit import checks as check
from jaxlit.callbacks.best_so_far import kept_checkpoints
from jaxlit.callbacks.logger import Logger
from jaxlit.callbacks.profiler import Profiler
from jaxlit.callbacks.run_report import RunReport
from jaxlit.checkpoints.files import FOLDER
from jaxlit.reporting.terminal import absolute, clock, join, short_path

if TYPE_CHECKING:
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")


def closing_lines(trainer: "Trainer", *, seconds: float, error: BaseException | None, best: str) -> str:
    """Return the last lines of a training.

    Args:
        trainer: Its Trainer.
        seconds: How long it took.
        error: What ended it; None if nothing was raised.
        best: The best value of what is monitored, in words; "" if there is none.
    """
    epoch, compiling = trainer.current_epoch, sum(trainer.compile_seconds.values())
    took = clock(seconds) + (f" ({clock(compiling)} compiling)" if compiling >= 0.05 else "")
    ended = f"done {_count(epoch, 'epoch')}"
    if error is not None:
        ended = f"ended by {type(error).__name__} in epoch {epoch + 1}"
    elif trainer.interrupted:
        ended = f"interrupted in epoch {max(epoch, 1)}"
    lines = [join([ended, _count(trainer.global_step, "step"), took, best, trainer.stop_reason or ""])]
    kept = kept_checkpoints(trainer)
    checkpoints = [f"{short_path(Path(path))} ({', '.join(marks)})" for _, path, marks in kept if marks]
    reports, loggers, traces = (
        [_location(callback) for callback in trainer.callbacks if isinstance(callback, kind)]
        for kind in (RunReport, Logger, Profiler)
    )
    folders = [x for x in loggers if x is not None and Path(x).is_dir()]  # of event files, which a page shows
    reports += [x for x in loggers if x not in folders]
    listed = {"checkpoint": checkpoints, "report": reports, "logs": folders, "trace": traces}
    for name, places in listed.items():
        if parts := [x if "://" in x or name == "checkpoint" else str(short_path(Path(x))) for x in places if x]:
            lines.append(join([f"  {name:<10}  {parts[0]}", *parts[1:]], indent=" " * 14))
    if checkpoints and (resume := _resume(trainer, cut=error is not None or trainer.interrupted)):
        lines.append(f"  {'resume':<10}  {resume}")
    return "\n".join(lines)


def _location(callback: Any) -> str | None:
    """Return where a callback's files are; None if it fails to say so, which does not end training."""
    try:
        return callback.location
    except Exception as error:
        if not callback.may_fail:
            raise
        _logger.warning("%s.location failed: %r.", type(callback).__name__, error)
        return None


def _resume(trainer: "Trainer", *, cut: bool) -> str:
    """Return how to continue; a training that has reached its limit ends at once, unless that is larger.

    That is "" if only weights were saved.
    """
    limit, callbacks = "", [c for c in trainer.checkpoint_callbacks if not getattr(c, "save_weights_only", False)]
    if not (paths := [Path(callback.last_model_path) for callback in callbacks if callback.last_model_path]):
        return ""
    if not cut and trainer.stop_reason is None:
        limit = "max_steps" if trainer.max_steps == trainer.global_step else ""
        limit = "max_epochs" if trainer.max_epochs == trainer.current_epoch else limit
    if trainer.resume == "auto":
        return "run the same command" + (f" with a larger {limit}" if limit else " again")
    in_run = any(path.parent == absolute(trainer.run_dir) / FOLDER for path in paths)
    place, root = short_path(trainer.run_dir if in_run else paths[0]), trainer.default_root_dir
    given = f"default_root_dir={root!r}, resume='auto'" if check.is_url(root) else f"resume={str(place)!r}"
    # Not as a call: the Trainer takes its limit again, and what else it was given.
    return f"pass {given}{f' and a larger {limit}' if limit else ''}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
