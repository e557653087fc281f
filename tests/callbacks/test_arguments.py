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
NOT_POSITIVE, NOT_BOOL = (0, 1.5, True, "2"), (1, None, "yes")

# By the class, then by the argument: values that it does not take, and what the message says of those that it does.
WRONG: dict[str, dict[str, tuple[tuple[Any, ...], str]]] = {
    "BackboneFreeze": {
        "part": (("", None), "attribute"),
        "unfreeze_at_epoch": ((0, 1.5), "int of at least 1"),
        "tx": ((0.1,), "optax"),
    },
    "CSVLogger": {
        "filename": (("", ".", "..", "a/b.csv", "/a.csv", "./a.csv", "metrics", 3, None), "suffix.*default_root_dir"),
        "on_error": (("ignore", None, True), "'warn', 'raise'"),
    },
    "EMA": {
        "decay": ((1.0, "0.9"), "number"),
        "update_every_n_steps": (NOT_POSITIVE, "int"),
        "update_starting_at_step": ((-1,), "int"),
    },
    "EarlyStopping": {
        "monitor": (("", 3), "name of a"),
        "min_delta": ((-0.1, "0", INF), "at least 0"),
        "patience": ((-1, 1.5, True), "int of at least 0"),
        "mode": (("auto",), "'min', 'max'"),
        "check_on_train_epoch_end": ((1,), "True or False"),
    },
    "GradientAccumulationScheduler": {
        "scheduling": ((4, [(0, 4)], {0: 1.5}, {"0": 2}, {0: True}, {}, {-1: 2}, {0: 0}), "takes a dict"),
    },
    "GradientNorm": {
        "norm_type": ((0, -1, "2", None, True, NAN), "number above 0"),
        "every_n_steps": (NOT_POSITIVE, "int of at least 1"),
        "per_parameter": (NOT_BOOL, "True or False"),
    },
    "LearningRateMonitor": {"logging_interval": (("batch", 3), "'step', 'epoch'")},
    "MLFlowLogger": {"log_model": (("best",), "'all'"), "on_error": (("stop",), "'warn'")},
    "ModelCheckpoint": {
        "monitor": (("",), "name of a"),
        "mode": (("auto",), "'min', 'max'"),
        "save_top_k": ((-2, True), "int of at least -1"),
        **dict.fromkeys(("every_n_train_steps", "every_n_epochs"), (NOT_POSITIVE, "int of at least 1")),
        "train_time_interval": ((5, timedelta(seconds=-1), "soon"), "timedelta|duration"),
        "on_save_error": (("ignore",), "'raise', 'warn'"),
    },
    "ModelSummary": {"max_depth": ((-2, 1.0, "1", True, None), "'auto'")},
    "PredictionWriter": {"format": (("npy", "csv"), "'npz', 'parquet'")},
    "Profiler": {"start_step": ((-1, 1.5), "int"), "num_steps": (NOT_POSITIVE, "int")},
    "ProgressBar": {"refresh_rate": ((0, 10.1, NAN, "fast", True), "above 0|at most 10")},
    "ReduceLROnPlateau": {
        "monitor": (("", 3), "name of a"),
        "mode": (("least",), "'min', 'max'"),
        "factor": ((0, 1, "0.1", True), "number"),
        "patience": (NOT_POSITIVE, "int of at least 1"),
        "min_delta": ((-0.1, INF), "at least 0"),
        "cooldown": ((-1, 0.5), "int of at least 0"),
        "min_lr": ((-1e-6, NAN), "at least 0"),
        "check_on_train_epoch_end": (("yes",), "True or False"),
    },
    "ThroughputMonitor": {
        "window_size": (NOT_POSITIVE, "int of at least 1"),
        "available_flops": ((-1.0, 0), "above 0"),
    },
    "Timer": {
        "duration": (("1:00", 5), "DD:HH:MM:SS"),
        "interval": (("steps",), "'step', 'epoch'"),
    },
    "WandbLogger": {
        "tags": (("one",), "list of strings"),
        "log_model": (("latest", None), "'all', 'best'"),
        "watch": (("grads", True), "'gradients'"),
        "watch_every_n_steps": (NOT_POSITIVE, "int"),
        "on_error": (("ignore",), "'warn', 'raise'"),
        **dict.fromkeys(("init_timeout", "finish_timeout"), ((0, -1.0, INF, True, "5"), "above 0")),
    },
}
NEEDED = {name: {"monitor": "loss"} for name in ("EarlyStopping", "ReduceLROnPlateau")}
NEEDED |= {"PredictionWriter": {"output_dir": "made"}}


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, names in WRONG.items() for name in names])
def test_a_wrong_argument_is_refused_by_name(owner: str, name: str) -> None:
    values, words = WRONG[owner][name]
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
        ("ModelCheckpoint", {"filename": "{epoch:d"}, "filename.*brace"),
        ("ModelCheckpoint", {"save_top_k": 2}, "save_top_k.*without monitor"),
        ("ModelCheckpoint", {"save_top_k": 0, "save_last": False}, "keeps nothing"),
        ("Profiler", {"filename": "x"}, "filename.*dirpath="),
        ("ThroughputMonitor", {"separator": "|"}, "separator"),
    ],
)
def test_arguments_that_do_not_exist_or_fit_are_refused(owner: str, given: dict[str, Any], words: str) -> None:
    refuses((ArgumentError, ArgumentTypeError), lambda: getattr(callbacks, owner)(**given), words)
