"""Back to the last checkpoint after a step that was not finite, without the batches in between."""

import contextlib
import logging

from jaxlit.checkpoints.files import Checkpoint, read
from jaxlit.checkpoints.writing import Saving
from jaxlit.errors import CheckpointError, NonFiniteError
from jaxlit.loop.restore import load_engine
from jaxlit.loop.run import Run
from jaxlit.loop.snapshot import load_position

_logger = logging.getLogger("jaxlit")
_MOST = 3  # times from one checkpoint: more is no bad batch, but a training that diverges


def roll_back(run: Run, what: str) -> None:
    """Give a run the weights, the optimizer and the step of its newest checkpoint; the data continue where they are.

    Args:
        run: The run, whose newest steps were not finite.
        what: What happened, for messages.

    Raises:
        NonFiniteError: There is no checkpoint yet, or training diverges from it again and again.
    """
    engine, position = run.engine, run.position
    if (found := _newest(run)) is None:
        raise NonFiniteError(
            f"{what} There is no checkpoint yet to go back to. Lower the learning rate, or write one earlier with "
            "ModelCheckpoint(every_n_train_steps=...)."
        )
    count = run.rollbacks[found.path.name] = run.rollbacks.get(found.path.name, 0) + 1
    if count > _MOST:
        raise NonFiniteError(
            f"{what} Training went back to {found.path} {_MOST} times, and diverges from there on any data. Lower the "
            "learning rate, or clip gradients."
        )
    load_engine(engine, found)
    was = load_position(found.state)
    _logger.warning("%s Back to step %d of %s; the batches since then are left out.", what, was.global_step, found.path)
    within = position.go_back(was)
    engine.state.count_from(was.global_step, position.epoch, position.batch_idx)
    engine.clear_window()
    if not within:
        engine.clear_sums()
    run.hooks.log.take_window()
    run.results.history.clear(was.global_step)
    run.pending, run.seen_bad_step = None, -1
    run.starts.clear()
    run.tracing.seen.clear()
    run.tracing.seek(was.global_step)
    if run.hooks.live is not None:
        run.hooks.live.stale = True
    run.hooks("on_load_checkpoint", dict(found.state))


def _newest(run: Run) -> Checkpoint | None:
    """Return the newest checkpoint of this training that is whole; others in a folder may be of another training."""
    for written in reversed(run.written):
        with contextlib.suppress(CheckpointError):  # it failed, was damaged, or was deleted for a better one
            if not isinstance(written, Saving):
                return read(written)
            written.wait()  # it may still be being written
            return read(written.path)
    return None
