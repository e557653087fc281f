"""What a strategy of one's own can override: how a batch is split, and the mesh. Which kernel draws the random
bits of weights: jax's own on one GPU, XLA's elsewhere.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from kit.batches import random
from kit.by_hand import HandLoop, assert_same
from kit.modules import Linear, Net
from kit.trainers import fit, splitting, thinned

import jaxlit as jl
from jaxlit.strategies.base import _kernel_of_random_bits


class Columns(jl.Strategy):
    """Splits rows over one axis and columns over another, of batches and of matrices."""

    def mesh_shape(self, device_count: int) -> dict[str, int]:
        return {"data": 2, "columns": device_count // 2}

    def batch_spec(self, x: Any) -> P:
        columns = self.mesh.shape["columns"]
        return P("data", "columns") if x.ndim == 2 and x.shape[1] % columns == 0 else super().batch_spec(x)

    def state_sharding(self, state: Any, model: Any, example: Any) -> Any:
        spec = lambda x: P(None, "columns") if len(x.shape) == 2 and x.shape[1] % 4 == 0 else P()  # noqa: E731
        return jax.tree.map(lambda x: NamedSharding(self.mesh, spec(x)), state)


@pytest.mark.full
def test_a_batch_lies_as_its_spec_says_wherever_it_is_placed() -> None:
    seen: list[Any] = []

    class Looks(Net):
        def training_step(self, batch: Any) -> jax.Array:
            jax.debug.inspect_array_sharding(batch["wide"], callback=seen.append)
            return super().training_step(batch) + 0 * batch["wide"].sum()

    strategy, rows = Columns(), random(2)
    batches = [batch | {"wide": np.ones((8, 16), np.float32)} for batch in rows]
    model = Looks(rngs=nnx.Rngs(0))
    trainer = fit(model, batches, strategy=strategy)
    assert (trainer.strategy.num_replicas, dict(trainer.strategy.mesh.shape)) == (2, {"data": 2, "columns": 4})
    placed = trainer.strategy.shard_batch(batches[0])
    assert placed["wide"].sharding.spec == P("data", "columns") and placed["x"].sharding.spec == P("data")
    inputs = []
    trainer.strategy.on_state(lambda _, x: jax.debug.inspect_array_sharding(x, callback=inputs.append))(
        [], batches[0]["wide"]
    )
    assert [sharding.shard_shape((8, 16)) for sharding in inputs] == [(4, 4)]
    assert {sharding.shard_shape((8, 16)) for sharding in seen} == {(4, 4)}
    by_hand = HandLoop(Net(rngs=nnx.Rngs(0)), loss=lambda net, batch: net.loss(batch))(*rows).module
    assert_same(model.inner, by_hand.inner)


class Table(jl.TrainModule):
    """Takes rows of a table: the gradient of one is how often it was taken."""

    def __init__(self) -> None:
        self.table = nnx.Param(jnp.zeros((8, 2)))

    def training_step(self, batch: jax.Array) -> jax.Array:
        return self.table[...][batch].mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


@pytest.mark.parametrize(("rows", "data"), ((5, 4), (13, 2), (3, 8)))
def test_a_tail_trains_the_same_on_a_mesh_of_two_axes(rows: int, data: int) -> None:
    words = np.random.default_rng(0).integers(0, 8, (rows, 3)).astype(np.int32)
    mesh, model = jax.make_mesh((data, 8 // data), ("data", "other")), Table()
    fit(model, [words], strategy=jl.strategies.DDP(mesh=mesh))
    share = np.bincount(words.ravel(), minlength=8) / words.size
    np.testing.assert_allclose(model.table[...], -np.stack([share / 2, share / 2], 1), rtol=1e-6)


class Constrained(Net):
    """Says of its values how they lie on the axis `data`, in each step, also inside of a scan."""

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, P("data", None))
        layer = lambda h, _: (jax.lax.with_sharding_constraint(jnp.tanh(h), P("data")), None)  # noqa: E731
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, None, length=2)
        return super().__call__(x)


class Free(Net):
    """The same without saying so."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(jnp.tanh(jnp.tanh(x)))


@pytest.mark.parametrize("strategy", thinned(["single", "ddp", "fsdp", "hsdp"], full=["hsdp", "ddp"]))
def test_a_model_may_say_how_its_values_lie_on_the_mesh(strategy: str) -> None:
    models, result = [Constrained(rngs=nnx.Rngs(0)), Free(rngs=nnx.Rngs(0))], []
    batches = random(2)
    for model in models:
        trainer = fit(model, batches, batches[:1], strategy=splitting(strategy))
        outputs = [trainer.apply(lambda module, batch: module(batch["x"]), batches[0])]
        result.append([np.asarray(x) for x in outputs + trainer.predict(model, batches[:1])])
    assert_same(models[0], models[1])
    for x, y in zip(*result, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", thinned(["ddp", "fsdp"], "fsdp"))
def test_a_model_may_map_over_the_mesh_itself(strategy: str) -> None:
    class Maps(Linear):
        def __call__(self, x: jax.Array) -> jax.Array:
            swap = lambda x: jax.lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)])  # noqa: E731
            turned = jax.shard_map(swap, in_specs=P("data"), out_specs=P("data"))(x)
            return super().__call__(x) + 0 * turned.sum()

    model, batches = Maps(), random(2)
    fit(model, batches, strategy=strategy)
    assert_same(model, HandLoop(Linear())(*batches).module)


@pytest.mark.parametrize("lazy", thinned([True, False], True))
def test_variables_annotated_with_mesh_axes_train(lazy: bool) -> None:
    class Annotated(Net):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            super().__init__(rngs=rngs)
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "data"))
            self.inner = nnx.Linear(3, 16, kernel_init=init, rngs=rngs)

    if lazy:
        model: Any = jl.lazy(Annotated, rngs=nnx.Rngs(0))
    else:
        with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
            model = Annotated(rngs=nnx.Rngs(0))
    trainer = fit(model, random(2), strategy="ddp")
    assert trainer.module.inner.kernel.out_sharding == (None, "data")
    assert trainer.global_step == 2


AROUND = [(kind, s) for kind in (AxisType.Explicit, AxisType.Auto) for s in ("single", "fsdp", "shard_map", "pmap")]


@pytest.mark.parametrize(("kind", "strategy"), thinned(AROUND, AROUND[1], full=[*AROUND[:3], AROUND[5]]))
def test_a_mesh_that_the_caller_has_set_changes_nothing(kind: AxisType, strategy: str) -> None:
    batches = random(2)
    wanted = HandLoop(Linear())(*batches)
    with jax.set_mesh(jax.make_mesh((2, 4), ("data", "other"), axis_types=(kind,) * 2)):
        model = Linear()
        model.kernel[...] = jax.device_put(model.kernel[...], P())  # of a type that names its mesh
        trainer = fit(model, batches, strategy=strategy)
        result = trainer.apply(lambda module, x: module(x), batches[0]["x"])
        trainer.validate(model, batches[:1])
        state, step = jl.compile_step(jl.lazy(Linear), batch=batches[0], strategy=strategy)
        for batch in batches:
            state, _ = step(state, batch)
        trainer.explain()
    assert_same(trainer.module, wanted.module)
    assert_same(step.module(state), wanted.module)
    np.testing.assert_allclose(result, wanted.module(batches[0]["x"]), rtol=1e-5)


def mesh_of(platform: str, size: int) -> Any:
    return SimpleNamespace(size=size, devices=np.array([SimpleNamespace(platform=platform)] * size))


def flag() -> bool:
    return jax.config.jax_threefry_gpu_kernel_lowering  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("platform", "size", "wanted"), [("gpu", 1, True), ("gpu", 2, False), ("cpu", 1, False), ("tpu", 1, False)]
)
def test_one_gpu_draws_random_bits_by_a_kernel_of_jax(platform: str, size: int, wanted: bool) -> None:
    with pytest.raises(ZeroDivisionError), _kernel_of_random_bits(mesh_of(platform, size)):
        assert flag() is wanted
        raise ZeroDivisionError
    assert flag() is False


def test_a_kernel_that_the_user_chose_is_kept() -> None:
    jax.config.update("jax_threefry_gpu_kernel_lowering", True)
    try:
        with _kernel_of_random_bits(mesh_of("gpu", 1)):
            assert flag() is True
        assert flag() is True
    finally:
        jax.config.update("jax_threefry_gpu_kernel_lowering", False)


@pytest.mark.parametrize(("platform", "size", "flags"), [("tpu", 1, [False]), ("gpu", 2, [False]), ("gpu", 1, [])])
def test_other_devices_and_older_jaxes_have_no_flag_written(
    platform: str, size: int, flags: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SimpleNamespace(**dict.fromkeys(["jax_threefry_gpu_kernel_lowering"] * len(flags), False))
    monkeypatch.setattr(jax, "config", config)  # has no update
    with _kernel_of_random_bits(mesh_of(platform, size)):
        pass
