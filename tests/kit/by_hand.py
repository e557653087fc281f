"""Training loops written by hand, in numpy and in plain nnx with optax: what training is compared with."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


def mean(windows: Sequence[Sequence[float]], w: float = 0.0) -> float:
    """Return the weight of `Mean` after windows of equally large batches, given by their numbers."""
    for window in windows:
        w -= 0.5 * (w - sum(window) / len(window))
    return w


# Said at each call, as flax may come to share no Variables by default.
GRAPH: Any = {"graph": True, "graph_updates": True}


class HandLoop:
    """Trains a module in place by plain nnx and optax; `loss` of (module, batch) is its own `loss` by default."""

    def __init__(self, module: Any, tx: Any = None, loss: Any = None, wrt: Any = nnx.Param) -> None:
        self.module, self.wrt, self.losses = module, wrt, list[float]()
        self.loss = loss or (lambda module, batch: module.loss(batch))
        self.optimizer = nnx.Optimizer(module, tx or module.configure_optimizers(), wrt=wrt, graph=True)

        # Else each operation is compiled on its own, which takes longer than the fit that is compared.
        @nnx.jit(**GRAPH)
        def step(module: Any, optimizer: Any, batch: Any) -> jax.Array:
            value, grads = nnx.value_and_grad(self.loss, argnums=nnx.DiffState(0, wrt), **GRAPH)(module, batch)
            optimizer.update(module, grads)
            return value

        self.step = step

    def __call__(self, *batches: Any) -> "HandLoop":
        for batch in batches:
            self.losses.append(float(self.step(self.module, self.optimizer, batch)))
        return self

    def window(self, *batches: Any) -> "HandLoop":
        """Take one step on the mean over the rows of several batches of one size."""
        return self(jax.tree.map(lambda *x: np.concatenate(x), *batches))


def trained(module: Any, batches: Sequence[Any], tx: optax.GradientTransformation | None = None) -> Any:
    """Return a module, a step on each batch later."""
    return HandLoop(module, tx)(*batches).module


def params_of(module: Any) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.as_pure(nnx.state(module, nnx.Param, graph=True)))
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def state_of(module: Any) -> dict[str, np.ndarray]:
    """Return all of a module's arrays, by path, random keys as their data."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.as_pure(nnx.state(module, graph=True)))
    as_data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return {jax.tree_util.keystr(path): np.asarray(as_data(x)) for path, x in leaves}


def assert_same(result: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    result, expected = (x if isinstance(x, dict) else params_of(x) for x in (result, expected))
    assert result.keys() == expected.keys() and expected, "nothing is compared"
    for name, x in expected.items():
        np.testing.assert_allclose(np.asarray(result[name]), x, rtol=rtol, atol=atol, err_msg=str(name))
