"""The compiled step without a Trainer, a mesh of one's own, and functions run on the newest weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import sized
from kit.journal import hooks
from kit.trainers import STRATEGIES, make_trainer, splitting

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError, ModuleError, StateError

MIXED = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16}


class Line(jl.TrainModule):
    """Linear regression, with dropout in front where it is asked for, and a count of its steps."""

    def __init__(self, rate: float = 0.0, *, rngs: nnx.Rngs) -> None:
        self.kernel = nnx.Param(rngs.params.normal((8, 1)))
        self.bias = nnx.Param(jnp.zeros(1))
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.drop(x) @ self.kernel + self.bias

    def training_step(self, batch: Any) -> jax.Array:
        seen.append((self.kernel[...].dtype, batch["x"].dtype))
        self.steps[...] += 1
        loss = jnp.mean((self(batch["x"]) - batch["y"]) ** 2)
        self.log("twice", 2 * loss)
        self.log("total", jnp.sum(batch["y"]), reduce_fx="sum")
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return make_tx()


seen: list[Any] = []  # dtypes that the step was traced with


def make_tx() -> optax.GradientTransformation:
    return optax.sgd(0.05, momentum=0.9)


def make_line(seed: int = 0) -> Line:
    return Line(rngs=nnx.Rngs(seed))


def make_batches(*rows: int) -> list[dict[str, np.ndarray]]:
    return sized(*rows, features=8)


def train_by_hand(module: Line, batches: list[Any], low: Any = jnp.float32) -> tuple[list[float], list[Any]]:
    """Train in plain JAX and optax, computing in `low`; returns the losses and the parameters after each step."""
    params = {"kernel": jnp.copy(module.kernel[...]), "bias": jnp.copy(module.bias[...])}
    tx = make_tx()
    opt_state = tx.init(params)

    @jax.jit
    def gradient(params: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            p, b = jax.tree.map(lambda x: x.astype(low), (params, batch))
            return jnp.mean((b["x"] @ p["kernel"] + p["bias"] - b["y"]) ** 2).astype(jnp.float32)

        return jax.value_and_grad(loss_of)(params)

    losses, history = [], []
    for batch in batches:
        loss, grads = gradient(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
        history.append({k: np.asarray(v) for k, v in params.items()})
    return losses, history


def assert_params(found: Any, expected: Any) -> None:
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(np.asarray(found[name]), expected[name], rtol=1e-6, atol=1e-6)


def params_of(module: Any) -> dict[str, np.ndarray]:
    return {"kernel": np.asarray(module.kernel[...]), "bias": np.asarray(module.bias[...])}


# compile_step ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_compiled_step_is_that_of_an_optax_loop(strategy: str) -> None:
    module, batches = make_line(), make_batches(8, 16, 5, 8)  # 5 rows do not divide among 8 devices
    losses, history = train_by_hand(module, batches)
    before = params_of(module)

    state, step = jl.compile_step(module, batch=batches[0], strategy=splitting(strategy))
    for batch, loss, params in zip(batches, losses, history, strict=True):
        state, logs = step(state, batch)
        assert sorted(logs) == ["loss", "total", "twice"]
        assert {(x.shape, x.dtype) for x in logs.values()} == {((), jnp.dtype(jnp.float32))}
        assert float(logs["loss"]) == pytest.approx(loss, rel=1e-6)
        assert float(logs["twice"]) == pytest.approx(2 * loss, rel=1e-6)
        assert float(logs["total"]) == pytest.approx(float(batch["y"].sum(dtype=np.float64)), rel=1e-6, abs=1e-6)
        assert_params(state.params, params)

    trained = step.module(state)
    assert type(trained) is Line
    assert_params(params_of(trained), history[-1])
    assert int(trained.steps[...]) == 4
    assert int(state.step) == 4
    # The module that was passed in is as it was.
    assert int(module.steps[...]) == 0
    np.testing.assert_array_equal(params_of(module)["kernel"], before["kernel"])


@pytest.mark.parametrize("strategy", ("single", "fsdp", "pmap"))
def test_the_module_of_a_state_is_a_copy_that_later_steps_leave_alone(strategy: str) -> None:
    batches = make_batches(8, 8)
    _, history = train_by_hand(make_line(), batches)
    state, step = jl.compile_step(make_line(), batch=batches[0], strategy=splitting(strategy))
    state, _ = step(state, batches[0])
    first = step.module(state)
    state, _ = step(state, batches[1])
    assert_params(params_of(first), history[0])
    assert_params(params_of(step.module(state)), history[1])
    first.kernel[...] = jnp.zeros((8, 1))
    assert_params(state.params, history[1])


@pytest.mark.parametrize("strategy", ("single", "zero1", "simulate:8"))
def test_a_state_is_a_pytree_that_copies_and_rebuilds(strategy: str) -> None:
    batches = make_batches(8, 8)
    _, history = train_by_hand(make_line(), batches)
    state, step = jl.compile_step(make_line(), batch=batches[0], strategy=splitting(strategy))
    state, _ = step(state, batches[0])
    kept = jax.tree.map(jnp.copy, state)
    leaves, treedef = jax.tree.flatten(state)
    assert all(isinstance(x, jax.Array) for x in leaves)
    rebuilt = jax.tree.unflatten(treedef, leaves)
    assert jax.tree.structure(rebuilt) == treedef == jax.tree.structure(kept)

    after, _ = step(rebuilt, batches[1])
    assert_params(after.params, history[1])
    with pytest.raises(StateError, match=r"a state that an earlier step has overwritten\. Go on with the one"):
        step(state, batches[1])
    # What the step took is gone, in whichever state it was; the copy is not, and trains alike.
    for old in (state, rebuilt):
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(old.params["kernel"])
    assert_params(kept.params, history[0])
    again, _ = step(kept, batches[1])
    np.testing.assert_array_equal(np.asarray(again.params["kernel"]), np.asarray(after.params["kernel"]))


@pytest.mark.parametrize(("strategy", "precision"), (("fsdp", "bf16-mixed"), ("shard_map", "16-mixed")))
def test_a_compiled_step_in_mixed_precision_sees_16_bits_and_keeps_float32(strategy: str, precision: str) -> None:
    seen.clear()
    batches = make_batches(8, 8)
    state, step = jl.compile_step(make_line(), batch=batches[0], strategy=splitting(strategy), precision=precision)
    for batch in batches:
        state, logs = step(state, batch)
    for dtypes in seen:
        assert dtypes == (MIXED[precision], MIXED[precision])
    kept = [x.dtype for x in jax.tree.leaves((state.params, state.opt_state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert set(kept) == {jnp.dtype(jnp.float32)}
    assert logs["loss"].dtype == jnp.float32


def test_a_compiled_step_in_bfloat16_is_that_of_a_loop_that_casts() -> None:
    batches = make_batches(8, 5, 8)
    losses, history = train_by_hand(make_line(), batches, jnp.bfloat16)
    exact, _ = train_by_hand(make_line(), batches)
    state, step = jl.compile_step(make_line(), batch=batches[0], strategy="single", precision="bf16-mixed")
    for batch, loss in zip(batches, losses, strict=True):
        state, logs = step(state, batch)
        assert float(logs["loss"]) == pytest.approx(loss, rel=1e-6)
    assert_params(state.params, history[-1])
    assert max(abs(a - b) for a, b in zip(losses, exact, strict=True)) > 1e-4, "float32 would give the same"


@pytest.mark.parametrize("strategy", ("fsdp", "shard_map"))
def test_a_lazy_module_is_built_from_the_seed_and_trained(strategy: str) -> None:
    batches = make_batches(8, 8)
    losses, history = train_by_hand(make_line(seed=7), batches)
    model = jl.lazy(Line)
    state, step = jl.compile_step(model, batch=batches[0], strategy=splitting(strategy), seed=7)
    for batch, loss in zip(batches, losses, strict=True):
        state, logs = step(state, batch)
        assert float(logs["loss"]) == pytest.approx(loss, rel=1e-6)
    assert_params(params_of(step.module(state)), history[-1])


def test_the_module_of_a_state_has_the_hyperparameters_of_the_module() -> None:
    for model in (Line(0.25, rngs=nnx.Rngs(0)), jl.lazy(Line, 0.25, rngs=nnx.Rngs(0)), jl.lazy(Line, 0.25)):
        state, step = jl.compile_step(model, batch=make_batches(8)[0], strategy="single")
        assert step.module(state).hparams == {"rate": 0.25}


def test_fsdp_holds_the_state_of_a_compiled_step_in_parts() -> None:
    state, step = jl.compile_step(make_line(), batch=make_batches(8)[0], strategy=jl.strategies.FSDP(min_size=0))
    for _ in range(2):
        state, _ = step(state, make_batches(8)[0])
    assert {x.data.shape for x in state.params["kernel"].addressable_shards} == {(1, 1)}
    assert step.strategy.num_replicas == 8


def test_two_compiled_steps_do_not_share_a_state() -> None:
    module, batches = make_line(), make_batches(8, 8)
    _, history = train_by_hand(module, batches)
    one, step_one = jl.compile_step(module, batch=batches[0], strategy="single")
    two, step_two = jl.compile_step(module, batch=batches[0], strategy="ddp")
    for batch in batches:
        one, _ = step_one(one, batch)
    for batch in batches:
        two, _ = step_two(two, batch)
    assert_params(one.params, history[-1])
    assert_params(two.params, history[-1])


@pytest.mark.parametrize(
    ("error", "arguments", "words"),
    (
        (ArgumentError, {"strategy": "fspd"}, "fspd.*fsdp"),
        (ArgumentTypeError, {"strategy": 3}, "strategy=.*3"),
        (ArgumentTypeError, {"strategy": jl.strategies.DDP}, r"DDP\(\)"),
        (ArgumentError, {"devices": 0}, "devices=.*0"),
        (ArgumentError, {"devices": True}, "devices=.*True"),
        (ArgumentError, {"devices": "all"}, "devices=.*'all'"),
        (ArgumentError, {"devices": 99}, "devices=99"),
        (ArgumentError, {"precision": "bf16"}, "precision=.*bf16-mixed.*'bf16'"),
        (ArgumentTypeError, {"module": object()}, "module.*TrainModule"),
        (ArgumentTypeError, {"module": Line}, "module.*TrainModule"),
        (ArgumentTypeError, {"module": nnx.Linear(8, 1, rngs=nnx.Rngs(0))}, "module.*TrainModule"),
        (DataError, {"batch": {"x": np.zeros((8, 8)), "y": np.zeros((7, 1))}}, "batch"),
        (DataError, {"batch": {"x": "text"}}, "batch"),
        (DataError, {"batch": {}}, "batch"),
        (TypeError, {"stategy": "ddp"}, "stategy"),
        (ArgumentError, {"seed": "1"}, "seed"),
        (ArgumentError, {"seed": -1}, "seed"),
        (ArgumentError, {"seed": True}, "seed"),
    ),
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_a_wrong_argument_of_compile_step_is_refused_by_name(
    error: type[Exception], arguments: dict[str, Any], words: str
) -> None:
    given = {"module": make_line(), "batch": make_batches(8)[0], "strategy": "single"} | arguments
    with pytest.raises(error, match=words):
        jl.compile_step(given.pop("module"), **given)


def test_a_module_without_optimizer_or_step_is_refused_by_compile_step() -> None:
    class NoOptimizer(Line):
        configure_optimizers = jl.TrainModule.configure_optimizers

    class NoStep(Line):
        training_step = jl.TrainModule.training_step

    for cls, missing in ((NoOptimizer, "configure_optimizers"), (NoStep, "training_step")):
        with pytest.raises(ModuleError, match=missing):
            jl.compile_step(cls(rngs=nnx.Rngs(0)), batch=make_batches(8)[0], strategy="single")


# A mesh of one's own ---------------------------------------------------------------------------------


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    count = int(np.prod(list(axes.values())))
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes))


@pytest.mark.parametrize(
    ("kind", "axes", "batch_axes", "replicas"),
    (
        ("DDP", {"rows": 8}, "rows", 8),
        ("DDP", {"data": 2, "model": 4}, "data", 2),
        ("FSDP", {"data": 8}, "data", 8),
        ("FSDP", {"fsdp": 4, "model": 2}, "fsdp", 4),
        ("FSDP", {"data": 2, "fsdp": 4}, "data fsdp", 8),
        ("ShardMapDDP", {"rows": 2}, "rows", 2),
        ("ShardMapDDP", {"data": 4, "model": 2}, "data", 4),
    ),
    ids=str,
)
def test_a_strategy_trains_on_a_mesh_of_ones_own(
    kind: str, axes: dict[str, int], batch_axes: str, replicas: int
) -> None:
    mesh = mesh_of(**axes)
    more = {"min_size": 0} if kind == "FSDP" else {}
    strategy = getattr(jl.strategies, kind)(mesh=mesh, **more)
    batches = make_batches(8, 8, 5)
    _, history = train_by_hand(make_line(), batches)
    module = make_line()
    trainer = make_trainer(strategy=strategy, accumulate_grad_batches=1)
    trainer.fit(module, batches)
    assert_params(params_of(module), history[-1])
    assert (strategy.batch_axes, strategy.num_replicas) == (tuple(batch_axes.split()), replicas)
    kernel = trainer.state.params["kernel"]
    assert kernel.sharding.device_set == set(mesh.devices.flat)
    assert kernel.sharding.mesh.axis_names == mesh.axis_names
    part = 8 // axes.get("fsdp", replicas) if kind == "FSDP" else 8
    assert {x.data.shape for x in kernel.addressable_shards} == {(part, 1)}
    # Rows are split over the named axis and no other.
    if kind != "ShardMapDDP":
        rows = strategy.shard_batch(batches[0])["x"]
        assert {x.data.shape for x in rows.addressable_shards} == {(8 // replicas, 8)}


def test_a_mesh_of_make_mesh_is_taken_whatever_its_axis_types() -> None:
    batches = make_batches(8, 8)
    _, history = train_by_hand(make_line(), batches)
    module = make_line()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    make_trainer(strategy=jl.strategies.DDP(mesh=mesh)).fit(module, batches)
    assert_params(params_of(module), history[-1])


def test_compile_step_takes_a_strategy_with_a_mesh() -> None:
    batches = make_batches(8, 8)
    _, history = train_by_hand(make_line(), batches)
    strategy = jl.strategies.DDP(mesh=mesh_of(data=2, model=2))
    state, step = jl.compile_step(make_line(), batch=batches[0], strategy=strategy)
    for batch in batches:
        state, _ = step(state, batch)
    assert_params(state.params, history[-1])
    assert len(state.params["kernel"].sharding.device_set) == 4


@pytest.mark.parametrize(
    ("kind", "mesh"), (("DDP", 8), ("FSDP", "data"), ("ShardMapDDP", (2, 4)), ("DDP", {"data": 8}))
)
def test_what_is_no_mesh_is_refused(kind: str, mesh: Any) -> None:
    with pytest.raises(ArgumentError, match=rf"{kind}\(mesh=\.\.\.\).*Mesh"):
        getattr(jl.strategies, kind)(mesh=mesh)


@pytest.mark.parametrize(("kind", "axis"), (("DDP", "data"), ("FSDP", "data"), ("ShardMapDDP", "data")))
def test_a_mesh_that_does_not_tell_the_batch_axis_is_refused(kind: str, axis: str) -> None:
    with pytest.raises(ArgumentError, match=rf"{kind}\(mesh=\.\.\.\).*'{axis}'.*'rows'.*'model'"):
        getattr(jl.strategies, kind)(mesh=mesh_of(rows=4, model=2))


def test_devices_beside_a_mesh_must_be_those_of_the_mesh() -> None:
    strategy = jl.strategies.DDP(mesh=mesh_of(data=4))
    with pytest.raises(ArgumentError, match=r"devices=2.*mesh of 4"):
        make_trainer(strategy=strategy, devices=2)
    make_trainer(strategy=strategy, devices=4)


# Trainer.apply ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ("single", "fsdp", "pmap"))
def test_apply_runs_on_the_newest_weights_in_hooks_and_after_fit(strategy: str) -> None:
    batches = make_batches(8, 8, 8)
    start = params_of(make_line())
    _, history = train_by_hand(make_line(), batches)
    (inputs,) = make_batches(5)  # does not divide among 8 devices
    found: list[Any] = []
    traces: list[Any] = []

    def predict(module: Line, x: jax.Array, shift: Any) -> Any:
        traces.append(x.shape)
        return {"out": module(x) + shift["by"], "rows": x.shape[0] * jnp.ones(())}

    def look(trainer: jl.Trainer, *_: Any) -> None:
        found.append(trainer.apply(predict, inputs["x"], {"by": np.float32(1)}))

    names = ("on_fit_start", "on_train_batch_end", "on_train_epoch_end")
    trainer = make_trainer(hooks(**dict.fromkeys(names, look)), strategy=splitting(strategy))
    trainer.fit(make_line(), batches)
    look(trainer)

    for got, params in zip(found, [start, *history, history[-1], history[-1]], strict=True):
        np.testing.assert_allclose(
            np.asarray(got["out"]), inputs["x"] @ params["kernel"] + params["bias"] + 1, rtol=1e-6, atol=1e-6
        )
        assert float(got["rows"]) == 5
    assert traces == [(5, 8)], "compiled once"


@pytest.mark.parametrize("strategy", ("ddp", "shard_map"))
def test_apply_runs_a_copy_in_evaluation_mode(strategy: str) -> None:
    # Half of the inputs would be dropped in training mode; what is written to the copy is lost.
    batches = make_batches(8)
    module = Line(0.5, rngs=nnx.Rngs(0))

    def predict(module: Line, x: jax.Array) -> jax.Array:
        out = module(x)
        module.steps[...] += 100
        module.kernel[...] = jnp.zeros((8, 1))
        return out

    found: list[Any] = []
    hook = hooks(on_train_batch_end=lambda trainer, module, *_: found.append(trainer.apply(predict, batches[0]["x"])))
    trainer = make_trainer(hook, strategy=splitting(strategy))
    trainer.fit(module, batches)
    found.append(trainer.apply(predict, batches[0]["x"]))
    params = params_of(module)
    assert int(module.steps[...]) == 1
    for out in found:
        np.testing.assert_allclose(
            np.asarray(out), batches[0]["x"] @ params["kernel"] + params["bias"], rtol=1e-6, atol=1e-6
        )


def test_apply_compiles_once_for_each_function_and_shape() -> None:
    traces: list[str] = []

    def one(module: Line, x: jax.Array) -> jax.Array:
        traces.append(f"one {x.shape[0]}")
        return module(x)

    def other(module: Line, x: jax.Array) -> jax.Array:
        traces.append(f"other {x.shape[0]}")
        return module(x)

    def look(trainer: jl.Trainer, *_: Any) -> None:
        trainer.apply(one, np.zeros((8, 8), np.float32))
        trainer.apply(other, np.zeros((8, 8), np.float32))
        trainer.apply(one, np.zeros((3, 8), np.float32))

    trainer = make_trainer(hooks(on_train_batch_end=look), strategy="ddp", max_epochs=2)
    trainer.fit(make_line(), make_batches(8, 8))
    look(trainer)
    assert traces == ["one 8", "other 8", "one 3"]


def test_apply_sees_what_a_hook_wrote_to_the_module() -> None:
    found: list[float] = []

    def total(module: Line) -> jax.Array:
        return module.kernel[...].sum()

    def write(trainer: jl.Trainer, module: Line) -> None:
        module.kernel[...] = jnp.ones((8, 1))

    both = [
        hooks(on_train_epoch_start=write),
        hooks(on_train_epoch_start=lambda trainer, module: found.append(float(trainer.apply(total)))),
    ]
    make_trainer(*both).fit(make_line(), make_batches(8))
    assert found == [8.0]


def kernel_of(module: Line) -> jax.Array:
    return module.kernel[...].sum()


@pytest.mark.parametrize("strategy", ("fsdp",))
def test_apply_after_a_run_takes_what_the_module_holds_now(strategy: str) -> None:
    trainer, module = make_trainer(strategy=splitting(strategy)), make_line()
    trainer.fit(module, make_batches(8))
    module.kernel[...] = jnp.full((8, 1), 100.0)
    assert float(trainer.apply(kernel_of)) == 800.0
    module.eval()  # a mode is no array
    assert float(trainer.apply(kernel_of)) == 800.0


def test_apply_in_a_hook_takes_what_the_hook_has_just_written() -> None:
    found: list[float] = []

    def write(trainer: jl.Trainer, module: Line) -> None:
        module.kernel[...] = jnp.ones((8, 1))
        found.append(float(trainer.apply(kernel_of)))

    make_trainer(hooks(on_train_epoch_end=write), strategy="ddp").fit(make_line(), make_batches(8))
    assert found == [8.0]


def test_apply_runs_the_module_of_the_newest_run() -> None:
    class Predicting(Line):
        def predict_step(self, batch: Any) -> jax.Array:
            return self(batch["x"])

    trainer, other = make_trainer(strategy="ddp"), Predicting(rngs=nnx.Rngs(1))
    trainer.fit(make_line(), make_batches(8))
    trainer.predict(other, make_batches(8))
    assert float(trainer.apply(kernel_of)) == pytest.approx(float(other.kernel[...].sum()))
    other.kernel[...] = jnp.ones((8, 1))
    assert float(trainer.apply(kernel_of)) == 8.0


def test_apply_takes_a_module_whose_arrays_have_another_shape_now() -> None:
    trainer, module = make_trainer(strategy="single"), make_line()
    trainer.fit(module, make_batches(8))
    module.kernel.set_value(jnp.ones((2, 1)))
    assert float(trainer.apply(kernel_of)) == 2.0


def test_apply_computes_in_the_precision_of_a_step() -> None:
    def dtype_of(module: Line) -> jax.Array:
        dtypes.append(module.kernel[...].dtype)
        return module.kernel[...].sum()

    dtypes: list[Any] = []
    trainer = make_trainer(strategy="single", precision="bf16-mixed")
    trainer.fit(make_line(), make_batches(8))
    trainer.apply(dtype_of)
    assert dtypes == [jnp.bfloat16]


def test_apply_before_anything_ran_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"Trainer\.apply"):
        make_trainer(strategy="single").apply(lambda module: module.kernel[...])
