"""The module beside its steps: hyperparameters, counters, its Trainer."""

import argparse
import copy
import dataclasses
import pickle
import threading
import tracemalloc
from collections import UserDict, UserList
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import numbered
from kit.by_hand import mean
from kit.journal import hooks
from kit.modules import Linear, Mean
from kit.refusals import refuses
from kit.trainers import BARE, fit, make_trainer

import jaxlit as jl
from jaxlit.errors import ArgumentTypeError


class Configured(Linear):
    def __init__(self, width: int, rate: float = 0.5, *, names: Any = ("a", "b"), fn=jnp.tanh, **more: Any) -> None:
        super().__init__()


def test_hyperparameters_are_what_can_be_saved_with_defaults() -> None:
    module = Configured(8, names=["c"], rngs=nnx.Rngs(0), table=np.ones(2), extra=None)
    assert module.hparams == {"width": 8, "rate": 0.5, "names": ["c"], "fn": jnp.tanh, "extra": None}
    module.hparams["width"] = 9
    module.hparams.rate = 0.25
    assert (module.hparams.width, module.hparams["rate"]) == (9, 0.25)


def test_loggers_see_hyperparameters_by_name() -> None:
    result = Configured(8, names=("a", np.float32), fn=lambda x: x, table=np.ones(2)).hparams.readable()
    assert result == {"width": 8, "rate": 0.5, "names": ["a", "numpy.float32"], "table": "float64[2]"} | {
        "fn": f"<function {test_loggers_see_hyperparameters_by_name.__name__}.<locals>.<lambda>>"
    }


def test_hyperparameters_come_from_a_command_line() -> None:
    module = Configured(8)
    module.save_hyperparameters(argparse.Namespace(depth=3, path=Path("x")))
    assert module.hparams.depth == 3 and "path" not in module.hparams
    refuses(ArgumentTypeError, lambda: module.save_hyperparameters(logger=False), "'logger'", "leave it out")


@dataclasses.dataclass
class Config:
    lr: float = 0.1
    layers: list[int] = dataclasses.field(default_factory=lambda: [1, 2])


class Built(Mean):
    """Keeps nothing but its hyperparameters of what it is given, and changes what it is given."""

    def __init__(self, lr: float = 0.5, config: Any = None, layers: Any = (), act: Any = None) -> None:
        super().__init__()
        if config:
            config.lr = 0.0
            layers.pop()

    def validation_step(self, batch: Any) -> None:
        self.log("lr", jnp.float32(self.hparams.lr))


class Numbers(jl.DataModule):
    def __init__(self, lr: float = 0.5, config: Any = None, layers: Any = (), act: Any = None) -> None: ...


CALLED = {"lr": 0.05, "config": Config(), "layers": [{"width": [3]}, 4], "act": jax.nn.gelu}
COPIES: dict[str, Any] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "cloudpickle": lambda x: cloudpickle.loads(cloudpickle.dumps(x)),
    "nnx.clone": nnx.clone,
    "nnx.merge": lambda x: nnx.merge(*nnx.split(x)),
    "jax.tree.map": lambda x: jax.tree.map(lambda leaf: leaf, x),
    "nnx.jit": lambda x: nnx.jit(lambda: type(x)(**copy.deepcopy(CALLED)))(),
}


@pytest.mark.parametrize(
    ("cls", "name"), [*((Built, name) for name in COPIES), *((Numbers, name) for name in list(COPIES)[:3])]
)
def test_hyperparameters_travel_with_a_copy_that_may_change_them(cls: Any, name: str) -> None:
    made = cls(**copy.deepcopy(CALLED))
    copied = COPIES[name](made)
    assert copied.hparams == CALLED
    assert copied.hparams.saved() == made.hparams.saved()
    copied.hparams.lr = 1.0
    copied.hparams.config.layers.append(3)
    copied.hparams.layers[0]["width"].append(4)
    assert made.hparams == CALLED


@pytest.mark.parametrize("cls", [Built, Numbers])
def test_a_shallow_copy_has_hyperparameters_of_its_own(cls: Any) -> None:
    made = cls(**copy.deepcopy(CALLED))
    copied = copy.copy(made)
    assert copied.hparams == CALLED
    assert vars(copied).keys() == vars(made).keys()
    copied.hparams.lr = 1.0
    assert made.hparams == CALLED


def test_an_attribute_of_the_users_may_have_any_name() -> None:
    class Config(dict):  # a usual recipe, which raises a KeyError for any other name
        __getattr__ = dict.__getitem__

    class Own(Mean):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self._hparams = config

    made = Own(Config(lr=0.5))
    assert made._hparams.lr == 0.5
    fit(made, numbered(1))


def test_what_a_constructor_changes_stays_as_it_was_called() -> None:
    given = copy.deepcopy(CALLED)
    trainer = fit(made := Built(**given), numbered(1))
    given["config"].layers.append(5)
    given["layers"][0]["width"].append(6)
    assert made.hparams == CALLED
    trainer.save_checkpoint("saved")
    assert Built.load_from_checkpoint("saved").hparams == CALLED


def test_what_a_base_class_saves_is_as_it_was_called() -> None:
    class Base(Mean):
        def __init__(self, options: dict[str, int]) -> None:
            super().__init__()
            options.pop("depth")
            self.save_hyperparameters()

    class Derived(Base):
        def __init__(self, lr: float = 0.1) -> None:
            super().__init__({"depth": 3})

    assert Derived().hparams == {"lr": 0.1, "options": {"depth": 3}}


def test_saved_mappings_and_sequences_become_dicts_and_lists() -> None:
    config = UserDict({"layers": UserList([1, UserDict({"width": 2})]), "betas": (0.9, 0.99)})
    module = Configured(8)
    module.save_hyperparameters(config)
    added = {"layers": [1, {"width": 2}], "betas": (0.9, 0.99)}
    assert module.hparams == {"width": 8, "rate": 0.5, "names": ("a", "b"), "fn": jnp.tanh} | added


def test_a_constructor_does_not_copy_what_is_not_saved() -> None:
    table, layer = np.ones(1_000_000), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    Built(act=table)  # what a first call makes
    tracemalloc.start()
    module = Built(act=table)
    nested = Built(act=[table, layer, threading.Lock()])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000  # bytes: an eighth of the table
    assert module.hparams == nested.hparams == {"lr": 0.5, "config": None, "layers": ()}


def test_a_compiled_function_follows_the_hyperparameters() -> None:
    traces = list[float]()

    @nnx.jit
    def rate(module: Any) -> jax.Array:
        traces.append(module.hparams.lr)
        return jnp.float32(module.hparams.lr)

    modules = [Built(1.0), Built(2.0), Built(1.0)]
    assert [float(rate(module)) for module in modules] == [1.0, 2.0, 1.0]
    assert traces == [1.0, 2.0]  # the third has an equal graph
    assert len({nnx.graphdef(module) for module in modules}) == 2


def test_an_evaluation_sees_a_hyperparameter_that_was_set() -> None:
    trainer, module = make_trainer(**BARE), Built(1.0)
    rows = [trainer.validate(module, numbered(1))]
    module.hparams.lr = 2.0
    rows.append(trainer.validate(module, numbered(1)))
    assert rows == [[{"lr": 1.0}], [{"lr": 2.0}]]


def test_a_hook_may_set_hyperparameters_of_a_copied_module() -> None:
    counts = hooks(on_train_epoch_start=lambda t, m: m.hparams.update(epoch=t.current_epoch))
    model = nnx.clone(Built(1.0))
    fit(model, numbered(1), None, counts, max_epochs=2)
    assert model.hparams.epoch == 1


def test_the_trainer_is_not_in_the_graph() -> None:
    module = Mean()
    before = nnx.graphdef(module)
    trainer = fit(module, numbered(1))
    assert nnx.graphdef(module) == before and module.trainer is trainer


def test_a_module_without_a_trainer_says_so_and_one_that_is_built_loads_nothing() -> None:
    with pytest.raises(AttributeError, match="Mean is not attached to a Trainer"):
        Mean().trainer  # noqa: B018
    with pytest.raises(jl.errors.ModuleError, match=r"Call it on the class: module = Mean\.load_from_checkpoint"):
        Mean().load_from_checkpoint("gone")


def test_counters_in_a_hook_are_ints() -> None:
    seen: list[tuple[Any, Any]] = []
    keep = hooks(on_train_batch_end=lambda t, m, *_: seen.append((m.global_step, m.current_epoch)))
    fit(Mean(), numbered(2), None, keep, max_epochs=2)
    assert seen == [(1, 0), (2, 0), (3, 1), (4, 1)] and {type(x) for pair in seen for x in pair} == {int}


def test_a_dataclass_module_without_a_hash_is_trained() -> None:
    @dataclasses.dataclass
    class Data(Mean):
        w: nnx.Param
        scale: float = 1.0

        def training_step(self, batch: Any) -> jax.Array:
            return super().training_step(batch) * self.hparams["scale"]

    assert Data.__hash__ is None  # what a table by hash could not hold
    modules = [Data(nnx.Param(jnp.zeros(1)), 0.5), Data(nnx.Param(jnp.zeros(1)))]
    for module in modules:
        fit(module, numbered(2))
    assert [float(m.w[...][0]) for m in modules] == [0.25 * 0.75 + 0.25 * 2, mean([[1], [2]])]
    assert [m.hparams for m in modules] == [{"scale": 0.5}, {"scale": 1.0}]
