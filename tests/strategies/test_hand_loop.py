"""Training equals a loop written by hand in plain jax: losses, metrics, gradients, parameters, statistics."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.trainers import thinned

import jaxlit as jl
from jaxlit.leaf_names import leaf_name
from jaxlit.testing import Training, train

STEPS, ROWS = 8, 32
GLOBAL = ("single", "ddp", "fsdp", "sharded", "zero1")


class Net(jl.TrainModule):
    """BatchNorm, dropout and a loss that couples the rows of a batch."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(12, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(64, 8, rngs=rngs)

    def losses(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        embed = lambda x: self.out(self.dropout(nnx.relu(self.norm(self.hidden(x)))))  # noqa: E731
        a, b = embed(batch["x"]), embed(batch["y"])
        logits = a @ b.T / 4
        own = jnp.arange(len(logits))
        return optax.softmax_cross_entropy_with_integer_labels(logits, own).mean(), (a**2).mean()

    def training_step(self, batch: dict[str, jax.Array]) -> jax.Array:
        contrast, size = self.losses(batch)
        self.log_dict({"contrast": contrast, "size": size})
        return contrast + 0.1 * size

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adamw(1e-2, eps=1e-3)


def loader(rows: int = 5 * ROWS) -> jl.ArrayLoader:
    rng = np.random.default_rng(0)
    return jl.ArrayLoader({k: rng.normal(size=(rows, 12)).astype(np.float32) for k in ("x", "y")}, ROWS)


def by_hand(model: Any, batches: list[Any], tx: optax.GradientTransformation) -> Training:
    """Train without jaxlit: a module merged inside jax.jit, and optax."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    params, rest = nnx.as_pure(params), nnx.as_pure(rest)
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, rest: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> Any:
            module = nnx.merge(graphdef, params, rest, copy=True)
            contrast, size = module.losses(batch)
            _, _, new_rest = nnx.split(module, nnx.Param, ...)
            return contrast + 0.1 * size, (nnx.as_pure(new_rest), contrast, size)

        (loss, (rest_, contrast, size)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), rest_, opt_state, grads, loss, contrast, size

    kept = Training("by hand")
    for i, batch in enumerate(batches):
        params, rest, opt_state, grads, loss, contrast, size = step(params, rest, opt_state, batch)
        if i == 0:
            kept.grads = flat(grads)
        kept.loss.append(float(loss))
        kept.metrics.append({"contrast": float(contrast), "size": float(size)})
    kept.params = flat(params) | flat({"norm": {k: rest["norm"][k] for k in ("mean", "var")}})
    return kept


def flat(tree: Any) -> dict[str, np.ndarray]:
    return {leaf_name(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.fixture(scope="module")
def reference() -> Training:
    batches = [batch for _ in range(2) for batch in loader()][:STEPS]
    return by_hand(Net(rngs=nnx.Rngs(0)), batches, optax.adamw(1e-2, eps=1e-3))


@pytest.fixture(scope="module", params=thinned(GLOBAL, "sharded"))
def training(request: pytest.FixtureRequest) -> Training:
    strategy = jl.strategies.FSDP(min_size=0) if request.param == "sharded" else request.param
    devices = "auto" if request.param == "single" else 8
    return train(lambda: Net(rngs=nnx.Rngs(0)), loader(), strategy=strategy, devices=devices, steps=STEPS)


def test_losses_equal_those_of_the_hand_written_loop(training: Training, reference: Training) -> None:
    assert len(training.loss) == STEPS
    np.testing.assert_allclose(training.loss, reference.loss, rtol=1e-5)


def test_logged_metrics_equal_those_of_the_hand_written_loop(training: Training, reference: Training) -> None:
    for name in ("contrast", "size"):
        expected = [row[name] for row in reference.metrics]
        np.testing.assert_allclose([row[name] for row in training.metrics], expected, rtol=1e-5)


def test_first_gradients_equal_those_of_the_hand_written_loop(training: Training, reference: Training) -> None:
    assert training.grads.keys() == reference.grads.keys()
    largest = max(np.abs(g).max() for g in reference.grads.values())
    for name, expected in reference.grads.items():
        np.testing.assert_allclose(training.grads[name], expected, rtol=1e-5, atol=1e-5 * largest)


def test_parameters_and_statistics_equal_the_loop_by_hand(training: Training, reference: Training) -> None:
    got = training.params
    assert reference.params.keys() <= got.keys()
    largest = max(np.abs(p).max() for p in reference.params.values())
    for name, expected in reference.params.items():
        np.testing.assert_allclose(got[name], expected, rtol=1e-5, atol=1e-5 * largest)
