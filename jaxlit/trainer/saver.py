"""Checkpoints of a training, written now: what `ModelCheckpoint` is made of."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import Saving, last_order
from jaxlit.checkpoints.places import Place, place_of
from jaxlit.distributed.team import team
from jaxlit.errors import CheckpointError, NonFiniteError, add_note
from jaxlit.loop import snapshot
from jaxlit.loop.rewind import check_finite, judge_later
from jaxlit.loop.rows import log_pending
from jaxlit.loop.run import Run
from jaxlit.sharding import out_of_meshes
from jaxlit.trainer.run_folder import RunFolder


class Saver:
    """Writes checkpoints of the fit that runs, or that ran last; `trainer.saver` in a hook.

    `Trainer.save_checkpoint` writes one and waits. Here are its parts, for a callback that decides when a checkpoint is
    written, writes in the background, and says which are kept. In several processes every one must make the same calls.

    Example:
        >>> import jaxlit as jl
        >>> class EveryHundred(jl.Callback):
        ...     runs_last = True
        ...     def on_safe_point(self, trainer, module, epoch_over, training_over):
        ...         if trainer.global_step % 100 == 0:
        ...             saving = trainer.saver.begin(f"kept/at_{trainer.global_step}")
        ...             saving.wait()  # or later: training continues meanwhile
        ...             trainer.saver.announce(self, saving.path)
    """

    def __init__(self, fitted: Callable[[], Run | None], folder: RunFolder) -> None:
        self._fitted, self._folder = fitted, folder  # what returns the fit, None if there is none; that of its run
        self._open: list[Saving] = []  # not waited for yet

    @out_of_meshes
    def begin(
        self,
        path: str | Path | Place,
        order: int | None = None,
        *,
        weights_only: bool = False,
        trained_only: bool = False,
        replaces: Iterable[str | Path | Place] = (),
    ) -> Saving:
        """Begin to write a checkpoint; training continues meanwhile.

        After `teardown` the end of a run waits for checkpoints that no call has waited for, and raises their errors.

        Args:
            path: Its folder, or the URL of one; an older checkpoint there is replaced once the new one is complete.
                `resume` and `ckpt_path="last"` search for `step_<8 digits>` in `<run>/checkpoints`.
            order: A number by which `resume` finds the newest of several in one folder; left out, one more than the
                highest there, with those that are being written.
            weights_only: Leave out the optimizer's and all other arrays that are not the module's.
            trained_only: Leave out the module's arrays that no step changes, see `ModelCheckpoint`.
            replaces: Checkpoints that are deleted once this one is complete.

        Returns:
            A handle: `wait()` waits and raises what went wrong, `is_done` is whether it is over, `path` is the folder
            and `seconds` the time that it took.

        Raises:
            ArgumentError: `order` is no number, or negative.
            CheckpointError: It cannot be begun, or the state was lost in a step that failed.
            NonFiniteError: A step was not finite, and the policy is to raise. Of a parameter that is not finite `wait`
                raises it, unless the policy is "ignore": nothing is written then.
        """
        order = check.integer("order", order, low=0, also=(None,), owner="trainer.saver.begin")
        for name, value in (("weights_only", weights_only), ("trained_only", trained_only)):
            check.boolean(name, value, owner="trainer.saver.begin")
        where = place_of(check.url("path", path, owner="trainer.saver.begin"))
        run = self._ready(weights_only)
        if trained_only:
            run.compare_writes()  # here: all processes must hash the same arrays
        stored = snapshot.stored(run, weights_only, trained_only)  # before one of them may fail
        take = partial(snapshot.take, run, stored, weights_only=weights_only, trained_only=trained_only)
        if order is None:
            newest = last_order(where.parent) if jax.process_index() == 0 else 0
            order = max([newest, *(saving.order for saving in self._open if saving.path.parent == where.parent)]) + 1
        for saving in self._open:  # of two to one path the second deletes what the first has written
            if saving.path == where:
                saving.join()
        saving = Saving(where, take, order, compare=run.compare_writes, has=bool(run.engine.state.written))
        spec = run.engine.state.spec
        leaves = [*run.engine.state.leaves, *run.engine.state.averaged()]
        parameters = {*spec.evaluated_places, *range(len(spec.arrays), len(leaves))}
        judged = [x for i, x in stored.items() if i in parameters and run.settings.nan_policy in ("raise", "skip")]
        before = judge_later(run, self._folder.copy if self._folder.remote else lambda: None)
        with run.control.shield():  # interrupted here, a writer would continue that no run knows
            saving.begin([leaves[i] for i in stored], [place_of(x) for x in replaces], before, judged)
            saving.when_done(run.due.forget)
            self._open = [*(x for x in self._open if not x.was_awaited), saving]
            if run.settings.nan_policy == "rollback" and not weights_only:
                run.checkpoints.written.append(saving)
        return saving

    def save(self, path: str | Path, *, weights_only: bool = False, trained_only: bool = False) -> None:
        """Write a checkpoint, see `Trainer.save_checkpoint`."""
        self.at_safe_point(lambda: self.begin(path, weights_only=weights_only, trained_only=trained_only).wait())

    def at_safe_point(self, save: Callable[[], object]) -> None:
        """Call a function where training can be continued: here, or between two batches or after an epoch."""
        run = self._training()
        if run.is_safe:
            save()
        else:
            run.requested.append(save)

    def finish(self, first: BaseException | None) -> BaseException | None:
        """Wait for the checkpoints that no call has waited for; return the first error of all, or one from before."""
        while not_awaited := [saving for saving in self._open if not saving.was_awaited]:
            try:
                not_awaited[0].wait()
            except Exception as error:
                if first is not None:
                    add_note(first, f"A checkpoint that was begun before failed as well: {error!r}")
                first = first or error
        self._open = []
        return first

    def when_written(self, then: Callable[[], object]) -> None:
        """Call a function, which for example unlocks a folder, once no checkpoint is being written; any thread may."""
        for saving in self._open:
            then = partial(saving.when_done, then)
        then()

    def check(self) -> None:
        """Raise a CheckpointError now for what could not be saved later: a state that is no JSON value."""
        snapshot.take(self._training(), {}, ask=False)

    def check_finite(self) -> None:
        """Look whether all steps and parameters are finite; raise, or go back to a checkpoint, as `nan_policy` says."""
        if (run := self._fitted()) is None:
            return
        if not run.is_safe and run.settings.nan_policy == "rollback":
            raise CheckpointError(
                f"trainer.saver.check_finite is called in {run.hooks.log.hook or 'a hook'}, and nan_policy='rollback' "
                "goes back to a checkpoint between two batches only. Call it in on_safe_point."
            )
        check_finite(run, params=True)

    def is_finite(self) -> bool:
        """Return whether all parameters, and averages that evaluations see, are finite; waits for the device."""
        return (run := self._fitted()) is None or not run.engine.state.not_finite()

    def announce(self, callback: Callback, path: str | Path | Place) -> None:
        """Call `on_checkpoint_saved` of all callbacks: the checkpoint that one of them wrote to a path is complete."""
        self._training().hooks("on_checkpoint_saved", callback, place_of(path))

    @property
    def root(self) -> Place:
        """The folder of the run, or its URL, in whose `checkpoints` a `ModelCheckpoint` writes."""
        return self._folder.home

    @property
    def has_trained(self) -> bool:
        """Whether the fit has taken a step, or was resumed."""
        return (run := self._fitted()) is not None and run.position.total_batch_idx > 0

    @property
    def position(self) -> tuple[Any, ...]:
        """A value for how far training is: two checkpoints of one position would be the same."""
        run = self._training()
        at = run.position
        # One with `not_finite` is another one.
        return (at.epoch, at.total_batch_idx, at.over, at.validated, run.unchecked.bad is None)

    @property
    def epoch(self) -> int:
        """The epoch of the newest batch, from 0, in whatever hook this is asked."""
        position = self._training().position
        return max(position.epoch - (not position.inside), 0)

    def _ready(self, weights_only: bool) -> Run:
        """Return the training where it can be continued, with what its hooks have written and logged."""
        run = self._training()
        if not run.is_safe:
            raise CheckpointError(
                f"trainer.saver.begin is called in {run.hooks.log.hook or 'a hook'}, where no training can be "
                "continued. Call it in on_safe_point, or trainer.save_checkpoint, which waits for that."
            )
        if not run.engine.state.is_complete:
            raise CheckpointError("The training state was lost in a step that failed: it cannot be saved.")
        if run.times.ended is None or run.hooks.live is None:
            run.hooks.take_writes("trainer.saver.begin")
        else:
            run.hooks.live.take_later_writes()
        log_pending(run)  # first: a checkpoint does not store pending rows
        # Else the writer looks, and the loop goes on: of weights only, it does not have the parameters of averages.
        check_finite(run, params=weights_only or run.settings.nan_policy == "rollback")
        for saving in [x for x in self._open if isinstance(x.error, NonFiniteError)] if team().size == 1 else ():
            if not saving.was_awaited:
                saving.wait()
        run.tracing.deliver()
        return run

    def _training(self) -> Run:
        if (run := self._fitted()) is None:
            raise CheckpointError(
                "There is no training to save. Save from a hook of fit, or after it; in setup there is no state yet."
            )
        return run
