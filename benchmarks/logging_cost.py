"""What logging costs: epochs of one `fit` with a logger or traced callback at work, against epochs with it asleep.

    python benchmarks/logging_cost.py [--rounds 15] [--steps 400]

Both kinds of epoch take turns in one process, so that the machine's other load meets both. The table gives the medians
of microseconds a step, the ratio of neighbouring epochs with its quartiles, and how long one `on_log` took, by
`trainer.explain()`. Rows come every 50 steps; W&B is the real SDK, offline.
"""

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx
from perceptron import Perceptron, make_batches

import jaxlit as jl


class Turns(jl.Callback):
    """Puts something to sleep in every second epoch, and times the epochs; the first two compile."""

    def __init__(self, sleep: Callable[[Any, bool], None]) -> None:
        self.sleep = sleep
        self.seconds: dict[bool, list[float]] = {True: [], False: []}

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.asleep = trainer.current_epoch % 2 == 0
        self.sleep(trainer, self.asleep)
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.state.step.block_until_ready()
        if trainer.current_epoch > 1:
            self.seconds[self.asleep].append(time.perf_counter() - self.start)


def sleep_tracing(trainer: Any, asleep: bool) -> None:
    if asleep:
        trainer._session.current.tracing.next = -1


def make_sleep_log(logger: Any) -> Callable[[Any, bool], None]:
    on_log = logger.on_log

    def sleep(trainer: Any, asleep: bool) -> None:
        logger.asleep = asleep

    logger.on_log = lambda *args: None if logger.asleep else on_log(*args)
    logger.asleep = False
    return sleep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    batches = make_batches(256, 128, arguments.steps)
    wandb = jl.callbacks.WandbLogger
    print(f"{'':<34}{'asleep':>10}{'at work':>10}{'ratio':>8}   quartiles      one on_log")
    for name, callback, traced in (
        ("CSVLogger", jl.callbacks.CSVLogger(), False),
        ("WandbLogger", wandb(offline=True), False),
        ("GradientNorm, every 50 steps", jl.callbacks.GradientNorm(), True),
        ("watch='all', every 100 steps", wandb(offline=True, watch="all"), True),
        ("watch='all', every 10 steps", wandb(offline=True, watch="all", watch_every_n_steps=10), True),
    ):
        turns = Turns(sleep_tracing if traced else make_sleep_log(callback))
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            trainer = jl.Trainer(
                strategy="single",
                max_epochs=2 + 2 * arguments.rounds,
                callbacks=[turns, callback],
                logger=False,
                default_root_dir=folder,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
            )
            trainer.fit(Perceptron(256, 4, rngs=nnx.Rngs(0)), batches)
        asleep, awake = (np.array(turns.seconds[x]) / arguments.steps * 1e6 for x in (True, False))
        low, ratio, high = np.quantile(awake / asleep, (0.25, 0.5, 0.75))
        rows = [x for x in trainer.explain().hooks if x.hook == "on_log" and x.owner == type(callback).__name__]
        each = f"{rows[0].seconds / rows[0].calls * 1e6:.0f} us" if rows else "-"
        print(
            f"{name:<34}{np.median(asleep):>7.0f} us{np.median(awake):>7.0f} us{ratio:>8.3f}   "
            f"{low:.3f} to {high:.3f} {each:>12}"
        )


if __name__ == "__main__":
    main()
