"""The module that a user writes: a Flax NNX module that contains the steps and the optimizer of its own training.

The tables of what belongs to a module but not to its graph; the four stages of a Trainer; the constructor's arguments
as hyperparameters (`KeepsHparams`, also of DataModules); `TrainModule`; and how one is built from a checkpoint.
"""

import argparse
import contextlib
import copy
import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Self

import jax
import optax
from flax import nnx

from jaxlit.checkpoints.files import Checkpoint, locate
from jaxlit.checkpoints.module_state import load_variables
from jaxlit.checkpoints.places import place_of
from jaxlit.core.log import ACTIVE, active_collector, metric_of, named_values
from jaxlit.core.optimizer import Optimizer
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError, LogError, ModuleError
from jaxlit.faces import advice, no_such_name, refuse_arguments, takes_only_its_arguments
from jaxlit.reporting.secrets import PLACEHOLDER, hide, print_left_out
from jaxlit.reporting.terminal import say, short_path
from jaxlit.texts import shown
from jaxlit.values import DEFAULT, NotKeptError, decode, encode, is_omegaconf, not_kept, readable

_logger = logging.getLogger("jaxlit")


# The Trainer of a module by its id, since a dataclass module has no hash; deleted with the module.
_trainers: dict[int, weakref.ref] = {}
# The `ModuleSync` of a module by its id, called when the module is touched while a run has its arrays. Empty outside
# of a run, so that touching a module then costs nothing.
watchers: dict[int, Any] = {}


def attach(module: Any, trainer: Any) -> Any:
    """Make `module.trainer` the trainer, and return the earlier one."""
    outer = trainer_of(module)
    if id(module) not in _trainers:
        weakref.finalize(module, _trainers.pop, id(module), None)
    _trainers[id(module)] = weakref.ref(trainer)
    return outer


def trainer_of(module: Any) -> Any:
    """Return the Trainer that runs, or ran, the module; None without one."""
    return reference() if (reference := _trainers.get(id(module))) else None


@dataclass(frozen=True)
class Stage:
    """One of the four things that a Trainer does with batches."""

    name: str  # as in hooks: on_<name>_batch_end, but on_train_batch_end for "training"
    method: str  # the Trainer's method
    step: str  # the module's method
    loaders: str  # the hook that makes its loaders
    limit: str  # the Trainer's argument that limits them
    program: str  # the name of its compiled step


STAGES = {
    stage.name: stage
    for stage in (
        Stage("training", "fit", "training_step", "train_dataloader", "limit_train_batches", "train_step"),
        Stage("validation", "validate", "validation_step", "val_dataloader", "limit_val_batches", "eval_step"),
        Stage("test", "test", "test_step", "test_dataloader", "limit_test_batches", "test_step"),
        Stage("predict", "predict", "predict_step", "predict_dataloader", "limit_predict_batches", "predict_step"),
    )
}


_CHOSEN = "..."  # how an argument is shown that the user chose not to keep


class Hparams(dict[str, Any]):
    """Hyperparameters: a dict, whose keys are attributes as well.

    For nnx it is a static attribute, which travels with the module and is compared by its values.

    Args:
        values: The hyperparameters.
        arguments: The names of those that the constructor takes; others were added.
        left_out: How the arguments that are not kept, and are not their defaults, are shown.
    """

    __slots__ = ("_arguments", "_left_out", "_running")
    _arguments: frozenset[str]
    _left_out: dict[str, str]
    _running: dict[str, Any]  # the arguments of the constructor that runs

    def __init__(
        self,
        values: Mapping[str, Any] | None = None,
        arguments: Iterable[str] = (),
        left_out: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(values or {})
        object.__setattr__(self, "_arguments", frozenset(arguments))
        object.__setattr__(self, "_left_out", dict(left_out or {}))
        object.__setattr__(self, "_running", {})

    def __hash__(self) -> int:
        return hash(self._arguments)  # a graph of nnx may be a key

    def __reduce__(self) -> Any:
        return Hparams, (dict(self), self._arguments, self._left_out)

    def __deepcopy__(self, memo: Any) -> "Hparams":
        return self.copy()

    def copy(self) -> "Hparams":
        """Return a copy that shares no list, dict or dataclass with these."""
        return Hparams({name: _copied(x) for name, x in self.items()}, self._arguments, self._left_out)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"hparams has no {name!r}, and has {list(self)}. Constructor arguments that can be saved are kept."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def saved(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the constructor's arguments as a checkpoint keeps them, and what was added; secrets are not kept."""
        arguments: dict = dict.fromkeys(sorted(self._arguments - {"rngs", *self}), DEFAULT)
        arguments |= {name: not_kept(text) for name, text in self._left_out.items()}
        added = {}
        for name, value in self.items():
            try:
                encoded, secrets = encode(value), []
                hide({name: readable(value)}, secrets)
                print_left_out(secrets)
                if secrets:
                    raise NotKeptError(PLACEHOLDER)
                (arguments if name in self._arguments else added)[name] = encoded
            except NotKeptError as error:
                if name in self._arguments:
                    arguments[name] = not_kept(str(error))
        return arguments, added

    def readable(self) -> dict[str, Any]:
        """Return all as JSON for loggers, those that are not kept as their text."""
        left_out = {name: text for name, text in self._left_out.items() if text != _CHOSEN}
        return left_out | {name: readable(value) for name, value in self.items()}


def hparams_of(owner: Any) -> Hparams:
    """Return the hyperparameters of a module or DataModule without touching it."""
    held = object.__getattribute__(owner, "__dict__")
    return held["_jaxlit_hparams"] if "_jaxlit_hparams" in held else held.setdefault("_jaxlit_hparams", Hparams())


def _set_hparams(owner: Any, hparams: Hparams) -> None:
    """Give a module, which nnx makes of the attributes of another, hyperparameters of its own."""
    object.__getattribute__(owner, "__dict__")["_jaxlit_hparams"] = hparams.copy()


class KeepsHparams:
    """The base of modules and DataModules, which keep their constructors' arguments."""

    _jaxlit_hparams = property(hparams_of, _set_hparams)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            # No assignment: type checkers would take it for the signature of every module.
            setattr(cls, "__init__", _recorded(cls, vars(cls)["__init__"]))  # noqa: B010

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keep those of the constructor's arguments that can be saved as hyperparameters."""
        owner = super().__new__(cls)
        arguments = _named(cls.__mro__, owner, args, kwargs, defaults=True)
        unsaved = {name: text for name, x in arguments.items() if (text := _not_kept(x)) is not None}
        left_out = {name: text for name, text in unsaved.items() if _is_asked_for(owner, name, arguments[name])}
        # Copies: the constructor, and later code, may change a list or a config that it was given.
        _set_hparams(owner, Hparams({k: x for k, x in arguments.items() if k not in unsaved}, arguments, left_out))
        return owner

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, arguments, *rest = super().__reduce_ex__(protocol)
        if rest and isinstance(rest[0], dict) and "_jaxlit_hparams" in rest[0]:  # `copy.copy` would share them
            rest[0] = rest[0] | {"_jaxlit_hparams": hparams_of(self).copy()}
        return made, arguments, *rest

    @property
    def hparams(self) -> Hparams:
        """The constructor's arguments that a checkpoint can keep: a dict, whose keys are attributes as well."""
        return hparams_of(self)

    @hparams.setter
    def hparams(self, values: Mapping[str, Any]) -> None:
        values = dict(_mapping(f"{type(self).__name__}.hparams takes a dict", values))
        old = hparams_of(self)
        gone = [k for k in old if k not in values and k in old._arguments and _is_asked_for(self, k, old[k])]
        old._left_out.update(dict.fromkeys(gone, _CHOSEN))
        old.clear()
        old.update({name: _copied(x) for name, x in values.items()})

    @takes_only_its_arguments("self.save_hyperparameters")
    def save_hyperparameters(self, *args: Any, ignore: str | Sequence[str] = ()) -> None:
        """Choose which constructor arguments are hyperparameters; without a call all that can be saved are.

        Called in the constructor of a base class, it adds the arguments of that constructor.

        Args:
            *args: Names of those that are, or dicts of more.
            ignore: Names of those that are not.

        Raises:
            ArgumentError: The constructor has no argument of a name.
            ArgumentTypeError: There is no such argument.
        """
        ignore = (ignore,) if isinstance(ignore, str) else tuple(ignore or ())
        called, names = f"{type(self).__name__}.save_hyperparameters", [x for x in args if isinstance(x, str)]
        running = hparams_of(self)._running
        values = {**running, **hparams_of(self)}
        known = {*inspect.signature(type(self).__init__).parameters, *values}
        if unknown := [x for x in (*names, *ignore) if x not in known]:
            raise ArgumentError(f"{called} names {unknown[0]!r}, which is no argument of the constructor.")
        # Names choose among the arguments of the constructor that runs, not of those around it.
        chosen = {*names} | (values.keys() - running.keys() if running else set()) if names else values.keys()
        hparams = {k: v for k, v in values.items() if k in chosen and k not in ignore}
        for more in args:
            if not isinstance(more, str):
                more = _mapping(f"{called} takes names of the constructor's arguments, and dicts", more)
                hparams |= {k: v if k in hparams_of(self)._arguments else _plain(v) for k, v in more.items()}
        self.hparams = {k: v for k, v in hparams.items() if _not_kept(v) is None}


def _not_kept(value: Any) -> str | None:
    """Return how a value is shown that a checkpoint cannot keep; None for one that it can."""
    try:
        encode(value)
    except NotKeptError as error:
        return str(error)
    return None


def _copied(value: Any) -> Any:
    """Return a value with copies of the lists, dicts and dataclasses in it that a checkpoint keeps."""
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if type(value) is dict:
        return {key: _copied(x) for key, x in value.items()}
    if is_omegaconf(value):
        return copy.deepcopy(value)
    if not is_dataclass(value) or isinstance(value, (type, Enum)) or _not_kept(value) is not None:
        return value
    return replace(value, **{field.name: _copied(getattr(value, field.name)) for field in fields(value) if field.init})


def _mapping(rule: str, values: Any) -> Mapping[str, Any]:
    """Return a mapping, or the attributes of what `argparse` has parsed."""
    values = vars(values) if isinstance(values, argparse.Namespace) else values
    if not isinstance(values, Mapping):
        raise ArgumentTypeError(f"{rule}, got {shown(values)}.")
    return values


def _plain(value: Any) -> Any:
    """Return a value with dicts and lists in place of other mappings and sequences, as OmegaConf has them."""
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    return [_plain(x) for x in value] if isinstance(value, MutableSequence) else value


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Return the parameters of a constructor that have names, without `self` and `rngs`, which need not be given."""
    _, *parameters = inspect.signature(cls.__init__).parameters.values()  # type: ignore[misc]
    return {p.name: p for p in parameters if p.name != "rngs" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _is_asked_for(owner: Any, name: str, value: Any) -> bool:
    """Return whether an argument that is not kept must be given again: it is not its default, nor random keys."""
    parameter = _parameters(type(owner)).get(name)
    if name == "rngs" or (parameter is not None and value is parameter.default):
        return False
    try:
        # An array is not compared: it may be large.
        return parameter is None or bool(getattr(value, "shape", ())) or bool(value != parameter.default)
    except Exception:  # of the value's own comparison
        return True


def _recorded(cls: type, init: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor whose arguments `save_hyperparameters` sees while it runs."""

    @functools.wraps(init)
    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        hparams = hparams_of(self)
        outer, running = hparams._running, _named(cls.__mro__, self, args, kwargs, defaults=True)
        object.__setattr__(hparams, "_running", {name: _copied(x) for name, x in running.items()})
        try:
            init(self, *args, **kwargs)
        finally:
            object.__setattr__(hparams, "_running", outer)

    return run


def _named(
    classes: Iterable[type], owner: Any, args: tuple, kwargs: dict[str, Any], *, defaults: bool
) -> dict[str, Any]:
    """Return a constructor's arguments by name; what it hands on as `*args, **kwargs` has the names of its base."""
    cls, *bases = [cls for cls in classes if hasattr(vars(cls).get("__init__"), "__code__")] or [type(owner)]
    parameters = inspect.signature(cls.__init__).parameters.values()
    try:
        # In part: jl.lazy leaves out rngs.
        bound = inspect.signature(cls.__init__).bind_partial(owner, *args, **kwargs)
    except TypeError:
        return {}  # the constructor itself will raise
    if defaults:
        bound.apply_defaults()
    arguments, kinds = dict(list(bound.arguments.items())[1:]), {p.kind: p.name for p in parameters}
    varargs = kinds.get(inspect.Parameter.VAR_POSITIONAL, "")
    varkwargs = kinds.get(inspect.Parameter.VAR_KEYWORD, "")
    named, rest = arguments.pop(varkwargs, {}), arguments.get(varargs, ())
    if varargs and varkwargs and bases:
        handed_on = _named(bases, owner, rest, named, defaults=False)
        if len(handed_on) == len(rest) + len(named):
            arguments.pop(varargs, None)
            named = handed_on
    return arguments | named


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
        """Return what the `__call__` of the next base class does, or `forward`, where a module defines that."""
        try:
            call: Any = super().__call__  # type: ignore[misc]
        except AttributeError:
            call = getattr(self, "forward", None)
        if call is None:
            raise TypeError(f"{type(self).__name__} is not callable. Define __call__(self, ...), or forward.")
        return call(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # What the compiled steps read from the module is frozen: an attribute set during a run would be ignored.
        if watchers and (watcher := watchers.get(id(self))) is not None:
            watcher.refuse_attribute(name)
        super().__setattr__(name, value)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a batch: a scalar, or a dict with "loss" and other outputs.

        A loss that is a mean over something else than rows, such as the words that are no padding, has its weight next
        to it: `{"loss": loss, "total_weight": mask.sum()}`. By it count the batches of an accumulation window, the
        microbatches of a pipeline, replicas, and the batches of an epoch, for this loss and where it is logged.

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
        on_step: bool | Literal["mean"] | None = None,
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
            on_step: Log the value of every `log_every_n_steps`-th step, or in `training_step` "mean" for the mean of
                the steps since the last row. Default: in `training_step` and training batch hooks. In
                validation and test it shows in `trainer.logged_metrics` and makes no row.
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
    def loggers(self) -> list:
        """The Trainer's loggers."""
        return self.trainer.loggers


def is_overridden(module: TrainModule, method: str) -> bool:
    """Return whether the module's class defines a method of `TrainModule` itself."""
    return getattr(type(module), method) is not getattr(TrainModule, method)


def call_step(module: TrainModule, stage: str, loader: int | None = None) -> Callable[[Any, jax.Array], Any]:
    """Return the stage's step as a function of (batch, batch_idx), whichever of them it takes.

    A step that takes a `dataloader_idx` gets `loader`.

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


def log_taken(caller: str, checkpoint: Checkpoint, skipped: Iterable[str]) -> None:
    """Log which checkpoint is taken, and why newer ones are not."""
    for reason in skipped:
        _logger.warning("A newer checkpoint was skipped. %s", reason)
    if jax.process_index() == 0:
        state = checkpoint.state
        say(f"{caller}: {short_path(checkpoint.path)} (step {state['global_step']}, epoch {state['epoch']})")


def load_module(cls: type, path: Any, overrides: dict[str, Any], *, strict: bool = True) -> Any:
    """Build a module from a checkpoint; see `TrainModule.load_from_checkpoint`."""
    parameters, texts = inspect.signature(cls.__init__).parameters, advice("load_from_checkpoint()")
    if foreign := next((name for name in overrides if name in texts and name not in parameters), None):
        raise ArgumentTypeError(f"{cls.__name__}.load_from_checkpoint has no argument {foreign!r}. {texts[foreign]}")
    checkpoint, skipped = locate(path, f"{cls.__name__}.load_from_checkpoint")
    if place_of(path) != checkpoint.path:
        log_taken("load_from_checkpoint", checkpoint, skipped)
    recorded = checkpoint.state["module"]["hparams"]
    arguments, missing = dict(overrides), {}
    for name, value in recorded.items():
        if value != DEFAULT and name not in overrides:
            try:
                arguments[name] = decode(value, cls)
            except NotKeptError as error:
                missing[name] = str(error)
    if missing:
        shown_missing = ", ".join(f"{name}={text}" for name, text in missing.items())
        raise CheckpointError(
            f"{cls.__name__} was built with {shown_missing}: pass {'=..., '.join(missing)}=... to "
            f"load_from_checkpoint. {checkpoint.path} keeps values, and functions and classes that can be found by "
            "name."
        )
    if "rngs" in parameters and "rngs" not in arguments:
        arguments["rngs"] = nnx.Rngs(0)  # what it draws is overwritten
    args: list = []
    varargs = next((name for name, p in parameters.items() if p.kind is p.VAR_POSITIONAL), None)
    if varargs in arguments and (rest := arguments.pop(varargs)):  # with all before it by position
        before = list(parameters.values())[1 : list(parameters).index(varargs)]
        args = [*(arguments.pop(p.name, p.default) for p in before), *rest]
    try:
        module = cls(*args, **arguments)
    except TypeError as error:
        raise CheckpointError(
            f"{cls.__name__} cannot be built from {sorted(arguments)}: {error}. Load {checkpoint.path} with the class "
            "that it was made with, and pass what is missing to load_from_checkpoint."
        ) from error
    for name, value in (checkpoint.state.get("added_hparams") or {}).items():
        with contextlib.suppress(NotKeptError):
            module.hparams[name] = decode(value, cls)
    load_variables(module, checkpoint, strict=strict)
    return module
