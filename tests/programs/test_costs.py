"""What devices send, by kind, bytes and groups, read off compiled programs; operations of traced ones, by formulas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlit.programs.costs import Collective, Flops, count_collectives, count_flops, groups_of

N = 8
SHIFT = [(i, (i + 1) % N) for i in range(N)]
MESH = Mesh(np.asarray(jax.devices()), ("data",))


def of_replicas(body: Callable[..., Any], *arrays: Any) -> tuple[Collective, ...]:
    """Return what is counted in a program of eight replicas, each with its rows of the arrays."""
    mapped = jax.shard_map(body, mesh=MESH, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return count_collectives(jax.jit(mapped).lower(*arrays).compile().as_text())


ROWS = jnp.ones((N * 16, 6))  # 16 rows of 6 numbers a replica
KINDS = {
    "all-reduce": (lambda x: jax.lax.psum(x, "data"), 16 * 6 * 4),
    "all-gather": (lambda x: jax.lax.all_gather(x, "data", tiled=True), N * 16 * 6 * 4),
    "reduce-scatter": (lambda x: jax.lax.psum_scatter(x, "data", tiled=True), 16 * 6 * 4 // N),
    "collective-permute": (lambda x: jax.lax.ppermute(x, "data", SHIFT), 16 * 6 * 4),
    "all-to-all": (lambda x: jax.lax.all_to_all(x, "data", 0, 0, tiled=True), 16 * 6 * 4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_has_the_bytes_of_its_result_on_one_device(kind) -> None:
    body, num_bytes = KINDS[kind]
    assert of_replicas(body, ROWS) == (Collective(kind, 1, num_bytes),)
    assert of_replicas(body, ROWS.astype(jnp.int8)) == (Collective(kind, 1, num_bytes // 4),)


def test_collectives_in_loops_count_by_the_turns() -> None:
    def turn(h: Any, _: Any) -> Any:
        h = jnp.tanh(jax.lax.ppermute(h, "data", SHIFT))
        return jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(jax.lax.psum(h, "data")), h), None

    def body(x: Any) -> Any:
        return jax.lax.psum(jax.lax.scan(turn, x, None, length=5)[0].sum(), "data")[None]

    assert of_replicas(body, ROWS) == (
        Collective("all-reduce", 5 * 3 + 1, 15 * 16 * 6 * 4 + 4),
        Collective("collective-permute", 5, 5 * 16 * 6 * 4),
    )


def test_a_loop_of_unknown_length_counts_as_one_turn_at_least() -> None:
    until = lambda x: jax.lax.while_loop(lambda h: h[0, 0] < 0.5, lambda h: jnp.tanh(jax.lax.psum(h, "data")), x)  # noqa: E731
    assert of_replicas(until, ROWS) == (Collective("all-reduce", 1, 16 * 6 * 4, exact=False),)
    both = lambda x: jax.lax.psum(until(x)[0], "data")[None]  # noqa: E731
    assert of_replicas(both, ROWS) == (Collective("all-reduce", 2, 17 * 6 * 4, exact=False),)


def test_of_branches_the_one_that_sends_most_counts() -> None:
    def body(x: Any, flag: Any) -> Any:
        return jax.lax.cond(flag[0], lambda: jax.lax.psum(x, "data"), lambda: x + jax.lax.psum(x[0], "data"))

    assert of_replicas(body, ROWS, jnp.ones(N, bool)) == (Collective("all-reduce", 1, 16 * 6 * 4),)


# As compilers for other devices write it: started and waited for apart, several results in one, layouts with tiles.
TEXT = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[64,8]{1,0})->f32[64,8]{1,0}}, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(f32[] %x, f32[] %y)
}

%scatter (p: f32[64,8]) -> f32[8,8] {
  %p = f32[64,8]{1,0} parameter(0)
  ROOT %rs = f32[8,8]{1,0} reduce-scatter(f32[64,8]{1,0} %p), channel_id=3, dimensions={0}, to_apply=%add
}

%body.1 (c: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {
  %c = (s32[], bf16[8,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[] get-tuple-element((s32[], bf16[8,8]{1,0}) %c), index=0
  %h = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} get-tuple-element((s32[], bf16[8,8]{1,0}) %c), index=1
  %cp = (bf16[8,8]{1,0}, bf16[8,8]{1,0}, u32[], u32[]) collective-permute-start(bf16[8,8]{1,0} %h), channel_id=4
  %cpd = bf16[8,8]{1,0} collective-permute-done((bf16[8,8]{1,0}, bf16[8,8]{1,0}, u32[], u32[]) %cp)
  ROOT %t = (s32[], bf16[8,8]{1,0}) tuple(s32[] %i, bf16[8,8]{1,0} %cpd)
}

ENTRY %main (a: f32[64,8], b: f32[8]) -> f32[64,8] {
  %a = f32[64,8]{1,0} parameter(0)
  %b = f32[8]{0} parameter(1)
  %ag = ((f32[64,8]{1,0}, f32[8]{0}), (f32[512,8]{1,0}, /*index=1*/f32[64]{0})) all-gather-start(%a, %b), dimensions={0}
  %agd = (f32[512,8]{1,0}, f32[64]{0}) all-gather-done(%ag)
  %ar = (f32[64,8]{1,0}, f32[8]{0}) all-reduce-start(%a, %b), to_apply=%add, metadata={op_name="jit(step)/psum"}
  %ard = (f32[64,8]{1,0}, f32[8]{0}) all-reduce-done(%ar)
  %rs-start = ((f32[64,8]{1,0}), f32[8,8]{1,0}) async-start(f32[64,8]{1,0} %a), calls=%scatter
  %rs-done = f32[8,8]{1,0} async-done(((f32[64,8]{1,0}), f32[8,8]{1,0}) %rs-start), calls=%scatter
  %sugar = ((f32[64,8]{1,0}), f32[8,8]{1,0}) reduce-scatter-start(f32[64,8]{1,0} %a), dimensions={0}, to_apply=%add
  %sugar-done = f32[8,8]{1,0} reduce-scatter-done(((f32[64,8]{1,0}), f32[8,8]{1,0}) %sugar)
  %a2a = (pred[3], pred[3]) all-to-all(%b, %b), replica_groups={{0,1}}
  %start = (s32[], bf16[8,8]{1,0}) tuple(%a, %b)
  %loop = (s32[], bf16[8,8]{1,0}) while(%start), condition=%cond.1, body=%body.1, backend_config={"known_trip_count":{"n":"12"}}
  ROOT %out = f32[64,8]{1,0} fusion(%ard), kind=kLoop, calls=%add
}
"""  # noqa: E501


def test_asynchronous_collectives_count_once() -> None:
    assert count_collectives(TEXT) == (
        Collective("all-gather", 1, 4 * (512 * 8 + 64)),
        Collective("all-reduce", 1, 4 * (64 * 8 + 8)),
        Collective("all-to-all", 1, 6),
        Collective("collective-permute", 12, 12 * 2 * 64),
        Collective("reduce-scatter", 2, 2 * 4 * 64),
    )
    unknown = TEXT.replace("known_trip_count", "other")
    assert Collective("collective-permute", 1, 2 * 64, exact=False) in count_collectives(unknown)
    assert count_collectives("") == ()


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,4},{1,5}}", [[0, 4], [1, 5]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups=[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}", [[3, 1], [2, 0]]),
        ("channel_id=1", [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_each_way_of_writing_groups(text: str, groups: list[list[int]]) -> None:
    assert groups_of(f"x), channel_id=2, {text}, use_global_device_ids=true", 8) == groups


@pytest.mark.parametrize("axis", ["a", "b"])
@pytest.mark.parametrize("sharding", ["by hand", "by XLA"])
def test_a_program_sends_within_its_axis(axis: str, sharding: str) -> None:
    mesh = Mesh(MESH.devices.reshape(2, 4), ("a", "b"))
    if sharding == "by hand":
        body: Any = lambda x: jax.lax.psum(x, axis)  # noqa: E731
        run = jax.shard_map(body, mesh=mesh, in_specs=P(axis), out_specs=P(), check_vma=False)
    else:
        run = lambda x: jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P()))  # noqa: E731
    given = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P(axis)))
    (sent,) = count_collectives(jax.jit(run).lower(given).compile().as_text())
    assert {*sent.sent_by_span} == {5 if axis == "a" else 4}


K, M, TURNS = 7, 3, 4


def flops(fn: Callable[..., Any], *shapes: tuple[int, ...]) -> Flops:
    return count_flops(jax.make_jaxpr(fn)(*map(jnp.ones, shapes)).jaxpr)


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function's value and its gradients by both arguments, of a sum that is linear in no product."""
    return jax.value_and_grad(lambda *args: jnp.sum(fn(*args) ** 2), (0, 1))


def test_flops_of_a_matrix_product_and_its_gradients() -> None:
    one = 2 * M * K * M
    assert flops(jnp.dot, (M, K), (K, M)) == Flops(one)
    assert flops(gradients(jnp.dot), (M, K), (K, M)) == Flops(3 * one)
    assert flops(lambda a, b: jnp.einsum("bij,bkj->bik", a, b), (6, M, K), (6, M, K)) == Flops(6 * one)
    assert flops(lambda a, b: jnp.vdot(a, b) + jnp.sum(a * b), (K,), (K,)) == Flops(2 * K), "no elementwise work"


def triples(size: int, window: int, stride: int, low: int, high: int, spread: int = 1) -> int:
    """Count by hand the (output, weight) pairs of one dim that meet an entry of the image."""
    starts = range(-low, size + high - ((window - 1) * spread + 1) + 1, stride)
    return sum(0 <= start + k * spread < size for start in starts for k in range(window))


CONVOLUTIONS = [(1, (0, 0), 1, 1), (1, (1, 1), 1, 1), (2, (0, 1), 1, 1), (3, (2, 2), 2, 1), (1, (0, 0), 1, 3)]


@pytest.mark.parametrize("stride, pads, spread, groups", CONVOLUTIONS)
def test_flops_of_a_convolution_and_its_gradients(stride, pads, spread, groups) -> None:
    def convolve(image: Any, kernel: Any) -> Any:
        settings = {"window_strides": (stride, 1), "padding": (pads, (0, 0)), "rhs_dilation": (spread, 1)}
        settings |= {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": groups}
        return jax.lax.conv_general_dilated(image, kernel, **settings)

    rows, inside, out = 2, 3, 6
    one = 2 * rows * inside * out * triples(11, 3, stride, *pads, spread) * triples(6, 2, 1, 0, 0) // groups
    shapes = (rows, 11, 6, inside), (3, 2, inside // groups, out)
    assert flops(convolve, *shapes) == Flops(one)
    assert flops(gradients(convolve), *shapes) == Flops(3 * one)


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
    one = 2 * M * K * M
    for called in (jax.jit(dot), jax.checkpoint(dot), twin, product):
        assert flops(called, (M, K), (K, M)) == Flops(one)
        assert flops(gradients(called), (M, K), (K, M)) == Flops(3 * one)


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
    mesh = Mesh(MESH.devices.reshape(4, 2), ("data", "tp"))
    split = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
    rows = 2 * 8 * K * M  # of 8 rows in all
    assert flops(jax.jit(split), (8, K), (K, M)) == Flops(rows)
    whole = jax.shard_map(jnp.dot, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    assert flops(whole, (8, K), (K, M)) == Flops(8 * rows), "on each of eight devices all rows"
    assert flops(jax.pmap(jnp.dot, in_axes=(0, None)), (8, M, K), (K, M)) == Flops(8 * 2 * M * K * M)
    assert flops(jax.vmap(jnp.dot, in_axes=(0, None)), (8, M, K), (K, M)) == Flops(8 * 2 * M * K * M)


def test_flops_of_a_ragged_product() -> None:
    def ragged(rows: Any, matrices: Any) -> Any:
        return jax.lax.ragged_dot(rows, matrices, jnp.array([4, 2, 3]))

    one = 2 * 9 * K * M
    assert flops(ragged, (9, K), (3, K, M)) == Flops(one)
    assert flops(gradients(ragged), (9, K), (3, K, M)) == Flops(3 * one)


def test_flops_of_a_kernel_and_of_solving() -> None:
    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = jnp.dot(a[...], b[...])

    blocks = [pl.BlockSpec((2, K), lambda i: (i, 0)), pl.BlockSpec((K, M), lambda i: (0, 0))]
    out = {"out_specs": pl.BlockSpec((2, M), lambda i: (i, 0)), "out_shape": jax.ShapeDtypeStruct((8, M), "float32")}
    assert flops(pl.pallas_call(kernel, grid=(4,), in_specs=blocks, **out), (8, K), (K, M)) == Flops(2 * 8 * K * M)
    assert flops(jnp.linalg.solve, (K, K), (K,)) == Flops(0)


def test_a_kernel_without_products_may_have_a_traced_grid() -> None:
    def copied(x: jax.Array, n: jax.Array) -> jax.Array:
        def kernel(source: Any, target: Any) -> None:
            target[...] = source[...]

        return pl.pallas_call(kernel, out_shape=x, grid=(n,), interpret=True)(x)

    assert count_flops(jax.make_jaxpr(copied)(jnp.ones((8, 8)), jnp.int32(2)).jaxpr) == Flops(0)
