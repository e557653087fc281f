"""Every callback of jaxlit, made for a training in which it has little to do."""

from collections.abc import Callable
from typing import Any

import optax

import jaxlit as jl
from jaxlit import callbacks as cb
from kit.modules import Mean

# Every callback of jaxlit, as it may be made; none of them has anything to do between the rows.
MADE: dict[str, Callable[[], jl.Callback]] = {
    "CSVLogger": cb.CSVLogger,
    "Callback": cb.Callback,
    "DeviceStatsMonitor": lambda: cb.DeviceStatsMonitor(cpu_stats=True),
    "EMA": lambda: cb.EMA(0.9),
    "EarlyStopping": lambda: cb.EarlyStopping("loss", check_on_train_epoch_end=True),
    "GradientAccumulationScheduler": lambda: cb.GradientAccumulationScheduler({0: 1, 9: 2}),
    "GradientNorm": cb.GradientNorm,
    "JSONLLogger": cb.JSONLLogger,
    "LambdaCallback": lambda: cb.LambdaCallback(on_train_epoch_end=lambda trainer, module: None),
    "LearningRateMonitor": cb.LearningRateMonitor,
    "Logger": cb.Logger,
    "Measure": cb.Measure,
    "ModelCheckpoint": lambda: cb.ModelCheckpoint(every_n_train_steps=1000),
    "ModelSummary": cb.ModelSummary,
    "NoLogger": cb.NoLogger,
    "PredictionWriter": lambda: cb.PredictionWriter("predictions"),
    "Profiler": lambda: cb.Profiler(1000),
    "ProgressBar": cb.ProgressBar,
    "ReduceLROnPlateau": lambda: cb.ReduceLROnPlateau("loss", check_on_train_epoch_end=True),
    "RunReport": cb.RunReport,
    "TensorBoardLogger": cb.TensorBoardLogger,
    "ThroughputMonitor": cb.ThroughputMonitor,
    "Timer": lambda: cb.Timer("00:01:00:00"),
    "WandbLogger": lambda: cb.WandbLogger("costs", offline=True),
    "WeightAveraging": cb.WeightAveraging,
}

KINDS = {
    "ProgressBar": "enable_progress_bar",
    "ModelCheckpoint": "enable_checkpointing",
    "ModelSummary": "enable_model_summary",
}


class Model(Mean):
    """Keeps its learning rate in the optimizer's state, for ReduceLROnPlateau."""

    def configure_optimizers(self) -> Any:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
