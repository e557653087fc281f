"""The compiled step without a Trainer, a mesh of one's own, and functions run on the newest weights."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from kit.batches import sized
from kit.by_hand import assert_same, params_of
from kit.journal import hooks
from kit.modules import Linear, module
from kit.refusals import refuses
from kit.trainers import FOUR, STRATEGIES, fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError, ArgumentTypeError, DataError, JaxlitError, ModuleError, StateError

BATCHES = sized(8, 8, 5, features=8)  # 5 rows do not divide among 8 devices
X = BATCHES[0]["x"]
DTYPES: list[Any] = []  # that the step was traced with


class Line(Linear):
    def __init__(self, rate: float = 0.0, *, rngs: nnx.Rngs) -> None:
        self.kernel, self.bias = nnx.Param(rngs.params.normal((8, 1))), nnx.Param(jnp.zeros(1))
        self.drop, self.steps = nnx.Dropout(rate, rngs=rngs), nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(self.drop(x))

    def training_step(self, batch: Any) -> jax.Array:
        DTYPES.append((self.kernel[...].dtype, batch["x"].dtype))
        self.steps[...] += 1
        loss = self.loss(batch)
        self.log("twice", 2 * loss)
        self.log("total", jnp.sum(batch["y"]), reduce_fx="sum")
        return loss


def make_line(seed: int = 0, rate: float = 0.0) -> Line:
    return Line(rate, rngs=nnx.Rngs(seed))


def by_hand(module: Any, batches: Any = BATCHES) -> tuple[list[float], list[dict[str, np.ndarray]]]:
    """Return the losses, and the weights at first and after each step, by the formula in float64."""
    weights = {name: x.astype(np.float64) for name, x in params_of(module).items()}
    kernel, bias = weights["['kernel']"], weights["['bias']"]
    losses, history, speed = [], [weights], [0.0, 0.0]
    for batch in batches:
        error = batch["x"] @ kernel + bias - batch["y"]
        losses.append(float(np.mean(error**2)))
        grads = 2 * batch["x"].T @ error / len(error), 2 * error.mean(0)
        speed = [0.9 * v + g for v, g in zip(speed, grads, strict=True)]
        kernel, bias = kernel - 0.1 * speed[0], bias - 0.1 * speed[1]
        history.append({"['kernel']": kernel, "['bias']": bias})
    return losses, history


def params_in(state: Any) -> dict[str, Any]:
    return {f"['{name}']": np.asarray(x) for name, x in state.params.items()}


def output(weights: dict[str, np.ndarray], x: Any = X) -> Any:
    return pytest.approx(x @ weights["['kernel']"] + weights["['bias']"], rel=1e-5, abs=1e-5)


def compiled(model: Any = None, strategy: Any = "single", **arguments: Any) -> tuple[Any, Any]:
    given = {"batch": BATCHES[0], "strategy": splitting(strategy) if isinstance(strategy, str) else strategy}
    return jl.compile_step(make_line() if model is None else model, **(given | arguments))


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "fsdp", "pmap", full=FOUR))
def test_a_compiled_step_is_that_of_an_optax_loop(strategy) -> None:
    module = make_line()
    losses, history = by_hand(module)
    state, step = compiled(module, strategy)
    for batch, loss, params in zip(BATCHES, losses, history[1:], strict=True):
        state, logs = step(state, batch)
        assert sorted(logs) == ["loss", "total", "twice"]
        assert {(x.shape, x.dtype) for x in logs.values()} == {((), jnp.dtype(jnp.float32))}
        result = [float(logs[name]) for name in ("loss", "twice", "total")]
        assert result == pytest.approx([loss, 2 * loss, batch["y"].sum(dtype=np.float64)], rel=1e-5, abs=1e-6)
        assert_same(params_in(state), params)
    trained = step.module(state)
    assert type(trained) is Line and trained.hparams == {"rate": 0.0}
    assert_same(trained, history[-1])
    assert (int(trained.steps[...]), int(state.step)) == (3, 3)
    assert int(module.steps[...]) == 0, "the module that was passed in is as it was"
    assert_same(module, history[0], rtol=0, atol=0)
    if strategy == "fsdp":
        assert {x.data.shape for x in state.params["kernel"].addressable_shards} == {(1, 1)}
        assert step.strategy.num_replicas == 8


@pytest.mark.parametrize("strategy", thinned(("single", "fsdp", "pmap", "zero1", "replicas:8"), "single", "pmap"))
def test_the_module_of_a_state_is_a_copy(strategy) -> None:
    _, history = by_hand(make_line())
    state, step = compiled(strategy=strategy)
    state, _ = step(state, BATCHES[0])
    first = step.module(state)
    # A state is a pytree that copies and rebuilds.
    kept, (leaves, treedef) = jax.tree.map(jnp.copy, state), jax.tree.flatten(state)
    assert all(isinstance(x, jax.Array) for x in leaves)
    rebuilt = jax.tree.unflatten(treedef, leaves)
    assert jax.tree.structure(rebuilt) == treedef == jax.tree.structure(kept)
    after, _ = step(rebuilt, BATCHES[1])
    assert_same(first, history[1])
    assert_same(step.module(after), history[2])
    first.kernel[...] = jnp.zeros((8, 1))
    assert_same(params_in(after), history[2])
    # What the step took is gone, in whichever state it was; the copy is not, and trains alike.
    words = r"a state that an earlier step has overwritten\. Continue with the one"
    refuses(StateError, lambda: step(state, BATCHES[1]), words)
    for old in (state, rebuilt):
        with pytest.raises(RuntimeError, match="deleted"):
            np.asarray(old.params["kernel"])
    assert_same(params_in(kept), history[1])
    assert_same(params_in(step(kept, BATCHES[1])[0]), params_in(after), rtol=0, atol=0)


def test_a_compiled_step_in_mixed_precision_keeps_float32() -> None:
    DTYPES.clear()
    state, step = compiled(strategy="shard_map", precision="16-mixed")
    for batch in BATCHES[:2]:
        state, logs = step(state, batch)
    assert set(DTYPES) == {(jnp.dtype("float16"),) * 2}
    kept = [x.dtype for x in jax.tree.leaves((state.params, state.opt_state)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {*kept, logs["loss"].dtype} == {jnp.dtype(jnp.float32)}


def test_a_lazy_module_is_built_from_the_seed_and_trained() -> None:
    _, history = by_hand(make_line(seed=7))
    state, step = compiled(jl.lazy(Line), "fsdp", seed=7)
    for batch in BATCHES:
        state, _ = step(state, batch)
    assert_same(step.module(state), history[-1])
    assert step.module(state).hparams == {"rate": 0.0}


@pytest.mark.parametrize(
    ("error", "given", "words"),
    [
        (ArgumentError, {"strategy": "fspd"}, "fspd.*fsdp"),
        (ArgumentTypeError, {"strategy": 3}, "strategy=.*3"),
        (ArgumentTypeError, {"strategy": jl.strategies.DDP}, r"DDP\(\)"),
        *((JaxlitError, {"devices": x}, f"devices=.*{x}") for x in (0, True, "all", 99)),
        (ArgumentError, {"precision": "bf16"}, "precision=.*bf16-mixed.*'bf16'"),
        *((ArgumentTypeError, {"model": x}, "module.*TrainModule") for x in (object(), Line)),
        (DataError, {"batch": {"x": np.zeros((8, 8)), "y": np.zeros((7, 1))}}, "batch"),
        (DataError, {"batch": {"x": "text"}}, "batch"),
        (DataError, {"batch": {}}, "batch"),
        (TypeError, {"stategy": "ddp"}, "stategy"),
        *((JaxlitError, {"seed": x}, "seed") for x in ("1", -1, True)),
        (ModuleError, {"model": type("No", (jl.TrainModule,), {"training_step": 1})()}, "configure_optimizers"),
        (ModuleError, {"model": module(jl.TrainModule.training_step)}, "training_step"),
    ],
)
def test_a_wrong_argument_of_compile_step_is_refused_by_name(error, given, words) -> None:
    refuses(error, lambda: compiled(**({"strategy": "single"} | given)), words)


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    count = int(np.prod(list(axes.values())))
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(*axes.values()), tuple(axes))


@pytest.mark.parametrize(
    ("kind", "axes", "batch_axes", "replicas"),
    [
        ("DDP", {"data": 2, "model": 4}, "data", 2),
        ("FSDP", {"fsdp": 4, "model": 2}, "fsdp", 4),
        ("FSDP", {"data": 2, "fsdp": 4}, "data fsdp", 8),
        ("ShardMapDDP", {"rows": 2}, "rows", 2),
        pytest.param("FSDP", {"data": 8}, "data", 8, marks=pytest.mark.full),
        pytest.param("ShardMapDDP", {"data": 4, "model": 2}, "data", 4, marks=pytest.mark.full),
    ],
)
def test_a_strategy_trains_on_a_mesh_of_ones_own(kind, axes, batch_axes, replicas) -> None:
    mesh, more = mesh_of(**axes), {"min_size": 0} if kind == "FSDP" else {}
    strategy = getattr(jl.strategies, kind)(mesh=mesh, **more)
    model = make_line()
    _, history = by_hand(model)
    trainer = fit(model, BATCHES, strategy=strategy)
    assert_same(model, history[-1])
    assert (strategy.batch_axes, strategy.num_replicas) == (tuple(batch_axes.split()), replicas)
    kernel = trainer.state.params["kernel"]
    assert kernel.sharding.device_set == set(mesh.devices.flat)
    assert kernel.sharding.mesh.axis_names == mesh.axis_names
    part = 8 // axes.get("fsdp", replicas) if kind == "FSDP" else 8
    assert {x.data.shape for x in kernel.addressable_shards} == {(part, 1)}
    if kind != "ShardMapDDP":  # rows are split over the named axis and no other
        assert {x.data.shape for x in strategy.shard_batch(BATCHES[0])["x"].addressable_shards} == {(8 // replicas, 8)}


def test_a_mesh_of_make_mesh_is_taken_whatever_its_axis_types() -> None:
    model, mesh = make_line(), jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    _, history = by_hand(model)
    fit(model, BATCHES, strategy=jl.strategies.DDP(mesh=mesh))
    assert_same(model, history[-1])


def test_devices_beside_a_mesh_must_be_those_of_the_mesh() -> None:
    strategy = jl.strategies.DDP(mesh=mesh_of(data=4))
    refuses(ArgumentError, lambda: make_trainer(strategy=strategy, devices=2).strategy, r"devices=2.*mesh of 4")
    assert make_trainer(strategy=strategy, devices=4).strategy.mesh.size == 4
    state, step = compiled(strategy=jl.strategies.DDP(mesh=mesh_of(data=2, model=2)))
    state, _ = step(state, BATCHES[0])
    assert len(state.params["kernel"].sharding.device_set) == 4


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp", "pmap"], "fsdp"))
def test_apply_runs_on_the_newest_weights(strategy) -> None:
    result, traces, inputs = [], [], sized(5, features=8, seed=1)[0]["x"]  # does not divide among 8 devices

    def predict(module: Line, x: jax.Array, shift: Any) -> Any:
        traces.append(x.shape)
        return {"out": module(x) + shift["by"], "rows": x.shape[0] * jnp.ones(())}

    def look(trainer: jl.Trainer, *_: Any) -> None:
        result.append(trainer.apply(predict, inputs, {"by": np.float32(1)}))

    names = ("on_fit_start", "on_train_batch_end", "on_train_epoch_end")
    trainer = fit(make_line(), BATCHES, None, hooks(**dict.fromkeys(names, look)), strategy=splitting(strategy))
    look(trainer)
    _, history = by_hand(make_line())
    for got, params in zip(result, [*history, history[-1], history[-1]], strict=True):
        assert np.asarray(got["out"]) - 1 == output(params, inputs) and float(got["rows"]) == 5
    assert traces == [(5, 8)]
    trainer.apply(predict, inputs[:3], {"by": np.float32(1)})
    trainer.apply(lambda module, x: predict(module, x, {"by": 0}), inputs)
    assert traces == [(5, 8), (3, 8), (5, 8)], "once more for another shape, and for another function"


@pytest.mark.parametrize("strategy", thinned(["ddp", "shard_map"], "shard_map"))
def test_apply_runs_a_copy_in_evaluation_mode(strategy) -> None:
    # Half of the inputs would be dropped in training mode; what is written to the copy is lost.
    model, result = make_line(rate=0.5), []

    def predict(module: Line, x: jax.Array) -> jax.Array:
        out = module(x)
        module.steps[...] += 100
        module.kernel[...] = jnp.zeros((8, 1))
        return out

    look = hooks(on_train_batch_end=lambda trainer, module, *_: result.append(trainer.apply(predict, X)))
    trainer = fit(model, BATCHES[:1], None, look, strategy=strategy)
    result.append(trainer.apply(predict, X))
    assert int(model.steps[...]) == 1
    assert [np.asarray(out) == output(params_of(model)) for out in result] == [True, True]


def total(module: Line) -> jax.Array:
    return module.kernel[...].sum()


def test_apply_takes_what_the_module_of_the_newest_run_holds_now() -> None:
    result: list[float] = []

    def write(trainer: jl.Trainer, module: Line) -> None:
        module.kernel[...] = jnp.full((8, 1), float(len(result) + 1))
        result.append(float(trainer.apply(total)))

    look = hooks(on_train_epoch_start=lambda t, m: result.append(float(t.apply(total))))
    first, other = make_line(), module(base=Linear, init=lambda self: Linear.__init__(self, 8))
    trainer = make_trainer(hooks(on_train_epoch_start=write, on_train_epoch_end=write), look, strategy="ddp")
    refuses(ArgumentError, lambda: trainer.apply(total), r"Trainer\.apply")
    trainer.fit(first, BATCHES)
    assert result == [8.0, 8.0, 24.0], "what this hook, or another one, has just written"
    first.kernel[...] = jnp.full((8, 1), 100.0)
    assert float(trainer.apply(total)) == 800.0
    first.eval()  # a mode is no array
    assert float(trainer.apply(total)) == 800.0
    first.kernel.set_value(jnp.ones((2, 1)))
    assert float(trainer.apply(total)) == 2.0
    trainer.predict(other, BATCHES)
    assert float(trainer.apply(total)) == pytest.approx(0.0, abs=1e-6)
    other.kernel[...] = jnp.ones((8, 1))
    assert float(trainer.apply(total)) == 8.0
    low, told = fit(make_line(rate=0.25), BATCHES[:1], precision="bf16-mixed"), []
    assert low.apply(lambda module: told.append(module.hparams) or total(module)).dtype == jnp.bfloat16
    assert told == [{"rate": 0.25}]
