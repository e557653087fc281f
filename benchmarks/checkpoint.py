"""What a checkpoint costs the loop: an asynchronous save beside a synchronous one.

Both write the same training state, hashes and fsync included, in turns and in one training; the first of each is
left out. "blocks" is how long the loop stands still; "slows" adds what the steps take longer while the
background writes, which on a CPU is the share of the cores that it takes from them.

    python benchmarks/checkpoint.py [--megabytes 500] [--rounds 5] [--devices 1] [--strategy fsdp]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500, help="size of the training state")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="single")
    asked = parser.parse_args()

    import jaxlit as jl

    jl.testing.fake_devices(asked.devices)
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx

    rows = asked.megabytes * 2**20 // (3 * 4 * 1024)  # parameters and two moments of Adam, float32

    class Table(jl.TrainModule):
        def __init__(self) -> None:
            blocks = [jnp.zeros((rows // 16, 1024)) + i for i in range(16)]
            self.blocks = nnx.List([nnx.Param(block) for block in blocks])

        def training_step(self, batch: Any) -> Any:
            return sum(jnp.mean((block[...] @ batch["x"].T) ** 2) for block in self.blocks)

        def configure_optimizers(self) -> Any:
            return optax.adam(1e-4)

    class Saves(jl.Callback):
        """Saves every `period` steps, in the one way and the other in turns, and times the steps in between."""

        period = 12

        def __init__(self, folder: Path) -> None:
            self.folder = folder
            self.blocked: dict[str, list[float]] = {"asynchronous": [], "synchronous": []}
            self.spent: dict[str, list[float]] = {"asynchronous": [], "synchronous": [], "none": []}
            self.writer = jl.callbacks.ModelCheckpoint(folder / "background", every_n_train_steps=10**9)
            self.kinds = ("asynchronous", "none", "synchronous", "none")

        def on_safe_point(self, trainer: Any, module: Any, epoch_over: bool, training_over: bool) -> None:
            if training_over or trainer.global_step % self.period:
                return
            jax.block_until_ready(jax.tree.leaves(trainer.state))
            now = time.perf_counter()
            turn = trainer.global_step // self.period - 1
            if turn:
                self.spent[self.kinds[(turn - 1) % 4]].append(now - self.started)
            if self.writer._saving is not None:
                self.writer.finish(trainer)
            self.started = start = time.perf_counter()
            kind = self.kinds[turn % 4]
            if kind == "asynchronous":
                self.writer._save(trainer, False, forced=True)
            elif kind == "synchronous":
                trainer.save_checkpoint(self.folder / "at_once")
            if kind != "none":
                self.blocked[kind].append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder:
        saves = Saves(Path(folder))
        trainer = jl.Trainer(
            strategy=asked.strategy,
            max_steps=Saves.period * (4 * (asked.rounds + 1) + 2),
            callbacks=[saves, saves.writer],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            log_every_n_steps=0,
        )
        data = jl.ArrayLoader({"x": np.ones((8, 1024), np.float32)}, 8)
        trainer.fit(Table(), data)
        size = sum(x.nbytes for x in jax.tree.leaves(trainer.state)) / 2**20

    none = statistics.median(saves.spent["none"])
    print(
        f"{size:.0f} MB of state, {asked.strategy} on {trainer.strategy.mesh.size} devices, medians of {asked.rounds}"
    )
    print(f"a step takes {1e3 * none / Saves.period:.0f} ms\n")
    print(f"{'save':<14} {'blocks':>10} {'of the synchronous':>20} {'slows':>10} {'of the synchronous':>20}")
    blocks = {kind: statistics.median(times[1:]) for kind, times in saves.blocked.items()}
    slows = {kind: statistics.median(saves.spent[kind][1:]) - none for kind in blocks}
    for kind in blocks:
        parts = [f"{1e3 * x[kind]:>7.1f} ms {x[kind] / x['synchronous']:>19.1%}" for x in (blocks, slows)]
        print(f"{kind:<14} {parts[0]} {parts[1]}")


if __name__ == "__main__":
    main()
