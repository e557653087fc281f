"""Steps that were not finite: they are looked for, and a run goes back to before them."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxlit.checkpoints.files import Checkpoint, Resume, Saving, read
from jaxlit.control import Position
from jaxlit.data.batch_validator import batch_leaves
from jaxlit.engine.state import Hyperparams, more_infinite
from jaxlit.errors import CheckpointError, NonFiniteError
from jaxlit.loop.run import Run, Start
from jaxlit.loop.snapshot import load_engine
from jaxlit.texts import listed

_logger = logging.getLogger("jaxlit")

MOST_STARTS = 4096  # optimizer steps whose starts are kept between two checks
_MOST_ROLLBACKS = 3  # to one checkpoint: more is not a bad batch, but a training that diverges
_FINITE = " Checkpoints, if there are any, are finite: resume with another optimizer."
_MOST_ROWS = 5  # or arrays, that a message names


def check_finite(run: Run, *, params: bool = False) -> None:
    """Read the guard's mark, which waits for the device, and do what `nan_policy` says.

    With `params` look at the parameters too: an update may not be finite where the loss and the gradients are.
    """
    policy = run.settings.nan_policy
    if policy == "ignore":
        return
    bad = run.engine.bad_step()
    is_new = bad >= 0 and bad != run.unchecked.warned_of
    if (params or is_new) and (names := run.engine.state.not_finite()):
        what = _update_not_finite(run, bad if is_new else run.position.global_step)(names)
        if policy != "rollback":
            raise NonFiniteError(what + _FINITE)
        return roll_back(run, _checkpoint_before(run, what), what)
    if params:
        run.unchecked.finite_step = run.position.global_step
    if bad < 0:
        return run.settle(run.position.global_step)
    if not is_new:
        return None
    what = f"The loss or a gradient was NaN or infinite at optimizer step {bad} (epoch {run.position.epoch})."
    if policy == "skip":
        run.unchecked.warned_of = bad  # warned of once
        _logger.warning("%s The update was skipped.", what)
    elif policy == "rollback":
        roll_back(run, _checkpoint_before(run, what), what)
    else:
        raise NonFiniteError(
            f"{what} The parameters are still those before that step. Lower the learning rate, clip gradients, look at "
            "the batch (Trainer(debug=True) refuses one that holds NaN), or pass Trainer(nan_policy='skip')."
        )


def judge_later(run: Run, then: Callable[[], object]) -> Callable[[Mapping[str, float]], None]:
    """Return what refuses the parameters as they are now, given how many infinities each has, or calls `then`."""
    step, unchecked, before = run.position.global_step, run.unchecked, run.engine.state.infinities_at_start
    text = _update_not_finite(run, step)

    def judge(found: Mapping[str, float]) -> None:
        # An average may be infinite where its parameter was.
        counts = {name.removeprefix("evaluated.").removeprefix("module."): n for name, n in found.items()}
        if names := more_infinite(counts, before):
            raise NonFiniteError(text(names) + _FINITE)
        if run.settings.nan_policy in ("raise", "skip"):  # else nothing was looked at
            unchecked.finite_step = max(unchecked.finite_step, step)
        then()

    return judge


def _update_not_finite(run: Run, step: int) -> Callable[[list[str]], str]:
    """Return what says of an update that it was not finite, given the arrays that show it after `step` steps."""
    first, latest = run.unchecked.finite_step, run.results.latest
    since = f"since optimizer step {first}{f' or a later one before {step}' * (step > first + 1)}"
    rates = {} if latest is None else run.results.read(latest).rates
    numbers = ", ".join(f"{name}={x:.4g}" for name, x in {**rates, **Hyperparams(run.engine.state)}.items())

    def text(names: list[str]) -> str:
        return (
            f"Parameters hold NaN or infinity {since}: {listed(names, _MOST_ROWS)}. The losses and gradients before "
            "were finite: an update of the optimizer was not, or a hook has written them. "
            f"Newest step: {numbers or 'it keeps no rate'}. Look at the schedule's end, eps and hyperparam_dtype."
        )

    return text


def roll_back(run: Run, to: Checkpoint, why: str) -> None:
    """Return to a checkpoint of this training, while the data continue after the batches that were used."""
    engine = run.engine
    position = run.position
    load_engine(engine, Resume(to))
    was = Position(**to.state["position"])
    _logger.warning("%s Back to step %d of %s; the batches since then are left out.", why, was.global_step, to.path)
    # Optimizer steps count from there on; the batches since then stay used.
    same_epoch = was.epoch == position.epoch and not was.over
    position.global_step, position.filled = was.global_step, 0
    # The arrays count as their checkpoint does, but the batches since then stay used.
    engine.state.count_from(was.global_step, position.epoch, position.batch_idx)
    engine.clear_window()
    if not same_epoch:
        position.first_step = was.global_step
        engine.clear_sums()
    run.results.history.clear(was.global_step)
    run.results.steps_at_row = to.state.get("row", -1)
    run.hooks.log.take_window()
    run.unchecked.finite_step = was.global_step
    _forget_later(run)
    run.hooks("on_load_checkpoint", dict(to.state))  # last: a hook may read all of the above


def _forget_later(run: Run) -> None:
    """Forget what was logged and noted of the steps that are undone."""
    run.results.pending = []
    run.unchecked.warned_of = -1
    run.unchecked.starts.clear()
    run.tracing.forget(run.position.global_step)
    run.due.forget()
    if run.hooks.live is not None:
        run.hooks.live.stale = True


def _checkpoint_before(run: Run, what: str) -> Checkpoint:
    """Return the newest checkpoint of this training that verifies; others of a folder may be of another training."""
    newest = None
    for written in reversed(run.checkpoints.written):
        with contextlib.suppress(CheckpointError):  # it failed, was damaged, or was deleted for a better one
            if isinstance(written, Saving):
                written.wait()
            newest = read(written.path if isinstance(written, Saving) else written)
            break
    if newest is None:
        raise NonFiniteError(
            f"{what} There is no checkpoint yet to go back to. Lower the learning rate, or write one earlier with "
            "ModelCheckpoint(every_n_train_steps=...)."
        )
    count = run.checkpoints.rollbacks[newest.path.name] = run.checkpoints.rollbacks.get(newest.path.name, 0) + 1
    if count > _MOST_ROLLBACKS:
        raise NonFiniteError(
            f"{what} Training went back to {newest.path} {_MOST_ROLLBACKS} times, and diverges from there on any data. "
            "Lower the learning rate, or clip gradients."
        )
    return newest


def end_before_bad_step(run: Run, error: BaseException) -> None:
    """Put a run that an error has ended before its first step that was not finite, if there is one.

    A NonFiniteError also names what a second run of the step's batches shows.
    """
    engine = run.engine
    position = run.position
    if run.times.team.over:
        return  # the other processes may be elsewhere: reading the mark would wait for a step that they never take
    if engine.nan_policy != "raise" or not engine.state.is_complete:
        return
    if not (isinstance(error, Exception) or engine.state.is_ready):
        return  # a user who ends training at once does not wait for the device
    bad = engine.bad_step()
    after = [Start(*start) for start in run.unchecked.starts if start[0] >= bad >= 0]
    if not after or after[0].step != bad:
        return
    start = after[0]
    end = after[1].batch_idx if len(after) > 1 else position.batch_idx
    resume = run.checkpoints.resume_of_window(position.epoch, bad)
    filled = 0
    if resume is None:
        engine.go_back(bad, position.epoch, start.batch_idx)
    else:
        checkpoint = read(resume.checkpoint.path)  # it may be deleted or damaged by now
        load_engine(engine, replace(resume, checkpoint=checkpoint))
        filled = checkpoint.state["position"]["filled"]
    position.total_batch_idx -= position.batch_idx - start.batch_idx
    position.global_step, position.batch_idx, position.data = start
    position.filled, position.validated, position.over = filled, True, False
    run.hooks.log.forget(position.total_batch_idx)
    _forget_later(run)
    changed_arrays = None
    if isinstance(error, NonFiniteError) and not engine.state.not_finite():
        text, changed_arrays = _diagnose(run, start.batch_idx, end)
        before = run.checkpoints.resume and run.checkpoints.resume.checkpoint.state.get("not_finite")
        second = "\nIt is the second time: training was resumed right before this step."
        error.args = (f"{error}{text}{second if before and before['step'] == bad else ''}",)
    if resume is not None and not resume.reset_optimizer:  # the optimizer's state is the checkpoint's again
        changed_arrays = []
    elif changed_arrays is None:  # not known: name all that the step may have changed
        changed_arrays = engine.diagnose.changed_arrays(None)
    batches = [start.batch_idx, end]
    run.unchecked.bad = {"step": bad, "epoch": position.epoch, "batches": batches, "optimizer": changed_arrays}


def _diagnose(run: Run, first: int, end: int) -> tuple[str, list[str] | None]:
    """Run the batches of a step again on the last good parameters, and return what is not finite.

    With it the names of the optimizer's arrays that contain it, None if they are not known.
    """
    engine = run.engine
    if run.times.team.size > 1 or run.control.interrupted:  # a user who interrupts waits for the end
        return "", None
    which = f"Batch {first}" if end == first + 1 else f"Batches {first} to {end - 1}"
    try:
        source = run.data.training[0]
        validator = run.data.loaders.validator_of(run.data.training[0])
        run.prefetcher.close()  # its thread must not draw meanwhile
        pairs = [validator(batch) for batch in source.redraw(run.position.epoch, run.position.data, end - first)]
        if not pairs:
            raise LookupError("the loader cannot be set back to it")
        results = engine.diagnose([engine.strategy.shard_batch(batch) for _, batch in pairs])
    except Exception as error:
        return f"\n{which} could not be run again: {error!r:.300}", None
    bad = [k for k, (loss, names) in enumerate(results) if names or not np.isfinite(loss)]
    if not bad:
        window = "the window was not finite where the checkpoint was taken, " * (run.position.filled > 0)
        return (
            f"\n{which}, run again on these parameters, gave finite numbers (loss {results[0][0]:.4g}): {window}the "
            "loader gave other data, the step draws other numbers each time, or gradients overflow when added up."
        ), None
    (loss, names) = results[bad[0]]
    rows = _not_finite(pairs[bad[0]][0])
    is_finite = all(np.isfinite(x) for x, _ in results)  # else the step has changed nothing
    return (
        f"\nBatch {first + bad[0]}, run again on these parameters, gave the same: loss {loss:.4g}, gradients that "
        f"are not finite: {listed(names, 1) or 'none'}. Not finite in the batch: {'; '.join(rows) or 'nothing'}."
    ), engine.diagnose.changed_arrays({name for _, names in results for name in names}) if is_finite else []


def _not_finite(batch: Any) -> list[str]:
    """Return the leaves of a batch that are not finite, with their rows."""
    texts = []
    for name, leaf in batch_leaves(batch):
        if not jnp.issubdtype((x := np.asarray(leaf)).dtype, jnp.inexact) or np.isfinite(x).all():
            continue
        rows = np.nonzero(~np.isfinite(x.reshape(len(x), -1)).all(1))[0].tolist() if x.ndim else []
        shown = ", ".join(map(str, rows[:_MOST_ROWS])) + ", ..." * (len(rows) > _MOST_ROWS)
        texts.append(f"{name}, row{'s' * (len(rows) > 1)} {shown} of {len(x)}" if rows else name)
    return texts
