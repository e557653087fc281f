"""PyTorch Lightning's way of training, for JAX and Flax NNX."""

from jaxlit import callbacks as callbacks
from jaxlit import distributed as distributed
from jaxlit import errors as errors
from jaxlit import strategies as strategies
from jaxlit import testing as testing
from jaxlit.callbacks.base import Callback as Callback
from jaxlit.compiled import compile_step as compile_step
from jaxlit.creation import lazy as lazy
from jaxlit.data import ArrayLoader as ArrayLoader
from jaxlit.datamodule import DataModule as DataModule
from jaxlit.module import Optimizer as Optimizer
from jaxlit.module import TrainModule as TrainModule
from jaxlit.strategies.base import Strategy as Strategy
from jaxlit.strategies.registry import register_strategy as register_strategy
from jaxlit.trainer import Trainer as Trainer

__version__ = "0.1.0"
