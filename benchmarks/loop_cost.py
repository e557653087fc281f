"""What the loop costs: `fit` against a loop written by hand over the same flat, donated jax.jit step.

    python benchmarks/loop_cost.py [--rounds 25] [--steps 400]

Both loops take the same numpy batches and read the loss every 50 steps. They run in turn in one
process: the hand-written loop before each epoch of `fit`. The table gives medians and the quartiles
of the ratio of neighbouring rounds. The null step is replaced by a function that returns at once,
which leaves the Python of the loop.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from perceptron import Perceptron, make_batches

import jaxlit as jl

LOG_EVERY = 50


def hand_written(model: Perceptron, batches: list[Any]) -> Callable[[], float]:
    """Return a function that trains one round by hand and returns its seconds."""
    graphdef, params = nnx.split(model)
    tx = optax.adamw(1e-3)
    params = jax.tree.map(jnp.copy, nnx.as_pure(params))
    leaves, treedef = jax.tree.flatten((params, jax.jit(tx.init)(params)))

    def step(leaves: list[Any], batch: Any) -> tuple[list[Any], jax.Array]:
        params, opt_state = jax.tree.unflatten(treedef, leaves)
        loss, grads = jax.value_and_grad(lambda p: nnx.merge(graphdef, p).loss(batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return jax.tree.leaves((optax.apply_updates(params, updates), opt_state)), loss

    step = jax.jit(step, donate_argnums=0)
    leaves, _ = step(leaves, batches[0])

    def round_() -> float:
        nonlocal leaves
        start = time.perf_counter()
        pending = loss = None
        for i, batch in enumerate(batches):
            leaves, loss = step(leaves, batch)
            if pending is not None:
                float(pending)
                pending = None
            if (i + 1) % LOG_EVERY == 0:
                pending = loss
        jax.block_until_ready(loss)
        return time.perf_counter() - start

    return round_


class Interleave(jl.Callback):
    """Times the hand-written loop before each epoch, and the epoch."""

    def __init__(self, by_hand: Callable[[], float]) -> None:
        self.by_hand, self.hand, self.fit = by_hand, [], []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.hand.append(self.by_hand())
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        trainer.state.step.block_until_ready()
        self.fit.append(time.perf_counter() - self.start)


class NullStep(jl.Callback):
    """From the second epoch on the step is a function that returns at once."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        engine = trainer._session.engine
        if trainer.current_epoch == 1:
            result = (jnp.zeros((2, 2)), None, {})
            engine.train_step = lambda batch: result
        self.start = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch:
            self.seconds.append(time.perf_counter() - self.start)


def fit(model: Perceptron, batches: list[Any], callback: jl.Callback, rounds: int, nan_policy: str) -> None:
    jl.Trainer(
        strategy="single",
        max_epochs=rounds,
        callbacks=[callback],
        logger=False,
        log_every_n_steps=LOG_EVERY,
        enable_progress_bar=False,
        enable_model_summary=False,
        nan_policy=nan_policy,
    ).fit(model, batches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    print(f"{'step':<26}{'by hand':>10}{'fit':>10}{'ratio':>8}   quartiles")
    for name, width, depth, rows, nan_policy in (
        ("about 200 us", 144, 3, 64, "ignore"),
        ("about 200 us, guard", 144, 3, 64, "raise"),
        ("about 60 us", 64, 3, 64, "ignore"),
        ("about 60 us, guard", 64, 3, 64, "raise"),
    ):
        batches = make_batches(width, rows, arguments.steps)
        model = Perceptron(width, depth, rngs=nnx.Rngs(0))
        timer = Interleave(hand_written(model, batches))
        fit(model, batches, timer, arguments.rounds + 2, nan_policy)
        hand, ours = (np.array(x[2:]) / arguments.steps * 1e6 for x in (timer.hand, timer.fit))
        low, middle, high = np.percentile(ours / hand, (25, 50, 75))
        print(
            f"{name:<26}{np.median(hand):>7.1f} us{np.median(ours):>7.1f} us{middle:>8.2f}   {low:.2f}-{high:.2f}",
            flush=True,
        )
    null = NullStep()
    fit(Perceptron(32, 2, rngs=nnx.Rngs(0)), make_batches(32, 32, 5000), null, 12, "ignore")
    print(f"null step: {np.median(null.seconds) / 5000 * 1e6:.2f} us a step")


if __name__ == "__main__":
    main()
