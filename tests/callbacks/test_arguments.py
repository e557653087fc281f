"""Arguments of callbacks that are refused, each by its name with what was given and what it takes."""

import math
import re
from datetime import timedelta
from typing import Any

import pytest
from kit.refusals import refuses

from jaxlit import callbacks
from jaxlit.errors import ArgumentError, ArgumentTypeError

NAN, INF = math.nan, math.inf

# What the message says of the values that are taken, some that are not, and arguments that take these.
WRONG: list[tuple[str, tuple[Any, ...], str]] = [
    (
        "int of at least 1",
        (0, 1.5, True, "2"),
        "BackboneFreeze.unfreeze_at_epoch EMA.update_every_n_steps GradientNorm.every_n_steps Profiler.num_steps "
        "ModelCheckpoint.every_n_train_steps ModelCheckpoint.every_n_epochs ReduceLROnPlateau.patience "
        "ThroughputMonitor.window_size WandbLogger.watch_every_n_steps",
    ),
    (
        "int of at least 0",
        (-1, 1.5, True),
        "EMA.update_starting_at_step EarlyStopping.patience Profiler.start_step ReduceLROnPlateau.cooldown",
    ),
    ("at least 0", (-0.1, "0", INF), "EarlyStopping.min_delta ReduceLROnPlateau.min_delta"),
    ("at least 0", (-1e-6, NAN), "ReduceLROnPlateau.min_lr"),
    ("number above 0", (0, -1, "2", None, True, NAN), "GradientNorm.norm_type"),
    ("above 0", (0, -1.0, INF, True, "5"), "WandbLogger.init_timeout WandbLogger.finish_timeout"),
    ("above 0", (-1.0, 0), "ThroughputMonitor.available_flops"),
    ("above 0|at most 10", (0, 10.1, NAN, "fast", True), "ProgressBar.refresh_rate"),
    ("number", (1.0, "0.9"), "EMA.decay"),
    ("number", (0, 1, "0.1", True), "ReduceLROnPlateau.factor"),
    ("True or False", (1, "yes"), "EarlyStopping.check_on_train_epoch_end ReduceLROnPlateau.check_on_train_epoch_end"),
    (
        "True or False",
        (1, None, "yes"),
        "GradientNorm.per_parameter ModelCheckpoint.save_last ModelCheckpoint.save_on_exception "
        "ModelCheckpoint.save_weights_only ModelCheckpoint.trained_only",
    ),
    ("name of a", ("", 3), "EarlyStopping.monitor ModelCheckpoint.monitor ReduceLROnPlateau.monitor"),
    ("'min', 'max'", ("auto",), "EarlyStopping.mode ModelCheckpoint.mode ReduceLROnPlateau.mode"),
    ("'step', 'epoch'", ("batch", 3), "LearningRateMonitor.logging_interval Timer.interval"),
    ("'warn', 'raise'", ("ignore", None, True), "CSVLogger.on_error MLFlowLogger.on_error WandbLogger.on_error"),
    ("'raise', 'warn'", ("ignore",), "ModelCheckpoint.on_save_error"),
    ("attribute", ("", None), "BackboneFreeze.part"),
    ("optax", (0.1,), "BackboneFreeze.tx"),
    ("suffix.*default", ("", ".", "..", "a/b.csv", "/a.csv", "./a.csv", "metrics", 3, None), "CSVLogger.filename"),
    (
        "takes a dict",
        (4, [(0, 4)], {0: 1.5}, {"0": 2}, {0: True}, {}, {-1: 2}, {0: 0}),
        "GradientAccumulationScheduler.scheduling",
    ),
    ("'all'", ("best",), "MLFlowLogger.log_model"),
    ("'all', 'best'", ("latest", None), "WandbLogger.log_model"),
    ("int of at least -1", (-2, True), "ModelCheckpoint.save_top_k"),
    ("timedelta|duration", (5, timedelta(seconds=-1), "soon"), "ModelCheckpoint.train_time_interval"),
    ("'auto'", (-2, 1.0, "1", True, None), "ModelSummary.max_depth"),
    ("'npz', 'parquet'", ("npy", "csv"), "PredictionWriter.format"),
    ("DD:HH:MM:SS", ("1:00", 5), "Timer.duration"),
    ("list of strings", ("one",), "WandbLogger.tags"),
    ("'gradients'", ("grads", True), "WandbLogger.watch"),
]
NEEDED = {name: {"monitor": "loss"} for name in ("EarlyStopping", "ReduceLROnPlateau")}
NEEDED |= {"PredictionWriter": {"output_dir": "made"}}


@pytest.mark.parametrize(
    ("argument", "values", "words"), [(name, values, words) for words, values, names in WRONG for name in names.split()]
)
def test_a_wrong_argument_is_refused_by_name(argument: str, values: tuple[Any, ...], words: str) -> None:
    owner, _, name = argument.partition(".")
    for value in values:
        given = {**NEEDED.get(owner, {}), name: value}
        error = refuses((ArgumentError, ArgumentTypeError), lambda given=given: getattr(callbacks, owner)(**given))
        assert re.match(rf"{owner}\({name}=", str(error))
        assert re.search(words, str(error))
        assert "ot " in str(error) and repr(value)[:20] in str(error)  # "got" or "Got"


@pytest.mark.parametrize(
    ("owner", "given", "words"),
    [
        ("EMA", {"update_starting_at_step": 1, "update_starting_at_epoch": 1}, "got both"),
        ("LambdaCallback", {"on_train_epoch_ends": print}, "on_train_epoch_ends.*on_train_epoch_end'"),
        ("LambdaCallback", {"log": print}, "no hook 'log'"),
        ("LambdaCallback", {"setup": 3}, "setup.*got 3"),
        ("LearningRateMonitor", {"log_momentum": True}, r"log_momentum.*trainer\.hyperparams\["),
        ("LearningRateMonitor", {"log_weight_decay": True}, r"log_weight_decay.*trainer\.hyperparams\["),
        ("MLFlowLogger", {"save_dir": "a", "tracking_uri": "b"}, "save_dir.*tracking_uri.*two places"),
        ("MLFlowLogger", {"synchronous": True}, "synchronous.*thread"),
        ("MLFlowLogger", {"checkpoint_path_prefix": "x"}, "checkpoint_path_prefix.*checkpoints/"),
        ("ModelCheckpoint", {"filename": "{epoch:d"}, "filename.*is no format"),
        ("ModelCheckpoint", {"keep_every_n_steps": 0}, "keep_every_n_steps"),
        ("ModelCheckpoint", {"mode": "max"}, r"mode='max'\) without monitor="),
        ("ModelCheckpoint", {"save_top_k": 0, "save_last": False}, "keeps nothing"),
        ("Profiler", {"filename": "x"}, "filename.*dirpath="),
        ("ThroughputMonitor", {"separator": "|"}, "separator"),
    ],
)
def test_arguments_that_do_not_exist_or_fit_are_refused(owner: str, given: dict[str, Any], words: str) -> None:
    refuses((ArgumentError, ArgumentTypeError), lambda: getattr(callbacks, owner)(**given), words)
