"""What the compile of a step costs: each nan_policy against a hand-written jit of the same model, in one process.

    python benchmarks/compile.py [--rounds 5] [--strategy single] [--devices 1] [--layers 4] [--policies ignore raise]

The model is the byte GPT of examples/transformer_lm.py, trained by AdamW. The programs are traced and compiled in turn,
each time without caches. A line for each: seconds of its trace and of its backend compile, the median, the least, the
least CPU time of the process, and the ratios of both to those by hand; fusions and instructions of the compiled
program, and the MiB of its temporaries. By hand, the state has the shardings of the strategy.
"""

import argparse
import gc
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

GPT = runpy.run_path(str(Path(__file__).parents[1] / "examples" / "transformer_lm.py"))["GPT"]
TEXT = np.random.default_rng(0).integers(0, 256, (32, 65)).astype(np.uint8)
Tracer = Callable[[], Any]  # traces a program


def of_fit(policy: str, strategy: str, layers: int) -> tuple[Tracer, Any]:
    """Return the tracer of a train_step, and the state after it."""
    bare: dict[str, Any] = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = jl.Trainer(strategy=strategy, max_epochs=1, nan_policy=policy, **bare)
    trainer.fit(GPT(layers=layers, rngs=nnx.Rngs(0)), [TEXT])
    engine = trainer._session.engine
    assert engine is not None
    program: Any = engine._programs["train_step"].program
    batch = engine.strategy.shard_batch(TEXT)
    return lambda: program.trace(engine.state.leaves, batch), engine.state.unflatten()


def by_hand(state: Any, layers: int) -> Tracer:
    """Return the tracer of a flat donated jit, on the arrays of a state."""
    graphdef = nnx.split(GPT(layers=layers, rngs=nnx.Rngs(0)))[0]
    leaves, treedef = jax.tree.flatten((state.params, state.opt_state))
    tx = optax.adamw(5e-3)

    def loss_of(params: Any, text: jax.Array) -> jax.Array:
        logits = nnx.merge(graphdef, params)(text[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    def train_step(leaves: list[jax.Array], text: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        params, opt_state = jax.tree.unflatten(treedef, leaves)
        loss, grads = jax.value_and_grad(loss_of)(params, text)
        updates, opt_state = tx.update(grads, opt_state, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), opt_state)), loss

    shardings: Any = [x.sharding for x in leaves]
    rows = jax.sharding.NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), jax.P("data"))
    options: Any = {"xla_cpu_enable_concurrency_optimized_scheduler": False} if jax.device_count() > 1 else None
    step = jax.jit(
        train_step,
        in_shardings=(shardings, rows),
        out_shardings=(shardings, None),
        donate_argnums=0,
        compiler_options=options,
    )
    return lambda: step.trace(leaves, TEXT)


def timed(fn: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return what a function returns, its seconds, and those of the process's CPU."""
    start, cpu = time.perf_counter(), time.process_time()
    result = fn()
    return result, time.perf_counter() - start, time.process_time() - cpu


def measure(programs: dict[str, Tracer], rounds: int) -> dict[str, np.ndarray]:
    """Return of each round the seconds and CPU seconds of the trace, then those of the compile."""
    gc.disable()  # a collection takes as long as a third of a trace, wherever it falls
    found: dict[str, list[list[float]]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, trace in programs.items():
            jax.clear_caches()
            gc.collect()
            traced, *tracing = timed(trace)
            _, *compiling = timed(traced.lower().compile)
            found[name].append(tracing + compiling)
    return {name: np.array(x) for name, x in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--strategy", default="single")
    parser.add_argument("--devices", type=int, default=1, help="simulated")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--policies", nargs="+", default=["ignore", "raise"])
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    jax.config.update("jax_enable_compilation_cache", False)
    programs: dict[str, Tracer] = {"by hand": lambda: None}
    for policy in arguments.policies:
        programs[policy], state = of_fit(policy, arguments.strategy, arguments.layers)
        programs["by hand"] = by_hand(state, arguments.layers)
    seconds = measure(programs, arguments.rounds)
    heads = "".join(f"{x:>10}{'least':>7}{'CPU':>6}{'ratios':>10}" for x in ("trace s", "compile s"))
    print(f"{'':<8}{heads}{'fusions':>9}{'instr.':>8}{'temp MiB':>10}")
    for name, trace in programs.items():
        least, line = seconds[name].min(0), f"{name:<8}"
        ratios = least / seconds["by hand"].min(0)
        for i in (0, 2):
            line += f"{np.median(seconds[name][:, i]):>10.2f}{least[i]:>7.2f}{least[i + 1]:>6.2f}"
            line += f"{ratios[i]:>5.2f}{ratios[i + 1]:>5.2f}"
        compiled = trace().lower().compile()
        text, temp = compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes / 2**20
        print(f"{line}{text.count(' fusion('):>9}{text.count(' = '):>8}{temp:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
