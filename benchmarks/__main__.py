"""What a step costs: jaxlit next to a hand-written loop and to other libraries, in Markdown.

    python -m benchmarks [--sections rivals evaluation host] [--sizes "60 us" ...] [--only NAME ...] [--rounds 25]
        [--plot FILE]

"rivals" compares every contender that is installed with a hand-written loop, at four sizes of a step. "evaluation" does
so for validation and prediction. "host" shows what the Trainer adds as leaves, metrics, callbacks and devices become
more. Contenders take turns in one process, and gather from arrays of one size.
Ratios of wall time and of the process's CPU time are medians of the ratios of a round, and ratios of the minima. Calls
of Python and C functions are those of a turn in the thread that trains, for one step.
"""

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import flax
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxlit as jl
from benchmarks.contenders import (
    BARE,
    CONTENDERS,
    Calls,
    Task,
    by_evaluation,
    by_fit,
    by_hand,
    by_hand_evaluation,
    installed,
    perceptron,
    quiet,
)

SIZES = {  # width, depth, rows, steps
    "25 us": (8, 1, 8, 1600),
    "60 us": (32, 2, 32, 800),
    "200 us": (96, 2, 64, 800),
    "5 ms": (512, 2, 256, 96),
}
SECTIONS = ("rivals", "evaluation", "host")
DEVICES = (1, 8, 64)
HEAD = "wall: median | least | CPU: median | least | Python calls | C calls"


class Result(NamedTuple):
    """What a contender took."""

    microseconds: float  # of wall time a step, the least of the rounds
    wall: tuple[float, float]  # over the hand-written loop: the median, and of the minima
    cpu: tuple[float, float]
    python: float  # calls a step
    c: float

    def __str__(self) -> str:
        ratios = " | ".join(f"{x:.2f}" for x in (*self.wall, *self.cpu))
        return f"{ratios} | {self.python:.1f} | {self.c:.1f}"


def compare(task: Task, contenders: dict[str, Callable[[Task], Callable[[Any], None]]]) -> dict[str, Result]:
    """Let contenders take turns, of which the first is the base, and return what each took."""
    with quiet():
        turns = {name: make(task) for name, make in contenders.items()}
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in turns}
        calls = {name: Calls() for name in turns}
        for i in range(task.turns):
            for name, turn in turns.items():
                wall, cpu = time.perf_counter(), time.process_time()
                turn(calls[name] if i == task.turns - 2 else None)  # counted, not timed; fits end in the last
                seconds[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    times = {name: [*zip(*x[1:-2], strict=True)] for name, x in seconds.items()}  # the first one compiles
    base = next(iter(times.values()))

    def ratios(mine: Any, theirs: Any) -> tuple[float, float]:
        each = [a / b for a, b in zip(mine, theirs, strict=True)]
        return statistics.median(each), min(mine) / min(theirs)

    return {
        name: Result(
            min(wall) / task.steps * 1e6,
            *(ratios(wall, base[0]), ratios(cpu, base[1])),
            *(calls[name].python.total() / task.steps, calls[name].c / task.steps),
        )
        for name, (wall, cpu) in times.items()
    }


def rivals(given: Any) -> dict[str, dict[str, Result]]:
    """Print a table for each size of a step, and return what is in them."""
    wanted = [n for n in CONTENDERS if installed(n) and (n == "hand-written" or n in (given.only or CONTENDERS))]
    results = {}
    for size in given.sizes:
        width, depth, rows, steps = SIZES[size]
        task = Task(perceptron(width, depth), width, depth, rows, steps, given.rounds + 3)
        load = os.getloadavg()[0]
        results[size] = compare(task, {name: CONTENDERS[name] for name in wanted})
        title = f'"{size}": {depth} layers, {width} wide, {rows} rows'
        head(f"{title}; {given.rounds} rounds of {steps} steps, load {load:.1f}", "contender")
        for name, result in results[size].items():
            row(name, result)
    return results


def evaluations(given: Any) -> None:
    """Print what a batch of `validate` and of `predict` costs."""
    task = Task(perceptron(32, 2), 32, 2, 32, 4000, given.rounds + 3)
    head(f"Batches of 32 rows, 2 layers, 32 wide; {given.rounds} rounds of 4000, load {os.getloadavg()[0]:.1f}", "")
    for verb, predicts in (("validate", False), ("predict", True)):
        contenders = {"hand-written": by_hand_evaluation, f"Trainer.{verb}": by_evaluation}
        results = compare(task, {name: functools.partial(make, predicts=predicts) for name, make in contenders.items()})
        for name, result in results.items():
            row(f"{verb} {name}" if name == "hand-written" else name, result)


class Leaves(jl.TrainModule):
    """So many parameters of 8 numbers, so many metrics."""

    def __init__(self, leaves: int, metrics: int = 1) -> None:
        self.parts, self.metrics = nnx.List([nnx.Param(jnp.ones(8)) for _ in range(leaves)]), metrics

    def loss(self, batch: dict[str, jax.Array]) -> jax.Array:
        return sum((jnp.mean(part[...]) for part in self.parts), jnp.mean(batch["x"]))

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        loss = self.loss(batch)
        for i in range(self.metrics):
            self.log(f"metric_{i}", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-3)


class Watches(jl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def leaves(task: Task, count: int, callbacks: int = 0, metrics: int = 1, **arguments: Any) -> Result:
    """Compare a Trainer with the loop by hand, on so many leaves."""
    task = task._replace(make=lambda: Leaves(count, metrics))
    watches = [Watches() for _ in range(callbacks)]
    return compare(task, {"hand": by_hand, "fit": lambda task: by_fit(task, *watches, **arguments)})["fit"]


def host(given: Any) -> None:
    """Print what more leaves, metrics, callbacks and devices cost."""
    task = Task(lambda: None, 8, 0, 64, 200, given.rounds + 3)
    head(f"Stripped Trainer over the same loop by hand, load {os.getloadavg()[0]:.1f}", "")
    for n in given.leaves:
        row(f"{n} leaves", leaves(task, n, **BARE))
    for n in (1, 10, 100):
        row(f"10 leaves, {n} metrics", leaves(task, 10, metrics=n, **BARE))
    for n in (1, 4, 16):
        row(f"10 leaves, {n} callbacks", leaves(task, 10, callbacks=n, **BARE))
    for devices in DEVICES:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        command = [sys.executable, "-m", "benchmarks", "--devices", str(devices), "--rounds", str(given.rounds)]
        out = subprocess.run(
            command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, check=True
        ).stdout
        row(f"10 leaves, ddp on {devices} devices", Result(*json.loads(out.splitlines()[-1])))


def head(title: str, first: str) -> None:
    print(f"\n{title}\n\n| {first} | us a step | {HEAD} |\n|---|{'---:|' * 7}", flush=True)


def row(name: str, result: Result) -> None:
    print(f"| {name} | {result.microseconds:.0f} | {result} |", flush=True)


def plot(results: dict[str, dict[str, Result]], file: str) -> None:
    """Draw the ratios of CPU time, by minima."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(results), figsize=(4.5 * len(results), 4), squeeze=False, sharey=True)
    for axis, (size, each) in zip(axes[0], results.items(), strict=True):
        bars = axis.barh([*each], [result.cpu[1] for result in each.values()])
        axis.bar_label(bars, fmt="%.2f", padding=3)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.set(title=f'"{size}"', xscale="log", xlabel="CPU time over the hand-written loop")
        axis.margins(x=0.25)
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=[*SIZES])
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, help="contenders, next to the hand-written loop")
    parser.add_argument("--leaves", nargs="+", type=int, default=[10, 100, 1000, 3000])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--plot", help="a file for a picture of the rivals")
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)  # of the subprocess that measures them
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if given.devices:
            task = Task(lambda: None, 8, 0, 64, 100, given.rounds + 3)
            print(json.dumps(leaves(task, 10, strategy="ddp", **BARE)))
            return
        libraries = ", ".join(f"{x.__name__} {x.__version__}" for x in (jax, flax, optax, jl))
        print(f"{libraries}, Python {platform.python_version()}, {os.cpu_count()} cores, {jax.devices()[0].platform}")
        results = rivals(given) if "rivals" in given.sections else {}
        if "evaluation" in given.sections:
            evaluations(given)
        if "host" in given.sections:
            host(given)
    if given.plot:
        plot(results, given.plot)


if __name__ == "__main__":
    main()
