"""Every callback of jaxlit, made for a training in which it has little to do."""

from collections.abc import Callable
from typing import Any

import optax

import jaxlit as jl
from jaxlit import callbacks as cb
from kit.modules import Mean

# Every callback of jaxlit, as it may be made; none of them has anything to do between the rows.
WITH_ARGUMENTS: dict[str, Callable[[], jl.Callback]] = {
    "DeviceStatsMonitor": lambda: cb.DeviceStatsMonitor(cpu_stats=True),
    "EMA": lambda: cb.EMA(0.9),
    "EarlyStopping": lambda: cb.EarlyStopping("loss", check_on_train_epoch_end=True),
    "GradientAccumulationScheduler": lambda: cb.GradientAccumulationScheduler({0: 1, 9: 2}),
    "LambdaCallback": lambda: cb.LambdaCallback(on_train_epoch_end=lambda trainer, module: None),
    "ModelCheckpoint": lambda: cb.ModelCheckpoint(every_n_train_steps=1000),
    "PredictionWriter": lambda: cb.PredictionWriter("predictions"),
    "Profiler": lambda: cb.Profiler(1000),
    "ReduceLROnPlateau": lambda: cb.ReduceLROnPlateau("loss", check_on_train_epoch_end=True),
    "Timer": lambda: cb.Timer("00:01:00:00"),
    "WandbLogger": lambda: cb.WandbLogger("costs", offline=True),
}
# MLflow has a stand-in in tests/callbacks/test_mlflow_logger.py; a frozen part is in the compiled step.
ELSEWHERE = ("MLFlowLogger", "BackboneFreeze", "EarlyStoppingReason")
MADE = {name: WITH_ARGUMENTS.get(name, getattr(cb, name)) for name in cb.__all__ if name not in ELSEWHERE}

KINDS = {
    "ProgressBar": "enable_progress_bar",
    "ModelCheckpoint": "enable_checkpointing",
    "ModelSummary": "enable_model_summary",
}


class Model(Mean):
    """Keeps its learning rate in the optimizer's state, for ReduceLROnPlateau."""

    def configure_optimizers(self) -> Any:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=0.25)
