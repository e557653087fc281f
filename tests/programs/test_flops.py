"""The operations of a traced program equal closed formulas, loops, gradients and replicas included."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxlit.programs.costs import Flops, count_flops

M, K, N, TURNS = 5, 7, 3, 4


def flops(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Flops:
    return count_flops(jax.make_jaxpr(fn)(*map(jnp.ones, shapes)).jaxpr)


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function's value and its gradients by both arguments, of a sum that is linear in no product."""
    return jax.value_and_grad(lambda *args: jnp.sum(fn(*args) ** 2), (0, 1))


def test_flops_of_a_matrix_product_and_its_gradients() -> None:
    one = 2 * M * K * N
    assert flops(jnp.dot, (M, K), (K, N)) == Flops(one)
    assert flops(gradients(jnp.dot), (M, K), (K, N)) == Flops(3 * one)
    assert flops(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (6, M, K), (6, N, K)) == Flops(6 * one)
    assert flops(lambda a, b: jnp.vdot(a, b) + jnp.sum(a * b), (K,), (K,)) == Flops(2 * K), "no elementwise work"


def triples(size: int, window: int, stride: int, low: int, high: int, spread: int = 1) -> int:
    """Count by hand the (output, weight) pairs of one dim that meet an entry of the image."""
    starts = range(-low, size + high - ((window - 1) * spread + 1) + 1, stride)
    return sum(0 <= start + k * spread < size for start in starts for k in range(window))


@pytest.mark.parametrize("stride, pads, spread", [(1, (0, 0), 1), (1, (1, 1), 1), (2, (0, 1), 1), (3, (2, 2), 2)])
def test_flops_of_a_convolution_and_its_gradients(stride, pads, spread) -> None:
    def convolve(image: Any, kernel: Any) -> Any:
        settings = {"window_strides": (stride, 1), "padding": (pads, (0, 0)), "rhs_dilation": (spread, 1)}
        return jax.lax.conv_general_dilated(image, kernel, **settings, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    rows, inside, out = 2, 3, 4
    one = 2 * rows * inside * out * triples(11, 3, stride, *pads, spread) * triples(6, 2, 1, 0, 0)
    shapes = (rows, 11, 6, inside), (3, 2, inside, out)
    assert flops(convolve, *shapes) == Flops(one)
    assert flops(gradients(convolve), *shapes) == Flops(3 * one)


def test_flops_of_a_grouped_convolution() -> None:
    def depthwise(image: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(
            image, kernel, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=6
        )

    one = 2 * 2 * 8 * 3 * 6  # rows, outputs, window and channels, one weight a channel
    shapes = (2, 10, 6), (3, 1, 6)
    assert flops(depthwise, *shapes) == Flops(one)
    assert flops(gradients(depthwise), *shapes) == Flops(3 * one)


@pytest.mark.parametrize("remat", [False, True])
def test_flops_of_a_scan_and_its_gradients(remat) -> None:
    def layers(x: Any, w: Any) -> Any:
        layer = lambda h, _: (jnp.tanh(h @ w), None)  # noqa: E731
        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, None, length=TURNS)[0]

    one = 2 * M * K * K
    assert flops(layers, (M, K), (K, K)) == Flops(TURNS * one)
    assert flops(gradients(layers), (M, K), (K, K)) == Flops((4 if remat else 3) * TURNS * one)
    nested = lambda x, w: jax.lax.fori_loop(0, 6, lambda _, h: layers(h, w), x)  # noqa: E731
    assert flops(nested, (M, K), (K, K)) == Flops(6 * TURNS * one)


def test_what_a_program_calls_is_counted_once() -> None:
    def dot(a: Any, b: Any) -> Any:
        return a @ b

    product, twin = jax.custom_vjp(dot), jax.custom_jvp(dot)
    product.defvjp(lambda a, b: (a @ b, (a, b)), lambda kept, g: (g @ kept[1].T, (kept[0].T @ g)))
    twin.defjvp(lambda at, by: (dot(*at), by[0] @ at[1] + at[0] @ by[1]))
    one = 2 * M * K * N
    for called in (jax.jit(dot), jax.checkpoint(dot), twin, product):
        assert flops(called, (M, K), (K, N)) == Flops(one)
        assert flops(gradients(called), (M, K), (K, N)) == Flops(3 * one)


def test_flops_of_branches_and_loops() -> None:
    branch = lambda a, b: jax.lax.cond(a[0, 0] > 0, lambda: jnp.sum(a @ b @ b), lambda: jnp.sum(a @ b))  # noqa: E731
    one = 2 * M * K * K
    assert flops(branch, (M, K), (K, K)) == Flops(2 * one)
    until = lambda a, b: jax.lax.while_loop(lambda h: jnp.sum(h) > 0, lambda h: h @ b, a)  # noqa: E731
    assert flops(until, (M, K), (K, K)) == Flops(one, exact=False)
    assert flops(lambda a, b: jax.jit(until)(a, b) @ b, (M, K), (K, K)) == Flops(2 * one, exact=False)
    counting = lambda a: jax.lax.while_loop(lambda h: jnp.sum(h) > 0, lambda h: h - 1, a)  # noqa: E731
    assert flops(counting, (M, K)) == Flops(0), "a loop without products takes none, however long"


def test_what_replicas_compute_counts_for_all_of_them() -> None:
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("data", "tp"))
    split = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    rows = 2 * 8 * K * N  # of 8 rows in all
    assert flops(jax.jit(split), (8, K), (K, N)) == Flops(rows)
    whole = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    assert flops(whole, (8, K), (K, N)) == Flops(8 * rows), "on each of eight devices all rows"
    assert flops(jax.pmap(jnp.dot, in_axes=(0, None)), (8, M, K), (K, N)) == Flops(8 * 2 * M * K * N)
    assert flops(jax.vmap(jnp.dot, in_axes=(0, None)), (8, M, K), (K, N)) == Flops(8 * 2 * M * K * N)


def test_flops_of_a_ragged_product() -> None:
    def ragged(rows: Any, matrices: Any) -> Any:
        return jax.lax.ragged_dot(rows, matrices, jnp.array([4, 2, 3]))

    one = 2 * 9 * K * N
    assert flops(ragged, (9, K), (3, K, N)) == Flops(one)
    assert flops(gradients(ragged), (9, K), (3, K, N)) == Flops(3 * one)


def test_flops_of_a_kernel_and_of_solving() -> None:
    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = jnp.dot(a[...], b[...])

    blocks = [pl.BlockSpec((2, K), lambda i: (i, 0)), pl.BlockSpec((K, N), lambda i: (0, 0))]
    out = {"out_specs": pl.BlockSpec((2, N), lambda i: (i, 0)), "out_shape": jax.ShapeDtypeStruct((8, N), jnp.float32)}
    assert flops(pl.pallas_call(kernel, grid=(4,), in_specs=blocks, **out), (8, K), (K, N)) == Flops(2 * 8 * K * N)
    assert flops(jnp.linalg.solve, (K, K), (K,)) == Flops(0)


def test_a_kernel_without_products_may_have_a_traced_grid() -> None:
    def copied(x: jax.Array, n: jax.Array) -> jax.Array:
        def kernel(source: Any, target: Any) -> None:
            target[...] = source[...]

        return pl.pallas_call(kernel, out_shape=x, grid=(n,), interpret=True)(x)

    assert count_flops(jax.make_jaxpr(copied)(jnp.ones((8, 8)), jnp.int32(2)).jaxpr) == Flops(0)
