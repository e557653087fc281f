"""What a step costs on an accelerator, in Markdown; on a CPU it runs as well, and its numbers mean little.

    python benchmarks/gpu.py [--tiny] [--rounds 15] [--sections dispatch fused transfers ...]

- dispatch: microseconds inside the call that dispatches a step, and of the step, by hand and by nan_policy.
- fused: microseconds of a step at 1, 8 and 32 steps per execution, from `ArrayLoader`.
- transfers: a large batch as numpy into the jit, by `device_put` one step ahead, and from pinned host memory.
- leaves: the same for so many parameters.
- gpt: `fit` in bf16-mixed over a hand-written step of the same model, MFU, and with several devices the collectives.
- plan: what `Trainer.plan` says of that fit on one device, and what the run takes; what "auto" and
  `scale_batch_size` choose.
- population: a step of so many members of `fit_many` over that of one.
- checkpoint: the longest gap between two steps around the first asynchronous save and a later one, and the median gap.
- start: seconds until the first step is done, in new processes, with an empty and with a warm compile cache.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # for the other benchmarks

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl
from benchmarks.contenders import BARE, flat_step
from benchmarks.perceptron import Perceptron, make_batches
from jaxlit.programs.costs import peak_flops

SECTIONS = ("dispatch", "fused", "transfers", "leaves", "gpt", "plan", "population", "checkpoint", "start")


class Gaps(jl.Callback):
    """Keeps when each step was dispatched."""

    def __init__(self) -> None:
        self.at = list[float]()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at.append(time.perf_counter())


class Epochs(jl.Callback):
    """Keeps the seconds of each epoch's steps."""

    def __init__(self) -> None:
        self.seconds = list[float]()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        jax.block_until_ready(trainer.state.params)
        self.seconds.append(time.perf_counter() - self.start)


class Many(jl.TrainModule):
    """So many small parameters."""

    def __init__(self, leaves: int) -> None:
        self.parts = nnx.List([nnx.Param(jnp.ones(8)) for _ in range(leaves)])

    def loss(self, batch: dict[str, jax.Array]) -> jax.Array:
        return sum((jnp.mean(part[...]) for part in self.parts), jnp.mean(batch["x"]))

    training_step = loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(1e-3)


def attend(query: jax.Array, key: jax.Array, value: jax.Array, **_: Any) -> jax.Array:
    """Attention to what came before, by cuDNN's fused kernel on a GPU."""
    fused = "cudnn" if jax.default_backend() == "gpu" and query.dtype == jnp.bfloat16 else None
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation=fused)


class GPT(jl.TrainModule):
    def __init__(self, layers: int, width: int, vocabulary: int, length: int, *, rngs: nnx.Rngs) -> None:
        # An Embed without a dtype of its own returns that of its parameters when it was made, float32.
        self.embed = nnx.Embed(vocabulary, width, dtype=jnp.bfloat16, rngs=rngs)
        self.place = nnx.Embed(length, width, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List([self.block(width, rngs) for _ in range(layers)])

    @staticmethod
    def block(width: int, rngs: nnx.Rngs) -> nnx.List:
        heads = max(width // 64, 1)
        attention = nnx.MultiHeadAttention(heads, width, decode=False, attention_fn=attend, rngs=rngs)
        up, down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        return nnx.List([nnx.LayerNorm(width, rngs=rngs), attention, nnx.LayerNorm(width, rngs=rngs), up, down])

    def loss(self, text: jax.Array) -> jax.Array:
        x = self.embed(text[:, :-1]) + self.place(jnp.arange(text.shape[1] - 1))
        for norm, attention, norm_2, up, down in self.blocks:
            x = x + attention(norm(x))
            x = x + down(nnx.gelu(up(norm_2(x))))
        logits = self.embed.attend(x).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    training_step = loss

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-4)


def fit(model: Any, data: Any, *callbacks: jl.Callback, **arguments: Any) -> jl.Trainer:
    trainer = jl.Trainer(callbacks=[*callbacks], **BARE | {"strategy": "single", "max_epochs": 1} | arguments)
    trainer.fit(model, data)
    return trainer


def timed(step: Callable[[], Any], count: int) -> tuple[float, float]:
    """Return the median microseconds inside the call of a step, and those of a step until it is done."""
    inside, begun, result = list[float](), time.perf_counter(), None
    for i in range(count):
        start = time.perf_counter()
        result = step()
        inside.append(time.perf_counter() - start)
        if i % 8 == 7:  # steps in flight
            jax.block_until_ready(result)
    jax.block_until_ready(result)
    return statistics.median(inside) * 1e6, (time.perf_counter() - begun) / count * 1e6


def table(title: str, *rows: tuple[Any, ...]) -> None:
    print(f"\n{title}\n")
    for i, row in enumerate(rows):
        print("|", " | ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row), "|")
        if not i:
            print("|" + "---|" * len(row), flush=True)


def both(model: Any, batch: Any, rounds: int, **arguments: Any) -> tuple[float, ...]:
    """Return the microseconds of a step, see `timed`: by hand, and the Trainer's."""
    step, state = flat_step(model)
    state = [jnp.copy(x) for x in state]

    def by_hand() -> jax.Array:
        nonlocal state
        state, loss = step(state, batch)
        return loss

    def train_step() -> jax.Array:
        return engine.train_step(batch)[0]

    jax.block_until_ready(by_hand())
    hand = timed(by_hand, 8 * rounds)
    engine: Any = fit(model, [batch], **arguments)._session.engine
    return *hand, *timed(train_step, 8 * rounds)


TIMES = ("by hand: inside the call, us", "step, us", "Trainer: inside the call, us", "step, us")


def dispatch(tiny: bool, rounds: int) -> None:
    rows: list[tuple[Any, ...]] = [("width", "nan_policy", *TIMES)]
    for width in (16,) if tiny else (256, 1024, 4096):
        (batch,) = make_batches(width, 64, 1)
        for policy in ("ignore", "raise", "skip"):
            times = both(Perceptron(width, 3, rngs=nnx.Rngs(0)), batch, rounds, nan_policy=policy)
            rows.append((width, policy, *times))
    table("Whether a dispatch blocks", *rows)


def fused(tiny: bool, rounds: int) -> None:
    rows: list[tuple[Any, ...]] = [("width", "k", "step, us")]
    for width in (16,) if tiny else (64, 512, 2048):
        count = 64 if tiny else 320
        data = {k: np.ones((64 * count, width), np.float32) for k in "xy"}
        for k in (1, 8, 32):
            epochs, loader = Epochs(), jl.ArrayLoader(data, 64, shuffle=True)
            model = Perceptron(width, 2, rngs=nnx.Rngs(0))
            fit(model, loader, epochs, steps_per_execution=k, max_epochs=rounds + 1)
            rows.append((width, k, statistics.median(epochs.seconds[1:]) / count * 1e6))
    table("Steps per execution", *rows)


def transfers(tiny: bool, rounds: int) -> None:
    batches = [np.full((64, 256 if tiny else 400_000), i, np.float32) for i in range(4)]  # 100 MB
    step = jax.jit(lambda w, x: w + jnp.tanh(x).mean())
    sharding, rows = jax.devices()[0], list[tuple[Any, ...]]([("batch", "step, us")])
    kinds = {m.kind for m in sharding.addressable_memories()}
    single = jax.sharding.SingleDeviceSharding
    pinned = [jax.device_put(x, single(sharding, memory_kind="pinned_host")) for x in batches if "pinned_host" in kinds]

    def run(name: str, sources: list[Any], place: Callable[[Any], Any]) -> None:
        w, ahead = step(jnp.zeros(()), place(sources[0])), place(sources[0])
        begun = time.perf_counter()
        for i in range(4 * rounds):
            w = step(w, ahead)
            ahead = place(sources[i % 4])
        jax.block_until_ready(w)
        rows.append((name, (time.perf_counter() - begun) / (4 * rounds) * 1e6))

    run("numpy into jit", batches, lambda x: x)
    run("device_put ahead", batches, lambda x: jax.device_put(x, sharding))
    if pinned:
        run("pinned, ahead", pinned, lambda x: jax.device_put(x, single(sharding, memory_kind="device")))
    table(f"A batch of {batches[0].nbytes / 1e6:.3g} MB", *rows)


def leaves(tiny: bool, rounds: int) -> None:
    rows: list[tuple[Any, ...]] = [("leaves", *TIMES)]
    batch = {"x": np.ones((8, 8), np.float32)}
    for count in (4, 16) if tiny else (150, 600, 3000):
        rows.append((count, *both(Many(count), batch, rounds)))
    table("Leaves", *rows)


def gpt_of(tiny: bool) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the arguments of a GPT with 124 million parameters, and a batch."""
    layers, width, vocabulary, length, batch = (2, 64, 256, 32, 8) if tiny else (12, 768, 50257, 1024, 8)
    text = np.random.default_rng(0).integers(0, vocabulary, (batch, length + 1)).astype(np.int32)
    return (layers, width, vocabulary, length), text


def gpt(tiny: bool, rounds: int) -> None:
    sizes, text = gpt_of(tiny)
    steps, batch, model = 4 if tiny else 20, len(text), GPT(*sizes, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    tx, params = optax.adamw(1e-4), jax.tree.map(jnp.copy, params)

    @jax.jit
    def loss_of(params: Any, text: jax.Array) -> jax.Array:
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        return nnx.merge(graphdef, half).loss(text)

    def update(params: Any, opt_state: Any, text: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, text)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step, hand, state = jax.jit(update, donate_argnums=(0, 1)), list[float](), (params, jax.jit(tx.init)(params))
    for _ in range(rounds + 1):
        begun, loss = time.perf_counter(), None
        for _ in range(steps):
            *state, loss = step(*state, text)
        jax.block_until_ready(loss)
        hand.append(time.perf_counter() - begun)
    del state, params
    epochs, several = Epochs(), jax.device_count() > 1
    strategy = "fsdp" if several and batch % jax.device_count() == 0 else "single"
    trainer = fit(model, [text] * steps, epochs, max_epochs=rounds + 1, precision="bf16-mixed", strategy=strategy)
    ours, theirs = (statistics.median(x[1:]) / steps for x in (epochs.seconds, hand))
    (program,) = [x for x in trainer.explain().programs if x.name == "train_step"]
    peak = peak_flops(jax.devices()[0].device_kind, "bfloat16")
    mfu = program.flops.count / ours / peak / jax.device_count() if peak and program.flops else "-"
    head = ("strategy", "by hand on one device, ms", "fit, ms", "ratio", "MFU")
    table("GPT in bf16-mixed", head, (strategy, theirs * 1e3, ours * 1e3, ours / theirs, mfu))
    sent = [(x.kind, x.calls, x.bytes) for x in program.collectives or ()]
    table("Its collectives", ("kind", "calls", "bytes"), *sent)


def plan(tiny: bool, rounds: int) -> None:
    sizes, text = gpt_of(tiny)
    model, steps = jl.lazy(GPT, *sizes), 4 if tiny else 20
    quiet, device = {**BARE, "precision": "bf16-mixed"}, jax.devices()[0]
    given = {} if peak_flops(device.device_kind, "bfloat16") else {"hardware": "NVIDIA H100"}
    said = jl.Trainer(**quiet, strategy="single").plan(model, [text], **given)
    print(f"\n{said}\n")
    epochs = Epochs()
    fit(model, [text] * steps, epochs, max_epochs=rounds + 1, precision="bf16-mixed")
    took = statistics.median(epochs.seconds[1:]) / steps * 1e3
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    (row,) = said.rows()
    table(
        "A plan and its run",
        ("", "plan", "run"),
        ("bytes", row["total"], peak),
        ("ms", row["step_seconds"][0] * 1e3, took),
    )
    trainer = fit(model, [text], precision="bf16-mixed", strategy="auto" if peak else "single")
    print(f"\nauto: {trainer.strategy!r}")
    limit = {} if peak else {"memory_bytes": 2**31}
    print(jl.scale_batch_size(jl.Trainer(**quiet, strategy="single", max_epochs=1), model, [text], **limit))


def population(tiny: bool, rounds: int) -> None:
    rows: list[tuple[Any, ...]] = [("width", "members", "step, us", "over one")]
    for width in (16,) if tiny else (64, 512):
        one, data = 0.0, make_batches(width, 64, 40)
        for members in (1, 8, 64):
            variations, at = [{"width": width, "depth": 3, "seed": i} for i in range(members)], list[float]()
            note = lambda member, *_, at=at: at.append(time.perf_counter()) if not member else None  # noqa: E731
            jl.fit_many(Perceptron, variations, data, max_epochs=rounds + 1, log=note, log_every_n_steps=40)
            step = statistics.median(np.diff(at)) / 40 * 1e6
            one = one or step
            rows.append((width, members, step, step / one))
    table("A population", *rows)


def checkpoint(tiny: bool, rounds: int) -> None:
    width, steps = (64, 40) if tiny else (4096, 6000)
    (batch,), gaps = make_batches(width, 64, 1), Gaps()
    model = Perceptron(width, 2 if tiny else 8, rngs=nnx.Rngs(0))  # 1.6 GB of state
    with tempfile.TemporaryDirectory() as folder:
        saves = jl.callbacks.ModelCheckpoint(folder, every_n_train_steps=steps // 2 - 10, save_last=False)
        fit(model, [batch] * steps, gaps, saves, enable_checkpointing=True)
    each = np.diff(gaps.at)[5:] * 1e3
    first, second = np.array_split(each, 2)
    rows = ("median gap, ms", "longest with the first save, ms", "with the second, ms")
    table("A save", rows, (float(np.median(each)), float(first.max()), float(second.max())))


def start(tiny: bool, rounds: int) -> None:
    script = "import sys; from benchmarks import gpu; gpu.first_step(sys.argv[1])"
    rows: list[tuple[Any, ...]] = [("cache", "first step after imports, s")]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("empty", "warm"):
            path = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
            environment = os.environ | {"PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
            command = [sys.executable, "-c", script, folder]
            out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
            rows.append((name, float(out.splitlines()[-1])))
    table("The first step of a process", *rows)


def first_step(folder: str) -> None:
    begun = time.perf_counter()
    fit(Perceptron(64, 3, rngs=nnx.Rngs(0)), make_batches(64, 32, 1), compile_cache=folder)
    print(time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=[*SECTIONS])
    given = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.device_count()} x {jax.devices()[0].device_kind}")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name in given.sections:
            globals()[name](given.tiny, 1 if given.tiny else given.rounds)


if __name__ == "__main__":
    main()
