"""A transformer whose layers are built by nnx.vmap and run by nnx.scan, with remat, with and without dropout.

Shape letters: B rows, T positions, C channels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sweeps.models.case import TWENTY, Batch, Case, Logs, Shared, rows

T, C, V, LAYERS = 6, 8, 11, 3


class Block(nnx.Module):
    """One head of attention, a gated perceptron, and dropout on both."""

    def __init__(self, rate: float, *, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.RMSNorm(C, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(1, C, decode=False, rngs=rngs)
        self.gate, self.up, self.down = (nnx.Linear(C, C, rngs=rngs) for _ in range(3))
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        x_BTC = x_BTC + self.dropout(self.attention(self.norms[0](x_BTC)))
        y = self.norms[1](x_BTC)
        return x_BTC + self.dropout(self.down(nnx.silu(self.gate(y)) * self.up(y)))


class Scanned(Shared):
    """Reads the sum of a row's words, by a scan over layers that computes activations again in the backward pass."""

    rate = 0.0

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs: nnx.Rngs) -> Block:
            return Block(self.rate, rngs=rngs)

        self.embed = nnx.Embed(V, C, rngs=rngs)
        self.blocks = make(rngs)
        self.dropout = nnx.Dropout(self.rate, rngs=rngs)
        self.out = nnx.Linear(C, 1, rngs=rngs)

    def tx(self) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.02, momentum=0.9))

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block: Block, x: jax.Array) -> Any:
            return nnx.remat(lambda block, x: block(x))(block, x)

        return run(self.blocks, x_BTC)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        x_BTC = self.embed(batch["words"])
        mask = self.dropout(jnp.ones_like(x_BTC))
        read = self.out(self(x_BTC * mask).mean(1))[:, 0]
        loss = ((read - batch["words"].mean(1) / V) ** 2).mean()
        logs = {"read": jnp.abs(read).mean()}
        return loss, logs | ({"draws": mask} if self.rate else {})


class Dropped(Scanned):
    """The same with dropout, whose keys are stacked in the layers."""

    rate = 0.2


def words(rng: np.random.Generator, size: int) -> Batch:
    """Return random words."""
    return {"words": rng.integers(V, size=(size, T)).astype(np.int32)}


# The loop by hand differs from itself by 1e-6 where the rows of its batches come in another order.
ROUNDED: dict[str, Any] = {"tolerance": 1e-5, "because": "rounding grows with momentum over 20 steps"}
CASES = [
    Case("scanned transformer", Scanned, rows(TWENTY, words), **ROUNDED),
    Case("scanned transformer with dropout", Dropped, rows(TWENTY, words), draws="masks", **ROUNDED),
]
