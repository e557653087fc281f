"""The module beside its steps: hyperparameters, counters, its Trainer."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

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
from kit.trainers import fit

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


def test_hyperparameters_and_trainer_are_not_in_the_graph() -> None:
    assert nnx.graphdef(Configured(8)) == nnx.graphdef(Configured(16, rate=0.1))
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
