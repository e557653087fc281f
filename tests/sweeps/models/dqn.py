"""Deep Q-learning from a replay buffer, with a target network that is set to the online one every few steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sweeps.models.case import TWENTY, Batch, Case, Logs, Shared, rows

SEEN, ACTIONS, EVERY = 4, 3, 5


class QNet(nnx.Module):
    """The value of each action."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.hidden, self.out = nnx.Linear(SEEN, 16, rngs=rngs), nnx.Linear(16, ACTIONS, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


class DQN(Shared):
    """Double Q-learning: the online network chooses the next action, and the target network values it."""

    wrt = nnx.All(nnx.Param, nnx.PathContains("online"))

    def __init__(self) -> None:
        self.online, self.target = QNet(rngs=nnx.Rngs(0)), QNet(rngs=nnx.Rngs(1))
        self.steps = nnx.Variable(jnp.zeros((), jnp.int32))

    def tx(self) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(5.0), optax.rmsprop(2e-3, eps=1e-2))

    def losses(self, batch: Batch) -> tuple[jax.Array, Logs]:
        new, old = nnx.state(self.online), nnx.state(self.target)
        due = self.steps[...] % EVERY == 0
        nnx.update(self.target, jax.lax.cond(due, lambda a, b: a, lambda a, b: b, new, old))
        self.steps[...] += 1
        following = batch["next"]
        best = self.online(following).argmax(1)
        pick = lambda values, actions: jnp.take_along_axis(values, actions[:, None], 1)[:, 0]  # noqa: E731
        ahead = pick(self.target(following), best) * (1 - batch["done"])
        goal = jax.lax.stop_gradient(batch["reward"] + 0.95 * ahead)
        values = pick(self.online(batch["seen"]), batch["action"])
        return optax.huber_loss(values, goal).mean(), {"value": values.mean(), "goal": goal.mean()}


def transitions(rng: np.random.Generator, size: int) -> Batch:
    """Return what an agent saw, did, got and saw next."""
    seen = rng.normal(size=(size, SEEN)).astype(np.float32)
    action = rng.integers(ACTIONS, size=size).astype(np.int32)
    moved = 0.9 * seen + 0.3 * np.eye(ACTIONS, SEEN, dtype=np.float32)[action]
    return {
        "seen": seen,
        "action": action,
        "reward": np.cos(moved.sum(1)).astype(np.float32),
        "next": moved.astype(np.float32),
        "done": (rng.random(size) < 0.2).astype(np.float32),
    }


CASES = [Case("DQN with target sync", DQN, rows(TWENTY, transitions))]
