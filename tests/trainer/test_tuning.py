"""`jl.lr_find` finds what a loop by hand does, and `jl.scale_batch_size` the largest batch whose step fits."""

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random
from kit.by_hand import params_of, state_of
from kit.checkpoints import bytes_of
from kit.costs import report_memory
from kit.modules import Linear, Net
from kit.refusals import refuses
from kit.trainers import BARE, STRATEGIES, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.callbacks import BackboneFreeze, GradientAccumulationScheduler
from jaxlit.engine.compiled_program import CompiledProgram
from jaxlit.errors import ArgumentError, ArgumentTypeError, OutOfMemoryError
from jaxlit.trainer.tuning import _Tries

BATCHES = random(4)
LEARNED = [{"x": x, "y": x @ np.ones((3, 1), np.float32)} for x in (batch["x"] for batch in random(4, rows=32))]


class Rated(Linear):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=self.lr, momentum=0.9)


class Deep(Net):
    """Has batch statistics and a dropout stream, which a range test must leave alone."""

    def __init__(self, lr: float = 0.1, *, rngs: nnx.Rngs) -> None:
        super().__init__(rate=0.3, rngs=rngs)
        self.lr = lr

    def configure_optimizers(self) -> Any:
        return optax.inject_hyperparams(optax.adam)(learning_rate=self.lr)


def by_hand(rates: list[float], window: int, threshold: float | None) -> list[float]:
    """Return the mean loss of each step by numpy in float64, as far as the threshold lets it come."""
    w, b, speed, result, mean = np.linspace(-1.0, 1.0, 3)[:, None], np.zeros(1), [0.0, 0.0], [], 0.0
    draw = itertools.cycle(BATCHES)
    for k, rate in enumerate(rates):
        batches = [next(draw) for _ in range(window)]
        losses, grads = [], [0.0, 0.0]
        for batch in batches:
            x, y = (np.asarray(batch[name], np.float64) for name in "xy")
            error = x @ w + b - y
            losses.append(np.mean(error**2))
            grads = [grads[0] + 2 * x.T @ error / len(x) / window, grads[1] + 2 * error.mean(0) / window]
        mean = 0.98 * mean + 0.02 * np.mean(losses)
        result.append(mean / (1 - 0.98 ** (k + 1)))
        if threshold is not None and len(result) > 10 and not result[-1] <= threshold * min(result[9:-1]):
            break
        speed = [0.9 * v + g for v, g in zip(speed, grads, strict=True)]
        w, b = w - rate * speed[0], b - rate * speed[1]
    return result


RUNS: list[Any] = [
    ({"num_training_steps": 30}, 1),
    ({"num_training_steps": 30, "min_lr": 1e-3, "max_lr": 3.0, "early_stop_threshold": 1.5}, 1),
    ({"num_training_steps": 12, "min_lr": 0.01, "max_lr": 0.4, "mode": "linear"}, 1),
    ({"num_training_steps": 12, "min_lr": 0.01, "max_lr": 0.4, "early_stop_threshold": None}, 2),
]


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp", "shard_map"], "single", full=["fsdp"]))
@pytest.mark.parametrize(("arguments", "window"), RUNS)
def test_rates_and_losses_are_those_of_a_loop_by_hand(arguments: dict[str, Any], window: int, strategy: str) -> None:
    trainer = make_trainer(strategy=splitting(strategy), accumulate_grad_batches=window, **BARE)
    result = jl.lr_find(trainer, Rated(), BATCHES, **arguments)
    given = {"min_lr": 1e-8, "max_lr": 1.0, "early_stop_threshold": 4.0, "mode": "exponential"} | arguments
    low, high, count = given["min_lr"], given["max_lr"], given["num_training_steps"]
    if given["mode"] == "linear":
        rates = [low + k * (high - low) / (count - 1) for k in range(count)]
    else:
        rates = [low * (high / low) ** (k / (count - 1)) for k in range(count)]
    losses = by_hand(rates, window, given["early_stop_threshold"])
    np.testing.assert_allclose(result.results["loss"], losses, rtol=1e-4)
    np.testing.assert_allclose(result.results["lr"], rates[: len(losses)], rtol=1e-9)
    assert (len(losses) < count) == (given["early_stop_threshold"] == 1.5)


class Noisy(jl.TrainModule):
    def __init__(self, make: Any, lr: float = 1e-3) -> None:
        self.make, self.lr, self.slope = make, lr, nnx.Param(np.zeros((8, 1), np.float32))

    def training_step(self, batch: Any) -> Any:
        return ((batch["x"] @ self.slope[...] - batch["y"]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        return optax.inject_hyperparams(self.make)(learning_rate=self.lr)


CASES = [(optimizer, size, seed) for optimizer in ("adam", "sgd") for size in (8, 64, 256) for seed in range(3)]


@pytest.mark.parametrize(("optimizer", "size", "seed"), thinned(CASES, ("adam", 64, 1), full=CASES[::5]))
def test_a_fit_at_the_suggestion_of_the_defaults_learns(optimizer: str, size: int, seed: int) -> None:
    rng, model = np.random.default_rng(seed), Noisy(getattr(optax, optimizer))
    x, slope = rng.normal(size=(4096, 8)), rng.normal(size=(8, 1))
    # A line with noise of variance 1, below which no mean loss comes.
    data = {"x": x.astype(np.float32), "y": (x @ slope + rng.normal(size=(4096, 1))).astype(np.float32)}
    trainer, loader = make_trainer(max_epochs=2, **BARE), jl.ArrayLoader(data, size, shuffle=True, seed=seed)
    jl.lr_find(trainer, model, loader, update_attr=True)
    trainer.fit(model, loader)
    assert np.mean((data["x"] @ np.asarray(model.slope[...]) - data["y"]) ** 2) < 1.6 and np.mean(data["y"] ** 2) > 6


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, full=["single", "fsdp", "pmap"]))
def test_a_training_after_lr_find_is_bit_identical(strategy: str) -> None:
    def train(model: Any, look: bool) -> tuple[list[bytes], dict[str, np.ndarray], float]:
        trainer = make_trainer(strategy=splitting(strategy), max_epochs=2, **BARE)
        loader = jl.ArrayLoader({k: np.concatenate([b[k] for b in LEARNED]) for k in "xy"}, 8, shuffle=True)
        if look:
            before = state_of(model)
            jl.lr_find(trainer, model, loader, num_training_steps=80, update_attr=True)
            jax.tree.map(np.testing.assert_array_equal, before, state_of(model))
            assert trainer.global_step == 0 and trainer.model is None and trainer.stop_reason is None
        trainer.fit(model, loader)
        return bytes_of(trainer), params_of(model), model.lr

    result = train(Deep(rngs=nnx.Rngs(0)), True)
    plain = train(Deep(result[2], rngs=nnx.Rngs(0)), False)
    assert result[2] != 0.1 and result[0] == plain[0]
    assert all(np.array_equal(x, plain[1][name]) for name, x in result[1].items())


@pytest.mark.parametrize("kind", thinned(["trainer", "module", "lazy"], "trainer"))
def test_lr_find_keeps_callbacks_that_change_a_step(kind: str) -> None:
    def find(make: Any) -> list[float]:
        class Adds(Rated):
            def configure_callbacks(self) -> Any:
                return make()

        model = {"trainer": Rated, "module": Adds, "lazy": lambda: jl.lazy(Adds)}[kind]()
        trainer = make_trainer(*(make() if kind == "trainer" else []), **BARE)
        if kind == "module":  # one run before, whose module's callbacks are not the Trainer's
            trainer.fit(Adds(), BATCHES)
        batches = BATCHES * 12  # one epoch, in which a part is frozen and a window holds
        result = jl.lr_find(trainer, model, batches, num_training_steps=12, min_lr=0.01, early_stop_threshold=None)
        return result.results["loss"]

    plain, frozen = find(lambda: []), find(lambda: [BackboneFreeze("kernel", unfreeze_at_epoch=99)])
    window = find(lambda: [GradientAccumulationScheduler({0: 4})])
    rates = [float(x) for x in np.geomspace(0.01, 1.0, 12)]
    np.testing.assert_allclose(plain, by_hand(rates, 1, None), rtol=1e-4)
    np.testing.assert_allclose(window, by_hand(rates, 4, None), rtol=1e-4)
    assert frozen[0] == plain[0] and frozen[8] != plain[8]


def test_the_rate_goes_to_the_attribute_that_holds_it() -> None:
    class Other(Linear):
        def __init__(self, rate: float = 0.1) -> None:
            super().__init__()

        def configure_optimizers(self) -> Any:
            return optax.inject_hyperparams(optax.sgd)(learning_rate=self.hparams.rate)

    given: dict[str, Any] = {"min_lr": 1e-5, "update_attr": True}
    model, other = Rated(), Other()
    result = jl.lr_find(make_trainer(**BARE), model, LEARNED, **given)
    assert model.lr == model.hparams.lr == result.suggestion() != 0.1  # a checkpoint builds the module with it
    result = jl.lr_find(make_trainer(**BARE), other, LEARNED, attr_name="rate", **given)
    assert other.hparams.rate == result.suggestion() != 0.1
    words = "Other has no attribute or hparam 'lr' or 'learning_rate'"
    refuses(ArgumentError, lambda: jl.lr_find(make_trainer(**BARE), other, BATCHES, **given), words)
    lazy = jl.lazy(Rated)
    refuses(ArgumentError, lambda: jl.lr_find(make_trainer(**BARE), lazy, BATCHES, **given), "lazy has no attribute")


def test_a_picture_shows_the_losses_and_the_suggestion() -> None:
    result = jl.lr_find(make_trainer(**BARE), Rated(), LEARNED, min_lr=1e-5)
    (axes,) = result.plot(suggest=True).axes
    line, mark = axes.get_lines()
    assert line.get_xdata().tolist() == result.results["lr"] and axes.get_xscale() == "log"
    assert line.get_ydata().tolist() == result.results["loss"] and mark.get_xdata().tolist() == [result.suggestion()]
    assert len(result.plot().axes[0].get_lines()) == 1


@pytest.mark.parametrize(
    ("kind", "arguments", "words"),
    [
        (ArgumentError, {"min_lr": 0.0}, "min_lr"),
        (ArgumentError, {"min_lr": 2.0}, "max_lr.*above min_lr=2.0"),
        (ArgumentTypeError, {"max_lr": "1"}, "max_lr"),
        (ArgumentError, {"num_training_steps": 1}, "num_training_steps"),
        (ArgumentError, {"mode": "log"}, "mode.*'exponential', 'linear'"),
        (ArgumentError, {"early_stop_threshold": 0.0}, "early_stop_threshold"),
        (ArgumentError, {"hyperparam": "learning"}, "learning'.*It keeps: learning_rate"),
        (ArgumentError, {"train_dataloaders": iter(BATCHES)}, "got an iterator"),
        (ArgumentError, {"model": Linear()}, "It keeps: none.*inject_hyperparams"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(kind: Any, arguments: dict[str, Any], words: str) -> None:
    given = {"trainer": make_trainer(**BARE), "model": Rated(), "train_dataloaders": BATCHES} | arguments
    refuses(kind, lambda: jl.lr_find(**given), words)


class Counts(jl.TrainModule):
    """A layer; it notes the rows of each step that runs."""

    steps: list[int] = []  # noqa: RUF012

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.layer = nnx.Linear(16, 64, rngs=rngs)

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(self.layer(batch["x"])) ** 2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        Counts.steps.append(len(batch["x"]))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-3)


DATA = [{"x": np.ones((8, 16), np.float32), "names": np.array(["a"] * 8, object)}]


def planner(strategy: Any = "ddp", **arguments: Any) -> jl.Trainer:
    return jl.Trainer(strategy=strategy, **(BARE | {"max_epochs": 1, "host_keys": ["names"]} | arguments))


def needs(trainer: jl.Trainer, rows: int) -> int:
    return trainer.plan(jl.lazy(Counts), DATA, batch_size=rows).plans[0].total


@pytest.mark.parametrize("strategy", thinned(["single", "fsdp"], "single", full=["fsdp"]))
def test_the_largest_batch_fits_and_the_next_does_not(strategy: str) -> None:
    Counts.steps.clear()
    trainer, unit = planner(strategy), 1 if strategy == "single" else 8
    found = jl.scale_batch_size(trainer, jl.lazy(Counts), DATA, memory_bytes=100_000)
    assert found.memory == needs(trainer, found.batch_size) <= 100_000
    assert needs(trainer, found.batch_size + unit) > 100_000
    assert found.batch_size % unit == 0
    assert Counts.steps == [found.batch_size]  # one real step
    assert (found.strategy, found.accumulate_grad_batches) == (strategy, 1)
    assert len(found.tried) < 12


@pytest.mark.parametrize("effective", thinned([None, 3072], full=[3072]))
def test_what_is_recommended_fits_with_its_window(effective: int | None) -> None:
    given = {} if effective else {"accumulate_grad_batches": 3}
    found = jl.scale_batch_size(planner(**given), jl.lazy(Counts), DATA, 100_000, effective_batch_size=effective)
    assert found.accumulate_grad_batches == 3 if effective is None else found.accumulate_grad_batches > 1
    assert found.batch_size % 8 == 0 and effective in (None, found.batch_size * found.accumulate_grad_batches)
    trainer = planner(accumulate_grad_batches=found.accumulate_grad_batches)
    assert needs(trainer, found.batch_size) == found.memory <= 100_000
    assert needs(trainer, found.batch_size + 8) > 100_000 or effective is not None


@pytest.mark.full
def test_replicas_are_scaled() -> None:
    found = jl.scale_batch_size(planner("replicas:4"), jl.lazy(Counts), DATA, memory_bytes=200_000)
    assert found.memory <= 200_000
    assert found.batch_size % 4 == 0


def test_the_module_and_the_trainer_stay_as_they_were() -> None:
    module, trainer = Counts(rngs=nnx.Rngs(0)), planner()
    before = state_of(module)
    jl.scale_batch_size(trainer, module, DATA, memory_bytes=100_000)
    jax.tree.map(np.testing.assert_array_equal, before, state_of(module))
    assert (trainer.global_step, trainer.module) == (0, None)


def test_what_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match=r"8 rows, the fewest, need .* of 1000 B"):
        jl.scale_batch_size(planner(), jl.lazy(Counts), DATA, memory_bytes=1000)
    with pytest.raises(ArgumentError, match="has to be given where devices report none"):
        jl.scale_batch_size(planner(), jl.lazy(Counts), DATA)
    with pytest.raises(ArgumentError, match="does not divide"):
        jl.scale_batch_size(planner(), jl.lazy(Counts), DATA, 100_000, effective_batch_size=12_345)
    report_memory(monkeypatch, 20 * 2**30, lambda: 24 * 2**30)
    with pytest.raises(ArgumentError, match=r"other arrays take 5\.0 GiB more than 95 % of a device's memory"):
        jl.scale_batch_size(planner(), jl.lazy(Counts), DATA)


def compiles_up_to(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the compiler run out of memory for larger batches, as that of GPUs does, which tries kernels there."""
    given = CompiledProgram.note_arguments

    def fails(self: CompiledProgram, *args: Any) -> CompiledProgram:
        if args[1]["x"].shape[0] > rows:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 13.43GiB.")
        return given(self, *args)

    monkeypatch.setattr(CompiledProgram, "note_arguments", fails)


@pytest.mark.parametrize("most", thinned([1, 2, 77, 300], 1, full=[77]))
def test_a_batch_that_cannot_be_compiled_does_not_fit(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_up_to(most, monkeypatch)
    found = jl.scale_batch_size(planner("single"), jl.lazy(Counts), DATA, memory_bytes=10**9)
    assert found.batch_size == most
    assert found.tried[most] == found.memory < found.tried[most + 1] == float("inf")
    compiles_up_to(0, monkeypatch)
    with pytest.raises(ArgumentError, match=r"size: 1 row, the fewest, cannot be compiled in the free memory"):
        jl.scale_batch_size(planner("single"), jl.lazy(Counts), DATA, memory_bytes=10**9)


def test_a_limit_of_the_compiler_is_bisected() -> None:
    def cost(rows: int) -> int:
        if rows > 5000:
            raise OutOfMemoryError("the compiler")
        return 1000 + 7 * rows

    tries = _Tries(cost, unit=1, limit=10**6)
    assert tries.largest() == 5000
    bisected = math.ceil(math.log2(8192 - 512))  # 512 rows fit, and 16 times as many do not
    assert len(tries.tried) <= len([1, 2, 32, 512, 8192]) + bisected


def test_a_plan_says_what_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles_up_to(8, monkeypatch)
    assert planner("single").plan(jl.lazy(Counts), DATA, batch_size=8).plans[0].cost is not None
    with pytest.raises(jl.errors.OutOfMemoryError, match=r"while the step was compiled: RESOURCE_EXHAUSTED"):
        planner("single").plan(jl.lazy(Counts), DATA, batch_size=16)
