"""The module that a user writes: a Flax NNX module that knows how to train itself."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never, Self

import jax
import optax
from flax import nnx

from jaxlit.core.hparams import KeepsHparams
from jaxlit.core.log import ACTIVE, active_collector, metric_of, named_values
from jaxlit.core.optimizer import Optimizer
from jaxlit.core.side_tables import trainer_of, watchers
from jaxlit.core.stage import STAGES
from jaxlit.errors import LogError, ModuleError
from jaxlit.porting import no_such_name, refuse_arguments

if TYPE_CHECKING:
    _OfClass = classmethod
else:

    class _OfClass(classmethod):
        """A class method that an object refuses: it would look as if it changed the object."""

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            method = super().__get__(instance, owner)
            if instance is None:
                return method

            def refuse(*_: Any, **__: Any) -> None:
                name = type(instance).__name__
                raise ModuleError(
                    f"{name}.{method.__name__} returns a new module, and was called on one that it does not "
                    f"change. Call it on the class: module = {name}.{method.__name__}(...)."
                )

            return refuse


class TrainModule(KeepsHparams, nnx.Module):
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

    def __getattribute__(self, name: str) -> Any:
        # While fit runs the newest arrays are with the engine: the first touch after a step brings them here.
        if watchers and (watcher := watchers.get(id(self))) is not None:
            watcher.touch(name)
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        # Nothing has the name, or a property of it has raised, whose error is raised again.
        if name.startswith("_") or hasattr(type(self), name):
            return super().__getattribute__(name)
        raise no_such_name("TrainModule", name, dir(self), called=type(self).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what `forward` does, where a module defines that in place of `__call__`."""
        if (forward := getattr(type(self), "forward", None)) is None:
            raise TypeError(f"{type(self).__name__} is not callable. Define __call__(self, ...), or forward.")
        return forward(self, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # What the compiled steps read from the module is frozen: an attribute set during a run would be ignored.
        if watchers and (watcher := watchers.get(id(self))) is not None:
            watcher.refuse_attribute(name)
        super().__setattr__(name, value)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a batch: a scalar, or a dict with "loss" and other outputs.

        Layers run in the modes that they have when `fit` begins. What the step writes to variables is kept; what it
        writes to a trained parameter is what the optimizer updates.

        Called as `training_step(batch)` or `training_step(batch, batch_idx)`; `batch_idx` is a traced
        () int32. What else the dict holds reaches `on_train_batch_end` as `outputs`.
        """
        raise NotImplementedError

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Log the metrics of a validation batch; called like `training_step`, in evaluation mode.

        Only training changes the state: a write to a variable of the module is refused. A metric that it updates
        is logged, `self.log("val/accuracy", self.accuracy)`.
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
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str = "mean",
        batch_size: Any = None,
        add_dataloader_idx: bool = True,
        **unknown: Never,
    ) -> None:
        """Log a scalar from a step or a hook.

        In a step the call runs while the step is traced, once; afterwards the value is one column of a
        small array that the step returns. In a hook the value is kept as it is and read when it is needed.

        Args:
            name: The metric's name, for example `train/loss`.
            value: () number; in a step also an `nnx.metrics.Average` or `Accuracy` that was updated there, of
                which the step's own share is logged: exact over batches of any size and over replicas.
            prog_bar: Show it in the progress bar.
            logger: Send it to `on_log`, and so to the loggers; None, Lightning's default, is True.
            on_step: Log the value of every `log_every_n_steps`-th step. Default: in `training_step` and training
                batch hooks. In validation and test it shows in `trainer.logged_metrics` and makes no row.
            on_epoch: Log the value of the epoch. Default: everywhere else. With both, the names end in `_step` and
                `_epoch`.
            reduce_fx: How an epoch adds up: "mean" (weighted by `batch_size`), "sum", "min" or "max". Where a step sees
                one replica's rows, a sum adds up what each replica logs.
            batch_size: The weight of this batch, an int or a () array. Default: its rows.
            add_dataloader_idx: With several loaders, append `/dataloader_idx_<i>` to the name.
            **unknown: Nothing: other names are refused.

        Raises:
            LogError: The call or the value is not one that can be logged.
            ArgumentTypeError: There is no such argument.
        """
        if unknown:
            refuse_arguments("self.log", TrainModule.log, unknown)
        if (collector := ACTIVE.get()) is None:
            raise LogError(
                f"self.log({name!r}, ...) is called outside of the steps and hooks that a Trainer runs. Call it in one "
                "of them, for example in training_step."
            )
        how: Any = {"prog_bar": prog_bar, "on_step": on_step, "on_epoch": on_epoch, "reduce_fx": reduce_fx}
        how |= {"logger": True if logger is None else logger, "add_dataloader_idx": add_dataloader_idx}
        collector.add(metric_of(collector.hook, name, **how), value, batch_size)

    def log_dict(self, dictionary: Any, *args: Any, **kwargs: Any) -> None:
        """Log several values at once, a mapping or an `nnx.MultiMetric`; the other arguments are those of `log`."""
        for name, value in named_values(dictionary).items():
            self.log(name, value, *args, **kwargs)

    @_OfClass
    def load_from_checkpoint(cls, checkpoint_path: str | Path, *, strict: bool = True, **overrides: Any) -> Self:
        """Build the module with the hyperparameters and the weights of a checkpoint.

        Constructor arguments are kept in a checkpoint, functions and classes by name; `rngs` need not be given.

        Args:
            checkpoint_path: A checkpoint; a run's folder, of which the newest that verifies is taken, and printed;
                or `<run's folder>/best`.
            strict: Refuse a checkpoint that does not fit; otherwise what fits is taken, and the rest named.
            **overrides: Constructor arguments that win over those of the checkpoint, or that it does not keep.

        Raises:
            CheckpointError: It is damaged, or does not fit: a table shows what differs.
        """
        from jaxlit.core.loading import load_module

        return load_module(cls, checkpoint_path, overrides, strict=strict)  # type: ignore[return-value]

    @property
    def trainer(self) -> Any:
        """The `Trainer` that runs this module."""
        if (trainer := trainer_of(self)) is None:
            raise AttributeError(
                f"{type(self).__name__} is not attached to a Trainer. Call trainer.fit(module, ...). jl.fit_many "
                "attaches none: a step reads self.global_step and self.current_epoch there."
            )
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
    def logger(self) -> Any:
        """The Trainer's first logger."""
        return self.trainer.logger

    @property
    def loggers(self) -> list[Any]:
        """The Trainer's loggers."""
        return self.trainer.loggers


def is_overridden(module: TrainModule, method: str) -> bool:
    """Return whether the module's class defines a method of `TrainModule` itself."""
    return getattr(type(module), method) is not getattr(TrainModule, method)


def call_step(module: TrainModule, stage: str, loader: int | None = None) -> Callable[[Any, jax.Array], Any]:
    """Return the stage's step as a function of (batch, batch_idx), whichever of them it takes.

    Args:
        module: The module.
        stage: "training", "validation", "test" or "predict".
        loader: The `dataloader_idx` for a step that takes one.

    Raises:
        ModuleError: The step is missing, or has another signature.
    """
    name = STAGES[stage].step
    if not is_overridden(module, name):
        raise ModuleError(f"{type(module).__name__} has no {name}. Define {name}(self, batch).")
    step = getattr(module, name)
    signature = inspect.signature(step)
    extra = {"dataloader_idx": loader or 0} if takes_loader(module, stage) else {}
    second = [*signature.parameters.values()][1:2]
    # A second argument with a default is the index only if it is called so.
    wants = bool(second) and (second[0].default is inspect.Parameter.empty or second[0].name == "batch_idx")
    for count in (2, 1) if wants or not second else (1,):
        try:
            signature.bind(*[None] * count, **extra)
        except TypeError:
            continue
        return lambda batch, batch_idx: step(*(batch, batch_idx)[:count], **extra)
    also = "" if stage == "training" else ", with dataloader_idx=0 after them for several loaders"
    raise ModuleError(
        f"{type(module).__name__}.{name}{signature} must take (self, batch) or (self, batch, batch_idx){also}."
    )


def takes_loader(module: TrainModule, stage: str) -> bool:
    """Return whether the stage's step asks which loader a batch is from."""
    parameters = inspect.signature(getattr(module, STAGES[stage].step)).parameters
    return stage != "training" and "dataloader_idx" in parameters
