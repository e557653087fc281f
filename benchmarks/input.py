"""What data costs: loaders against numpy's fancy indexing, and a slow loader against data on the device.

    python benchmarks/input.py [--devices 8] [--rounds 9]

First table: rows per second until the batches lie on the devices, for `ArrayLoader` and for grain pipelines, over
those of `x[index]` and `jax.device_put` of the same batches. All variants run in turn in one process; the table gives
medians of the ratios of a round.

Second table: steps per second of `fit` with a loader that takes 0.9 of a step's time for a batch, over those of the
same `fit` with a batch that lies on the devices. One loader waits, as for a disk; another computes, and so takes
the processor away from the step.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
arguments.add_argument("--devices", type=int, default=1, help="simulated devices, where there is one")
arguments.add_argument("--rounds", type=int, default=9)


def by_hand(data: dict[str, np.ndarray], batch_size: int, place: Callable[[Any], Any]) -> Iterator[Any]:
    order = np.random.default_rng(0).permutation(len(data["x"]))
    for start in range(0, len(order), batch_size):
        index = order[start : start + batch_size]
        yield place({name: x[index] for name, x in data.items()})


class Batches:
    """A grain source that gives whole batches by one index each."""

    def __init__(self, data: dict[str, np.ndarray], batch_size: int) -> None:
        self.data, self.batch_size = data, batch_size
        self.order = np.random.default_rng(0).permutation(len(data["x"]))

    def __len__(self) -> int:
        return len(self.data["x"]) // self.batch_size

    def __getitem__(self, k: int) -> dict[str, np.ndarray]:
        rows = self.order[k * self.batch_size : (k + 1) * self.batch_size]
        return {name: x[rows] for name, x in self.data.items()}


class Rows:
    """A grain source that gives single rows."""

    def __init__(self, data: dict[str, np.ndarray]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["x"])

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return {name: x[i] for name, x in self.data.items()}


def throughput(devices: int, rounds: int) -> None:
    """Print the first table."""
    import grain
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxlit as jl
    from jaxlit.control import Control
    from jaxlit.data.loaders import source_of
    from jaxlit.data.prefetcher import Prefetcher
    from jaxlit.data.watchdog import Watchdog

    strategy = jl.strategies.DDP() if devices > 1 else jl.strategies.SingleDevice()
    strategy.setup(devices)
    sharding = NamedSharding(strategy.mesh, P("data"))

    def place(batch: Any) -> Any:
        # On one device `fit` hands numpy arrays to the step itself; here they are placed on either side.
        return strategy.shard_batch(batch) if devices > 1 else put(batch)

    def put(batch: Any) -> Any:
        return jax.device_put(batch, sharding)

    def feed(loader: Any) -> Iterator[Any]:
        prefetcher = Prefetcher(
            place,
            num_replicas=devices,
            prefetch="auto",
            watchdog=Watchdog(None),
            control=Control(),
        )
        return (batch for batch, *_ in prefetcher.batches(source_of(loader, "loader"), 0, None))

    print(f"{'rows of':<16}{'batch':>6}  {'':<34}{'rows/s':>12}{'ratio':>8}")
    for features, batch_size, rows in ((64, 128, 12_800), (1024, 256, 12_800), (150_528 // 4, 64, 640)):
        rng = np.random.default_rng(0)
        data = {"x": rng.random((rows, features), np.float32), "y": rng.integers(0, 9, rows).astype(np.int32)}
        variants: dict[str, tuple[Callable[[], Iterator[Any]], int]] = {
            "numpy, device_put": (lambda d=data, b=batch_size: by_hand(d, b, put), rows),
            "ArrayLoader": (lambda d=data, b=batch_size: feed(jl.ArrayLoader(d, b, shuffle=True)), rows),
            "grain, source of whole batches": (
                lambda d=data, b=batch_size: feed(grain.MapDataset.source(Batches(d, b)).shuffle(seed=0)),
                rows,
            ),
            "grain, source of single rows": (
                lambda d=data, b=batch_size: feed(grain.MapDataset.source(Rows(d)).shuffle(seed=0).batch(b)),
                rows,
            ),
        }
        rates: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(rounds + 1):
            for name, (make, count) in variants.items():
                start, batch = time.perf_counter(), None
                for i, batch in enumerate(make()):
                    if i % 8 == 7:
                        jax.block_until_ready(batch)
                jax.block_until_ready(batch)
                rates[name].append(count / (time.perf_counter() - start))
        base = np.array(rates["numpy, device_put"][1:])
        for name, rate in rates.items():
            ratio = np.median(np.array(rate[1:]) / base)
            print(f"{f'{features} numbers':<16}{batch_size:>6}  {name:<34}{np.median(rate[1:]):>12,.0f}{ratio:>8.3f}")


def overlap(devices: int, rounds: int) -> None:
    """Print the second table."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxlit as jl

    class Wide(jl.TrainModule):
        def __init__(self, *, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Linear(512, 512, rngs=rngs) for _ in range(4)])

        def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
            x = batch["x"]
            for layer in self.layers:
                x = nnx.relu(layer(x))
            return jnp.mean((x - batch["x"]) ** 2)

        def configure_optimizers(self) -> optax.GradientTransformation:
            return optax.sgd(1e-3)

    steps, kept = 40, {"x": np.random.default_rng(0).random((256, 512), np.float32)}

    class Loader:
        """Gives the same batch, and takes its time for it."""

        def __init__(self, kind: str, seconds: float) -> None:
            self.kind, self.seconds = kind, seconds

        def __iter__(self) -> Iterator[Any]:
            for _ in range(steps):
                end = time.perf_counter() + self.seconds
                if self.kind == "waits":
                    time.sleep(self.seconds)
                while self.kind == "computes" and time.perf_counter() < end:
                    np.sqrt(kept["x"][:16])
                yield kept

    base = jl.strategies.DDP if devices > 1 else jl.strategies.SingleDevice

    class Placed(base):  # type: ignore[misc, valid-type]
        """Gives every step the batch that was placed first."""

        batch = None

        def shard_batch(self, batch: Any) -> Any:
            if self.batch is None:
                self.batch = jax.block_until_ready(jax.device_put(batch, NamedSharding(self.mesh, P("data"))))
            return self.batch

    class Clock(jl.Callback):
        """Takes the time of the epochs after the first, which compiles and sees how slow the loader is."""

        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            trainer.state.step.block_until_ready()
            self.start = time.perf_counter()

        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.state.step.block_until_ready()
            if trainer.current_epoch:
                self.seconds.append(time.perf_counter() - self.start)

    def epoch(kind: str, seconds: float, prefetch: int | str) -> float:
        jl.Trainer(
            strategy=Placed() if kind == "on the device" else base(),
            devices=devices,
            max_epochs=3,
            callbacks=[clock := Clock()],
            prefetch=prefetch,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Wide(rngs=nnx.Rngs(0)), [kept] * steps if kind == "on the device" else Loader(kind, seconds))
        return min(clock.seconds)

    print(f"\n{'loader':<26}{'prefetch':>9}{'steps/s':>10}{'ratio':>8}")
    for prefetch in ("auto", 0, 2):
        kinds = ("on the device", "at once", "waits", "computes")
        taken: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind in kinds:
                slow = 0.9 * taken[kinds[0]][-1] / steps if kind in ("waits", "computes") else 0.0
                taken[kind].append(epoch(kind, slow, prefetch))
        for kind, seconds in taken.items():
            ratio = np.median(np.array(taken[kinds[0]]) / seconds)
            name = f"{kind} 0.9 of a step" if kind in ("waits", "computes") else kind
            print(f"{name:<26}{prefetch:>9}{steps / np.median(seconds):>10.1f}{ratio:>8.2f}")


def main() -> None:
    given = arguments.parse_args()
    if given.devices > 1:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={given.devices}"
    throughput(given.devices, given.rounds)
    overlap(given.devices, given.rounds)


if __name__ == "__main__":
    main()
