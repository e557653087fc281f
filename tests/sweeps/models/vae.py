"""A variational autoencoder of binary images, as in flax's example, small.

Shape letters: B rows, D pixels, Z latents.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sweeps.models.case import TWENTY, Batch, Case, Logs, Shared, rows

D, HIDDEN, Z = 12, 16, 3


class VAE(Shared):
    """Its loss is the reconstruction's cross entropy and the divergence from a normal prior, summed per row."""

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.encoder = nnx.Linear(D, HIDDEN, rngs=rngs)
        self.mean, self.log_var = nnx.Linear(HIDDEN, Z, rngs=rngs), nnx.Linear(HIDDEN, Z, rngs=rngs)
        self.decoder = nnx.Sequential(nnx.Linear(Z, HIDDEN, rngs=rngs), nnx.relu, nnx.Linear(HIDDEN, D, rngs=rngs))
        self.noise = nnx.Rngs(noise=1)

    def tx(self) -> optax.GradientTransformation:
        return optax.adam(1e-2, eps=1e-3)

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        x_BD = batch["x"]
        hidden = nnx.relu(self.encoder(x_BD))
        mean_BZ, log_var_BZ = self.mean(hidden), self.log_var(hidden)
        drawn = jax.random.normal(self.noise.noise(), mean_BZ.shape)
        drawn = batch.get("draws", drawn)
        logits_BD = self.decoder(mean_BZ + jnp.exp(log_var_BZ / 2) * drawn)
        rebuilt = optax.sigmoid_binary_cross_entropy(logits_BD, x_BD).sum(1).mean()
        divergence = 0.5 * (mean_BZ**2 + jnp.exp(log_var_BZ) - log_var_BZ - 1).sum(1).mean()
        return rebuilt + divergence, {"rebuilt": rebuilt, "divergence": divergence, "draws": drawn}


def images(rng: np.random.Generator, size: int) -> Batch:
    """Return images of two kinds of stripes, with some pixels turned over."""
    kind = rng.integers(2, size=(size, 1))
    turned = rng.random((size, D)) < 0.1
    return {"x": ((np.arange(D) % 2 == kind) ^ turned).astype(np.float32)}


CASES = [Case("VAE", VAE, rows(TWENTY, images), draws="again")]
