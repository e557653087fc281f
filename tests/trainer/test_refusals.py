"""A mistake in the use of the Trainer is refused before a step is trained, by its name, its value and what to do."""

import datetime
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from kit.batches import numbered
from kit.journal import hooks
from kit.modules import Mean, module
from kit.refusals import fit_refuses, refuses
from kit.trainers import fit, make_trainer

import jaxlit as jl
from jaxlit.callbacks import EarlyStopping, ModelCheckpoint, ProgressBar
from jaxlit.errors import ArgumentError as Arg
from jaxlit.errors import ArgumentTypeError as Type
from jaxlit.errors import CheckpointError, LoggerError, ModuleError, NonFiniteError

SAME = jl.Callback()

# Arguments with a value out of their set: the name, what the message says beside the name and the value, the values.
NAN = float("nan")
PRECISIONS = "'32-true'.*'bf16-mixed'.*'bf16-true'.*'16-mixed'"
VALUES: list[tuple[Any, ...]] = [
    ("max_epochs", "at least 0", -2),
    ("min_steps", "at least 0", -1),
    ("max_time", "DD:HH:MM:SS|timedelta", "abc", {"days": 10**12}, {"seconds": NAN}),
    ("limit_val_batches", "from 0.0 to 1.0", 1.5),
    ("accumulate_grad_batches", "at least 1", 0),
    ("log_every_n_steps", "at least 0", -1),
    ("val_check_interval", "at least 1", 0),
    ("val_check_interval", "float|DD:HH", 1.5, "0.5"),
    ("reload_dataloaders_every_n_epochs", "datamodule|DataModule|hook", 1),
    ("gradient_clip_val", "least 0|above 0|posit", -1),
    ("gradient_clip_algorithm", "gradient_clip_val", "value"),
    ("precision", PRECISIONS, "fp8-mixed", "float32", "bf16_mixed", 64, True, None),
    ("nan_policy", "'raise'.*'skip'.*'ignore'", "foo"),
    ("max_in_flight", "at least 1", 0),
    *((name, "at least 0", -1) for name in ("prefetch", "max_recompiles")),
    *((name, "above 0", 0, -1.0, float("inf"), NAN) for name in ("data_timeout", "hang_timeout")),
    ("resume", "default_root_dir", "auto"),
    ("strategy", "Known: auto, single, ddp, fsdp", "abc"),
    ("strategy", r"Did you mean 'fsdp'\?.*Known:", "fspd"),
    ("devices", "at least 1", -3, 0),
    ("devices", "strategy='single'.*strategy='ddp'", 2),
    ("callbacks", "the same Callback object twice", [SAME, SAME]),
]
# Of a wrong type, or of no name that there is.
INT, NUMBER = r"\bint\b", "number|float"
TYPES: list[tuple[Any, ...]] = [
    ("max_epochs", INT, "3", 1.5, True),
    ("max_time", "timedelta", 5),
    ("limit_val_batches", rf"{INT}.*float", "x", True),
    ("log_every_n_steps", "takes an int of at least 0 or 'auto', got 'Auto'", "Auto"),
    ("accumulate_grad_batches", INT, 0.5, {4: 2}),
    ("gradient_clip_val", NUMBER, "1", True),
    ("debug", "True or False", "yes"),
    ("prefetch", INT, "no", None, 1.5, True, [2]),
    ("max_recompiles", INT, "3", 1.5, True),
    *((name, "seconds|DD:HH", "60", True) for name in ("data_timeout", "hang_timeout")),
    ("resume", "'auto'.* a path", 3),
    ("default_root_dir", "a path, a URL or None", 3),
    ("strategy", r"a name or a jaxlit\.Strategy", None, 3),
    ("mesh", "jax.sharding.Mesh or the sizes", 1, "data"),
    ("devices", INT, "abc", [0, 1]),
    ("callbacks", "list", "EarlyStopping"),
    ("logger", "callbacks|WandbLogger", "wandb"),
    ("logger", "False", None),
    *(("no argument", "", x) for x in ("foo", "accelerator", "profiler", "barebones", "deterministic", "num_nodes")),
    ("no argument", r"Did you mean 'max_epochs'", "max_epoch"),
]
# Several that do not fit each other, or a value whose repr is not in the message.
SEVERAL: list[tuple[Any, ...]] = [
    (Arg, {"max_epochs": None}, "Trainer.fit has no limit.*max_epochs.*max_steps.*max_time"),
    (Arg, {"max_time": datetime.timedelta(seconds=-1)}, "max_time", "-1|negative", "positive|least"),
    (Arg, {"check_val_every_n_epoch": None, "val_check_interval": 0.5}, "every_n_epoch=None.*val_check_interval=0.5"),
    (Arg, {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "foo"}, "gradient_clip_algorithm", "'foo'", "'norm'"),
    (Arg, {"resume": "x", "fast_dev_run": 1}, "resume='x', fast_dev_run=1", "Leave one"),
    (Type, {"strategy": jl.strategies.DDP}, "strategy=DDP", "class", r"Pass DDP\(\)"),
    (Arg, {"devices": 9, "strategy": "ddp"}, r"devices=9\) asks for more devices than the 8 cpu", "XLA_FLAGS"),
    (Type, {"callbacks": [EarlyStopping]}, "callbacks", "class .*EarlyStopping", r"Pass EarlyStopping\("),
    (Arg, {"callbacks": [ProgressBar(), ProgressBar()]}, "ProgressBar", "two|several", "one|Leave"),
    (Arg, {"callbacks": [ProgressBar()], "enable_progress_bar": False}, "bar=False.*ProgressBar.*Leave one"),
    (Arg, {"callbacks": [ModelCheckpoint(), ModelCheckpoint()]}, "of one folder.*dirpath"),
    (Arg, {"callbacks": [ModelCheckpoint()], "enable_checkpointing": False}, r"=False\) with a ModelCheckpoint.*Leave"),
]


def arguments() -> Iterator[Any]:
    for kind, table in ((Arg, VALUES), (Type, TYPES)):
        for name, words, *values in table:
            for x in values:
                given = {x: 1} if name == "no argument" else {name: x}
                shown = [words] if x == [SAME, SAME] else [rf"{re.escape(repr(x))}", words]
                yield pytest.param(kind, given, (name, *shown), id=re.sub(r" at 0x\w+", "", f"{name}={x!r}")[:60])
    for kind, given, *several in SEVERAL:
        yield kind, given, several


@pytest.mark.parametrize(("kind", "given", "words"), [*arguments()])
def test_a_wrong_argument_is_refused_in_three_parts(kind, given, words) -> None:
    fit_refuses(kind, *words, val=numbered(2), **given)


class Bare(jl.TrainModule):
    __init__ = Mean.__init__


SGD = optax.sgd(0.1)
WITH_STEP = type("WithStep", (Bare,), {"training_step": Mean.training_step})
TRAINS = type("Trains", (WITH_STEP,), {"configure_optimizers": lambda self: SGD})
# The error, the arguments of the fit, what the message matches. Loaders are in tests/data/test_loaders.py.
FIT: list[tuple[Any, ...]] = [
    (Type, {"model": Mean}, r"class .*Mean", "instance", r"jl\.lazy"),
    (Type, {"model": nnx.BatchNorm(1, rngs=nnx.Rngs(0))}, "Subclass jl.TrainModule in place of nnx.Module"),
    (ModuleError, {"model": Bare()}, r"Bare has no training_step\. Define training_step"),
    (ModuleError, {"model": WITH_STEP()}, r"fit needs WithStep\.configure_optimizers", "optax.adamw"),
    (ModuleError, {"model": TRAINS(), "val": numbered(1)}, "Trains has no validation_step", "Define validation_step"),
    (
        *(Arg, {"val": numbered(1), "val_check_interval": 100}),
        *("val_check_interval=100", r"\b2\b", "check_val_every_n_epoch=None|at most 2|limit_val_batches"),
    ),
]


@pytest.mark.parametrize("row", FIT)
def test_what_fit_is_given_is_refused_before_training(row) -> None:
    kind, given, *words = row
    fit_refuses(kind, *words, **given)


SCHEDULE = optax.constant_schedule(0.1)
RETURN = r"Made\.configure_optimizers must return an optax\.GradientTransformation or a jaxlit\.Optimizer, got"
IN_STEPS = r"schedule inside.*docs/schedules\.md.*a milestone in epochs becomes epochs times the steps of an epoch\.$"
ONE = r"one transform for each group of parameters, jl\.Optimizer\(by=\{'"
# What configure_optimizers returns, and what the message matches.
OPTIMIZERS: list[tuple[Any, ...]] = [
    (3, rf"{RETURN} 3", "adamw"),
    (optax.sgd, "function sgd"),
    (nnx.Optimizer(Mean(), SGD, wrt=nnx.Param), rf"^{RETURN} Optimizer.*\. Return its tx: [^\n]{{,80}}$"),
    ({}, rf"{RETURN} {{}}", "adamw"),
    ({"a": SGD, "b": SGD}, ONE),
    ({"optimizer": SGD, "lr_scheduler": {"interval": "step"}}, RETURN, IN_STEPS),
    (([SGD], [SCHEDULE]), "configure_optimizers", "Return one"),
    ([[SGD], [{"scheduler": SCHEDULE, "interval": "epoch"}]], IN_STEPS),
    ([SGD, SGD], ONE),
    (optax.lbfgs(), r"Made\.configure_optimizers", "value_fn", "loop of your own"),
    (optax.contrib.sam(SGD, SGD, opaque_mode=True), r"Made\.configure_optimizers", "grad_fn", "loop of your own"),
    (optax.chain(optax.contrib.sam(SGD, SGD), optax.polyak_sgd()), "'value'"),
    (jl.Optimizer(SGD, wrt=nnx.BatchStat), "Made has no variable to train", "wrt="),
    (optax.multi_transform({"a": SGD}, {"w": "a"}), r"Made\.configure_optimizers.*cannot be set up.*lambda params"),
]


@pytest.mark.parametrize("row", OPTIMIZERS)
def test_what_is_no_optimizer_is_refused(row) -> None:
    made, *words = row
    fit_refuses(ModuleError, *words, model=module(configure_optimizers=lambda self: made))


BOXES: dict[str, Callable[[Any], Any]] = {"dict": lambda x: {"a": x}, "list": lambda x: [x], "tuple": lambda x: (x,)}


class Boxed(Mean):
    def __init__(self, box: str) -> None:
        super().__init__()
        self.part = nnx.Dict()
        self.part.held = nnx.data(BOXES[box](jnp.ones(2)))


@pytest.mark.parametrize("box", BOXES)
def test_an_array_in_a_plain_container_is_state_everywhere(box) -> None:
    auto, single = make_trainer(strategy=jl.strategies.Auto(2**30)), make_trainer(strategy="single")
    for call in (
        lambda: fit(Boxed(box), numbered(1)),
        lambda: fit(jl.lazy(Boxed, box), numbered(1)),
        lambda: auto.fit(Boxed(box), numbered(1)),
        lambda: single.validate(Boxed(box), numbered(1)),
        lambda: single.plan(Boxed(box), numbered(1)),
        lambda: jl.scale_batch_size(single, Boxed(box), numbered(1), memory_bytes=2**20),
        lambda: jl.fit_many(Boxed, [{"box": box}], numbered(1), max_epochs=1),
        lambda: jl.compile_step(Boxed(box), batch=numbered(1)[0]),
    ):
        call()


def test_so_is_one_that_setup_adds() -> None:
    add = hooks(setup=lambda trainer, model, stage: setattr(model, "held", nnx.data([jnp.ones(1)])))
    trainer = fit(Mean(), numbered(2), None, add)
    assert trainer.state.model_state["held"][0].shape == (1,)


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    def with_ids(self: Any) -> None:
        Mean.__init__(self)
        self.ids = nnx.Param(jnp.arange(3))

    empty = module(lambda self, batch: jnp.mean(batch["x"]), init=lambda self: None, tx=SGD)
    fit_refuses(ModuleError, r"Made has no variable to train\. Give", "wrt=", model=empty)
    held = module(init=lambda self: setattr(self, "net", linen.Dense(1)))
    fit_refuses(ModuleError, "no variable to train; net is a linen module", r"nnx\.bridge\.ToNNX\(", model=held)
    fit_refuses(ModuleError, "Made: ids is int32", "nnx.Variable", model=module(init=with_ids))
    added = module(configure_callbacks=lambda self: jl.callbacks.CSVLogger())
    fit_refuses(Arg, r"two loggers that write to metrics\.csv", model=added)


NAN_LOSS = module(lambda self, batch: jnp.mean(self.error(batch)) * jnp.nan)
CALLS: list[tuple[Any, ...]] = [
    (Arg, lambda: make_trainer().test(), r"Trainer\.test\(model", "no model", "Pass one"),
    (Arg, lambda: make_trainer().test(Mean()), r"Trainer\.test", "loader", "Pass"),
    (
        CheckpointError,
        lambda: make_trainer(enable_checkpointing=False).test(Mean(), numbered(1), ckpt_path="best"),
        *(r"test\(ckpt_path=\.\.\.\): 'best' was asked for", "no checkpoint in"),
    ),
    (ModuleError, lambda: Mean().load_from_checkpoint("gone"), "Call it on the class", "Mean"),
    (Arg, lambda: jl.Optimizer(SGD, lr_schedule=0.1), r"lr_schedule=.*0\.1", "function of the step"),
    (Type, lambda: jl.Optimizer("adam"), r"takes an optax\.GradientTransformation, got 'adam'", "adamw"),
    (Type, lambda: jl.Optimizer(optax.sgd), r"got <function sgd.*Pass what .*adamw\(1e-3\)"),
    (Type, lambda: jl.Optimizer(SGD, lr=0.1), r"Optimizer has no argument 'lr'\. Pass it to the optimizer"),  # type: ignore[call-arg]
    (Type, lambda: jl.Trainer(max_epochs=np.ones((2, 3))), r"max_epochs.*got float64\[2, 3\]\."),
    (NonFiniteError, lambda: fit(NAN_LOSS, numbered(2)), "NaN", "step 0", "nan_policy='skip'"),
    (
        *(LoggerError, lambda: fit(Mean(), numbered(2), numbered(2), EarlyStopping("vall"))),
        "EarlyStopping.*'vall'.*Did you mean 'val'.*Logged: loss, val",
    ),
]


@pytest.mark.parametrize("row", CALLS)
def test_other_mistakes_are_refused(row) -> None:
    kind, call, *words = row
    refuses(kind, call, *words)
