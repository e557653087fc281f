"""What fully sharded training holds where, and that it trains like a single device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kit.inside import laid_out
from kit.trainers import fit, make_trainer
from kit.transformer import Transformer

import jaxlit as jl

SIZES = {"vocab": 128, "width": 64, "layers": 1}


@functools.cache
def transformer() -> Transformer:
    return nnx.eval_shape(lambda: Transformer(**SIZES, rngs=nnx.Rngs(0)))


def share(state: Any, shardings: Any) -> float:
    pairs = [*zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)]
    held = sum(np.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in pairs)
    return float(held / sum(x.size * x.dtype.itemsize for x, _ in pairs))


@pytest.mark.parametrize(("stage", "replicas"), ((1, 1), (2, 1), (3, 1), (1, 2), (2, 4), (3, 2)))
def test_what_each_of_8_devices_holds_of_a_transformer(stage: int, replicas: int) -> None:
    strategy = jl.strategies.FSDP(stage=stage, replicas=replicas)
    state, shardings = laid_out(strategy, transformer(), accumulate=True)
    assert strategy.mesh.axis_names == (("data",) if replicas == 1 else ("data", "fsdp"))
    assert strategy.num_replicas == 8
    part = replicas / 8  # and what is not split
    for name, least in (("params", 3), ("window", 2), ("opt_state", 1)):
        of, where = (getattr(x, name).grads if name == "window" else getattr(x, name) for x in (state, shardings))
        held = share(of, where)
        assert held == 1.0 if stage < least else part <= held <= part + 0.02, name


def test_hsdp_takes_all_devices_or_a_mesh_and_copies_divide() -> None:
    meshes = [make_trainer(strategy="hsdp", devices=n).strategy.mesh.shape for n in (1, 3, 8)]
    assert meshes == [{"data": 1, "fsdp": 1}, {"data": 1, "fsdp": 3}, {"data": 2, "fsdp": 4}]
    assert make_trainer(strategy="hsdp", mesh={"data": 4, "fsdp": 2}).strategy.mesh.shape["fsdp"] == 2
    assert make_trainer(strategy="zero2").strategy.stage == 2
    with pytest.raises(jl.errors.ArgumentError, match=r"FSDP\(replicas=3\): 8 devices do not divide into 3 copies"):
        _ = make_trainer(strategy=jl.strategies.FSDP(replicas=3)).strategy
    mesh = jax.make_mesh((8,), ("data",))
    with pytest.raises(jl.errors.ArgumentError, match=r"FSDP\(replicas=...\) is a size of the given mesh"):
        jl.strategies.FSDP(replicas=2, mesh=mesh)


@pytest.mark.full
def test_the_arrays_of_a_training_lie_as_they_were_laid_out() -> None:
    class Finetuned(Transformer):
        def configure_optimizers(self) -> jl.Optimizer:
            return jl.Optimizer(optax.adamw(1e-2), wrt=nnx.All(nnx.Param, nnx.PathContains("head")))

    module, tokens = Finetuned(**SIZES, rngs=nnx.Rngs(0)), np.arange(16 * 9, dtype=np.int32).reshape(16, 9) % 128
    before, head = np.array(module.embed.embedding[...]), np.array(module.head.kernel[...])
    state = fit(module, [tokens] * 2, strategy="fsdp", accumulate_grad_batches=2).state
    _, shardings = laid_out(jl.strategies.FSDP(), Finetuned(**SIZES, rngs=nnx.Rngs(0)), accumulate=True)
    for part in ("params", "frozen", "opt_state", "window"):
        pairs = zip(jax.tree.leaves(getattr(state, part)), jax.tree.leaves(getattr(shardings, part)), strict=True)
        assert all(x.sharding.is_equivalent_to(s, x.ndim) for x, s in pairs), part
    assert share(state.frozen, shardings.frozen) <= 0.14  # frozen ones are split too, and do not change
    np.testing.assert_array_equal(module.embed.embedding[...], before)
    assert np.abs(head - module.head.kernel[...]).max() > 0


OPTIMIZERS = {
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),  # rows and columns of moments, all of them small
    "muon": optax.contrib.muon(1e-2),
    "masked": optax.masked(optax.adam(1e-2), lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    "partition": optax.partition(
        {"matrix": optax.adam(1e-2), "rest": optax.sgd(1e-2)},
        lambda params: jax.tree.map(lambda p: "matrix" if p.ndim > 1 else "rest", params),
    ),
    "chain": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9), optax.ema(0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_is_split_as_its_parameters_are(name: str) -> None:
    state, shardings = laid_out(jl.strategies.FSDP(), transformer(), OPTIMIZERS[name])
    of_params = zip(jax.tree.leaves(state.params), jax.tree.leaves(shardings.params), strict=True)
    specs = {x.shape: s.spec for x, s in of_params}
    pairs = zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(shardings.opt_state), strict=True)
    moments = [(x.shape, s.spec) for x, s in pairs if x.shape in specs and x.size > 1024]
    assert bool(moments) == (name != "adafactor")
    assert all(spec == specs[shape] for shape, spec in moments)


def test_a_moment_belongs_to_the_parameter_of_its_whole_path() -> None:
    mesh = jl.sharding.mesh({"data": -1})
    rows, columns, whole = (NamedSharding(mesh, spec) for spec in (P("data"), P(None, "data"), P()))
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    params, shardings = {"w": shape, "inner": {"w": shape}}, {"w": rows, "inner": {"w": columns}}
    adam, _ = jl.strategies.like_params(jax.eval_shape(optax.adam(1.0).init, params), params, shardings, whole)
    assert adam.mu == adam.nu == shardings
    factored = {"rows": jax.tree.map(lambda _: jax.ShapeDtypeStruct((8,), jnp.float32), params)}
    assert jl.strategies.like_params(factored, params, shardings, whole) == {
        "rows": {"w": whole, "inner": {"w": whole}}
    }


@pytest.mark.parametrize(
    "arguments",
    ({"stage": 0}, {"stage": "3"}, {"min_size": -1}, {"min_size": 1.5}, {"replicas": 0}, {"replicas": "all"}),
)
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(jl.errors.JaxlitError, match=rf"FSDP\({name}=...\)"):
        jl.strategies.FSDP(**arguments)


class Shapes(jl.TrainModule):
    """A parameter of each shape, each in the loss."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        self.weights = nnx.List([nnx.Param(jax.random.normal(jax.random.key(0), shape)) for shape in shapes])

    def training_step(self, batch: jax.Array) -> jax.Array:
        return sum((jnp.mean(w[...] ** 2) for w in self.weights), jnp.zeros(())) * batch.mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


@pytest.mark.full
def test_shapes_that_do_not_divide_train() -> None:
    shapes = ((1257, 96), (1025, 64), (10,), (7, 13), (30, 68), (31, 60))
    trainer = fit(jl.lazy(Shapes, shapes), [np.ones((8, 1), np.float32)], strategy="fsdp", enable_checkpointing=False)
    weights = [trainer.state.params["weights"][i] for i in range(len(shapes))]
    assert [w.sharding.shard_shape(w.shape) for w in weights[:3]] == [(1257, 12), (1025, 8), (10,)]
    for w in weights:
        start = jax.random.normal(jax.random.key(0), w.shape)
        np.testing.assert_allclose(w, start - 2 * start / start.size, rtol=1e-5, atol=1e-7)
