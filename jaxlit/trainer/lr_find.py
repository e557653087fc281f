"""A range test: a short training in which the learning rate rises, to choose one to begin with."""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.core.module import TrainModule
from jaxlit.core.side_tables import share_hparams
from jaxlit.data.datamodule import DataModule
from jaxlit.engine.lazy import lazy
from jaxlit.errors import ArgumentError, ArgumentTypeError, LoggerError, did_you_mean
from jaxlit.shown import shown
from jaxlit.trainer.defaults import callbacks_of, without
from jaxlit.trainer.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_logger = logging.getLogger("jaxlit")

_BETA = 0.98  # how much of the mean of the losses so far stays at each step
_SETTLED = 10  # of so many losses the mean may be compared

# What a step of the trial has in common with one of the training.
_SAME = ("strategy", "devices", "mesh", "precision", "limit_train_batches", "overfit_batches", "seed", "prefetch")
_SAME += ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "host_keys", "max_recompiles")
_SAME += ("data_timeout", "hang_timeout", "max_in_flight", "compile_cache", "debug")


class LRFinder:
    """What a range test has found.

    Attributes:
        results: "lr", "loss" and "step_loss": the rate of each step, the mean of the losses up to it, of which the
            newest count most, and the loss of the step itself.

    Example:
        >>> import jax.numpy as jnp, jaxlit as jl, numpy as np, optax
        >>> from flax import nnx
        >>> class Line(jl.TrainModule):
        ...     def __init__(self, lr=0.1):
        ...         self.lr, self.slope = lr, nnx.Param(jnp.zeros(()))
        ...     def training_step(self, batch):
        ...         return jnp.mean((self.slope * batch["x"] - 3 * batch["x"]) ** 2)
        ...     def configure_optimizers(self):
        ...         return optax.inject_hyperparams(optax.sgd)(learning_rate=self.lr)
        >>> model, data = Line(), [{"x": np.ones(8, np.float32)}]
        >>> found = jl.lr_find(jl.Trainer(max_epochs=2), model, data, min_lr=1e-4, update_attr=True)
        >>> 1e-4 < found.suggestion() < 1.0 and model.lr == found.suggestion()
        True
    """

    def __init__(self, mode: str) -> None:
        self._mode, self.results = mode, {"lr": list[float](), "loss": list[float](), "step_loss": list[float]()}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the loss falls most steeply; None, with a line, if it falls at none.

        At each rate the mean loss of an eighth of the steps before it is compared with that of an eighth after it.
        Steps lie evenly in the logarithm of the rate, or in the rate if the mode is "linear", and so does the slope.
        Only rates count after which the loss is clearly below that of all steps before: by three times the error that
        the noise of single steps leaves in these means.

        Args:
            skip_begin: Steps at the beginning whose rates do not count.
            skip_end: Steps at the end that do not.
        """
        end = len(self.results["lr"]) - check.integer("skip_end", skip_end, low=0, owner="suggestion")
        begin = check.integer("skip_begin", skip_begin, low=0, owner="suggestion")
        losses = np.asarray(self.results["step_loss"][: max(end, 0)])
        losses = losses[: int(np.isfinite(losses).cumprod().sum())]
        width = max(len(self.results["lr"]) // 8, 1)
        falls = {k: _fall(losses, k, width) for k in range(max(begin, 3), len(losses) - width + 1)}
        clear = {k: fall for k, fall in falls.items() if fall is not None}
        if not clear:
            why = "the loss falls clearly at none of them" if falls else "there are too few finite losses to compare"
            what = "a wider range of rates, more steps or larger batches" if falls else "more steps"
            _logger.warning("lr_find suggests no rate of %d: %s. Try %s.", len(self.results["lr"]), why, what)
            return None
        return self.results["lr"][max(clear, key=lambda k: clear[k])]

    def plot(self, suggest: bool = False) -> "Figure":
        """Draw the loss over the rate.

        Args:
            suggest: Mark the suggestion.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            LoggerError: matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise LoggerError(
                "LRFinder.plot needs matplotlib, which is not installed. Run `pip install jaxlit[plot]`."
            ) from error
        rates, losses = self.results["lr"], self.results["loss"]
        figure = Figure(layout="constrained")
        axes = figure.add_subplot(xlabel="learning rate", ylabel="loss")
        axes.plot(rates, losses)
        axes.set_xscale("log" if self._mode == "exponential" else "linear")
        if suggest and (rate := self.suggestion()) is not None:
            axes.plot([rate], [losses[rates.index(rate)]], "o", color="red", label=f"{rate:.3g}")
            axes.legend()
        return figure


def _fall(losses: np.ndarray, k: int, width: int) -> float | None:
    """Return by how much the loss falls at a step; None where what comes after it is not clearly below all before."""
    before, after = losses[:k], losses[k : k + width].mean()
    noise = np.sqrt(np.mean(np.diff(before, 2) ** 2) / 6)  # of one loss: second differences leave a slope out
    if not before.mean() - after > 3 * noise * math.sqrt(1 / k + 1 / width):
        return None
    return float(before[-width:].mean() - after)


def lr_find(
    trainer: Trainer,
    model: TrainModule | lazy,
    train_dataloaders: Any = None,
    datamodule: DataModule | None = None,
    *,
    min_lr: float = 1e-8,
    max_lr: float = 1.0,
    num_training_steps: int = 100,
    mode: str = "exponential",
    early_stop_threshold: float | None = 4.0,
    update_attr: bool = False,
    attr_name: str = "",
    hyperparam: str = "learning_rate",
) -> LRFinder:
    """Train a copy of a module for a few steps with a rate that rises from step to step, before `trainer.fit`.

    The copy is trained by a Trainer of its own, with the strategy, precision, accumulation and clipping of yours,
    without loggers, files and callbacks, but for those that change a step: `BackboneFreeze` and
    `GradientAccumulationScheduler`, the Trainer's and those of `configure_callbacks`. The module, `trainer` and random
    streams are left as they are: a training after it is bit by bit one that begins with that rate. A loader is read
    from its beginning, so it must be one that can be: a list, a `jl.ArrayLoader`, a grain dataset.

    Args:
        trainer: The Trainer that will train the module.
        model: The module. Its optimizer keeps its rate: `optax.inject_hyperparams(optax.adam)(learning_rate=self.lr)`.
        train_dataloaders: As for `fit`.
        datamodule: As for `fit`.
        min_lr: The rate of the first step.
        max_lr: The rate of the last step.
        num_training_steps: Optimizer steps.
        mode: "exponential" for rates that grow by a factor, "linear" by a difference.
        early_stop_threshold: Stop when the loss is not finite, or is more than so many times the least so far, from the
            tenth step on: before it their mean is of too few. None for no such end.
        update_attr: Set the module's attribute to the suggestion.
        attr_name: Which one; "" for `lr` or `learning_rate`, of the module or its `hparams`.
        hyperparam: The hyperparameter to raise, one of `trainer.hyperparams`; of several labels, all.

    Returns:
        An object with `results`, `suggestion()` and `plot()`.

    Raises:
        ArgumentError: An argument is out of its set, the loader can be read once only, the optimizer has no such
            hyperparameter, or the module no such attribute.
    """
    _check(trainer, model, min_lr, max_lr, num_training_steps, mode, early_stop_threshold, hyperparam)
    owner, name = _attribute(model, attr_name) if update_attr else (None, "")
    space = np.geomspace if mode == "exponential" else np.linspace
    rates = [float(x) for x in space(min_lr, max_lr, num_training_steps)]
    test = _RangeTest(LRFinder(mode), rates, hyperparam, early_stop_threshold)
    _run(trainer, test, model, train_dataloaders, datamodule)
    if owner is not None and (rate := test.found.suggestion()) is not None:
        setattr(owner, name, rate)
    return test.found


def _run(trainer: Trainer, test: "_RangeTest", model: Any, loader: Any, datamodule: Any) -> None:
    if isinstance(loader, Iterator):
        raise ArgumentError(
            "jl.lr_find(train_dataloaders=...) got an iterator, whose batches the training would miss. Pass a loader "
            "that starts again."
        )
    silent = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trial = Trainer(
        **{key: getattr(trainer.settings, key) for key in _SAME},
        **dict.fromkeys(silent, False),
        max_steps=len(test.rates),
        callbacks=[*_of_a_step(without(trainer.callbacks, trainer._session.added)), test],
        nan_policy="ignore",  # the largest rates may well give no finite loss
        limit_val_batches=0,
        log_every_n_steps=0,
    )
    trial.fit(_copied(model), loader, datamodule=datamodule)
    if trial.interrupted:
        raise KeyboardInterrupt


class _RangeTest(Callback):
    """Raises the rate at each step, and keeps what becomes of the loss.

    Args:
        found: What it fills.
        rates: The rate of each optimizer step.
        hyperparam: The hyperparameter.
        threshold: How many times the least loss is too much; None for no such end.
    """

    def __init__(self, found: LRFinder, rates: list[float], hyperparam: str, threshold: float | None) -> None:
        self.found, self.rates, self._hyperparam, self._threshold = found, rates, hyperparam, threshold
        self._window: list[jax.Array] = []  # losses of the step that is not complete
        self._waiting: list[jax.Array] = []  # those of the step before, which are ready by now
        self._steps, self._mean, self._least = 0, 0.0, math.inf

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        known = list(trainer.hyperparams)
        self._names = [x for x in known if x == self._hyperparam or x.startswith(f"{self._hyperparam}/")]
        if not self._names:
            raise ArgumentError(
                f"jl.lr_find(hyperparam={self._hyperparam!r}): the optimizer keeps no such hyperparameter."
                f"{did_you_mean(self._hyperparam, known)} It keeps: {', '.join(known) or 'none'}. Build it in "
                "configure_optimizers as optax.inject_hyperparams(optax.adam)(learning_rate=self.lr)."
            )
        self._set_rate(trainer)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._window.append(outputs["loss"])
        if trainer.global_step == self._steps:
            return
        self._steps = trainer.global_step
        self._take(trainer)
        self._window, self._waiting = [], self._window
        if self._steps < len(self.rates):
            self._set_rate(trainer)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self._take(trainer)

    def _set_rate(self, trainer: Any) -> None:
        for name in self._names:
            trainer.hyperparams[name] = self.rates[self._steps]

    def _take(self, trainer: Any) -> None:
        """Keep the loss of the step before, and end the trial if it has grown too much."""
        losses, results, count = self._waiting, self.found.results, len(self.found.results["lr"])
        self._waiting = []
        if not losses or trainer.should_stop:
            return
        newest = float(np.mean(jax.device_get(losses)))
        self._mean = _BETA * self._mean + (1 - _BETA) * newest
        loss = self._mean / (1 - _BETA ** (count + 1))
        results["lr"].append(self.rates[count])
        results["loss"].append(loss)
        results["step_loss"].append(newest)
        if self._threshold is not None and not (math.isfinite(loss) and loss <= self._threshold * self._least):
            trainer.stop(f"the loss has grown at a rate of {self.rates[count]:.3g}")
        if count + 1 >= _SETTLED:
            self._least = min(self._least, loss)


def _check(
    trainer: Any, model: Any, low: Any, high: Any, steps: Any, mode: Any, threshold: Any, hyperparam: Any
) -> None:
    if not isinstance(trainer, Trainer):
        raise ArgumentTypeError(f"jl.lr_find(trainer, model, ...) takes a jl.Trainer first, got {shown(trainer)}.")
    if not isinstance(model, (TrainModule, lazy)):
        raise ArgumentTypeError(f"jl.lr_find(trainer, model, ...) takes a jl.TrainModule second, got {shown(model)}.")
    owner, rule = "jl.lr_find", "takes a number above 0"
    check.positive("min_lr", low, owner=owner, rule=rule)
    check.positive("max_lr", high, owner=owner, rule=rule)
    check.require(low < high, "max_lr", high, f"takes a rate above min_lr={low}", owner=owner)
    check.integer("num_training_steps", steps, low=2, owner=owner)
    check.one_of("mode", mode, ("exponential", "linear"), owner=owner)
    if threshold is not None:
        check.positive("early_stop_threshold", threshold, owner=owner)
    if not isinstance(hyperparam, str) or not hyperparam:
        raise ArgumentTypeError(f"jl.lr_find(hyperparam=...) takes a name, got {hyperparam!r}.")


def _attribute(model: Any, attr_name: str) -> tuple[Any, str]:
    """Return whose attribute holds the rate, and its name.

    Raises:
        ArgumentError: There is none, or the module is still to be built.
    """
    if isinstance(model, lazy):
        raise ArgumentError(
            "jl.lr_find(update_attr=True) sets an attribute of a module, and a lazy one is not there yet. Pass the "
            "suggestion to jl.lazy(...)."
        )
    for name in [attr_name] if attr_name else ["lr", "learning_rate"]:
        if name in vars(model):
            return model, name
        if name in model.hparams:
            return model.hparams, name
    wanted = repr(attr_name) if attr_name else "'lr' or 'learning_rate'"
    raise ArgumentError(
        f"jl.lr_find(update_attr=True): {type(model).__name__} has no attribute {wanted}, nor have its hparams. Keep "
        "the rate in one, which configure_optimizers reads, or name another by attr_name."
    )


def _copied(model: TrainModule | lazy) -> Any:
    """Return a module that may be trained in the place of another, with those of its callbacks that change a step."""
    if isinstance(model, lazy):
        cls: Any = type(model.cls.__name__, (model.cls,), {})
        cls.configure_callbacks = lambda self: _configured(getattr(super(cls, self), "configure_callbacks", None))
        return lazy(cls, *model.args, **model.kwargs)
    copy: Any = nnx.clone(model)
    share_hparams(copy, model)
    configure = getattr(copy, "configure_callbacks", None)
    copy.configure_callbacks = lambda: _configured(configure)
    return copy


def _configured(configure: Callable[[], Any] | None) -> list[Callback]:
    return _of_a_step(callbacks_of("callbacks of configure_callbacks", configure() if configure else None))


def _of_a_step(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks that change what a step is."""
    return [c for c in callbacks if c.changes_step]
