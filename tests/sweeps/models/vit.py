"""A vision transformer: patches by a convolution, a class token, attention over all of them.

Shape letters: B rows, N patches, C channels.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sweeps.models.case import TWENTY, Batch, Case, Logs, Shared, rows

SIZE, PATCH, C, CLASSES, LAYERS = 8, 4, 8, 4, 2
N = (SIZE // PATCH) ** 2


class Encoder(nnx.Module):
    """One layer, with its norms in front."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.before, self.after = nnx.LayerNorm(C, rngs=rngs), nnx.LayerNorm(C, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, C, decode=False, rngs=rngs)
        self.mlp = nnx.Sequential(nnx.Linear(C, 2 * C, rngs=rngs), nnx.gelu, nnx.Linear(2 * C, C, rngs=rngs))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.before(x))
        return x + self.mlp(self.after(x))


class ViT(Shared):
    """Classifies images by what the class token has gathered."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.patches = nnx.Conv(1, C, (PATCH, PATCH), strides=PATCH, padding="VALID", rngs=rngs)
        self.token = nnx.Param(jnp.zeros((1, 1, C)))
        self.places = nnx.Param(0.1 * jax.random.normal(rngs.params(), (1, N + 1, C)))
        self.layers = nnx.Sequential(*(Encoder(rngs=rngs) for _ in range(LAYERS)))
        self.norm, self.head = nnx.LayerNorm(C, rngs=rngs), nnx.Linear(C, CLASSES, rngs=rngs)

    def tx(self) -> optax.GradientTransformation:
        return optax.adamw(optax.cosine_decay_schedule(5e-3, 20), eps=1e-3)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        x_BNC = self.patches(batch["x"]).reshape(-1, N, C)
        token = jnp.broadcast_to(self.token[...], (len(x_BNC), 1, C))
        x_BNC = self.layers(jnp.concatenate([token, x_BNC], 1) + self.places[...])
        logits = self.head(self.norm(x_BNC[:, 0]))
        soft = optax.smooth_labels(jax.nn.one_hot(batch["y"], CLASSES), 0.1)
        right = (logits.argmax(1) == batch["y"]).mean()
        return optax.softmax_cross_entropy(logits, soft).mean(), {"accuracy": right}


def quarters(rng: np.random.Generator, size: int) -> Batch:
    """Return noisy images with one bright quarter, which is the class."""
    y = rng.integers(CLASSES, size=size)
    x = rng.normal(scale=0.3, size=(size, SIZE, SIZE, 1))
    row, column = np.arange(SIZE)[:, None] // PATCH, np.arange(SIZE) // PATCH
    x[..., 0] += 2 * row + column == y[:, None, None]
    return {"x": x.astype(np.float32), "y": y.astype(np.int32)}


CASES = [Case("ViT", ViT, rows(TWENTY, quarters))]
