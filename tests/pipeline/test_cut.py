"""What each stage of a pipeline computes: by what values depend on."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlit as jl
from jaxlit.pipeline.cut import Cut, Input, Role, StateOnTwoStages, cut
from jaxlit.pipeline.segments import holds_mark, marking
from jaxlit.programs.jaxpr import inline

KINDS = {"w": Role.WEIGHT, "s": Role.STATE, "b": Role.BATCH}
ROWS, WIDTH = 8, 6


def cut_of(fn: Any, kinds: str, stages: int, *, updates: dict[int, int] | None = None, **more: Any) -> Cut:
    """Cut a function, whose arguments are (w)eights, (s)tate and (b)atch, and check what its pieces compute."""
    draw, shapes = np.random.default_rng(0).normal, {"w": (WIDTH, WIDTH), "s": (), "b": (ROWS, WIDTH)}
    args: list[Any] = [np.float32(draw(size=shapes[kind])) for kind in kinds]
    with marking():
        closed = inline(jax.make_jaxpr(fn)(*args), also=holds_mark)
    inputs = [Input(KINDS[kind], update=(updates or {}).get(i)) for i, kind in enumerate(kinds)]
    result = cut(closed, inputs, stages, **({"balance": "count"} | more))
    for mine, theirs in zip(run(result, args), jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-4)  # of sums of numbers up to a thousand
    return result


def run(result: Cut, args: Sequence[Any]) -> list[Any]:
    """Run the pieces one after the other, each with what it says that it needs."""
    sent, results = dict[Any, Any](), dict[int, Any]()
    for piece in result.pieces:
        outs, made = result.runner(piece)([args[i] for i in piece.inputs], [sent[x] for x in piece.ins])
        sent |= dict(zip(piece.outs, outs, strict=True))
        results |= {i: x for i, x in zip(piece.results, made, strict=True) if result.made_at[i] == piece.stage}
    return [results[i] for i in range(len(result.made_at))]


def chain(*weights: Any, x: Any) -> Any:
    for i, w in enumerate(weights):
        x = jnp.tanh(x @ w)
        x = jl.pipeline_yield(x) if i + 1 < len(weights) else x
    return x


def shapes_into(result: Cut, stage: int) -> list[tuple[int, ...]]:
    return sorted(x.aval.shape for x in result.pieces[stage].ins)


def test_a_chain_sends_one_activation_to_the_next_stage() -> None:
    def loss(a: Any, b: Any, c: Any, d: Any, x: Any, y: Any) -> Any:
        return jnp.mean((chain(a, b, c, d, x=x) - y) ** 2)

    result = cut_of(loss, "wwwwbb", 4)
    assert [piece.inputs for piece in result.pieces] == [[0, 4], [1], [2], [3, 5]]
    assert [shapes_into(result, stage) for stage in range(4)] == [[], *[[(ROWS, WIDTH)]] * 3]
    assert result.home_of[:4] == [0, 1, 2, 3] and result.made_at == [3]


def test_tied_weights_belong_to_their_first_stage() -> None:
    result = cut_of(lambda a, b, x: jl.pipeline_yield(jnp.tanh(x @ a) @ b) @ a.T, "wwb", 2)
    assert result.home_of[:2] == [0, 0] and result.pieces[1].inputs == [0]
    assert shapes_into(result, 1) == [(ROWS, WIDTH)]  # neither the weights nor their transpose are sent


def test_a_skip_goes_straight_to_the_stage_that_uses_it() -> None:
    def loss(a: Any, b: Any, c: Any, x: Any) -> Any:
        first = jnp.sin(x @ a)
        return jl.pipeline_yield(jl.pipeline_yield(first) @ b) @ c + jnp.cos(first)

    result = cut_of(loss, "wwwb", 3)
    assert len(shapes_into(result, 1)) == 1 and len(shapes_into(result, 2)) == 2


def test_values_of_the_batch_alone_are_recomputed() -> None:
    def loss(a: Any, b: Any, x: Any) -> Any:
        mask = jnp.where(x > 0, 1.0, 0.0)
        return jl.pipeline_yield((x @ a) * mask) @ b * mask

    result = cut_of(loss, "wwb", 2)
    assert result.pieces[1].inputs == [1, 2] and shapes_into(result, 1) == [(ROWS, WIDTH)]


def test_layer_losses_and_norms_stay_on_their_stage() -> None:
    def loss(a: Any, b: Any, c: Any, x: Any) -> Any:
        h = jl.pipeline_yield(x @ a)
        extra = jnp.mean(h**2)
        h = jl.pipeline_yield(jnp.tanh(h @ b))
        return jnp.mean(h @ c) + extra + sum(jnp.sum(w**2) for w in (a, b, c))

    result = cut_of(loss, "wwwb", 3)
    assert [piece.inputs for piece in result.pieces] == [[0, 3], [1], [2]]
    *numbers, activation = shapes_into(result, 2)
    assert numbers and {*numbers} == {()} and activation != ()


def test_every_stage_that_draws_counts_for_itself() -> None:
    def step(a: Any, b: Any, count: Any, x: Any) -> Any:
        key = jax.random.key(jnp.int32(count * 7))
        keep = lambda x, i: x * jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)  # noqa: E731
        return keep(jl.pipeline_yield(keep(x @ a, 0)) @ b, 1), count + 1

    result = cut_of(step, "wwsb", 2, updates={2: 1})
    assert [2 in piece.inputs and 1 in piece.results for piece in result.pieces] == [True, True]
    assert result.home_of[2] == 0 and shapes_into(result, 1) == [(ROWS, WIDTH)]


def test_state_may_not_be_read_on_another_stage() -> None:
    def step(a: Any, b: Any, mean: Any, x: Any) -> Any:
        h = jl.pipeline_yield(x @ a) @ b
        return jnp.mean(h - mean), 0.9 * mean + 0.1 * jnp.mean(h)

    assert cut_of(step, "wwsb", 2, updates={2: 1}).home_of[2] == 1

    def read_before(a: Any, b: Any, mean: Any, x: Any) -> Any:
        h = jl.pipeline_yield(x @ a + mean) @ b
        return jnp.mean(h), 0.9 * mean + 0.1 * jnp.mean(h)

    with pytest.raises(StateOnTwoStages) as caught:
        cut_of(read_before, "wwsb", 2, updates={2: 1})
    assert (caught.value.place, caught.value.read, caught.value.updated) == (2, 0, 1)


def test_state_that_is_only_written_lives_where_it_is_written() -> None:
    def step(a: Any, b: Any, seen: Any, last: Any, x: Any) -> Any:
        h = jl.pipeline_yield(x @ a)
        return jnp.mean(h @ b), jnp.sum(h), last + 1

    assert cut_of(step, "wwssb", 2, updates={2: 1, 3: 2}).home_of[2:4] == [1, 1]


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_a_mark_inside_a_call_counts(wrap: Callable[..., Any]) -> None:
    layer = wrap(lambda w, x: jl.pipeline_yield(jnp.tanh(x @ w)))
    result = cut_of(lambda a, b, c, x: layer(b, layer(a, x)) @ c, "wwwb", 3)  # a layer that jax traces once
    assert result.home_of[:3] == [0, 1, 2]


@pytest.mark.parametrize(
    ("layers", "stages", "balance", "homes"),
    [
        (8, 4, "count", [0, 0, 1, 1, 2, 2, 3, 3]),
        (5, 2, "count", [0, 0, 1, 1, 1]),
        (4, 2, [1, 3], [0, 1, 1, 1]),
        (4, 4, "flops", [0, 1, 2, 3]),
    ],
)
def test_more_marks_than_stages_are_put_together(layers: int, stages: int, balance: Any, homes: list[int]) -> None:
    fn = lambda *args: chain(*args[:-1], x=args[-1])  # noqa: E731
    assert cut_of(fn, "w" * layers + "b", stages, balance=balance).home_of[:layers] == homes


def test_stages_of_like_cost_are_not_of_as_many_layers() -> None:
    def uneven(a: Any, b: Any, c: Any, x: Any) -> Any:
        return chain(b, c, x=jl.pipeline_yield(functools.reduce(jnp.matmul, [a] * 6, x)))

    assert cut_of(uneven, "wwwb", 2, balance="flops").home_of[:3] == [0, 1, 1]
    assert cut_of(uneven, "wwwb", 2, balance=[2, 1]).home_of[:3] == [0, 0, 1]
    marked = lambda a, b, head, x: jl.pipeline_yield(jl.pipeline_yield(x @ a) @ b) @ head  # noqa: E731
    assert cut_of(marked, "wwwb", 2).home_of[:3] == [0, 1, 1]  # a mark after the last layer adds no stage


def test_a_mark_is_nothing_elsewhere() -> None:
    x = {"a": jnp.ones(3), "b": 2}
    assert jl.pipeline_yield(x) is x
    assert "name" not in str(jax.make_jaxpr(jl.pipeline_yield)(1.0))
