"""What can be added to training; every callback and logger is `jaxlit.callbacks.X`."""

from jaxlit.faces import lazy_imports

with lazy_imports(globals()):
    from jaxlit.callbacks.backbone_freeze import BackboneFreeze
    from jaxlit.callbacks.base import Callback, Measure
    from jaxlit.callbacks.csv_logger import CSVLogger
    from jaxlit.callbacks.device_stats_monitor import DeviceStatsMonitor
    from jaxlit.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
    from jaxlit.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
    from jaxlit.callbacks.gradient_norm import GradientNorm
    from jaxlit.callbacks.lambda_callback import LambdaCallback
    from jaxlit.callbacks.learning_rate_monitor import LearningRateMonitor
    from jaxlit.callbacks.logger import Logger, NoLogger
    from jaxlit.callbacks.mlflow_logger import MLFlowLogger
    from jaxlit.callbacks.model_checkpoint import ModelCheckpoint
    from jaxlit.callbacks.model_summary import ModelSummary
    from jaxlit.callbacks.prediction_writer import PredictionWriter
    from jaxlit.callbacks.profiler import Profiler
    from jaxlit.callbacks.progress_bar import ProgressBar
    from jaxlit.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
    from jaxlit.callbacks.run_report import RunReport
    from jaxlit.callbacks.tensorboard_logger import TensorBoardLogger
    from jaxlit.callbacks.throughput_monitor import ThroughputMonitor
    from jaxlit.callbacks.timer import Timer
    from jaxlit.callbacks.wandb_logger import WandbLogger
    from jaxlit.callbacks.weight_averaging import EMA, WeightAveraging

__all__ = [
    "EMA",
    "BackboneFreeze",
    "CSVLogger",
    "Callback",
    "DeviceStatsMonitor",
    "EarlyStopping",
    "EarlyStoppingReason",
    "GradientAccumulationScheduler",
    "GradientNorm",
    "LambdaCallback",
    "LearningRateMonitor",
    "Logger",
    "MLFlowLogger",
    "Measure",
    "ModelCheckpoint",
    "ModelSummary",
    "NoLogger",
    "PredictionWriter",
    "Profiler",
    "ProgressBar",
    "ReduceLROnPlateau",
    "RunReport",
    "TensorBoardLogger",
    "ThroughputMonitor",
    "Timer",
    "WandbLogger",
    "WeightAveraging",
]
