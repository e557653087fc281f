"""Where checkpoints are taken: between two batches, and after an epoch, where nothing of a batch is at hand."""

import logging

from jaxlit.loop.hooks import Hook
from jaxlit.loop.run import Run
from jaxlit.notes import add_note

_logger = logging.getLogger("jaxlit")


def safe_point(run: Run, hook: Hook | None, *, epoch_over: bool, training_over: bool) -> None:
    """Call `on_safe_point`, and write the checkpoints that other hooks have requested.

    Only a validation that a stop has cut may be left to do.
    """
    run.is_safe = True
    if hook is not None:
        hook(epoch_over, training_over)
    write_requested(run)
    run.is_safe = False


def write_requested(run: Run) -> None:
    """Write the checkpoints that hooks have requested since the last safe point."""
    while run.requested:
        run.requested.pop(0)()


def end_at_safe_point(run: Run) -> None:
    """Make where an error ends training a safe point: after the newest step, or before the epoch that begins."""
    position = run.position
    by_clock = run.times.has_interval and run.times.team.size > 1  # on which the processes would have to agree
    if not position.validated:
        position.validated = by_clock or not (run.data.validates and run.validation_is_due(position.over))
    run.is_safe = True


def write_requested_at(run: Run, error: BaseException) -> None:
    """Write the requested checkpoints where an error has ended training, unless a user ends it at once."""
    # The other processes may be elsewhere, and would not take part.
    if isinstance(error, Exception) and not run.times.team.over:
        while run.requested:
            try:
                run.requested.pop(0)()
            except Exception as problem:
                add_note(error, f"A checkpoint that a hook had requested was not written: {problem!r}")
    if run.requested:
        text = "%d checkpoints that hooks had requested were not written: training ended at once."
        _logger.warning(text, len(run.requested))
