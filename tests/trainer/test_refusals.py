"""A mistake in the use of the Trainer is refused before a step is trained, by its name, its value and what to do.

`data/misuse.json` holds the mistakes that were tried on Lightning; `data/misuse_exempt.json` those that are none here.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import Stream, numbered, random
from kit.journal import hooks
from kit.modules import Linear, Mean, module
from kit.refusals import fit_refuses, refuses
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.errors import (
    ArgumentError,
    ArgumentTypeError,
    CheckpointError,
    DataError,
    JaxlitError,
    LoggerError,
    ModuleError,
    NonFiniteError,
)

DATA = Path(__file__).parents[1] / "data"
MISUSE: list[str] = json.loads((DATA / "misuse.json").read_text())
EXEMPT: dict[str, str] = json.loads((DATA / "misuse_exempt.json").read_text())

EarlyStopping, ModelCheckpoint = jl.callbacks.EarlyStopping, jl.callbacks.ModelCheckpoint
ProgressBar = jl.callbacks.ProgressBar
SAME = jl.Callback()

Build = Callable[[], Any]

ONE_WAY = Stream(numbered(4))

# Arguments with a value out of their set: the name, what the message says beside the name and the value, the values.
NAN = float("nan")
PRECISIONS = "'32-true'.*'bf16-mixed'.*'bf16-true'.*'16-mixed'"
VALUES: list[tuple[Any, ...]] = [
    ("max_epochs", "at least 0", -2),
    ("max_steps", "at least -1", -2),
    ("min_epochs", "at least 0", -1),
    ("min_steps", "at least 0", -1),
    ("max_time", "DD:HH:MM:SS|timedelta", "abc", {"days": 10**12}, {"seconds": NAN}),
    ("max_time", "timedelta", {"second": 5}, "999999999999:00:00:00"),
    ("limit_train_batches", "at least 0", -1),
    ("limit_val_batches", "from 0.0 to 1.0", 1.5),
    ("limit_test_batches", "from 0.0 to 1.0", NAN),
    ("overfit_batches", "at least 0", -1),
    ("overfit_batches", "from 0.0 to 1.0", 1.5),
    ("fast_dev_run", "at least 0", -1),
    ("accumulate_grad_batches", "at least 1", 0),
    ("num_sanity_val_steps", "at least -1", -2),
    ("log_every_n_steps", "at least 0", -1),
    ("val_check_interval", "at least 1", 0),
    ("val_check_interval", "float|DD:HH", 1.5, "0.5"),
    ("check_val_every_n_epoch", "at least 1", 0),
    ("reload_dataloaders_every_n_epochs", "at least 0", -1),
    ("reload_dataloaders_every_n_epochs", "datamodule|DataModule|hook", 1),
    ("gradient_clip_val", "least 0|above 0|posit", -1),
    ("gradient_clip_algorithm", "gradient_clip_val", "value"),
    ("precision", PRECISIONS, "fp8-mixed", "float32", "bf16_mixed", 16, None),
    ("nan_policy", "'raise'.*'skip'.*'ignore'", "foo"),
    ("max_in_flight", "at least 1", 0),
    ("resume", r"'auto'.*ckpt_path='last'", "last"),
    ("resume", "default_root_dir", "auto"),
    ("strategy", "Known: auto, single, ddp, fsdp", "abc"),
    ("strategy", r"Did you mean 'fsdp'\?.*Known:", "fspd"),
    ("strategy", "after the colon comes an int", "simulate:x"),
    ("strategy", "takes no number", "ddp:4"),
    ("devices", "at least 1", -3, 0),
    ("devices", "strategy='single'.*strategy='ddp'", 2),
    ("callbacks", "the same Callback object twice", [SAME, SAME]),
]
# Of a wrong type, or of no name that there is.
INT, NUMBER = r"\bint\b", "number|float"
TYPES: list[tuple[Any, ...]] = [
    ("max_epochs", INT, "3", 1.5, True),
    ("max_steps", INT, None),
    ("min_epochs", INT, "2"),
    ("max_time", "timedelta", 5),
    ("limit_val_batches", rf"{INT}.*float", "x", True),
    ("overfit_batches", rf"{INT}.*float", True),
    ("fast_dev_run", "True|int", "yes"),
    ("accumulate_grad_batches", INT, 0.5, {4: 2}),
    ("val_check_interval", INT, True),
    ("check_val_every_n_epoch", INT, 0.5, "1", True),
    ("gradient_clip_val", NUMBER, "1", True),
    ("debug", "True or False", "yes"),
    ("enable_progress_bar", "True or False", "no"),
    ("seed", INT, "abc"),
    ("default_root_dir", "a path", 3),
    ("resume", "'auto', a path or None", 3),
    ("strategy", r"a name or a jaxlit\.Strategy", None, 3),
    ("devices", INT, "abc", [0, 1]),
    ("callbacks", "list", "EarlyStopping"),
    ("logger", "callbacks|WandbLogger", "wandb"),
    ("logger", "False", None),
    *(("no argument", "", x) for x in ("foo", "accelerator", "profiler", "barebones", "deterministic", "num_nodes")),
    ("no argument", r"Did you mean 'max_epochs'", "max_epoch"),
]
# Several that do not fit each other, or a value whose repr is not in the message.
SEVERAL: list[tuple[type[JaxlitError], dict[str, Any], tuple[str, ...]]] = [
    (ArgumentError, {"max_epochs": None}, ("Trainer.fit has no limit", "max_epochs", "max_steps", "max_time")),
    (ArgumentError, {"min_epochs": 2, "max_epochs": 1}, (r"min_epochs\b.*\b2", r"max_epochs\b.*\b1")),
    (ArgumentError, {"min_steps": 5, "max_steps": 2}, (r"min_steps\b.*\b5", r"max_steps\b.*\b2")),
    (ArgumentError, {"max_time": datetime.timedelta(seconds=-1)}, ("max_time", "-1|negative", "positive|least")),
    *(
        (ArgumentError, {"overfit_batches": 2, name: x}, (f"overfit_batches=2, {name}={x}", f"Leave {name} out"))
        for name in ("limit_train_batches", "limit_val_batches")
        for x in (2, 0.5, 1, 0)
    ),
    (
        ArgumentError,
        {"check_val_every_n_epoch": None, "val_check_interval": 0.5},
        ("check_val_every_n_epoch=None", "val_check_interval=0.5", INT),
    ),
    (
        ArgumentError,
        {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "foo"},
        ("gradient_clip_algorithm", "'foo'", "'norm'", "'value'"),
    ),
    (ArgumentError, {"resume": "x", "fast_dev_run": 1}, ("resume='x', fast_dev_run=1", "Leave one")),
    (ArgumentError, {"strategy": "simulate:0"}, (r"replicas=...\) must be a positive int, got 0",)),
    (ArgumentError, {"strategy": "simulate:4", "devices": 2}, ("names two numbers of replicas",)),
    (ArgumentTypeError, {"strategy": jl.strategies.DDP}, ("strategy=DDP", "class", r"Pass DDP\(\)")),
    (
        ArgumentError,
        {"devices": 9, "strategy": "ddp"},
        (r"devices=9\) asks for more devices than the 8 cpu", "XLA_FLAGS"),
    ),
    (
        ArgumentTypeError,
        {"callbacks": ["EarlyStopping"]},
        ("callbacks", "jaxlit.Callback objects, got 'EarlyStopping'"),
    ),
    (ArgumentTypeError, {"callbacks": [EarlyStopping]}, ("callbacks", "class EarlyStopping", r"Pass EarlyStopping\(")),
    (ArgumentError, {"callbacks": [ProgressBar(), ProgressBar()]}, ("ProgressBar", "two|several", "one|Leave")),
    (
        ArgumentError,
        {"callbacks": [ProgressBar()], "enable_progress_bar": False},
        ("enable_progress_bar=False", "ProgressBar", "Leave one"),
    ),
    (ArgumentError, {"callbacks": [ModelCheckpoint(), ModelCheckpoint()]}, ("dirpath",)),
    (
        ArgumentError,
        {"callbacks": [ModelCheckpoint()], "enable_checkpointing": False},
        (r"enable_checkpointing=False\) with a ModelCheckpoint", "Leave one"),
    ),
]


def arguments() -> Iterator[Any]:
    for kind, table in ((ArgumentError, VALUES), (ArgumentTypeError, TYPES)):
        for name, words, *values in table:
            for x in values:
                given = {x: 1} if name == "no argument" else {name: x}
                shown = [words] if x == [SAME, SAME] else [rf"{re.escape(repr(x))}", words]
                yield pytest.param(kind, given, (name, *shown), id=re.sub(r" at 0x\w+", "", f"{name}={x!r}")[:60])
    yield from SEVERAL


@pytest.mark.parametrize(("kind", "given", "words"), [*arguments()])
def test_an_argument_of_the_trainer_is_refused_by_name_with_what_was_given_and_what_to_do(
    kind: type[JaxlitError], given: dict[str, Any], words: tuple[str, ...]
) -> None:
    fit_refuses(kind, *words, val=numbered(2), **given)


# What fit, validate and test are given ----------------------------------------------------------------------


class Bare(jl.TrainModule):
    """A module without a step."""

    __init__ = Mean.__init__


class Samples:
    """A map-style dataset of single samples, as one would give to a data loader."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if index >= 4:
            raise IndexError
        return {"x": np.ones(3, np.float32), "y": np.ones(1, np.float32)}


def data(**loaders: Any) -> jl.DataModule:
    return type("Data", (jl.DataModule,), {f"{k}_dataloader": lambda self, x=x: x for k, x in loaders.items()})()


COLUMNS = np.ones((8, 2), np.float32), np.ones(8, np.float32)
ENDLESS = grain.MapDataset.source(random(1)).repeat()
BOTH = {"datamodule": data(train=numbered(2))}
# The mistake's name if Lightning was tried with it, the error, the arguments of the fit, what the message matches.
FIT: list[tuple[str, type[JaxlitError], dict[str, Any], tuple[str, ...]]] = [
    ("fit(model class, not instance)", ArgumentTypeError, {"model": Mean}, ("class Mean", "instance", r"jl\.lazy")),
    ("", ArgumentTypeError, {"model": nnx.Linear(1, 1, rngs=nnx.Rngs(0))}, ("jaxlit.TrainModule as model", "Linear")),
    ("", ArgumentTypeError, {"model": {}}, ("takes a jaxlit.TrainModule as model, got dict",)),
    (
        "fit without training_step",
        ModuleError,
        {"model": Bare()},
        (r"Bare has no training_step\. Define training_step\(self, batch\)",),
    ),
    (
        "",
        ModuleError,
        {"model": type("NoOptimizer", (Bare,), {"training_step": Mean.training_step})()},
        (r"fit needs NoOptimizer\.configure_optimizers", "optax.adamw"),
    ),
    (
        "",
        ModuleError,
        {
            "model": type(
                "Only", (Bare,), {"training_step": Mean.training_step, "configure_optimizers": lambda s: SGD}
            )(),
            "val": numbered(1),
        },
        ("Only has no validation_step", "Define validation_step"),
    ),
    ("fit without train_dataloader", ArgumentError, {"loaders": {}}, ("train_dataloaders", "Pass a loader")),
    (
        "fit(train_dataloaders=None), datamodule w/o loader",
        ArgumentError,
        {"loaders": {"datamodule": data(val=numbered(2))}},
        ("train_dataloaders", "datamodule= with train_dataloader|OnlyVal"),
    ),
    *(
        ("", ArgumentError, {"loaders": {name: numbered(2)} | BOTH}, (name, "datamodule"))
        for name in ("train_dataloaders", "val_dataloaders")
    ),
    ("", ArgumentTypeError, {"loaders": {"datamodule": numbered(8)}}, ("datamodule", r"list|\[\{", "DataModule")),
    (
        "train dataloader is an int",
        ArgumentTypeError,
        {"train": 5},
        ("train_dataloaders", r"\bint\b.*\b5", "ArrayLoader"),
    ),
    ("", ArgumentTypeError, {"train": "data"}, ("train_dataloaders", "str 'data'", "ArrayLoader")),
    (
        "",
        ArgumentTypeError,
        {"train": np.ones((4, 3))},
        ("train_dataloaders", "ndarray", r"ArrayLoader\(arrays, batch_size\)"),
    ),
    ("", ArgumentTypeError, {"train": Stream}, ("train_dataloaders", "class Stream", "ArrayLoader")),
    *(
        (
            "",
            ArgumentTypeError,
            {"train": kind(COLUMNS)},
            (r"train_dataloaders.*float32\[8, 2\].*ArrayLoader\(\(x, y\)",),
        )
        for kind in (list, tuple)
    ),
    *(
        (
            "",
            ArgumentTypeError,
            {"val": [jl.ArrayLoader(numbered(1)[0], 2), bad]},
            (r"val_dataloaders=\.\.\.\)\[1\] is no loader",),
        )
        for bad in (5, None, "mnist")
    ),
    ("", DataError, {"train": []}, ("train_dataloaders", "no batch", "empty")),
    ("", DataError, {"train": [5, 6]}, ("no array with rows",)),
    ("", DataError, {"train": Samples()}, ("train_dataloaders", r"batch\['x'\].* 3.*batch\['y'\].* 1", "row")),
    ("", ArgumentError, {"val": ENDLESS}, ("val_dataloaders.*without end.*limit_val_batches",)),
    (
        "limit_train_batches=0.5 with IterableDataset",
        ArgumentError,
        {"train": ONE_WAY, "limit_train_batches": 0.5},
        ("limit_train_batches=0.5", "train_dataloaders", "has no length", "as an int"),
    ),
    (
        "limit_val_batches=0.01 of 3 batches (rounds to 0)",
        ArgumentError,
        {"val": numbered(3), "limit_val_batches": 0.01},
        ("limit_val_batches=0.01", "3 batches", "at least 0.33"),
    ),
    (
        "val_check_interval=100 > batches",
        ArgumentError,
        {"val": numbered(1), "val_check_interval": 100},
        ("val_check_interval=100", r"\b2\b", "check_val_every_n_epoch=None|at most 2|limit_val_batches"),
    ),
    (
        "",
        ArgumentError,
        {"train": ONE_WAY, "val": numbered(1), "val_check_interval": 0.5},
        ("val_check_interval=0.5", "no length", r"\bint\b"),
    ),
    *(
        (name, CheckpointError, {"ckpt_path": path}, words)
        for name, path, words in (
            (
                "fit(ckpt_path='missing.ckpt')",
                "missing.ckpt",
                (r"fit\(ckpt_path=\.\.\.\): 'missing.ckpt' is no checkpoint",),
            ),
            ("fit(ckpt_path='last') with none saved", "last", ("'last' was asked for",)),
        )
    ),
]


@pytest.mark.parametrize(("name", "kind", "given", "words"), FIT, ids=[row[0] or row[3][0] for row in FIT])
def test_what_fit_is_given_is_refused_before_training(
    name: str, kind: type[JaxlitError], given: dict[str, Any], words: tuple[str, ...]
) -> None:
    fit_refuses(kind, *words, **given)


def test_a_later_batch_of_another_structure_is_refused_by_its_leaf() -> None:
    batches = random(2)
    batches[1].pop("y")
    words = r"structure of the batch changed: missing batch\['y'\]"
    refuses(DataError, lambda: fit(Linear(), batches), words)


def test_two_writers_of_one_file_are_refused() -> None:
    added = module(configure_callbacks=lambda self: jl.callbacks.CSVLogger())
    fit_refuses(ArgumentError, r"two loggers that write to metrics\.csv", model=added)


# What configure_optimizers returns --------------------------------------------------------------------------

SGD = optax.sgd(0.1)
SCHEDULE = optax.constant_schedule(0.1)
RETURN = r"Made\.configure_optimizers must return an optax\.GradientTransformation or a jaxlit\.Optimizer, got"
ONE = r"configure_optimizers returned 2 optimizers; return one, joined by optax\.multi_transform"
LABELS = lambda params: jax.tree.map(lambda _: "b", params)  # noqa: E731
OPTIMIZERS: list[tuple[str, Any, tuple[str, ...]]] = [
    ("configure_optimizers returns 3", 3, (rf"{RETURN} 3", "adamw")),
    ("", None, (f"{RETURN} None", "adamw")),
    ("", "adam", (f"{RETURN} 'adam'",)),
    ("", optax.sgd, ("function sgd",)),
    ("", SCHEDULE, (f"{RETURN} <function",)),
    ("", jl.Optimizer("adam"), (r"must return an optax\.GradientTransformation",)),  # type: ignore[arg-type]
    ("configure_optimizers returns {} w/o optimizer", {}, (rf"{RETURN} \{{\}}", "adamw")),
    *(
        (name, {"optimizer": SGD, "lr_scheduler": entry}, (RETURN, "lr_scheduler", "adamw|schedule"))
        for name, entry in {
            "lr_scheduler dict without 'scheduler'": {"interval": "step"},
            "lr_scheduler dict unknown key": {"scheduler": SCHEDULE, "freq": 2},
            "ReduceLROnPlateau monitor missing metric": {
                "scheduler": optax.contrib.reduce_on_plateau(),
                "monitor": "nope",
            },
        }.items()
    ),
    ("lr_scheduler tied to another optimizer", ([SGD], [SCHEDULE]), ("configure_optimizers", r"\b2\b", "return one")),
    *(("", kind((SGD, SGD)), (ONE,)) for kind in (list, tuple)),
    ("", optax.lbfgs(), (r"Made\.configure_optimizers", "value_fn", "loop of your own")),
    *(
        ("", jl.Optimizer(SGD, wrt=wrt), (words, "wrt="))
        for wrt, words in (
            (nnx.BatchStat, "Made has no variable to train"),
            (nnx.PathContains("head"), "no variable to train"),
        )
    ),
    *(
        ("", tx, (r"Made\.configure_optimizers.*cannot be set up", "lambda params"))
        for tx in (
            optax.multi_transform({"a": SGD}, {"w": "a"}),
            optax.masked(SGD, {"w": True}),
            optax.multi_transform({"a": SGD}, LABELS),
        )
    ),
]


@pytest.mark.parametrize(
    ("name", "made", "words"), OPTIMIZERS, ids=[row[0] or str(i) for i, row in enumerate(OPTIMIZERS)]
)
def test_what_is_no_optimizer_is_refused(name: str, made: Any, words: tuple[str, ...]) -> None:
    model = module(configure_optimizers=lambda self: made)
    fit_refuses(ModuleError, *words, model=model)


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    def with_ids(self: Any) -> None:
        Mean.__init__(self)
        self.ids = nnx.Param(jnp.arange(3))

    bare = module(lambda self, batch: jnp.mean(batch["x"]), init=lambda self: None, tx=SGD)
    fit_refuses(ModuleError, "Made has no variable to train", "wrt=", model=bare)
    fit_refuses(ModuleError, "Made: ids is int32", "nnx.Variable", model=module(init=with_ids))


# The other verbs and classes --------------------------------------------------------------------------------


def inside_fit(verb: str, *arguments: Any) -> Build:
    nested = hooks(on_train_start=lambda trainer, module: getattr(trainer, verb)(*arguments))
    return lambda: fit(Mean(), numbered(2), None, nested)


NESTED = ("from a hook", "second Trainer")
CALLS: list[tuple[str, type[JaxlitError], Build, tuple[str, ...]]] = [
    (
        "test() without model",
        ArgumentError,
        lambda: make_trainer().test(),
        (r"Trainer\.test\(model", "no model", "Pass one"),
    ),
    (
        "test() without test_dataloader",
        ArgumentError,
        lambda: make_trainer().test(Mean()),
        (r"Trainer\.test", "loader|test_dataloader", "Pass"),
    ),
    ("trainer.validate inside fit", ArgumentError, inside_fit("validate"), (r"Trainer\.validate", *NESTED)),
    ("", ArgumentError, inside_fit("validate", Mean(), numbered(1)), (r"Trainer\.validate", *NESTED)),
    ("", ArgumentError, inside_fit("fit", Mean(), numbered(1)), (r"Trainer\.fit", *NESTED)),
    (
        "test(ckpt_path='best') with no checkpointing",
        CheckpointError,
        lambda: make_trainer(enable_checkpointing=False).test(Mean(), numbered(1), ckpt_path="best"),
        (r"test\(ckpt_path=\.\.\.\): 'best' was asked for", "no checkpoint in"),
    ),
    (
        "load_from_checkpoint(missing)",
        CheckpointError,
        lambda: Mean.load_from_checkpoint("x"),
        ("'x' is no checkpoint",),
    ),
    (
        "load_from_checkpoint on instance",
        ModuleError,
        lambda: Mean().load_from_checkpoint("gone"),
        ("Call it on the class", "Mean"),
    ),
    (
        "EarlyStopping(mode='abc')",
        ArgumentError,
        lambda: EarlyStopping("val", mode="abc"),
        ("EarlyStopping", "mode", "'abc'", "'min' or 'max'"),
    ),
    ("", ArgumentError, lambda: EarlyStopping("val", patience=-1), ("EarlyStopping", "patience", "-1", "at least 0")),
    ("", ArgumentError, lambda: EarlyStopping(3), ("EarlyStopping", "monitor", r"\b3\b", "name of")),  # type: ignore[arg-type]
    (
        "ModelCheckpoint(save_top_k=-2)",
        ArgumentError,
        lambda: ModelCheckpoint(save_top_k=-2),
        ("save_top_k", "at least -1", "got -2"),
    ),
    (
        "ModelCheckpoint(mode='abc')",
        ArgumentError,
        lambda: ModelCheckpoint(monitor="val", mode="abc"),
        ("mode", "'min' or 'max'"),
    ),
    (
        "",
        ArgumentError,
        lambda: jl.Optimizer(SGD, lr_schedule=0.1),  # type: ignore[arg-type]
        (r"lr_schedule=.*0\.1", "function of the step"),
    ),
    ("", ArgumentError, lambda: jl.Optimizer(SGD, wrt=3), (r"wrt=.*got 3\.", r"nnx\.Param")),
    # What only training can show.
    (
        "NaN loss",
        NonFiniteError,
        lambda: fit(module(lambda self, batch: jnp.mean(self.error(batch)) * jnp.nan), numbered(2)),
        ("NaN", "step 0", "nan_policy='skip'"),
    ),
    (
        "",
        LoggerError,
        lambda: fit(Mean(), numbered(2), numbered(2), EarlyStopping("vall")),
        ("EarlyStopping", "'vall'", "Did you mean 'val'", "Logged: loss, val"),
    ),
    (
        "ModelCheckpoint(monitor=missing)",
        LoggerError,
        lambda: fit(Mean(), numbered(2), numbered(2), ModelCheckpoint(monitor="vall")),
        ("ModelCheckpoint", "'vall'", "Did you mean 'val'"),
    ),
]


@pytest.mark.parametrize(("name", "kind", "call", "words"), CALLS, ids=[row[0] or row[3][0] for row in CALLS])
def test_other_mistakes_are_refused(name: str, kind: type[JaxlitError], call: Build, words: tuple[str, ...]) -> None:
    refuses(kind, call, *words)


def test_the_error_of_a_loader_comes_through() -> None:
    def broken() -> Iterator[Any]:
        yield from numbered(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        fit(Mean(), broken())


# What Lightning was tried with ------------------------------------------------------------------------------

# Whose names are not those of the rows above: arguments by themselves, and what is refused elsewhere.
OTHERS = {
    "Trainer(foo=1) unknown arg": "foo",
    "accelerator='abc'": "accelerator",
    "profiler='abc'": "profiler",
    "barebones=True + logger=True": "barebones",
    "deterministic='foo'": "deterministic",
    "min_epochs>max_epochs": "min_epochs",
    "accumulate_grad_batches={4:2} dict": "accumulate_grad_batches",
    "devices=[0,1] cpu": "devices",
    "callbacks=['EarlyStopping'] (string)": "callbacks",
    "check_val_every_n_epoch=None, val_check_interval=0.5": "check_val_every_n_epoch",
    "gradient_clip_algorithm='foo'": "gradient_clip_algorithm",
    "two progress bars": "callbacks",
    "two ModelCheckpoints same state_key": "callbacks",
    "ModelCheckpoint with enable_checkpointing=False": "enable_checkpointing",
    "training_step returns a str": "core/test_pure_module.py",
    "training_step returns a non-scalar": "core/test_pure_module.py",
    "training_step() takes no batch": "core/test_pure_module.py",
    "legacy training_epoch_end defined": "loop/test_hooks.py",
}


def test_each_mistake_that_lightning_was_tried_with_is_refused_or_exempt_for_a_reason() -> None:
    tables: tuple[Any, ...] = (FIT, OPTIMIZERS, CALLS)
    names = [row[0] for table in tables for row in table if row[0]]
    names += [f"{name}={x!r}" for table in (VALUES, TYPES) for name, _, *values in table for x in values]
    assert len(names) == len(set(names))
    assert set(MISUSE) - set(names) == OTHERS.keys() | EXEMPT.keys()
    assert all(reason.split(":")[0] for reason in EXEMPT.values())


@pytest.mark.parametrize("name", [name for name, reason in EXEMPT.items() if reason.startswith("there is no ")])
def test_an_exemption_holds_while_the_part_does_not_exist(name: str) -> None:
    part = EXEMPT[name].removeprefix("there is no ")
    places = (jl, jl.callbacks, jl.TrainModule, jl.Trainer)
    assert not any(hasattr(place, part.replace("manual optimization", "automatic_optimization")) for place in places)


LEGAL: dict[str, Callable[[], jl.Trainer]] = {
    "ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1)": lambda: fit(
        Mean(), numbered(2), None, ModelCheckpoint(every_n_train_steps=1, every_n_epochs=1)
    ),
    "strategy='fsdp' on cpu": lambda: fit(Mean(), numbered(2), strategy="fsdp"),
    "fit(datamodule as 2nd positional)": lambda: fit(Mean(), data(train=numbered(2))),
    "validation_step but no val dataloader": lambda: fit(Mean(), numbered(2)),
    "2 val loaders, validation_step without dataloader_idx": lambda: fit(
        Mean(), numbered(2), [numbered(1), numbered(1)]
    ),
    "module forgot super().__init__()": lambda: fit(Mean(), numbered(2)),
    "training_step returns a detached tensor": lambda: fit(
        module(lambda self, batch: jax.lax.stop_gradient(Mean.training_step(self, batch))), numbered(2)
    ),
}


@pytest.mark.parametrize("name", [name for name, reason in EXEMPT.items() if reason.startswith("legal")])
def test_what_is_legal_here_trains(name: str) -> None:
    assert LEGAL[name]().global_step == 2


def test_what_python_refuses_is_refused_by_name() -> None:
    assert [name for name, reason in EXEMPT.items() if "Python's TypeError" in reason] == [
        "EarlyStopping() without monitor"
    ]
    with pytest.raises(TypeError, match="'monitor'"):
        EarlyStopping()  # type: ignore[call-arg]
