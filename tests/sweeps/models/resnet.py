"""A small residual net with BatchNorm, wholly trained, and as a frozen backbone in evaluation mode under a new head.

Shape letters: B rows, C channels.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sweeps.models.case import TWENTY, Batch, Case, Logs, Shared, rows

SIZE, C, CLASSES = 8, 4, 3


class Residual(nnx.Module):
    """Two convolutions beside a shortcut, which is a convolution too where the stride is 2."""

    def __init__(self, stride: int, *, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(C, C, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.second = nnx.Conv(C, C, (3, 3), use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(C, momentum=0.9, rngs=rngs) for _ in range(2)])
        self.short = nnx.Conv(C, C, (1, 1), strides=stride, rngs=rngs) if stride > 1 else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = nnx.relu(self.norms[0](self.first(x)))
        return nnx.relu(self.norms[1](self.second(y)) + (x if self.short is None else self.short(x)))


class ResNet(Shared):
    """Classifies images."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        stem = nnx.Conv(1, C, (3, 3), rngs=rngs)
        self.backbone = nnx.Sequential(stem, Residual(1, rngs=rngs), Residual(2, rngs=rngs))
        self.head = nnx.Linear(C, CLASSES, rngs=rngs)

    def tx(self) -> optax.GradientTransformation:
        return optax.sgd(0.02, momentum=0.9, nesterov=True)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        logits = self.head(self.backbone(batch["x"]).mean((1, 2)))
        right = (logits.argmax(1) == batch["y"]).mean()
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean(), {"accuracy": right}


class FineTuned(ResNet):
    """Trains the head alone, on a backbone with statistics of its own."""

    wrt = nnx.All(nnx.Param, nnx.PathContains("head"))

    def __init__(self) -> None:
        super().__init__()
        for i, (_, node) in enumerate(nnx.iter_graph(self.backbone)):
            if isinstance(node, nnx.BatchNorm):
                node.mean[...] = 0.1 * jnp.arange(C) - 0.01 * i
                node.var[...] = 0.5 + 0.1 * jnp.arange(C)
        self.backbone.eval()


def pictures(rng: np.random.Generator, size: int) -> Batch:
    """Return noisy waves, of which the class is the direction."""
    y = rng.integers(CLASSES, size=size)
    a, b = np.meshgrid(np.arange(SIZE), np.arange(SIZE))
    waves = np.stack([np.sin(a), np.sin(b), np.sin((a + b) / 2)])[y]
    x = waves + rng.normal(scale=0.5, size=waves.shape)
    return {"x": x[..., None].astype(np.float32), "y": y.astype(np.int32)}


CASES = [
    Case("ResNet wholly trained", ResNet, rows(TWENTY, pictures)),
    Case("ResNet with a frozen backbone", FineTuned, rows(TWENTY, pictures)),
    Case(
        "ResNet with a frozen backbone and validation",
        FineTuned,
        rows(TWENTY[:7], pictures),
        validation=rows((16, 5), pictures, seed=1),
    ),
]
