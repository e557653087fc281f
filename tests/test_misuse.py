"""A mistake in the use of the Trainer is refused before a step is trained, by its name, its value and what to do.

`data/misuse.json` holds the mistakes that were tried on Lightning; `data/misuse_exempt.json` those that are none here.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxlit as jl
from jaxlit.errors import JaxlitError

DATA = Path(__file__).parent / "data"
MISUSE: list[str] = json.loads((DATA / "misuse.json").read_text())
EXEMPT: dict[str, str] = json.loads((DATA / "misuse_exempt.json").read_text())

ended: list[int] = []  # the training batches that were trained on
Build = Callable[[], Any]
CASES: dict[str, tuple[Build, tuple[str, ...]]] = {}


class Model(jl.TrainModule):
    """A line, with every step."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((3, 1)))

    def error(self, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ self.kernel - batch["y"]) ** 2)

    def training_step(self, batch: Any) -> Any:
        return self.error(batch)

    def validation_step(self, batch: Any) -> None:
        self.log("val", self.error(batch))

    def test_step(self, batch: Any) -> None:
        self.log("test", self.error(batch))

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        ended.append(batch_idx)


class OneWay:
    """A loader without a length."""

    def __iter__(self) -> Iterator[Any]:
        return iter(batches(4))


class Samples:
    """A map-style dataset of single samples, as one would give to a data loader."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index >= 4:
            raise IndexError
        return {"x": np.ones(3, np.float32), "y": np.ones(1, np.float32)}


def batches(count: int) -> list[dict[str, np.ndarray]]:
    return [{"x": np.ones((4, 3), np.float32), "y": np.ones((4, 1), np.float32)} for _ in range(count)]


def module(**methods: Any) -> Model:
    """Return a Model with other methods."""
    return type("Made", (Model,), methods)()


def make_trainer(**arguments: Any) -> jl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "strategy": "single"}
    limit = {} if arguments.keys() & {"max_epochs", "max_steps", "max_time", "fast_dev_run"} else {"max_epochs": 1}
    return jl.Trainer(**(quiet | limit | arguments))


def fit(
    model: Any = None, train: Any = None, val: Any = None, *, loaders: dict[str, Any] | None = None, **arguments: Any
) -> None:
    """Fit with these arguments of the Trainer, on two batches unless said."""
    if loaders is None:
        loaders = {
            "train_dataloaders": batches(2) if train is None else train,
            "val_dataloaders": batches(2) if val is None else val,
        }
    make_trainer(**arguments).fit(Model() if model is None else model, **loaders)


def refused(name: str, build: Build, *patterns: str) -> None:
    """Add a mistake.

    Args:
        name: The mistake; one of `misuse.json` or another one.
        build: A function that makes it.
        *patterns: What the message must match: the name of what is wrong, what was given, what to do.
    """
    assert name not in CASES, name
    CASES[name] = build, patterns


def refused_argument(name: str, arguments: dict[str, Any], *patterns: str) -> None:
    """Add a mistake in arguments of the Trainer."""
    refused(name, lambda: fit(**arguments), *patterns)


# Arguments that there are none of -----------------------------------------------------------------------

for _name, _arguments in {
    "Trainer(foo=1) unknown arg": {"foo": 1},
    "accelerator='abc'": {"accelerator": "abc"},
    "profiler='abc'": {"profiler": "abc"},
    "barebones=True + logger=True": {"barebones": True, "logger": True},
    "deterministic='foo'": {"deterministic": "foo"},
    "plugins='foo'": {"plugins": "foo"},
    "num_nodes=0": {"num_nodes": 0},
}.items():
    refused_argument(_name, _arguments, rf"no argument '{next(iter(_arguments))}'")
refused_argument("a misspelt argument", {"max_epoch": 1}, "no argument 'max_epoch'", "Did you mean 'max_epochs'")

# Limits -------------------------------------------------------------------------------------------------

refused_argument("max_epochs=-2", {"max_epochs": -2}, "max_epochs", "-2", "at least 0")
refused_argument("max_epochs='3'", {"max_epochs": "3"}, "max_epochs", "'3'", r"\bint\b")
refused_argument("max_epochs=1.5", {"max_epochs": 1.5}, "max_epochs", "1.5", r"\bint\b")
refused_argument("max_epochs=True", {"max_epochs": True}, "max_epochs", "True", r"\bint\b")
refused_argument("max_steps=-2", {"max_steps": -2}, "max_steps", "-2", "at least -1")
refused_argument("max_steps=None", {"max_steps": None}, "max_steps", "None", r"\bint\b")
refused_argument(
    "no limit", {"max_epochs": None}, "Trainer.fit has no limit", "max_epochs", "max_steps", "max_time|fast_dev_run"
)
refused_argument(
    "min_epochs>max_epochs", {"min_epochs": 2, "max_epochs": 1}, r"min_epochs\b.*\b2", r"max_epochs\b.*\b1"
)
refused_argument("min_epochs=-1", {"min_epochs": -1}, "min_epochs", "-1", "at least 0")
refused_argument("min_epochs='2'", {"min_epochs": "2"}, "min_epochs", "'2'", r"\bint\b")
refused_argument("min_steps>max_steps", {"min_steps": 5, "max_steps": 2}, r"min_steps\b.*\b5", r"max_steps\b.*\b2")
refused_argument("min_steps=-1", {"min_steps": -1}, "min_steps", "-1", "at least")
refused_argument("max_time='abc'", {"max_time": "abc"}, "max_time", "'abc'", "DD:HH:MM:SS")
refused_argument("max_time=5", {"max_time": 5}, "max_time", r"\b5\b", "timedelta")
refused_argument("max_time={'second': 5}", {"max_time": {"second": 5}}, "max_time", "second", "seconds|timedelta")
for _value in ({"days": 10**12}, {"seconds": float("nan")}, "999999999999:00:00:00"):
    refused_argument(f"max_time={_value!r}", {"max_time": _value}, "max_time", re.escape(repr(_value)), "timedelta")
refused_argument(
    "max_time is negative", {"max_time": datetime.timedelta(seconds=-1)}, "max_time", "-1|negative", "positive|least"
)

# Numbers of batches -------------------------------------------------------------------------------------

refused_argument("limit_train_batches=-1", {"limit_train_batches": -1}, "limit_train_batches", "-1", "at least 0")
refused_argument("limit_val_batches=1.5", {"limit_val_batches": 1.5}, "limit_val_batches", "1.5", "from 0.0 to 1.0")
refused_argument("limit_val_batches='x'", {"limit_val_batches": "x"}, "limit_val_batches", "'x'", r"\bint\b", "float")
refused_argument(
    "limit_val_batches=True", {"limit_val_batches": True}, "limit_val_batches", "True", r"\bint\b", "float"
)
refused_argument("limit_test_batches=nan", {"limit_test_batches": float("nan")}, "limit_test_batches", "nan", "0.0")
refused(
    "limit_train_batches=0.5 with IterableDataset",
    lambda: fit(train=OneWay(), limit_train_batches=0.5),
    "limit_train_batches=0.5",
    "train_dataloaders",
    "has no length",
    "as an int",
)
refused(
    "limit_val_batches=0.01 of 3 batches (rounds to 0)",
    lambda: fit(val=batches(3), limit_val_batches=0.01),
    "limit_val_batches=0.01",
    "3 batches",
    "at least 0.33",
)
refused_argument("overfit_batches=-1", {"overfit_batches": -1}, "overfit_batches", "-1", "at least 0")
refused_argument("overfit_batches=1.5", {"overfit_batches": 1.5}, "overfit_batches", "1.5", "from 0.0 to 1.0")
refused_argument("overfit_batches=True", {"overfit_batches": True}, "overfit_batches", "True", r"\bint\b", "float")
refused_argument(
    "overfit_batches with limit_train_batches",
    {"overfit_batches": 1, "limit_train_batches": 2},
    "overfit_batches",
    "limit_train_batches",
    r"\b2\b",
)
refused_argument("fast_dev_run=-1", {"fast_dev_run": -1}, "fast_dev_run", "-1", "at least 0|True")
refused_argument("fast_dev_run='yes'", {"fast_dev_run": "yes"}, "fast_dev_run", "'yes'", "True|int")
refused_argument(
    "accumulate_grad_batches=0", {"accumulate_grad_batches": 0}, "accumulate_grad_batches", r"\b0\b", "least 1"
)
refused_argument(
    "accumulate_grad_batches=0.5", {"accumulate_grad_batches": 0.5}, "accumulate_grad_batches", "0.5", r"\bint\b"
)
refused_argument(
    "accumulate_grad_batches={4:2} dict",
    {"accumulate_grad_batches": {4: 2}},
    "accumulate_grad_batches",
    "4: 2",
    r"\bint\b",
)
refused_argument("num_sanity_val_steps=-2", {"num_sanity_val_steps": -2}, "num_sanity_val_steps", "-2", "least -1")
refused_argument("log_every_n_steps=-1", {"log_every_n_steps": -1}, "log_every_n_steps", "-1", "at least 0")

# When to validate ---------------------------------------------------------------------------------------

refused_argument("val_check_interval=0", {"val_check_interval": 0}, "val_check_interval", r"\b0\b", "at least 1")
refused_argument(
    "val_check_interval=1.5", {"val_check_interval": 1.5}, "val_check_interval", "1.5", "float", r"\bint\b"
)
refused_argument("val_check_interval=True", {"val_check_interval": True}, "val_check_interval", "True", r"\bint\b")
refused_argument(
    "val_check_interval='0.5'", {"val_check_interval": "0.5"}, "val_check_interval", "'0.5'", "float|DD:HH"
)
refused_argument(
    "val_check_interval=100 > batches",
    {"val_check_interval": 100},
    "val_check_interval=100",
    r"\b2\b",
    "check_val_every_n_epoch=None|at most 2|limit_val_batches",
)
refused(
    "val_check_interval=0.5 for a loader without length",
    lambda: fit(train=OneWay(), val_check_interval=0.5),
    "val_check_interval=0.5",
    "no length",
    r"\bint\b",
)
refused_argument(
    "check_val_every_n_epoch=None, val_check_interval=0.5",
    {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
    "check_val_every_n_epoch=None",
    "val_check_interval=0.5",
    r"\bint\b",
)
for _value in (0, 0.5, "1", True):
    refused_argument(
        f"check_val_every_n_epoch={_value!r}",
        {"check_val_every_n_epoch": _value},
        "check_val_every_n_epoch",
        re.escape(repr(_value)),
        "at least 1",
    )
refused_argument(
    "reload_dataloaders_every_n_epochs=-1",
    {"reload_dataloaders_every_n_epochs": -1},
    "reload_dataloaders_every_n_epochs",
    "-1",
    "at least 0",
)
refused_argument(
    "reload_dataloaders_every_n_epochs with a plain loader",
    {"reload_dataloaders_every_n_epochs": 1},
    "reload_dataloaders_every_n_epochs=1",
    "train_dataloader|loader",
    "datamodule|DataModule|hook",
)

# Numbers and devices ------------------------------------------------------------------------------------

refused_argument("gradient_clip_val='1'", {"gradient_clip_val": "1"}, "gradient_clip_val", "'1'", "number|float")
refused_argument("gradient_clip_val=-1", {"gradient_clip_val": -1}, "gradient_clip_val", "-1", "least 0|above 0|posit")
refused_argument("gradient_clip_val=True", {"gradient_clip_val": True}, "gradient_clip_val", "True", "number|float")
refused_argument(
    "gradient_clip_algorithm='foo'",
    {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "foo"},
    "gradient_clip_algorithm",
    "'foo'",
    "'norm'",
    "'value'",
)
refused_argument(
    "gradient_clip_algorithm without gradient_clip_val",
    {"gradient_clip_algorithm": "value"},
    "gradient_clip_algorithm",
    "'value'",
    "gradient_clip_val",
)
for _value in ("fp8-mixed", "float32", "bf16_mixed", 16, None):
    refused_argument(
        "precision='fp8-mixed'" if _value == "fp8-mixed" else f"precision={_value!r}",
        {"precision": _value},
        "precision",
        re.escape(repr(_value)),
        "'32-true'",
        "'bf16-mixed'",
        "'bf16-true'",
        "'16-mixed'",
    )
refused_argument("debug='yes'", {"debug": "yes"}, "debug", "'yes'", "True or False")
refused_argument("nan_policy='foo'", {"nan_policy": "foo"}, "nan_policy", "'foo'", "'raise'", "'skip'", "'ignore'")
refused_argument("seed='abc'", {"seed": "abc"}, "seed", "'abc'", r"\bint\b")
refused_argument("max_in_flight=0", {"max_in_flight": 0}, "max_in_flight", r"\b0\b", "at least 1")
refused_argument("strategy='abc'", {"strategy": "abc"}, "strategy 'abc'", "Known: .*fsdp")
refused_argument("strategy='fspd'", {"strategy": "fspd"}, "strategy 'fspd'", "Did you mean 'fsdp'")
refused_argument("strategy=None", {"strategy": None}, "strategy", "None", "name or a")
refused_argument("strategy=DDP the class", {"strategy": jl.strategies.DDP}, "strategy=DDP", "class", r"Pass DDP\(\)")
refused_argument("devices=-3", {"devices": -3}, "devices", "-3", "at least 1")
refused_argument("devices=0", {"devices": 0}, "devices", r"\b0\b", "at least 1")
refused_argument("devices='abc'", {"devices": "abc"}, "devices", "'abc'", r"\bint\b")
refused_argument("devices=[0,1] cpu", {"devices": [0, 1]}, "devices", r"\[0, 1\]", r"\bint\b")
refused_argument("devices=99", {"devices": 99, "strategy": "ddp"}, "devices=99", r"\b8\b")
refused_argument("two devices for single", {"devices": 2}, "devices=2", "strategy='single'", "strategy='ddp'")

# Callbacks and loggers ----------------------------------------------------------------------------------

refused_argument(
    "callbacks=['EarlyStopping'] (string)", {"callbacks": ["EarlyStopping"]}, "callbacks", "'EarlyStopping'", "Callback"
)
refused_argument("callbacks='EarlyStopping'", {"callbacks": "EarlyStopping"}, "callbacks", "'EarlyStopping'", "list")
refused_argument(
    "callbacks=[EarlyStopping] the class",
    {"callbacks": [jl.callbacks.EarlyStopping]},
    "callbacks",
    "class EarlyStopping",
    r"Pass EarlyStopping\(",
)
refused_argument("logger='wandb'", {"logger": "wandb"}, "logger", "'wandb'", "callbacks|WandbLogger")
refused_argument("logger=None", {"logger": None}, "logger", "None", "False")
refused(
    "two progress bars",
    lambda: fit(callbacks=[jl.callbacks.ProgressBar(), jl.callbacks.ProgressBar()], enable_progress_bar=True),
    "ProgressBar",
    "two|2|more than one|several",
    "one|Leave",
)
refused(
    "a progress bar with enable_progress_bar=False",
    lambda: fit(callbacks=[jl.callbacks.ProgressBar()]),
    "enable_progress_bar=False",
    "ProgressBar",
    "Leave one",
)
refused_argument("enable_progress_bar='no'", {"enable_progress_bar": "no"}, "enable_progress_bar", "'no'", "True or")
refused(
    "EarlyStopping(mode='abc')",
    lambda: jl.callbacks.EarlyStopping("val", mode="abc"),
    "EarlyStopping",
    "mode",
    "'abc'",
    "'min' or 'max'",
)
refused(
    "EarlyStopping(patience=-1)",
    lambda: jl.callbacks.EarlyStopping("val", patience=-1),
    "EarlyStopping",
    "patience",
    "-1",
    "at least 0",
)
refused(
    "EarlyStopping(monitor=3)", lambda: jl.callbacks.EarlyStopping(3), "EarlyStopping", "monitor", r"\b3\b", "name of"
)

# What fit, validate and test are given ------------------------------------------------------------------


class Bare(jl.TrainModule):
    """A module without a step."""

    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((3, 1)))

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


def without_train_loader() -> Any:
    return type("OnlyVal", (jl.DataModule,), {"val_dataloader": lambda self: batches(2)})()


def with_both(argument: str) -> None:
    data = type("Data", (jl.DataModule,), {"train_dataloader": lambda self: batches(2)})()
    fit(loaders={argument: batches(2), "datamodule": data})


refused("fit(model class, not instance)", lambda: fit(Model), "class Model", "instance", "model")
refused(
    "fit(a module of nnx)",
    lambda: fit(nnx.Linear(3, 1, rngs=nnx.Rngs(0))),
    "model",
    "Linear",
    "TrainModule",
)
refused("fit without training_step", lambda: fit(Bare()), "Bare has no training_step", "Define training_step")
refused(
    "fit without train_dataloader",
    lambda: fit(loaders={}),
    "train_dataloaders",
    "Pass a loader",
)
refused(
    "fit(train_dataloaders=None), datamodule w/o loader",
    lambda: fit(loaders={"datamodule": without_train_loader()}),
    "train_dataloaders",
    "datamodule= with train_dataloader|OnlyVal",
)
refused(
    "both train_dataloaders and datamodule", lambda: with_both("train_dataloaders"), "train_dataloaders", "datamodule"
)
refused("both val_dataloaders and datamodule", lambda: with_both("val_dataloaders"), "val_dataloaders", "datamodule")
refused(
    "datamodule is a list",
    lambda: fit(loaders={"datamodule": batches(8)}),
    "datamodule",
    r"list|\[\{",
    "DataModule",
)
refused("train dataloader is an int", lambda: fit(train=5), "train_dataloaders", r"\bint\b.*\b5", "ArrayLoader")
refused("train dataloader is a str", lambda: fit(train="data"), "train_dataloaders", "str 'data'", "ArrayLoader")
refused(
    "train dataloader is an array",
    lambda: fit(train=np.ones((4, 3))),
    "train_dataloaders",
    "ndarray",
    r"ArrayLoader\(arrays, batch_size\)",
)
refused("train dataloader is a class", lambda: fit(train=OneWay), "train_dataloaders", "class OneWay", "ArrayLoader")
refused("train dataloader is empty", lambda: fit(train=[]), "train_dataloaders", "no batch", "empty")
refused(
    "a dataset of single samples as loader",
    lambda: fit(train=Samples(), val=[batches(1)]),
    "train_dataloaders",
    r"batch\['x'\].* 3.*batch\['y'\].* 1",
    "row",
)
refused("test() without model", lambda: make_trainer().test(), r"Trainer\.test\(model", "no model", "Pass one")
refused(
    "test() without test_dataloader",
    lambda: make_trainer().test(Model()),
    r"Trainer\.test",
    "loader|test_dataloader",
    "Pass",
)
for _verb, _step in {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}.items():
    refused(
        f"{_verb} without {_step}",
        lambda verb=_verb: getattr(make_trainer(), verb)(Bare(), batches(1)),
        f"Bare has no {_step}",
        f"Define {_step}",
    )


def inside_fit(verb: str, *arguments: Any) -> None:
    def on_train_start(self: Any, trainer: jl.Trainer, module: Any) -> None:
        getattr(trainer, verb)(*arguments)

    fit(callbacks=[type("Nested", (jl.Callback,), {"on_train_start": on_train_start})()])


refused("trainer.validate inside fit", lambda: inside_fit("validate"), r"Trainer\.validate", "hook", "second Trainer")
refused(
    "trainer.validate with loaders inside fit",
    lambda: inside_fit("validate", Model(), batches(1)),
    r"Trainer\.validate",
    "hook",
    "second Trainer",
)
refused(
    "trainer.fit inside fit",
    lambda: inside_fit("fit", Model(), batches(1)),
    r"Trainer\.fit",
    "hook",
    "second Trainer",
)

# What the module's methods return -----------------------------------------------------------------------


def fit_returning(made: Any) -> Build:
    return lambda: fit(module(training_step=lambda self, batch: made(self.error(batch))))


def fit_with_optimizer(made: Any) -> Build:
    return lambda: fit(module(configure_optimizers=lambda self: made()))


refused("training_step returns a str", fit_returning(lambda loss: "loss"), "training_step", "str", "loss")
refused("training_step returns a float", fit_returning(lambda loss: 0.5), "training_step", "float", "array")
refused("training_step returns None", fit_returning(lambda loss: None), "training_step", "None", "loss")
refused(
    "training_step returns a dict without loss",
    fit_returning(lambda loss: {"los": loss}),
    "training_step",
    "without 'loss'",
    "los'",
    "Add",
)
refused(
    "training_step returns a non-scalar",
    fit_returning(lambda loss: loss * jnp.ones((4, 1))),
    "training_step",
    r"\(4, 1\)",
    r"mean\(\)",
)
refused(
    "training_step() takes no batch",
    lambda: fit(module(training_step=lambda self: jnp.float32(0))),
    r"training_step\(\)",
    r"\(self, batch\)",
)
refused("configure_optimizers returns 3", fit_with_optimizer(lambda: 3), "configure_optimizers", r"\b3\b", "adamw")
refused("configure_optimizers returns None", fit_with_optimizer(lambda: None), "configure_optimizers", "None", "adamw")
refused(
    "configure_optimizers returns {} w/o optimizer",
    fit_with_optimizer(dict),
    "configure_optimizers",
    r"\{\}",
    "adamw",
)
SCHEDULE = optax.constant_schedule(0.1)
for _name, _entry in {
    "lr_scheduler dict without 'scheduler'": {"interval": "step"},
    "lr_scheduler dict unknown key": {"scheduler": SCHEDULE, "freq": 2},
    "ReduceLROnPlateau monitor missing metric": {"scheduler": optax.contrib.reduce_on_plateau(), "monitor": "nope"},
}.items():
    refused(
        _name,
        fit_with_optimizer(lambda entry=_entry: {"optimizer": optax.sgd(0.1), "lr_scheduler": entry}),
        "configure_optimizers",
        "lr_scheduler",
        "adamw|schedule",
    )
refused(
    "lr_scheduler tied to another optimizer",
    fit_with_optimizer(lambda: ([optax.sgd(0.1)], [SCHEDULE])),
    "configure_optimizers",
    r"\b2\b",
    "return one",
)
refused(
    "two optimizers",
    fit_with_optimizer(lambda: [optax.sgd(0.1), optax.sgd(0.2)]),
    "configure_optimizers",
    "2 optimizers",
    "multi_transform",
)
for _hook, _instead in {
    "training_epoch_end": "on_train_epoch_end",
    "validation_epoch_end": "on_validation_epoch_end",
    "test_epoch_end": "on_test_epoch_end",
}.items():
    refused(
        f"legacy {_hook} defined",
        lambda hook=_hook: fit(module(**{hook: lambda self, outputs: None})),
        f"(?<!on_){_hook}",
        _instead,
    )

# Checkpoints --------------------------------------------------------------------------------------------

ModelCheckpoint = jl.callbacks.ModelCheckpoint
refused("two ModelCheckpoints same state_key", lambda: fit(callbacks=[ModelCheckpoint(), ModelCheckpoint()]), "dirpath")
refused(
    "ModelCheckpoint with enable_checkpointing=False",
    lambda: fit(callbacks=[ModelCheckpoint()], enable_checkpointing=False),
    r"enable_checkpointing=False\) with a ModelCheckpoint",
    "Leave one",
)
refused("ModelCheckpoint(save_top_k=-2)", lambda: ModelCheckpoint(save_top_k=-2), "save_top_k", "at least -1", "got -2")
refused("ModelCheckpoint(mode='abc')", lambda: ModelCheckpoint(monitor="val", mode="abc"), "mode", "'min' or 'max'")
refused(
    "test(ckpt_path='best') with no checkpointing",
    lambda: make_trainer().test(Model(), batches(1), ckpt_path="best"),
    r"test\(ckpt_path=\.\.\.\): 'best' was asked for",
    "no checkpoint in",
)
refused(
    "fit(ckpt_path='missing.ckpt')",
    lambda: make_trainer().fit(Model(), batches(1), ckpt_path="missing.ckpt"),
    r"fit\(ckpt_path=\.\.\.\): 'missing.ckpt' is no checkpoint",
)
refused(
    "fit(ckpt_path='last') with none saved",
    lambda: make_trainer().fit(Model(), batches(1), ckpt_path="last"),
    r"'last' was asked for",
)
refused("load_from_checkpoint(missing)", lambda: Model.load_from_checkpoint("gone"), "'gone' is no checkpoint")
refused(
    "load_from_checkpoint on instance", lambda: Model().load_from_checkpoint("gone"), "Call it on the class", "Model"
)

# Mistakes that only training can show -------------------------------------------------------------------

SHOWN_BY_TRAINING = ("NaN loss", "EarlyStopping(monitor=missing)", "ModelCheckpoint(monitor=missing)")

refused("NaN loss", fit_returning(lambda loss: loss * jnp.nan), "NaN", "step 0", "nan_policy='skip'")
refused(
    "EarlyStopping(monitor=missing)",
    lambda: fit(callbacks=[jl.callbacks.EarlyStopping("vall")]),
    "EarlyStopping",
    "'vall'",
    "Did you mean 'val'",
    "Logged: val",
)

refused(
    "ModelCheckpoint(monitor=missing)",
    lambda: fit(callbacks=[ModelCheckpoint(monitor="vall")]),
    "ModelCheckpoint",
    "'vall'",
    "Did you mean 'val'",
)

# The tests ----------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_batch_ended() -> None:
    ended.clear()


REFUSED = [name for name in MISUSE if name not in EXEMPT]


@pytest.mark.parametrize("name", REFUSED + [name for name in CASES if name not in MISUSE])
def test_a_mistake_is_refused_before_training_naming_what_was_given_and_what_to_do(name: str) -> None:
    assert name in CASES, f"{name!r} is neither made by this file nor exempt"
    build, patterns = CASES[name]
    with pytest.raises(JaxlitError) as caught:
        build()
    message = str(caught.value)
    assert [pattern for pattern in patterns if not re.search(pattern, message, re.DOTALL)] == [], message
    assert len(message) <= 600, message
    assert not re.search(r"Traceback|jax\._src|jax\.errors|Tracer|site-packages", message), message
    assert name in SHOWN_BY_TRAINING or not ended


def test_every_exemption_is_of_a_known_mistake_and_has_a_reason() -> None:
    assert EXEMPT.keys() <= set(MISUSE)
    assert not EXEMPT.keys() & CASES.keys()
    assert all(reason.split(":")[0] for reason in EXEMPT.values())


@pytest.mark.parametrize("name", [name for name, reason in EXEMPT.items() if reason.startswith("there is no ")])
def test_an_exemption_holds_while_the_part_does_not_exist(name: str) -> None:
    part = EXEMPT[name].removeprefix("there is no ")
    places = (jl, jl.callbacks, jl.TrainModule, jl.Trainer)
    assert not any(hasattr(place, part.replace("manual optimization", "automatic_optimization")) for place in places)


LEGAL: dict[str, Build] = {
    "ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1)": lambda: fit(
        callbacks=[ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1)]
    ),
    "strategy='fsdp' on cpu": lambda: fit(strategy="fsdp"),
    "fit(datamodule as 2nd positional)": lambda: make_trainer().fit(
        Model(), type("Data", (jl.DataModule,), {"train_dataloader": lambda self: batches(2)})()
    ),
    "validation_step but no val dataloader": lambda: fit(loaders={"train_dataloaders": batches(2)}),
    "2 val loaders, validation_step without dataloader_idx": lambda: fit(val=[batches(1), batches(1)]),
    "module forgot super().__init__()": lambda: fit(Model()),
    "training_step returns a detached tensor": fit_returning(jax.lax.stop_gradient),
}


@pytest.mark.parametrize("name", [name for name, reason in EXEMPT.items() if reason.startswith("legal")])
def test_what_is_legal_here_trains(name: str) -> None:
    LEGAL[name]()
    assert ended == [0, 1]


PYTHON: dict[str, tuple[Build, str]] = {
    "EarlyStopping() without monitor": (lambda: jl.callbacks.EarlyStopping(), "monitor"),
}


@pytest.mark.parametrize("name", [name for name, reason in EXEMPT.items() if "Python's TypeError" in reason])
def test_what_python_refuses_is_refused_by_name(name: str) -> None:
    build, argument = PYTHON[name]
    with pytest.raises(TypeError, match=f"'{argument}'"):
        build()
    assert not ended


def test_the_error_of_a_loader_comes_through() -> None:
    def broken() -> Iterator[Any]:
        yield from batches(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        fit(train=broken())
