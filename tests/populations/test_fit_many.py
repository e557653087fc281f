"""Members of a population train as they would alone, in one program."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import numbered, random, sized
from kit.by_hand import mean, trained
from kit.compiles import compiles
from kit.modules import Linear, Mean, Net, module
from kit.swept import Swept
from kit.trainers import fit, thinned

import jaxlit as jl
from jaxlit.core.replica import abstract_batch
from jaxlit.populations.fit_many import _built
from jaxlit.populations.members import Options


def alone(made: jl.TrainModule, train: Any, val: Any = None, **arguments: Any) -> jl.Trainer:
    return fit(made, train, val, log_every_n_steps=1, enable_checkpointing=False, logger=False, **arguments)


def weights(module: Any) -> list[np.ndarray]:
    state = nnx.as_pure(nnx.state(module, nnx.Not(nnx.RngKey)))
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def assert_close(result: Any, expected: Any, atol: float = 1e-5) -> None:
    for x, y in zip(weights(result), weights(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol)


def assert_member_is(population: Any, index: int, module: Any, trainer: jl.Trainer) -> None:
    """See a member be what a Trainer has made of its module, and have the rows of its metrics."""
    assert_close(population.module(index), module)
    for name in ("loss", "val"):
        rows = [(row["step"], row[name]) for row in population.rows() if row["member"] == index and name in row]
        steps, values = trainer.history[name]
        assert [step for step, _ in rows] == steps.tolist()
        np.testing.assert_allclose([value for _, value in rows], values, rtol=1e-5, atol=1e-5)


@pytest.mark.full
def test_members_that_differ_in_a_seed_or_a_number_are_fits_of_their_own() -> None:
    """Dropout, batch statistics and counts included; the last batch is shorter."""
    train, val = sized(16, 16, 10), random(2)
    variations: list[dict[str, Any]] = [{"seed": 3}, {"seed": 4}]
    variations += [{"seed": 3} | other for other in ({"lr": 0.02}, {"decay": 0.2}, {"rate": 0.4}, {"gain": 2.0})]
    population = jl.fit_many(Swept, variations, train, val, max_epochs=2, log_every_n_steps=1)
    for i, variation in enumerate(variations):
        module = Swept(rngs=nnx.Rngs(variation.pop("seed")), **variation)
        assert_member_is(population, i, module, alone(module, train, val, max_epochs=2))


@pytest.mark.full
def test_a_sweep_of_rates_and_seeds_compiles_one_step() -> None:
    variations = [{"seed": seed, "lr": lr} for lr in (0.01, 0.05) for seed in range(2)]
    with compiles() as programs:
        population = jl.fit_many(Swept, variations, random(4), random(2), max_epochs=2, log_every_n_steps=1)
    for name in ("train_step", "eval_step", "init"):
        assert programs.count(f"jit({name})") == 1
    first = [row["lr"] for row in population.rows() if row["step"] == 0 and "lr" in row]
    np.testing.assert_allclose(first, [x["lr"] for x in variations], rtol=1e-6)
    module = Swept(lr=0.05, rngs=nnx.Rngs(1))
    assert_member_is(population, 3, module, alone(module, random(4), random(2), max_epochs=2))


class ByRows(Mean):
    """A `Mean` that reads its number for batches of one row only."""

    def __init__(self, seed: int, factor: float, other: float) -> None:
        super().__init__()
        self.w[...] += seed
        self.factor, self.other = factor, other

    def of(self, batch: Any) -> float:
        return self.factor if len(batch["x"]) == 1 else self.other

    def training_step(self, batch: Any) -> jax.Array:
        return super().training_step(batch) * self.of(batch)

    def validation_step(self, batch: Any) -> None:
        self.log("val", jnp.mean(self.error(batch) ** 2) * self.of(batch))


@pytest.mark.full
@pytest.mark.parametrize("other", [pytest.param((1.0, 1.0, 1.0), marks=pytest.mark.sweep), (1.0, 0.5, 0.5)])
def test_a_number_read_for_later_shapes_is_each_members(other: tuple[float, ...]) -> None:
    """Members that are alike for the first batch, all or two of them, are not for the second."""
    data = [{"x": np.full((rows, 1), number, np.float32)} for rows, number in ((2, 1.0), (1, 3.0))]
    variations = [{"seed": i, "factor": 0.5**i, "other": x} for i, x in enumerate(other)]
    population = jl.fit_many(ByRows, variations, data, data, max_epochs=1)
    for i, variation in enumerate(variations):
        module = ByRows(**variation)
        trainer = alone(module, data, data)
        np.testing.assert_allclose(population.module(i).w[...], module.w[...], rtol=1e-6)
        assert population.metrics[i]["val"] == pytest.approx(trainer.callback_metrics["val"], rel=1e-5)


class OfMean(Mean):
    def __init__(self, lr: float = 0.25) -> None:
        super().__init__()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(self.hparams.lr)


def in_closure(lr: float) -> Mean:
    return type("Closed", (Mean,), {"configure_optimizers": lambda self: optax.sgd(lr)})()


class Rated(Mean):
    def __init__(self, lr: float) -> None:
        super().__init__()
        self.lr = lr


class Injected(Rated):
    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.inject_hyperparams(optax.sgd)(learning_rate=self.lr)


class Scanned(Rated):
    """Its rate is a number in the body of a scan, of a conditional, of a remat and of a function with its own rule."""

    def configure_optimizers(self) -> optax.GradientTransformation:
        def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            quarter = jax.checkpoint(lambda g: jax.nn.relu(self.lr) / 4 * g)
            step = lambda g: jax.lax.scan(lambda c, _: (c - quarter(g), None), 0 * g, length=4)[0]  # noqa: E731
            return jax.tree.map(lambda g: jax.lax.cond(g[0] > 1e9, jnp.zeros_like, step, g), grads), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


class InArray(Rated):
    def configure_optimizers(self) -> optax.GradientTransformation:
        rates = np.full(1, self.lr, np.float32)
        return optax.stateless(lambda grads, _: jax.tree.map(lambda g: -rates * g, grads))


class InRule(Rated):
    """Its rate is in the derivative of a function alone: the loss does not depend on it."""

    def error(self, batch: Any) -> jax.Array:
        scaled = jax.custom_vjp(lambda w: w)
        scaled.defvjp(lambda w: (w, None), lambda _, grad: (self.lr * grad,))
        return batch["x"] - scaled(self.w[...])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1.0)


@pytest.mark.parametrize("make", [OfMean, in_closure, Injected, Scanned, InArray, InRule])
def test_rates_are_found_wherever_they_are(make: Any) -> None:
    rates = (0.05, 0.1, 0.25)  # of a gradient that is twice the distance from the batch's number
    population = jl.fit_many(make, [{"lr": lr} for lr in rates], numbered(3), max_epochs=1)
    for i, lr in enumerate(rates):
        w = 0.0
        for number in (1, 2, 3):
            w -= lr * 2 * (w - number)
        np.testing.assert_allclose(population.module(i).w[...], w, rtol=1e-6)


def test_an_array_that_is_filled_again_is_each_members() -> None:
    buffer = np.zeros(1, np.float32)

    class Shifted(Mean):
        def __init__(self, shift: float) -> None:
            super().__init__()
            buffer[:] = shift
            self.shift = buffer

        def error(self, batch: Any) -> jax.Array:
            return super().error(batch) - self.shift

    population = jl.fit_many(Shifted, [{"shift": 1.0}, {"shift": 3.0}], numbered(2), max_epochs=1)
    weights = [float(population.module(i).w[...][0]) for i in (0, 1)]
    assert weights == [1.25 - 0.75 * 1.0, 1.25 - 0.75 * 3.0]


@pytest.mark.full
def test_devices_split_the_members_and_change_no_number() -> None:
    variations, batches = [{"seed": i, "lr": 0.01 * (i + 1)} for i in range(4)], random(3)
    given = {"max_epochs": 1, "log_every_n_steps": 1}
    one, four = (jl.fit_many(Swept, variations, batches, batches[:1], devices=n, **given) for n in (1, 4))
    for x in four._leaves:
        assert len(x.sharding.device_set) == 4
        assert {shard.data.shape[0] for shard in x.addressable_shards} == {1}
    for i in range(4):
        assert_close(four.module(i), one.module(i))
    for row, expected in zip(four.rows(), one.rows(), strict=True):
        assert row == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_members_that_do_not_divide_use_fewer_devices(caplog: pytest.LogCaptureFixture) -> None:
    population = jl.fit_many(Linear, [{"features": 3}] * 6, random(2), max_epochs=1)
    assert len(population._leaves[0].sharding.device_set) == 6
    assert "6 members use 6 of 8" not in caplog.text
    population = jl.fit_many(Linear, [{"features": 3}] * 9, random(2), max_epochs=1)
    assert len(population._leaves[0].sharding.device_set) == 3
    assert "9 members use 3 of 8 devices" in caplog.text


def test_a_step_overwrites_the_state_and_members_share_a_batch() -> None:
    (batch,) = random(1)
    variations = [{"seed": i} for i in range(4)]
    programs, layout, arrays = _built(Swept, variations, Options(1), [abstract_batch(batch)])
    state = programs.init(layout, arrays)
    sums = programs.spec.index.sums
    state[sums] = programs.repeat(programs.step_table.metrics.empty_sums())
    placed = programs.place_batch(batch)
    for x in jax.tree.leaves(placed):
        assert x.sharding.is_fully_replicated
        assert len(x.sharding.device_set) == 4
    new, _ = programs.train_step(abstract_batch(batch))(list(state), placed)
    assert all(x.is_deleted() for x in state)
    assert [x.sharding for x in new] == [x.sharding for x in state]


@pytest.mark.parametrize("precision", thinned(["bf16-mixed", "bf16-true"], "bf16-mixed", full=()))
def test_precision_is_the_trainers(precision: str) -> None:
    population = jl.fit_many(Linear, [{}] * 2, random(4), max_epochs=2, log_every_n_steps=1, precision=precision)
    module = Linear()
    trainer = alone(module, random(4), max_epochs=2, precision=precision)
    made, wanted = population.module(1).kernel[...], module.kernel[...]
    assert made.dtype == wanted.dtype
    np.testing.assert_allclose(made.astype(jnp.float32), wanted.astype(jnp.float32), rtol=1e-2)
    rows = [row["loss"] for row in population.rows() if row["member"] == 1]
    np.testing.assert_allclose(rows, trainer.history["loss"][1], rtol=1e-2)


def test_an_endless_loader_continues_from_epoch_to_epoch() -> None:
    """Three epochs of two batches take the first six."""
    population = jl.fit_many(Mean, [{}], itertools.cycle(numbered(7)), max_epochs=3, limit_train_batches=2)
    np.testing.assert_allclose(population.module(0).w[...], mean([[k] for k in range(1, 7)]), rtol=1e-6)


def test_arguments_are_given_by_name_and_seeds_as_rngs() -> None:
    def make(width: int, *, rngs: nnx.Rngs, **more: Any) -> Net:
        assert more == {"note": "same"}
        return Net(width=width, rngs=rngs)

    variations = [{"width": 4, "note": "same", "seed": 5}, {"width": 4, "note": "same"}]
    population = jl.fit_many(make, variations, random(1), max_epochs=1, limit_train_batches=1)
    for i, seed in enumerate((5, 0)):
        module = Net(width=4, rngs=nnx.Rngs(seed))
        alone(module, random(1))
        assert_close(population.module(i), module)


@pytest.mark.full
def test_a_seed_is_an_int_of_any_library_or_a_key() -> None:
    seeds = (np.int64(3), jnp.int32(4), jax.random.key(5))
    population = jl.fit_many(Swept, [{"seed": seed} for seed in seeds], random(1), max_epochs=1)
    for i in range(3):
        module = Swept(rngs=nnx.Rngs(3 + i))
        alone(module, random(1))
        assert_close(population.module(i), module, atol=1e-6)


def test_a_partial_takes_what_its_function_takes() -> None:
    variations = [{"seed": 1}, {"seed": 1, "lr": 0.05}]
    population = jl.fit_many(partial(Swept, lr=0.02), variations, random(1), max_epochs=1, log_every_n_steps=1)
    assert [row["lr"] for row in population.rows() if row["step"] == 0][:2] == pytest.approx([0.02, 0.05])


@pytest.mark.parametrize(
    "tx",
    [
        lambda lr: optax.MultiSteps(optax.adam(lr, eps=1e-3), every_k_schedule=2),
        lambda lr: optax.sgd(optax.join_schedules([optax.linear_schedule(0, lr, 2), lambda _: lr / 2], [2])),
        lambda lr: optax.chain(optax.clip_by_global_norm(10 * lr), optax.adam(0.1, b1=1 - lr, eps=1e-3)),
    ],
    ids=["accumulated", "scheduled", "clipped"],
)
def test_any_optimizer_has_each_members_numbers(tx: Any) -> None:
    make = lambda lr: module(base=Linear, tx=tx(lr))  # noqa: E731
    population = jl.fit_many(make, [{"lr": lr} for lr in (0.05, 0.1)], random(4), max_epochs=1)
    for i, lr in enumerate((0.05, 0.1)):
        made = tx(lr)
        made = made.gradient_transformation() if isinstance(made, optax.MultiSteps) else made
        wanted = trained(Linear(), random(4), made)
        np.testing.assert_allclose(population.module(i).kernel[...], wanted.kernel[...], rtol=1e-5, atol=1e-6)
