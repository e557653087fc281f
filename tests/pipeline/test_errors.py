"""What a pipeline refuses: the rule, what was given, and what to do."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.flatten_util import ravel_pytree
from kit.refusals import fit_refuses, refuses

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, ModuleError, StateError

Pipeline = jl.strategies.Pipeline
BATCH = [np.ones((8, 40), np.float32)]


class Deep(jl.TrainModule):
    """Layers of more bytes than are brought together from several ranks, without marks."""

    def __init__(self, depth: int = 4) -> None:
        self.blocks = nnx.List([nnx.Linear(40, 40, rngs=nnx.Rngs(0)) for _ in range(depth)])

    def layer(self, i: int, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.blocks[i](x))

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(len(self.blocks)):
            x = self.layer(i, x)
        return x

    def training_step(self, batch: Any) -> Any:
        return jnp.mean(self(batch) ** 2)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


class Marked(Deep):
    def layer(self, i: int, x: jax.Array) -> jax.Array:
        return jl.pipeline_yield(super().layer(i, x))


class InScan(Deep):
    def __call__(self, x: jax.Array) -> jax.Array:
        stacked = nnx.vmap(lambda rngs: nnx.Linear(40, 40, rngs=rngs))(nnx.Rngs(0).split(4))
        layer = lambda x, layer: jl.pipeline_yield(jnp.tanh(layer(x)))  # noqa: E731
        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, stacked)


class ReadsBack(Marked):
    """What the last stage writes, the first reads for the next microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nnx.BatchStat(jnp.zeros(40))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = super().__call__(x - self.mean)
        self.mean[...] = x.mean(0)
        return x


class Counts(Marked):
    def training_step(self, batch: Any) -> Any:
        return {"loss": super().training_step(batch), "count": jnp.sum(batch > 0)}


class OneVector(Marked):
    def configure_optimizers(self) -> Any:
        def direction(grads: Any, params: Any) -> Any:
            flat, back = ravel_pytree(grads)
            return back(flat / jnp.linalg.norm(flat))

        return optax.stateless(direction)


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "a mark in a scan": (Pipeline(4), InScan, "inside a scan.*between layers"),
    "no marks": (Pipeline(4), Deep, "4 stages.*0 marks, so 1 part.*layers='blocks'"),
    "few marks": (Pipeline(4, "interleaved_1f1b"), Marked, "8 stages.*4 marks, so 5 parts.*fewer"),
    "no layers": (Pipeline(4, layers="blcks"), Deep, r"layers='blcks'\): Deep has no blcks.*Did you mean 'blocks'"),
    "no list": (Pipeline(4, layers="layer"), Deep, r"layers='layer'\) names method.*a list of modules"),
    "other parts": (Pipeline(4, balance=(1, 1, 1, 3)), Marked, r"balance=\(1, 1, 1, 3\).*4 numbers whose sum is 5"),
    "three parts": (Pipeline(4, balance=(1, 1, 3)), Marked, r"balance=\(1, 1, 3\).*4 numbers whose sum is 5"),
    "two stages": (Pipeline(4), ReadsBack, "mean is updated on stage 3 and read on stage 0.*Update it where it is"),
    "a count": (Pipeline(4), Counts, r"Counts.training_step returns count, int32\[\], which has no row.*reduce_fx="),
    "vector": (Pipeline(4), OneVector, r"concatenate.* of several ranks.*float32\[1600\] of rank 0.*strategy='fsdp'"),
    "other ranks": (Pipeline(4, jl.strategies.Std1F1B(2)), Marked, "mesh of 4 stages and a schedule of 2 ranks"),
    "microbatches": (Pipeline(2, "interleaved_1f1b", 5), Marked, "5 micro.* not divide into 2 rounds"),
    "devices": (Pipeline(3), Marked, r"stages=3\): 4 devices do not divide.*Give a divisor"),
    "other stages": (Pipeline(2, mesh={"stage": 4}), Marked, "stages=2,.*mesh of 4 stages.*Leave stages out"),
    "no stages": (Pipeline(mesh={"data": 4}), Marked, r"an axis 'stage'.*got axes \('data',\)"),
}
KINDS = {ReadsBack: StateError, Counts: ModuleError, OneVector: StateError}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused(case: str) -> None:
    strategy, model, words = REFUSED[case]
    fit_refuses(KINDS.get(model, ArgumentError), words, model=model(), train=BATCH, strategy=strategy, devices=4)


ARGUMENTS = [
    ("schedule", "1f1", ("'1f1'", "1f1b")),
    ("stages", 0, ("at least 1", "got 0")),
    ("microbatches", 0, ("at least 1", "got 0")),
    ("remat", "foo", ("'foo'", "dots_saveable", "True")),
    ("remat", 2, ("2",)),
    ("accum_dtype", "int32", ("int32", "float32")),
    ("inner", "shard_map", ("'shard_map'", "fsdp", "ddp")),
    ("inner", jl.strategies.ShardMapDDP(), ("sees the entire", "ShardMapDDP")),
    ("inner", jl.strategies.Pipeline(), ("Pipeline",)),
    ("balance", "bytes", ("'bytes'", "flops")),
    ("layers", 3, ("blocks", "got 3")),
    ("loss_reduction", "max", ("'max'", "sum")),
]


@pytest.mark.parametrize(("name", "value", "words"), ARGUMENTS)
def test_an_argument_out_of_its_set_is_refused_where_it_is_given(name: str, value: Any, words: tuple[str, ...]) -> None:
    refuses((ArgumentError, ArgumentTypeError), lambda: Pipeline(**{name: value}), name, *words)
