"""`jl.lazy`: a module that is built where it is trained."""

import gc
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from kit.batches import numbered, random
from kit.by_hand import assert_same, mean, params_of
from kit.journal import hooks
from kit.modules import Linear, Mean, Net
from kit.refusals import fit_refuses, refuses
from kit.trainers import STRATEGIES, fit, splitting, thinned

import jaxlit as jl
from jaxlit.checkpoints.files import Checkpoint
from jaxlit.errors import ArgumentError, ModuleError


def first_params(model: Any, **arguments: Any) -> dict[str, np.ndarray]:
    result: list[dict[str, np.ndarray]] = []
    keep = hooks(on_fit_start=lambda trainer, module: result.append(params_of(module)))
    fit(model, random(1), None, keep, limit_train_batches=0, **arguments)
    return result[0]


def assert_bit_equal(result: dict[str, np.ndarray], model: Any) -> None:
    assert_same(result, params_of(model), rtol=0, atol=0)


PLACES = [(name, "auto") for name in STRATEGIES] + [("fsdp", 1), ("fsdp", 2), ("ddp", 2), ("shard_map", 2)]


@pytest.mark.parametrize(("strategy", "devices"), thinned(PLACES, ("fsdp", 2), full=PLACES[1::3]))
def test_lazy_weights_equal_those_of_the_class(strategy, devices) -> None:
    result = first_params(jl.lazy(Net, width=16, rngs=nnx.Rngs(7)), strategy=splitting(strategy), devices=devices)
    assert_bit_equal(result, Net(width=16, rngs=nnx.Rngs(7)))


@pytest.mark.full
def test_the_generator_may_be_an_int_or_an_rngs() -> None:
    assert_bit_equal(first_params(jl.lazy(Net), seed=5), Net(rngs=nnx.Rngs(5)))
    assert_bit_equal(first_params(jl.lazy(Net, rngs=3), seed=5), Net(rngs=nnx.Rngs(3)))
    rngs, other = nnx.Rngs(3), nnx.Rngs(3)
    rngs(), other()
    for _ in range(2):  # one lazy module may be built twice, and does not advance its generator
        assert_bit_equal(first_params(jl.lazy(Net, rngs=rngs)), Net(rngs=nnx.clone(other)))
    assert (jax.random.key_data(rngs()) == jax.random.key_data(other())).all()


def test_a_constructor_may_name_axes_of_the_mesh() -> None:
    class Constrained(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.kernel.set_value(jax.lax.with_sharding_constraint(self.kernel[...], P()))

    assert_same(fit(jl.lazy(Constrained), random(1), strategy="fsdp").module, fit(Linear(), random(1)).module)


class Shifted(Mean):
    def __init__(self) -> None:
        super().__init__()
        self.shift = self.again = jnp.full(1, 2.0)
        self.listed, self.part = nnx.List([jnp.full(1, 3.0)]), nnx.Dict(shift=np.full(1, 4.0, np.float32))

    def error(self, batch: Any) -> jax.Array:
        return super().error(batch) + self.shift + self.again + self.listed[0] + self.part.shift


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_a_constructor_may_make_array_attributes(strategy) -> None:
    model = fit(jl.lazy(Shifted), numbered(2), strategy=strategy).module
    assert float(model.w[0]) == pytest.approx(mean([[12], [13]]), rel=1e-6)
    assert [float(x[0]) for x in (model.shift, model.listed[0], model.part.shift)] == [2.0, 3.0, 4.0]


def test_lazy_refuses_what_is_no_module_class() -> None:
    for cls in (nnx.Linear, 3, "Net"):
        words = r"jl\.lazy\(make, \.\.\.\) takes a subclass of jl\.TrainModule, or a function"
        refuses(ArgumentError, lambda cls=cls: jl.lazy(cls), words)
    fit_refuses(ModuleError, "Empty has no training_step", model=jl.lazy(type("Empty", (jl.TrainModule,), {})))


def test_a_constructor_with_a_generator_from_outside_is_refused() -> None:
    outside = nnx.Rngs(0)

    def draws(self: Any, drawn: nnx.Rngs) -> None:
        Mean.__init__(self)
        self.layer = nnx.Linear(1, 1, rngs=drawn)

    words = r"jl\.lazy\(Made\).* draws from an nnx.Rngs that was made before.*def __init__\(self, \.\.\., \*, rngs\)"
    made = type("Made", (Mean,), {"__init__": lambda self: draws(self, outside)})
    refuses(ModuleError, lambda: fit(jl.lazy(made), numbered(1)), words)
    fit(jl.lazy(type("Made", (Mean,), {"__init__": lambda self: draws(self, nnx.Rngs(0))})), numbered(1))
    fit(jl.lazy(type("Made", (Mean,), {"__init__": lambda self, *, rngs: draws(self, rngs)})), numbered(1))


def test_weights_are_born_sharded_and_never_outside_of_a_trace() -> None:
    shapes, concrete = [], []

    class Notes(Net):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            super().__init__(rngs=rngs)
            concrete.append(not isinstance(self.inner.kernel[...], jax.core.Tracer))

    look = hooks(setup=lambda t, m, stage: shapes.extend(m.blocks[0].kernel[...].addressable_shards))
    fit(jl.lazy(Notes), random(1), None, look, strategy=splitting("fsdp"))
    assert [x.data.shape for x in shapes] == [(2, 16)] * 8
    assert concrete and not any(concrete)


def held() -> int:
    gc.collect()
    arrays = [x for x in jax.live_arrays() if jax.devices()[0] in x.sharding.device_set]
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


@pytest.mark.full
def test_no_device_ever_holds_more_than_its_share(monkeypatch, tmp_path) -> None:
    width, depth, before, result = 128, 4, held(), []
    share = (depth * width * width + 3 * width) * 4 * 2 / 8  # of the matrices and their momentum, split over 8
    look = hooks("Look", on_fit_start=lambda trainer, module: result.append(held() - before))
    model, read = jl.lazy(Net, width, depth), Checkpoint.arrays

    def arrays(checkpoint: Checkpoint, wanted: Any) -> dict[int, Any]:
        result.append(held() - before)  # where the arrays of the checkpoint are to come
        return read(checkpoint, wanted)

    monkeypatch.setattr(Checkpoint, "arrays", arrays)
    given: dict[str, Any] = {"strategy": "fsdp", "default_root_dir": tmp_path, "resume": "auto"}
    fit(model, random(1), None, look, **given)
    fit(model, random(1), None, look, max_epochs=2, **given)
    built, emptied, restored = result
    small = 64 * width  # vectors, which lie whole
    assert share < built <= 1.1 * share + small and emptied < small and abs(restored - built) < small


def test_a_function_may_make_the_module() -> None:
    def make(width: int, *, rngs: nnx.Rngs) -> Any:
        return Net(width, rngs=rngs)

    trainer = fit(jl.lazy(make, 16), random(3), strategy="fsdp")
    expected = fit(jl.lazy(Net, 16), random(3), strategy="fsdp")
    assert_same(trainer.module, expected.module)
    refuses(ArgumentError, lambda: fit(jl.lazy(lambda: 3), random(1)), "must make a jl.TrainModule, got 3")
    refuses(ModuleError, lambda: fit(jl.lazy(lambda: jl.TrainModule()), random(1)), "has no training_step")


def test_hyperparameters_are_those_that_the_constructor_chose() -> None:
    class Chosen(Linear):
        def __init__(self, width: int = 1, folder: str = "x") -> None:
            super().__init__()
            self.save_hyperparameters(ignore="folder")

    assert fit(jl.lazy(Chosen, 3), random(1)).module.hparams == {"width": 3}
