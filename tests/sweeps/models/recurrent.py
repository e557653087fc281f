"""Recurrent nets of nnx.RNN, and selective state spaces by a scan and by an associative scan.

Shape letters: B rows, T steps of time, C channels, S states of a channel.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sweeps.models.case import TWENTY, Batch, Case, Logs, Shared, rows

T, C, S = 6, 4, 3


class Recurrent(Shared):
    """An LSTM over time, whose carry begins at zero."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.layer = self.make(rngs)
        self.out = nnx.Linear(C, 1, rngs=rngs)

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        return nnx.RNN(nnx.LSTMCell(C, C, rngs=rngs), rngs=rngs)

    def tx(self) -> optax.GradientTransformation:
        return optax.adam(5e-3, eps=1e-3)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        y_BT = self.out(self.layer(batch["x"]))[..., 0]
        loss = ((y_BT - batch["y"]) ** 2).mean()
        return loss, {"last": jnp.abs(y_BT[:, -1] - batch["y"][:, -1]).mean()}


class Gated(Recurrent):
    """Gated recurrent units."""

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        return nnx.RNN(nnx.GRUCell(C, C, rngs=rngs), rngs=rngs)


class Both(Recurrent):
    """Two simple cells, one of them backwards, added up."""

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        forward, backward = (nnx.RNN(nnx.SimpleCell(C, C, rngs=rngs), rngs=rngs) for _ in range(2))
        return nnx.Bidirectional(forward, backward, merge_fn=lambda a, b: a + b, rngs=rngs)


class StateSpace(nnx.Module):
    """A block whose step size, input and output weights depend on the input, between two gates."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.enter = nnx.Linear(C, 2 * C, rngs=rngs)
        self.step, self.weights = nnx.Linear(C, C, rngs=rngs), nnx.Linear(C, 2 * S, rngs=rngs)
        self.log_decay = nnx.Param(jnp.log(jnp.broadcast_to(jnp.arange(1.0, S + 1), (C, S))))
        self.skip = nnx.Param(jnp.ones(C))
        self.leave = nnx.Linear(C, C, rngs=rngs)

    def run(self, decay: jax.Array, given: jax.Array) -> jax.Array:
        """Return h with h[t] = decay[t] h[t-1] + given[t], all (B, T, C, S), one step after the other."""

        def step(h: jax.Array, now: Any) -> Any:
            h = now[0] * h + now[1]
            return h, h

        start = jnp.zeros((given.shape[0], C, S))
        _, h = jax.lax.scan(step, start, (jnp.moveaxis(decay, 1, 0), jnp.moveaxis(given, 1, 0)))
        return jnp.moveaxis(h, 0, 1)

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        u_BTC, gate = jnp.split(self.enter(x_BTC), 2, -1)
        u_BTC = nnx.silu(u_BTC)
        size_BTC = nnx.softplus(self.step(u_BTC))
        into, out_of = jnp.split(self.weights(u_BTC), 2, -1)  # (B, T, S) each
        decay = jnp.exp(-size_BTC[..., None] * jnp.exp(self.log_decay[...]))
        h = self.run(decay, (size_BTC * u_BTC)[..., None] * into[:, :, None])
        y_BTC = (h * out_of[:, :, None]).sum(-1) + self.skip[...] * u_BTC
        return self.leave(y_BTC * nnx.silu(gate))


class Associative(StateSpace):
    """The same recurrence, as a product of affine maps."""

    def run(self, decay: jax.Array, given: jax.Array) -> jax.Array:
        joined = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])  # noqa: E731
        return jax.lax.associative_scan(joined, (decay, given), axis=1)[1]


class Selective(Recurrent):
    """A selective state space by jax.lax.scan."""

    block: type[StateSpace] = StateSpace

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        return self.block(rngs=rngs)


class SelectiveAssociative(Selective):
    """The same by jax.lax.associative_scan."""

    block = Associative


def walks(rng: np.random.Generator, size: int) -> Batch:
    """Return random inputs, and how their first channel adds up."""
    x = rng.normal(size=(size, T, C)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[..., 0].cumsum(1)).astype(np.float32)}


CASES = [
    Case(f"recurrent, {name}", make, rows(TWENTY, walks))
    for name, make in {
        "LSTM": Recurrent,
        "GRU": Gated,
        "bidirectional": Both,
        "state space by scan": Selective,
        "state space by associative scan": SelectiveAssociative,
    }.items()
]
