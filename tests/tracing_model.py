"""A model of one weight, of which every step is known, and a callback that looks into its steps."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
RATE = 0.25


class Walk(jl.TrainModule):
    """One weight that goes a quarter of the way to each batch's value: all that a step has is known."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.zeros(()))

    def training_step(self, batch: Any) -> jax.Array:
        self.log("value", batch["x"].mean())
        return jnp.mean((self.w - batch["x"]) ** 2) / 2

    def validation_step(self, batch: Any) -> None:
        self.log("val", batch["x"].mean())

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(RATE)


class Sees(jl.Callback):
    """Shows the gradient as a scalar and as an array, and keeps in order all that it is told."""

    def __init__(self, every: int | None = None, *, scalar: str = "grad", told: list[Any] | None = None) -> None:
        self.trace_every_n_steps, self.scalar = every, scalar
        self.told: list[Any] = [] if told is None else told

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        found = {"array": jnp.stack([grads["w"][...], params["w"][...]])}
        return found | ({self.scalar: grads["w"][...]} if self.scalar else {})

    def on_trace(self, trainer: Any, values: dict[str, np.ndarray], step: int) -> None:
        self.told.append(("trace", step, *np.round(values["array"].astype(float), 4).tolist()))

    def on_log(self, trainer: Any, values: dict[str, float], step: int) -> None:
        self.told.append(("log", step, {k: round(v, 4) for k, v in values.items()}))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.told.append(("end", trainer.global_step - 1))

    def steps(self, kind: str) -> list[int]:
        return [event[1] for event in self.told if event[0] == kind]

    def rows(self) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        for event in self.told:
            if event[0] == "log":
                assert event[1] not in found
                found[event[1]] = {k: v for k, v in event[2].items() if k != "epoch"}
        return found


def batches(values: Sequence[float], rows: int = 2) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full(rows, value, np.float32)} for value in values]


def fit(callbacks: Any, values: Sequence[float] = range(1, 6), *, val: Any = None, **arguments: Any) -> jl.Trainer:
    given = {"strategy": "single", "max_epochs": 2, **QUIET, **arguments}
    path = given.pop("ckpt_path", None)
    trainer = jl.Trainer(callbacks=callbacks, **given)
    trainer.fit(Walk(), batches(values), val, ckpt_path=path)
    return trainer


def walk(values: Sequence[float]) -> list[list[float]]:
    """Return (gradient, weight before) of each step."""
    w, found = 0.0, []
    for value in values:
        found.append([round(w - value, 4), round(w, 4)])
        w -= RATE * (w - value)
    return found
