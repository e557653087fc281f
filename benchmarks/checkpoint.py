"""What a checkpoint costs, compared with the AsyncCheckpointer of orbax, which writes the same arrays without hashes.

In turns, in one process and to one disk; the first save of each is left out. "blocks" is how long the loop waits,
"total" until the files are on the disk, "memory" how much the process grows meanwhile.

    python benchmarks/checkpoint.py [--megabytes 10 200 1000] [--rounds 5] [--devices 1] [--strategy single]
        [--nan-policy ignore]
"""

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Growth:
    """Looks how much memory the process has more than at the start, at most."""

    def __enter__(self) -> "Growth":
        self._first, self.most, self._ends = self._resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ends.wait(0.005):
            self.most = max(self.most, self._resident() - self._first)

    @staticmethod
    def _resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def compare(megabytes: int, rounds: int, strategy: str, nan_policy: Any, folder: Path) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    import orbax.checkpoint as ocp
    from flax import nnx

    import jaxlit as jl

    rows = megabytes * 2**20 // (3 * 4 * 1024)  # parameters and two moments of Adam, float32

    class Table(jl.TrainModule):
        def __init__(self) -> None:
            keys = jax.random.split(jax.random.key(0), 16)  # orbax would compress constants to nothing
            self.blocks = nnx.List([nnx.Param(jax.random.normal(key, (rows // 16, 1024))) for key in keys])

        def training_step(self, batch: Any) -> Any:
            return sum(jnp.mean((block[...] @ batch["x"].T) ** 2) for block in self.blocks)

        def configure_optimizers(self) -> Any:
            return optax.adam(1e-4)

    options: Any = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = jl.Trainer(strategy=strategy, max_steps=2, nan_policy=nan_policy, **options)
    trainer.fit(Table(), jl.ArrayLoader({"x": np.random.default_rng(0).normal(size=(16, 1024)).astype(np.float32)}, 8))
    leaves = {str(i): x for i, x in enumerate(jax.tree.leaves(trainer.state)) if x.dtype == jnp.float32}
    theirs = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())

    def save(path: Path) -> Callable[[], object]:
        return trainer.saver.begin(path).wait

    def save_with_orbax(path: Path) -> Callable[[], object]:
        theirs.save(path, args=ocp.args.StandardSave(leaves))
        return theirs.wait_until_finished

    seen: dict[str, list[tuple[float, ...]]] = {"jaxlit": [], "orbax": []}
    for turn in range(rounds + 1):
        for name, begin in (("jaxlit", save), ("orbax", save_with_orbax)):
            path = folder / name
            with Growth() as growth:
                start = time.perf_counter()
                wait = begin(path)
                blocked = time.perf_counter() - start
                wait()
                total = time.perf_counter() - start
            size = sum(x.stat().st_size for x in path.rglob("*") if x.is_file())
            shutil.rmtree(path)
            if turn:
                seen[name].append((1e3 * blocked, total, size / 2**20, growth.most / 2**20))
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in seen.items()}
    for name, (blocked, total, size, most) in medians.items():
        ratios = [x / y for x, y in zip(medians[name][:2], medians["orbax"][:2], strict=True)]
        print(
            f"{megabytes:>6} MB  {name:<7} {blocked:>9.1f} ms {ratios[0]:>5.2f} {total:>9.2f} s {ratios[1]:>5.2f} "
            f"{size:>8.1f} MB {most:>+8.0f} MB",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[10, 200, 1000], help="size of the training state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="single")
    parser.add_argument("--nan-policy", default="raise", help="with 'ignore' no look at the parameters blocks the loop")
    asked = parser.parse_args()

    import jaxlit as jl

    jl.testing.fake_devices(asked.devices)
    print(
        f"{'state':>9}  {'':<7} {'blocks':>12} {'ratio':>5} {'total':>11} {'ratio':>5} {'written':>11} {'memory':>11}"
    )
    for megabytes in asked.megabytes:
        with tempfile.TemporaryDirectory() as folder:
            compare(megabytes, asked.rounds, asked.strategy, asked.nan_policy, Path(folder))


if __name__ == "__main__":
    main()
