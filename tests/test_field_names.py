"""Names of Lightning and others: they work, or say what takes their place."""

import copy
import functools
import json
import pickle
import re
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from kit.batches import random
from kit.modules import Linear
from kit.refusals import refuses
from kit.trainers import fit

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError
from jaxlit.field_names import ADVICE


class Printer(jl.callbacks.Logger):
    """Takes rows."""


OWNERS: dict[str, Any] = {
    "jl": jl,
    "jl.callbacks": jl.callbacks,
    "jl.strategies": jl.strategies,
    "TrainModule": Linear(),
    "DataModule": jl.DataModule(),
    "Logger": Printer(),
}
NAMES = [(owner, name) for owner in OWNERS for name in ADVICE[owner]]


@pytest.mark.parametrize(("owner", "name"), NAMES)
def test_a_name_of_the_field_says_what_takes_its_place(owner: str, name: str) -> None:
    with pytest.raises(AttributeError, match=rf" has no attribute '{name}'\. {re.escape(ADVICE[owner][name])}$"):
        getattr(OWNERS[owner], name)
    assert not hasattr(OWNERS[owner], name)


@pytest.mark.parametrize("name", ADVICE["Trainer argument"])
def test_an_argument_of_the_field_says_what_takes_its_place(name: str) -> None:
    advice = ADVICE["Trainer argument"][name]
    refuses(
        ArgumentTypeError, lambda: jl.Trainer(**{name: 1}), rf"Trainer has no argument '{name}'\. {re.escape(advice)}$"
    )


CLASSES = {
    "CSVLogger": jl.callbacks.CSVLogger,
    "JSONLLogger": jl.callbacks.JSONLLogger,
    "EarlyStopping": functools.partial(jl.callbacks.EarlyStopping, "loss"),
    "BackboneFreeze": jl.callbacks.BackboneFreeze,
    "ModelCheckpoint": jl.callbacks.ModelCheckpoint,
    "ArrayLoader": functools.partial(jl.ArrayLoader, jnp.ones(2), 1),
}
ARGUMENTS = [(name, argument) for name in CLASSES for argument in ADVICE[f"{name} argument"]]


@pytest.mark.parametrize(("name", "argument"), ARGUMENTS)
def test_an_argument_of_a_callback_or_loader_says_what_takes_its_place(name: str, argument: str) -> None:
    advice = re.escape(ADVICE[f"{name} argument"][argument])
    refuses(
        ArgumentTypeError, lambda: CLASSES[name](**{argument: 1}), rf"{name} has no argument '{argument}'\. {advice}$"
    )


def test_a_callback_refuses_an_argument_that_it_does_not_have() -> None:
    class Mine(jl.callbacks.CSVLogger):
        def __init__(self, folder: str = "x") -> None:
            super().__init__()

    class Plain(jl.Callback):
        """Takes nothing."""

    class Free(jl.Callback):
        def __init__(self, *given: Any, **named: Any) -> None:
            self.given = given, named

    refuses(
        ArgumentTypeError, lambda: cast(Any, Mine)(foldr=1), r"no argument 'foldr'. Did .* 'folder'\? It has folder.$"
    )
    refuses(
        ArgumentTypeError, lambda: cast(Any, Mine)(save_dir="x"), r"Mine has no argument 'save_dir'. The run's folder"
    )
    refuses(ArgumentTypeError, lambda: cast(Any, Plain)(rate=1), r"Plain has no argument 'rate'. It has none.$")
    refuses(ArgumentTypeError, lambda: cast(Any, Plain)(3), r"Plain takes no arguments, got 3. Define __init__")
    assert Free(1, rate=2).given == ((1,), {"rate": 2})
    assert copy.deepcopy(Free(3)).given == ((3,), {}) and isinstance(
        pickle.loads(pickle.dumps(jl.Callback())), jl.Callback
    )


@pytest.mark.parametrize("owner", ["jl", "jl.callbacks", "jl.strategies"])
def test_an_import_of_a_name_of_the_field_says_what_takes_its_place(owner: str) -> None:
    for name, advice in ADVICE[owner].items():
        with pytest.raises(ImportError, match=rf"^{owner} has no attribute '{name}'\. {re.escape(advice)}$"):
            exec(f"from {OWNERS[owner].__name__} import {name}")
        assert getattr(OWNERS[owner], name, None) is None  # as everywhere else, an AttributeError
    exec(f"from {OWNERS[owner].__name__} import *")


LIGHTNING = json.loads((Path(__file__).parent / "data" / "lightning_names.json").read_text())
ROOMS = [("callbacks", jl.callbacks), ("loggers", jl.callbacks), ("strategies", jl.strategies)]


@pytest.mark.parametrize(("room", "face"), ROOMS)
def test_every_name_of_lightnings_is_here_or_says_what_takes_its_place(room: str, face: Any) -> None:
    owner = {"loggers": "jl.callbacks"}.get(room, f"jl.{room}")
    known = {*face.__all__, *ADVICE[owner]}
    assert [name for name in LIGHTNING[room] if name not in known] == [] and len(LIGHTNING[room]) > 5
    assert {*face.__all__} & {*ADVICE[owner]} == set()


def test_what_an_advice_names_is_there() -> None:
    every = " ".join(advice for names in ADVICE.values() for advice in names.values())
    found = set(re.findall(r"\bjl\.[\w.]*\w", every))
    assert len(found) > 15
    for path in found:
        thing: Any = jl
        for part in path.split(".")[1:]:
            thing = getattr(thing, part)
    for name in set(re.findall(r"\btrainer\.(\w+)", every)):
        assert hasattr(jl.Trainer, name), name


def test_a_trainer_has_lightnings_names_or_says_what_takes_their_place() -> None:
    class Data(jl.DataModule):
        def train_dataloader(self) -> Any:
            return batches

        def val_dataloader(self) -> Any:
            return batches[:1]

    trainer, data, module, batches = jl.Trainer(max_epochs=1, strategy="single"), Data(), Linear(), random()
    for name, advice in ADVICE["Trainer"].items():
        with pytest.raises(AttributeError, match=rf"^Trainer has no attribute '{name}'\. {re.escape(advice)}$"):
            getattr(trainer, name)
    with pytest.raises(AttributeError, match=r"trainer\.state is there from fit on"):  # not the words of a missing name
        _ = trainer.state
    assert [trainer.model, trainer.datamodule, trainer.train_dataloader, trainer.val_dataloaders] == [
        None,
        None,
        None,
        [],
    ]
    trainer.fit(module, datamodule=data)
    assert trainer.model is module and trainer.datamodule is data
    assert trainer.train_dataloader is batches and len(trainer.val_dataloaders) == 1


def test_a_name_that_is_spelt_wrong_has_the_nearest_one() -> None:
    for thing, name, near in (
        (jl, "TrainModul", "TrainModule"),
        (jl.callbacks, "EarlyStoping", "EarlyStopping"),
        (jl.strategies, "FSPD", "FSDP"),
        (Linear(), "log_dicts", "log_dict"),
        (jl.DataModule(), "train_dataloaders", "train_dataloader"),
        (Printer(), "log_images", "log_image"),
    ):
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\. Did you mean '{near}'\?"):
            getattr(thing, name)
    with pytest.raises(AttributeError, match="Linear has no attribute 'quite_another'.$"):
        _ = Linear().quite_another


def test_what_a_property_raises_is_told_as_it_is() -> None:
    class Half(Linear):
        @property
        def width(self) -> int:
            return self.gone

    with pytest.raises(AttributeError, match="Half has no attribute 'gone'"):
        _ = Half().width
    with pytest.raises(AttributeError, match="is not attached to a Trainer"):
        _ = Half().logger


def test_callbacks_stand_beside_the_trainer_and_are_not_listed_twice() -> None:
    assert jl.EarlyStopping is jl.callbacks.EarlyStopping and jl.ModelCheckpoint is jl.callbacks.ModelCheckpoint
    assert "EarlyStopping" not in dir(jl)


class Port(Linear):
    """As a port of a Lightning module begins."""

    def __init__(self, lr: float = 0.1, width: int = 3, note: str = "x") -> None:
        super().__init__()
        self.save_hyperparameters("lr", {"extra": 2}, ignore=["note"])

    def forward(self, x: jax.Array) -> jax.Array:
        return 2 * Linear.__call__(self, x)

    __call__ = jl.TrainModule.__call__


def test_hyperparameters_are_attributes_and_those_that_were_chosen() -> None:
    module = Port(lr=0.5)
    assert module.hparams == {"lr": 0.5, "extra": 2} and module.hparams.lr == 0.5
    with pytest.raises(AttributeError, match=r"hparams has no 'width', and has \['lr', 'extra'\]"):
        _ = module.hparams.width
    assert Linear(3).hparams.features == 3

    class Ignores(Linear):
        def __init__(self, lr: float = 0.1, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters(ignore="width")

    assert Ignores().hparams == {"lr": 0.1}

    class Wrong(Linear):
        def __init__(self, **given: Any) -> None:
            super().__init__()
            self.save_hyperparameters(*given["args"])

    refuses(ArgumentError, lambda: Wrong(args=["width"]), r"Wrong\.save_hyperparameters names 'width', which is no arg")
    refuses(ArgumentTypeError, lambda: Wrong(args=[3]), "takes names of the constructor's arguments, and dicts, got 3")


def test_a_module_with_forward_is_called_and_trains() -> None:
    module, x = Port(), jnp.ones((2, 3))
    assert jnp.array_equal(module(x), 2 * Linear()(x))
    with pytest.raises(TypeError, match=r"Bare is not callable\. Define __call__\(self, \.\.\.\), or forward"):
        type("Bare", (jl.TrainModule,), {})()(x)
    trainer = fit(module, random(2), logger=Printer())
    assert trainer.global_step == 2 and isinstance(module.logger, Printer) and module.loggers == trainer.loggers
    assert module.kernel[...].dtype == nnx.state(module)["kernel"][...].dtype


@pytest.mark.parametrize(
    ("argument", "given", "taken"),
    [
        *[("precision", given, "16-mixed") for given in (16, "16", "16-mixed")],
        *[("precision", given, "32-true") for given in (32, "32")],
        ("precision", "bf16", "bf16-mixed"),
        *[("devices", given, "auto") for given in (-1, "-1", "auto")],
        ("devices", "2", 2),
    ],
)
def test_an_argument_may_be_said_as_in_lightning(argument: str, given: Any, taken: Any) -> None:
    trainer = jl.Trainer(max_epochs=1, logger=False, strategy="ddp", **{argument: given})
    assert getattr(trainer.settings, argument) == taken
