"""What a case of the sweep of hand-written loops is: a module, its batches, and how its numbers are checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

FULL, TAIL = 16, 5  # rows of a batch that divides among 2 and 8 devices, and of one that does not

Batch = dict[str, Any]
Logs = dict[str, Any]  # a value, or (value, weight)


class Shared(jl.TrainModule):
    """A module whose training step and hand-written loop share a loss and an optimizer, and nothing else.

    Attributes:
        wrt: What the optimizer trains.
        epochs: Metrics are logged by step and by epoch.
    """

    wrt: Any = nnx.Param
    epochs: bool = False

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        """Return the loss, and what is logged; `draws` are the random numbers of each row, and are returned."""
        raise NotImplementedError

    def tx(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)

    def training_step(self, batch: Batch) -> dict[str, jax.Array]:
        loss, logs = self.losses(batch)
        outputs = {"draws": logs.pop("draws")} if "draws" in logs else {}
        for name, logged in logs.items():
            value, weight = logged if isinstance(logged, tuple) else (logged, None)
            self.log(name, value, batch_size=weight, on_step=True, on_epoch=self.epochs)
        return {"loss": loss, **outputs}

    def validation_step(self, batch: Batch) -> None:
        self.log("val/loss", self.losses(batch)[0])

    def configure_optimizers(self) -> jl.Optimizer:
        return jl.Optimizer(self.tx(), wrt=self.wrt)


@dataclass
class Trained:
    """The numbers of one training.

    Attributes:
        losses: One a step.
        metrics: What is logged, one dict a step.
        validated: The validation loss after each step; empty without validation.
        epoch: Metrics of the epoch.
        params: Variables of type nnx.Param after the last step, by path.
        state: All other arrays of the module, keys as their data.
        modes: The flags of training and evaluation mode, by path.
        draws: What the steps returned as `draws`.
    """

    losses: list[float] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    validated: list[float] = field(default_factory=list)
    epoch: dict[str, float] = field(default_factory=dict)
    params: dict[str, np.ndarray] = field(default_factory=dict)
    state: dict[str, np.ndarray] = field(default_factory=dict)
    modes: dict[str, bool] = field(default_factory=dict)
    draws: list[np.ndarray] = field(default_factory=list)

    def keep_module(self, module: nnx.Module) -> None:
        """Take the arrays and the modes of a module."""
        _, params, rest = nnx.split(module, nnx.Param, ...)
        self.params, self.state = arrays_of(params), arrays_of(rest)
        self.modes = {
            f"{jax.tree_util.keystr(path)}.{name}": value
            for path, node in nnx.iter_graph(module)
            for name in ("deterministic", "use_running_average")
            if isinstance(value := getattr(node, name, None), bool)
        }


def arrays_of(state: Any) -> dict[str, np.ndarray]:
    """Return the arrays of a state by path, keys as their data."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.as_pure(state))
    is_key = lambda x: jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return {jax.tree_util.keystr(path): np.asarray(jax.random.key_data(x) if is_key(x) else x) for path, x in leaves}


@dataclass(frozen=True)
class Case:
    """A module to train by hand and under every strategy.

    Args:
        name: What it shows.
        make: Returns the module, with the same numbers at each call.
        batches: Returns the batches, numpy arrays; each is one step.
        by_hand: The loop, a function of (case, batches, replicas), where replicas is None for strategies whose
            step sees the global batch. None for the loop of `models.by_hand`.
        validation: Returns batches that are validated after every step.
        tolerance: The largest difference relative to the largest magnitude.
        because: Why the tolerance is not 1e-6.
        draws: The steps return the random numbers of each row as `draws`. "again": given in the batch as `draws`
            they are used in place of others, so that a loop by hand can repeat them; "masks": they cannot be given.
        refused: A pattern of the message with which every strategy must refuse it.
        refused_by_replicas: A pattern of the message with which per-replica strategies on several devices must.
        replica_options: Arguments of per-replica strategies.
        epoch: Returns the metrics of the epoch, from the batches alone.
    """

    name: str
    make: Callable[[], Shared]
    batches: Callable[[], list[Batch]]
    by_hand: Callable[["Case", list[Batch], int | None], Trained] | None = None
    validation: Callable[[], list[Batch]] | None = None
    tolerance: float = 1e-6
    because: str = ""
    draws: str = ""
    refused: str = ""
    refused_by_replicas: str = ""
    replica_options: dict[str, Any] = field(default_factory=dict)
    epoch: Callable[[list[Batch]], dict[str, float]] | None = None


def rows(
    sizes: Sequence[int], draw: Callable[[np.random.Generator, int], dict[str, np.ndarray]], seed: int = 0
) -> Callable[[], list[Batch]]:
    """Return a function that makes a batch of each size.

    Args:
        sizes: Rows of each batch.
        draw: Makes a batch from a generator and its rows.
        seed: The generator's.
    """

    def make() -> list[Batch]:
        rng = np.random.default_rng(seed)
        return [draw(rng, size) for size in sizes]

    return make


def normal_rows(rng: np.random.Generator, size: int, features: int = 3) -> dict[str, np.ndarray]:
    """Return normal `x` and `y`."""
    return {
        "x": rng.normal(size=(size, features)).astype(np.float32),
        "y": rng.normal(size=size).astype(np.float32),
    }


FEW = (FULL, FULL, TAIL, FULL, FULL)
TWENTY = (*[FULL] * 6, TAIL, *[FULL] * 12, TAIL)
