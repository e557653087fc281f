"""Functions of arrays that lie on several ranks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.errors import StateError
from jaxlit.pipeline.executor import Places
from jaxlit.pipeline.placed import Placed

SIZES = (3, 40, 2000)  # elements: fewer than a sharding minds, more, and more than are brought together


@pytest.fixture(scope="module")
def places() -> Places:
    return at([Mesh(np.array(jax.devices()[rank : rank + 1]), ("data",)) for rank in range(3)], 0)


def at(meshes: list[Mesh], home: int) -> Places:
    return Places(meshes, home, lambda rank, fn, name, **options: jax.jit(fn, **options))


def on(places: Places, rank: int) -> NamedSharding:
    return NamedSharding(places.meshes[rank], P())


def arrays(places: Places, seed: int) -> list[jax.Array]:
    draw = np.random.default_rng(seed).normal
    made = [draw(size=size).astype(np.float32) for size in SIZES]
    return jax.device_put(made, [on(places, rank) for rank in range(3)])


def adamw_by_hand(param: jax.Array, grad: jax.Array, norm: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the first update by AdamW in float64, clipped to a norm of 0.5, each result with the size of its terms."""
    w, g = np.float64(param), np.float64(grad) * 0.5 / norm
    mu, nu = 0.5 * g, 0.25 * g**2
    step = 1e-2 * (g / (np.abs(g) + 1e-8) + 1e-4 * w)
    # A parameter of 0.01 may lose most of its digits to a step of 0.01: its error is that of the terms.
    return {"param": (w - step, np.abs(w) + 1e-2), "mu": (mu, np.abs(mu)), "nu": (nu, nu)}


def test_a_clip_by_global_norm_runs_where_its_arrays_are(places: Places) -> None:
    # 1 - b1 and 1 - b2 are exact in float32, as they are not by default.
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2, b1=0.5, b2=0.75))
    params = arrays(places, 0)
    # Sums of squares of small integers are exact in float32, in any order.
    grads = jax.device_put([np.rint(3 * np.asarray(x)) for x in arrays(places, 1)], [x.sharding for x in params])
    norm = np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in grads))
    expected = [adamw_by_hand(w, g, norm) for w, g in zip(params, grads, strict=True)]
    state = jax.tree.map(lambda x: jax.device_put(x, on(places, SIZES.index(x.size) if x.ndim else 2)), tx.init(params))

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    leaves = jax.tree.leaves((params, state))
    lies = [x.sharding for x in leaves]
    placed = Placed(update, at(places.meshes, 2), "update", outputs=lies, donate=range(len(leaves)))
    result = placed(params, state, grads)
    results = {"param": result[0]} | {name: optax.tree.get(result[1], name) for name in ("mu", "nu")}
    for name, mine in results.items():
        for i, x in enumerate(mine):
            value, size = expected[i][name]
            # At most 8 roundings, each of half a unit in the last place.
            assert np.all(np.abs(np.float64(x) - value) <= 8 * 2.0**-24 * size), (name, i)
    assert optax.tree.get(result[1], "count") == 1
    assert [x.sharding for x in jax.tree.leaves(result)] == lies
    assert all(x.is_deleted() for x in leaves) and not any(x.is_deleted() for x in grads)
    assert jax.tree.leaves(placed(*result, grads))  # and again


def test_large_arrays_of_two_ranks_are_refused(places: Places) -> None:
    first, second = (jax.device_put(np.ones(SIZES[2], np.float32), on(places, rank)) for rank in (0, 1))
    with pytest.raises(StateError, match=r"update: the operation add combines .*f(loat)?32\[2000\] of rank 0.*rank 1"):
        Placed(lambda a, b: a + b, places, "update")(first, second)
    np.testing.assert_array_equal(Placed(lambda a, b: a + b, places, "on_state", follows=True)(first, second), 2.0)


def test_each_result_has_a_buffer_of_its_own(places: Places) -> None:
    (x, *_) = arrays(places, 0)
    first, second = Placed(lambda x: (y := jnp.sin(x), y), places, "twice")(x)
    first.delete()
    np.testing.assert_allclose(second, np.sin(x), rtol=1e-6)
