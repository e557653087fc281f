"""How a run is set up and torn down, and what a Trainer keeps between its runs."""

import contextlib
import datetime
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import optax

from jaxlit import arguments as check
from jaxlit.callbacks.base import Callback
from jaxlit.datamodule import STAGES, Loaders
from jaxlit.defaults import check_together
from jaxlit.engine import Engine
from jaxlit.errors import ArgumentError, StateError
from jaxlit.exchange import once_per_node
from jaxlit.feed import Feeder, look
from jaxlit.hooks import Hooks
from jaxlit.live import Live
from jaxlit.metrics import collecting
from jaxlit.module import TrainModule, attach, call_step, is_overridden, optimizer_of
from jaxlit.precision import Precision
from jaxlit.results import HostLog, Results
from jaxlit.run import Position, Run, validation_interval
from jaxlit.watchdog import Watchdog

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
        self.position, self.results = Position(), Results()
        self.engine: Engine | None = None
        self.current: Run | None = None
        self.active: Engine | None = None
        self.running = False

    def run(
        self, module: TrainModule, verb: str, loaders: Loaders, work: Callable[[Run], object], *, own: bool
    ) -> None:
        """Set a run up, do the work, and tear it down.

        Args:
            module: The module.
            verb: "fit", "validate", "test" or "predict".
            loaders: Its data.
            work: The loops.
            own: Whether the module's arrays are the Trainer's to overwrite.
        """
        trainer = self.trainer
        self.running, trainer.module, trainer.interrupted = True, module, False
        outer = attach(module, trainer)
        if loaders.datamodule is not None:
            loaders.datamodule.trainer = trainer
        self.results.clear()
        if verb == "fit":
            self.position = Position()
            trainer.should_stop, trainer.stop_reason = False, None
        try:
            mine = [c for c in trainer.callbacks if all(c is not added for added in self._added)]
            self._added = [c for c in _configured(module) if c.in_fast_dev_run or not trainer.fast_dev_run]
            trainer.callbacks = check_together(mine + self._added)
            hooks = Hooks(trainer, module, trainer.callbacks, HostLog(self.results), loaders.datamodule)
            self.current = run = Run(
                trainer, module, hooks, self.results, self.position, loaders, every_check=trainer.debug
            )
            self._guarded(run, verb, work, own)
        finally:
            self.running, self.active = False, None
            if outer is not None and outer._session.running:  # a hook of its run has called this one
                attach(module, outer)

    def _guarded(self, run: Run, verb: str, work: Callable[[Run], object], own: bool) -> None:
        trainer, hooks = self.trainer, run.hooks
        try:
            if hooks.bind("prepare_data"):
                once_per_node(partial(hooks, "prepare_data"), "prepare_data")
            hooks("setup", verb)
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
        run.engine = self.active = Engine(
            module,
            trainer.strategy,
            optimizer_of(module) if fitting else None,
            accumulate=trainer.accumulate_grad_batches if fitting else 1,
            nan_policy=trainer.nan_policy,
            precision=Precision(trainer.precision),
            clip=self._clip if fitting else None,
            debug=trainer.debug,
            own=own,
        )
        if fitting:
            self.engine = run.engine
        else:
            run.engine.count_from(self.position.global_step, self.position.epoch)
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
                hooks("on_fit_start")
            work(run)
            if fitting:
                hooks("on_fit_end")

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


def _configured(module: TrainModule) -> list[Callback]:
    """Return the callbacks that the module adds."""
    configure = getattr(module, "configure_callbacks", None)
    if configure is None:
        return []
    return check.callbacks(f"callbacks of {type(module).__name__}.configure_callbacks", configure())


def _each(hooks: Hooks, hook: str, argument: Any, first: BaseException | None) -> BaseException | None:
    """Call every hook of a name whatever the others raise, and return the first error of all.

    A later error is noted on the first: it never hides it.
    """
    for owner, function in hooks.bind(hook).functions:
        hooks.log.hook = hook
        try:
            with collecting(hooks.log):
                function(hooks.trainer, hooks.module, argument)
        except BaseException as error:  # a Ctrl-C in one teardown must not keep the others from theirs
            if first is None:
                first = error
            else:
                first.add_note(f"{owner}.{hook} raised as well: {error!r}")
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
