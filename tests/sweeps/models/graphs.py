"""A graph network: the step joins the graphs of a batch into one, and adds messages up by segment_sum.

Shape letters: G graphs of a batch, N nodes and E edges of a graph, C channels.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sweeps.models.case import TWENTY, Batch, Case, Logs, Shared, rows

N, E, C = 5, 8, 3


class GraphNetwork(Shared):
    """Messages along edges of all graphs at once, and a reading of each graph."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.message, self.update = nnx.Linear(C, C, rngs=rngs), nnx.Linear(2 * C, C, rngs=rngs)
        self.read = nnx.Linear(C, 1, rngs=rngs)

    def tx(self) -> optax.GradientTransformation:
        return optax.adam(5e-3, eps=1e-3)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        graphs = batch["x"].shape[0]
        first = N * jnp.arange(graphs)[:, None]  # of each graph's nodes, once all stand in one list
        senders, receivers = ((batch[end] + first).reshape(-1) for end in ("senders", "receivers"))
        x = batch["x"].reshape(graphs * N, C)
        for _ in range(2):
            sums = jax.ops.segment_sum(nnx.tanh(self.message(x))[senders], receivers, graphs * N)
            x = nnx.tanh(self.update(jnp.concatenate([x, sums], -1)))
        y_G = jax.ops.segment_sum(self.read(x)[:, 0], jnp.repeat(jnp.arange(graphs), N), graphs)
        return ((y_G - batch["y"]) ** 2).mean(), {"reading": y_G.mean()}


def draw(rng: np.random.Generator, size: int) -> Batch:
    """Return graphs with random edges, and how many edges come in at their first node."""
    ends = {name: rng.integers(0, N, (size, E)).astype(np.int32) for name in ("senders", "receivers")}
    degree = (ends["receivers"] == 0).sum(1).astype(np.float32)
    return {"x": rng.normal(size=(size, N, C)).astype(np.float32), "y": degree, **ends}


CASES = [Case("graph network by segment_sum", GraphNetwork, rows(TWENTY, draw))]
