"""A strategy of one's own, tensor parallel by rules, trains to the numbers of a single device.

    python examples/custom_strategy.py

Without an accelerator it simulates eight devices.
"""

import math
import os
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlit as jl


class TensorParallel(jl.Strategy):
    """Split attention by its heads, and the layers after it by the width between them, as Megatron-LM does."""

    rules = jl.strategies.Rules(  # of two matrices the first by columns, the second by rows: XLA adds up once a pair
        {
            r"(query|key|value|up)\.kernel": P(None, "tp"),
            r"(query|key|value|up)\.bias|(out|down)\.kernel": P("tp"),
        }
    )

    def mesh_shape(self, device_count: int) -> dict[str, int]:
        parts = math.gcd(2, device_count)
        return {"data": device_count // parts, "tp": parts}

    def rule(self, path: Any, x: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return self.rules.sharding(name, x, P(), self.mesh) or self.replicated

    def state_sharding(self, state: Any, model: Any, example: Any) -> Any:
        params = jax.tree_util.tree_map_with_path(self.rule, state.params)
        # Moments of the optimizer, and gradients that are accumulated, lie as their parameters do; the rest whole.
        return jl.strategies.like_params(state, state.params, params, self.replicated)


class Transformer(jl.TrainModule):
    def __init__(self, vocabulary: int = 32, width: int = 16, heads: int = 4, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def training_step(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens[:, :-1])
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens[:, :-1]))
        x = x + self.down(nnx.gelu(self.up(x)))
        return optax.softmax_cross_entropy_with_integer_labels(self.head(self.norm(x)), tokens[:, 1:]).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-2, eps=1e-3)


def token_batches(steps: int, rows: int = 16) -> list[np.ndarray]:  # of sequences that count on from anywhere
    starts = np.random.default_rng(0).integers(0, 32, (steps, rows, 1))
    return list(((starts + np.arange(9)) % 32).astype(np.int32))


if __name__ == "__main__":
    batches, losses = token_batches(10), []
    for strategy in ("single", TensorParallel()):
        state, step = jl.compile_step(Transformer(rngs=nnx.Rngs(0)), batch=batches[0], strategy=strategy)
        print(step.strategy.describe())
        for batch in batches:
            state, logs = step(state, batch)
            losses.append(float(logs["loss"]))
    for i, row in enumerate(zip(losses[: len(batches)], losses[len(batches) :], strict=True)):
        print(f"step {i:>3}", *(f"{loss:.6f}" for loss in row))
