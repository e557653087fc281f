"""PyTorch Lightning's way of training, for JAX and Flax NNX."""

from typing import TYPE_CHECKING, Any

from jaxlit import callbacks, distributed, errors, pipeline, sharding, strategies, testing
from jaxlit import loggers as loggers  # for ports
from jaxlit.callbacks.base import Callback
from jaxlit.core.decay import decay_mask
from jaxlit.core.module import TrainModule
from jaxlit.core.optimizer import Optimizer
from jaxlit.data.array_loader import ArrayLoader
from jaxlit.data.datamodule import DataModule
from jaxlit.engine.compiled import compile_step
from jaxlit.engine.lazy import lazy
from jaxlit.pipeline.marks import pipeline_yield
from jaxlit.porting import advice, no_such_name
from jaxlit.strategies.base import Strategy
from jaxlit.strategies.registry import register_strategy
from jaxlit.trainer import Trainer
from jaxlit.trainer.lr_find import lr_find
from jaxlit.version import __version__

__all__ = [
    "ArrayLoader",
    "Callback",
    "DataModule",
    "Optimizer",
    "Strategy",
    "TrainModule",
    "Trainer",
    "__version__",
    "callbacks",
    "compile_step",
    "decay_mask",
    "distributed",
    "errors",
    "lazy",
    "lr_find",
    "pipeline",
    "pipeline_yield",
    "register_strategy",
    "sharding",
    "strategies",
    "testing",
]


def __dir__() -> list[str]:
    return __all__


# As in Lightning, callbacks are also names of the package: `jl.EarlyStopping`.
if TYPE_CHECKING:
    from jaxlit.callbacks import *  # noqa: F403

    __all__ += callbacks.__all__
else:  # a type checker would take any name that it finds a __getattr__ for

    def __getattr__(name: str) -> Any:
        if name in callbacks.__all__:
            return getattr(callbacks, name)
        owner = "jl.callbacks" if name in advice("jl.callbacks") else "jl"
        raise no_such_name(owner, name, [*__all__, *callbacks.__all__])
