"""FSDP over layers that a scan runs: each layer is gathered when it runs, and each gradient is reduced once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.inside import engine_of
from kit.trainers import BARE, fit

import jaxlit as jl
from jaxlit.strategies import FSDP

LAYERS, WIDTH = 6, 64


class Block(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(x)))


class Scanned(jl.TrainModule):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        make = nnx.vmap(lambda rngs: Block(rngs=rngs), in_axes=0, out_axes=0)
        self.blocks = make(rngs.split(LAYERS))

    def training_step(self, batch: Any) -> jax.Array:
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jnp.mean((run(batch["x"], self.blocks) - 1) ** 2)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


@pytest.mark.parametrize("remat", [False, True])
def test_scanned_layers_are_gathered_twice_and_reduced_once(remat: bool) -> None:
    batches = [{"x": np.ones((16, WIDTH), np.float32)}]
    trainer = fit(Scanned(rngs=nnx.Rngs(0)), batches, strategy=FSDP(min_size=0, remat=remat), **BARE)
    (cost,) = (program.cost for program in engine_of(trainer).programs if program.name == "train_step")
    assert cost.collectives is not None
    sent = {x.kind: x.bytes for x in cost.collectives}
    assert all(x.exact for x in cost.collectives)
    parameters = LAYERS * 4 * (2 * 4 * WIDTH * WIDTH + 5 * WIDTH)
    # Once forward and once backward; XLA keeps small arrays whole. The rest are metrics and the guard.
    assert 0.9 * 2 * parameters < sent["all-gather"] < 1.1 * 2 * parameters
    assert sent["all-reduce"] + sent.get("reduce-scatter", 0) < 1.1 * parameters
    assert sent.keys() <= {"all-gather", "all-reduce", "reduce-scatter"}
