"""Parts of a network that write: counters, averages, targets, keys, metrics and parameters."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from sweeps.mixed.parts import WIDTH, Batch


class Own(nnx.Variable):
    """What is no parameter: a count, an average, a copy of weights, or a key that is no stream of `nnx.Rngs`."""


class Writer(nnx.Module):
    """A part that writes in training only: `eval` sets its mode, as that of flax's layers."""

    def __init__(self) -> None:
        self.deterministic = False

    def __call__(self, x: jax.Array, batch: Batch) -> jax.Array:
        return self.evaluate(x) if self.deterministic else self.train_on(x, batch)

    def evaluate(self, x: jax.Array) -> jax.Array:
        return x

    def train_on(self, x: jax.Array, batch: Batch) -> jax.Array:
        raise NotImplementedError


class Counter(Writer):
    def __init__(self, *, rows: bool) -> None:
        super().__init__()
        self.count, self.rows = Own(jnp.zeros((), jnp.int32)), rows

    def train_on(self, x: jax.Array, batch: Batch) -> jax.Array:
        self.count[...] += x.shape[0] if self.rows else 1
        return x


class MovingMean(Writer):
    """Keeps a moving average of the features, and takes it away from them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = Own(jnp.zeros(WIDTH))

    def evaluate(self, x: jax.Array) -> jax.Array:
        return x - self.mean[...].astype(x.dtype)

    def train_on(self, x: jax.Array, batch: Batch) -> jax.Array:
        y, now = self.evaluate(x), jax.lax.stop_gradient(x.mean(0))
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * now.astype(jnp.float32)
        return y


class Metric(Writer):
    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.metric = metric

    def train_on(self, x: jax.Array, batch: Batch) -> jax.Array:
        seen = jax.lax.stop_gradient(x).astype(jnp.float32)
        if isinstance(self.metric, nnx.metrics.Accuracy):
            self.metric.update(logits=seen[:, :2], labels=batch["label"])
        else:
            self.metric.update(values=seen.mean(-1))
        return x


class Following(Writer):
    """Takes away what a target makes of the features: a copy of weights, which follows them.

    Every second step it becomes the weights, or it moves towards them in every step.
    """

    def __init__(self, kind: type[nnx.Variable[Any]], *, hard: bool, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.online, self.hard = nnx.Linear(WIDTH, WIDTH, rngs=rngs), hard
        self.target, self.count = kind(self.online.kernel[...] * 0.5), Own(jnp.zeros((), jnp.int32))

    def evaluate(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.online(x) - x @ jax.lax.stop_gradient(self.target[...]))

    def train_on(self, x: jax.Array, batch: Batch) -> jax.Array:
        weights, target = (jax.lax.stop_gradient(v[...]) for v in (self.online.kernel, self.target))
        self.count[...] += 1
        if self.hard:
            self.target[...] = jax.lax.cond(self.count[...] % 2 == 0, lambda: weights, lambda: target)
            return self.evaluate(x)
        y = self.evaluate(x)
        self.target[...] = 0.8 * target + 0.2 * weights
        return y


class Copied(Writer):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.enc, self.dec = (nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / 3) for _ in range(2))

    def evaluate(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ self.enc[...]) @ self.dec[...].T

    def train_on(self, x: jax.Array, batch: Batch) -> jax.Array:
        self.dec[...] = self.enc[...]
        return self.evaluate(x)


class Centred(Writer):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        super().__init__()
        self.centre = nnx.Param(jax.random.normal(rngs.params(), (WIDTH,)))

    def evaluate(self, x: jax.Array) -> jax.Array:
        return x - self.centre[...]

    def train_on(self, x: jax.Array, batch: Batch) -> jax.Array:
        y = self.evaluate(x)
        self.centre[...] = 0.9 * self.centre[...] + 0.1 * y.mean(0)
        return y


class OwnKey(Writer):
    """Adds noise from a key that it holds and splits."""

    def __init__(self) -> None:
        super().__init__()
        self.key = Own(jax.random.key(3))

    def train_on(self, x: jax.Array, batch: Batch) -> jax.Array:
        self.key[...], now = jax.random.split(self.key[...])
        return x + 0.1 * jax.random.normal(now, x.shape, x.dtype)


class OwnRngs(Writer):
    """Adds noise from an `nnx.Rngs` that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.rngs = nnx.Rngs(5)

    def train_on(self, x: jax.Array, batch: Batch) -> jax.Array:
        return x + 0.1 * jax.random.normal(self.rngs(), x.shape, x.dtype)


MAKERS: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {
    "count_steps": lambda rngs: Counter(rows=False),
    "count_rows": lambda rngs: Counter(rows=True),
    "ema_mean": lambda rngs: MovingMean(),
    "average": lambda rngs: Metric(nnx.metrics.Average()),
    "accuracy": lambda rngs: Metric(nnx.metrics.Accuracy()),
    "welford": lambda rngs: Metric(nnx.metrics.Welford()),
    "hard_target": lambda rngs: Following(nnx.Param, hard=True, rngs=rngs),
    "own_hard_target": lambda rngs: Following(Own, hard=True, rngs=rngs),
    "soft_target": lambda rngs: Following(nnx.Param, hard=False, rngs=rngs),
    "own_target": lambda rngs: Following(Own, hard=False, rngs=rngs),
    "copied": lambda rngs: Copied(rngs=rngs),
    "centred": lambda rngs: Centred(rngs=rngs),
    "own_key": lambda rngs: OwnKey(),
    "own_rngs": lambda rngs: OwnRngs(),
}
