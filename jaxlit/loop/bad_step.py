"""Back to the last good state after steps that were not finite, and a second look at the first of them."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlit.checkpoints.files import read
from jaxlit.data.intake import named_leaves
from jaxlit.engine.engine import Engine
from jaxlit.errors import NonFiniteError
from jaxlit.loop.restore import Resume, load_engine
from jaxlit.loop.rows import check_finite
from jaxlit.loop.run import Run, Start

_MOST = 4096  # optimizer steps between looks whose places are kept
_SHOWN = 5  # rows that are named


def note_start(run: Run) -> None:
    """Note where the optimizer step begins that comes next: it may not be finite, which is known later."""
    if len(run.starts) >= _MOST:  # nothing is logged, and so nothing was looked at
        check_finite(run)
    at, logged = run.position, run.hooks.log.so_far()
    run.starts.append(Start(at.global_step, at.batch_idx, at.filled, at.data, run.results.latest, logged))
    if run.engine.window_start is not None:
        run.engine.window_start.keep()


def go_back(run: Run, error: BaseException) -> None:
    """Give a run that an error has ended the place of its weights: before the first step that was not finite, if any.

    Args:
        run: The run.
        error: The error. If it is that of the step, it is told what a second look at the step's batches finds.
    """
    engine, position = run.engine, run.position
    if jax.process_count() > 1 and not isinstance(error, NonFiniteError):
        return  # the others may be elsewhere: reading the mark would wait for a step that they never take
    if engine.nan_policy != "raise" or not engine.state.is_complete:
        return
    if not (isinstance(error, Exception) or engine.state.is_ready):
        return  # whoever ends training at once waits for nothing
    bad = engine.bad_step()
    after = [start for start in run.starts if start.step >= bad >= 0]
    if not after or after[0].step != bad:
        return
    start, end = after[0], after[1].batch_idx if len(after) > 1 else position.batch_idx
    step, first, restored = start.step, start.batch_idx, False
    if start.filled and run.resume is not None:  # what the window held is in the checkpoint, and nowhere else
        restored = _restore(engine, run.resume)
    else:
        engine.go_back(step, position.epoch, first)
    position.stand_before(step, first, start.filled, start.data)
    run.results.latest = run.results.latest if start.latest is None else start.latest
    run.hooks.log.go_back(start.logged)
    run.starts.clear()
    run.pending = run.evaluation = None
    run.tracing.forget(step)
    if run.hooks.live is not None:
        run.hooks.live.stale = True
    run.not_finite = {"step": step, "epoch": position.epoch, "batches": [first, end], "optimizer": []}
    if isinstance(error, NonFiniteError):
        text, took = _look_again(run, first, end)
        before = run.resume.checkpoint.state.get("not_finite") if run.resume is not None else None
        again = before is not None and before["step"] == step
        second = "\nIt is the second time: training was resumed right before this step." * again
        error.args = (f"{error}{text}{second}",)
    else:
        took = engine.look.took(None)
    run.not_finite["optimizer"] = [] if restored else took


def _restore(engine: Engine, resume: Resume) -> bool:
    """Load the checkpoint that training continued from; return whether the optimizer's state came with it."""
    checkpoint = read(resume.checkpoint.path)  # it may be gone or damaged by now
    load_engine(engine, checkpoint, strict=resume.strict, reset_optimizer=resume.reset_optimizer)
    return not resume.reset_optimizer


def _look_again(run: Run, first: int, end: int) -> tuple[str, list[str]]:
    """Run the batches of a step once more on the last good parameters.

    Returns:
        What was found, and the arrays of the optimizer's state that have taken the step.
    """
    look, several = run.engine.look, jax.process_count() > 1
    if several or run.control.interrupted:  # the processes may be elsewhere; whoever interrupts waits for the end
        return "", look.took(None)
    which = f"Batch {first}" if end == first + 1 else f"Batches {first} to {end - 1}"
    try:
        hosts, batches = _drawn(run, end - first)
        if not hosts:
            return f"\n{which} could not be run again: the loader cannot be set back to it.", look.took(None)
        found = look(batches)
    except Exception as error:
        return f"\n{which} could not be run again: {error!r:.300}", look.took(None)
    bad = [i for i, (loss, names) in enumerate(found) if names or not np.isfinite(loss)]
    if not bad:
        losses = ", ".join(f"{loss:.4g}" for loss, _ in found)
        held = "the window was not finite where the checkpoint was taken, " * (run.position.filled > 0)
        return (
            f"\n{which}, run again on these parameters, gave finite numbers (loss {losses}): {held}the loader gave "
            "other data, the step draws other numbers each time, or gradients overflow when they are added up.",
            look.took(None),
        )
    (loss, names), rows = found[bad[0]], _not_finite(hosts[bad[0]])
    took = [] if any(not np.isfinite(x) for x, _ in found) else look.took({x for _, names in found for x in names})
    gradients = names[0] + f" and {len(names) - 1} more" * (len(names) > 1) if names else "none"
    return (
        f"\nBatch {first + bad[0]}, run again on these parameters, gave the same: loss {loss:.4g}, gradients that are "
        f"not finite: {gradients}. Not finite in the batch: {'; '.join(rows) or 'nothing'}.",
        took,
    )


def _drawn(run: Run, count: int) -> tuple[list[Any], list[Any]]:
    """Draw the next batches of the position; returns them as hooks see them, and placed."""
    assert run.train is not None
    source, position = run.train[0], run.position
    run.feeder.close()  # what it draws ahead must not continue meanwhile
    intake = run.loaders.intake_of(source)
    pairs = [intake(batch) for batch in source.again(position.epoch, position.data, count)]
    return [host for host, _ in pairs], [run.engine.strategy.shard_batch(batch) for _, batch in pairs]


def _not_finite(batch: Any) -> Iterable[str]:
    """Return which leaves of a batch hold numbers that are not finite, and in which rows."""
    found = []
    for name, leaf in named_leaves(batch):
        x = np.asarray(leaf)
        if not jnp.issubdtype(x.dtype, jnp.inexact) or np.isfinite(x).all():
            continue
        rows = np.nonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))[0].tolist() if x.ndim else []
        shown = ", ".join(map(str, rows[:_SHOWN])) + ", ..." * (len(rows) > _SHOWN)
        found.append(f"{name}, row{'s' * (len(rows) > 1)} {shown} of {len(x)}" if rows else name)
    return found
