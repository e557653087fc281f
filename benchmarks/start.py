"""What a start costs: CPU seconds of a process to its first step and to its end, without a compile cache and with one.

Each start trains 20 steps, validates, and writes the state; all take turns, in processes of their own.

    python benchmarks/start.py [--models perceptron transformer] [--rounds 3]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WHO = ("by hand", "Trainer first", "module first")
STEPS = 20


def models(base: Any) -> dict[str, Any]:
    """Return the models, of a base class, with the rows of their batches."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx

    class Model(base):
        def training_step(self, batch: Any) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any) -> None:
            self.log("val_loss", self.loss(batch))

        def configure_optimizers(self) -> Any:
            return optax.adamw(1e-3)

    class MLP(Model):
        def __init__(self, rngs: Any) -> None:
            self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(3)])

        def loss(self, batch: Any) -> Any:
            x = batch["x"]
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return jnp.mean((x - batch["x"]) ** 2)

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.norms = nnx.List([nnx.LayerNorm(128, rngs=rngs) for _ in range(2)])
            self.attention = nnx.MultiHeadAttention(4, 128, decode=False, rngs=rngs)
            self.up, self.down = nnx.Linear(128, 512, rngs=rngs), nnx.Linear(512, 128, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
            return x + self.down(nnx.gelu(self.up(self.norms[1](x))))

    class GPT(Model):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(512, 128, rngs=rngs)
            self.position = nnx.Param(jax.random.normal(rngs.params(), (64, 128)) * 0.02)
            self.blocks = nnx.List([Block(rngs) for _ in range(4)])
            self.head = nnx.Linear(128, 512, rngs=rngs)

        def loss(self, batch: Any) -> Any:
            x = self.embed(batch["x"]) + self.position[None]
            for block in self.blocks:
                x = block(x)
            logits = self.head(x)[:, :-1]
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["x"][:, 1:]).mean()

    return {"perceptron": (MLP, 32), "transformer": (GPT, 8)}


def by_hand(name: str, data: Any, cache: str) -> float:
    """Train in a loop of one's own; return the CPU time of the first step."""
    import jax
    import numpy as np
    import optax
    from flax import nnx

    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

    class Plain(nnx.Module):
        def log(self, *_: Any) -> None:
            pass

    make, rows = models(Plain)[name]
    model = nnx.jit(lambda: make(nnx.Rngs(0)))()
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    tx = model.configure_optimizers()
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: nnx.merge(graphdef, p, rest).loss(batch))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    validate = jax.jit(lambda params, batch: nnx.merge(graphdef, params, rest).loss(batch))
    batches = [{k: x[i * rows : (i + 1) * rows] for k, x in data.items()} for i in range(STEPS)]
    first = 0.0
    for batch in batches:
        params, state, loss = step(params, state, batch)
        first = first or (float(loss), time.process_time())[1]
    sum(float(validate(params, batch)) for batch in batches[:4])
    np.savez("state.npz", *map(np.asarray, jax.tree.leaves((params, state))))
    return first


def by_trainer(name: str, data: Any, cache: str, module_first: bool) -> float:
    """Train by a Trainer with its defaults; return the CPU time of the first step."""
    from flax import nnx

    import jaxlit as jl

    make, rows = models(jl.TrainModule)[name]
    times: list[float] = []

    class First(jl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if not batch_idx:
                times.append((float(outputs["loss"]), time.process_time())[1])

    module = make(nnx.Rngs(0)) if module_first else None
    trainer = jl.Trainer(max_epochs=1, default_root_dir="run", callbacks=[First()], compile_cache=cache or False)
    module = module or make(nnx.Rngs(0))
    few = {k: x[: 4 * rows] for k, x in data.items()}
    trainer.fit(module, jl.ArrayLoader(data, rows), jl.ArrayLoader(few, rows))
    return times[0]


def child(name: str, who: str, cache: str) -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    rows = {"perceptron": lambda: rng.normal(size=(32 * STEPS, 32)).astype(np.float32)}
    data = {"x": rows.get(name, lambda: rng.integers(0, 512, (8 * STEPS, 64)).astype(np.int32))()}
    first = by_hand(name, data, cache) if who == WHO[0] else by_trainer(name, data, cache, who == WHO[2])
    print(f"\nstart {first} {time.process_time()}")


def start(name: str, who: str, cache: str) -> tuple[float, float]:
    """Return the CPU seconds to the first step and to the end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name, who, cache]
        env = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
        out = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True).stdout
    _, first, end = next(line for line in out.splitlines() if line.startswith("start ")).split()
    return float(first), float(end)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["perceptron", "transformer"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return child(*given.child)
    print("| | CPU s to the first step, cold | to the end | with a cache: first step | ratio | to the end | ratio |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name in given.models:
        with tempfile.TemporaryDirectory() as caches:
            runs: dict[str, list[tuple[float, float]]] = {who: [] for who in WHO}
            cold = {who: start(name, who, str(Path(caches, who))) for who in WHO}  # which fills the cache
            for _ in range(given.rounds):
                for who in WHO:
                    runs[who].append(start(name, who, str(Path(caches, who))))
        warm = {who: [statistics.median(x) for x in zip(*runs[who], strict=True)] for who in WHO}
        for who in WHO:
            first, end = (f"{x:.2f} | {x / base:.2f}" for x, base in zip(warm[who], warm[WHO[0]], strict=True))
            print(f"| {name}, {who} | {cold[who][0]:.2f} | {cold[who][1]:.2f} | {first} | {end} |", flush=True)


if __name__ == "__main__":
    main()
