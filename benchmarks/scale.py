"""What grows with the number of processes and devices: agreements, the host's part of a step, checkpoints.

    python benchmarks/scale.py agreement [8 64 256]   clients of one coordinator, as threads with a connection each
    python benchmarks/scale.py step [8 64 256]        the main thread's CPU time of a step on so many simulated devices
    python benchmarks/scale.py checkpoint [1 2]       a save, and its verification, of 1 GiB by so many processes

Results go by the number of cores: all clients, the coordinator and all processes share those of one machine.
"""

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxlit.distributed.fate import arrive, gather

ROUNDS = 5
BARE: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


# Agreements --------------------------------------------------------------------------------------------


def read_each(client: Any, index: int, count: int, folder: str, value: str) -> list[str]:
    """Agree by reading the key of each process: as many requests as processes, from each of them."""
    client.key_value_set(f"{folder}/{index}", value)
    return [client.blocking_key_value_get(f"{folder}/{process}", 300_000) for process in range(count)]


def read_directory(client: Any, index: int, count: int, folder: str, value: str) -> list[str]:
    """Agree as `jaxlit.distributed.team` does: the last one that arrives lets the others read one directory."""
    arrive(client, folder, index, count, value)
    return gather(client, folder, count, 300.0) or []


def in_threads(work: Callable[[int], Any], count: int) -> tuple[float, float]:
    """Return the wall and CPU seconds of `work(index)` in so many threads at once."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
    wall, cpu = time.perf_counter(), time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - wall, time.process_time() - cpu


def agreement(counts: Sequence[int]) -> None:
    from jax._src.lib import _jax  # pyright: ignore[reportMissingImports]

    kept = []
    print(f"{'clients':>8} {'read each':>22} {'read a directory':>22}    wall and CPU of all, ms")
    for count in counts:
        port = free_port()
        service = _jax.get_distributed_runtime_service(f"[::]:{port}", count, heartbeat_timeout=300, shutdown_timeout=9)
        given = {"init_timeout": 120, "heartbeat_timeout": 300, "shutdown_on_destruction": False}
        make = lambda index: _jax.get_distributed_runtime_client(f"127.0.0.1:{port}", index, **given)  # noqa: B023, E731
        clients = [make(index) for index in range(count)]
        kept.append((service, clients))
        in_threads(lambda index: clients[index].connect(), count)  # noqa: B023
        texts = []
        for way in (read_each, read_directory):
            times = []
            for k in range(ROUNDS if count < 100 else 1):
                folder, results = f"{way.__name__}/{k}", {}

                def work(index: int) -> None:
                    results[index] = way(clients[index], index, count, folder, f"{index:064d}")  # noqa: B023

                times.append(in_threads(work, count))
                expected = [f"{i:064d}" for i in range(count)]
                assert len(results) == count and all(result == expected for result in results.values())
            wall, cpu = min(times)
            texts.append(f"{wall * 1e3:10.1f} {cpu * 1e3:10.1f}")
        print(f"{count:>8} {texts[0]:>22} {texts[1]:>22}", flush=True)
    os._exit(0)  # a client that ends after its service aborts the process


# Steps -------------------------------------------------------------------------------------------------


def step(counts: Sequence[int]) -> None:
    print(f"{'devices':>8} {'ddp':>8} {'fsdp':>8}    ms of the main thread's CPU, a step")
    for count in counts:
        texts = [subprocess.check_output([sys.executable, __file__, "_step", str(count), x]) for x in ("ddp", "fsdp")]
        print(f"{count:>8}", *(f"{float(text):8.2f}" for text in texts), flush=True)


def one_step(count: int, strategy: str) -> None:
    import numpy as np
    import optax
    from flax import nnx

    import jaxlit as jl

    jl.testing.fake_devices(count)

    class Linear(jl.TrainModule):
        def __init__(self) -> None:
            self.linear = nnx.Linear(256, 256, rngs=nnx.Rngs(0))

        def training_step(self, batch: Any) -> Any:
            return (self.linear(batch["x"]) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return optax.adam(1e-3)

    class Clock(jl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            times.append(time.thread_time())

    times: list[float] = []
    batches = [{"x": np.ones((count, 256), np.float32)}] * 220
    sharding = jl.strategies.FSDP(min_size=0) if strategy == "fsdp" else strategy
    jl.Trainer(strategy=sharding, max_epochs=1, callbacks=Clock(), **BARE).fit(Linear(), batches)
    steps = sorted(b - a for a, b in itertools.pairwise(times[20:]))
    print(1e3 * steps[len(steps) // 2])


# Checkpoints -------------------------------------------------------------------------------------------


def checkpoint(counts: Sequence[int]) -> None:
    print(f"{'processes':>9} {'a save':>24} {'verified':>24}    s: wall, then CPU of each process")
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            port = free_port()
            command = [sys.executable, __file__, "_checkpoint", str(count), str(port), folder]
            children = [
                subprocess.Popen([*command, str(index)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
                for index in range(count)
            ]
            told = [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
        texts = []
        for what in ("save", "verify"):
            texts.append(f"{max(x[what][0] for x in told):.2f} ({', '.join(f'{x[what][1]:.2f}' for x in told)})")
        print(f"{count:>9} {texts[0]:>24} {texts[1]:>24}", flush=True)


def one_checkpoint(count: int, port: int, folder: str, index: int) -> None:
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    import jaxlit as jl
    from jaxlit.checkpoints import files

    jl.testing.fake_devices(8 // count)
    if count > 1:
        jl.distributed.initialize(f"127.0.0.1:{port}", count, index)

    class Table(jl.TrainModule):
        def __init__(self) -> None:
            self.blocks = nnx.List([nnx.Param(jnp.zeros((2**14, 1024)) + i) for i in range(16)])

        def training_step(self, batch: Any) -> Any:
            return sum(jnp.mean((block[...][:8] @ batch["x"].T) ** 2) for block in self.blocks)

        def configure_optimizers(self) -> Any:
            return optax.sgd(1e-4)

    def timed(work: Callable[[], Any]) -> tuple[float, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        return time.perf_counter() - wall, time.process_time() - cpu

    trainer = jl.Trainer(strategy="fsdp", max_steps=1, **BARE)
    trainer.fit(jl.lazy(Table), jl.ArrayLoader({"x": np.ones((8, 1024), np.float32)}, 8))
    path = Path(folder) / "saved"
    trainer.save_checkpoint(path)  # the first one compiles and makes threads
    saves = [timed(lambda: trainer.save_checkpoint(path)) for _ in range(ROUNDS)]
    print(json.dumps({"save": min(saves), "verify": min(timed(lambda: files.read(path)) for _ in range(ROUNDS))}))


PARTS = {"agreement": (agreement, (8, 64, 256)), "step": (step, (8, 64, 256)), "checkpoint": (checkpoint, (1, 2))}


def main(part: str, *given: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    if part == "_step":
        one_step(int(given[0]), given[1])
    elif part == "_checkpoint":
        one_checkpoint(int(given[0]), int(given[1]), given[2], int(given[3]))
    elif part in PARTS:
        run, usual = PARTS[part]
        run([int(x) for x in given] or usual)
    else:
        print(__doc__)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["help"]))
