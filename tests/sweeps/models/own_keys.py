"""Random numbers from nnx.Rngs, and from keys that a module holds itself."""

import jax
import jax.numpy as jnp
from flax import nnx
from sweeps.models.case import FEW, Batch, Case, Logs, Shared, normal_rows, rows


class Key(nnx.Variable):
    """A variable that holds a typed key."""


class Split(Shared):
    """Adds noise to its inputs, from a key that each step splits."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.key = Key(jax.random.key(7))

    def draw(self, shape: tuple[int, ...]) -> jax.Array:
        key, own = jax.random.split(self.key[...])
        self.key[...] = key
        return jax.random.normal(own, shape)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        noise = self.draw(batch["x"].shape)
        noise = batch.get("draws", noise)
        errors = self.linear(batch["x"] + 0.3 * noise)[:, 0] - batch["y"]
        return (errors**2).mean(), {"noise": jnp.abs(noise).mean(), "draws": noise}


class Folded(Split):
    """Folds the number of the step into a key that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def draw(self, shape: tuple[int, ...]) -> jax.Array:
        key = jax.random.fold_in(self.key[...], self.count[...])
        self.count[...] += 1
        return jax.random.normal(key, shape)


class Stream(Split):
    """Draws from a stream of nnx.Rngs."""

    def __init__(self) -> None:
        super().__init__()
        self.rngs = nnx.Rngs(noise=3)

    def draw(self, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(self.rngs.noise(), shape)


class Dropped(Shared):
    """Dropout on the hidden layer."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.hidden, self.out = nnx.Linear(3, 32, rngs=rngs), nnx.Linear(32, 1, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        hidden = jnp.tanh(self.hidden(batch["x"]))
        mask = self.dropout(jnp.ones_like(hidden))
        mask = batch.get("draws", mask)
        errors = self.out(hidden * mask)[:, 0] - batch["y"]
        return (errors**2).mean(), {"kept": (mask > 0).mean(), "draws": mask}


BATCHES = rows(FEW, normal_rows)
CASES = [
    Case("own key split in each step", Split, BATCHES, draws="again"),
    Case("own key folded with the step", Folded, BATCHES, draws="again"),
    Case("noise from nnx.Rngs", Stream, BATCHES, draws="again"),
    Case("dropout", Dropped, BATCHES, draws="again"),
]
