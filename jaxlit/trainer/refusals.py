"""What a run is refused for, before anything is compiled, and what it is warned of."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from jaxlit import checks as check
from jaxlit.callbacks.base import Callback
from jaxlit.checkpoints.files import Checkpoint, Resume, fitting
from jaxlit.core.module import STAGES, Stage, TrainModule, hparams_of, is_overridden
from jaxlit.core.pure_module import is_in_eval_mode
from jaxlit.data.source import Source
from jaxlit.data.watchdog import Watchdog
from jaxlit.distributed.job import environment, same_job
from jaxlit.distributed.team import team
from jaxlit.engine.creation import lazy
from jaxlit.engine.engine import Engine
from jaxlit.errors import ArgumentError, ArgumentTypeError, CheckpointError, ModuleError
from jaxlit.loop import snapshot
from jaxlit.loop.dispatch import check_size
from jaxlit.loop.run_data import RunData
from jaxlit.loop.settings import Arguments, Settings
from jaxlit.reporting.secrets import hide
from jaxlit.reporting.terminal import say
from jaxlit.texts import shown, stable_text

_logger = logging.getLogger("jaxlit")

_LOOKED_AT = 1000  # epochs whose windows are looked at before a fit, which may have no last epoch
MAY_DIFFER = ("callbacks", "logger", "enable_progress_bar", "enable_model_summary")  # what a process prints and writes
MAY_DIFFER += ("compile_cache", "prefetch", "max_in_flight", "data_timeout", "hang_timeout", "fail_timeout")
"""The Trainer's arguments that processes of one training may have otherwise, as well as every path. Of callbacks it is
compared whether one logs, and what those have that change the step, end training or write checkpoints."""


class Request(NamedTuple):
    """What a verb of the Trainer was called with; see `Trainer.fit`."""

    stage: Stage
    model: Any
    loaders: Mapping[str, tuple[Any, str]]  # by stage, what was passed and the argument's name
    datamodule: Any
    ckpt_path: Any
    init_from: Any = None
    strict: bool = True
    reset_optimizer: bool = False


def check_fit(settings: Settings, callbacks: Sequence[Callback], request: Request) -> None:
    """Refuse a fit that has no end, has arguments for a checkpoint but no checkpoint, or names two."""
    # First: what is refused in one process only would leave the others waiting.
    check_job("fit", settings, request.model, callbacks)
    check.boolean("strict", request.strict)
    check.boolean("reset_optimizer", request.reset_optimizer)
    if request.init_from is not None and (request.ckpt_path is not None or settings.resume not in (None, "auto")):
        raise ArgumentError(
            f"Trainer.fit(init_from={str(request.init_from)!r}) begins a new training with the weights of a "
            "checkpoint, and ckpt_path= and Trainer(resume=path) continue an old one. Leave one out, or use "
            "resume='auto'."
        )
    if request.ckpt_path is None and settings.resume is None and (request.reset_optimizer or not request.strict):
        raise ArgumentError(
            "Trainer.fit(strict=False) and reset_optimizer=True apply to ckpt_path= and resume=, and neither was "
            "given. Pass ckpt_path=..., or Trainer(resume=...); init_from=... loads what fits, with a new optimizer."
        )
    if not (settings.has_limit or any(c.limits_time for c in callbacks)):
        raise ArgumentError(
            "Trainer.fit has no limit. Pass Trainer(max_epochs=...), Trainer(max_steps=...), Trainer(max_time=...) or "
            "a jl.callbacks.Timer(...), or set limits_time = True in a callback that ends training."
        )


def check_job(method: str, settings: Settings, model: Any, callbacks: Sequence[Callback] = ()) -> None:
    """Refuse in every process a run that was given something else in one of them."""
    same_job(f"Trainer.{method}", partial(_items, settings, model, callbacks))


def check_model(model: Any, stage: Stage) -> None:
    """Refuse a model that is not a module, or has no step for the stage."""
    if not isinstance(model, (TrainModule, lazy)):
        hint = " Pass an instance, or jl.lazy(cls, ...)." if isinstance(model, type) else ""
        if isinstance(model, nnx.Module):
            hint = " Subclass jl.TrainModule in place of nnx.Module, and define training_step."
        raise ArgumentTypeError(f"Trainer takes a jaxlit.TrainModule as model, got {shown(model)}.{hint}")
    cls = model.cls if isinstance(model, lazy) else type(model)
    if cls is TrainModule and isinstance(model, lazy):
        return  # what a function makes is looked at when it is made
    if getattr(cls, stage.step) is getattr(TrainModule, stage.step):
        raise ModuleError(f"{cls.__name__} has no {stage.step}. Define {stage.step}(self, batch).")


def check_fitting(settings: Settings, module: TrainModule, resume: Resume | None, request: Request) -> None:
    """Refuse a checkpoint that has seen more than is asked for, and validation data that no step takes."""
    if resume is not None:
        checkpoint = resume.checkpoint
        seen = checkpoint.state["epoch"]
        if settings.max_epochs is not None and seen > settings.max_epochs:
            raise ArgumentError(
                f"Trainer(max_epochs={settings.max_epochs}) is less than the {seen} epochs of "
                f"{checkpoint.path}. Raise max_epochs, or begin a new training with its weights: fit(init_from=path)."
            )
        warn_of_bad_step(checkpoint, settings.nan_policy)
    step = STAGES["validation"].step
    if request.loaders["validation"][0] is not None and not is_overridden(module, step):
        raise ModuleError(
            f"{type(module).__name__} has no {step}, and Trainer.fit got val_dataloaders. Define {step}(self, batch), "
            "or leave val_dataloaders out."
        )


def check_windows(settings: Settings, callbacks: Sequence[Callback], first_epoch: int) -> None:
    """Refuse dispatches that would cut an optimizer step in this epoch or in a later one."""
    check_size(settings.steps_per_execution, settings.accumulate_grad_batches)
    for callback in callbacks:
        for epoch in range(_LOOKED_AT)[first_epoch : settings.max_epochs]:
            whose = f"{type(callback).__name__} in epoch {epoch}"
            check_size(settings.steps_per_execution, callback.batches_per_step(epoch) or 1, whose)


def check_end(settings: Settings, callbacks: Sequence[Callback], source: Source, limit: int | None) -> None:
    """Refuse a fit on a loader without end that nothing else ends."""
    timed = settings.max_time is not None or any(c.limits_time for c in callbacks)
    if limit is None and settings.max_steps < 0 and not timed and source.is_endless:
        raise ArgumentError(
            f"{source.argument} is a loader without end, and there is no limit. Pass Trainer(max_steps=...), "
            "Trainer(max_time=...), Trainer(limit_train_batches=...) or a jl.callbacks.Timer(...)."
        )


def check_reload(settings: Settings, data: RunData) -> None:
    """Refuse to make loaders again that no hook makes."""
    every = settings.reload_dataloaders_every_n_epochs
    if every and not any(map(data.loaders.from_hook, ("training", "validation"))):
        raise ArgumentError(
            f"Trainer(reload_dataloaders_every_n_epochs={every}) with loaders as arguments has nothing to reload. "
            "Pass a datamodule, or define train_dataloader in the module."
        )


def check_first_batches(settings: Settings, data: RunData, watchdog: Watchdog) -> None:
    """Refuse what no step could take before anything is compiled."""
    for pair in (*data.train, *data.val):
        data.loaders.check_first(*pair, watchdog, required=pair in data.train)
    for source, _ in data.val if data.train else ():
        if source.is_grain and not settings.num_sanity_val_steps:
            source.close()  # its threads and processes would wait until the first validation


def check_window(checkpoint: Checkpoint, argument: int, settings: Settings) -> None:
    """Refuse another `accumulate_grad_batches` in the middle of a window, unless a hook had set that of the window."""
    with fitting(checkpoint.path):
        was, filled = checkpoint.state["accumulate"], checkpoint.state["position"]["filled"]
        accumulate = settings.accumulate_grad_batches
        keeps = snapshot.keeps_accumulation(argument, settings, checkpoint.state)
    if filled and accumulate != was and not keeps:
        raise CheckpointError(
            f"{checkpoint.path} has {filled} of {was} batches in its accumulation window, and the Trainer has "
            f"accumulate_grad_batches={accumulate}. Resume with {was}, or from a checkpoint of an epoch's end."
        )


def check_accumulation(engine: Engine | None, settings: Settings) -> None:
    """Refuse to set windows of several batches in a fit whose state has no room for one."""
    every = settings.accumulate_grad_batches
    if every > 1 and engine is not None and not engine.evaluates_only and engine.state.spec.index.window is None:
        raise ArgumentError(
            f"Trainer.accumulate_grad_batches is set to {every} in a fit that began with 1, whose state has no place "
            f"for the gradients of a window. Begin with Trainer(accumulate_grad_batches={every}), and set 1 for the "
            "epochs that should have none, or pass a GradientAccumulationScheduler."
        )


def check_predictions(settings: Settings, return_predictions: bool) -> None:
    """Refuse to return predictions that would mix host keys of one process with rows of all."""
    if check.boolean("return_predictions", return_predictions) and settings.host_keys and team().size > 1:
        raise ArgumentError(
            f"Trainer(host_keys={settings.host_keys}): in several processes predictions are of all rows, and host keys "
            "of this process's. Pass return_predictions=False and write them in on_predict_batch_end."
        )


def warn_of_eval_mode(module: TrainModule) -> None:
    """Warn of a module that a fit would train in evaluation mode."""
    if is_in_eval_mode(module):
        _logger.warning(
            "%s is entirely in evaluation mode, and stays so in training: dropout drops nothing, statistics are "
            "not updated. Call module.train() before fit, and eval() on the parts that are frozen.",
            type(module).__name__,
        )


def warn_of_bad_step(checkpoint: Checkpoint, nan_policy: str) -> None:
    """Print that a checkpoint was written before a step that was not finite, and what happens now."""
    if (bad := checkpoint.state.get("not_finite")) is None or jax.process_index():
        return
    first, end = bad["batches"]
    changed = f" {len(bad['optimizer'])} arrays of the optimizer's state have taken it, see state.json."
    say(
        f"resume: step {bad['step']} (epoch {bad['epoch']}, batches {first} to {end - 1}) was not finite: now it runs "
        f"under nan_policy={nan_policy!r}.{changed * bool(bad['optimizer'])}"
    )


def _items(settings: Settings, model: Any, callbacks: Sequence[Callback]) -> dict[str, str]:
    items = environment()
    for name in Arguments.__annotations__:
        if name not in MAY_DIFFER:
            value = getattr(settings, name)
            is_path = name in ("default_root_dir", "resume") and value not in (None, "auto")
            items[f"Trainer({name}=)"] = "a path" if is_path else _text(value)
    items["Trainer(logger=)"] = "some" if any(c.is_logger for c in callbacks) else "none"
    ends = ("checkpoint", "early_stopping")
    matter = [c for c in callbacks if c.changes_step or c.limits_time or c.frozen_part is not None or c.role in ends]
    # A checkpoint's folder is a path.
    texts = [type(c).__name__ if c.role == "checkpoint" else _text(c) for c in matter]
    items["Trainer(callbacks=)"] = ", ".join(texts)
    if isinstance(model, lazy):
        cls: Any = model.make
        arguments = dict(zip(model.parameters, model.args, strict=False)) | model.kwargs
    else:  # what is no module is refused by its type later
        cls = type(model)
        arguments = hparams_of(model).readable() if isinstance(model, TrainModule) else {}
    name_of_class = getattr(cls, "__qualname__", type(cls).__name__)
    items["the module's class"] = name_of_class
    for name, value in hide(arguments, []).items():
        items[f"{name_of_class.rpartition('.')[2]}({name}=)"] = _text(value)
    return items


def _text(value: Any) -> str:
    is_path = isinstance(value, Path) or (isinstance(value, str) and Path(value).is_absolute())
    return "a path" if is_path else stable_text(value)
