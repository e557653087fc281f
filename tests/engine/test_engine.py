"""The engine's promises: nothing is read, replicas reduce once, and no buffer is shared with the caller."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered, random
from kit.compiles import compiles
from kit.costs import reads
from kit.inside import lowered
from kit.journal import hooks
from kit.modules import Linear, Net, module
from kit.trainers import BARE, fit, thinned

import jaxlit as jl


@pytest.mark.parametrize(("strategy", "accumulate"), thinned((("fsdp", 1), ("fsdp", 2), ("pmap", 1)), ("fsdp", 2)))
def test_no_array_is_read_between_log_points_the_guards_included(strategy, accumulate) -> None:
    at: list[int] = []
    with reads() as seen:
        count = hooks(on_train_batch_end=lambda *_: at.append(len(seen)))
        given = {"accumulate_grad_batches": accumulate, "log_every_n_steps": 10 // accumulate}
        fit(Net(rngs=nnx.Rngs(0)), random(30), None, count, strategy=strategy, **given)
    # A row is due after batches 9, 19 and 29 and read one step late: before the end of 11 and 21 is noted.
    assert [batch for batch in range(1, 30) if at[batch] != at[batch - 1]] == [11, 21]


@pytest.mark.parametrize("strategy", thinned(("shard_map", "pmap"), "shard_map"))
def test_replicas_reduce_once_an_optimizer_step(strategy) -> None:
    def count(name: str, accumulate: int) -> int:
        trainer = fit(Linear(), random(4), strategy=strategy, accumulate_grad_batches=accumulate, **BARE)
        return len(re.findall(r" all-reduce(?:-start)?\(", lowered(trainer, name, random(1)[0]).compile().as_text()))

    assert (count("micro_step", 4), count("train_step", 4), count("train_step", 1)) == (0, 1, 1)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_weakly_typed_parameter_compiles_each_step_once(strategy) -> None:
    model = module(init=lambda self: setattr(self, "w", nnx.Param(jnp.asarray(0.0))))
    assert model.w.get_value().aval.weak_type
    with compiles() as result:
        fit(model, numbered(3), numbered(1), strategy=strategy, max_epochs=2, **BARE)
    steps = [name.removeprefix("jit(").removesuffix(")") for name in result if "_step" in name]
    assert sorted(steps) == ["eval_step", "train_step"]


def test_an_optimizer_that_keeps_parameters_is_donated() -> None:
    keep = optax.GradientTransformation(lambda params: params, lambda updates, state, params: (updates, params))
    trainer = fit(module(base=Linear, tx=optax.chain(optax.sgd(0.1), keep)), random(3))
    # The parameters as they were before the last step.
    assert trainer.global_step == 3
    kept: Any = trainer.state.opt_state[1]
    assert float(jnp.abs(kept["kernel"] - trainer.state.params["kernel"]).max()) > 0


def test_a_hook_that_keeps_an_old_array_must_copy_it() -> None:
    kept: list[Any] = []

    def look(trainer: jl.Trainer, *_: Any) -> None:
        kept.append(trainer.state.params["kernel"])
        np.asarray(kept[0])  # of the first step, which the second one has overwritten

    with pytest.raises(jl.errors.StateError, match=r"a later step has overwritten it.*jax\.tree\.map\(jnp\.copy"):
        fit(Linear(), random(3), None, hooks(on_train_batch_end=look), **BARE)


@pytest.mark.full
def test_3000_steps_on_8_devices_survive() -> None:
    trainer = fit(Linear(), random(100), strategy="pmap", max_epochs=None, max_steps=3000, log_every_n_steps=0)
    assert int(trainer.state.step) == trainer.global_step == 3000
