"""How a run is set up and torn down, and what a Trainer keeps between its runs."""

import contextlib
import datetime
import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import optax

from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.model_checkpoint import ModelCheckpoint
from jaxlit.checkpoints.files import Checkpoint, Saving, save
from jaxlit.checkpoints.position import Position
from jaxlit.core.log import collecting
from jaxlit.core.module import TrainModule, call_step, is_overridden, optimizer_of
from jaxlit.core.precision import Precision
from jaxlit.core.side_tables import attach
from jaxlit.core.step_module import evaluates_wholly
from jaxlit.data.feeder import Feeder, look
from jaxlit.data.loaders import STAGES, Loaders
from jaxlit.data.watchdog import Watchdog
from jaxlit.distributed.exchange import once_per_node
from jaxlit.engine.engine import Engine
from jaxlit.engine.kept import Kept
from jaxlit.engine.live import Live
from jaxlit.errors import ArgumentError, CheckpointError, StateError
from jaxlit.loop import snapshot
from jaxlit.loop.callback_arrays import array_keepers
from jaxlit.loop.hooks import Hooks
from jaxlit.loop.host_sums import HostLog
from jaxlit.loop.restore import Resume, load_engine
from jaxlit.loop.results import Results
from jaxlit.loop.run import Run, validation_interval
from jaxlit.loop.tracing import Tracing
from jaxlit.loop.train import check_finite
from jaxlit.trainer.defaults import callbacks_of, check_together

if TYPE_CHECKING:
    from jaxlit.trainer import Trainer

_logger = logging.getLogger("jaxlit")


class Session:
    """Runs the Trainer's verbs: everything that is set up is torn down, also after an error.

    Args:
        trainer: The Trainer.
        clip: What is done to gradients before the optimizer; None for nothing.

    Attributes:
        engine: That of the last fit.
        active: That of the run at hand.
        running: Whether there is one.
        position: Where training stands.
        results: The metrics.
    """

    def __init__(self, trainer: "Trainer", clip: optax.GradientTransformation | None) -> None:
        self.trainer, self._clip = trainer, clip
        self._added: list[Callback] = []  # callbacks of the last module
        self._fitted: Run | None = None  # the last fit
        self._resume: Resume | None = None
        self.position, self.results = Position(), Results()
        self.engine: Engine | None = None
        self.current: Run | None = None
        self.active: Engine | None = None
        self._kept = Kept()
        self.running = False

    def run(
        self,
        module: TrainModule,
        verb: str,
        loaders: Loaders,
        work: Callable[[Run], object],
        *,
        own: bool,
        resume: Resume | None = None,
    ) -> None:
        """Set a run up, do the work, and tear it down.

        Args:
            module: The module.
            verb: "fit", "validate", "test" or "predict".
            loaders: Its data.
            work: The loops.
            own: Whether the module's arrays are the Trainer's to overwrite.
            resume: A checkpoint to begin with.
        """
        trainer, self._resume = self.trainer, resume
        self.running, trainer.module, trainer.interrupted = True, module, False
        outer = attach(module, trainer)
        if loaders.datamodule is not None:
            loaders.datamodule.trainer = trainer
        self.results.clear()
        if verb == "fit":
            self.position = snapshot.load_position(resume.checkpoint.state) if resume else Position()
            trainer.should_stop, trainer.stop_reason = False, None
        try:
            mine = [c for c in trainer.callbacks if all(c is not added for added in self._added)]
            self._added = [c for c in _configured(module) if c.in_fast_dev_run or not trainer.fast_dev_run]
            trainer.callbacks = check_together(self._with_default(mine) + self._added)
            hooks = Hooks(trainer, module, trainer.callbacks, HostLog(self.results), loaders.datamodule)
            self.current = run = Run(
                trainer, module, hooks, self.results, self.position, loaders, every_check=trainer.debug
            )
            with run.compiles:
                self._guarded(run, verb, work, own)
        finally:
            if self.current is not None:
                self.current.end_clock()
            self.running, self.active = False, None
            if outer is not None and outer._session.running:  # a hook of its run has called this one
                attach(module, outer)

    def _with_default(self, mine: list[Callback]) -> list[Callback]:
        """Return the Trainer's callbacks with the ModelCheckpoint that it adds, unless the module adds one."""
        default = self.trainer._default_checkpoint
        mine = [c for c in mine if c is not default]
        added = any(isinstance(c, ModelCheckpoint) for c in self._added)
        return mine if default is None or added else [*mine, default]

    def _guarded(self, run: Run, verb: str, work: Callable[[Run], object], own: bool) -> None:
        trainer, hooks = self.trainer, run.hooks
        try:
            if hooks.bind("prepare_data"):
                once_per_node(partial(hooks, "prepare_data"), "prepare_data")
            hooks("setup", verb)
            if verb == "fit" and self._resume is not None:
                self._load_callbacks(run, self._resume.checkpoint)
            with Watchdog(trainer.data_timeout) as watchdog, contextlib.closing(run):
                self._run_loops(run, verb, work, own, watchdog)
        except BaseException as error:
            error = _explained(error)
            _each(hooks, "on_exception", error, error)
            _each(hooks, "teardown", verb, error)
            raise error
        if (error := _each(hooks, "teardown", verb, None)) is not None:
            raise error

    def _run_loops(self, run: Run, verb: str, work: Callable[[Run], object], own: bool, watchdog: Watchdog) -> None:
        trainer, module, hooks, fitting = self.trainer, run.module, run.hooks, verb == "fit"
        # Before the optimizer, whose schedule may ask how long training is.
        if fitting:
            self._open(run)
        else:
            run.evaluated = run.loaders.open(STAGES[verb], required=True)
        # And before anything is compiled: what no step could take is refused now.
        for pair in (*([run.train] if run.train else []), *run.val, *run.evaluated):
            look(*pair, watchdog, required=pair is run.train)
        for source, _ in run.val:
            if source.is_grain and not trainer.num_sanity_val_steps:
                source.close()  # its threads and processes would wait until the first validation
        run.engine = self.active = (
            self._engine_of_fit(run, own) if fitting else self._evaluator(module, own, self._resume)
        )
        if (resume := self._resume) is not None:
            _check_window(resume.checkpoint, trainer.accumulate_grad_batches if fitting else None)
            load_engine(run.engine, resume.checkpoint, strict=resume.strict, reset_optimizer=resume.reset_optimizer)
        if fitting:
            if evaluates_wholly(module):
                _logger.warning(
                    "%s is wholly in evaluation mode, and stays so in training: dropout drops nothing, statistics do "
                    "not move. Call module.train() before fit, and eval() on the parts that are frozen.",
                    type(module).__name__,
                )
            run.tracing = Tracing(hooks, trainer.log_every_n_steps)
            self.engine, self._fitted = run.engine, run
        else:
            position = snapshot.load_position(resume.checkpoint.state) if resume else self.position
            run.engine.state.count_from(position.global_step, position.epoch)
        run.feeder = Feeder(
            run.engine.place,
            num_replicas=trainer.strategy.num_replicas,
            num_processes=trainer.strategy.num_processes,
            prefetch=trainer.prefetch,
            watchdog=watchdog,
            interrupted=lambda: trainer.interrupted,
            epoch=lambda: run.position.epoch,
        )
        hooks.live = Live(module, run.engine, lambda: hooks.log.hook, put_back=not (fitting or own))
        with hooks.live.registered(), contextlib.closing(run.feeder):
            if fitting:
                if resume is not None:
                    snapshot.load_run(run, resume.checkpoint.state)
                    hooks("on_load_checkpoint", dict(resume.checkpoint.state))
                hooks("on_fit_start")
            work(run)
            if fitting:
                hooks("on_fit_end")

    def _engine_of_fit(self, run: Run, own: bool) -> Engine:
        """Return the engine of a new fit."""
        trainer = self.trainer
        self._kept.forget()
        return Engine(
            run.module,
            trainer.strategy,
            optimizer_of(run.module),
            accumulate=trainer.accumulate_grad_batches,
            nan_policy="raise" if trainer.nan_policy == "rollback" else trainer.nan_policy,
            precision=Precision(trainer.precision),
            clip=self._clip,
            debug=trainer.debug,
            own=own,
            extras=array_keepers(run.hooks.callbacks),
        )

    def _evaluator(self, module: TrainModule, own: bool = False, resume: Resume | None = None) -> Engine:
        """Return the engine of an evaluation, with what an earlier call has compiled and placed."""
        trainer, restores = self.trainer, resume is not None
        given = module, trainer.strategy, Precision(trainer.precision)
        return self._kept.evaluator(*given, debug=trainer.debug, own=own, restores=restores, fitted=self.engine)

    def _open(self, run: Run) -> None:
        """Open the loaders of a fit."""
        trainer, name = self.trainer, type(run.module).__name__
        if trainer.strategy.num_processes > 1 and (
            trainer.max_time is not None or isinstance(trainer.val_check_interval, datetime.timedelta)
        ):
            raise ArgumentError(
                "Trainer(max_time=...) and a val_check_interval that is a duration go by a clock, and each process has "
                "its own. Count steps or batches in several processes."
            )
        ((source, limit),) = run.loaders.open("training", required=True)
        if limit is None and trainer.max_steps < 0 and trainer.max_time is None and source.is_endless:
            raise ArgumentError(
                f"{source.argument} is a loader without end, and there is no limit. Pass Trainer(max_steps=...), "
                "Trainer(max_time=...) or Trainer(limit_train_batches=...)."
            )
        run.train, run.val_every = (source, limit), validation_interval(trainer, source, limit)
        run.val = run.loaders.open("validation", required=False)
        if run.val and not is_overridden(run.module, "validation_step"):
            _logger.warning("%s has no validation_step: %s is not used.", name, run.val[0][0].argument)
            run.val = []
        if run.val:
            call_step(run.module, "validation")
        every = trainer.reload_dataloaders_every_n_epochs
        if every and not any(map(run.loaders.from_hook, ("training", "validation"))):
            raise ArgumentError(
                f"Trainer(reload_dataloaders_every_n_epochs={every}) with loaders as arguments has nothing to reload. "
                "Pass a datamodule, or define train_dataloader in the module."
            )
        run.note_lengths()
        if self._resume is not None:
            state, count = self._resume.checkpoint.state, trainer.strategy.num_processes
            for stage, pairs in (("training", [run.train]), ("validation", run.val)):
                for idx, (source, _) in enumerate(pairs):
                    snapshot.load_loader(source, state, stage, count, jax.process_index(), idx)

    def _load_callbacks(self, run: Run, checkpoint: Checkpoint) -> None:
        left = snapshot.load_callbacks(run.hooks.callbacks, run.loaders.datamodule, checkpoint.state)
        left = [
            name for name in left if not name.startswith(("ModelCheckpoint", "CSVLogger", "JSONLLogger"))
        ]  # about files only
        if left:
            _logger.warning(
                "%s keeps the state of %s, which is not among the callbacks now.", checkpoint.path, ", ".join(left)
            )

    # Checkpoints ------------------------------------------------------------------------------------

    def save(self, path: Path, order: int) -> Saving:
        """Begin to write a checkpoint of the fit that runs, or that ran last.

        Args:
            path: Its folder.
            order: See `jaxlit.checkpoints.files.save`.

        Raises:
            CheckpointError: It cannot be begun, or there is nothing whole to save.
            NonFiniteError: A step was not finite, and the policy is to raise.
        """
        run = self._fitted
        if run is None or self.engine is None:
            raise CheckpointError(
                "There is no training to save. Call trainer.save_checkpoint from a hook of fit, or after it."
            )
        if not self.engine.state.is_whole:
            raise CheckpointError("The training state was lost in a step that failed: it cannot be saved.")
        self._settle(run, "Trainer.save_checkpoint")
        check_finite(run)
        run.tracing.deliver()
        return save(path, dict(enumerate(self.engine.state.leaves)), snapshot.take(run), order)

    def _settle(self, run: Run, caller: str) -> None:
        """Take over what the hook that runs has written to the module so far."""
        if self.running and run.hooks.live is not None and run.hooks.live.touched:
            run.hooks.settle(caller, run.hooks.log.hook)

    def apply(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Run `fn(module, *inputs)` compiled, with the arrays that the module of the newest run has now.

        Raises:
            ArgumentError: Nothing has run yet.
        """
        if self.active is not None and self.current is not None:
            self._settle(self.current, "Trainer.apply")
            return self.active.apply(fn, *inputs)
        module = self.trainer.module
        if module is None or self.current is None:
            raise ArgumentError("Trainer.apply needs weights. Call it from a hook, or after fit.")
        return self._evaluator(module).apply(fn, *inputs)

    def tell_saved(self, callback: ModelCheckpoint, path: Path) -> None:
        """Tell the callbacks that a checkpoint is whole on the disk."""
        assert self.current is not None
        self.current.hooks("on_checkpoint_saved", callback, path)

    def check_saving(self) -> None:
        """Refuse now what could not be saved later."""
        assert self._fitted is not None
        snapshot.take(self._fitted, ask=False)

    def check_finite(self) -> None:
        """Look at the guard's mark now, before a place for the state is chosen."""
        if self._fitted is not None:
            check_finite(self._fitted)

    def is_finite(self) -> bool:
        """Tell whether every floating number of the training state is finite; waits for the device."""
        return self.engine is None or self.engine.state.is_finite()

    @property
    def has_trained(self) -> bool:
        """Whether the fit has taken a step, or was resumed."""
        return self._fitted is not None and self._fitted.position.total_batch_idx > 0

    @property
    def place(self) -> tuple[Any, ...]:
        """What tells one place of training from another."""
        assert self._fitted is not None
        now, position = self._fitted.evaluation, self._fitted.position
        inside = (now.loader, now.batch_idx, now.ended) if now else None
        return (position.epoch, position.total_batch_idx, position.left, position.over, position.ended, inside)


def _check_window(checkpoint: Checkpoint, accumulate: int | None) -> None:
    """Refuse another `accumulate_grad_batches` in the middle of a window.

    Raises:
        CheckpointError: Naming the number that it needs.
    """
    was, filled = checkpoint.state["accumulate"], checkpoint.state["position"]["filled"]
    if accumulate not in (None, was) and filled:
        raise CheckpointError(
            f"{checkpoint.path} has {filled} of {was} batches in its accumulation window, and the Trainer has "
            f"accumulate_grad_batches={accumulate}. Resume with {was}, or from a checkpoint of an epoch's end."
        )


def _configured(module: TrainModule) -> list[Callback]:
    """Return the callbacks that the module adds."""
    configure = getattr(module, "configure_callbacks", None)
    if configure is None:
        return []
    return callbacks_of(f"callbacks of {type(module).__name__}.configure_callbacks", configure())


def _each(hooks: Hooks, hook: str, argument: Any, first: BaseException | None) -> BaseException | None:
    """Call every hook of a name whatever the others raise, and return the first error of all.

    A later error is noted on the first: it never hides it.
    """
    for function in hooks.bind(hook).functions:
        hooks.log.hook, hooks.inside, start = hook, 0.0, time.perf_counter()
        try:
            with collecting(hooks.log):
                function.function(hooks.trainer, hooks.module, argument)
        except BaseException as error:  # a Ctrl-C in one teardown must not keep the others from theirs
            if first is None:
                first = error
            else:
                first.add_note(f"{function.owner}.{hook} raised as well: {error!r}")
        function.note(time.perf_counter() - start - hooks.inside)
    return first


def _explained(error: BaseException) -> BaseException:
    """Return an error that tells a user what jax's own would not."""
    if isinstance(error, RuntimeError) and "has been deleted" in str(error) and not isinstance(error, StateError):
        explained = StateError(
            "An array of an earlier step was read, and a later step has overwritten it. Keep a copy instead: "
            "jax.tree.map(jnp.copy, ...), or read through the module, which is up to date in every hook."
        )
        explained.__cause__ = error
        return explained
    return error
