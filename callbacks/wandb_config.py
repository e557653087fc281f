"""What is known of a training, for the config of a W&B run and for a report."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import flax
import jax
import optax
from flax import nnx

from jaxlit.reporting.secrets import redacted
from jaxlit.version import __version__

if TYPE_CHECKING:
    from jaxlit.core.module import TrainModule
    from jaxlit.trainer import Trainer


def facts_of(trainer: "Trainer", module: "TrainModule") -> dict[str, Any]:
    """Return how a module is trained, where and by which versions."""
    strategy = trainer.strategy
    count, kind = strategy.mesh.size, jax.devices()[0].device_kind
    return {
        "trainer": trainer.config,
        "strategy": strategy.describe().split("\n")[0],
        "mesh": {str(axis): size for axis, size in strategy.mesh.shape.items()},
        "devices": {"kind": kind, "count": count, "processes": jax.process_count()},
        "versions": {"jaxlit": __version__, **{lib.__name__: lib.__version__ for lib in (jax, flax, optax)}},
        "num_params": sum(x.size for x in jax.tree.leaves(nnx.state(module, nnx.Param))),
    }


def config_of(trainer: "Trainer", module: "TrainModule", extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's config without secrets: hyperparameters, what else the user gives, and `facts_of` the training."""
    # A name that the user has taken stays the user's.
    data = trainer.datamodule
    theirs = {**({} if data is None else data.hparams.readable()), **module.hparams.readable(), **extra}
    return redacted(
        {**{f"jaxlit/{k}" if k in theirs else k: v for k, v in facts_of(trainer, module).items()}, **theirs}
    )
