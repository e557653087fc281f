"""The engines of a Trainer's runs, and the modules that it builds for them."""

from functools import cached_property

from jaxlit.core.module import TrainModule
from jaxlit.core.precision import Precision
from jaxlit.core.stage import Stage
from jaxlit.data.loaders import Loaders
from jaxlit.engine.compile_cache import use_compile_cache
from jaxlit.engine.engine import Engine
from jaxlit.engine.kept import EvalCache
from jaxlit.engine.lazy import lazy
from jaxlit.loop.restore import load_engine
from jaxlit.loop.run import Setup
from jaxlit.loop.settings import Settings
from jaxlit.strategies.auto import Auto
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.registry import resolve_strategy
from jaxlit.trainer.auto_choice import choose
from jaxlit.trainer.building import build, check_model
from jaxlit.trainer.job import check_job
from jaxlit.trainer.opening import check_window
from jaxlit.trainer.step_options import first_example, step_options


class Engines:
    """Makes the engine of each run; what an evaluation needs is kept for the next one.

    Args:
        settings: The Trainer's arguments. Programs are stored where they say from now on: a module that is made next
            compiles some as well.
    """

    def __init__(self, settings: Settings) -> None:
        use_compile_cache(settings.compile_cache)
        self._settings, self._kept = settings, EvalCache()
        # The newest module that was built of a lazy one, and the seed of its weights, None once a fit has trained them.
        self._built: tuple[lazy, TrainModule, int | None] | None = None

    @cached_property
    def strategy(self) -> Strategy:
        """The strategy on its devices, which are chosen when a run begins, or when it is read before one."""
        settings = self._settings
        strategy = resolve_strategy(settings.strategy, settings.device_count, settings.mesh)
        strategy.setup(settings.device_count)
        return strategy

    def module_of(
        self, model: TrainModule | lazy, stage: Stage, loaders: Loaders, settings: Settings
    ) -> tuple[TrainModule, bool]:
        """Return the module of a run, and whether its arrays are the Trainer's to overwrite.

        A lazy one is built, unless it has been: an evaluation takes what an earlier run has built, and a fit trained.
        """
        check_model(model, stage)
        if stage.method != "fit":  # which has begun with it
            check_job(stage.method, settings, model)
        use_compile_cache(settings.compile_cache)  # another Trainer may have been made since
        if stage.method != "fit" and self._built is not None:
            known, loaders.module, seed = self._built
            if known is model and seed in (None, settings.seed):
                return loaders.module, False
        loaders.module = build(model, stage, loaders, self.strategy, settings)
        if isinstance(model, lazy):
            self._built = model, loaders.module, settings.seed
        return loaders.module, isinstance(model, lazy)

    def make(self, run: Setup, fitted: Engine | None, *, take_ownership: bool) -> Engine:
        """Return the engine of a run, with the arrays of the module, or of the checkpoint that it begins with.

        Args:
            run: The run.
            fitted: The engine of the last fit.
            take_ownership: Whether it may overwrite the module's arrays.
        """
        built, resume = self._built, run.checkpoints.resume
        if take_ownership:  # the engine gets its arrays, and may lose or overwrite them
            self._built = None
        if run.data.is_fit:
            engine = self._of_fit(run, take_ownership)
        else:
            engine = self.evaluator(run.module, run.settings, fitted, take_ownership=take_ownership)
        if resume is not None:
            if run.data.is_fit:
                check_window(resume.checkpoint, run)
            else:
                self._kept.forget_sources()
            load_engine(engine, resume)
        if take_ownership and built is not None and (run.data.is_fit or resume is None):
            self._built = (*built[:2], None) if run.data.is_fit else built
        return engine

    def evaluator(
        self,
        module: TrainModule,
        settings: Settings,
        fitted: Engine | None,
        *,
        take_ownership: bool = False,
    ) -> Engine:
        """Return the engine of an evaluation, with what an earlier call has compiled and placed; see `EvalCache`."""
        given = module, self.strategy, Precision(settings.precision)
        return self._kept.evaluator(*given, debug=settings.debug, take_ownership=take_ownership, fitted=fitted)

    def _of_fit(self, run: Setup, take_ownership: bool) -> Engine:
        settings = run.settings
        if isinstance(self.strategy, Auto):
            self.strategy, take_ownership = (
                choose(self.strategy, run),
                False,
            )  # no buffer can be reused for other shards
        # The engines of evaluations hold this module's arrays, which the first step overwrites.
        self._kept.forget()
        precision = Precision(settings.precision)
        return Engine(
            run.module,
            self.strategy,
            step_options(run, first_example(run)),
            precision=precision,
            debug=settings.debug,
            take_ownership=take_ownership,
        )
