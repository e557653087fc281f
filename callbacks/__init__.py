"""What can be added to training; every callback and logger is `jaxlit.callbacks.X`."""

from jaxlit.callbacks.base import Callback as Callback
from jaxlit.callbacks.csv_logger import CSVLogger as CSVLogger
from jaxlit.callbacks.early_stopping import EarlyStopping as EarlyStopping
from jaxlit.callbacks.gradient_norm import GradientNorm as GradientNorm
from jaxlit.callbacks.jsonl_logger import JSONLLogger as JSONLLogger
from jaxlit.callbacks.logger import Logger as Logger
from jaxlit.callbacks.logger import NoLogger as NoLogger
from jaxlit.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
from jaxlit.callbacks.model_summary import ModelSummary as ModelSummary
from jaxlit.callbacks.progress_bar import ProgressBar as ProgressBar
from jaxlit.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau as ReduceLROnPlateau
from jaxlit.callbacks.wandb_logger import WandbLogger as WandbLogger
