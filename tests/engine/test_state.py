"""The training state as one list of arrays."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import random
from kit.inside import engine_of, lowered
from kit.modules import Net
from kit.processes import launch, say
from kit.trainers import THREE, fit, thinned

import jaxlit as jl
from jaxlit.core.parts import optimizer_of
from jaxlit.core.pure_module import PureModule
from jaxlit.core.train_state import StepOptions
from jaxlit.engine.training import training_of


@pytest.mark.parametrize("strategy", thinned(THREE, "fsdp"))
def test_a_state_is_finite_if_every_number_of_it_is(strategy) -> None:
    state = engine_of(fit(Net(rngs=nnx.Rngs(0)), random(1), strategy=strategy)).state
    assert state.is_finite()
    for place, array in enumerate(state.leaves):
        if not jnp.issubdtype(array.dtype, jnp.floating) or not array.size:
            continue
        for bad in (np.nan, np.inf):
            wrong = np.array(array)
            wrong.flat[-1] = bad
            state.put(place, wrong)
            assert not state.is_finite(), place
        state.put(place, array)
    assert state.is_finite()


def compile_from_specs() -> None:
    """Compile the step of a sharded model of which no array exists, then train it."""
    strategy = jl.strategies.FSDP()
    strategy.setup(8)
    module = nnx.eval_shape(lambda: Net(rngs=nnx.Rngs(0)))
    optimizer, (batch,) = optimizer_of(module), random(1, rows=16)
    pure = PureModule(nnx.graphdef(module), optimizer.wrt, module)
    training = training_of(module, pure, strategy, StepOptions(optimizer, accumulate=2)).trace(batch)
    rows = jax.sharding.NamedSharding(strategy.mesh, jax.P(strategy.batch_axes))
    shapes = {key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows) for key, x in batch.items()}
    program = strategy.compile(training.train)
    compiled = program.lower(training.spec.arrays, shapes).compile()
    say("arrays", len(jax.live_arrays()))
    say("bytes", compiled.memory_analysis().argument_size_in_bytes)
    trainer = fit(Net(rngs=nnx.Rngs(0)), [batch] * 2, strategy="fsdp", devices=8, accumulate_grad_batches=2)
    state = engine_of(trainer).state
    say("same specs", _shapes(state.leaves) == _shapes(training.spec.arrays))
    say(
        "same program", lowered(trainer, "train_step", batch).as_text() == program.lower(state.leaves, shapes).as_text()
    )


def _shapes(arrays: Any) -> list[Any]:
    return [(x.shape, str(x.dtype), x.sharding) for x in arrays]


@pytest.mark.full
def test_a_step_compiles_before_an_array_exists(tmp_path: Path) -> None:
    (ended,) = launch(compile_from_specs, tmp_path, count=1, devices=8, join=False)
    assert ended.code == 0, ended.errors
    assert ended.said["arrays"] == 0
    assert ended.said["bytes"] > 0
    assert ended.said["same specs"]
    assert ended.said["same program"]
