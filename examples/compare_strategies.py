"""One model under several strategies: the losses are equal, and what a device holds is not.

    python examples/compare_strategies.py --devices 8    # simulated on this computer's CPU

`jl.testing.assert_same_training` is this comparison as a test, of metrics, gradients and parameters as well.
"""

import argparse
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

STRATEGIES = ("single", "ddp", "zero1", "fsdp", "hsdp", "shard_map", "pmap")


class Network(jl.TrainModule):
    """Three layers with BatchNorm, which is synchronized where a step sees only its replica's rows."""

    def __init__(self, width: int = 512, *, rngs: nnx.Rngs) -> None:
        self.layers = nnx.Sequential(
            nnx.Linear(64, width, rngs=rngs),
            nnx.BatchNorm(width, rngs=rngs),
            nnx.relu,
            nnx.Linear(width, width, rngs=rngs),
            nnx.relu,
            nnx.Linear(width, 10, rngs=rngs),
        )

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        loss = optax.softmax_cross_entropy_with_integer_labels(self.layers(batch["x"]), batch["y"]).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-3, eps=1e-3)


def main() -> Any:
    """Print the losses under each strategy, and the plan of all; returns the plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--devices", default=8, type=int)
    parser.add_argument("--steps", default=20, type=int)
    given = parser.parse_args()
    jl.testing.fake_devices(given.devices)

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1024, 64)).astype(np.float32), rng.integers(0, 10, 1024)
    data = jl.ArrayLoader({"x": x, "y": y.astype(np.int32)}, batch_size=128, shuffle=True)
    quiet: Any = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)

    losses = {}
    for name in STRATEGIES:
        count = 1 if name == "single" else given.devices
        trainer = jl.Trainer(strategy=name, devices=count, max_steps=given.steps, log_every_n_steps=1, **quiet)
        trainer.fit(jl.lazy(Network), data)
        losses[name] = np.array(trainer.history["loss"][1])
        apart = np.abs(losses[name] / losses["single"] - 1).max()
        print(f"{name:<10} loss {losses[name][0]:.6f} -> {losses[name][-1]:.6f}, at most {apart:.1e} from single")

    plan = jl.Trainer(max_steps=1).plan(jl.lazy(Network), data, devices=given.devices, strategies=STRATEGIES[1:])
    print(plan)
    return plan


if __name__ == "__main__":
    main()
