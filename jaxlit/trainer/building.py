"""From what a user passes as model and data to a module and loaders that a run can begin with."""

from collections.abc import Mapping, Sequence
from typing import Any

from flax import nnx

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import Checkpoint
from jaxlit.core.module import TrainModule, call_step, is_overridden
from jaxlit.core.stage import STAGES, Stage
from jaxlit.data.loaders import Loaders
from jaxlit.distributed.team import team
from jaxlit.engine.creation import check_variables
from jaxlit.engine.engine import Engine
from jaxlit.engine.lazy import build_lazy, lazy
from jaxlit.errors import ArgumentError, ArgumentTypeError, ModuleError
from jaxlit.loop.settings import Settings
from jaxlit.shown import shown
from jaxlit.strategies.base import Strategy
from jaxlit.to_json import to_json
from jaxlit.trainer.choose import Start
from jaxlit.trainer.defaults import Given
from jaxlit.trainer.job import check_job


def config_of(given: Mapping[str, Any], callbacks: Given) -> dict[str, Any]:
    """Return the Trainer's arguments as JSON values: an object as its text, a callback as the name of its class."""
    loggers = [c for c in callbacks.callbacks if c.is_logger or c in callbacks.loggers]
    lists = {"callbacks": callbacks.callbacks, "logger": loggers}
    named = {name: [type(c).__name__ for c in several] for name, several in lists.items()}
    return to_json({**given, **named}, lenient=True)


def make_loaders(settings: Settings, stage: Stage, given: Mapping[str, Any], datamodule: Any) -> Loaders:
    """Return the loaders of a run.

    Args:
        settings: The Trainer's arguments.
        stage: What runs.
        given: By stage, what was passed to the method and the argument's name.
        datamodule: The DataModule, if one was passed.
    """
    validator = {name: getattr(settings, name) for name in ("host_keys", "max_recompiles", "debug")}
    overfit = stage.method == "fit" and bool(settings.overfit_batches)
    return Loaders(stage.method, given, datamodule, settings.limits, validator=validator, overfit=overfit)


def check_model(model: Any, stage: Stage) -> None:
    """Refuse a model that is not a module, or has no step for the stage.

    Raises:
        ArgumentTypeError: The model is not a module.
        ModuleError: The module has no such step.
    """
    if not isinstance(model, (TrainModule, lazy)):
        hint = " Pass an instance, or jl.lazy(cls, ...)." if isinstance(model, type) else ""
        if isinstance(model, nnx.Module):
            hint = " Subclass jl.TrainModule in place of nnx.Module, and define training_step."
        raise ArgumentTypeError(f"Trainer takes a jaxlit.TrainModule as model, got {shown(model)}.{hint}")
    cls = model.cls if isinstance(model, lazy) else type(model)
    if getattr(cls, stage.step) is getattr(TrainModule, stage.step):
        raise ModuleError(f"{cls.__name__} has no {stage.step}. Define {stage.step}(self, batch).")


def build(model: TrainModule | lazy, stage: Stage, loaders: Loaders, strategy: Strategy, settings: Settings) -> Any:
    """Return the module: a lazy one is built straight into its shards, once its data were looked at."""
    if isinstance(model, lazy):
        loaders.check_before_building(
            model.cls, (settings.data_timeout, settings.hang_timeout)
        )  # building it may take minutes
        model = build_lazy(model, strategy, settings.seed)
    else:
        call_step(model, stage.name)
        check_variables(model)
    return model


def check_fit(settings: Settings, callbacks: Sequence[Callback], model: Any, start: Start) -> None:
    """Refuse a fit that has no end, has arguments for a checkpoint but no checkpoint, or names two.

    Raises:
        ArgumentError: Saying which.
        ProcessError: Something else was given in another process.
    """
    # First: what is refused in one process only would leave the others waiting.
    check_job("fit", settings, model, callbacks)
    check.boolean("strict", start.strict)
    check.boolean("reset_optimizer", start.reset_optimizer)
    if start.init_from is not None and (start.ckpt_path is not None or settings.resume not in (None, "auto")):
        raise ArgumentError(
            f"Trainer.fit(init_from={str(start.init_from)!r}) begins a new training with the weights of a checkpoint, "
            "and ckpt_path= and Trainer(resume=path) continue an old one. Leave one out, or use resume='auto'."
        )
    if start.ckpt_path is None and settings.resume is None and (start.reset_optimizer or not start.strict):
        raise ArgumentError(
            "Trainer.fit(strict=False) and reset_optimizer=True apply to ckpt_path= and resume=, and neither was "
            "given. Pass ckpt_path=..., or Trainer(resume=...); init_from=... loads what fits, with a new optimizer."
        )
    if not (settings.has_limit or any(c.limits_time for c in callbacks)):
        raise ArgumentError(
            "Trainer.fit has no limit. Pass Trainer(max_epochs=...), Trainer(max_steps=...), Trainer(max_time=...) or "
            "a jl.callbacks.Timer(...), or set limits_time = True in a callback that ends training."
        )


def check_fitting(settings: Settings, module: TrainModule, checkpoint: Checkpoint | None, val_dataloaders: Any) -> None:
    """Refuse a checkpoint that has seen more than is asked for, and validation data that no step takes.

    Raises:
        ArgumentError: The checkpoint has seen more epochs.
        ModuleError: There is no validation step.
    """
    seen = 0 if checkpoint is None else checkpoint.state["epoch"]
    if checkpoint is not None and settings.max_epochs is not None and seen > settings.max_epochs:
        raise ArgumentError(
            f"Trainer(max_epochs={settings.max_epochs}) is less than the {seen} epochs of "
            f"{checkpoint.path}. Raise max_epochs, or begin a new training with its weights: fit(init_from=path)."
        )
    step = STAGES["validation"].step
    if val_dataloaders is not None and not is_overridden(module, step):
        raise ModuleError(
            f"{type(module).__name__} has no {step}, and Trainer.fit got val_dataloaders. Define {step}(self, batch), "
            "or leave val_dataloaders out."
        )


def check_accumulation(engine: Engine | None, settings: Settings) -> None:
    """Refuse to set windows of several batches in a fit whose state has no room for one.

    Raises:
        ArgumentError: Saying what to begin with.
    """
    every = settings.accumulate_grad_batches
    if every > 1 and engine is not None and not engine.evaluates_only and engine.state.spec.index.window is None:
        raise ArgumentError(
            f"Trainer.accumulate_grad_batches is set to {every} in a fit that began with 1, whose state has no place "
            f"for the gradients of a window. Begin with Trainer(accumulate_grad_batches={every}), and set 1 for the "
            "epochs that should have none, or pass a GradientAccumulationScheduler."
        )


def check_predictions(settings: Settings, strategy: Strategy, return_predictions: bool) -> None:
    """Refuse to return predictions that would mix rows of one process with rows of all.

    Raises:
        ArgumentError: Several processes predict, and host keys would go into what is returned.
    """
    if check.boolean("return_predictions", return_predictions) and settings.host_keys and team().size > 1:
        raise ArgumentError(
            f"Trainer(host_keys={settings.host_keys}): in several processes predictions are of all rows, and host keys "
            "of this process's. Pass return_predictions=False and write them in on_predict_batch_end."
        )
