"""Two searches before a training: the learning rate to begin with, by a range test, and the largest batch.

The batch is found by compiling the step, not by running out of memory.
"""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback, hyperparams_named
from jaxlit.core.module import TrainModule
from jaxlit.core.replica import abstract_batch, num_rows, with_rows
from jaxlit.data.loaders import DataModule
from jaxlit.engine.creation import lazy
from jaxlit.errors import ArgumentError, OutOfMemoryError
from jaxlit.sharding import out_of_meshes
from jaxlit.strategies.auto import memory_limit
from jaxlit.texts import size
from jaxlit.trainer.plan import copied, first_batch, named_strategies, plan_trial, trial_of
from jaxlit.trainer.step_cost import cost_of_step, shapes_of
from jaxlit.trainer.trainer import Trainer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_logger = logging.getLogger("jaxlit")

_BETA = 0.98  # decay of the running mean of the losses
_SETTLED = 10  # losses after which the running mean may be compared
_MOST = 2**25  # batches of a row on each device, as in Lightning
_MOST_TIMES = 16  # as large as the largest that fits may the next one be


class LRFinder:
    """The result of a range test.

    Attributes:
        results: "lr", "loss" and "step_loss": the rate of each step, the running mean of the losses up to it, and the
            loss of the step itself.

    Example:
        >>> import jax.numpy as jnp, jaxlit as jl, optax
        >>> class Line(jl.testing.Line):
        ...     def configure_optimizers(self):
        ...         return optax.inject_hyperparams(optax.sgd, hyperparam_dtype=jnp.float32)(learning_rate=self.lr)
        >>> model, data = Line(), jl.testing.line_data()
        >>> found = jl.lr_find(jl.Trainer(max_epochs=2), model, data, min_lr=1e-4, update_attr=True)
        >>> 1e-4 < found.suggestion() < 1.0 and model.lr == found.suggestion()
        True
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.results = {"lr": list[float](), "loss": list[float](), "step_loss": list[float]()}

    def suggestion(self, skip_begin: int = 10, skip_end: int = 1) -> float | None:
        """Return the rate at which the loss falls most steeply; None, with a warning, if it clearly falls at none.

        At each rate the mean loss of an eighth of all steps before it is compared with that of an eighth after it. A
        rate counts if the loss after it is below that of all steps before by three standard errors of these means.

        Args:
            skip_begin: Steps at the beginning whose rates do not count.
            skip_end: Steps at the end whose rates do not count.
        """
        rates = self.results["lr"]
        end = len(rates) - check.integer("skip_end", skip_end, low=0, owner="suggestion")
        begin = check.integer("skip_begin", skip_begin, low=0, owner="suggestion")
        losses = np.asarray(self.results["step_loss"][: max(end, 0)])
        losses = losses[: int(np.isfinite(losses).cumprod().sum())]
        width = max(len(rates) // 8, 1)
        falls = dict[int, float]()
        for k in range(max(begin, 3), len(losses) - width + 1):
            before = losses[:k]
            after = losses[k : k + width].mean()
            noise = np.sqrt(np.mean(np.diff(before, 2) ** 2) / 6)  # of one loss: second differences remove a slope
            if before.mean() - after > 3 * noise * math.sqrt(1 / k + 1 / width):
                falls[k] = float(before[-width:].mean() - after)
        if not falls:
            _logger.warning(
                "lr_find suggests none of its %d rates: at none of them does the loss clearly fall. Try more steps, a "
                "wider range of rates or larger batches.",
                len(rates),
            )
            return None
        return rates[max(falls, key=lambda k: falls[k])]

    def plot(self, suggest: bool = False) -> "Figure":
        """Draw the loss over the rate.

        Args:
            suggest: Mark the suggestion.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            LoggerError: matplotlib is not installed.
        """
        matplotlib = check.import_package("matplotlib.figure", owner="LRFinder.plot", install="matplotlib")
        rates = self.results["lr"]
        losses = self.results["loss"]
        figure = matplotlib.Figure(layout="constrained")
        axes = figure.add_subplot(xlabel="learning rate", ylabel="loss")
        axes.plot(rates, losses)
        axes.set_xscale("log" if self._mode == "exponential" else "linear")
        if suggest and (rate := self.suggestion()) is not None:
            axes.plot([rate], [losses[rates.index(rate)]], "o", color="red", label=f"{rate:.3g}")
            axes.legend()
        return figure


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

    A second Trainer trains the copy, with the strategy, precision, accumulation and clipping of yours, without loggers,
    files and callbacks, except those that change a step, such as `BackboneFreeze` and `GradientAccumulationScheduler`.
    The module, `trainer` and random streams do not change: a training after it is bit-identical to one that begins with
    that rate. A loader is read from its beginning, so it must start again: a list, a `jl.ArrayLoader`, a grain dataset.

    Args:
        trainer: The Trainer that will train the module.
        model: The module, with `optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(self.lr)`.
        train_dataloaders: As for `fit`.
        datamodule: As for `fit`.
        min_lr: The rate of the first step.
        max_lr: The rate of the last step.
        num_training_steps: Optimizer steps.
        mode: "exponential" for rates that grow by a factor, "linear" by a difference.
        early_stop_threshold: Stop when the running mean of the loss is not finite, or, after ten steps, more than so
            many times its minimum so far. None for no such end.
        update_attr: Set the module's attribute to the suggestion, and the hyperparameter of that name.
        attr_name: Which one; "" for `lr` or `learning_rate`, of the module or its `hparams`.
        hyperparam: The hyperparameter to raise, one of `trainer.hyperparams`; of several labels, all.

    Returns:
        An object with `results`, `suggestion()` and `plot()`.

    Raises:
        ArgumentError: An argument is out of its set, or the loader, the optimizer or the module does not fit.
    """
    if early_stop_threshold is not None:
        check.positive("early_stop_threshold", early_stop_threshold, owner="jl.lr_find")
    if isinstance(train_dataloaders, Iterator):
        raise ArgumentError(
            "jl.lr_find(train_dataloaders=...) takes a re-iterable loader, got an iterator. Pass a list of its batches."
        )
    holders, name = _attribute(model, attr_name) if update_attr else ([], "")
    rates = _rates(min_lr, max_lr, num_training_steps, mode)
    test = _RangeTest(LRFinder(mode), rates, hyperparam, early_stop_threshold)
    trial = trial_of(trainer, test, max_steps=len(rates), nan_policy="ignore")  # the largest rates may diverge
    trial.fit(copied(model), train_dataloaders, datamodule=datamodule)
    if trial.interrupted:
        raise KeyboardInterrupt
    rate = test.finder.suggestion() if holders else None
    for holder in holders if rate is not None else ():
        setattr(holder, name, rate)
    return test.finder


class _RangeTest(Callback):
    """Raises the rate at each optimizer step, and collects the losses."""

    def __init__(self, finder: LRFinder, rates: list[float], hyperparam: str, threshold: float | None) -> None:
        self.finder = finder
        self.rates = rates
        self._hyperparam = hyperparam
        self._threshold = threshold
        self._window: list[Any] = []  # losses of the batches of a step that is not complete
        self._mean = 0.0
        self._least = math.inf

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self._names = hyperparams_named(self._hyperparam, trainer, "jl.lr_find")
        trainer.hyperparams.update(dict.fromkeys(self._names, self.rates[0]))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._window.append(outputs["loss"])
        done = trainer.global_step
        results = self.finder.results
        if done == len(results["lr"]):  # the step waits for other batches
            return
        newest = float(np.mean(jax.device_get(self._window)))
        self._window = []
        self._mean = _BETA * self._mean + (1 - _BETA) * newest
        loss = self._mean / (1 - _BETA**done)
        for name, value in (("lr", self.rates[done - 1]), ("loss", loss), ("step_loss", newest)):
            results[name].append(value)
        if self._threshold is not None and not (math.isfinite(loss) and loss <= self._threshold * self._least):
            trainer.stop(f"the loss has grown at a rate of {self.rates[done - 1]:.3g}")
        elif done < len(self.rates):
            trainer.hyperparams.update(dict.fromkeys(self._names, self.rates[done]))
        if done >= _SETTLED:
            self._least = min(self._least, loss)


def _rates(min_lr: float, max_lr: float, steps: int, mode: str) -> list[float]:
    owner = "jl.lr_find"
    rule = "takes a number above 0"
    low = check.positive("min_lr", min_lr, owner=owner, rule=rule)
    high = check.positive("max_lr", max_lr, owner=owner, rule=rule)
    check.require(low < high, "max_lr", max_lr, f"takes a rate above min_lr={min_lr}", owner=owner)
    check.integer("num_training_steps", steps, low=2, owner=owner)
    exponential = check.one_of("mode", mode, ("exponential", "linear"), owner=owner) == "exponential"
    return (np.geomspace if exponential else np.linspace)(low, high, steps).tolist()


def _attribute(model: Any, attr_name: str) -> tuple[list[Any], str]:
    """Return the objects whose attribute is the rate, and the attribute's name; a lazy module has none."""
    for name in [attr_name] if attr_name else ["lr", "learning_rate"]:
        hparams = getattr(model, "hparams", {})  # a lazy module has none yet
        if holders := [model] * (name in vars(model)) + [hparams] * (name in hparams):
            return holders, name
    wanted = repr(attr_name) if attr_name else "'lr' or 'learning_rate'"
    raise ArgumentError(
        f"jl.lr_find(update_attr=True): {type(model).__name__} has no attribute or hparam {wanted}. Keep the rate in "
        "one that configure_optimizers reads, or pass the name of another one as attr_name."
    )


@dataclass(frozen=True)
class BatchSize:
    """What `jl.scale_batch_size` returns.

    Attributes:
        batch_size: The rows of a batch, of all devices together.
        accumulate_grad_batches: How many such batches make the batch that was asked for.
        strategy: The strategy's name.
        memory: Bytes that a step with this batch takes of a device, as compiled.
        tried: The same for each number of rows that was compiled, infinite where that ran out of memory.
    """

    batch_size: int
    accumulate_grad_batches: int
    strategy: str
    memory: float
    tried: dict[int, float]


@out_of_meshes
def scale_batch_size(
    trainer: Any,
    model: TrainModule | lazy,
    train_dataloaders: Any = None,
    memory_bytes: int | None = None,
    *,
    effective_batch_size: int | None = None,
) -> BatchSize:
    """Find the largest batch whose training step fits into the devices' memory.

    Steps are compiled from shapes alone; what two of them take gives the next number of rows. One step is taken at the
    end, on a copy of the module and the rows of the loader's first batch, repeated. `trainer` and the module do not
    change. Use the result as `jl.ArrayLoader(..., batch_size=found.batch_size)`.

    Args:
        trainer: The Trainer that will train the module.
        model: The module.
        train_dataloaders: A loader, or a `jl.DataModule`, of batches of any size.
        memory_bytes: What a step may take of a device; None for 95 % of what jax reports, less all arrays.
        effective_batch_size: Rows of an optimizer step. The batch is then the largest part of it that fits, and
            `accumulate_grad_batches` the number of parts. None for one batch a step.

    Raises:
        ArgumentError: Not even one row a device fits, the rows of a step do not divide into batches that do, or other
            arrays take all memory.

    Example:
        >>> import jaxlit as jl
        >>> trainer = jl.Trainer(strategy="single", max_steps=1, logger=False)
        >>> model, data = jl.testing.Line(), jl.testing.line_data()
        >>> found = jl.scale_batch_size(trainer, model, data, memory_bytes=10_000)
        >>> found.memory <= 10_000 and found.accumulate_grad_batches
        1
    """
    owner = "jl.scale_batch_size"
    limit = _limit(memory_bytes, owner)
    check.integer("effective_batch_size", effective_batch_size, low=1, also=(None,), owner=owner)
    raw, batch, num_batches = first_batch(trainer, model, train_dataloaders)
    shapes = model if isinstance(model, lazy) else shapes_of(model)

    def tries(strategy: Any, accumulate: int) -> _Tries:
        trial = plan_trial(trainer, strategy, None, accumulate_grad_batches=accumulate)
        return _Tries(
            lambda rows: cost_of_step(trial, shapes, with_rows(abstract_batch(batch), rows), num_batches).total,
            trial.strategy.num_replicas,
            limit,
        )

    name, strategy, tried, rows, accumulate = _scaled(trainer, tries, effective_batch_size)
    real = jax.tree.map(lambda x: _repeated(x, num_rows(batch), rows), raw)
    trial = trial_of(trainer, strategy=strategy, max_steps=1, accumulate_grad_batches=min(accumulate, 2))
    trial.fit(copied(model), [real] * min(accumulate, 2))
    return BatchSize(rows, accumulate, name, tried.needs(rows), tried.tried)


def _limit(memory_bytes: int | None, owner: str) -> int:
    """Return the bytes that a step may take of a device, as given or as the devices report it."""
    check.integer("memory_bytes", memory_bytes, low=1, also=(None,), owner=owner)
    limit = memory_limit() if memory_bytes is None else memory_bytes
    check.require(limit is not None, "memory_bytes", limit, "has to be given where devices report none", owner=owner)
    assert limit is not None
    if limit < 0:
        raise ArgumentError(
            f"{owner}: other arrays take {size(-limit)} more than 95 % of a device's memory. Delete some of them."
        )
    return limit


def _scaled(trainer: Any, tries: Callable[[Any, int], "_Tries"], wanted: int | None) -> Any:
    """Return the strategy's name, the strategy, what was tried, and the rows and the number of batches of a step."""
    accumulate = trainer.settings.accumulate_grad_batches if wanted is None else 1
    pairs = named_strategies(trainer, trainer.settings.strategy, None)
    each = [(name, strategy, tries(strategy, accumulate)) for name, strategy in pairs]
    name, strategy, tried = next((x for x in each if x[2].fits(x[2].unit)), each[-1])
    if wanted is None:
        return name, strategy, tried, tried.largest(), accumulate
    if wanted % tried.unit == 0 and tried.fits(wanted):
        return name, strategy, tried, wanted, 1
    tried = tries(strategy, 2)  # a window of accumulated gradients takes memory, however many batches it has
    return name, strategy, tried, *_part_of(wanted, tried.largest(), tried.unit)


@dataclass(eq=False)
class _Tries:
    """What steps with batches of several sizes take.

    `cost` is a function of a batch's rows, a multiple of `unit`, to the bytes of a step; a device has `limit` of them.
    """

    cost: Callable[[int], int]
    unit: int
    limit: int
    tried: dict[int, float] = field(default_factory=dict)

    def needs(self, rows: int) -> float:
        """Return the bytes of a step; infinite if there is too little memory to compile it."""
        if rows not in self.tried:
            try:
                self.tried[rows] = self.cost(rows)
            except OutOfMemoryError:
                self.tried[rows] = math.inf
        return self.tried[rows]

    def fits(self, rows: int) -> bool:
        """Return whether a step fits."""
        return self.needs(rows) <= self.limit

    def largest(self) -> int:
        """Return the most rows that fit.

        Raises:
            ArgumentError: Not even one unit fits.
        """
        unit = self.unit
        if not self.fits(unit):
            needs = self.needs(unit)
            why = f"need{'s' * (unit == 1)} {size(needs)} of {size(self.limit)}"
            if needs == math.inf:
                why = "cannot be compiled in the free memory of a device"
            raise ArgumentError(
                f"jl.scale_batch_size: {unit} row{'s' * (unit > 1)}, the fewest, {why}. Use more devices or 'fsdp'."
            )
        fits = 1
        fails = None
        in_a_row = 0  # how many tries fitted since one failed; negative, how many failed since one fitted
        while fails is None or fails - fits > 1:
            if fails is None and fits >= _MOST:
                break
            top = _MOST_TIMES * fits if fails is None else fails - 1
            # The compiler's limit is on no line: a guess by what fits would overshoot each time.
            if fails is not None and (abs(in_a_row) > 1 or self.needs(fails * unit) == math.inf):
                middle = (fits + fails) // 2
            else:
                middle = self._guess(fits, fails)
            middle = min(max(middle, fits + 1), top)
            if self.fits(middle * unit):
                fits = middle
                in_a_row = max(in_a_row, 0) + 1
            else:
                fails = middle
                in_a_row = min(in_a_row, 0) - 1
        return fits * unit

    def _guess(self, fits: int, fails: int | None) -> int:
        """Return the most units that fit, by the line through two sizes: memory grows along pieces of such lines."""
        known = {rows // self.unit: needs for rows, needs in self.tried.items()}
        other = max((x for x in known if x < fits), default=None) if fails is None else fails
        if other is None:
            return 2 * fits
        rate = (known[fits] - known[other]) / (fits - other)
        if rate <= 0:
            return _MOST if fails is None else (fits + fails) // 2
        return fits + int((self.limit - known[fits]) / rate)


def _part_of(rows: int, most: int, unit: int) -> tuple[int, int]:
    """Return the largest equal parts of at most so many rows, a multiple of the unit, and how many they are."""
    parts = [count for count in range(1, rows + 1) if rows % count == 0]
    fitting = [count for count in parts if rows // count <= most and (rows // count) % unit == 0]
    if not fitting:
        raise ArgumentError(
            f"jl.scale_batch_size(effective_batch_size={rows}) does not divide into batches of at most {most} rows, a "
            f"multiple of {unit}. Ask for another number, such as {max(rows // most, 1) * most}."
        )
    return rows // fitting[0], fitting[0]


def _repeated(x: Any, rows: int, wanted: int) -> Any:
    """Return an array of rows with others in number, the same ones again and again."""
    x = np.asarray(x)
    return np.take(x, np.arange(wanted) % rows, axis=0) if x.ndim and x.shape[0] == rows else x
