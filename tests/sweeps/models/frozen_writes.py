"""Steps that write to parameters: target networks in all the ways of setting one, and tied weights by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sweeps.models.case import FEW, Batch, Case, Logs, Shared, normal_rows, rows


class Targets(Shared):
    """Learns towards the values of a target network, which `sync` sets."""

    wrt = nnx.All(nnx.Param, nnx.PathContains("online"))

    def __init__(self) -> None:
        self.online = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.target = nnx.Linear(3, 1, rngs=nnx.Rngs(1))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def sync(self, new: Any, old: Any) -> Any:
        return new

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        new, old = nnx.state(self.online, nnx.Param), nnx.state(self.target, nnx.Param)
        nnx.update(self.target, self.sync(new, old))
        self.count[...] = self.count[...] + 1
        goal = batch["y"] + 0.9 * jax.lax.stop_gradient(self.target(batch["x"])[:, 0])
        error = self.online(batch["x"])[:, 0] - goal
        return (error**2).mean(), {"error": jnp.abs(error).mean()}


class Every(Targets):
    """Synchronised in every second step by lax.cond, whose branches compute nothing."""

    def sync(self, new: Any, old: Any) -> Any:
        return jax.lax.cond(self.count[...] % 2 == 0, lambda a, b: a, lambda a, b: b, new, old)


class Where(Targets):
    """Synchronised in every second step by jnp.where."""

    def sync(self, new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a, b: jnp.where(self.count[...] % 2 == 0, a, b), new, old)


class Cast(Targets):
    """A target that is held in bfloat16, and set by a cast alone."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nnx.Linear(3, 1, rngs=nnx.Rngs(1), param_dtype=jnp.bfloat16)

    def sync(self, new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), new)


class Constant(Targets):
    """A target that every step sets to a constant."""

    def sync(self, new: Any, old: Any) -> Any:
        return jax.tree.map(lambda a: jnp.asarray(np.full(a.shape, 0.25, np.float32)), old)


class Swapped(Targets):
    """Two frozen layers that change places in every step, so that each is set to what the other was."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nnx.Linear(3, 1, rngs=nnx.Rngs(2))

    def sync(self, new: Any, old: Any) -> Any:
        other = nnx.as_pure(nnx.state(self.other, nnx.Param))
        nnx.update(self.other, nnx.as_pure(old))
        return other


class Tied(Shared):
    """A decoder that every step sets to the encoder's weights, both of them trained."""

    def __init__(self) -> None:
        self.enc = nnx.Param(jax.random.normal(jax.random.key(0), (3,)))
        self.dec = nnx.Param(jnp.zeros(3))

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        self.dec[...] = self.enc[...]
        code = batch["x"] @ self.enc[...]
        error = code[:, None] * self.dec[...] - batch["x"]
        return (error**2).mean(), {"code": jnp.abs(code).mean()}


class Decayed(Tied):
    """A trained variable that the step scales before the optimizer updates it, and never reads again."""

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        error = (batch["x"] * (self.enc[...] + self.dec[...])).sum(1) - batch["y"]
        self.dec[...] = 0.5 * self.dec[...] + 0.1
        return (error**2).mean(), {"error": jnp.abs(error).mean()}


class Mixed(Shared):
    """Chooses by lax.cond between a trained and a frozen array, and writes neither."""

    wrt = nnx.All(nnx.Param, nnx.PathContains("trained"))

    def __init__(self) -> None:
        self.trained = nnx.Param(jnp.array([0.5, -0.5, 1.0]))
        self.frozen = nnx.Param(jnp.array([1.0, 0.0, -1.0]))
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))

    def weights(self) -> jax.Array:
        return jax.lax.cond(
            self.count[...] % 3 == 2, lambda a, b: b, lambda a, b: a, self.trained[...], self.frozen[...]
        )

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        error = batch["x"] @ self.weights() - batch["y"]
        self.count[...] = self.count[...] + 1
        return (error**2).mean(), {"error": jnp.abs(error).mean()}


class Carried(Mixed):
    """A scan whose carry begins with a frozen array and continues with a trained one."""

    def weights(self) -> jax.Array:
        def body(carry: Any, scale: jax.Array) -> Any:
            mixed, other = carry
            return (other, mixed * scale), None

        start = (self.frozen[...], self.trained[...])
        (one, other), _ = jax.lax.scan(body, start, jnp.array([0.9, 1.1, 0.5]))
        return one + 0.5 * other


BATCHES = rows(FEW, normal_rows)
CASES = [
    Case("target set by lax.cond", Every, BATCHES),
    Case("target copied in every step", Targets, BATCHES),
    Case("target set by jnp.where", Where, BATCHES),
    Case("target held in bfloat16", Cast, BATCHES),
    Case("target set to a constant", Constant, BATCHES),
    Case("frozen layers that change places", Swapped, BATCHES),
    Case("trained decoder set to the encoder", Tied, BATCHES),
    Case("trained variable scaled after use", Decayed, BATCHES),
    Case("cond of trained and frozen", Mixed, BATCHES),
    Case("scan carry of trained and frozen", Carried, BATCHES),
]
