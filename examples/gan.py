"""A GAN: two networks with an optimizer each, trained by one compiled step to draw from a ring of eight Gaussians.

    python examples/gan.py --strategy ddp --devices 8

The losses are added: `stop_gradient` keeps each from the other's network, and `by=` gives each network its optimizer.
The discriminator's slope is kept small (Mescheder et al., 2018, https://arxiv.org/abs/1801.04406).
"""

import argparse
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxlit as jl

MODES = np.array([(2 * math.cos(k * math.pi / 4), 2 * math.sin(k * math.pi / 4)) for k in range(8)], np.float32)


def perceptron(inputs: int, outputs: int, *, rngs: nnx.Rngs, width: int = 128) -> nnx.Sequential:
    first, second = nnx.Linear(inputs, width, rngs=rngs), nnx.Linear(width, width, rngs=rngs)
    return nnx.Sequential(first, nnx.leaky_relu, second, nnx.leaky_relu, nnx.Linear(width, outputs, rngs=rngs))


class GAN(jl.TrainModule):
    """Makes points of the plane out of noise."""

    def __init__(self, noise: int = 2, *, rngs: nnx.Rngs) -> None:
        self.noise, self.rngs = noise, rngs
        self.generator = perceptron(noise, 2, rngs=rngs)
        self.discriminator = perceptron(2, 1, rngs=rngs)

    def training_step(self, real: jax.Array) -> jax.Array:  # (rows, 2)
        fake = self.generator(jax.random.normal(self.rngs.noise(), (len(real), self.noise)))
        judge = jax.lax.stop_gradient(self.discriminator)  # the same weights, which the generator's loss leaves alone
        wins = optax.sigmoid_binary_cross_entropy(judge(fake), 1.0).mean()
        told = jnp.concatenate([self.discriminator(real), self.discriminator(jax.lax.stop_gradient(fake))])
        truth = jnp.repeat(jnp.array([1.0, 0.0]), len(real))[:, None]
        errs = optax.sigmoid_binary_cross_entropy(told, truth).mean()
        slopes = jax.grad(lambda x: self.discriminator(x).sum())(real)
        errs += 0.02 * (slopes**2).sum(-1).mean()
        self.log_dict({"generator": wins, "discriminator": errs}, prog_bar=True, on_step=False, on_epoch=True)
        return wins + errs

    def predict_step(self, noise: jax.Array) -> jax.Array:
        return self.generator(noise)

    def configure_optimizers(self) -> jl.Optimizer:
        return jl.Optimizer(by={"generator": optax.adam(1e-3, b1=0.5), "discriminator": optax.adam(1e-3, b1=0.5)})


def main() -> np.ndarray:
    """Train; returns points (2000, 2) that the generator draws."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--epochs", default=12, type=int)
    given = parser.parse_args()

    rng = np.random.default_rng(0)
    ring = (MODES[rng.integers(8, size=51_200)] + 0.1 * rng.normal(size=(51_200, 2))).astype(np.float32)
    trainer = jl.Trainer(strategy=given.strategy, devices=given.devices, max_epochs=given.epochs)
    trainer.fit(jl.lazy(GAN), jl.ArrayLoader(ring, 256, shuffle=True))
    noise = rng.normal(size=(2000, trainer.module.noise)).astype(np.float32)
    points = np.concatenate(trainer.predict(dataloaders=jl.ArrayLoader(noise, 500)))

    counts, *_ = np.histogram2d(-points[:, 1], points[:, 0], bins=(24, 48), range=[[-3, 3]] * 2)
    print("\n".join("".join(" .:*#"[min(int(n), 4)] for n in row) for row in counts))
    return points


if __name__ == "__main__":
    main()
