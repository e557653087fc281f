"""Normalisation that writes to weights, that is masked, and parts of a module that are in evaluation mode."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sweeps.models.case import FEW, FULL, TAIL, Batch, Case, Logs, Shared, normal_rows, rows


class Normed(Shared):
    """A hidden layer under nnx.SpectralNorm, which writes the normalised kernel back in place."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.hidden = self.wrapped(nnx.Linear(3, 8, rngs=rngs), rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def wrapped(self, layer: nnx.Linear, rngs: nnx.Rngs) -> nnx.Module:
        return nnx.SpectralNorm(layer, rngs=rngs)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        errors = self.out(jnp.tanh(self.hidden(batch["x"])))[:, 0] - batch["y"]
        return (errors**2).mean(), {"error": jnp.abs(errors).mean()}


class Weighted(Normed):
    """The same under nnx.WeightNorm."""

    def wrapped(self, layer: nnx.Linear, rngs: nnx.Rngs) -> nnx.Module:
        return nnx.WeightNorm(layer, rngs=rngs)


class FineTuned(Shared):
    """A frozen backbone with BatchNorm and dropout that its user put into evaluation mode, and a trained head."""

    wrt = nnx.All(nnx.Param, nnx.PathContains("head"))

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.backbone = nnx.Sequential(
            nnx.Linear(3, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.relu, nnx.Dropout(0.5, rngs=rngs)
        )
        self.head = nnx.Linear(8, 1, rngs=rngs)
        self.backbone.eval()

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        errors = self.head(self.backbone(batch["x"]))[:, 0] - batch["y"]
        return (errors**2).mean(), {"error": jnp.abs(errors).mean()}


class Running(Shared):
    """A BatchNorm built with use_running_average=True, whose scale and bias are trained."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.norm = nnx.BatchNorm(3, use_running_average=True, rngs=rngs)
        self.out = nnx.Linear(3, 1, rngs=rngs)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        errors = self.out(self.norm(batch["x"]))[:, 0] - batch["y"]
        return (errors**2).mean(), {"error": jnp.abs(errors).mean()}


class MaskedNorm(Shared):
    """A BatchNorm whose statistics are those of the valid rows."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.hidden, self.norm = nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        hidden = self.norm(self.hidden(batch["x"]), mask=batch["valid"][:, None])
        errors = self.out(hidden)[:, 0] - batch["y"]
        return (errors**2).mean(), {"error": jnp.abs(errors).mean()}


def spread_rows(rng: np.random.Generator, size: int) -> Batch:
    """Return rows of which the second of each pair is not valid, but in an odd pair: every replica has one that is."""
    valid = np.arange(size) % 4 != 1
    return {**normal_rows(rng, size), "valid": valid}


def first_rows(rng: np.random.Generator, size: int) -> Batch:
    """Return rows of which only the first 3 are valid, so that most replicas have none."""
    return {**normal_rows(rng, size), "valid": np.arange(size) < 3}


BATCHES = rows(FEW, normal_rows)
VALIDATION = rows((FULL, TAIL), normal_rows, seed=1)
CASES = [
    Case("SpectralNorm", Normed, BATCHES),
    Case("SpectralNorm with validation", Normed, BATCHES, validation=VALIDATION),
    Case("WeightNorm", Weighted, BATCHES),
    Case("WeightNorm with validation", Weighted, BATCHES, validation=VALIDATION),
    Case("backbone in evaluation mode", FineTuned, BATCHES),
    Case("backbone in evaluation mode with validation", FineTuned, BATCHES, validation=VALIDATION),
    Case("BatchNorm with its running average", Running, BATCHES),
    Case("BatchNorm masked", MaskedNorm, rows(FEW, spread_rows)),
    Case(
        "BatchNorm masked, replicas without a valid row",
        MaskedNorm,
        rows(FEW, first_rows),
        tolerance=1e-5,
        because="a variance of 3 rows, by which 16 are divided, magnifies rounding",
    ),
]
