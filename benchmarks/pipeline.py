"""What a pipeline costs: Python for each program that it starts, and a step against fsdp and a single device.

    python benchmarks/pipeline.py [--rounds 9] [--widths 64 256]

A perceptron of 8 residual layers trains on 16 rows: under `single` at once, under `fsdp` over four devices in 4 windows
of accumulation, and in pipelines of 4 ranks and 4 microbatches. The steps are taken in turn in one process; the table
gives medians.

- step: until the new state is there.
- CPU of the caller until the step returns, for each program that it starts ("start"), and the same where programs are
  replaced by functions that return at once what they returned before ("Python").
- programs: calls of compiled functions in a step.

On two cores four simulated devices share what one has alone: all that can be seen of a step is the sum of its work and
what starting it takes, in which a pipeline is near a single device. What a pipeline gains, how long its ranks wait,
whether transfers hide behind passes, and what a real interconnect takes cannot be seen. Small programs run within the
call that starts them, so that "start" holds some of their work.
"""

import argparse
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

ROWS, WINDOWS, LAYERS = 16, 4, 8
Pipeline = jl.strategies.Pipeline


class Layer(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs) -> None:
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.relu(self.up(x)))


class Deep(jl.TrainModule):
    def __init__(self, width: int, windows: int, *, rngs: nnx.Rngs) -> None:
        self.windows = windows
        self.blocks = nnx.List([Layer(width, rngs=rngs) for _ in range(LAYERS)])

    def training_step(self, batch: jax.Array) -> jax.Array:
        x = batch
        for block in self.blocks:
            x = jl.pipeline_yield(block(x))
        return jnp.mean((x - 2 * batch) ** 2)

    def configure_optimizers(self) -> Any:
        tx = optax.adamw(1e-4)
        return tx if self.windows == 1 else optax.MultiSteps(tx, self.windows).gradient_transformation()


class Counted(Pipeline):
    """Counts the programs that it starts, and can leave them out."""

    programs, leave_out = 0, False

    def jit_on(self, rank: int, fn: Callable[..., Any], name: str, options: Mapping[str, Any]) -> Any:
        run, made = super().jit_on(rank, fn, name, options), []

        def call(*args: Any) -> Any:
            self.programs += 1
            if not (self.leave_out and made):
                made[:] = [run(*args)]
            return made[0]

        return call


class Measured:
    """A compiled step, its state, and what each of its steps took."""

    def __init__(self, strategy: Any, width: int, windows: int = 1) -> None:
        x = np.random.default_rng(0).normal(size=(windows, ROWS // windows, 64, width)).astype(np.float32)
        self.batches, model = list(x), Deep(width, windows, rngs=nnx.Rngs(0))
        self.state, self.step = jl.compile_step(model, batch=x[0], strategy=strategy)
        self.strategy, self.seconds, self.started, self.python = strategy, [], [], []
        self.programs = windows

    def run(self) -> None:
        """Train on the rows once, and note the times."""
        start, cpu = time.perf_counter(), time.thread_time()
        self._steps()
        self.started.append(time.thread_time() - cpu)
        jax.block_until_ready(self.state.leaves)
        self.seconds.append(time.perf_counter() - start)
        if isinstance(self.strategy, Counted):
            self.strategy.leave_out, self.strategy.programs = True, 0
            cpu = time.thread_time()
            self._steps()
            self.python.append(time.thread_time() - cpu)
            self.strategy.leave_out, self.programs = False, self.strategy.programs

    def _steps(self) -> None:
        for batch in self.batches:
            self.state, _ = self.step(self.state, batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 256])
    given = parser.parse_args()
    print(f"{'width':<7}{'strategy':<19}{'step':>11}{'programs':>10}{'start':>10}{'Python':>10}  a program")
    for width in given.widths:
        measured = {"single": Measured("single", width), "fsdp": Measured("fsdp", width, WINDOWS)}
        for name in ("1f1b", "interleaved_1f1b"):
            measured[name] = Measured(Counted(4, name, WINDOWS), width)
        for _ in range(given.rounds + 2):
            for one in measured.values():
                one.run()
        for name, one in measured.items():
            start, python = (np.median(x[2:]) / one.programs * 1e3 if x else np.nan for x in (one.started, one.python))
            step = np.median(one.seconds[2:]) * 1e3
            print(f"{width:<7}{name:<19}{step:>8.1f} ms{one.programs:>10}{start:>7.3f} ms{python:>7.3f} ms", flush=True)


if __name__ == "__main__":
    main()
