"""What the guard of the optimizer step costs: each nan_policy against "ignore", in turn in one process.

    python benchmarks/guard.py [--rounds 15] [--only "60 us"]

A line for each model and policy: the process's CPU time a step over that of "ignore", median and minimum of the ratios
of neighbouring rounds; and of the compiled program the MiB of temporaries and of copies, and its conditionals.
"""

import argparse
import os
import re
import time
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=1")

import jax
import numpy as np
from flax import nnx
from perceptron import Perceptron, make_batches

import jaxlit as jl

MODELS = {"60 us": (64, 3, 64, 60), "350 us": (144, 4, 128, 20), "10 M": (1024, 10, 16, 3)}  # width, depth, rows, steps
POLICIES = ("ignore", "raise", "skip")


def trained(policy: str, width: int, depth: int, batch: Any) -> Any:
    """Return the engine of a fit of one step."""
    bare: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = jl.Trainer(strategy="single", max_epochs=1, nan_policy=policy, **bare)
    trainer.fit(Perceptron(width, depth, rngs=nnx.Rngs(0)), [batch])
    return trainer._session.engine


def program(engine: Any, batch: Any) -> tuple[float, float, int]:
    """Return the MiB of temporaries and of copies in the compiled step, and its conditionals."""
    run = engine._programs["train_step"].program
    compiled = run.trace(engine.state.leaves, batch).lower().compile()
    text = compiled.as_text()
    copies = [
        np.prod([int(d) for d in dims.split(",") if d]) for dims in re.findall(r"= f32\[([\d,]*)\]\S* copy\(", text)
    ]
    conditionals = len(re.findall(r" conditional\(", text))
    return compiled.memory_analysis().temp_size_in_bytes / 2**20, float(sum(copies)) * 4 / 2**20, conditionals


def measure(engines: dict[str, Any], batch: Any, steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of CPU a step of each round."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(rounds):
        for name, engine in engines.items():
            start = time.process_time()
            for _ in range(steps):
                engine.train_step(batch)
            jax.block_until_ready(engine.state.leaves)
            found[name].append((time.process_time() - start) / steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=MODELS)
    arguments = parser.parse_args()
    print(f"{'model':<8}{'policy':<8}{'CPU us':>9}{'ratio':>7}{'least':>7}{'temp MiB':>10}{'copies':>8}{'cond':>6}")
    for model, (width, depth, rows, steps) in MODELS.items():
        if arguments.only not in (None, model):
            continue
        (batch,) = make_batches(width, rows, 1)
        engines = {policy: trained(policy, width, depth, batch) for policy in POLICIES}
        seconds = {name: np.array(x) for name, x in measure(engines, batch, steps, arguments.rounds).items()}
        for policy, engine in engines.items():
            ratio, (temp, copies, conditionals) = seconds[policy] / seconds["ignore"], program(engine, batch)
            times = f"{np.median(seconds[policy]) * 1e6:>9.0f}{np.median(ratio):>7.2f}{ratio.min():>7.2f}"
            print(f"{model:<8}{policy:<8}{times}{temp:>10.1f}{copies:>8.1f}{conditionals:>6}", flush=True)
        without, guarded = (jax.tree.leaves(engines[x].state.unflatten().params) for x in ("ignore", "raise"))
        same = all(np.array_equal(a, b) for a, b in zip(without, guarded, strict=True))
        print(f"{model:<8}the parameters of both are the same, bit by bit: {same}")


if __name__ == "__main__":
    main()
