"""The callbacks that a Trainer adds by itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.callbacks.csv_logger import CSVLogger
from jaxlit.callbacks.file_logger import FileLogger
from jaxlit.callbacks.jsonl_logger import JSONLLogger
from jaxlit.callbacks.logger import Logger
from jaxlit.callbacks.model_checkpoint import ModelCheckpoint
from jaxlit.callbacks.model_summary import ModelSummary
from jaxlit.callbacks.progress_bar import ProgressBar
from jaxlit.callbacks.wandb_logger import WandbLogger
from jaxlit.core.hparams import hparams_of
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.loop.hooks import Hook, Hooks, TimedFunction, fitting, overrides
from jaxlit.loop.settings import Settings
from jaxlit.notes import noting_place
from jaxlit.reporting.secrets import redacted
from jaxlit.shown import shown


@dataclass(frozen=True)
class Given:
    """The callbacks of a Trainer.

    Attributes:
        callbacks: All of them, in order.
        loggers: Those that were given as loggers.
        default_checkpoint: The ModelCheckpoint that the Trainer has added, None if there is none.
    """

    callbacks: list[Callback]
    loggers: list[Callback]
    default_checkpoint: ModelCheckpoint | None


def all_callbacks(settings: Settings) -> Given:
    """Return the callbacks that a Trainer was given, and those that it adds.

    Raises:
        ArgumentError: Two of them cannot go together, or a setting needs one that is not there.
        ArgumentTypeError: One of them is no callback.
    """
    given, extra, logger = callbacks_of("callbacks", settings.callbacks), list[Callback](), settings.logger
    if logger is None:
        raise ArgumentTypeError("Trainer(logger=...) takes True, False or loggers, got None. Pass False for none.")
    if not isinstance(logger, bool):
        extra = callbacks_of("logger", logger)
    given += extra
    found = list(given)
    uses_wandb = any(isinstance(c, WandbLogger) for c in found)
    if logger is True or (logger is not False and uses_wandb):
        # A W&B run that is killed loses what it has not sent: the rows are kept here, too.
        for kind in (CSVLogger, JSONLLogger)[: 2 if uses_wandb else 1]:
            found += [] if any(isinstance(c, kind) for c in found) else [kind()]
    # The bar's header comes before the summary's table.
    for kind, argument in (
        (ProgressBar, "enable_progress_bar"),
        (ModelSummary, "enable_model_summary"),
        (ModelCheckpoint, "enable_checkpointing"),
    ):
        _add(found, kind, argument, check.boolean(argument, getattr(settings, argument)))
    found = check_callbacks(found)
    if settings.fast_dev_run:
        found = [c for c in found if c.in_fast_dev_run and c not in extra]
    saves = any(isinstance(c, ModelCheckpoint) or overrides(c, "on_safe_point") for c in found)
    if settings.nan_policy == "rollback" and not saves and not settings.fast_dev_run:
        raise ArgumentError(
            "Trainer(nan_policy='rollback', enable_checkpointing=False) has nothing to go back to. Leave "
            "enable_checkpointing out."
        )
    ours = (c for c in found if isinstance(c, ModelCheckpoint) and all(c is not other for other in given))
    return Given(found, extra, next(ours, None))


def callbacks_of_module(module: Any) -> list[Callback]:
    """Return the callbacks that a module adds."""
    configure = getattr(module, "configure_callbacks", None)
    if configure is None:
        return []
    where = f"{type(module).__name__}.configure_callbacks"
    with noting_place(where):
        found = configure()
    return callbacks_of(f"callbacks of {where}", found)


def without(callbacks: Sequence[Callback], others: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that are none of the others."""
    return [c for c in callbacks if all(c is not other for other in others)]


def check_callbacks(callbacks: list[Callback]) -> list[Callback]:
    """Return callbacks that can go together, those of the Trainer and those that a module adds.

    Raises:
        ArgumentError: An object is there twice, or two would draw or write to the same place.
    """
    for i, c in enumerate(callbacks):
        name = type(c).__name__
        if any(c is other for other in callbacks[:i]):
            raise ArgumentError(f"The callbacks hold the same {name} object twice. Leave one of them out.")
        if isinstance(c, Logger) and c.on_error not in ("warn", "raise"):
            raise ArgumentError(f"{name}.on_error takes 'warn' or 'raise', got {c.on_error!r}.")
        if isinstance(c, ProgressBar) and any(isinstance(other, ProgressBar) for other in callbacks[:i]):
            raise ArgumentError(f"The callbacks hold two {name}s, and only one can draw. Leave one of them out.")
        if isinstance(c, ModelCheckpoint):
            folders = [other.dirpath for other in callbacks[:i] if isinstance(other, ModelCheckpoint)]
            if c.dirpath in folders:
                raise ArgumentError(
                    f"The callbacks hold two {name}s that write to one folder. Give one of them a dirpath of its own."
                )
        files = [other.filename for other in callbacks[:i] if isinstance(other, FileLogger)]
        if isinstance(c, FileLogger) and c.filename in files:
            raise ArgumentError(
                f"The callbacks hold two loggers that write to {c.filename}. Leave one of them out, give it another "
                "filename, or pass Trainer(logger=False)."
            )
        projects = [(other.entity, other.project) for other in callbacks[:i] if isinstance(other, WandbLogger)]
        if isinstance(c, WandbLogger) and (c.entity, c.project) in projects:
            raise ArgumentError(
                f"The callbacks hold two {name}s of one project. Leave one of them out, or give it its own project."
            )
    # A checkpoint holds what the other callbacks have decided.
    return sorted(callbacks, key=lambda c: isinstance(c, ModelCheckpoint))


def _add(callbacks: list[Callback], kind: type[Callback], argument: str, enabled: bool) -> None:
    present = sum(isinstance(c, kind) for c in callbacks)
    if present and not enabled:
        raise ArgumentError(
            f"Trainer({argument}=False) with a {kind.__name__} among the callbacks. Leave one of them out."
        )
    if enabled and not present:
        callbacks.append(kind())


def callbacks_of(name: str, value: Any) -> list[Callback]:
    """Return a list of callbacks."""
    if value is None:
        return []
    found = [value] if isinstance(value, Callback) else value
    if not isinstance(found, (list, tuple)):
        raise ArgumentTypeError(
            f"Trainer({name}=...) takes callbacks, got {shown(value)}. Pass a list of jl.callbacks."
        )
    for c in found:
        if isinstance(c, type) and issubclass(c, Callback):
            raise ArgumentTypeError(f"Trainer({name}=...) got the class {c.__name__}. Pass {c.__name__}(...).")
        if not isinstance(c, Callback):
            raise ArgumentTypeError(f"Trainer({name}=...) takes jaxlit.Callback objects, got {shown(c)}.")
    return list(found)


def tell_hyperparams(hooks: Hooks) -> None:
    """Give the module's hyperparameters to the loggers that take them, by a hook that only loggers have."""
    name = "log_hyperparams"
    loggers = [c for c in hooks.callbacks if isinstance(c, Logger) and c.hyperparams_of_module]
    loggers = [c for c in loggers if hooks.failed.may_run(c, name)]
    own = [c for c in loggers if type(c).log_hyperparams is not Logger.log_hyperparams or name in vars(c)]
    hooks.bound[name] = Hook(hooks, name, [TimedFunction(c, _teller(c, name)) for c in own])
    hooks(name)


def _teller(logger: Logger, name: str) -> Callable[..., None]:
    method = fitting(logger, name, ["params"])

    def tell(trainer: Any, module: Any) -> None:
        data = trainer.datamodule
        # A dict for each, to keep or to change.
        method(redacted({**({} if data is None else data.hparams.readable()), **hparams_of(module).readable()}))

    return tell
