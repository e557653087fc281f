"""Meshes with Explicit axes: models as flax's tutorials and bonsai shard them, next to loops by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from kit.by_hand import HandLoop, assert_same
from kit.inside import lowered
from kit.journal import Losses
from kit.modules import Linear
from kit.refusals import refuses
from kit.trainers import fit, thinned

import jaxlit as jl
from jaxlit.programs.costs import count_collectives
from jaxlit.sharding import explicit_axes


class Model(Linear):
    """A model of classes."""

    def loss(self, batch: Any) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(self(batch["x"]), batch["y"]).mean()


class Vision(Model):
    """A transformer of images as flax's tutorial shards it: the batch and most weights over `axis`."""

    def __init__(self, axis: str = "fsdp", *, rngs: nnx.Rngs) -> None:
        self.axis = axis
        names = lambda *spec: {"out_sharding": P(*spec)}  # noqa: E731
        self.patches = nnx.Conv(3, 64, (4, 4), strides=(4, 4), padding="VALID", rngs=rngs)
        self.places = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, 5, 64)))
        self.token = nnx.Param(jnp.zeros((1, 1, 64)))
        kernels = {"kernel_metadata": names(None, axis, None), "out_kernel_metadata": names(None, axis, None)}
        self.attention = nnx.MultiHeadAttention(
            8, 64, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs, **kernels
        )
        self.up = nnx.Linear(64, 128, kernel_metadata=names(axis, None), rngs=rngs)
        self.down = nnx.Linear(128, 64, kernel_metadata=names(None, axis), rngs=rngs)
        self.norm, self.drop = nnx.LayerNorm(64, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        rows = P(self.axis, None, None)
        x = self.patches(x, out_sharding=rows)
        token = jax.device_put(jnp.tile(self.token[...], (x.shape[0], 1, 1)), rows)
        x = jnp.concat([token, x.reshape(x.shape[0], -1, 64)], axis=1) + self.places[...]
        x = x + self.attention(self.norm(x), out_sharding=rows, qkv_sharding=P(self.axis, None, None, None))
        x = x + self.down(self.drop(nnx.gelu(self.up(x, out_sharding=rows))), out_sharding=rows)
        return self.head(x[:, 0], out_sharding=P(self.axis, None))


class Words(Model):
    """A model of texts as flax's miniGPT is sharded: activations like the batch, weights over `model`."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(32, 16, rngs=rngs)
        split = {"kernel_metadata": {"out_sharding": P(None, "model")}, "bias_metadata": {"out_sharding": P("model")}}
        self.up = nnx.Linear(16, 32, rngs=rngs, **split)
        self.head = nnx.Linear(32, 32, rngs=rngs, **split)

    def __call__(self, x: jax.Array) -> jax.Array:
        embedded = self.embed(x, out_sharding=jax.typeof(x).sharding)
        return reshard(self.head(nnx.relu(self.up(embedded))), jax.typeof(x).sharding)


class Decoder(Model):
    """A model of texts as bonsai shards them: arrays that are made in their shards, without metadata."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.normal(0.1)
        self.table = nnx.Param(init(rngs.params(), (32, 16), out_sharding=P("tp", "fsdp")))
        self.up = nnx.Param(init(rngs.params(), (16, 32), out_sharding=P("fsdp", "tp")))
        self.down = nnx.Param(init(rngs.params(), (32, 16), out_sharding=P("tp", "fsdp")))
        self.norm = nnx.RMSNorm(16, scale_metadata={"out_sharding": P("tp")}, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        split = P("fsdp", None, "tp")
        x = self.table[...].at[x].get(out_sharding=split)
        x = x + jnp.matmul(
            nnx.silu(jnp.matmul(self.norm(x), self.up, out_sharding=split)), self.down, out_sharding=split
        )
        return jnp.dot(x, self.table[...].T, out_sharding=P("fsdp"))


def images(count: int = 3, rows: int = 16) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(count, rows, 8, 8, 3)).astype(np.float32), rng.integers(0, 10, (count, rows), np.int32)
    return [{"x": a, "y": b} for a, b in zip(x, y, strict=True)]


def texts(count: int = 3, rows: int = 16) -> list[dict[str, np.ndarray]]:
    tokens = np.random.default_rng(0).integers(0, 32, (count, rows, 9), np.int32)
    return [{"x": x[:, :-1], "y": x[:, 1:]} for x in tokens]


MODELS: dict[str, tuple[type[Model], dict[str, int], Callable[[], Any]]] = {
    "vision": (Vision, {"fsdp": 8}, images),
    "words": (Words, {"batch": 4, "model": 2}, texts),
    "decoder": (Decoder, {"fsdp": 4, "tp": 2}, texts),
}
CHEAP = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}


def mesh_of(**sizes: int) -> Mesh:
    count = int(np.prod([*sizes.values()]))
    return jax.make_mesh((*sizes.values(),), (*sizes,), devices=jax.devices()[:count])


def built(name: str, mesh: Mesh) -> Any:
    """Return a model as its author builds it: in the mesh."""
    with jax.set_mesh(mesh):
        return MODELS[name][0](rngs=nnx.Rngs(0))


def by_hand(name: str, mesh: Mesh, epochs: int = 1) -> HandLoop:
    """Return the author's loop, which has trained on the mesh."""
    rows = P(tuple(axis for axis in mesh.axis_names if axis in ("batch", "fsdp")))
    model = built(name, mesh)
    with jax.set_mesh(mesh):
        return HandLoop(model)(*(jax.device_put(x, rows) for x in MODELS[name][2]() * epochs))


KINDS = ("auto", "ddp", "fsdp", "zero1", "lazy", "all shards")
CASES = [(name, strategy) for name in MODELS for strategy in KINDS if (name, strategy) != ("decoder", "ddp")]
OFTEN = [("vision", "auto"), ("words", "lazy"), ("decoder", "all shards")]


@pytest.mark.parametrize(("name", "strategy"), thinned(CASES, *OFTEN, full=[x for x in CASES if x not in OFTEN]))
def test_losses_are_those_of_the_authors_loop(name: str, strategy: str) -> None:
    cls, sizes, batches = MODELS[name]
    mesh, losses, data = mesh_of(**sizes), Losses(), batches()
    model: Any = jl.lazy(cls, rngs=nnx.Rngs(0)) if strategy == "lazy" else built(name, mesh)
    kinds = {"lazy": "auto", "all shards": jl.strategies.FSDP(min_size=0)}
    trainer = fit(model, data, data[:1], losses, strategy=kinds.get(strategy, strategy), mesh=mesh, **CHEAP)
    hand = by_hand(name, mesh)
    assert trainer.mesh == mesh
    if name == "decoder":
        assert trainer.state.params["table"].addressable_shards[0].data.shape == (16, 4)
    np.testing.assert_allclose(losses.losses, hand.losses, rtol=1e-5)
    assert_same(trainer.module, hand.module, rtol=1e-3, atol=1e-4)


def noting(mesh: Mesh) -> tuple[Any, list[Any]]:
    """Return a model, and what its traces will have seen: how the batch, a typed and another kernel are split."""
    seen: list[Any] = []

    class Noting(Vision):
        def __call__(self, x: jax.Array) -> jax.Array:
            arrays = x, self.up.kernel[...], self.head.kernel[...]
            seen.append(tuple(jax.typeof(x).sharding.spec for x in arrays))
            return super().__call__(x)

    with jax.set_mesh(mesh):
        return Noting(rngs=nnx.Rngs(0)), seen


TYPES = (P("fsdp", None, None, None), P("fsdp", None), P(None, None))


def test_what_a_step_sees_is_typed_and_what_leaves_a_fit_is_on_the_mesh() -> None:
    mesh, batches = mesh_of(fsdp=8), images(1)
    model, seen = noting(mesh)
    trainer = fit(model, batches, strategy="ddp", mesh=mesh, **CHEAP)
    assert {*seen} == {TYPES}
    assert trainer.state.params["up"]["kernel"].addressable_shards[0].data.shape == (8, 128)
    assert model.up.kernel[...].sharding == NamedSharding(mesh, P("fsdp", None))
    assert {x.sharding.mesh for x in jax.tree.leaves(nnx.state(model))} == {mesh}
    (prediction,) = trainer.predict(model, batches)
    model.eval()
    with jax.set_mesh(mesh):
        result = model(jax.device_put(batches[0]["x"], P("fsdp")))
    applied = trainer.apply(lambda net, x: net(x), batches[0]["x"])
    np.testing.assert_allclose(result, prediction, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(applied, prediction, rtol=1e-5, atol=1e-6)
    trainer.fit(model, batches)  # its arrays are typed now


def test_what_is_split_by_size_is_gathered_in_a_step() -> None:
    mesh, batches = mesh_of(fsdp=8), images(1)
    model, seen = noting(mesh)
    trainer = fit(model, batches, strategy=jl.strategies.FSDP(min_size=0), mesh=mesh, **CHEAP)
    assert {*seen} == {TYPES}
    params = trainer.state.params
    assert params["head"]["kernel"].addressable_shards[0].data.shape == (8, 10)
    assert params["up"]["kernel"].addressable_shards[0].data.shape == (8, 128)
    assert not any(explicit_axes(x.sharding.mesh) for x in jax.tree.leaves(nnx.state(model)))
    trainer.fit(model, batches)
    assert {*seen} == {TYPES}


def test_one_device_trains_as_eight_do() -> None:
    losses = []
    for mesh, strategy in ((mesh_of(batch=8, model=1), "auto"), (mesh_of(batch=1, model=1), "ddp"), (None, "single")):
        kept = Losses()
        with nnx.use_eager_sharding(False):
            model = Words(rngs=nnx.Rngs(0))
        fit(model, texts(), None, kept, strategy=strategy, mesh=mesh, **CHEAP)
        losses.append(kept.losses)
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    np.testing.assert_allclose(losses[2], losses[0], rtol=1e-5)
    strategy = jl.strategies.FSDP(axis_types="explicit")
    trainer = fit(built("vision", mesh_of(fsdp=1)), images(1), strategy=strategy, devices=1, **CHEAP)
    assert trainer.mesh == mesh_of(fsdp=1)


class Plain(Words):
    """The same without a word of shardings."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(nnx.relu(self.up(self.embed(x))))


OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "fused": {"steps_per_execution": 3, "precision": "bf16-mixed"},
    "checked": {"nan_policy": "skip", "accumulate_grad_batches": 2},
    "unchecked": {"nan_policy": "ignore"},
}


@pytest.mark.parametrize("options", thinned(OPTIONS, "window", "fused", full=["checked", "unchecked"]))
def test_options_of_a_step_do_what_they_do_on_auto_axes(options: str) -> None:
    rows, mesh = [], mesh_of(batch=4, model=2)
    for cls, axes in ((Words, mesh), (Plain, {"batch": 4, "model": 2})):
        with nnx.use_eager_sharding(False):
            model = cls(rngs=nnx.Rngs(0))
        callbacks = [jl.callbacks.EMA(0.5), jl.callbacks.GradientNorm()]
        data = texts()
        trainer = fit(model, data, data, *callbacks, strategy="ddp", mesh=axes, **CHEAP, **OPTIONS[options])
        rows.append((model, trainer.callback_metrics))
    assert_same(rows[0][0], rows[1][0])
    assert rows[0][1] == pytest.approx(rows[1][1], rel=1e-5)


class Steps(Model):
    """Three layers that a scan goes through."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.vmap(lambda key: nnx.Linear(32, 32, rngs=nnx.Rngs(key)))(jax.random.split(rngs(), 3))
        self.mix, self.head = nnx.Param(jnp.eye(32)), nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x, mix = x.reshape(x.shape[0], -1)[:, :32], self.mix[...]

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x: jax.Array, layer: nnx.Linear) -> jax.Array:
            return jnp.tanh(layer(x)) @ mix

        return self.head(run(x, self.layers))


@pytest.mark.parametrize("remat", thinned([False, True], True))
def test_layers_of_a_scan_are_gathered_one_at_a_time(remat: bool) -> None:
    models, collectives = [], []
    for mesh in (mesh_of(data=8), {"data": 8}):
        models.append(Steps(rngs=nnx.Rngs(0)))
        strategy = jl.strategies.FSDP(min_size=0, remat=remat)
        trainer = fit(models[-1], images(2), strategy=strategy, mesh=mesh, **CHEAP)
        text = lowered(trainer, "train_step", images(1)[0]).compile().as_text()
        collectives.append({x.kind: x.calls for x in count_collectives(text)}["all-gather"])
    assert_same(*models)
    assert collectives[0] <= collectives[1]


def test_a_resumed_run_continues_on_one_device() -> None:
    saves = {"strategy": "ddp", "default_root_dir": "run", "enable_checkpointing": True, **CHEAP}
    fit(built("words", mesh_of(batch=4, model=2)), texts(), mesh=mesh_of(batch=4, model=2), **saves)
    model = built("words", mesh_of(batch=1, model=1))
    trainer = fit(model, texts(), mesh=mesh_of(batch=1, model=1), max_epochs=2, resume="auto", **saves)
    assert trainer.global_step == 6
    assert_same(model, by_hand("words", mesh_of(batch=4, model=2), epochs=2).module)


def test_a_loop_of_ones_own_and_an_export() -> None:
    batches, mesh = images(), mesh_of(fsdp=8)
    state, step = jl.compile_step(built("vision", mesh), batch=batches[0], strategy=jl.strategies.DDP(mesh=mesh))
    losses = []
    for batch in batches:
        state, logs = step(state, batch)
        losses.append(float(logs["loss"]))
    np.testing.assert_allclose(losses, by_hand("vision", mesh).losses, rtol=1e-5)
    model = step.module(state)
    data = jl.export(model, batches[0])
    model.eval()
    with jax.set_mesh(mesh):
        wanted = model(jax.device_put(batches[0]["x"], P("fsdp")))
        result = jax.export.deserialize(data).call(batches[0])
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
    assert len(jax.export.deserialize(data).call(jax.tree.map(lambda x: x[:3], batches[0]))) == 3


def test_what_jax_refuses_is_explained() -> None:
    def notes(model: Any, data: Any, **arguments: Any) -> str:
        with pytest.raises(Exception) as raised:
            fit(model, data, **({"strategy": "auto"} | arguments), **CHEAP)
        return "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])

    with nnx.use_eager_sharding(False):
        vision, words, plain = Vision(rngs=nnx.Rngs(0)), Words(rngs=nnx.Rngs(0)), Plain(rngs=nnx.Rngs(0))
    assert "{'data': 8} are Auto" in notes(vision, images(1), strategy="fsdp")
    assert "{'data': 8} has the Explicit axes" in notes(vision, images(1), mesh=mesh_of(data=8))
    assert "make it with drop_remainder=True" in notes(vision, images(1, rows=5), mesh=mesh_of(fsdp=8))
    assert "Trainer(mesh={'batch': 8})" in notes(plain, texts(1), mesh=mesh_of(batch=8))
    assert "No mesh is in context" in notes(words, texts(1), strategy="shard_map")


def test_axis_types_are_asked_for_by_word() -> None:
    mesh = jl.sharding.mesh({"batch": 4, "model": -1}, axis_types="explicit")
    assert mesh.axis_types == (AxisType.Explicit,) * 2
    strategy = jl.strategies.DDP(mesh={"batch": 4, "model": 2}, axis_types="explicit")
    assert fit(jl.lazy(Words, rngs=nnx.Rngs(0)), texts(1), strategy=strategy, **CHEAP).mesh == mesh
    assert jl.sharding.mesh({"batch": -1}).axis_types == (AxisType.Auto,)
    tensor = jl.strategies.TensorParallel(fsdp=4, tp=2, axis_types="explicit")
    decoder = jl.lazy(Decoder, rngs=nnx.Rngs(0))
    assert fit(decoder, texts(1), strategy=tensor, **CHEAP).mesh == mesh_of(fsdp=4, tp=2)
    mixed = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    assert fit(jl.lazy(Words, rngs=nnx.Rngs(0)), texts(1), mesh=mixed, strategy="ddp", **CHEAP).mesh == mixed
    refuses(jl.errors.ArgumentError, lambda: jl.strategies.FSDP(axis_types="manual"), "axis_types")  # type: ignore[arg-type]


def test_an_optimizer_that_multiplies_matrices_takes_a_typed_module() -> None:
    class Muon(Vision):
        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.contrib.muon(1e-2)

    mesh, losses = mesh_of(fsdp=8), []
    for axes in (mesh, mesh_of(fsdp=1)):
        kept = Losses()
        with jax.set_mesh(axes):
            model = Muon(rngs=nnx.Rngs(0))
        fit(model, images(2), None, kept, mesh=axes, strategy="ddp", **CHEAP)
        losses.append(kept.losses)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
