"""The module that a user writes: a Flax NNX module that knows how to train itself."""

import inspect
import json
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import optax
from flax import nnx

from jaxlit.errors import ArgumentError, LogError, ModuleError
from jaxlit.metrics import REDUCTIONS, Metric, active_collector

if TYPE_CHECKING:
    from jaxlit.live import Live
    from jaxlit.trainer import Trainer

# What belongs to a module but not to its graph: an attribute would change the graphdef, and with it
# every compiled step.
_hparams: "weakref.WeakKeyDictionary[TrainModule, dict[str, Any]]" = weakref.WeakKeyDictionary()
_trainers: "weakref.WeakKeyDictionary[TrainModule, weakref.ref[Trainer]]" = weakref.WeakKeyDictionary()
_live: "dict[int, Live]" = {}  # by id of the module; empty outside fit


@dataclass(frozen=True)
class Optimizer:
    """An optax transform and the variables that it trains.

    Args:
        tx: The transform.
        wrt: An nnx filter for the variables to train; the other `nnx.Param`s are frozen.
        lr_schedule: The schedule inside `tx`, for those who show it.

    Example:
        >>> import jaxlit as jl, optax
        >>> from flax import nnx
        >>> head_only = jl.Optimizer(optax.adam(1e-3), wrt=nnx.All(nnx.Param, nnx.PathContains("head")))
    """

    tx: optax.GradientTransformation
    wrt: Any = nnx.Param
    lr_schedule: optax.Schedule | None = None


class TrainModule(nnx.Module):
    """A Flax NNX module with the steps and the optimizer of its own training.

    Override `training_step` and `configure_optimizers`; `validation_step`, `test_step` and
    `predict_step` where they are needed. Steps are compiled: they are plain JAX code that sees the
    *global* batch as jax arrays. Any hook of `jaxlit.Callback` may be defined as well, without
    `trainer` and `module` in its signature.

    Example:
        >>> import jax.numpy as jnp, jaxlit as jl, optax
        >>> from flax import nnx
        >>> class Regression(jl.TrainModule):
        ...     def __init__(self, *, rngs):
        ...         self.linear = nnx.Linear(2, 1, rngs=rngs)
        ...     def training_step(self, batch):
        ...         loss = jnp.mean((self.linear(batch["x"]) - batch["y"]) ** 2)
        ...         self.log("train/loss", loss)
        ...         return loss
        ...     def configure_optimizers(self):
        ...         return optax.sgd(0.1)
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> "TrainModule":
        """Keep the constructor's arguments as hyperparameters."""
        module = super().__new__(cls)
        set_hparams(module, args, kwargs)
        return module

    def __getattribute__(self, name: str) -> Any:
        # While fit runs the newest arrays are with the engine: the first touch after a step brings them here.
        if _live and (live := _live.get(id(self))) is not None:
            live.touch()
        return super().__getattribute__(name)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a batch: a scalar, or a dict with "loss" and other outputs.

        Called as `training_step(batch)` or `training_step(batch, batch_idx)`; `batch_idx` is a traced
        () int32. What the dict holds beside the loss reaches `on_train_batch_end` as `outputs`.
        """
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Log the metrics of a validation batch; called like `training_step`, in evaluation mode.

        State that it changes is dropped: only training changes the state.
        """
        raise NotImplementedError

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Log the metrics of a test batch; see `validation_step`."""
        raise NotImplementedError

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions of a batch: a pytree of arrays with one row for each row of the batch."""
        raise NotImplementedError

    def configure_optimizers(self) -> "optax.GradientTransformation | Optimizer":
        """Return an optax transform, or a `jaxlit.Optimizer`."""
        raise NotImplementedError

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str = "mean",
        batch_size: Any = None,
        add_dataloader_idx: bool = True,
    ) -> None:
        """Log a scalar inside a step.

        The call runs while the step is traced, once; afterwards the value is one column of a small array
        that the step returns.

        Args:
            name: The metric's name, `train/loss` say.
            value: () number.
            prog_bar: Show it in the progress bar.
            logger: Send it to `on_log`, and so to the loggers.
            on_step: Log the value of every `log_every_n_steps`-th step. Default: in `training_step`.
            on_epoch: Log the value of the epoch. Default: in validation and test.
            reduce_fx: How an epoch adds up: "mean" (weighted by `batch_size`), "sum", "min" or "max".
            batch_size: The weight of this batch, an int or a () array. Default: its rows.
            add_dataloader_idx: With several loaders, append `/dataloader_idx_<i>` to the name.

        Raises:
            LogError: The call or the value is not one that can be logged.
        """
        collector = active_collector()
        if not isinstance(name, str):
            raise LogError(f"self.log(name, value) takes a str as name, got {name!r}.")
        if collector is None:
            raise LogError(
                f"self.log({name!r}, ...) is called outside of training_step, validation_step and test_step. "
                "Call it in one of them while a Trainer runs it."
            )
        if collector.stage == "predict":
            raise LogError(f"self.log({name!r}, ...) is called in predict_step, which logs nothing. Return the value.")
        if reduce_fx not in REDUCTIONS:
            raise LogError(f"self.log({name!r}, reduce_fx=...) must be one of {REDUCTIONS}, got {reduce_fx!r}.")
        training = collector.stage == "training"
        if on_step and not training:
            raise LogError(
                f"self.log({name!r}, on_step=True) in {collector.stage}_step: only training steps have rows of "
                "their own. Leave on_step out to log the mean over the loader."
            )
        metric = Metric(
            name,
            prog_bar=bool(prog_bar),
            logger=bool(logger),
            on_step=training if on_step is None else bool(on_step),
            on_epoch=not training if on_epoch is None else bool(on_epoch),
            reduce_fx=reduce_fx,
            add_dataloader_idx=bool(add_dataloader_idx),
        )
        if not metric.on_step and not metric.on_epoch:
            raise LogError(f"self.log({name!r}, on_step=False, on_epoch=False) logs nothing. Set one of them.")
        collector.add(metric, value, batch_size)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log several scalars at once; the other arguments are those of `log`."""
        for name, value in dictionary.items():
            self.log(name, value, *args, **kwargs)

    @property
    def trainer(self) -> "Trainer":
        """The trainer that runs this module."""
        ref = _trainers.get(self)
        trainer = ref() if ref else None
        if trainer is None:
            raise AttributeError(f"{type(self).__name__} is not attached to a Trainer. Call trainer.fit(module, ...).")
        return trainer

    @property
    def global_step(self) -> Any:
        """Optimizer steps taken: an int, inside a step a traced () int32."""
        collector = active_collector()
        return self.trainer.global_step if collector is None else collector.step

    @property
    def current_epoch(self) -> Any:
        """The epoch: an int, inside a step a traced () int32."""
        collector = active_collector()
        return self.trainer.current_epoch if collector is None else collector.epoch

    @property
    def hparams(self) -> dict[str, Any]:
        """The constructor's arguments that are JSON values."""
        return dict(_hparams.get(self, {}))


STEPS = {"training": "training_step", "validation": "validation_step", "test": "test_step", "predict": "predict_step"}


def is_overridden(module: TrainModule, method: str) -> bool:
    """Tell whether the module's class defines a method of `TrainModule` itself."""
    return getattr(type(module), method) is not getattr(TrainModule, method)


def attach(module: TrainModule, trainer: "Trainer") -> None:
    """Make `module.trainer` the trainer."""
    _trainers[module] = weakref.ref(trainer)


def set_hparams(module: TrainModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Keep those of a constructor's arguments that are JSON values."""
    try:
        bound = inspect.signature(type(module).__init__).bind(module, *args, **kwargs)
    except TypeError:
        return  # the constructor itself will say what is wrong
    bound.apply_defaults()
    arguments = dict(list(bound.arguments.items())[1:])
    for parameter in inspect.signature(type(module).__init__).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    _hparams[module] = {k: v for k, v in arguments.items() if _is_json(v)}


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def optimizer_of(module: TrainModule) -> Optimizer:
    """Return what `configure_optimizers` returned, as an `Optimizer`.

    Raises:
        ModuleError: It is missing or returned something else.
    """
    if not is_overridden(module, "configure_optimizers"):
        raise ModuleError(
            f"fit needs {type(module).__name__}.configure_optimizers. Return an optax transform from it, "
            "optax.adamw(1e-3) say."
        )
    made = module.configure_optimizers()
    if isinstance(made, optax.MultiSteps):  # a transform in all but its type
        made = made.gradient_transformation()
    if isinstance(made, optax.GradientTransformation):  # a NamedTuple, so this comes before the tuple
        return Optimizer(made)
    if isinstance(made, Optimizer) and isinstance(made.tx, optax.GradientTransformation):
        return made
    where = f"{type(module).__name__}.configure_optimizers"
    if isinstance(made, (list, tuple)):
        raise ModuleError(f"{where} returned {len(made)} optimizers; return one, joined by optax.multi_transform.")
    raise ModuleError(
        f"{where} must return an optax.GradientTransformation or a jaxlit.Optimizer, got {made!r}. "
        "Return optax.adamw(1e-3), say."
    )


def call_step(module: TrainModule, stage: str) -> Callable[[Any, jax.Array], Any]:
    """Return the stage's step as a function of (batch, batch_idx), whichever of them it takes.

    Raises:
        ModuleError: The step is missing, or takes neither `(batch)` nor `(batch, batch_idx)`.
    """
    name = STEPS[stage]
    if not is_overridden(module, name):
        raise ModuleError(f"{type(module).__name__} has no {name}. Define {name}(self, batch).")
    step = getattr(module, name)
    signature = inspect.signature(step)
    for count in (2, 1):
        try:
            signature.bind(*[None] * count)
        except TypeError:
            continue
        return (lambda batch, _: step(batch)) if count == 1 else step
    raise ModuleError(f"{type(module).__name__}.{name}{signature} must take (self, batch) or (self, batch, batch_idx).")


class lazy:
    """A module that is built inside the strategy, straight into its shards.

    Parameters larger than a device never exist whole on one. `rngs` left out is
    `nnx.Rngs(trainer.seed)`; an int or an `nnx.Rngs` is copied. The weights equal those of
    `cls(*args, **kwargs)` to rounding. The built module is `trainer.module`.

    Args:
        cls: A subclass of `TrainModule`.
        *args: Positional arguments of its constructor.
        **kwargs: Keyword arguments of its constructor.

    Example:
        >>> import jaxlit as jl
        >>> class Model(jl.TrainModule):
        ...     def __init__(self, width, *, rngs): ...
        >>> model = jl.lazy(Model, width=256)
    """

    def __init__(self, cls: type[TrainModule], *args: Any, **kwargs: Any) -> None:
        if not (isinstance(cls, type) and issubclass(cls, TrainModule)):
            raise ArgumentError(f"jl.lazy(cls, ...) takes a subclass of jl.TrainModule, got {cls!r}.")
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def builder(self, seed: int) -> Callable[[], TrainModule]:
        """Return a function that builds the module, fit to be traced."""
        kwargs = dict(self.kwargs)
        takes_rngs = "rngs" in inspect.signature(self.cls.__init__).parameters
        rngs = kwargs.pop("rngs", seed if takes_rngs else None)
        if rngs is None:
            return lambda: self.cls(*self.args, **kwargs)
        graphdef, state = nnx.split(nnx.Rngs(rngs) if isinstance(rngs, int) else rngs)
        state = nnx.as_pure(state)
        # The generator is rebuilt in the trace, so that drawing from it neither leaks nor changes the caller's.
        return lambda: self.cls(*self.args, **kwargs, rngs=nnx.merge(graphdef, state, copy=True))

    def note(self, module: TrainModule) -> TrainModule:
        """Keep the constructor's arguments as the hyperparameters of the built module."""
        set_hparams(module, self.args, self.kwargs)
        return module
