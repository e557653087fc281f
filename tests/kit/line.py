"""y = x w of two weights, small enough for float64 by hand, and what its steps return."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl
from kit.trainers import make_trainer

START = np.array([1.0, -1.0])

Step = Callable[[Any, Any], Any]  # (module, batch): what a step returns beside the loss


class Line(jl.TrainModule):
    """y = x w: small enough to train by hand."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.asarray(START, jnp.float32))

    def loss(self, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ self.w - batch["y"]) ** 2)

    def training_step(self, batch: Any) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any) -> Any:
        self.log("loss", self.loss(batch))

    def test_step(self, batch: Any) -> Any:
        return self.validation_step(batch)

    def predict_step(self, batch: Any) -> Any:
        return batch["x"] @ self.w

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.sgd(0.1)


def returning(step: Step) -> Line:
    """Return a line each of whose steps returns what a function of (module, batch) does."""

    class Returns(Line):
        def training_step(self, batch: Any) -> Any:
            return {"loss": self.loss(batch), **step(self, batch)}

        def validation_step(self, batch: Any) -> Any:
            return step(self, batch)

        def predict_step(self, batch: Any) -> Any:
            return step(self, batch)

    return Returns()


def make_batches(*rows: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    return [{"x": draw(n, 2), "y": draw(n)} for n in rows]


class Outputs(jl.Callback):
    """Keeps what each training and validation batch returned beside the loss, as numpy."""

    def __init__(self) -> None:
        self.outputs: list[dict[str, np.ndarray]] = []

    def on_train_batch_end(self, trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outputs.append({k: np.asarray(v) for k, v in outputs.items() if k != "loss"})

    def on_validation_batch_end(
        self, trainer: jl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.outputs.append({k: np.asarray(v) for k, v in (outputs or {}).items()})


def outputs_of(verb: str, module: Any, batches: Any, strategy: Any, **arguments: Any) -> list[dict[str, np.ndarray]]:
    """Return the outputs of each batch of a run."""
    keep = Outputs()
    result = getattr(make_trainer(keep, strategy=strategy, **arguments), verb)(module, batches)
    return result if verb == "predict" else keep.outputs
