"""Complex parameters: an optimizer sees the two parts of each as real arrays, along the gradients that descend."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import ROWS, random
from kit.by_hand import GRAPH, HandLoop
from kit.checkpoints import bytes_of, keep_all
from kit.inside import engine_of
from kit.modules import Linear, module
from kit.refusals import refuses
from kit.trainers import BARE, STRATEGIES, fit, splitting, thinned

import jaxlit as jl

ADAM = optax.adam(0.05)


def draw(*shape: int, seed: int = 0) -> Any:
    """Return complex numbers."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(np.complex64)


class Complex(Linear):
    """Has a complex kernel of three features and a complex bias."""

    def __init__(self) -> None:
        self.kernel, self.bias = nnx.Param(draw(3, 8)), nnx.Param(draw(8, seed=1))

    def parts(self) -> Any:
        return self.kernel[...], self.bias[...]

    def loss(self, batch: Any) -> jax.Array:
        kernel, bias = self.parts()
        return jnp.mean(jnp.abs(batch["x"] @ kernel + bias - batch["y"]) ** 2)


class Pair(Complex):
    """Has the same numbers as real parameters."""

    def __init__(self) -> None:
        for name, x in (("kernel", draw(3, 8)), ("bias", draw(8, seed=1))):
            setattr(self, name, nnx.Dict(real=nnx.Param(x.real), imag=nnx.Param(x.imag)))

    def parts(self) -> Any:
        return [x["real"][...] + 1j * x["imag"][...] for x in (self.kernel, self.bias)]


def batches(count: int = 8) -> list[Any]:
    return [{"x": batch["x"], "y": draw(ROWS, 8, seed=10 + i)} for i, batch in enumerate(random(count))]


def made(tx: Any) -> Any:
    return module(base=Complex, tx=tx)


def assert_equal(model: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for x, y in zip(model.parts(), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def of_kernel(params: Any) -> Any:
    return jax.tree.map_with_path(lambda path, _: "kernel" in jax.tree_util.keystr(path), params)


def groups(params: Any) -> Any:
    return jax.tree.map(lambda is_kernel: "a" if is_kernel else "b", of_kernel(params))


# What the module returns, what a Trainer is given, and the optimizer of the real parameters.
CASES: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "adam": (ADAM, {}, ADAM),
    "momentum, fused": (optax.sgd(0.05, momentum=0.9), {"steps_per_execution": 4}, optax.sgd(0.05, momentum=0.9)),
    "windows": (ADAM, {"accumulate_grad_batches": 2, "nan_policy": "skip"}, optax.MultiSteps(ADAM, 2)),
    "norm": (ADAM, {"gradient_clip_val": 0.5}, optax.chain(optax.clip_by_global_norm(0.5), ADAM)),
    "value": (
        *(ADAM, {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value", "nan_policy": "ignore"}),
        optax.chain(optax.clip(0.05), ADAM),
    ),
    "decay": (
        *(optax.adamw(0.05, weight_decay=0.3, mask=jl.decay_mask), {}),
        optax.adamw(0.05, weight_decay=0.3, mask=of_kernel),
    ),
    "groups": (
        *(jl.Optimizer(by={"kernel": ADAM, ...: optax.sgd(0.1)}), {}),
        optax.partition({"a": ADAM, "b": optax.sgd(0.1)}, groups),
    ),
}
EVERY = [(strategy, case) for strategy in (*STRATEGIES, "zero2") for case in CASES]
OFTEN = [("single", "groups"), ("fsdp", "windows"), ("shard_map", "norm")]
FULL = [(name, list(CASES)[i % len(CASES)]) for i, name in enumerate(STRATEGIES)]


@pytest.mark.parametrize(("strategy", "case"), thinned(EVERY, *OFTEN, full=[*FULL, ("single", "decay")]))
def test_the_parts_train_as_two_real_parameters(strategy: str, case: str) -> None:
    tx, arguments, real_tx = CASES[case]
    model = made(tx)
    fit(model, batches(), strategy=splitting(strategy), **BARE, **arguments)
    assert_equal(model, HandLoop(Pair(), real_tx)(*batches()).module.parts())
    assert model.kernel.dtype == np.complex64


@pytest.mark.full
@pytest.mark.parametrize("name", ["SGD", "Adam", "clipped"])
def test_steps_are_those_of_torch(name: str) -> None:
    torch = pytest.importorskip("torch")
    parameters = [torch.nn.Parameter(torch.tensor(draw(3, 8))), torch.nn.Parameter(torch.tensor(draw(8, seed=1)))]
    kernel, bias = parameters
    tx, optimizer = optax.sgd(0.05, momentum=0.9), torch.optim.SGD(parameters, 0.05, momentum=0.9)
    if name == "Adam":
        tx, optimizer = ADAM, torch.optim.Adam(parameters, 0.05)
    most = 0.5 if name == "clipped" else None
    for batch in batches(20):
        x, y = torch.tensor(batch["x"]).to(torch.complex64), torch.tensor(batch["y"])
        optimizer.zero_grad()
        ((x @ kernel + bias - y).abs() ** 2).mean().backward()
        if most is not None:
            torch.nn.utils.clip_grad_norm_(parameters, most)
        optimizer.step()
    model = made(tx)
    fit(model, batches(20), gradient_clip_val=most, **BARE)
    assert_equal(model, [x.detach().numpy() for x in parameters])


class Layer(nnx.Module):
    def __init__(self, seed: int) -> None:
        self.kernel = nnx.Param(draw(3, 3, seed=seed))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...]


class Deep(Complex):
    """Has complex layers, which a pipeline cuts."""

    def __init__(self) -> None:
        self.layers = nnx.List([Layer(seed) for seed in range(4)])

    def loss(self, batch: Any) -> jax.Array:
        x = batch["x"].astype(jnp.complex64)
        for layer in self.layers:
            x = layer(x)
        return jnp.mean(jnp.abs(x - batch["y"][:, :3]) ** 2)


@pytest.mark.full
def test_a_pipeline_adds_up_complex_gradients() -> None:
    one, several = (module(base=Deep, tx=optax.adam(0.01)) for _ in range(2))
    fit(one, batches(), **BARE)
    trainer = fit(several, batches(), strategy=jl.strategies.Pipeline(2, "1f1b", 4, layers="layers"), devices=4)
    assert "total" in str(trainer.explain())
    for x, y in zip(several.layers, one.layers, strict=True):
        np.testing.assert_allclose(x.kernel[...], y.kernel[...], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", thinned(["fsdp", "single", "zero1", "shard_map"], "fsdp"))
def test_a_resumed_run_ends_with_the_same_bits(strategy: str) -> None:
    def run(folder: str, epochs: int) -> jl.Trainer:
        arguments: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "logger": False}
        arguments |= {"strategy": splitting(strategy), "default_root_dir": folder, "resume": "auto"}
        ema = jl.callbacks.EMA(0.9)
        return fit(made(ADAM), batches(), None, keep_all(), ema, max_epochs=epochs, **arguments)

    straight = run("straight", 2)
    run("stopped", 1)
    resumed = run("stopped", 2)
    assert resumed.global_step == straight.global_step == 6
    assert bytes_of(resumed) == bytes_of(straight)


def test_averages_are_those_of_the_complex_numbers() -> None:
    model, loop = made(ADAM), HandLoop(Pair(), ADAM)
    fit(model, batches(), None, jl.callbacks.EMA(0.9), **BARE)
    average: Any = None
    for batch in batches():
        kernel = np.asarray(loop(batch).module.parts()[0])
        average = kernel if average is None else 0.9 * average + 0.1 * kernel
    np.testing.assert_allclose(model.kernel[...], average, rtol=1e-5, atol=1e-6)


def test_weight_files_keep_complex_numbers() -> None:
    model, other = made(ADAM), made(ADAM)
    fit(model, batches(), default_root_dir="run", logger=False)
    jl.save_weights(model, "weights.safetensors")
    jl.load_weights(other, "weights.safetensors")
    assert_equal(other, model.parts(), tolerance=0)


def test_the_norm_and_the_rate_are_those_of_the_two_parts() -> None:
    model, pair = made(ADAM), Pair()
    trainer = fit(
        *(model, batches(1), None, jl.callbacks.GradientNorm(per_parameter=True)),
        **BARE | {"gradient_clip_val": 0.1, "log_every_n_steps": 1},
    )
    grads = nnx.grad(lambda pair, batch: pair.loss(batch), **GRAPH)(pair, batches(1)[0])
    norm_of = lambda tree: float(optax.tree.norm(nnx.as_pure(tree)))  # noqa: E731
    assert trainer.history["grad_norm"][1] == pytest.approx([norm_of(grads)], rel=1e-5)
    assert trainer.history["grad_norm/bias"][1] == pytest.approx([norm_of(grads["bias"])], rel=1e-5)
    assert trainer.history["lr"][1] == pytest.approx([0.05])


def test_each_part_of_the_optimizer_state_is_split_as_its_parameter() -> None:
    trainer = fit(made(ADAM), batches(1), strategy=splitting("zero1"), **BARE)
    spec = engine_of(trainer).state.spec
    specs = {name: spec.sharding(i).spec for i, (name, _, _) in enumerate(spec.entries)}
    names = [f"opt_state[0].{moment}.kernel.{part}" for moment in ("mu", "nu") for part in ("real", "imag")]
    assert [specs[name] for name in names] == [jax.sharding.PartitionSpec(None, "data")] * 4
    assert "data" not in specs["module.kernel"]


class Bad(Complex):
    """Keeps a complex mean; a trap makes it, and the imaginary part of the bias' gradient, not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nnx.BatchStat(jnp.zeros((), jnp.complex64))

    def loss(self, batch: Any) -> jax.Array:
        trap = batch["trap"][0]
        self.mean[...] += jnp.mean(batch["y"]) * trap
        return super().loss(batch) + jnp.sum(self.bias[...].imag) * (trap - 1)


def trapped() -> list[Any]:
    return [batch | {"trap": np.full(ROWS, np.nan if i == 3 else 1, np.float32)} for i, batch in enumerate(batches())]


@pytest.mark.parametrize("window", [1, 2])
def test_a_step_that_is_not_finite_is_left_out(window: int) -> None:
    model = module(base=Bad, tx=ADAM)
    fit(model, trapped(), nan_policy="skip", accumulate_grad_batches=window, **BARE)
    batches = trapped()
    del batches[4 - window : 4]
    expected = module(base=Bad, tx=ADAM)
    fit(expected, batches, accumulate_grad_batches=window, **BARE)
    assert_equal(model, expected.parts(), tolerance=1e-6)
    np.testing.assert_allclose(model.mean[...], expected.mean[...], rtol=1e-5)


def test_a_bad_complex_statistic_of_a_window_is_not_kept() -> None:
    class Keeps(Bad):
        def loss(self, batch: Any) -> jax.Array:
            self.mean[...] += jnp.mean(batch["y"]) * batch["trap"][0]
            return Complex.loss(self, batch)

    model = module(base=Keeps, tx=ADAM)
    fit(model, trapped()[2:6], accumulate_grad_batches=4, **BARE)
    np.testing.assert_allclose(model.mean[...], sum(trapped()[i]["y"].mean() for i in (2, 4, 5)), rtol=1e-5)


def test_an_error_names_the_parameter_whose_gradient_is_not_finite() -> None:
    class Spoiled(Complex):
        def loss(self, batch: Any) -> jax.Array:
            root = jnp.sqrt(self.bias[...].imag * (1 - batch["trap"][0]))  # the gradient at 0 is infinite times 0
            return super().loss(batch) + jnp.sum(jnp.where(batch["trap"][0] > 0, root, 0.0))

    good = [batch | {"trap": np.zeros(ROWS, np.float32)} for batch in batches(3)]
    good[1]["trap"][:] = 1
    refuses(jl.errors.NonFiniteError, lambda: fit(module(base=Spoiled, tx=ADAM), good, **BARE), "not finite: bias")


def test_members_of_a_population_may_be_complex() -> None:
    population = jl.fit_many(
        lambda rate: made(optax.adam(rate)), [{"rate": 0.05}, {"rate": 0.01}], batches(), max_epochs=1
    )
    for i, rate in enumerate((0.05, 0.01)):
        assert_equal(population.module(i), HandLoop(Pair(), optax.adam(rate))(*batches()).module.parts())


def test_a_part_that_is_frozen_at_first_may_be_complex() -> None:
    model, freeze = made(ADAM), jl.callbacks.BackboneFreeze("kernel", unfreeze_at_epoch=1)
    fit(model, batches(4), None, freeze, **BARE)
    loop = HandLoop(Pair(), ADAM, wrt=nnx.All(nnx.Param, nnx.PathContains("bias")))
    assert_equal(model, loop(*batches(4)).module.parts())
    np.testing.assert_array_equal(model.kernel[...], draw(3, 8))
