"""What a run of W&B contains about a training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax
import jax
import optax
from flax import nnx

from jaxlit.reporting.secrets import redacted
from jaxlit.version import __version__

if TYPE_CHECKING:
    from jaxlit.callbacks.base import Callback
    from jaxlit.callbacks.model_checkpoint import ModelCheckpoint
    from jaxlit.callbacks.wandb_logger import WandbLogger
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


def config_of(trainer: "Trainer", module: "TrainModule", extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config without secrets: what is trained, how, where and by which versions.

    Args:
        trainer: The trainer.
        module: The module, whose hyperparameters it contains.
        extra: Other values of the user.
    """
    strategy = trainer.strategy
    count, kind = strategy.mesh.size, jax.devices()[0].device_kind
    ours = {
        "trainer": trainer.config,
        "strategy": strategy.describe().split("\n")[0],
        "mesh": {str(axis): size for axis, size in strategy.mesh.shape.items()},
        "devices": {"kind": kind, "count": count, "processes": jax.process_count()},
        "versions": {"jaxlit": __version__, **{lib.__name__: lib.__version__ for lib in (jax, flax, optax)}},
        "num_params": sum(x.size for x in jax.tree.leaves(nnx.state(module, nnx.Param))),
    }
    # A name that the user has taken stays the user's.
    data = trainer.datamodule
    theirs = {**({} if data is None else data.hparams.readable()), **module.hparams.readable(), **extra}
    return redacted({**{f"jaxlit/{k}" if k in theirs else k: v for k, v in ours.items()}, **theirs})


def run_arguments(
    logger: "WandbLogger", trainer: "Trainer", module: "TrainModule", folder: Path
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the arguments of `wandb.init` and those of `wandb.Settings`.

    Args:
        logger: The logger, whose id is known.
        trainer: The trainer.
        module: The module.
        folder: The folder in which W&B writes its files.
    """
    names = ("project", "entity", "name", "id", "group", "job_type", "tags", "notes")
    arguments = {name: getattr(logger, name) for name in names}
    arguments |= {"dir": str(folder), "config": config_of(trainer, module, logger.config)}
    if logger.processes == "group" and jax.process_count() > 1:
        rank = jax.process_index()
        arguments |= {"group": logger.group or logger.id, "job_type": logger.job_type or f"process_{rank}"}
        arguments |= {"id": f"{logger.id}-{rank}"} if rank else {}
    return arguments, {"init_timeout": logger.init_timeout, "finish_timeout": logger.finish_timeout}


def described(
    callback: "Callback", path: Path, checkpoint_callbacks: Sequence["ModelCheckpoint"]
) -> tuple[dict[str, Any], list[str], int]:
    """Return the metadata, the aliases and the number of the artifact for a checkpoint.

    Args:
        callback: The callback that wrote it; of one that is no ModelCheckpoint nothing but the name is known.
        path: The checkpoint.
        checkpoint_callbacks: The Trainer's, each of which has its own best one.
    """
    for i, writer in enumerate(checkpoint_callbacks):
        if writer is callback:
            marks = {"latest": writer.last_model_path, "best": writer.best_model_path}
            aliases = [*(mark for mark, at in marks.items() if at == str(path)), path.name]
            return {"monitor": writer.monitor, "score": writer.best_k_models.get(str(path))}, aliases, i
    return {"writer": type(callback).__name__}, ["latest", path.name], len(checkpoint_callbacks)
