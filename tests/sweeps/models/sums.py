"""Losses that are no mean of what each row gives: a sum over rows, and a contrast between rows."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from sweeps.models.by_hand import by_shards
from sweeps.models.case import FEW, Batch, Case, Logs, Shared, normal_rows, rows


class Sum(Shared):
    """A linear model whose loss is the sum of squared errors."""

    def __init__(self) -> None:
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def tx(self) -> optax.GradientTransformation:
        return optax.sgd(0.005)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        errors = (self.linear(batch["x"])[:, 0] - batch["y"]) ** 2
        return errors.sum(), {"mean": errors.mean()}


class Contrast(Shared):
    """Finds for each row its own partner among those of the batch."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.left, self.right = (nnx.Linear(6, 4, rngs=rngs) for _ in range(2))

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        logits = self.left(batch["x"]) @ self.right(jnp.flip(batch["x"], 1)).T  # (rows, rows)
        own = jnp.arange(len(logits))
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, own).mean()
        return loss, {"found": (logits.argmax(1) == own).mean()}


CASES = [
    Case("sum loss", Sum, rows(FEW, normal_rows), refused_by_replicas="loss_reduction"),
    Case("sum loss, added up", Sum, rows(FEW, normal_rows), replica_options={"loss_reduction": "sum"}),
    Case(
        "contrast within a batch",
        Contrast,
        rows(FEW, lambda rng, size: normal_rows(rng, size, features=6)),
        by_hand=by_shards,
    ),
]
