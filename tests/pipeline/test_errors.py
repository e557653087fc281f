"""What a pipeline refuses: the rule, what was given, and what to do."""

from collections.abc import Callable
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

    def training_step(self, batch: Any) -> jax.Array:
        x = batch
        for i in range(len(self.blocks)):
            x = self.layer(i, x)
        return jnp.mean(x**2)

    def configure_optimizers(self) -> Any:
        return optax.sgd(0.1)


class Marked(Deep):
    def layer(self, i: int, x: jax.Array) -> jax.Array:
        return jl.pipeline_yield(super().layer(i, x))


class InScan(Deep):
    def training_step(self, batch: Any) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return jl.pipeline_yield(jnp.tanh(layer(x)))

        @nnx.split_rngs(splits=4)
        @nnx.vmap(in_axes=0)
        def stack(rngs: nnx.Rngs) -> nnx.Linear:
            return nnx.Linear(40, 40, rngs=rngs)

        return jnp.mean(run(batch, stack(nnx.Rngs(0))) ** 2)


class ReadsBack(Marked):
    """What the last stage writes, the first reads for the next microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nnx.BatchStat(jnp.zeros(40))

    def training_step(self, batch: Any) -> jax.Array:
        x = batch - self.mean
        for i in range(len(self.blocks)):
            x = self.layer(i, x)
        self.mean[...] = x.mean(0)
        return jnp.mean(x**2)


class Counts(Marked):
    def training_step(self, batch: Any) -> Any:
        return {"loss": super().training_step(batch), "count": jnp.sum(batch > 0)}


class OneVector(Marked):
    def configure_optimizers(self) -> Any:
        def direction(grads: Any, params: Any) -> Any:
            flat, back = ravel_pytree(grads)
            return back(flat / jnp.linalg.norm(flat))

        return optax.stateless(direction)


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], type[Exception], tuple[str, ...]]] = {
    "a mark in a scan": (lambda: Pipeline(4), InScan, ArgumentError, ("inside a scan", "between layers")),
    "no marks": (lambda: Pipeline(4), Deep, ArgumentError, ("4 stages", "0 marks, so 1 part", r"layers='blocks'")),
    "too few marks": (
        lambda: Pipeline(4, "interleaved_1f1b"),
        Marked,
        ArgumentError,
        ("8 stages", "4 marks, so 5 parts", "fewer stages"),
    ),
    "layers that are not there": (
        lambda: Pipeline(4, layers="blcks"),
        Deep,
        ArgumentError,
        (r"layers='blcks'\): Deep has no blcks", "Did you mean 'blocks'"),
    ),
    "layers that are no list": (
        lambda: Pipeline(4, layers="training_step"),
        Deep,
        ArgumentError,
        (r"layers='training_step'\) names method", "a list of modules"),
    ),
    "a balance of other parts": (
        lambda: Pipeline(4, balance=(1, 1, 1, 3)),
        Marked,
        ArgumentError,
        (r"balance=\(1, 1, 1, 3\)", "4 numbers whose sum is 5"),
    ),
    "a state read on another stage": (
        lambda: Pipeline(4),
        ReadsBack,
        StateError,
        ("mean is updated on stage 3 and read on stage 0", "Update it where it is read"),
    ),
    "a count among the outputs": (
        lambda: Pipeline(4),
        Counts,
        ModuleError,
        (r"Counts.training_step returns count, int32\[\], which has no row", "reduce_fx='sum'"),
    ),
    "an optimizer of one vector": (
        lambda: Pipeline(4),
        OneVector,
        StateError,
        ("concatenate combines large arrays of several ranks", r"float32\[1600\] of rank 0", "strategy='fsdp'"),
    ),
    "a schedule of other ranks": (
        lambda: Pipeline(4, jl.strategies.Std1F1B(2)),
        Marked,
        ArgumentError,
        (r"schedule=Std1F1B\(2\)", "mesh of 4 stages and a schedule of 2 ranks"),
    ),
    "microbatches that do not divide": (
        lambda: Pipeline(2, "interleaved_1f1b", 5),
        Marked,
        ArgumentError,
        ("5 microbatches do not divide into 2 rounds",),
    ),
    "stages that do not divide the devices": (
        lambda: Pipeline(3),
        Marked,
        ArgumentError,
        (r"stages=3\): 4 devices do not divide", "Give a divisor"),
    ),
    "a mesh of other stages": (
        lambda: Pipeline(2, mesh={"stage": 4}),
        Marked,
        ArgumentError,
        ("stages=2,", "mesh of 4 stages", "Leave stages out"),
    ),
    "a mesh without stages": (
        lambda: Pipeline(mesh={"data": 4}),
        Marked,
        ArgumentError,
        (r"an axis 'stage'", r"got axes \('data',\)"),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused(case: str) -> None:
    strategy, model, kind, patterns = REFUSED[case]
    made = strategy()
    fit_refuses(kind, *patterns, model=model(), train=BATCH, strategy=made, devices=4)


def bad(**arguments: Any) -> Callable[[], Any]:
    return lambda: Pipeline(**arguments)


ARGUMENTS = {
    "an unknown schedule": (bad(schedule="1f1"), ArgumentError, ("schedule", "'1f1'", "1f1b")),
    "no stages": (bad(stages=0), ArgumentError, ("stages", "at least 1", "got 0")),
    "no microbatches": (bad(microbatches=0), ArgumentError, ("microbatches", "at least 1", "got 0")),
    "an unknown remat": (bad(remat="foo"), ArgumentError, ("remat", "'foo'", "dots_saveable", "True")),
    "remat of a number": (bad(remat=2), ArgumentError, ("remat", "2")),
    "sums in whole numbers": (bad(accum_dtype="int32"), ArgumentError, ("accum_dtype", "int32", "float32")),
    "sums in no dtype": (bad(accum_dtype="flat32"), TypeError, ("flat32",)),
    "an inner strategy of replicas": (bad(inner="shard_map"), ArgumentError, ("inner", "'shard_map'", "fsdp", "ddp")),
    "an inner object of replicas": (
        bad(inner=jl.strategies.ShardMapDDP()),
        ArgumentTypeError,
        ("inner", "sees the entire batch", "ShardMapDDP"),
    ),
    "a pipeline in a pipeline": (bad(inner=jl.strategies.Pipeline()), ArgumentTypeError, ("inner", "Pipeline")),
    "an unknown balance": (bad(balance="bytes"), ArgumentError, ("balance", "'bytes'", "flops")),
    "layers by number": (bad(layers=3), ArgumentTypeError, ("layers", "blocks", "got 3")),
    "an unknown reduction": (bad(loss_reduction="max"), ArgumentError, ("loss_reduction", "'max'", "sum")),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_out_of_its_set_is_refused_where_it_is_given(case: str) -> None:
    call, kind, patterns = ARGUMENTS[case]
    refuses(kind, call, *patterns)
