"""The base of callbacks that send rows somewhere."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Integral
from typing import TYPE_CHECKING, Any

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError, ArgumentTypeError, LoggerError, did_you_mean
from jaxlit.porting import no_such_name
from jaxlit.reporting.media_folder import MediaFolder
from jaxlit.shown import shown

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

_MEDIA = ("log_text", "log_table", "log_histogram", "log_image", "log_figure")


def _never_ends_a_training(method: Callable[..., None]) -> Callable[..., None]:
    """Return a method of `_MEDIA` that has what it fails to take kept in the run's folder, while a training continues.

    A user may give the same to each of `trainer.loggers`. What others have passed on to this one is not taken again.
    A wrong argument, here or to a logger that takes it in this one's place, is a mistake of the program, and raises.
    """
    signature = inspect.signature(method)
    known = [*signature.parameters][1:]

    @wraps(method)
    def log(self: "Logger", *args: Any, **named: Any) -> None:
        try:
            given = signature.bind(self, *args, **named).arguments
        except TypeError as error:
            given = {}
            if self._passed_on_by is None:  # otherwise the call was right for the logger that was asked
                hint = "".join(did_you_mean(name, known) for name in named if name not in known)
                called = f"{type(self).__name__}.{method.__name__}"
                raise ArgumentTypeError(f"{called} {error}.{hint} It takes {', '.join(known)}.") from None
        if method.__module__.startswith("jaxlit."):  # a logger of one's own may take others
            self._check(method.__name__, given)
        if self._has_taken(method.__name__, args, named):
            return
        try:
            method(self, *args, **named)
        except (ArgumentError, ArgumentTypeError):
            raise
        except Exception as error:
            media = self._media
            if self.on_error == "raise" or media is None or not media.goes_on():
                raise
            media.stand_in(type(self).__name__, method.__name__, error, args, named)

    return log


def _call(logger: "Logger", name: str, args: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return what a method of `_MEDIA` is given, in one order, with the step that it is for."""
    try:
        bound = inspect.signature(getattr(Logger, name)).bind(logger, *args, **named)
    except TypeError:  # which the call itself raises, unless the logger has arguments of its own
        return [object()]
    bound.apply_defaults()
    given = bound.arguments
    if given["step"] is None and logger._attached is not None:
        given["step"] = max(logger._attached.global_step - 1, 0)
    return [name, *(x for key, x in given.items() if key != "self")]


def _same(one: Any, other: Any) -> bool:
    """Return whether two hold the same objects, or texts and numbers that are equal."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (isinstance(one, (str, int, float)) and type(one) is type(other) and one == other)


class _Told:
    """An attribute that a logger reads from its run, unless it was set or overridden.

    Args:
        read: What reads it.
    """

    def __init__(self, read: Callable[["Logger"], Any]) -> None:
        self.__doc__, self._read = read.__doc__, read

    def __get__(self, logger: "Logger | None", owner: type | None = None) -> Any:
        return self if logger is None else self._read(logger)


def _log_dir(logger: "Logger") -> Any:
    """The run's folder; None before the first run."""
    return None if logger._attached is None else logger._attached.run_dir


def _name(logger: "Logger") -> Any:
    """The name of the folder that the run's folder is in; None before the first run."""
    return None if logger.log_dir is None else logger.log_dir.absolute().parent.name


def _version(logger: "Logger") -> Any:
    """The name of the run's folder; None before the first run."""
    return None if logger.log_dir is None else logger.log_dir.name


def _experiment(logger: "Logger") -> Any:
    """What the logger writes with, for calls of one's own, during a fit and after it; None where it has no such."""
    return None


class Logger(Callback):
    """A callback that sends rows somewhere, with the names that Lightning's loggers have.

    A logger of one's own overrides `log_metrics`, or the hook `on_log`, and of the others what it can hold. The rest
    goes to the first other logger of the Trainer that can hold it, and what none can to files in `media/<key>` of the
    run's folder, and so does what one of them fails to take while a training continues, unless `on_error` is "raise".
    What it may rely on, from `setup` on: `module.hparams`, the constructor's arguments that can be saved;
    `trainer.config`, the Trainer's arguments as JSON values; `trainer.run_dir`, the run's folder, which whoever writes
    first makes; and `trainer.is_global_zero`, the one process that writes.

    Example:
        >>> import jaxlit as jl
        >>> class Printer(jl.callbacks.Logger):
        ...     def log_metrics(self, metrics, step=None):
        ...         print(step, metrics)
        ...     def log_text(self, key, text, *, step=None):
        ...         print(key, text)
        >>> trainer = jl.Trainer(max_epochs=1, logger=Printer())
    """

    def __getattr__(self, name: str) -> Any:
        # Nothing has the name, or a property of it has raised, whose error is told again.
        if name.startswith("_") or hasattr(type(self), name):
            return super().__getattribute__(name)
        raise no_such_name("Logger", name, dir(self), called=type(self).__name__)

    def __init_subclass__(cls, **given: Any) -> None:
        """See to it that no method that takes a picture or the like ends a training."""
        super().__init_subclass__(**given)
        for name in _MEDIA:
            if name in vars(cls):
                setattr(cls, name, _never_ends_a_training(vars(cls)[name]))

    in_fast_dev_run = False
    is_logger = True
    _attached: "Trainer | None" = None
    _media: MediaFolder | None = None  # the Trainer's
    _failed = False
    _passed_on_by: "Logger | None" = None  # who was asked in its place, while it takes something
    _taken: "tuple[int, list[tuple[list[Any], Counter[int]]]]" = (-1, [])  # of a step, and how often who was asked

    name: Any = _Told(_name)
    version: Any = _Told(_version)
    log_dir: Any = _Told(_log_dir)
    experiment: Any = _Told(_experiment)

    on_error: str = "warn"
    """What an error in one of its hooks does: "warn" is `may_fail`, "raise" ends training."""

    may_lose_rows: bool = False
    """Whether rows are lost if the process is killed: the Trainer then adds a CSVLogger and a JSONLLogger."""

    hyperparams_of_module: bool = True
    """Whether a fit calls `log_hyperparams` with those of the module; False for a logger that reads them itself."""

    @property
    def may_fail(self) -> bool:  # type: ignore[override]
        """Whether training continues without it after an error in one of its hooks."""
        return self.on_error != "raise"

    @property
    def takes_hyperparams(self) -> bool:
        """Whether a fit can call `log_hyperparams`: only of a logger that overrides it."""
        return type(self).log_hyperparams is not Logger.log_hyperparams or "log_hyperparams" in vars(self)

    @property
    def location(self) -> str | None:
        """Where the rows can be seen, a file or an address; None while there is nothing to see."""
        return None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log a row of numbers; a user may call it in a hook, and a run does so with each of its rows.

        Args:
            metrics: Numbers by name.
            step: 0-based index of an optimizer step; None for the newest.

        Raises:
            LoggerError: No run has begun.
        """
        if type(self).on_log is Logger.on_log:  # a logger that takes no rows
            return
        if (trainer := self._attached) is None:
            raise LoggerError(
                f"{type(self).__name__} has no run yet. Log from a hook, or after the first run of its Trainer."
            )
        at = max(trainer.global_step - 1, 0) if step is None else step
        self.on_log(trainer, {"epoch": trainer.current_epoch, **metrics}, at)

    def save(self) -> None:
        """Write out what is kept back; called after each row."""

    def finalize(self, status: str) -> None:
        """Close what is open, at the end of a run.

        Args:
            status: "success", or "failed" after an error.
        """

    # Hooks, which call the methods above --------------------------------------------------------------

    def attach(self, trainer: "Trainer", media: MediaFolder) -> None:
        """Take note of whose run begins, and of where it keeps what the logger does not hold."""
        self._attached, self._media, self._failed, self._taken = trainer, media, False, (-1, [])

    def on_log(self, trainer: "Trainer", values: dict[str, float], step: int) -> None:
        """Log a row, by the process that writes."""
        if trainer.is_global_zero:
            self.log_metrics(dict(values), step)  # the next logger has the row as it is
            self.save()

    def on_exception(self, trainer: "Trainer", module: "TrainModule", exception: BaseException) -> None:
        """Note that the run has failed."""
        self._failed = True

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Finalize."""
        self.finalize("failed" if self._failed else "success")

    # What a user logs ---------------------------------------------------------------------------------

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Take hyperparameters of the run; those of a name that is there already take its place.

        A user may call it at any time of a run. A logger of one's own that overrides it is called with
        `module.hparams`, without secrets, before `on_fit_start`, as a hook, unless `hyperparams_of_module` is False.

        Args:
            params: Values by name.
        """
        raise LoggerError(
            f"{type(self).__name__} cannot hold hyperparameters. Log them to a jl.callbacks.CSVLogger, JSONLLogger or "
            "WandbLogger: trainer.loggers has those that are used."
        )

    @_never_ends_a_training
    def log_text(self, key: str, text: str, *, step: int | None = None) -> None:
        """Log a text.

        Args:
            key: Its name.
            text: The text.
            step: 0-based index of an optimizer step; None for the newest.
        """
        self._pass_on("log_text", key, text, step=step)

    @_never_ends_a_training
    def log_table(
        self, key: str, columns: Sequence[str], data: Sequence[Sequence[Any]], *, step: int | None = None
    ) -> None:
        """Log a table.

        Args:
            key: Its name.
            columns: The columns' names.
            data: Its rows, each with a cell for each column.
            step: 0-based index of an optimizer step; None for the newest.
        """
        self._pass_on("log_table", key, columns, data, step=step)

    @_never_ends_a_training
    def log_histogram(self, key: str, values: Any, *, bins: int = 64, step: int | None = None) -> None:
        """Log how numbers are distributed.

        Args:
            key: Its name.
            values: An array of any shape; those that are not finite are left out.
            bins: How many bins of equal width.
            step: 0-based index of an optimizer step; None for the newest.
        """
        self._pass_on("log_histogram", key, values, bins=bins, step=step)

    @_never_ends_a_training
    def log_image(
        self, key: str, images: Any, *, caption: Sequence[str] | None = None, step: int | None = None
    ) -> None:
        """Log images.

        Args:
            key: Their name.
            images: An image or a list of them: (height, width) or (height, width, 1, 3 or 4) arrays, of uint8 or of
                floats from 0 to 1; Pillow images; or paths.
            caption: A list of a text for each.
            step: 0-based index of an optimizer step; None for the newest.
        """
        self._pass_on("log_image", key, images, caption=caption, step=step)

    @_never_ends_a_training
    def log_figure(self, key: str, figure: Any, *, step: int | None = None) -> None:
        """Log a matplotlib figure, as an image.

        Args:
            key: Its name.
            figure: The `matplotlib.figure.Figure`.
            step: 0-based index of an optimizer step; None for the newest.
        """
        self._pass_on("log_figure", key, figure, step=step)

    def _pass_on(self, name: str, key: str, *args: Any, **named: Any) -> None:
        """Give what this logger does not hold to the first other one that does, or else to the run's folder."""
        if (media := self._media) is None:
            raise LoggerError(
                f"{type(self).__name__} has no folder yet. Log from a hook, or after the first run of its Trainer."
            )
        trainer = None if self._passed_on_by is not None else self._attached
        for other in () if trainer is None else trainer.loggers:
            if other is self or not isinstance(other, Logger) or getattr(type(other), name) is getattr(Logger, name):
                continue
            other._passed_on_by = self
            try:
                return getattr(other, name)(key, *args, **named)
            except LoggerError:  # after a run it may have closed what it writes with
                if media.goes_on():
                    raise
            finally:
                other._passed_on_by = None
        getattr(media, name)(key, *args, **named)

    def _has_taken(self, name: str, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
        """Return whether the same was taken at this step as often as this and whoever passes it on have been asked."""
        if self._attached is None:
            return False
        if self._taken[0] != (now := self._attached.global_step):
            self._taken = now, []
        call, asked = _call(self, name, args, named), id(self._passed_on_by or self)
        counts = next((counts for other, counts in self._taken[1] if _same(call, other)), None)
        if counts is None:
            self._taken[1].append((call, counts := Counter()))
        taken = max(counts.values(), default=0)
        counts[asked] += 1
        return counts[asked] <= taken

    def _check(self, method: str, given: Mapping[str, Any]) -> None:
        """Raise for a wrong name, caption or step, whichever logger takes it."""
        key, caption, step = given.get("key", "-"), given.get("caption"), given.get("step")
        is_list = isinstance(caption, Sequence) and not isinstance(caption, str)
        if caption is not None and not (is_list and all(isinstance(text, str) for text in caption)):
            raise ArgumentTypeError(
                f"{type(self).__name__}.{method}(caption=...) takes a list with a text for each image, got "
                f"{shown(caption)}. Pass caption=['...']."
            )
        if step is not None and not isinstance(step, Integral):
            raise ArgumentTypeError(
                f"{type(self).__name__}.{method}(step=...) takes the index of an optimizer step, an int, got "
                f"{shown(step)}. Leave it out for the newest."
            )
        if not isinstance(key, str) or not key or key in ("step", "epoch"):
            raise ArgumentError(
                f"{type(self).__name__} logs under a name that is not empty, and not 'step' or 'epoch', which are in "
                f"every row, got {key!r}."
            )


class _Nothing:
    """Takes every call."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **named: None


class NoLogger(Logger):
    """Takes rows and hyperparameters and keeps none; pictures and the like go to the run's folder.

    It is `trainer.logger` where there is none. In `fast_dev_run` a picture is made, so that a mistake in it is raised,
    and not kept.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(fast_dev_run=True)
        >>> trainer.logger.log_text("note", "goes nowhere")
    """

    _media = MediaFolder()

    @property
    def experiment(self) -> Any:  # type: ignore[override]
        """Something that has every method, and does nothing: a hook may call those of another logger's."""
        return _Nothing()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Drop hyperparameters."""
