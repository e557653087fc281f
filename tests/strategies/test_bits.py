"""`replicas:8`: one hash of all that a training leaves on 1, 2, 4 and 8 devices, and the numbers of a loop by hand."""

import hashlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.journal import at_batch
from kit.refusals import refuses
from kit.trainers import fit, make_trainer, thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError
from jaxlit.texts import is_key

RNG = np.random.default_rng(0)
DATA = {"x": RNG.normal(size=(96, 16)).astype(np.float32), "y": RNG.normal(size=96).astype(np.float32)}


class Normed(jl.TrainModule):
    """Two layers with a BatchNorm and a dropout, which logs."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)

    def features(self, x: jax.Array) -> jax.Array:
        return self.norm(self.first(x))

    def training_step(self, batch: Any) -> jax.Array:
        error = self.last(self.drop(nnx.relu(self.features(batch["x"]))))[:, 0] - batch["y"]
        self.log("error", jnp.abs(error).mean())
        self.log("largest", jnp.abs(error).max(), reduce_fx="max")
        return (error**2).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


class Convolved(Normed):
    """A convolution before the BatchNorm."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)
        self.first, self.norm = nnx.Conv(1, 4, (3, 3), rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.last = nnx.Linear(64, 1, rngs=rngs)

    def features(self, x: jax.Array) -> jax.Array:
        return self.norm(self.first(x.reshape(-1, 4, 4, 1))).reshape(-1, 64)


class Scanned(Normed):
    """A scan over layers, each with a BatchNorm: the replicas exchange something in each turn, also of its backward."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def layers(rngs: nnx.Rngs) -> nnx.Module:
            return nnx.List([nnx.Linear(32, 32, rngs=rngs), nnx.BatchNorm(32, rngs=rngs)])

        self.layers = layers(rngs)

    def features(self, x: jax.Array) -> jax.Array:
        @nnx.remat
        def layer(x: jax.Array, pair: Any) -> jax.Array:
            linear, norm = pair
            return x + jnp.tanh(norm(linear(x)))

        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(super().features(x), self.layers)


class Divided(Normed):
    """Divisions by one number that several values share: XLA decides by how many they are how it divides."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__(rngs=rngs)
        self.temperature = nnx.Param(jnp.float32(0.7))

    def features(self, x: jax.Array) -> jax.Array:
        z = super().features(x)
        cooled = z / self.temperature[...] + jax.nn.softmax(z / self.temperature[...])
        scaled = z / jnp.sqrt((jax.lax.stop_gradient(z) ** 2).mean() + 1e-6)
        return cooled + scaled + z / jnp.linalg.norm(z, axis=-1, keepdims=True)


class Exchanged(Normed):
    """Numbers that the replicas exchange one by one, in a loop and outside of it."""

    def features(self, x: jax.Array) -> jax.Array:
        def mean(x: jax.Array) -> jax.Array:
            return jax.lax.pmean(x.mean(), "data")

        z = super().features(x)
        z, _ = jax.lax.scan(lambda z, _: (jnp.tanh(z) + 0.1 * mean(z[0, 0]), None), z - mean(z), length=3)
        return z


def hash_of(trainer: jl.Trainer) -> str:
    """Return the hash of the entire state, with the arrays of callbacks, and of what is logged."""
    keys = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, trainer.state)
    logged = sorted(trainer.callback_metrics.items())
    assert {"error", "largest"} == {*dict(logged)}
    return hashlib.sha256(
        b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(keys)) + repr(logged).encode()
    ).hexdigest()


def hash_on(devices: int, cls: Any, rows: int, arguments: dict[str, Any]) -> str:
    module, loader = cls(rngs=nnx.Rngs(0)), jl.ArrayLoader(DATA, rows, shuffle=True)
    return hash_of(
        fit(module, loader, None, jl.callbacks.EMA(0.9), strategy="replicas:8", devices=devices, **arguments)
    )


CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
CASES = [
    (Normed, 32, CLIPPED),  # a window, a clip by the norm, an average, a BatchNorm and a dropout
    (Normed, 16, {"steps_per_execution": 3}),
    (Normed, 36, {"precision": "16-mixed"}),  # two batches that do not divide, and one that does
    (Normed, 24, CLIPPED | {"steps_per_execution": 2, "nan_policy": "skip"}),
    (Convolved, 32, {}),
    (Scanned, 16, {"gradient_clip_val": 0.1}),
    (Divided, 32, {}),
    (Exchanged, 32, {}),
]


@pytest.mark.parametrize(
    ("cls", "rows", "arguments"), thinned(CASES, CASES[0], CASES[-2], full=[*CASES[1:-2], CASES[-1]])
)
def test_every_number_of_devices_leaves_the_same_bits(cls: Any, rows: int, arguments: dict[str, Any]) -> None:
    hashes = {devices: hash_on(devices, cls, rows, arguments) for devices in (1, 2, 4, 8)}
    assert len({*hashes.values()}) == 1, hashes


@pytest.mark.full
def test_a_run_is_resumed_with_the_same_bits_on_other_devices(tmp_path: Path) -> None:
    def run(devices: int, cut: int, **arguments: Any) -> str:
        module, loader = Normed(rngs=nnx.Rngs(0)), jl.ArrayLoader(DATA, 16, shuffle=True)
        callbacks = jl.callbacks.EMA(0.9), at_batch(cut, lambda t, m: t.save_checkpoint(tmp_path / str(devices)))
        return hash_of(
            fit(module, loader, None, *callbacks, strategy="replicas:8", devices=devices, **CLIPPED | arguments)
        )

    through = run(1, cut=1)
    assert run(2, cut=2) == through  # in a window
    assert run(8, cut=4, ckpt_path=tmp_path / "2") == through
    assert run(4, cut=5, ckpt_path=tmp_path / "8") == through


class Coupled(jl.TrainModule):
    """A loss that couples the rows of a replica: another split of the rows gives other numbers."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.linspace(-1, 1, 16))

    def training_step(self, batch: Any) -> jax.Array:
        return coupled(self.w[...], batch["x"], batch["y"])

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(1e-2)


def coupled(w: Any, x: Any, y: Any) -> jax.Array:
    logits = x @ w
    return -(jax.nn.log_softmax(logits) * jax.nn.softmax(y)).sum()


@pytest.mark.parametrize("devices", thinned([1, 2, 8], 2))
def test_a_plain_loop_over_the_replicas_gives_the_same_numbers(devices: int) -> None:
    w, tx = jnp.linspace(-1, 1, 16), optax.adam(1e-2)
    state = tx.init(w)
    for first in range(0, 96, 32):
        rows = [slice(first + 4 * i, first + 4 * i + 4) for i in range(8)]
        grads = [jax.grad(coupled)(w, DATA["x"][part], DATA["y"][part]) for part in rows]
        updates, state = tx.update(jnp.stack(grads).sum(0) / 8, state)
        w = optax.apply_updates(w, updates)
    module = Coupled()
    fit(module, jl.ArrayLoader(DATA, 32), strategy="replicas:8", devices=devices)
    np.testing.assert_allclose(module.w[...], np.asarray(w), rtol=1e-5)


def test_replicas_that_do_not_divide_are_refused() -> None:
    refuses(ArgumentError, lambda: make_trainer(strategy="replicas:8", devices=3).strategy, "Use a divisor of 8")


def test_as_many_devices_are_taken_as_divide_the_replicas() -> None:
    assert make_trainer(strategy="replicas:6").strategy.mesh.size == 6
    assert make_trainer(strategy="replicas:7").strategy.mesh.size == 7
    assert make_trainer(strategy="replicas:10").strategy.mesh.size == 5
    one = make_trainer(strategy="simulate:8").strategy
    assert (one.mesh.size, one.num_replicas) == (1, 8)
    assert make_trainer(strategy="simulate:8", devices=4).strategy.mesh.size == 4


@pytest.mark.parametrize(("strategy", "devices", "count"), [("replicas", 2, 2), ("replicas:6", 3, 6)])
def test_there_are_as_many_replicas_as_are_asked_for(strategy: str, devices: int, count: int) -> None:
    made = make_trainer(strategy=strategy, devices=devices).strategy
    assert made.num_replicas == count
    assert made.mesh.size == devices
