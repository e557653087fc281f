"""Names of Lightning and others: they work, or say what takes their place."""

import copy
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
from jaxlit.faces import _tables, advice
from jaxlit.values import DEFAULT


class Printer(jl.callbacks.Logger):
    """Takes rows."""


class Data(jl.DataModule):
    def __init__(self, batch_size: int = 2, folder: str = "x") -> None:
        self.save_hyperparameters(ignore="folder")


OWNERS: dict[str, Any] = {
    "jl": jl,
    "jl.callbacks": jl.callbacks,
    "jl.strategies": jl.strategies,
    "module": Linear(),
    "trainer": jl.Trainer(max_epochs=1, strategy="single", logger=False),
    "data": Data(),
    "logger": Printer(),
}
# By hand, of Lightning's, Keras' and flax' own lists: what an answer must name, or "works".
NAMES = json.loads((Path(__file__).parent / "data" / "lightning_names.json").read_text())


@pytest.mark.parametrize(
    ("owner", "name", "answer"), [(x, name, word) for x in OWNERS for name, word in NAMES[x].items()]
)
def test_a_name_of_the_field_works_or_says_what_takes_its_place(owner: str, name: str, answer: str) -> None:
    thing = OWNERS[owner]
    if answer == "works":
        assert hasattr(thing, name) or hasattr(type(thing), name)
        return
    with pytest.raises(AttributeError, match=rf" has no attribute '{name}'\. .*{re.escape(answer)}"):
        getattr(thing, name)
    assert not hasattr(thing, name)


@pytest.mark.parametrize(("call", "answer"), NAMES["call"].items())
def test_an_argument_of_the_field_works_or_names_ours(call: str, answer: str) -> None:
    run = lambda: eval(call, {"jl": jl} | OWNERS)  # noqa: E731
    if answer == "works":
        run()
    else:
        refuses((ArgumentError, ArgumentTypeError), run, re.escape(answer))


def test_class_methods_of_the_field_name_ours() -> None:
    words = r"jl\.loggers has no attribute 'CometLogger'\. Subclass jl\.callbacks\.Logger"
    refuses(AttributeError, lambda: jl.loggers.CometLogger, words)  # type: ignore[attr-defined]
    for name in ("optimizers", "fit_loop", "lr"):
        with pytest.raises(AttributeError, match=f"Trainer has no attribute '{name}', and would be set to 1"):
            setattr(OWNERS["trainer"], name, 1)


def test_no_advice_is_given_on_what_is_there() -> None:
    named = {"TrainModule": "module", "DataModule": "data", "Logger": "logger", "Trainer": "trainer"}
    owners = OWNERS | {name: OWNERS[owner] for name, owner in named.items()}
    there = [(owner, name) for owner in owners for name in advice(owner)]
    assert len(there) > 150 and not [x for x in there if hasattr(type(owners[x[0]]), x[1])]
    assert not [x for x in there if x[0].startswith("jl") and hasattr(owners[x[0]], x[1])]


def test_a_callback_refuses_an_argument_that_it_does_not_have() -> None:
    class Mine(jl.callbacks.CSVLogger):
        def __init__(self, folder: str = "x") -> None:
            super().__init__()

    class Free(jl.Callback):
        def __init__(self, *given: Any, **named: Any) -> None:
            self.given = given, named

    mine, plain = cast(Any, Mine), type("Plain", (jl.Callback,), {})
    for call, words in (
        (lambda: mine(foldr=1), r"no argument 'foldr'. Did .* 'folder'\? It has folder.$"),
        (lambda: mine(save_dir="x"), "Mine has no argument 'save_dir'. Rows are in the"),
        (lambda: plain(rate=1), "Plain has no argument 'rate'. It has none.$"),
        (lambda: plain(3), "Plain takes no arguments, got 3. Define __init__"),
    ):
        refuses(ArgumentTypeError, call, words)
    assert Free(1, rate=2).given == ((1,), {"rate": 2})
    assert copy.deepcopy(Free(3)).given == ((3,), {})
    assert isinstance(pickle.loads(pickle.dumps(jl.Callback())), jl.Callback)


@pytest.mark.parametrize("owner", ["jl", "jl.callbacks", "jl.strategies"])
def test_an_import_of_a_name_of_the_field_names_ours(owner: str) -> None:
    for name, answer in NAMES[owner].items():
        line = f"from {OWNERS[owner].__name__} import {name}"
        if answer == "works":
            exec(line)
        else:
            words = rf"^{owner}(\.callbacks)? has no attribute '{name}'\. .*{re.escape(answer)}"
            refuses(ImportError, lambda line=line: exec(line), words)
    exec(f"from {OWNERS[owner].__name__} import *")
    exec("from jaxlit.loggers import WandbLogger, TensorBoardLogger")


def test_what_an_advice_names_is_there() -> None:
    every = " ".join(text for table in _tables().values() for text in table.values())
    result = set(re.findall(r"\bjl\.[\w.]*\w", every))
    assert len(result) > 15
    for path in result:
        thing: Any = jl
        for part in path.split(".")[1:]:
            thing = getattr(thing, part)
    for name in set(re.findall(r"\btrainer\.(\w+)", every)):
        assert hasattr(jl.Trainer, name), name


def test_a_name_that_is_spelt_wrong_has_the_nearest_one() -> None:
    for thing, name, near in (
        (jl, "TrainModul", "TrainModule"),
        (jl.callbacks, "EarlyStoping", "EarlyStopping"),
        (jl.strategies, "FSPD", "FSDP"),
        (Linear(), "log_dicts", "log_dict"),
        (jl.DataModule(), "train_dataloaders", "train_dataloader"),
        (Printer(), "log_images", "log_image"),
        *((Linear(), "layers", None), (OWNERS["trainer"], "prints", None), (jl, "Modle", None)),  # none is like enough
    ):
        words = rf" has no attribute '{name}'\." + (rf" Did you mean '{near}'\?" if near else "$")
        refuses(AttributeError, lambda thing=thing, name=name: getattr(thing, name), words)


class Port(Linear):
    def __init__(self, lr: float = 0.1, width: int = 3, note: str = "x") -> None:
        super().__init__()
        self.save_hyperparameters("lr", {"extra": 2}, ignore=["note"])

    def forward(self, x: jax.Array) -> jax.Array:
        return 2 * Linear.__call__(self, x)

    __call__ = jl.TrainModule.__call__


class Based(jl.TrainModule):
    def __init__(self, lr: float = 0.1, depth: int = 2, **more: Any) -> None:
        self.save_hyperparameters()


class Narrow(Based):
    def __init__(self, width: int) -> None:
        super().__init__(lr=0.5, extra=1)
        self.hparams.note = "n"


class Wide(Based):
    def __init__(self, *args: Any, width: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Choosing(jl.TrainModule):
    def __init__(self, lr: float, depth: int = 2) -> None:
        self.save_hyperparameters("lr")


class Both(Choosing):
    def __init__(self, width: int, note: str = "x") -> None:
        self.save_hyperparameters(ignore="note")
        super().__init__(lr=0.5)


class Replaced(Based):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.hparams = {"width": width, "chosen": 3}


@pytest.mark.parametrize(
    ("module", "arguments", "added"),
    [
        (lambda: Narrow(3), {"width": 3}, {"lr": 0.5, "depth": 2, "extra": 1, "note": "n"}),
        (lambda: Wide(0.2, depth=5), {"lr": 0.2, "depth": 5, "width": 1}, {}),
        (lambda: Both(3), {"width": 3}, {"lr": 0.5}),
        (lambda: Replaced(4), {"width": 4}, {"chosen": 3}),
        (lambda: Data(4), {"batch_size": 4}, {}),
    ],
)
def test_hyperparameters_of_a_base_class_are_kept(module: Any, arguments: dict[str, Any], added: Any) -> None:
    assert module().hparams == arguments | added
    given, more = module().hparams.saved()
    assert {name: value for name, value in given.items() if value != DEFAULT} == arguments
    assert more == added


def test_a_module_with_forward_is_called_and_trains() -> None:
    module, x = Port(), jnp.ones((2, 3))
    assert jnp.array_equal(module(x), 2 * Linear()(x))
    with pytest.raises(TypeError, match=r"Bare is not callable\. Define __call__\(self, \.\.\.\), or forward"):
        type("Bare", (jl.TrainModule,), {})()(x)
    trainer = fit(module, random(2), logger=Printer())
    assert trainer.global_step == 2 and isinstance(module.logger, Printer) and module.loggers == trainer.loggers
    assert module.kernel[...].dtype == nnx.state(module)["kernel"][...].dtype


@pytest.mark.parametrize(
    ("argument", "taken", "given"),
    [
        ("precision", "16-mixed", (16, "16", "16-mixed")),
        ("precision", "32-true", (32, "32")),
        ("precision", "bf16-mixed", ("bf16",)),
        ("devices", "auto", (-1, "-1", "auto")),
        ("devices", 2, ("2",)),
    ],
)
def test_an_argument_may_be_said_as_in_lightning(argument: str, taken: Any, given: tuple[Any, ...]) -> None:
    for value in given:
        trainer = jl.Trainer(max_epochs=1, logger=False, strategy="ddp", **{argument: value})
        assert getattr(trainer.settings, argument) == taken, value
