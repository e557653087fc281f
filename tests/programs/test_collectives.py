"""What devices send is read off compiled programs: each kind, as often as it runs, with the bytes of its results."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxlit.programs.costs import Collective, count_collectives

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


def test_one_device_sends_nothing() -> None:
    assert count_collectives(jax.jit(jnp.tanh).lower(ROWS).compile().as_text()) == ()


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

%cond.1 (c: (s32[], bf16[8,8])) -> pred[] {
  %c.1 = (s32[], bf16[8,8]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
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
