"""Two players in one step: a generator, and a discriminator under nnx.SpectralNorm."""

import jax
import numpy as np
import optax
from flax import nnx
from sweeps.models.case import TWENTY, Batch, Case, Logs, Shared, rows

DATA, NOISE, HIDDEN = 2, 3, 8


class Critic(nnx.Module):
    """Scores rows; its hidden layer is normalised by its largest singular value."""

    normed = True

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        hidden = nnx.Linear(DATA, HIDDEN, rngs=rngs)
        self.hidden = nnx.SpectralNorm(hidden, rngs=rngs) if self.normed else hidden
        self.out = nnx.Linear(HIDDEN, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.leaky_relu(self.hidden(x)))[:, 0]


class Plain(Critic):
    """The same without normalisation."""

    normed = False


class GAN(Shared):
    """Adds both losses up; each stops the gradient of the other player, and each player has its own optimizer."""

    critic_of: type[Critic] = Critic

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.generator = nnx.Sequential(
            nnx.Linear(NOISE, HIDDEN, rngs=rngs), nnx.relu, nnx.Linear(HIDDEN, DATA, rngs=rngs)
        )
        self.critic = self.critic_of(rngs=rngs)
        self.noise = nnx.Rngs(noise=2)

    def tx(self) -> optax.GradientTransformation:
        players = {"generator": optax.adam(5e-3, b1=0.5, eps=1e-3), "critic": optax.sgd(0.05)}
        name_of = lambda path: str(getattr(path[0], "key", path[0]))  # noqa: E731
        return optax.multi_transform(
            players, lambda params: jax.tree_util.tree_map_with_path(lambda path, _: name_of(path), params)
        )

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        drawn = jax.random.normal(self.noise.noise(), (len(batch["x"]), NOISE))
        drawn = batch.get("draws", drawn)
        made = self.generator(drawn)
        # The critic as the generator meets it: a copy, so that only the critic's own loss moves it.
        graphdef, state = nnx.split(self.critic)
        other = nnx.merge(graphdef, jax.tree.map(jax.lax.stop_gradient, state), copy=True)
        fooled = -other(made).mean()
        real, fake = self.critic(batch["x"]), self.critic(jax.lax.stop_gradient(made))
        told = nnx.relu(1 - real).mean() + nnx.relu(1 + fake).mean()
        return fooled + told, {"fooled": fooled, "told": told, "draws": drawn}


class PlainGAN(GAN):
    """The same with a critic of plain layers."""

    critic_of = Plain


def circle(rng: np.random.Generator, size: int) -> Batch:
    """Return points near a circle."""
    angle = rng.uniform(0, 2 * np.pi, size)
    x = np.stack([np.cos(angle), np.sin(angle)], 1) + rng.normal(scale=0.05, size=(size, DATA))
    return {"x": x.astype(np.float32)}


CASES = [
    Case("GAN with SpectralNorm", GAN, rows(TWENTY, circle), draws="again"),
    Case("GAN of plain layers", PlainGAN, rows(TWENTY, circle), draws="again"),
]
