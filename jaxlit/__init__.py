"""PyTorch Lightning's way of training, for JAX and Flax NNX."""

from typing import TYPE_CHECKING

from jaxlit import callbacks, distributed, errors, integrations, pipeline, sharding, strategies, testing
from jaxlit import loggers as loggers  # for ports
from jaxlit.faces import lazy_imports
from jaxlit.version import __version__

with lazy_imports(globals()):
    from jaxlit import cli
    from jaxlit.callbacks import *  # noqa: F403 - as in Lightning: `jl.EarlyStopping`
    from jaxlit.callbacks.base import Callback
    from jaxlit.core.export import export
    from jaxlit.core.module import TrainModule
    from jaxlit.core.optimizer import Optimizer, decay_mask
    from jaxlit.core.stacked import Stacked
    from jaxlit.data.array_loader import ArrayLoader
    from jaxlit.data.loaders import DataModule
    from jaxlit.distributed.job import rank_zero_only
    from jaxlit.engine.compiled import compile_step
    from jaxlit.engine.creation import lazy
    from jaxlit.pipeline.segments import pipeline_yield
    from jaxlit.populations.fit_many import fit_many
    from jaxlit.programs.costs import Hardware
    from jaxlit.strategies.base import Strategy
    from jaxlit.strategies.registry import register_strategy
    from jaxlit.trainer.trainer import Trainer
    from jaxlit.trainer.tuning import lr_find, scale_batch_size
    from jaxlit.weights.loading import load_weights, save_weights
    from jaxlit.weights.weight_rules import WeightRule

__all__ = [
    "ArrayLoader",
    "Callback",
    "DataModule",
    "Hardware",
    "Optimizer",
    "Stacked",
    "Strategy",
    "TrainModule",
    "Trainer",
    "WeightRule",
    "__version__",
    "callbacks",
    "cli",
    "compile_step",
    "decay_mask",
    "distributed",
    "errors",
    "export",
    "fit_many",
    "integrations",
    "lazy",
    "load_weights",
    "lr_find",
    "pipeline",
    "pipeline_yield",
    "rank_zero_only",
    "register_strategy",
    "save_weights",
    "scale_batch_size",
    "sharding",
    "strategies",
    "testing",
]

if TYPE_CHECKING:  # `dir(jl)` does not list the callbacks again
    __all__ += callbacks.__all__
