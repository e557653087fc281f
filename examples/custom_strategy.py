"""Two strategies of one's own, copies of shards (HSDP) and tensor parallel, train to the numbers of a single device.

    python examples/custom_strategy.py [--steps 10]

Without an accelerator it simulates eight devices.
"""

import argparse
import math
import os
import re
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlit as jl


class HSDP(jl.Strategy):
    """Split each parameter over a group of devices, and the batch over the devices of all groups.

    Args:
        group: The devices of a group, where they divide so; each group holds a copy of the state.
    """

    batch_axes = ("data", "fsdp")

    def __init__(self, group: int = 4) -> None:
        self.group = group

    def mesh_shape(self, device_count: int) -> dict[str, int]:
        group = math.gcd(self.group, device_count)
        return {"data": device_count // group, "fsdp": group}

    def split(self, x: Any) -> NamedSharding:
        """Split the largest dim that divides."""
        dims = [dim for dim, size in enumerate(x.shape) if size % self.mesh.shape["fsdp"] == 0]
        largest = max(dims, key=lambda dim: x.shape[dim], default=None)
        return NamedSharding(self.mesh, P() if largest is None else P(*[None] * largest, "fsdp"))

    def state_sharding(self, state: Any, model: Any, example: Any) -> Any:
        # Moments of the optimizer, and gradients that are accumulated, lie as their parameters do; the rest whole.
        params = jax.tree.map(self.split, state.params)
        return jl.strategies.like_params(state, state.params, params, self.replicated)


class TensorParallel(jl.Strategy):
    """Split attention by its heads, and the two layers behind it by the width between them.

    Of each pair of matrices the first is split by its columns and the second by its rows, as in Megatron-LM (Shoeybi et
    al., 2019, https://arxiv.org/abs/1909.08053): XLA adds up once a pair. The batch is split over the axis `data`.

    Args:
        parts: The devices that share a matrix, where they divide so.
    """

    rules = (  # by a parameter's path; what none fits stays whole
        (r"attention\.(query|key|value)\.kernel", P(None, "tp")),  # (width, heads, head width)
        (r"attention\.(query|key|value)\.bias", P("tp")),
        (r"attention\.out\.kernel", P("tp")),  # (heads, head width, width)
        (r"up\.kernel", P(None, "tp")),
        (r"up\.bias", P("tp")),
        (r"down\.kernel", P("tp")),
    )

    def __init__(self, parts: int = 2) -> None:
        self.parts = parts

    def mesh_shape(self, device_count: int) -> dict[str, int]:
        parts = math.gcd(self.parts, device_count)
        return {"data": device_count // parts, "tp": parts}

    def rule(self, path: Any, x: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        specs = (spec for pattern, spec in self.rules if re.search(rf"{pattern}$", name))
        return NamedSharding(self.mesh, next(specs, P()))

    def state_sharding(self, state: Any, model: Any, example: Any) -> Any:
        params = jax.tree_util.tree_map_with_path(self.rule, state.params)
        return jl.strategies.like_params(state, state.params, params, self.replicated)


class Transformer(jl.TrainModule):
    """One block, which predicts the next of the tokens."""

    def __init__(self, vocabulary: int = 32, width: int = 16, heads: int = 4, *, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(vocabulary, width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, vocabulary, rngs=rngs)

    def training_step(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens[:, :-1])
        x = x + self.attention(x, mask=nnx.make_causal_mask(tokens[:, :-1]))
        x = x + self.down(nnx.gelu(self.up(x)))
        return optax.softmax_cross_entropy_with_integer_labels(self.head(self.norm(x)), tokens[:, 1:]).mean()

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-2, eps=1e-3)


def token_batches(steps: int, rows: int = 16) -> list[np.ndarray]:
    """Return batches of sequences that count on from anywhere."""
    starts = np.random.default_rng(0).integers(0, 32, (steps, rows, 1))
    return list(((starts + np.arange(9)) % 32).astype(np.int32))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", default=10, type=int)
    batches = token_batches(parser.parse_args().steps)
    losses = []
    for strategy in ("single", HSDP(), TensorParallel()):
        module = Transformer(rngs=nnx.Rngs(0))
        state, step = jl.compile_step(module, batch=batches[0], strategy=strategy)
        print(step.strategy.describe())
        losses.append([])
        for batch in batches:
            state, logs = step(state, batch)
            losses[-1].append(float(logs["loss"]))
    for i, row in enumerate(zip(*losses, strict=True)):
        print(f"step {i:>3}", *(f"{loss:.6f}" for loss in row))


if __name__ == "__main__":
    main()
