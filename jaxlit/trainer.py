"""The Trainer: arguments become objects, and the loops run."""

import inspect
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxlit import arguments as check
from jaxlit import loop
from jaxlit.callbacks.base import Callback
from jaxlit.data import Source, limit_of, sources
from jaxlit.engine import Engine, build_lazy, check_variables
from jaxlit.errors import ArgumentError, ArgumentTypeError, ModuleError, did_you_mean
from jaxlit.hooks import Hooks
from jaxlit.live import Live
from jaxlit.metrics import MetricView, Results
from jaxlit.module import STEPS, TrainModule, attach, call_step, is_overridden, lazy, optimizer_of
from jaxlit.state import TrainState
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.registry import resolve_strategy


class Trainer:
    """Trains a `TrainModule` under a strategy.

    Names, meanings and defaults are Lightning's unless said. `fit` wants `max_epochs` or `max_steps`.

    Args:
        strategy: A name ("single", "ddp", "fsdp", "zero1", "shard_map", "pmap", "simulate:8", "auto" or a
            registered one) or a `Strategy`.
        devices: How many devices, or "auto" for all; `single` uses one.
        max_epochs: Epochs to train; None or -1 for no limit.
        max_steps: Optimizer steps to train, -1 for no limit.
        callbacks: A callback or a list of them.
        logger: True for a CSVLogger unless the callbacks hold one, False, or loggers (which are callbacks).
        limit_train_batches: Batches an epoch: an int counts, a float is a fraction.
        limit_val_batches: The same for validation; 0 turns it off.
        limit_test_batches: The same for `test`.
        limit_predict_batches: The same for `predict`.
        num_sanity_val_steps: Validation batches of each loader before training, -1 for all.
        check_val_every_n_epoch: Epochs between validations.
        accumulate_grad_batches: Loader batches an optimizer step, weighted by their rows.
        log_every_n_steps: Optimizer steps between logged rows, 0 for none.
        enable_checkpointing: Must be False: nothing writes checkpoints.
        enable_progress_bar: Add a ProgressBar unless the callbacks hold one.
        enable_model_summary: Add a ModelSummary unless the callbacks hold one.
        default_root_dir: The run's folder; None for a fresh `runs/<time>-<id>`, made at the first write.
        seed: The seed of a lazy module's `rngs`.
        nan_policy: What a non-finite loss or gradient does: "raise" (the parameters stay those before it),
            "skip" (no update for that step) or "ignore" (nothing is checked).
        max_in_flight: The most steps dispatched and not finished; "auto": 32 on one device, 4 on several.

    Raises:
        ArgumentError: A value is out of its set, or does not fit another.
        ArgumentTypeError: A value has the wrong type, or no argument has this name.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy="ddp", max_epochs=3, logger=False)
    """

    def __init__(
        self,
        *,
        strategy: str | Strategy = "auto",
        devices: int | str = "auto",
        max_epochs: int | None = None,
        max_steps: int = -1,
        callbacks: Callback | Sequence[Callback] | None = None,
        logger: bool | Callback | Sequence[Callback] = True,
        limit_train_batches: int | float = 1.0,
        limit_val_batches: int | float = 1.0,
        limit_test_batches: int | float = 1.0,
        limit_predict_batches: int | float = 1.0,
        num_sanity_val_steps: int = 2,
        check_val_every_n_epoch: int = 1,
        accumulate_grad_batches: int = 1,
        log_every_n_steps: int = 50,
        enable_checkpointing: bool = False,
        enable_progress_bar: bool = True,
        enable_model_summary: bool = True,
        default_root_dir: str | Path | None = None,
        seed: int = 0,
        nan_policy: str = "raise",
        max_in_flight: int | str = "auto",
        **unknown: Any,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "unknown", "__class__")}
        for name in unknown:
            known = [p for p in inspect.signature(Trainer).parameters if p != "unknown"]
            raise ArgumentTypeError(f"Trainer has no argument {name!r}.{did_you_mean(name, known)} Known: {known}.")
        self.max_epochs = None if max_epochs in (None, -1) else check.integer("max_epochs", max_epochs, low=0)
        self.max_steps = check.integer("max_steps", max_steps, low=-1)
        self.num_sanity_val_steps = check.integer("num_sanity_val_steps", num_sanity_val_steps, low=-1)
        self.check_val_every_n_epoch = check.integer("check_val_every_n_epoch", check_val_every_n_epoch, low=1)
        self.accumulate_grad_batches = check.integer("accumulate_grad_batches", accumulate_grad_batches, low=1)
        self.log_every_n_steps = check.integer("log_every_n_steps", log_every_n_steps, low=0)
        self.seed = check.integer("seed", seed, low=0)
        self.nan_policy = check.one_of("nan_policy", nan_policy, ("raise", "skip", "ignore"))
        self._limits = {
            "training": check.limit("limit_train_batches", limit_train_batches),
            "validation": check.limit("limit_val_batches", limit_val_batches),
            "test": check.limit("limit_test_batches", limit_test_batches),
            "predict": check.limit("limit_predict_batches", limit_predict_batches),
        }
        check.boolean("enable_checkpointing", enable_checkpointing)
        if enable_checkpointing:
            raise ArgumentError("Trainer(enable_checkpointing=True): checkpoints are not there yet. Leave it out.")
        if max_in_flight != "auto":
            check.integer("max_in_flight", max_in_flight, low=1)
        self._max_in_flight = max_in_flight
        self._devices = None if devices == "auto" else check.integer("devices", devices, low=1)
        self.strategy = resolve_strategy(strategy, self._devices)
        # Before anything is trained, so that a wrong count is refused here.
        self.strategy.setup(self.strategy.choose_devices(self._devices))
        if default_root_dir is not None and not isinstance(default_root_dir, (str, Path)):
            raise ArgumentTypeError(f"Trainer(default_root_dir=...) takes a path, got {default_root_dir!r}.")
        self._root = None if default_root_dir is None else Path(default_root_dir)
        self._run_dir: Path | None = self._root
        self._owns_root = False
        self.callbacks = check.callbacks("callbacks", callbacks) + self._loggers(logger, callbacks)
        self._add_defaults(enable_progress_bar, enable_model_summary)
        self.config = {k: v if isinstance(v, (bool, int, float, str, type(None))) else str(v) for k, v in given.items()}
        self.config |= {"callbacks": [type(c).__name__ for c in self.callbacks], "logger": bool(self.loggers)}

        self.should_stop, self.stop_reason = False, None
        self.sanity_checking = False
        self.module: TrainModule | None = None
        self._position, self._results = loop.Position(), Results()
        self._engine: Engine | None = None
        self._running = False
        self.num_training_batches: int | float = 0
        self.num_val_batches: list[int | float] = []

    # What runs --------------------------------------------------------------------------------------

    def fit(self, model: TrainModule | lazy, train_dataloaders: Any = None, val_dataloaders: Any = None) -> None:
        """Train a module; afterwards it holds the trained weights.

        Args:
            model: The module, or `jl.lazy(...)`; then the built module is `trainer.module`.
            train_dataloaders: A `jl.ArrayLoader`, a grain dataset of batches or another re-iterable of pytrees of
                numpy arrays; a batch holds global rows.
            val_dataloaders: The same for validation, or a list of several.

        Raises:
            JaxlitError: An argument, the module or the data cannot be used.
        """
        if self.max_epochs is None and self.max_steps < 0:
            raise ArgumentError("Trainer.fit has no limit. Pass Trainer(max_epochs=...) or Trainer(max_steps=...).")
        self._claim_root()
        train = Source(train_dataloaders, "Trainer.fit(train_dataloaders=...)")
        train_limit = limit_of(self._limits["training"], train, "limit_train_batches")
        if train_limit is None and train.length is None and self.max_steps < 0 and _is_endless(train):
            raise ArgumentError(
                "Trainer.fit(train_dataloaders=...) got a loader without end and no limit. Pass "
                "Trainer(max_steps=...) or Trainer(limit_train_batches=...)."
            )
        module, own = self._build(model, "training")
        val = self._limited(val_dataloaders, "val_dataloaders", "validation", "fit")
        if val and val_dataloaders is not None and not is_overridden(module, "validation_step"):
            raise ModuleError(
                f"{type(module).__name__} has no validation_step, and Trainer.fit got val_dataloaders. "
                "Define validation_step(self, batch), or leave val_dataloaders out."
            )
        self.should_stop, self.stop_reason = False, None
        self._position = loop.Position()
        self.num_training_batches = _count(train, train_limit)
        self.num_val_batches = [_count(*pair) for pair in val]

        def train_module(run: loop.Run) -> None:
            run.train, run.val = (train, train_limit), val
            if self._limits["training"] == 0:
                self.stop("limit_train_batches=0")
            loop.fit(run)

        self._run(module, "fit", train_module, own=own)

    def validate(self, model: TrainModule | lazy | None = None, dataloaders: Any = None) -> list[dict[str, float]]:
        """Run the validation step over loaders.

        Args:
            model: The module; None for the one of the last fit.
            dataloaders: A loader, or a list of several.

        Returns:
            The metrics of each loader.
        """
        return self._evaluate(model, dataloaders, "validate", "validation")

    def test(self, model: TrainModule | lazy | None = None, dataloaders: Any = None) -> list[dict[str, float]]:
        """Run the test step over loaders; otherwise like `validate`."""
        return self._evaluate(model, dataloaders, "test", "test")

    def predict(
        self, model: TrainModule | lazy | None = None, dataloaders: Any = None, *, return_predictions: bool = True
    ) -> list[Any] | None:
        """Run the predict step over loaders.

        Args:
            model: The module; None for the one of the last fit.
            dataloaders: A loader, or a list of several.
            return_predictions: Whether to keep and return what the step returns.

        Returns:
            One entry a batch: what `predict_step` returned, as numpy, with the real rows in loader order. For
            several loaders a list of such lists. None without `return_predictions`.
        """
        check.boolean("return_predictions", return_predictions)
        module, own = self._build(self._given(model, "predict"), "predict")
        loaders = self._limited(dataloaders, "dataloaders", "predict", "predict", required=True)
        found: list[list[Any]] = []
        self._run(module, "predict", lambda run: found.extend(loop.predict(run, loaders, return_predictions)), own=own)
        if not return_predictions:
            return None
        return found if len(found) > 1 else found[0]

    def stop(self, reason: str) -> None:
        """End training after the current step, validating once if validation was due this epoch."""
        self.should_stop, self.stop_reason = True, self.stop_reason or reason

    # What callbacks read ----------------------------------------------------------------------------

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0; after `fit` the number of epochs."""
        return self._position.epoch

    @property
    def global_step(self) -> int:
        """Optimizer steps taken."""
        return self._position.global_step

    @property
    def callback_metrics(self) -> MetricView:
        """Every logged metric; reading a key fetches it from the device."""
        return self._results.callback_metrics

    @property
    def logged_metrics(self) -> MetricView:
        """The metrics that go to loggers."""
        return self._results.logged_metrics

    @property
    def progress_bar_metrics(self) -> MetricView:
        """The metrics logged with `prog_bar=True`."""
        return self._results.progress_bar_metrics

    @property
    def state(self) -> TrainState:
        """The training state as global arrays; the next step overwrites them, so copy what you keep."""
        if self._engine is None:
            raise AttributeError("trainer.state is there from fit on. Call trainer.fit(module, ...) first.")
        return self.strategy.canonical(self._engine.state)

    @property
    def run_dir(self) -> Path:
        """The run's folder; whoever writes first makes it."""
        if self._run_dir is None:
            self._run_dir = Path("runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
        return self._run_dir

    @property
    def log_dir(self) -> Path:
        """The same as `run_dir`."""
        return self.run_dir

    @property
    def loggers(self) -> list[Callback]:
        """The callbacks that log rows to somewhere."""
        from jaxlit.callbacks import CSVLogger, WandbLogger

        return [c for c in self.callbacks if isinstance(c, (CSVLogger, WandbLogger)) or c in self._extra_loggers]

    @property
    def early_stopping_callback(self) -> Callback | None:
        """The first EarlyStopping."""
        from jaxlit.callbacks import EarlyStopping

        return next((c for c in self.callbacks if isinstance(c, EarlyStopping)), None)

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the process that writes files."""
        return jax.process_index() == 0

    # Helpers ----------------------------------------------------------------------------------------

    def _evaluate(self, model: Any, dataloaders: Any, verb: str, stage: str) -> list[dict[str, float]]:
        module, own = self._build(self._given(model, verb), stage)
        loaders = self._limited(dataloaders, "dataloaders", stage, verb, required=True)
        found: list[dict[str, float]] = []
        self._run(module, verb, lambda run: found.extend(loop.evaluate(run, stage, loaders)), own=own)
        return found

    def _run(self, module: TrainModule, stage: str, work: Any, *, own: bool) -> None:
        """Set everything up, do the work, and tear everything down, also after an error."""
        if self._running:
            raise ArgumentError(f"Trainer.{stage} is called from a hook of a run. Use a second Trainer for it.")
        self._running, self.module = True, module
        attach(module, self)
        hooks = Hooks(self, module, self.callbacks)
        if stage == "fit":
            self._results.clear()
        try:
            hooks("setup", stage)
            optimizer = optimizer_of(module) if stage == "fit" else None
            engine = Engine(
                module,
                self.strategy,
                optimizer,
                accumulate=self.accumulate_grad_batches if stage == "fit" else 1,
                nan_policy=self.nan_policy,
                own=own,
            )
            run = loop.Run(self, module, engine, hooks, self._results, self._position, self._bound())
            if stage != "fit":
                work(run)
            else:
                self._engine = engine
                hooks.live = Live(module, engine)
                with hooks.live.registered():
                    hooks("on_fit_start")
                    work(run)
                    hooks("on_fit_end")
        except BaseException as error:
            self._each(hooks, "on_exception", error, error)
            self._each(hooks, "teardown", stage, error)
            raise
        else:
            if (error := self._each(hooks, "teardown", stage, None)) is not None:
                raise error
        finally:
            self._running = False

    def _each(self, hooks: Hooks, hook: str, argument: Any, first: BaseException | None) -> BaseException | None:
        """Call every hook of a name whatever the others raise, and return the first error of all.

        A later error is noted on the first: it never hides it.
        """
        for owner, function in hooks.bind(hook):
            try:
                function(self, hooks.module, argument)
            except Exception as error:
                if first is None:
                    first = error
                else:
                    first.add_note(f"{owner}.{hook} raised as well: {error!r}")
        return first

    def _given(self, model: Any, verb: str) -> TrainModule | lazy:
        if model is None and self.module is None:
            raise ArgumentError(f"Trainer.{verb}(model, ...) has no model. Pass one, or call fit first.")
        return self.module if model is None else model  # type: ignore[return-value]

    def _build(self, model: Any, stage: str) -> tuple[TrainModule, bool]:
        """Return the module, and whether its arrays are the Trainer's to overwrite."""
        if not isinstance(model, (TrainModule, lazy)):
            kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
            hint = " Pass an instance, or jl.lazy(cls, ...)." if isinstance(model, type) else ""
            raise ArgumentTypeError(f"Trainer takes a jaxlit.TrainModule as model, got {kind}.{hint}")
        cls = model.cls if isinstance(model, lazy) else type(model)
        if getattr(cls, STEPS[stage]) is getattr(TrainModule, STEPS[stage]):
            raise ModuleError(f"{cls.__name__} has no {STEPS[stage]}. Define {STEPS[stage]}(self, batch).")
        if isinstance(model, lazy):
            return build_lazy(model, self.strategy, self.seed), True
        call_step(model, stage)
        check_variables(model)
        return model, False

    def _limited(
        self, loaders: Any, argument: str, stage: str, verb: str, required: bool = False
    ) -> list[tuple[Source, int | None]]:
        if loaders is None and required:
            raise ArgumentError(f"Trainer.{verb}(model, dataloaders) needs a loader. Pass one.")
        found = sources(loaders, f"Trainer.{verb}({argument}=...)")
        name = {"validation": "val"}.get(stage, stage)
        limits = [limit_of(self._limits[stage], source, f"limit_{name}_batches") for source in found]
        return [(s, n) for s, n in zip(found, limits, strict=True) if n != 0 or s.length == 0]

    def _bound(self) -> int:
        if isinstance(self._max_in_flight, int):
            return self._max_in_flight
        return 32 if self.strategy.mesh.size == 1 else 4

    def _claim_root(self) -> None:
        """Refuse a folder that holds another Trainer's run."""
        if self._root is None or self._owns_root:
            return
        for name in ("metrics.csv", "checkpoints"):
            if (self._root / name).exists():
                raise ArgumentError(
                    f"Trainer(default_root_dir={str(self._root)!r}) holds {name} of another run. "
                    "Pass another folder, or move that run away."
                )
        self._owns_root = True

    def _loggers(self, logger: Any, callbacks: Any) -> list[Callback]:
        self._extra_loggers: list[Callback] = []
        if isinstance(logger, bool):
            from jaxlit.callbacks import CSVLogger

            has = any(isinstance(c, CSVLogger) for c in check.callbacks("callbacks", callbacks))
            return [CSVLogger()] if logger and not has else []
        self._extra_loggers = check.callbacks("logger", logger)
        return self._extra_loggers

    def _add_defaults(self, progress_bar: bool, summary: bool) -> None:
        from jaxlit.callbacks import ModelSummary, ProgressBar

        for kind, name, enabled in (
            # The bar's header comes before the summary's table.
            (ProgressBar, "enable_progress_bar", check.boolean("enable_progress_bar", progress_bar)),
            (ModelSummary, "enable_model_summary", check.boolean("enable_model_summary", summary)),
        ):
            present = any(isinstance(c, kind) for c in self.callbacks)
            if present and not enabled:
                raise ArgumentError(
                    f"Trainer({name}=False) with a {kind.__name__} among the callbacks. Leave one of them out."
                )
            if enabled and not present:
                self.callbacks.append(kind())


def _count(source: Source, limit: int | None) -> int | float:
    return float("inf") if limit is None else limit


def _is_endless(source: Source) -> bool:
    try:
        return len(source.loader) > 2**60  # grain's repeat() without end
    except TypeError:
        return False
