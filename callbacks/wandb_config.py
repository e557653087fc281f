"""What a WandbLogger is given, and what its run is told about a training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax
import jax
import optax
from flax import nnx

from jaxlit.checks import require
from jaxlit.errors import ArgumentError
from jaxlit.reporting.secrets import redacted
from jaxlit.version import __version__

if TYPE_CHECKING:
    from jaxlit.callbacks.base import Callback
    from jaxlit.callbacks.model_checkpoint import ModelCheckpoint
    from jaxlit.callbacks.wandb_logger import WandbLogger
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


def check_arguments(given: Mapping[str, Any]) -> None:
    """Refuse a WandbLogger's arguments that are out of their sets.

    Args:
        given: The arguments by name.

    Raises:
        ArgumentError: Naming the argument.
    """

    def check(name: str, allowed: bool, rule: str) -> None:
        require(allowed, name, given[name], f"takes {rule}", owner="WandbLogger")

    for name in ("project", "name", "id", "entity", "group", "job_type", "notes"):
        text = given[name]
        check(name, text is None or (isinstance(text, str) and text != ""), "a string that is not empty, or None")
    check("id", not set(given["id"] or "") & set("/\\#?%:"), "an id without any of / \\ # ? % :")
    tags = given["tags"]
    valid = isinstance(tags, (list, tuple)) and all(isinstance(x, str) and 0 < len(x) <= 64 for x in tags)
    check("tags", valid, "a list of strings of 1 to 64 characters")
    check("config", given["config"] is None or isinstance(given["config"], Mapping), "a mapping or None")
    check("save_dir", given["save_dir"] is None or isinstance(given["save_dir"], (str, Path)), "a path or None")
    check("offline", isinstance(given["offline"], bool), "True or False")
    for name, allowed in (
        ("log_model", (False, True, "all", "best")),
        ("watch", (None, "gradients", "parameters", "all")),
        ("processes", ("first", "group", "shared")),
        ("on_error", ("warn", "raise")),
    ):
        check(name, any(type(given[name]) is type(x) and given[name] == x for x in allowed), f"one of {allowed}")
    every = given["watch_every_n_steps"]
    check("watch_every_n_steps", type(every) is int and every > 0, "an int of at least 1")
    for name in ("init_timeout", "finish_timeout"):
        number = isinstance(given[name], (int, float)) and not isinstance(given[name], bool)
        check(name, number and 0 < given[name] < float("inf"), "seconds, a number above 0")
    if given["offline"] and given["processes"] == "shared":
        raise ArgumentError(
            "WandbLogger(processes='shared', offline=True): only a server can share a run. Use processes='group'."
        )


def config_of(trainer: "Trainer", module: "TrainModule", extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config without secrets: what is trained, how, where and by which versions.

    Args:
        trainer: The trainer.
        module: The module, whose hyperparameters are in it.
        extra: What else a user wants in it.
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
    # The user's own names stay theirs.
    data = trainer.datamodule
    theirs = {**({} if data is None else data.hparams.readable()), **module.hparams.readable(), **extra}
    return redacted({**{f"jaxlit/{k}" if k in theirs else k: v for k, v in ours.items()}, **theirs})


def run_arguments(
    logger: "WandbLogger", trainer: "Trainer", module: "TrainModule", folder: Path
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the arguments of `wandb.init`, those of `wandb.Settings`, and what is another for a run alone.

    Args:
        logger: The logger, whose id is known.
        trainer: The trainer.
        module: The module.
        folder: Where W&B writes its files.
    """
    rank, several = jax.process_index(), jax.process_count() > 1
    arguments = {
        "project": logger.project,
        "entity": logger.entity,
        "name": logger.name,
        "id": logger.id,
        "group": logger.group,
        "job_type": logger.job_type,
        "tags": logger.tags,
        "notes": logger.notes,
        "dir": str(folder),
        "config": config_of(trainer, module, logger.config),
    }
    settings: dict[str, Any] = {"init_timeout": logger.init_timeout, "finish_timeout": logger.finish_timeout}
    alone: dict[str, Any] = {}
    if several and logger.processes != "first":
        alone = {"group": logger.group or logger.id, "job_type": logger.job_type or f"process_{rank}"}
        alone |= {"id": f"{logger.id}-{rank}"} if rank else {}
    if several and logger.processes == "shared":
        settings |= {"mode": "shared", "x_primary": rank == 0, "x_update_finish_state": rank == 0}
        settings["x_label"] = f"process_{rank}"
    else:
        arguments |= alone
    return arguments, settings, alone


def monitored(trainer: "Trainer") -> dict[str, str]:
    """Return the metrics that callbacks watch, checkpoints before others, and whether "min" or "max" is best."""
    callbacks = (*trainer.checkpoint_callbacks, *trainer.callbacks)
    found = {getattr(c, "monitor", None): getattr(c, "mode", None) for c in callbacks}
    return {name: mode for name, mode in found.items() if isinstance(name, str) and mode in ("min", "max")}


def described(
    callback: "Callback", path: Path, checkpoint_callbacks: Sequence["ModelCheckpoint"]
) -> tuple[dict[str, Any], list[str], int]:
    """Return the metadata, the aliases and the number of the artifact for a checkpoint.

    Args:
        callback: What wrote it: of a writer that is no ModelCheckpoint nothing but the name is known.
        path: The checkpoint.
        checkpoint_callbacks: The Trainer's, each of which has a best of its own.
    """
    numbers = [i for i, other in enumerate(checkpoint_callbacks) if other is callback]
    if not numbers:
        return {"writer": type(callback).__name__}, ["latest", path.name], len(checkpoint_callbacks)
    own = checkpoint_callbacks[numbers[0]]
    marks = {"latest": own.last_model_path, "best": own.best_model_path}
    aliases = [*(mark for mark, at in marks.items() if at == str(path)), path.name]
    return {"monitor": own.monitor, "score": own.best_k_models.get(str(path))}, aliases, numbers[0]
