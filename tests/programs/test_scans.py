"""Layers that a step scans over: which dims they are, and what is gathered of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from kit.trainers import thinned

import jaxlit as jl
from jaxlit.programs.scans import by_layer, scanned_dims

LAYERS, WIDTH = 6, 16


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def plain(w: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0].sum()


def along_another_dim(w: Any, x: jax.Array) -> jax.Array:
    return nnx.scan(lambda x, w: layer(x, w), in_axes=(nnx.Carry, 1), out_axes=nnx.Carry)(x, w.swapaxes(0, 1)).sum()


def computed_again(w: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(jax.checkpoint(lambda x, w: (layer(x, w), None)), x, w)[0].sum()


def inside_of_calls(w: Any, x: jax.Array) -> jax.Array:
    return jax.jit(jax.checkpoint(plain))(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32)


def with_numbers(w: Any, x: jax.Array) -> jax.Array:
    return plain(w, x + jnp.arange(WIDTH) / WIDTH)


def two_levels(w: Any, x: jax.Array) -> jax.Array:
    w = w.reshape(2, 3, WIDTH, WIDTH)
    return jax.lax.scan(lambda x, w: (jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0], None), x, w)[0].sum()


def one_by_one(w: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        x = layer(x, w[i])
    return x.sum()


def the_same_in_each(w: Any, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda x, _: (layer(x, w[0]), None), x, None, length=LAYERS)[0].sum()


SCANS = (plain, along_another_dim, computed_again, inside_of_calls, with_numbers)
OTHERS = (two_levels, one_by_one, the_same_in_each)  # a reshape makes another array of it


def arguments() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 4
    return w, rng.normal(size=(8, WIDTH)).astype(np.float32)


@pytest.mark.parametrize("fn", [*SCANS, *OTHERS])
def test_a_scanned_dim_is_found_wherever_the_scan_is(fn: Callable[..., Any]) -> None:
    assert scanned_dims(jax.make_jaxpr(fn)(*arguments()), [0, 1]) == ({0: {0}} if fn in SCANS else {})


@pytest.mark.parametrize("as_carry", [False, True])
def test_times_in_a_scan_of_layers_are_no_layers(as_carry: bool) -> None:
    def over_time(w: Any, times: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, z: (jnp.tanh(c + z[0] * z[1]), c), times[0], (w, times))[1]

    def fn(w: Any, x: jax.Array) -> jax.Array:
        times = jnp.stack([x] * LAYERS)
        turn = lambda c, w: (over_time(w, c if as_carry else times), None)  # noqa: E731
        return jax.lax.scan(turn, times, w)[0].sum()

    (w, x), batch = arguments(), [1]
    w = np.stack([w[..., 0]] * 3)  # (layers, times, width)
    assert scanned_dims(jax.make_jaxpr(fn)(w, x), [0]) == {0: {0, 1}}
    assert scanned_dims(jax.make_jaxpr(fn)(w, x), [0], batch) == {0: {0}}


def test_both_dims_are_found_where_a_scan_runs_in_a_scan() -> None:
    w, x = arguments()
    assert scanned_dims(jax.make_jaxpr(two_levels)(w.reshape(2, 3, WIDTH, WIDTH), x), [0]) == {0: {0, 1}}


@pytest.mark.parametrize("fn", thinned([*SCANS, *OTHERS], *SCANS[:1], *OTHERS[:2]))
def test_one_layer_is_gathered_at_a_time_and_no_number_changes(fn: Callable[..., Any]) -> None:
    mesh, (w, x) = jl.sharding.mesh({"data": 8}), arguments()
    shardings = NamedSharding(mesh, P(None, None, "data")), NamedSharding(mesh, P())
    placed = jax.device_put(w, shardings[0]), jax.device_put(x, NamedSharding(mesh, P("data")))
    step = jax.jit(jax.value_and_grad(by_layer(fn, [shardings, None], None)), out_shardings=(None, shardings[0]))
    loss, grads = step(*placed)
    wanted = jax.value_and_grad(fn)(w, x)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5)
    np.testing.assert_allclose(grads, wanted[1], rtol=1e-5, atol=2e-2 if fn is inside_of_calls else 1e-5)
    if fn in SCANS:
        # Of the whole array no gather is in the program, only of a layer: once forward and once backward.
        gathers = [line for line in step.lower(*placed).compile().as_text().splitlines() if " all-gather(" in line]
        assert gathers and not [line for line in gathers if f"[{LAYERS},{WIDTH},{WIDTH}]" in line]


@pytest.mark.parametrize("fn", [plain, one_by_one])
def test_an_array_that_is_returned_as_it_was_is_not_gathered(fn: Callable[..., Any]) -> None:
    mesh, (w, x) = jl.sharding.mesh({"data": 8}), arguments()
    shardings = NamedSharding(mesh, P(None, None, "data")), NamedSharding(mesh, P())
    returned = jax.make_jaxpr(by_layer(lambda w, x: (fn(w, x), jax.jit(jnp.array)(w)), [shardings, None]))(w, x).jaxpr
    assert returned.outvars[1] is returned.invars[0]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
@pytest.mark.parametrize("whole", [False, True])
def test_arrays_without_a_gradient_are_scanned(dtype: Any, whole: bool) -> None:
    def shifted(w: Any, x: jax.Array) -> jax.Array:
        turn = lambda x, w: (jnp.tanh(x + jax.lax.stop_gradient(w).astype(jnp.float32).sum(0)), None)  # noqa: E731
        return jax.lax.scan(turn, x, w)[0].sum()

    mesh, (w, x) = jl.sharding.mesh({"data": 8}), arguments()
    w = (4 * w).astype(dtype)
    shardings = NamedSharding(mesh, P() if whole else P(None, None, "data")), NamedSharding(mesh, P())
    result = jax.jit(jax.grad(by_layer(shifted, [shardings, None], NOTHING), 1))(jax.device_put(w, shardings[0]), x)
    np.testing.assert_allclose(result, jax.grad(shifted, 1)(w, x), rtol=1e-5)


NOTHING = jax.checkpoint_policies.nothing_saveable


@pytest.mark.parametrize(("fn", "policy"), [(plain, None), (plain, NOTHING), (computed_again, None)])
def test_what_was_gathered_is_not_kept_for_the_backward_pass(fn: Callable[..., Any], policy: Any) -> None:
    mesh, (w, x) = jl.sharding.mesh({"data": 8}), arguments()
    shardings = NamedSharding(mesh, P(None, None, "data")), NamedSharding(mesh, P())
    _, pullback = jax.vjp(by_layer(fn, [shardings, None], policy), jax.device_put(w, shardings[0]), x)
    kept = [leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, "shape", ()) == w.shape]
    assert all(leaf.sharding.is_equivalent_to(shardings[0], 3) for leaf in kept)
    activations = [leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, "shape", ()) == (LAYERS, *x.shape)]
    few = fn is computed_again or policy is NOTHING
    assert len(activations) == 1 if few else len(activations) > 1  # what goes into a layer; what is made in it
