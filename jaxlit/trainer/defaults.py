"""What follows from the arguments of a Trainer: its callbacks, its config, and the options of optimizer steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.csv_logger import CSVLogger
from jaxlit.callbacks.logger import NoLogger
from jaxlit.callbacks.model_checkpoint import ModelCheckpoint
from jaxlit.callbacks.model_summary import ModelSummary, Row, summarize
from jaxlit.callbacks.progress_bar import ProgressBar
from jaxlit.core.module import TrainModule, hparams_of
from jaxlit.core.optimizer import labels_of, names_in
from jaxlit.core.parts import Part, by_part, optimizer_of
from jaxlit.core.replica import num_rows, with_rows
from jaxlit.core.train_state import StepOptions, TrainState
from jaxlit.errors import ArgumentError, ArgumentTypeError, ModuleError, noting_place
from jaxlit.loop.hooks import Hook, Hooks, TimedFunction, fitting, overrides
from jaxlit.loop.run_data import RunData
from jaxlit.loop.settings import Settings
from jaxlit.reporting.media import MediaFolder
from jaxlit.reporting.secrets import redacted
from jaxlit.texts import shown, to_json


@dataclass(frozen=True)
class TrainerCallbacks:
    """The callbacks of a Trainer."""

    callbacks: list[Callback]  # all of them, in order
    loggers: list[Callback]  # those that were given as loggers
    default_checkpoint: Callback | None  # the ModelCheckpoint that the Trainer has added


def all_callbacks(settings: Settings) -> TrainerCallbacks:
    """Return the callbacks that a Trainer was given, and those that it adds; refuse two that cannot go together."""
    from_argument = callbacks_of("callbacks", settings.callbacks)
    loggers = list[Callback]()
    logger = settings.logger
    if logger is None:
        raise ArgumentTypeError("Trainer(logger=...) takes True, False or loggers, got None. Pass False for none.")
    if not isinstance(logger, bool):
        loggers = callbacks_of("logger", logger)
    callbacks = [*from_argument, *loggers]
    # A logger whose rows are lost when the process is killed gets a file next to it.
    fragile = logger is not False and any(getattr(c, "may_lose_rows", False) for c in callbacks)
    for kind, enabled, argument in (
        (CSVLogger, logger is True or fragile, ""),
        # The bar's header comes before the summary's table.
        (ProgressBar, settings.enable_progress_bar, "enable_progress_bar"),
        (ModelSummary, settings.enable_model_summary, "enable_model_summary"),
        (ModelCheckpoint, settings.enable_checkpointing, "enable_checkpointing"),
    ):
        present = next((c for c in callbacks if c.role == kind.role), None)
        if present and argument and not enabled:
            raise ArgumentError(
                f"Trainer({argument}=False) with a {type(present).__name__} among the callbacks. Leave one of them out."
            )
        if enabled and not present:
            callbacks.append(kind())
    callbacks = check_callbacks(callbacks)
    if settings.fast_dev_run:
        callbacks = [c for c in callbacks if c.in_fast_dev_run and c not in loggers]
    added = without(callbacks, [*from_argument, *loggers])
    return TrainerCallbacks(callbacks, loggers, next((c for c in added if c.role == "checkpoint"), None))


def config_of(arguments: Mapping[str, Any], callbacks: TrainerCallbacks) -> dict[str, Any]:
    """Return the Trainer's arguments as JSON values: an object as its text, a callback as the name of its class."""
    loggers = [c for c in callbacks.callbacks if c.is_logger or c in callbacks.loggers]
    lists = {"callbacks": callbacks.callbacks, "logger": loggers}
    named = {name: [type(c).__name__ for c in callbacks_of_argument] for name, callbacks_of_argument in lists.items()}
    return to_json({**arguments, **named}, lenient=True)


def state_rows(callbacks: Sequence[Callback], state: TrainState, module: Any, notes: Mapping[str, str]) -> list[Row]:
    """Return the rows of the model's summary, as deep as that of the callbacks; none if it shows none."""
    summary: Any = next((c for c in callbacks if c.role == "model_summary"), None)
    depth = -1 if summary is None else summary.max_depth
    return summarize(state, module, max_depth=depth, notes=notes) if depth else []


def no_logger(media: MediaFolder) -> NoLogger:
    """Return `trainer.logger` of a Trainer without loggers."""
    logger = NoLogger()
    logger._media = media
    return logger


def callbacks_of_module(module: Any) -> list[Callback]:
    """Return the callbacks that a module adds."""
    configure = getattr(module, "configure_callbacks", None)
    if configure is None:
        return []
    where = f"{type(module).__name__}.configure_callbacks"
    with noting_place(where):
        callbacks = configure()
    return callbacks_of(f"callbacks of {where}", callbacks)


def without(callbacks: Sequence[Callback], others: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that are none of the others."""
    return [c for c in callbacks if all(c is not other for other in others)]


def check_callbacks(callbacks: list[Callback]) -> list[Callback]:
    """Return callbacks, in order; refuse an object that is there twice, and two that would write to the same place."""
    for i, c in enumerate(callbacks):
        for other in callbacks[:i]:
            if c is other:
                raise ArgumentError(
                    f"The callbacks hold the same {type(c).__name__} object twice. Leave one of them out."
                )
            if problem := c.conflict_with(other):
                raise ArgumentError(problem)
    # A checkpoint holds what the other callbacks have decided.
    return sorted(callbacks, key=lambda c: c.role == "checkpoint")


def callbacks_of(name: str, value: Any) -> list[Callback]:
    """Return a list of callbacks."""
    if value is None:
        return []
    is_list = isinstance(value, Sequence) and not isinstance(value, (str, Callback))  # also one of OmegaConf
    callbacks: list[Any] = list(value) if is_list else [value]
    for c in callbacks:
        if not isinstance(c, Callback):
            hint = f" Pass {c.__name__}(...)." if isinstance(c, type) else ""
            raise ArgumentTypeError(
                f"Trainer({name}=...) takes callbacks (jaxlit.Callback objects) in a list, got {shown(c)}.{hint}"
            )
    return callbacks


def log_hyperparams(hooks: Hooks) -> None:
    """Give the module's hyperparameters to the loggers that take them, by a hook that only loggers have."""
    name = "log_hyperparams"
    loggers: list[Any] = [c for c in hooks.callbacks if c.is_logger and hooks.may_run(c, name)]
    takes = [c for c in loggers if c.hyperparams_of_module and c.takes_hyperparams]
    functions = [TimedFunction(c, partial(_log_hyperparams, fitting(c, name, ["params"]))) for c in takes]
    hooks.bound[name] = Hook(hooks, name, functions)
    hooks(name)


def _log_hyperparams(log: Callable[..., Any], trainer: Any, module: Any) -> None:
    data = {} if trainer.datamodule is None else trainer.datamodule.hparams.readable()
    log(redacted({**data, **hparams_of(module).readable()}))  # a dict for each logger, to keep or to change


def first_example(data: RunData) -> Any:
    """Return the shapes and dtypes of the first batch of all processes; None where a hook has yet to make it."""
    example = data.loaders.validator_of(data.training[0]).example
    processes = jax.process_count()
    return example if example is None or processes == 1 else with_rows(example, processes * num_rows(example))


def step_options(settings: Settings, hooks: Hooks, example: Any) -> StepOptions:
    """Return how a fit takes its optimizer steps; the example is the first batch's shapes and dtypes, if known."""
    optimizer = optimizer_of(hooks.module)
    # A later epoch may need room for a window; a subclass need not know which.
    least = 1 if all(c.batches_per_step(0) is None for c in hooks.callbacks) else 2
    parts = frozen_parts(hooks.callbacks, hooks.module, optimizer.wrt)
    return StepOptions(
        by_part(optimizer, parts),
        accumulate=max(settings.accumulate_grad_batches, least),
        nan_policy="raise" if settings.nan_policy == "rollback" else settings.nan_policy,
        clip=settings.clip,
        extras=array_keepers(hooks),
        parts=parts,
        tolerates=hooks.disable_if_allowed,
        example=example,
    )


def frozen_parts(callbacks: Sequence[Callback], module: TrainModule, wrt: Any) -> tuple[Part, ...]:
    """Return the parts of the parameters that callbacks freeze for some epochs; refuse parts that overlap."""
    freezes: list[Any] = [c for c in callbacks if c.frozen_part is not None]
    parts = list[Part]()
    known = frozenset(names_in(module, wrt, ...))
    for callback, label in zip(freezes, labels_of([c.frozen_part for c in freezes], "part"), strict=True):
        names = frozenset(callback.names(module, wrt))
        whose = f"{type(callback).__name__}.names(...)"
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
    """Return the callbacks that keep arrays, by the keys of their states."""
    methods = ("init_arrays", "update_arrays")
    keepers = {}
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
