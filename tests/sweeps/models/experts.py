"""A mixture of experts: each row goes to its best 2 of 4, with a loss that balances them and a mean of their load.

The balancing loss multiplies means over rows, so that it sees one replica's rows where a step does.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sweeps.models.by_hand import by_shards
from sweeps.models.case import TWENTY, Batch, Case, Logs, Shared, normal_rows, rows

IN, HIDDEN, EXPERTS, BEST = 4, 6, 4, 2


class Mixture(Shared):
    """Regression by experts whose weights are stacked, and a moving average of the share that each is given."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.router = nnx.Linear(IN, EXPERTS, use_bias=False, rngs=rngs)
        self.up = nnx.Param(0.5 * jax.random.normal(rngs.params(), (EXPERTS, IN, HIDDEN)))
        self.down = nnx.Param(0.5 * jax.random.normal(rngs.params(), (EXPERTS, HIDDEN)))
        self.load = nnx.Variable(jnp.full(EXPERTS, 1 / EXPERTS))

    def tx(self) -> optax.GradientTransformation:
        return optax.adamw(5e-3, eps=1e-3)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        chances = jax.nn.softmax(self.router(batch["x"]))  # (rows, experts)
        best, chosen = jax.lax.top_k(chances, BEST)
        mask = jax.nn.one_hot(chosen, EXPERTS)  # (rows, best, experts)
        weights = (mask * (best / best.sum(1, keepdims=True))[..., None]).sum(1)
        hidden = nnx.relu(jnp.einsum("bi,eih->beh", batch["x"], self.up[...]))
        y = jnp.einsum("beh,eh,be->b", hidden, self.down[...], weights)
        share = mask.mean((0, 1))
        self.load[...] = 0.9 * self.load[...] + 0.1 * share
        balance = EXPERTS * (share * chances.mean(0)).sum()
        error = ((y - batch["y"]) ** 2).mean()
        return error + 0.1 * balance, {"error": error, "balance": balance}


CASES = [
    Case(
        "mixture of experts",
        Mixture,
        rows(TWENTY, lambda rng, size: normal_rows(rng, size, features=IN)),
        by_hand=by_shards,
    )
]
