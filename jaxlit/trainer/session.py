"""How a run is set up and torn down, and what a Trainer keeps between its runs."""

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import Checkpoint
from jaxlit.checkpoints.position import HookClock, Position
from jaxlit.control import Control
from jaxlit.core.module import TrainModule
from jaxlit.core.side_tables import attach
from jaxlit.core.stage import STAGES, Stage
from jaxlit.data.loaders import Loaders
from jaxlit.data.watchdog import Watchdog
from jaxlit.distributed.exchange import READS_ARE_COMPARED, once_per_node
from jaxlit.distributed.team import team
from jaxlit.engine.creation import check_variables
from jaxlit.engine.engine import Engine
from jaxlit.engine.lazy import lazy
from jaxlit.engine.module_sync import ModuleSync
from jaxlit.errors import ArgumentError
from jaxlit.loop.compile_log import CompileLog
from jaxlit.loop.due import Due
from jaxlit.loop.hooks import Hooks
from jaxlit.loop.host_sums import HostLog
from jaxlit.loop.restore import Resume
from jaxlit.loop.results import Results
from jaxlit.loop.run import Checkpoints, Run, Setup, Window
from jaxlit.loop.run_data import RunData
from jaxlit.loop.settings import Settings
from jaxlit.loop.tracing import Tracing
from jaxlit.loop.train import fit as loop_fit
from jaxlit.mesh_context import out_of_meshes
from jaxlit.notes import note_step
from jaxlit.reporting.media_folder import MediaFolder
from jaxlit.reporting.secrets import tell_again
from jaxlit.strategies.base import Strategy
from jaxlit.trainer.building import check_accumulation, check_fit, check_fitting, make_loaders
from jaxlit.trainer.choose import Start, resolve_checkpoint, resolve_weights
from jaxlit.trainer.defaults import Given, callbacks_of_module, check_callbacks, without
from jaxlit.trainer.engines import Engines
from jaxlit.trainer.failures import explained, rescue
from jaxlit.trainer.opening import (
    begin_fit,
    check_loaders,
    open_fit,
    prefetcher_of,
    restore_callbacks,
    warn_of_bad_step,
    warn_of_eval_mode,
)
from jaxlit.trainer.run_folder import RunFolder
from jaxlit.trainer.saver import Saver
from jaxlit.trainer.signals import interruptible


class Session:
    """Runs the Trainer's verbs: everything that is set up is torn down, also after an error.

    Args:
        trainer: The Trainer, for hooks.
        settings: Its arguments.
        given: Its callbacks.
        config: The arguments as they were given, as JSON values.

    Attributes:
        control: What changes during a run.
        callbacks: The callbacks of the newest run; before it those of the Trainer.
        added: Those of them that the run's module has added.
        takes: Whether a callback that a module adds takes part.
        module: The module of the newest run.
        current: The newest run.
        fitted: The newest fit, once it has a state; None once another one begins.
        running: Whether the newest run is not over.
        compiles: How long its steps took to compile.
        position: How far training is.
        clock: How far the hooks are.
        results: The metrics.
        saver: Writes checkpoints.
        media: Stores what no logger can.
    """

    def __init__(self, trainer: Any, settings: Settings, given: Given, config: dict[str, Any]) -> None:
        self._trainer, self.settings, self.given = trainer, settings, given
        self.control, self.position, self.clock, self.results = Control(), Position(), HookClock(), Results()
        self.saver = Saver(lambda: self.fitted)
        self.callbacks, self.config = given.callbacks, config
        self.module: TrainModule | None = None
        self.added: list[Callback] = []
        self.takes: Callable[[Callback], bool] = lambda c: c.in_fast_dev_run or not self.settings.fast_dev_run
        self._engines = Engines(settings)
        self.folder = RunFolder(settings.default_root_dir)
        self.current: Setup | None = None  # a Run once its loops begin
        self.fitted: Run | None = None
        # The newest fit and where it is, which a fit that cannot begin leaves in place.
        self._before: tuple[Run, Position, HookClock, TrainModule | None] | None = None
        self.running, self.compiles = False, CompileLog()
        # A trial run makes everything and writes nothing.
        self.media = MediaFolder(
            lambda: trainer.run_dir if trainer.is_global_zero and not self.settings.fast_dev_run else None,
            step=lambda: max(self.clock.global_step - 1, 0),
            goes_on=lambda: self.running and not self.settings.fast_dev_run,
        )

    @property
    def strategy(self) -> Strategy:
        """The strategy on its devices, which are chosen when a run begins, or when it is read before one."""
        return self._engines.strategy

    @property
    def engine(self) -> Engine | None:
        """The engine of the newest fit."""
        return None if self.fitted is None else self.fitted.engine

    @property
    def active(self) -> Engine | None:
        """The engine of the run that continues, from before its first batch on."""
        return self.current.engine if self.running and isinstance(self.current, Run) else None

    @out_of_meshes
    def fit(self, model: TrainModule | lazy, given: Mapping[str, Any], datamodule: Any, start: Start) -> None:
        """Train a module; see `Trainer.fit`.

        Args:
            model: The module.
            given: By stage, the loaders that were passed and the argument's name.
            datamodule: The DataModule, if one was passed.
            start: What to begin with.
        """
        stage = STAGES["training"]
        check_fit(self.settings, self.callbacks, model, start)
        loaders = make_loaders(self.settings, stage, given, datamodule)
        checkpoint, weights = self._claim(stage, start.ckpt_path, start.init_from)
        module, take_ownership = self._engines.module_of(model, stage, loaders, self.settings)
        check_fitting(self.settings, module, checkpoint, given["validation"][0])
        if weights is not None:  # before the engine: the optimizer and callbacks may keep copies of parameters
            weights(module)
        if checkpoint is not None:
            warn_of_bad_step(checkpoint, self.settings.nan_policy)
        resume = None if checkpoint is None else Resume(checkpoint, start.strict, start.reset_optimizer)
        # Signals are noted from here on, so that the lock is released and checkpoints are finished.
        with interruptible(self.control):
            lock = self.folder.hold() if any(c.is_logger or c.role == "checkpoint" for c in self.callbacks) else None
            try:
                self.run(module, stage, loaders, loop_fit, take_ownership=take_ownership, resume=resume)
            finally:
                if lock is not None:  # not before a writer in the background has finished
                    self.saver.when_written(lock.close)

    @out_of_meshes
    def evaluate(
        self,
        stage: Stage,
        work: Callable[[Run, str, Any], list[Any]],
        model: TrainModule | lazy | None,
        dataloaders: Any,
        datamodule: Any,
        ckpt_path: Any,
    ) -> list[Any]:
        """Validate, test or predict; returns what the loop returns."""
        loaders = make_loaders(self.settings, stage, {stage.name: (dataloaders, "dataloaders")}, datamodule)
        checkpoint, _ = self._claim(stage, ckpt_path)
        model = self.module if model is None else model
        if model is None:
            raise ArgumentError(f"Trainer.{stage.method}(model, ...) has no model. Pass one, or call fit first.")
        module, take_ownership = self._engines.module_of(model, stage, loaders, self.settings)
        resume = None if checkpoint is None else Resume(checkpoint)
        loops = lambda run: work(run, stage.name, run.data.val)  # noqa: E731
        return self.run(module, stage, loaders, loops, take_ownership=take_ownership, resume=resume)

    def _claim(
        self, stage: Stage, ckpt_path: Any, init_from: Any = None
    ) -> tuple[Checkpoint | None, Callable[[TrainModule], object] | None]:
        """Return the checkpoint to continue from, or what loads weights, and make the run's folder this Trainer's."""
        if self.running:
            raise ArgumentError(
                f"Trainer.{stage.method} is called from a hook of a run of this Trainer. Use a second Trainer for it."
            )
        _ = self.strategy  # absent devices are refused before anything is set up
        method, resume, places = stage.method, self.settings.resume, (self.callbacks, self.folder)
        wanted, argument = ckpt_path, f"Trainer.{method}(ckpt_path=...)"
        if method == "fit" and resume is not None:
            if ckpt_path is not None:
                raise ArgumentError(
                    f"Trainer(resume={str(resume)!r}) and fit(ckpt_path={str(ckpt_path)!r}) name two checkpoints. "
                    "Leave one out."
                )
            wanted, argument = resume, "Trainer(resume=...)"
        checkpoint = resolve_checkpoint(wanted, argument, "resume" if method == "fit" else method, *places)
        # A job that was started again continues from its newest checkpoint, which is further on.
        weights = resolve_weights(init_from, *places) if checkpoint is None else None
        files = [name for c in self.callbacks for name in c.row_files]
        self.folder.claim(files, self.settings.resume, checkpoint, fitting=stage.method == "fit")
        return checkpoint, weights

    def set(self, name: str, value: Any) -> None:
        """Set an argument, from now on."""
        settings = self.settings.replace(name, value)
        check_accumulation(self.active, settings)  # before it counts, so that a refused value changes nothing
        self.settings = settings
        if self.current is not None:
            self.current.settings = settings
        self._ask_again()

    def _ask_again(self) -> None:
        """Have the loop ask what acts next: an interval may have changed."""
        if isinstance(self.current, Run):
            self.current.due.forget()

    def run(
        self,
        module: TrainModule,
        stage: Stage,
        loaders: Loaders,
        work: Callable[[Run], Any],
        *,
        take_ownership: bool,
        resume: Resume | None = None,
    ) -> Any:
        """Set a run up, do the work, tear it down, and return what the work has returned.

        Args:
            module: The module.
            stage: What runs.
            loaders: Its data.
            work: The loops.
            take_ownership: Whether the engine may overwrite the module's arrays.
            resume: A checkpoint to begin with.
        """
        with contextlib.ExitStack() as stack:
            if self.fitted is not None:
                self._before = (self.fitted, self.position, self.clock, self.module)
            stack.push(self._ending(module))
            self.running, self.current, self.module = True, None, module
            self.compiles = CompileLog(self._ask_again)
            self.current = setup = self._set_up(module, stage, loaders, resume)
            stack.callback(team().watch, team().watch((lambda: setup.place, self.settings.fail_timeout)))
            stack.callback(READS_ARE_COMPARED.reset, READS_ARE_COMPARED.set(self.settings.debug))
            stack.enter_context(self.compiles.listening())
            watchdog, hooks, results, error = stack.enter_context(self._watchdog()), setup.hooks, None, None
            try:
                with contextlib.ExitStack() as opened:
                    if hooks.bind("prepare_data"):
                        once_per_node(partial(hooks, "prepare_data"), "prepare_data")
                    hooks("setup", stage.method)
                    # After setup, where a callback makes what its state goes into, before the hooks of loaders.
                    if setup.data.is_fit and resume is not None:
                        restore_callbacks(setup, resume.checkpoint)
                    opened.callback(self._close_data)
                    run, live = self._begin(setup, stage, watchdog, take_ownership=take_ownership)
                    opened.enter_context(live.registered())
                    opened.enter_context(contextlib.closing(run.prefetcher))
                    if run.data.is_fit:
                        begin_fit(run)
                    results = work(run)
                    if run.data.is_fit:
                        hooks("on_fit_end")
            except BaseException as raised:
                setup.fail(error := explained(raised, self.current))
                error = team().explained(error)
                # Every callback is called and torn down, whatever another one raises meanwhile.
                hooks.call_all("on_exception", error, error)
            # The saver last: a callback's teardown waits for its own checkpoints, and reports their errors.
            error = self.saver.finish(hooks.call_all("teardown", stage.method, error))
            if error is not None:
                setup.fail(error)
                raise error
            self.control.take(team().decide(self.control.asked or ()))  # the last place for a signal
            return results

    def _ending(self, module: TrainModule) -> Callable[..., None]:
        """Attach a module, and return what ends its run, given the error that it has raised."""
        outer = attach(module, self._trainer)

        def end(kind: Any, error: BaseException | None, _: Any) -> None:
            if error is not None:
                note_step(error, self.position.global_step)
            team().begin()  # what was asked for in this run does not count in another one
            if self.current is not None:
                self.current.times.ended = time.monotonic()
            self.running = False
            if self.fitted is None and self._before is not None:
                self.fitted, self.position, self.clock, self.module = self._before
            self._before = None
            if outer is not None and outer._session.running:  # a hook of the outer Trainer's run has called this one
                attach(module, outer)

        return end

    def _close_data(self) -> None:
        if (run := self.current) is not None:
            if isinstance(run, Run):
                run.begin("end")
            run.window.left = run.settings.accumulate_grad_batches
            run.data.close()

    def _watchdog(self) -> Watchdog:
        return Watchdog(
            self.settings.data_timeout,
            self.settings.hang_timeout,
            control=self.control,
            progress=lambda: self.current and self.current.progress,
            place=lambda: self.current.place if self.current else "",
            rescue=lambda: rescue(self._trainer, self.current),
            leave=team().leave,
        )

    def stop_after(self, seconds: float, reason: str, at_epoch_end: bool) -> None:
        """See `Trainer.stop_after`."""
        if self.fitted is None or not self.running:
            raise ArgumentError("Trainer.stop_after(...) ends a training that runs. Call it in on_fit_start or later.")
        self.fitted.times.stop_after(seconds, reason, at_epoch_end=at_epoch_end)
        self._ask_again()

    def _set_up(self, module: TrainModule, stage: Stage, loaders: Loaders, resume: Resume | None) -> Setup:
        """Forget what the run before has left, and return what the new one begins with."""
        self.control.begin(alone=team().size == 1)
        team().begin()
        if loaders.datamodule is not None:
            loaders.datamodule.trainer = self._trainer
        # Cleared now and not at the end of a run, whose metrics a program reads after it.
        self.results.clear()
        self.media.begin()
        tell_again()
        if stage.method == "fit":
            self.results.history.clear()
            self.fitted, self.position = None, Position()
            self.control.should_stop, self.control.stop_reason, self.control.verbose = False, None, True
        position = self.position if resume is None else Position(**resume.checkpoint.state["position"])
        clock = HookClock()
        clock.follow(position)
        if stage.method == "fit":  # an evaluation of a checkpoint leaves the training where it is
            self.position, self.clock = position, clock
        # Callbacks of the module before go; a ModelCheckpoint of this one replaces the default.
        default = self.given.default_checkpoint
        mine = [c for c in without(self.callbacks, self.added) if c is not default]
        self.added = [c for c in callbacks_of_module(module) if self.takes(c)]
        if default is not None and all(c.role != "checkpoint" for c in self.added):
            mine.append(default)
        self.callbacks = check_callbacks(mine + self.added)
        loggers: list[Any] = [c for c in self.callbacks if c.is_logger]
        for logger in loggers:  # before `prepare_data`, in which a module may log pictures already
            logger.attach(self._trainer, self.media)
        return Setup(
            settings=self.settings,
            control=self.control,
            hooks=Hooks(self._trainer, module, self.callbacks, HostLog(self.results), loaders.datamodule, clock),
            results=self.results,
            position=position,
            data=RunData(loaders),
            window=Window(given := self.settings.accumulate_grad_batches, given),
            checkpoints=Checkpoints(resume),
        )

    def _begin(self, setup: Setup, stage: Stage, watchdog: Watchdog, *, take_ownership: bool) -> tuple[Run, ModuleSync]:
        """Open the loaders, and return the run with its engine, which has the arrays from here on."""
        hooks, data = setup.hooks, setup.data
        check_variables(setup.module)  # again, as setup may add parts
        # Before the optimizer, whose schedule may ask how long training is.
        if data.is_fit:
            open_fit(setup)
        else:
            data.val = data.loaders.open(stage.name, required=True)
        # Before the engine: a bad batch is refused at once, compiling for it would take minutes.
        check_loaders(setup, watchdog)
        engine = self._engines.make(setup, self.engine, take_ownership=take_ownership)
        prefetcher = prefetcher_of(setup, self.strategy, watchdog)
        tracing = Tracing(hooks, setup.log_every if data.is_fit else 0)
        self.current = run = Run(
            **vars(setup), engine=engine, prefetcher=prefetcher, tracing=tracing, due=Due(hooks, tracing)
        )
        if data.is_fit:
            warn_of_eval_mode(run)
            self.fitted, self._before = run, None  # which would hold the arrays of the fit before
        else:
            engine.state.count_from(run.position.global_step, run.position.epoch)
        # Hooks see the arrays through the module, which has them again at the end.
        put_back = not (data.is_fit or take_ownership)
        live = hooks.live = ModuleSync(run.module, engine, lambda: hooks.log.hook, put_back=put_back)
        return run, live

    @out_of_meshes
    def apply(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Run `fn(module, *inputs)` compiled, with the arrays that the module of the newest run has now."""
        if self.active is not None and self.current is not None:
            # What the hook that calls this has written to the module counts.
            self.current.hooks.take_writes("Trainer.apply")
            return self.active.apply(fn, *inputs)
        module = self.module
        if module is None or self.current is None:
            raise ArgumentError("Trainer.apply needs weights. Call it from a hook, or after fit.")
        return self._engines.evaluator(module, self.settings, self.engine).apply(fn, *inputs)
