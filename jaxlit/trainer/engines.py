"""The engines of a Trainer's runs, and the modules that it builds for them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlit.callbacks.base import Callback
from jaxlit.core.groups import labels_of, names_in
from jaxlit.core.module import TrainModule
from jaxlit.core.optimizer_of import optimizer_of
from jaxlit.core.parts import Part, by_part
from jaxlit.core.plan import TrainingPlan
from jaxlit.core.precision import Precision
from jaxlit.core.replica import num_rows, with_rows
from jaxlit.core.stage import Stage
from jaxlit.data.loaders import Loaders
from jaxlit.engine.compile_cache import use_compile_cache
from jaxlit.engine.engine import Engine
from jaxlit.engine.kept import EvalCache
from jaxlit.engine.lazy import lazy
from jaxlit.errors import ArgumentError, ModuleError
from jaxlit.loop.hooks import Hooks, fitting, overrides
from jaxlit.loop.restore import load_engine
from jaxlit.loop.run import Setup
from jaxlit.loop.settings import Settings
from jaxlit.shown import shown
from jaxlit.strategies.base import Strategy
from jaxlit.trainer.building import build, check_model
from jaxlit.trainer.job import check_job
from jaxlit.trainer.opening import check_window


class Engines:
    """Makes the engine of each run; what an evaluation needs is kept for the next one.

    Args:
        strategy: Returns the strategy, set up.
        compile_cache: Where programs are stored, from now on: a module that is made next compiles some as well.
    """

    def __init__(self, strategy: Callable[[], Strategy], compile_cache: bool | str | Path) -> None:
        use_compile_cache(compile_cache)
        self._strategy, self._kept = strategy, EvalCache()
        # The newest module that was built of a lazy one, and the seed of its weights, None once a fit has trained them.
        self._built: tuple[lazy, TrainModule, int | None] | None = None

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
        loaders.module = build(model, stage, loaders, self._strategy(), settings)
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
        given = module, self._strategy(), Precision(settings.precision)
        return self._kept.evaluator(*given, debug=settings.debug, take_ownership=take_ownership, fitted=fitted)

    def _of_fit(self, run: Setup, take_ownership: bool) -> Engine:
        settings = run.settings
        # The engines of evaluations hold this module's arrays, which the first step overwrites.
        self._kept.forget()
        example = run.data.loaders.validator_of(run.data.training[0]).example  # None where a hook has yet to make it
        if example is not None and (processes := jax.process_count()) > 1:
            example = with_rows(example, processes * num_rows(example))
        optimizer = optimizer_of(run.module)
        # A later epoch may need room for a window; a subclass need not know which.
        least = 1 if all(c.batches_per_step(0) is None for c in run.hooks.callbacks) else 2
        parts = frozen_parts(run.hooks.callbacks, run.module, optimizer.wrt)
        plan = TrainingPlan(
            by_part(optimizer, parts),
            accumulate=max(settings.accumulate_grad_batches, least),
            nan_policy="raise" if settings.nan_policy == "rollback" else settings.nan_policy,
            clip=settings.clip,
            extras=array_keepers(run.hooks),
            parts=parts,
            tolerates=run.hooks.tolerates,
            example=example,
        )
        precision = Precision(settings.precision)
        return Engine(
            run.module,
            self._strategy(),
            plan,
            precision=precision,
            debug=settings.debug,
            take_ownership=take_ownership,
        )


def frozen_parts(callbacks: Sequence[Callback], module: TrainModule, wrt: Any) -> tuple[Part, ...]:
    """Return the parts of the parameters that callbacks freeze for some epochs.

    Args:
        callbacks: The callbacks of a fit.
        module: Its module.
        wrt: The filter of what is trained.

    Raises:
        ArgumentError: A name is of no trained parameter, two have the same, or are called alike.
    """
    freezes: list[Any] = [c for c in callbacks if c.frozen_part is not None]
    parts, known = list[Part](), frozenset(names_in(module, wrt, ...))
    for callback, label in zip(freezes, labels_of([c.frozen_part for c in freezes], "part"), strict=True):
        names, whose = frozenset(callback.names(module, wrt)), f"{type(callback).__name__}.names(...)"
        if not names or not names <= known:
            raise ArgumentError(
                f"{whose} takes names of trained parameters of {type(module).__name__}, got "
                f"{shown(sorted(names - known))}. It has: {shown(sorted(known))}."
            )
        if both := sorted(name for part in parts for name in part.names & names):
            raise ArgumentError(f"{whose} has {both[0]}, which another one also has. Give each its own parameters.")
        if label in {part.label for part in parts}:
            raise ArgumentError(f"Two BackboneFreezes have parts that are called {label!r}. Join them by nnx.Any.")
        parts.append(Part(label, names, callback.unfreeze_at_epoch, callback.tx))
    return tuple(parts)


def array_keepers(hooks: Hooks) -> dict[str, Callback]:
    """Return the callbacks that keep arrays, by the keys of their states.

    Raises:
        ModuleError: One has only one of the two methods, or a method takes other arguments.
    """
    methods, keepers = ("init_arrays", "update_arrays"), {}
    for key, callback in hooks.keyed().items():
        defined = [fitting(callback, name) for name in methods if overrides(callback, name)]
        if len(defined) == 1:
            raise ModuleError(
                f"{type(callback).__name__} defines one of init_arrays and update_arrays: a callback's arrays are made "
                "by the first and changed by the second. Define both."
            )
        if defined:
            keepers[key] = callback
    return keepers
