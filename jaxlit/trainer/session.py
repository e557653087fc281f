"""A run of a Trainer, from its first check to its last teardown, and what the Trainer keeps for the next run."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any, NamedTuple

from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import Resume, fitting, position_of
from jaxlit.checkpoints.module_state import load_numbers
from jaxlit.control import Control, Position
from jaxlit.core.module import Stage, TrainModule, attach, call_step, is_overridden
from jaxlit.core.train_state import Precision
from jaxlit.data.loaders import Loaders
from jaxlit.data.prefetcher import Prefetcher
from jaxlit.data.watchdog import Watchdog
from jaxlit.distributed.fate import Watch
from jaxlit.distributed.team import READS_ARE_COMPARED, once_per_node, team
from jaxlit.engine.compiled_program import use_compile_cache
from jaxlit.engine.creation import build_lazy, lazy
from jaxlit.engine.engine import Engine
from jaxlit.engine.module_sync import ModuleSync
from jaxlit.errors import ArgumentError, note_step
from jaxlit.loop import snapshot
from jaxlit.loop.hooks import Hooks
from jaxlit.loop.results import HostLog, Results
from jaxlit.loop.run import Accumulation, Checkpoints, Run, place_of
from jaxlit.loop.run_data import CompileLog, RunData, TimeLimits, make_loaders
from jaxlit.loop.settings import Settings
from jaxlit.loop.snapshot import load_engine
from jaxlit.reporting.media import MediaFolder
from jaxlit.reporting.secrets import print_again
from jaxlit.sharding import out_of_meshes
from jaxlit.strategies.auto import Auto
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.registry import resolve_strategy
from jaxlit.trainer.defaults import (
    TrainerCallbacks,
    callbacks_of_module,
    check_callbacks,
    first_example,
    log_hyperparams,
    step_options,
    without,
)
from jaxlit.trainer.endings import explained, interruptible, rescue
from jaxlit.trainer.refusals import (
    Request,
    check_accumulation,
    check_end,
    check_first_batches,
    check_fit,
    check_fitting,
    check_job,
    check_model,
    check_reload,
    check_window,
    check_windows,
    warn_of_eval_mode,
)
from jaxlit.trainer.run_folder import RunFolder, resolve_checkpoint, resolve_weights
from jaxlit.trainer.saver import Saver
from jaxlit.trainer.step_cost import choose
from jaxlit.variables import is_array, leaves_of

_logger = logging.getLogger("jaxlit")


class Built(NamedTuple):
    """The newest module that was built of a lazy one."""

    model: lazy
    module: TrainModule
    seed: int | None  # of its weights; None once a fit has trained them


class Session:
    """Runs the Trainer's verbs: everything that is set up is torn down, also after an error.

    The `compile_cache` of the settings is used from now on: building a module compiles too. `config` has the arguments
    as they were passed, as JSON values.
    """

    def __init__(
        self, trainer: Any, settings: Settings, trainer_callbacks: TrainerCallbacks, config: dict[str, Any]
    ) -> None:
        self._trainer = trainer
        self.settings = settings
        self.trainer_callbacks = trainer_callbacks
        self.control = Control()
        self.position = Position()
        self.results = Results(lambda: self.position.global_step)
        self.callbacks = trainer_callbacks.callbacks  # the callbacks of the newest run; before it those of the Trainer
        self.config = config
        self.added: list[Callback] = []  # those of them that the run's module has added
        # whether a callback that a module adds takes part
        self.takes: Callable[[Callback], bool] = lambda c: c.in_fast_dev_run or not self.settings.fast_dev_run
        self.folder = RunFolder(settings.default_root_dir, is_trial=settings.fast_dev_run > 0)
        self.saver = Saver(lambda: self.fitted, self.folder)
        self.module: TrainModule | None = None
        self.loaders: Loaders | None = None
        self.current: Run | None = None  # the newest run, from before its first batch on
        self.fitted: Run | None = None  # the newest fit, once it has a state; None once another one begins
        # The newest fit and where it is, which a fit that cannot begin leaves in place.
        self._before: tuple[Run, Position, TrainModule | None] | None = None
        self.running = False  # whether the newest run is not over
        self.compiles = CompileLog()  # how long its steps took to compile
        use_compile_cache(settings.compile_cache)
        self._evaluates: Engine | None = None  # of the newest evaluation
        self._built: Built | None = None
        # What no logger can store; a trial run makes everything and writes nothing.
        self.media = MediaFolder(
            lambda: trainer.run_dir if trainer.is_global_zero and not self.settings.fast_dev_run else None,
            step=lambda: max(self.position.global_step - 1, 0),
            goes_on=lambda: self.running and not self.settings.fast_dev_run,
        )

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy on its devices, which are chosen when a run begins, or when it is read before one."""
        settings = self.settings
        strategy = resolve_strategy(settings.strategy, settings.device_count, settings.mesh)
        strategy.setup(settings.device_count)
        return strategy

    @property
    def engine(self) -> Engine | None:
        """The engine of the newest fit."""
        return None if self.fitted is None else self.fitted.engine

    @property
    def active(self) -> Engine | None:
        """The engine of the run that continues, from before its first batch on."""
        return self.current.engine if self.running and self.current is not None else None

    @out_of_meshes
    def run(self, request: Request, loops: Callable[[Run], Any]) -> Any:
        """Run one of the Trainer's verbs, and return what its loops return: the steps of a run, in their order."""
        stage, results = request.stage, None
        fits = stage.method == "fit"
        if fits:
            check_fit(self.settings, self.callbacks, request)
        loaders = make_loaders(self.settings, stage, request.loaders, request.datamodule)
        resume, load_weights = self._claim_folder(request)
        module, is_ours = self._take_module(request, loaders)
        if fits:
            check_fitting(self.settings, module, resume, request)
        if load_weights is not None:  # before the engine: the optimizer and callbacks may keep copies of parameters
            load_weights(module)
        with contextlib.ExitStack() as ends:  # from here on what has begun is ended, the newest first
            if resume is not None:
                for leaf in () if fits else leaves_of(module):  # the module keeps its own
                    if not is_array(leaf.value):
                        ends.callback(leaf.place.set_raw_value, leaf.value)
                load_numbers(module, resume.checkpoint)
            if fits:
                self._hold_folder(ends)
            ends.enter_context(self._as_newest_run(module))
            hooks, position = self.prepare(stage, module, loaders, resume)
            data = RunData(loaders)
            times = TimeLimits()
            accumulation = Accumulation(self.settings.accumulate_grad_batches, self.settings.accumulate_grad_batches)
            watchdog = ends.enter_context(self._watching(hooks, position))
            ends.enter_context(self._tearing_down(stage, hooks, position, times))
            self._set_up(stage, hooks, resume)
            ends.callback(data.close)
            self._open_loaders(stage, hooks, data, position, accumulation, resume)
            check_first_batches(self.settings, data, watchdog)  # before the engine, which may take minutes to compile
            engine = self._make_engine(hooks, data, is_ours)
            if resume is not None:
                if fits:
                    check_window(resume.checkpoint, accumulation.argument, self.settings)
                load_engine(engine, resume)
                engine.pure.resumed = True
            if is_ours and (fits or resume is None):
                self._built = Built(request.model, module, None if fits else self.settings.seed)
            run = self.current = Run(
                settings=self.settings,
                control=self.control,
                hooks=hooks,
                results=self.results,
                position=position,
                data=data,
                accumulation=accumulation,
                checkpoints=Checkpoints(resume),
                times=times,
                engine=engine,
                prefetcher=self._prefetcher(data, position, watchdog),
            )
            self._begin(run, ends, is_ours)
            results = loops(run)
            if fits:
                hooks("on_fit_end")
                ended = run.is_complete or (self.control.is_final and not self.control.interrupted)
                self.saver.when_written(partial(self.folder.note, ended=ended))
        return results

    def _claim_folder(self, request: Request) -> tuple[Resume | None, Callable[[TrainModule], object] | None]:
        """Return the checkpoint to continue from, or what loads weights, and make the run's folder this Trainer's."""
        method = request.stage.method
        wanted = request.ckpt_path
        if self.running:
            raise ArgumentError(
                f"Trainer.{method} is called from a hook of a run of this Trainer. Use a second Trainer for it."
            )
        _ = self.strategy  # absent devices are refused before anything is set up
        resume = self.settings.resume
        places = (self.callbacks, self.folder)
        argument = f"Trainer.{method}(ckpt_path=...)"
        if method == "fit" and resume is not None:
            if wanted is not None:
                raise ArgumentError(
                    f"Trainer(resume={str(resume)!r}) and fit(ckpt_path={str(wanted)!r}) name two checkpoints. "
                    "Leave one out."
                )
            wanted = resume
            argument = "Trainer(resume=...)"
        checkpoint = resolve_checkpoint(wanted, argument, "resume" if method == "fit" else method, *places)
        # A job that was started again continues from its newest checkpoint, which is further on.
        needs_weights = checkpoint is None or checkpoint.state.get("left_out")  # one of trained_only has no others
        weights = resolve_weights(request.init_from, *places) if needs_weights else None
        files = [name for c in self.callbacks for name in c.row_files]
        self.folder.claim(files, resume, checkpoint, fitting=method == "fit")
        named = wanted not in ("auto", "last", "best")
        return checkpoint and Resume(checkpoint, request.strict, request.reset_optimizer, named=named), weights

    def _take_module(self, request: Request, loaders: Loaders) -> tuple[TrainModule, bool]:
        """Return the module of a run, and whether its arrays are the Trainer's to overwrite.

        A lazy one is built straight into its shards, once its data were looked at, unless it has been built: an
        evaluation takes what an earlier run has built, and a fit trained.
        """
        stage = request.stage
        settings = self.settings
        fits = stage.method == "fit"
        model = request.model
        if not fits and model is None:
            if self.module is None:
                raise ArgumentError(f"Trainer.{stage.method}(model, ...) has no model. Pass one, or call fit first.")
            model = self.module
        check_model(model, stage)
        if not fits:  # `check_fit` has compared a fit
            check_job(stage.method, settings, model)
        use_compile_cache(settings.compile_cache)  # another Trainer may have been made since
        if isinstance(model, TrainModule):
            call_step(model, stage.name)
            loaders.module = model
            return model, False
        built = self._built
        if not fits and built is not None and built.model is model and built.seed in (None, settings.seed):
            loaders.module = built.module
            return built.module, False
        if model.cls is not TrainModule:  # building may take minutes
            loaders.check_before_building(model.cls, (settings.data_timeout, settings.hang_timeout))
        loaders.module = build_lazy(model, self.strategy, settings.seed)
        check_model(loaders.module, stage)
        self._built = Built(model, loaders.module, settings.seed)
        return loaders.module, True

    def _hold_folder(self, ends: contextlib.ExitStack) -> None:
        """Note signals from here on, so that the lock is released and checkpoints are finished, and lock the folder."""
        ends.enter_context(interruptible(self.control))
        if any(c.is_logger or c.role == "checkpoint" for c in self.callbacks):
            # Released after the background writer has finished.
            ends.callback(self.saver.when_written, self.folder.hold().close)
            ends.callback(self.folder.copy)
        self.folder.note(ended=False)

    @contextlib.contextmanager
    def _as_newest_run(self, module: TrainModule) -> Iterator[None]:
        """Make this the newest run inside the block, and the module's Trainer this one."""
        if self.fitted is not None:
            self._before = (self.fitted, self.position, self.module)
        outer = attach(module, self._trainer)
        self.running = True
        self.current = None
        self.module = module
        self.compiles = CompileLog(self._compiled)
        try:
            yield
        except BaseException as error:
            note_step(error, self.position.global_step)
            raise
        finally:
            team().begin()  # what was asked for in this run does not count in another one
            self.running = False
            if self.current is not None:
                self.current.times.ended = time.monotonic()
            if self.fitted is None and self._before is not None:
                self.fitted, self.position, self.module = self._before
            self._before = None
            if outer is not None and outer._session.running:  # a hook of the outer Trainer's run has called this one
                attach(module, outer)

    def prepare(
        self, stage: Stage, module: TrainModule, loaders: Loaders, resume: Resume | None
    ) -> tuple[Hooks, Position]:
        """Reset what the last run left, set the run's callbacks and position, and return its hooks and position."""
        self.control.begin(alone=team().size == 1)
        team().begin()
        self.loaders = loaders
        if loaders.datamodule is not None:
            loaders.datamodule.trainer = self._trainer
        # Cleared now and not at the end of a run, whose metrics a program reads after it. A prediction has none.
        if stage.method != "predict":
            self.results.clear()
        self.media.begin()
        print_again()
        fits = stage.method == "fit"
        if fits:
            self.results.history.clear()
            self.fitted = None
            self.position = Position()
            self.control.should_stop = self.control.is_final = False
            self.control.stop_reason = None
            self.control.verbose = True
        position = dataclasses.replace(self.position)
        if resume is not None:
            position = position_of(resume.checkpoint.state)
        if fits:  # an evaluation of a checkpoint leaves the training where it is
            self.position = position
        # Callbacks of the module before go; a ModelCheckpoint of this one replaces the default.
        default = self.trainer_callbacks.default_checkpoint
        of_trainer = [c for c in without(self.callbacks, self.added) if c is not default]
        self.added = [c for c in callbacks_of_module(module) if self.takes(c)]
        if default is not None and all(c.role != "checkpoint" for c in self.added):
            of_trainer.append(default)
        self.callbacks = check_callbacks(of_trainer + self.added)
        loggers: list[Any] = [c for c in self.callbacks if c.is_logger]
        for logger in loggers:  # before `prepare_data`, in which a module may log pictures already
            logger.attach(self._trainer, self.media)
        hooks = Hooks(
            self._trainer, module, self.callbacks, HostLog(self.results, position), loaders.datamodule, position
        )
        return hooks, position

    @contextlib.contextmanager
    def _watching(self, hooks: Hooks, position: Position) -> Iterator[Watchdog]:
        """Watch the other processes, compiles and the run's progress inside the block."""
        place = partial(place_of, hooks, position)
        watchdog = Watchdog(
            self.settings.data_timeout,
            self.settings.hang_timeout,
            control=self.control,
            progress=lambda: (hooks.log.hook, self.current and self.current.progress),
            place=place,
            rescue=lambda: rescue(self._trainer, self.current, place()),
            leave=team().leave,
        )
        before = team().watch(Watch(place, self.settings.fail_timeout))
        token = READS_ARE_COMPARED.set(self.settings.debug)
        try:
            with self.compiles.listening(), watchdog:
                yield watchdog
        finally:
            READS_ARE_COMPARED.reset(token)
            team().watch(before)

    @contextlib.contextmanager
    def _tearing_down(self, stage: Stage, hooks: Hooks, position: Position, times: TimeLimits) -> Iterator[None]:
        """Call the hooks that end a run after the block, and raise the first error of all."""
        error = None
        try:
            yield
        except BaseException as raised:
            error = explained(raised, self.current)
            times.fail(error, place_of(hooks, position))
            error = team().explained(error)
            # Every callback is called and torn down, whatever another one raises meanwhile.
            hooks.call_all("on_exception", error, error)
        # The saver last: a callback's teardown waits for its own checkpoints, and reports their errors.
        error = self.saver.finish(hooks.call_all("teardown", stage.method, error))
        if error is not None:
            times.fail(error, place_of(hooks, position))
            raise error
        self.control.take(team().decide(self.control.asked or ()))  # the last place for a signal

    def _set_up(self, stage: Stage, hooks: Hooks, resume: Resume | None) -> None:
        """Call the hooks that begin a run, and give the callbacks of a fit their states."""
        if hooks.bind("prepare_data"):
            once_per_node(partial(hooks, "prepare_data"), "prepare_data")
        hooks("setup", stage.method)
        # After setup, where a callback makes what its state goes into, before the hooks of loaders.
        if stage.method == "fit" and resume is not None:
            # Without these a training is the same: their state is about files.
            silent = ("ModelCheckpoint", "CSVLogger")
            with fitting(resume.checkpoint.path):
                not_taken = snapshot.load_callbacks(hooks, resume.checkpoint.state)
            ignored = [key for key in not_taken if not key.startswith(silent)]
            if ignored:
                text = "%s has the state of %s, which is not among the callbacks now."
                _logger.warning(text, resume.checkpoint.path, ", ".join(ignored))

    def _open_loaders(
        self,
        stage: Stage,
        hooks: Hooks,
        data: RunData,
        position: Position,
        accumulation: Accumulation,
        resume: Resume | None,
    ) -> None:
        """Open the loaders; before the optimizer, whose schedule may ask how long training is."""
        settings = self.settings
        loaders = data.loaders
        if stage.method != "fit":
            data.val = loaders.open(stage.name, required=True)
            return
        check_windows(settings, hooks.callbacks, position.epoch)
        epoch, every = position.epoch, settings.reload_dataloaders_every_n_epochs
        position.epoch = epoch - epoch % every if every else 0  # at which an uninterrupted run has called the hooks
        source, limit = data.open_train(settings)
        check_end(settings, hooks.callbacks, source, limit)
        data.val = loaders.open("validation", required=False)
        position.epoch, epoch = epoch, position.epoch
        if data.val and not is_overridden(hooks.module, "validation_step"):
            data.val = []  # made by a hook: those of an argument are refused
        if data.val:
            call_step(hooks.module, "validation")
        check_reload(settings, data)
        data.count(self.control, accumulation.argument)
        is_new = every and epoch == position.epoch and not position.inside and loaders.from_hook("training")
        if resume is not None and not is_new:
            with fitting(resume.checkpoint.path):
                snapshot.load_loader(source, resume.checkpoint.state)
            position.data = source.begins_at  # until a batch is used, a checkpoint has the place of this one

    def _make_engine(self, hooks: Hooks, data: RunData, is_ours: bool) -> Engine:
        """Return the engine of a run, with the arrays of the module, which it may overwrite if they are ours."""
        settings = self.settings
        module = hooks.module
        if is_ours:  # the engine gets its arrays, and may lose or overwrite them
            self._built = None
        if not data.is_fit:
            return self._evaluator(module, is_ours=is_ours)
        if isinstance(self.strategy, Auto):
            self.strategy = choose(self.strategy, settings, hooks, data)
            is_ours = False  # no buffer can be reused for other shards
        # It holds this module's arrays, which the first step overwrites.
        self._evaluates = None
        options = step_options(settings, hooks, first_example(data))
        precision = Precision(settings.precision)
        arguments = {"precision": precision, "debug": settings.debug, "take_ownership": is_ours}
        engine = Engine(module, self.strategy, options, **arguments)
        if any(getattr(c, "trained_only", False) for c in hooks.callbacks):
            engine.left_out()  # hashes the arrays before a checkpoint replaces them, and so that no save does
        return engine

    def _evaluator(self, module: TrainModule, *, is_ours: bool = False) -> Engine:
        """Return an engine that evaluates the module, of the programs of the newest evaluation or fit if they serve."""
        settings = self.settings
        precision = Precision(self.settings.precision)
        known = [x for x in (self._evaluates, self.engine) if x is not None]
        engine = next((x for x in known if x.serves(module, precision, settings.debug)), None)
        self._evaluates = None  # first, so that its arrays are not held as well as the new ones
        if engine is None:
            arguments = {"precision": precision, "debug": settings.debug, "take_ownership": is_ours}
            engine = Engine(module, self.strategy, None, **arguments)
        self._evaluates = engine.evaluator(None if is_ours else module)
        return self._evaluates

    def _prefetcher(self, data: RunData, position: Position, watchdog: Watchdog) -> Prefetcher:
        """Return what draws a run's batches and places them."""
        strategy = self.strategy
        takes_host_arrays = strategy.mesh.size == 1 and type(strategy).shard_batch is Strategy.shard_batch
        return Prefetcher(
            None if takes_host_arrays else strategy.shard_batch,
            validator_of=data.loaders.validator_of,
            splits=strategy.splits_by_process,
            prefetch=self.settings.prefetch,
            watchdog=watchdog,
            epoch=lambda: position.epoch,
        )

    def _begin(self, run: Run, ends: contextlib.ExitStack, is_ours: bool) -> None:
        """Let hooks see the run's arrays through the module, and begin a fit."""
        hooks = run.hooks
        fits = run.data.is_fit
        if fits:
            warn_of_eval_mode(run.module)
            self.fitted = run
            self._before = None  # which would hold the arrays of the fit before
        else:
            run.engine.state.count_from(run.position.global_step, run.position.epoch)
        # The module has its arrays again at the end.
        live = hooks.live = ModuleSync(run.module, run.engine, lambda: hooks.log.hook, put_back=not (fits or is_ours))
        ends.callback(self._end_loops, run)
        ends.enter_context(live.registered())
        ends.enter_context(contextlib.closing(run.prefetcher))
        if not fits:
            return
        if (resume := run.checkpoints.resume) is not None:
            # Sums and counters go to the device, so not before there is an engine.
            with fitting(resume.checkpoint.path):
                snapshot.load_run(run, resume.checkpoint.state)
            if resume.strict and not resume.reset_optimizer:  # else a rollback could not restore its state
                run.checkpoints.written.append(resume.checkpoint.path)
            hooks("on_load_checkpoint", dict(resume.checkpoint.state))
        log_hyperparams(hooks)
        hooks("on_fit_start")

    def _end_loops(self, run: Run) -> None:
        """Count what follows as the end of the run."""
        run.begin("end")
        run.accumulation.argument_at_end = self.settings.accumulate_grad_batches

    def set(self, name: str, value: Any) -> None:
        """Set an argument, from now on."""
        settings = self.settings.replace(name, value)
        check_accumulation(self.active, settings)  # before it counts, so that a refused value changes nothing
        self.settings = settings
        if self.current is not None:
            self.current.settings = settings
        self._ask_again()

    def _compiled(self, seconds: float) -> None:
        run = self.current
        if run is not None and run.part != "compile" and not run.hooks.log.hook:  # whose time is a hook's
            run.spent["compile"] = run.spent.get("compile", 0.0) + seconds
        self._ask_again()

    def _ask_again(self) -> None:
        """Have the loop ask what acts next: an interval may have changed."""
        if self.current is not None:
            self.current.due.forget()

    def stop_after(self, seconds: float, reason: str, at_epoch_end: bool) -> None:
        """See `Trainer.stop_after`."""
        if self.fitted is None or not self.running:
            raise ArgumentError("Trainer.stop_after(...) ends a training that runs. Call it in on_fit_start or later.")
        self.fitted.times.stop_after(seconds, reason, at_epoch_end=at_epoch_end)
        self._ask_again()

    @out_of_meshes
    def apply(self, fn: Callable[..., Any], *inputs: Any) -> Any:
        """Run `fn(module, *inputs)` compiled, with the arrays that the module of the newest run has now."""
        if self.active is not None and self.current is not None:
            # What the hook that calls this has written to the module counts.
            self.current.hooks.take_writes("Trainer.apply")
            return self.active.apply(fn, *inputs)
        if self.module is None:
            raise ArgumentError("Trainer.apply needs weights. Call it from a hook, or after fit.")
        return self._evaluator(self.module).apply(fn, *inputs)
