"""A second Trainer, whose steps compute what those of a user's Trainer will."""

import operator
from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxlit.callbacks.base import Callback
from jaxlit.core.hparams import share_hparams
from jaxlit.core.module import TrainModule
from jaxlit.engine.lazy import lazy
from jaxlit.trainer.defaults import without
from jaxlit.trainer.properties import TrainerProperties

# The arguments that decide what a step computes.
_SAME = ("strategy", "devices", "mesh", "precision", "limit_train_batches", "overfit_batches", "seed", "prefetch")
_SAME += ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "host_keys", "max_recompiles")
_SAME += ("data_timeout", "hang_timeout", "max_in_flight", "compile_cache", "debug")
_SILENT = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")


def trial_of(
    trainer: Any,
    *callbacks: Callback,
    takes: Callable[[Callback], bool] = operator.attrgetter("changes_step"),
    **arguments: Any,
) -> Any:
    """Return a Trainer that takes the steps of another one, without loggers, files and validation.

    Args:
        trainer: The other one.
        *callbacks: Callbacks of the trial.
        takes: Which callbacks of the other one, and of the module, take part.
        **arguments: Arguments in place of those of the other one.
    """
    settings = {key: getattr(trainer.settings, key) for key in _SAME} | dict.fromkeys(_SILENT, False)
    settings |= {"limit_val_batches": 0, "log_every_n_steps": 0} | arguments
    of_trainer = filter(takes, without(trainer.callbacks, trainer._session.added))
    # A subclass of the user's may take other arguments.
    plain = next(cls for cls in type(trainer).__mro__ if TrainerProperties in cls.__bases__)
    trial = plain(**settings, callbacks=[*of_trainer, *callbacks])
    trial._session.takes = takes  # of the callbacks that the module adds
    return trial


def copied(model: TrainModule | lazy) -> TrainModule | lazy:
    """Return a copy of a module for a trial to train; a lazy one, which is built each time, as it is."""
    if isinstance(model, lazy):
        return model
    copy = nnx.clone(model)
    share_hparams(copy, model)
    return copy
