"""What is read off a program about replicas is so in numbers: relations are checked on real rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxlit.programs.relations import MEAN, MIXED, ROWS, SAME, TOTAL, UNKNOWN, Relation, relate

REPLICAS, ROWS_EACH = 4, 3
MESH = jax.sharding.AbstractMesh((REPLICAS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

W = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)


def make_batch(rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.normal(size=(rows, 3)).astype(np.float32),
        "label": rng.integers(0, 5, size=rows).astype(np.int32),
        "mask": rng.random(rows) < 0.5,
    }


def trace(fn: Callable[..., Any], rows: int) -> Any:
    result = []

    def body(w: Any, batch: Any) -> jax.Array:
        result.append(jax.make_jaxpr(fn)(w, batch))
        return jnp.zeros(())

    mapped = jax.shard_map(body, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), check_vma=False)
    jax.eval_shape(mapped, W, make_batch(REPLICAS * rows))
    return result[0]


def relation_of(fn: Callable[..., Any], given: Relation = SAME) -> Relation:
    programs = trace(fn, ROWS_EACH), trace(fn, 2 * ROWS_EACH)
    (relation,), same_draws = relate(*programs, [given, *[ROWS] * 3], "data", REPLICAS)
    assert not same_draws
    return relation


def predicted(relation: Relation, parts: np.ndarray, dim: int) -> np.ndarray:
    """Return the whole batch's value from the replicas', as the relation says."""
    factor = float(REPLICAS) ** relation.power
    if relation == ROWS:
        return np.concatenate(list(parts), dim)
    if relation.kind == "total":
        return factor * parts.sum(0)
    assert (parts == parts[0]).all()
    return factor * parts[0]


def rows_loss(w: Any, b: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(b["x"] @ w, b["label"])


def scanned(w: Any, b: Any) -> Any:
    """A recurrent net over the columns, with a carry that begins as zeros."""
    return jax.lax.scan(lambda h, column: (jnp.tanh(h + column), h), jnp.zeros(b["x"].shape[0]), b["x"].T)


def branched(w: Any, b: Any) -> Any:
    return jax.lax.cond(w[0, 0] > 0, lambda: rows_loss(w, b).mean(), lambda: (b["x"] ** 2).mean())


def rows_of(b: Any) -> jax.Array:
    return jnp.arange(b["x"].shape[0])


def rows_picked(table: jax.Array, places: jax.Array) -> jax.Array:
    return table[jnp.arange(len(table)), places]


CASES: list[tuple[str, Callable[..., Any], Relation]] = [
    ("a mean of losses", lambda w, b: rows_loss(w, b).mean(), MEAN),
    ("a sum of losses", lambda w, b: rows_loss(w, b).sum(), TOTAL),
    ("a mean and a penalty", lambda w, b: rows_loss(w, b).mean() + 0.1 * (w**2).sum(), MEAN),
    ("a sum that is divided by a constant", lambda w, b: rows_loss(w, b).sum() / 7, TOTAL),
    ("a running mean", lambda w, b: 0.9 * w[:, 0] + 0.1 * b["x"].mean(0), MEAN),
    ("the number of rows", lambda w, b: jnp.float32(0) + b["x"].shape[0], Relation("same", 1)),
    ("a count", lambda w, b: b["mask"].sum(), TOTAL),
    ("labels counted by one-hot", lambda w, b: jax.nn.one_hot(b["label"], 5).sum(0), TOTAL),
    ("labels counted by scatter", lambda w, b: jnp.zeros(5).at[b["label"]].add(1.0), TOTAL),
    ("sums by label", lambda w, b: jax.nn.one_hot(b["label"], 5).T @ b["x"], TOTAL),
    ("a sum of masked entries", lambda w, b: jnp.where(b["mask"], b["x"][:, 0], 0).sum(), TOTAL),
    ("a layer", lambda w, b: jax.nn.gelu(b["x"] @ w + w[0]), ROWS),
    ("an embedding", lambda w, b: jnp.take(w, b["label"] % 3, axis=0), ROWS),
    ("the largest two", lambda w, b: jax.lax.top_k(b["x"] @ w, 2)[0], ROWS),
    ("halves of a layer", lambda w, b: jnp.split(b["x"] @ w, [2], axis=1)[1], ROWS),
    ("softmax over classes", lambda w, b: jax.nn.softmax(b["x"] @ w), ROWS),
    ("each row's own entry", lambda w, b: rows_picked(b["x"] @ w, b["label"]), ROWS),
    ("a sum of each row's own entry", lambda w, b: rows_picked(b["x"] @ w, b["label"]).sum(), TOTAL),
    ("a mean of each row's own entry", lambda w, b: -rows_picked(b["x"] @ w, b["label"]).mean(), MEAN),
    ("a transform of rows", lambda w, b: jnp.abs(jnp.fft.rfft(b["x"])), ROWS),
    ("rows turned around", lambda w, b: b["x"].T, ROWS),
    ("rows and columns in one", lambda w, b: b["x"].reshape(-1), ROWS),
    ("a scan's carry", lambda w, b: scanned(w, b)[0], ROWS),
    ("a scan's outputs", lambda w, b: scanned(w, b)[1], ROWS),
    ("either of two means", branched, MEAN),
    ("what depends on no row", lambda w, b: jnp.linalg.norm(w) + jnp.sort(w[:, 0]), SAME),
    ("a convolution", lambda w, b: jnp.convolve(w[0], w[1]), SAME),
]


@pytest.mark.parametrize(("fn", "expected"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_relation_gives_the_batchs_value(fn: Any, expected: Relation) -> None:
    assert relation_of(fn) == expected
    batch, fn = make_batch(REPLICAS * ROWS_EACH), jax.jit(fn)
    parts = [{key: np.split(x, REPLICAS)[i] for key, x in batch.items()} for i in range(REPLICAS)]
    values = np.stack([np.asarray(fn(W, part)) for part in parts])
    of_batch = np.asarray(fn(W, batch))
    grown = [i for i, (x, y) in enumerate(zip(values.shape[1:], of_batch.shape, strict=True)) if x != y]
    np.testing.assert_allclose(predicted(expected, values, *grown or [0]), of_batch, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, b: (rows_loss(w, b) * b["mask"]).sum() / b["mask"].sum(),
        lambda w, b: b["x"].var(),
        lambda w, b: jnp.abs(jnp.fft.fft2(b["x"])),
        lambda w, b: jnp.cumsum(w, 1)[rows_of(b), b["label"]],  # the places of rows in something else
        lambda w, b: b["x"].T[b["label"] % 3, rows_of(b)].sum(),  # rows that come last are not looked for
        lambda w, b: b["x"] * rows_of(b)[:, None],
        lambda w, b: b["x"][rows_of(b) - 1, b["label"]],
        lambda w, b: b["x"][jnp.where(rows_of(b) < 1, rows_of(b), 0), b["label"]],
        lambda w, b: b["x"].at[0, 1].set(0.0),
        lambda w, b: jax.lax.dynamic_slice(rows_of(b), (1,), (2,)),
        lambda w, b: b["x"].max(),
        lambda w, b: (b["x"] @ b["x"].T).mean(),
        lambda w, b: b["x"][:2],
        lambda w, b: jnp.sqrt(b["x"].mean(0)),
        lambda w, b: b["x"].sum() / (b["x"].shape[0] - 1),
        lambda w, b: jax.lax.axis_index("data"),
        lambda w, b: b["mask"].sum() // 2,
        lambda w, b: jax.lax.while_loop(lambda s: s[0] < b["mask"].sum(), lambda s: (s[0] + 1, s[1]), (0, 1))[0],
        lambda w, b: jnp.sort(b["x"], 0),
        lambda w, b: w[0] ** b["x"].shape[0],
        lambda w, b: w.reshape(-1)[b["x"].shape[0] - 3],
        lambda w, b: b["mask"].sum().astype(bool) + 0,
        lambda w, b: rows_of(b),
        lambda w, b: jnp.ones(b["x"].shape[0] ** 2).sum(),
        lambda w, b: jnp.broadcast_to(b["x"][:, :1], (b["x"].shape[0],) * 2).sum(),
        lambda w, b: jnp.abs(b["x"][:, None] - b["x"][None]).sum(),
    ],
)
def test_what_no_relation_fits_is_unknown(fn: Any) -> None:
    assert relation_of(fn) == UNKNOWN


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda w, b: w.sum() + b["mask"].sum(), TOTAL),
        (lambda w, b: 0.9 * w[0] + jax.nn.one_hot(b["label"], 5).sum(0), TOTAL),
        (lambda w, b: w[0].at[b["label"]].add(1.0), TOTAL),
        (lambda w, b: w.sum() + b["x"].shape[0], TOTAL),
        (lambda w, b: w.sum() + 1, MIXED),
        (lambda w, b: w[0] / w[1], UNKNOWN),
        (lambda w, b: w.sum() + b["x"].mean(), MIXED),
    ],
)
def test_what_is_held_in_parts_stays_a_sum_of_them(fn: Any, expected: Relation) -> None:
    assert relation_of(fn, TOTAL) == expected


def test_a_sum_and_a_penalty_are_told_from_either() -> None:
    mixed = lambda w, b: (rows_loss(w, b).sum() + 0.1 * (w**2).sum()) / 3 + 1  # noqa: E731
    assert relation_of(mixed) == MIXED
    assert relation_of(lambda w, b: jnp.exp(mixed(w, b))) == UNKNOWN


def test_draws_for_all_rows_at_once_are_alike_only_if_asked() -> None:
    def drawn(w: Any, b: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data"))
        return (b["x"] * jax.random.bernoulli(key, 0.5, (3,))).sum()

    programs = trace(drawn, 3), trace(drawn, 6), [SAME, ROWS, ROWS, ROWS], "data", REPLICAS
    assert relate(*programs)[0] == [UNKNOWN]
    assert relate(*programs, alike=True)[0] == [TOTAL]


def test_rows_drawn_from_one_key_are_noticed() -> None:
    draw = lambda w, b: b["x"] + jax.random.normal(jax.random.key(0), b["x"].shape)  # noqa: E731
    assert relate(trace(draw, 3), trace(draw, 6), [SAME, ROWS, ROWS, ROWS], "data", REPLICAS)[1]
    by_place = lambda w, b: jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(jax.random.key(0), i)))(rows_of(b))  # noqa: E731
    assert relate(trace(by_place, 3), trace(by_place, 6), [SAME, ROWS, ROWS, ROWS], "data", REPLICAS)[1]
    assert relation_of(lambda w, b: b["x"] + jax.random.normal(jax.random.key(0), (3,))) == ROWS
    own = lambda w, b: jax.random.normal(  # noqa: E731
        jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("data")), b["x"].shape
    )
    assert relation_of(own) == ROWS
