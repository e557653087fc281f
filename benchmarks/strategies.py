"""A deep multilayer perceptron on one device and data parallel by jit and by pmap: time of a step, bytes of a device.

    python benchmarks/strategies.py [--scale 8] [--devices 8] [--rounds 15]

The model is 90 layers of 2056, from 1024 numbers to 10, trained by Adam on batches of 256 x 27 rows and of twice as
many; `--scale` divides layers, widths and batches. At 1, which needs accelerators, the bytes of state and temporaries
are about 512 times those at 8: a device of 24 GB holds the first batch and not the second. Two such devices hold the
second as well, each half of it: compare the rows of `--devices 2`.

Times are of `step(state, batch)` with a host batch until the state is there, one step of each in turn in one process;
the table gives medians, and the median and the quartiles of the ratio to `single` in the same round. Simulated devices
share the cores of one computer: there the ratio is what it costs to split the work, not what it gains. Bytes are those
of one device: the batch and the state by their shards, the temporaries by XLA's analysis of the compiled step.
"""

import argparse
import itertools
import math
import os
import time
from typing import Any

import numpy as np

STRATEGIES = ("single", "ddp", "pmap")
BATCHES = (27, 54)


def model(scale: int) -> Any:
    """Return the perceptron as a module that is not built yet."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import jaxlit as jl

    class MLP(jl.TrainModule):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            widths = [1024 // scale, *[2056 // scale] * (90 // scale)]
            self.layers = nnx.List([nnx.Linear(a, b, rngs=rngs) for a, b in itertools.pairwise(widths)])
            self.output = nnx.Linear(widths[-1], 10, rngs=rngs)

        def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
            x = batch["x"]
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return jnp.mean((self.output(x) - batch["y"]) ** 2)

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.adam(1e-4)

    return jl.lazy(MLP)


def held(x: Any) -> int:
    """Return the bytes that one device has of an array."""
    shape = x.shape if isinstance(x, np.ndarray) else x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize


class Measured:
    """A compiled step, its state, what it holds and how long each step took.

    Args:
        strategy: The strategy's name.
        batch: The host batch that it trains on.
        scale: What the sizes are divided by.
    """

    def __init__(self, strategy: str, batch: dict[str, np.ndarray], scale: int) -> None:
        import jax

        import jaxlit as jl

        self.strategy, self.batch = strategy, batch
        self.state, self.step = jl.compile_step(model(scale), batch=batch, strategy=strategy)
        placed = self.step.strategy.shard_batch(batch)
        program = self.step._engine._programs["train_step"]
        compiled = getattr(program, "split", program).lower(self.state.leaves, placed).compile()
        self.bytes = (
            sum(map(held, jax.tree.leaves(placed))),
            sum(map(held, self.state.leaves)),
            compiled.memory_analysis().temp_size_in_bytes,
        )
        self.seconds: list[float] = []

    def run(self) -> None:
        """Take a step and note its time."""
        import jax

        start = time.perf_counter()
        self.state, _ = self.step(self.state, self.batch)
        jax.block_until_ready(self.state.leaves)
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=int, default=8, choices=(1, 2, 4, 8), help="what all sizes are divided by")
    parser.add_argument("--devices", type=int, default=8, help="simulated devices, where there is no accelerator")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={given.devices}"
    import jax

    print(f"{jax.device_count()} x {jax.devices()[0].platform}, sizes divided by {given.scale}; MiB of one device")
    print(f"{'rows':<12}{'strategy':<10}{'step':>10}{'ratio':>8}  {'quartiles':<12}{'batch':>8}{'state':>8}{'temp':>8}")
    for times in BATCHES:
        unit = 256 // given.scale
        x = np.ones((unit * times, 1024 // given.scale), np.float32)
        batch = {"x": x, "y": np.ones((len(x), 10), np.int32)}
        measured = [Measured(strategy, batch, given.scale) for strategy in STRATEGIES]
        for _ in range(given.rounds + 2):
            for one in measured:
                one.run()
        single = np.array(measured[0].seconds[2:])
        for one in measured:
            seconds = np.array(one.seconds[2:])
            low, middle, high = np.percentile(seconds / single, (25, 50, 75))
            sizes = "".join(f"{size / 2**20:>8.2f}" for size in one.bytes)
            print(
                f"{f'{unit} x {times}':<12}{one.strategy:<10}{np.median(seconds) * 1e3:>7.1f} ms{middle:>8.2f}"
                f"  {f'{low:.2f}-{high:.2f}':<12}{sizes}",
                flush=True,
            )


if __name__ == "__main__":
    main()
