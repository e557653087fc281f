"""Experts that live on different devices: rules place their weights, the model sends each row to its expert and back.

    python examples/experts.py [--strategy experts|single] [--epochs 3]

Without an accelerator it simulates eight devices.
"""

import argparse
import os
from functools import partial

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxlit as jl


class Experts(nnx.Module):
    """Perceptrons of which each row takes one, chosen by a gate (Fedus et al., 2021, https://arxiv.org/abs/2101.03961)."""

    def __init__(self, count: int, width: int, *, rngs: nnx.Rngs) -> None:
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(batch_axis=0), ("experts", None, None))
        self.gate = nnx.Linear(width, count, use_bias=False, rngs=rngs)
        self.up = nnx.Param(init(rngs.params(), (count, width, 4 * width)))
        self.down = nnx.Param(init(rngs.params(), (count, 4 * width, width)))

    def __call__(self, x: jax.Array) -> jax.Array:
        chances = jax.nn.softmax(self.gate(x))
        chosen = jax.nn.one_hot(chances.argmax(-1), chances.shape[-1])
        run = compute
        if "ep" in jax.sharding.get_abstract_mesh().axis_names:
            rows, experts = P(("data", "ep")), P("ep")  # rows are split over both axes, experts over the second
            split = {"in_specs": (rows, rows, experts, experts), "out_specs": rows}
            run = jax.shard_map(partial(compute, axis="ep"), **split)
        return (chances * chosen).sum(-1, keepdims=True) * run(x, chosen, self.up[...], self.down[...])


def compute(x: jax.Array, chosen: jax.Array, up: jax.Array, down: jax.Array, axis: str | None = None) -> jax.Array:
    """Return (rows, width), what each row's expert makes of it; `axis` is the mesh axis that experts are split over."""
    sent = jnp.einsum("re,rw->erw", chosen, x)  # each expert has a place for every row
    if axis is not None:  # from all experts of these rows to these experts of all rows
        sent = jax.lax.all_to_all(sent, axis, split_axis=0, concat_axis=1, tiled=True)
    made = jnp.einsum("erh,ehw->erw", nnx.relu(jnp.einsum("erw,ewh->erh", sent, up)), down)
    if axis is not None:
        made = jax.lax.all_to_all(made, axis, split_axis=1, concat_axis=0, tiled=True)
    return jnp.einsum("re,erw->rw", chosen, made)


class Regressor(jl.TrainModule):
    def __init__(self, experts: int = 8, width: int = 8, *, rngs: nnx.Rngs) -> None:
        self.experts, self.head = Experts(experts, width, rngs=rngs), nnx.Linear(width, 1, rngs=rngs)

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        loss = jnp.mean((self.head(batch["x"] + self.experts(batch["x"]))[:, 0] - batch["y"]) ** 2)
        self.log("loss", loss, prog_bar=True, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(3e-3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="experts", choices=("experts", "single"))
    parser.add_argument("--epochs", default=3, type=int)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    x, slopes = (rng.normal(size=(rows, 8)).astype(np.float32) for rows in (4096, 4))
    y = (x * slopes[2 * (x[:, 0] > 0) + (x[:, 1] > 0)]).sum(-1)
    placed = {"strategy": jl.strategies.FSDP(rules={"experts": "ep"}), "mesh": {"data": -1, "ep": 4}}
    where = placed if options.strategy == "experts" else {"strategy": "single"}
    trainer = jl.Trainer(**where, max_epochs=options.epochs, logger=False, enable_checkpointing=False)
    trainer.fit(jl.lazy(Regressor), jl.ArrayLoader({"x": x, "y": y}, 64))
    print(f"loss {float(trainer.callback_metrics['loss']):.5f}, experts {trainer.module.experts.up.sharding.spec}")
