"""`Logger`, the base of callbacks that send rows somewhere, `NoLogger`, and what they can log about a training."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax
import jax
import optax
from flax import nnx

from jaxlit.callbacks.base import Callback
from jaxlit.errors import ArgumentError, ArgumentTypeError, LoggerError
from jaxlit.faces import no_such_name
from jaxlit.reporting.media import MediaFolder
from jaxlit.version import __version__

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer

# The methods for media, and the number of arguments that a logger's own method gets by position.
_MEDIA = {"log_text": 2, "log_table": 3, "log_histogram": 2, "log_image": 2, "log_figure": 2}


def _never_ends_training(method: Callable[..., None]) -> Callable[..., None]:
    """Wrap a method of `_MEDIA`, which then takes the calls of `Logger`'s: what fails goes to the run's folder."""
    name, signature = method.__name__, inspect.signature(method)

    @wraps(method)
    def log(self: "Logger", *args: Any, **named: Any) -> None:
        try:
            args, named = _arguments(self, name, signature, args, named)
            if name == "log_text" and "data" in named:
                self.log_table(*args, **named)
            else:
                method(self, *args, **named)
        except Exception as error:
            media = self._media
            if self.on_error == "raise" or media is None or not media.goes_on():
                raise
            media.stand_in(f"{type(self).__name__}.{name}", name, error, *args, **named)

    return log


def _arguments(
    logger: "Logger", name: str, signature: inspect.Signature, args: tuple, named: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of a call in the form of a logger's own method: no data frame, `_MEDIA` by position."""
    if name == "log_text" and "text" in named:
        named["columns"] = named.pop("text")
    public = inspect.signature(getattr(Logger, name))
    try:
        try:
            given = public.bind(logger, *args, **named).arguments
        except TypeError:
            signature.bind(logger, *args, **named)  # it has other arguments
            return args, named
        if (table := given.pop("dataframe", None)) is not None:
            given |= {"columns": table.columns, "data": table.values.tolist()}
        columns, data = given.get("columns"), given.get("data")
        if name == "log_table" or (name == "log_text" and (columns is None or data is not None)):
            given |= {"columns": list(columns), "data": [list(row) for row in data]}  # type: ignore[arg-type]
        given.pop("self")
        args = tuple(given.pop(key) for key in [*public.parameters][1 : 1 + _MEDIA[name]] if key in given)
        named = {key: x for key, x in given.items() if x is not None}
    except TypeError as error:
        names = ", ".join(str(x.replace(annotation=x.empty)) for x in [*public.parameters.values()][1:])
        raise ArgumentTypeError(f"{type(logger).__name__}.{name}({names}): {error}.") from None
    if args[0] in ("step", "epoch", ""):
        raise ArgumentError(
            f"{type(logger).__name__} logs under a name that is not empty, and not 'step' or 'epoch', which are in "
            f"every row, got {args[0]!r}."
        )
    return args, named


class Logger(Callback):
    """A callback that sends rows somewhere, with the names of Lightning's loggers.

    A subclass overrides `log_metrics`, or the hook `on_log`, and those of the other methods whose data it can store.
    Images, tables and the like that a logger cannot store, or fails to store during training, go to files in
    `media/<key>` of the run's folder; a failure is raised if `on_error` is "raise".

    From `setup` on, a logger can use `module.hparams`, the constructor's arguments that can be saved; `trainer.config`,
    the Trainer's arguments as JSON values; `trainer.run_dir`, the run's folder, which the first writer creates; and
    `trainer.is_global_zero`, whether this is the process that writes.

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
        # No such name exists, or a property of that name has raised, whose error is raised again.
        if name.startswith("_") or hasattr(type(self), name):
            return super().__getattribute__(name)
        raise no_such_name("Logger", name, dir(self), called=type(self).__name__)

    def __init_subclass__(cls, **options: Any) -> None:
        """Wrap the methods that take images and the like, so that they never end training."""
        super().__init_subclass__(**options)
        for name in _MEDIA:
            if name in vars(cls):
                setattr(cls, name, _never_ends_training(vars(cls)[name]))

    in_fast_dev_run = False
    is_logger = True
    _attached: "Trainer | None" = None
    _media: MediaFolder | None = None  # the Trainer's
    _failed = False
    on_error: str = "warn"
    """The effect of an error in one of its hooks: "warn" is `may_fail`, "raise" ends training."""

    may_lose_rows: bool = False
    """Whether rows are lost if the process is killed: the Trainer then adds a CSVLogger."""

    hyperparams_of_module: bool = True
    """Whether a fit calls `log_hyperparams` with the module's; False for a logger that reads them itself."""

    @property
    def may_fail(self) -> bool:  # type: ignore[override]
        """Whether training continues without it after an error in one of its hooks."""
        return self.on_error != "raise"

    @property
    def takes_hyperparams(self) -> bool:
        """Whether a fit can call `log_hyperparams`: only of a logger that overrides it."""
        return type(self).log_hyperparams is not Logger.log_hyperparams or "log_hyperparams" in vars(self)

    @property
    def log_dir(self) -> Path | None:
        """The run's folder; None before the first run."""
        return None if self._attached is None else self._attached.run_dir

    @property
    def name(self) -> str | None:
        """The name of the folder that contains the run's folder; None before the first run."""
        return None if self.log_dir is None else self.log_dir.absolute().parent.name

    @property
    def version(self) -> str | None:
        """The name of the run's folder; None before the first run."""
        return None if self.log_dir is None else self.log_dir.name

    @property
    def experiment(self) -> Any:
        """The object that the logger writes with, during a fit and after it; None if it has none."""
        return None

    @property
    def location(self) -> str | None:
        """Where the rows can be seen, a file or an address; None while there is nothing to see."""
        return None

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log a row of numbers; a run calls this with each of its rows, and a user may call it in a hook.

        Args:
            metrics: Numbers by name.
            step: 0-based index of an optimizer step; None for the newest.

        Raises:
            LoggerError: No run has begun.
        """
        if type(self).on_log is Logger.on_log:  # a logger that takes no rows
            return
        if (trainer := self._attached) is None:
            raise self._no_run()
        self.on_log(trainer, {"epoch": trainer.current_epoch, **metrics}, self._step_or_newest(step))

    def save(self) -> None:
        """Write out rows that are buffered; called after each row."""

    def finalize(self, status: str) -> None:
        """Close files and connections at the end of a run; `status` is "success", or "failed" after an error."""

    def attach(self, trainer: "Trainer", media: MediaFolder) -> None:
        """Remember the Trainer whose run begins, and its folder for media that no logger can store."""
        self._attached, self._media, self._failed = trainer, media, False

    def on_log(self, trainer: "Trainer", values: dict[str, float], step: int) -> None:
        """Log a row, by the process that writes."""
        if trainer.is_global_zero:
            self.log_metrics(dict(values), step)  # a copy: the next logger gets the same row
            self.save()

    def on_exception(self, trainer: "Trainer", module: "TrainModule", exception: BaseException) -> None:
        """Note that the run has failed."""
        self._failed = True

    def teardown(self, trainer: "Trainer", module: "TrainModule", stage: str) -> None:
        """Finalize."""
        self.finalize("failed" if self._failed else "success")

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Store hyperparameters of the run, in place of earlier ones of the same names.

        A user may call it at any time of a run. If a subclass overrides it, a fit calls it with `module.hparams`,
        without secrets, before `on_fit_start`, as a hook, unless `hyperparams_of_module` is False.

        Args:
            params: Values by name.
        """
        raise LoggerError(
            f"{type(self).__name__} cannot store hyperparameters. Log them to a jl.callbacks.CSVLogger or "
            "WandbLogger: trainer.loggers has those that are used."
        )

    @_never_ends_training
    def log_text(
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: int | None = None
    ) -> None:
        """Log a text, `log_text(key, "a text")`; with `data` or a `dataframe`, a table of texts by `log_table`."""
        self._store("log_text", key, columns, step=step)

    @_never_ends_training
    def log_table(
        self, key: str, columns: Any = None, data: Any = None, dataframe: Any = None, step: int | None = None
    ) -> None:
        """Log a table.

        Args:
            key: The table's name.
            columns: A list of the columns' names.
            data: A list of rows, each with a cell for each column.
            dataframe: A data frame of pandas, in place of columns and data.
            step: 0-based index of an optimizer step; None for the newest.
        """
        self._store("log_table", key, columns, data, step=step)

    @_never_ends_training
    def log_histogram(self, key: str, values: Any, *, bins: int = 64, step: int | None = None) -> None:
        """Log the distribution of numbers.

        Args:
            key: The histogram's name.
            values: An array of any shape; numbers that are not finite are left out.
            bins: The number of bins of equal width.
            step: 0-based index of an optimizer step; None for the newest.
        """
        self._store("log_histogram", key, values, bins=bins, step=step)

    @_never_ends_training
    def log_image(
        self, key: str, images: Any, step: int | None = None, *, caption: Sequence[str] | None = None
    ) -> None:
        """Log images.

        Args:
            key: The name of the images.
            images: An image or a list of images: (height, width) or (height, width, 1, 3 or 4) arrays, of uint8 or of
                floats from 0 to 1; Pillow images; or paths.
            step: 0-based index of an optimizer step; None for the newest.
            caption: A list with a text for each image.
        """
        self._store("log_image", key, images, caption=caption, step=step)

    @_never_ends_training
    def log_figure(self, key: str, figure: Any, step: int | None = None) -> None:
        """Log a matplotlib figure by `log_image`.

        Args:
            key: The figure's name.
            figure: The `matplotlib.figure.Figure`.
            step: 0-based index of an optimizer step; None for the newest.
        """
        self.log_image(key, figure, step=step)

    def _store(self, method: str, key: str, *args: Any, **named: Any) -> None:
        """Write data that this logger cannot store to the run's folder."""
        if self._media is None:
            raise self._no_run()
        getattr(self._media, method)(key, *args, **named)

    def _no_run(self) -> LoggerError:
        return LoggerError(
            f"{type(self).__name__} has no run yet. Log from a hook, or after the first run of its Trainer."
        )

    def _step_or_newest(self, step: int | None) -> int:
        newest = 0 if self._attached is None else max(self._attached.global_step - 1, 0)
        return newest if step is None else int(step)


class _Nothing:
    """An object whose every method does nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **named: None


class NoLogger(Logger):
    """Drop rows and hyperparameters; images and the like go to the run's folder.

    It is `trainer.logger` of a Trainer without loggers. In `fast_dev_run` images are converted, so that errors are
    raised, and dropped.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(fast_dev_run=True)
        >>> trainer.logger.log_text("note", "goes nowhere")
    """

    _media = MediaFolder()

    @property
    def experiment(self) -> Any:  # type: ignore[override]
        """An object whose every method does nothing: a hook may call those of another logger's object."""
        return _Nothing()

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Drop hyperparameters."""


def facts_of(trainer: "Trainer", module: "TrainModule") -> dict[str, Any]:
    """Return how a module is trained, on which devices and with which versions."""
    strategy = trainer.strategy
    devices = {"kind": jax.devices()[0].device_kind, "count": strategy.mesh.size, "processes": jax.process_count()}
    return {
        "trainer": trainer.config,
        "strategy": strategy.describe().split("\n")[0],
        "mesh": {str(axis): size for axis, size in strategy.mesh.shape.items()},
        "devices": devices,
        "versions": {"jaxlit": __version__, **{lib.__name__: lib.__version__ for lib in (jax, flax, optax)}},
        "num_params": sum(x.size for x in jax.tree.leaves(nnx.state(module, nnx.Param, graph=True))),
    }
