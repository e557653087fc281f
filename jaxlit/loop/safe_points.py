"""Where checkpoints are taken: between two batches, and after an epoch, where nothing of a batch is at hand."""

import logging

from jaxlit.loop.hooks import Hook
from jaxlit.loop.run import Run

_logger = logging.getLogger("jaxlit")


def safe_point(run: Run, hook: Hook | None, *, epoch_over: bool, training_over: bool) -> None:
    """Call `on_safe_point`, and write the checkpoints that other hooks have asked for.

    Only a validation that a stop has cut may be left to do.
    """
    saves, run.hooks.deferred = run.hooks.deferred, None  # the hook writes its own at once
    if hook is not None:
        hook(epoch_over, training_over)
    for save in saves or ():
        save()
    run.hooks.deferred = []


def close_safe_points(run: Run) -> None:
    """Have checkpoints that hooks ask for wait."""
    run.hooks.deferred = []


def open_safe_points(run: Run) -> None:
    """Write the checkpoints that hooks have asked for since the last safe point; later ones are written at once."""
    saves, run.hooks.deferred = run.hooks.deferred, None
    for save in saves or ():
        save()


def end_at_safe_point(run: Run) -> None:
    """Make where an error ends training a safe point: after the newest step, or before the epoch that begins."""
    position = run.position
    if saves := run.hooks.deferred:
        text = "%d checkpoints that hooks had asked for were not written: training ended before the next safe point."
        _logger.warning(text, len(saves))
    run.hooks.deferred = None
    by_clock = run.times.has_interval and run.times.team.size > 1  # on which the processes would have to agree
    if not position.validated:
        position.validated = by_clock or not (run.data.validates and run.validation_is_due(position.over))
