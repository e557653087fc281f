"""How results depend on rows: what is called linear adds up in numbers, and what may hide a branch is not."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlit.programs.jaxpr import CONSTANT, LINEAR, OTHER, ROWS, dependence, growing, run_drawing_alike

Step = Callable[[jax.Array, dict[str, jax.Array]], jax.Array]


def make_batch(rows: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    return {"label": jnp.asarray(rng.integers(0, 4, rows)), "x": jnp.asarray(x)}


def traced(step: Callable[..., Any], rows: int, held: Any) -> Any:
    return jax.make_jaxpr(step, axis_env=[("data", 2)])(held, make_batch(rows))


def dependence_of(step: Step, held: Any = 0.0, given: int = CONSTANT) -> tuple[int, bool]:
    held = jnp.asarray(held)
    one, longer = traced(step, 4, held), traced(step, 12, held)
    (bits,), draws_alike = dependence(one.jaxpr, [given, ROWS, ROWS], growing(one.jaxpr, longer.jaxpr), "data")
    return bits, draws_alike


LINEAR_IN_ROWS: dict[str, tuple[Step, Any]] = {
    "a sum of any function": (lambda w, b: w + jnp.exp(b["x"]).sum(), 0.0),
    "a decayed mean": (lambda w, b: 0.9 * w + 0.1 * b["x"].mean(0), [1.0, 2.0, 3.0]),
    "a sum without a gradient": (lambda w, b: w + jax.lax.stop_gradient(b["x"].sum(0)), [1.0, 2.0, 3.0]),
    "a count, from integers to floats": (lambda w, b: w + (b["x"] > 0).sum(), 0.0),
    "counts by label": (lambda w, b: w.at[b["label"]].add(1), [0, 1, 2, 3]),
    "sums by label": (lambda w, b: w.at[b["label"]].add(b["x"].sum(1)), [0.0] * 4),
    "a matrix of products": (lambda w, b: w + b["x"].T @ b["x"], [[0.0] * 3] * 3),
    "a scan with a carry": (
        lambda w, b: jax.lax.scan(lambda c, x: (c + b["x"][:, x].sum(), None), w, jnp.arange(3))[0],
        0.0,
    ),
    "a branch that no row decides": (lambda w, b: jax.lax.cond(True, lambda x: x, jnp.negative, w + b["x"].sum()), 0.0),
    "in jit, remat and a custom rule": (lambda w, b: w + jax.checkpoint(jax.jit(jax.nn.relu))(b["x"]).sum(), 0.0),
    "written with another dtype": (lambda w, b: w.at[...].set((w + b["x"].sum()).astype(jnp.bfloat16)), 0.0),
}


@pytest.mark.parametrize("case", LINEAR_IN_ROWS)
def test_a_linear_result_adds_up_over_rows_and_parts(case: str) -> None:
    step, held = LINEAR_IN_ROWS[case]
    held = jnp.asarray(held)
    assert dependence_of(step, held, LINEAR) == (LINEAR, False)
    batch = make_batch(12)
    halves = [jax.tree.map(lambda x: x[:6], batch), jax.tree.map(lambda x: x[6:], batch)]
    # f(a + b, x) + f(0, x) = f(a, x) + f(b, x), as it must be for any step whose value is linear in what it holds.
    both, none = step(3 * held, batch), step(0 * held, batch)
    np.testing.assert_allclose(both + none, step(held, batch) + step(2 * held, batch), rtol=1e-2)
    if "mean" not in case:
        np.testing.assert_allclose(both, step(held, halves[0]) + step(2 * held, halves[1]), rtol=1e-2, atol=1e-5)


OTHERS: dict[str, tuple[Step, int]] = {
    "what no row touches": (lambda w, b: jnp.exp(w * b["x"].shape[0]), CONSTANT),
    "a sum over replicas": (lambda w, b: jnp.exp(jax.lax.pmean(b["x"].sum(), "data")), CONSTANT),
    "rows": (lambda w, b: jax.nn.softmax(w * b["x"]), ROWS),
    "rows of a scan": (lambda w, b: jax.lax.scan(lambda c, _: (jnp.tanh(c), None), b["x"], length=3)[0], ROWS),
    "the replica's index": (lambda w, b: w + jax.lax.axis_index("data"), OTHER),
    "a maximum": (lambda w, b: jnp.maximum(w, b["x"].max()), OTHER),
    "a maximum of what is 0 so far": (lambda w, b: w + jnp.maximum(b["x"] - 50, 0).max(), OTHER),
    "whether a row is large": (lambda w, b: w + (b["x"] > 50).any(), OTHER),
    "a clipped mean": (lambda w, b: w + jnp.clip(b["x"].mean(), -10, 10), OTHER),
    "a mean unless it is NaN": (lambda w, b: jnp.where(jnp.isnan(b["x"].mean()), w, b["x"].mean()), OTHER),
    "a variance": (lambda w, b: b["x"].var(), OTHER),
    "a ratio of sums": (lambda w, b: b["x"].sum() / b["label"].sum(), OTHER),
    "a product of each pair of rows": (lambda w, b: w + (b["x"] @ b["x"].T).sum(), OTHER),
    "the larger half of the rows": (lambda w, b: jax.lax.top_k(b["x"][:, 0], len(b["x"]) // 2)[0].sum(), OTHER),
    "rows in order": (lambda w, b: jnp.sort(b["x"], 0), OTHER),
    "rows, each in order": (lambda w, b: jnp.sort(b["x"], 1), ROWS),
    "a sum that is added to each row": (lambda w, b: (b["x"] + b["x"].sum(0)).mean(), OTHER),
    "a sum of rows less a mean": (lambda w, b: jnp.abs(b["x"] - b["x"].mean(0)).sum(), OTHER),
    "rounded": (lambda w, b: b["x"].mean().astype(jnp.int32), OTHER),
    "a while loop": (lambda w, b: jax.lax.while_loop(lambda c: c < 9, lambda c: 2 * c, b["x"].sum() ** 2 + 1), OTHER),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_may_hide_a_branch_is_not_linear(case: str) -> None:
    step, expected = OTHERS[case]
    assert dependence_of(step) == (expected, False)


RESETS: dict[str, Step] = {
    "above a number": lambda w, b: jnp.where(w > 1e6, 0.0, w) + b["x"].sum(),
    "in a branch": lambda w, b: jax.lax.cond(w > 10, lambda: jnp.zeros(()), lambda: w) + b["x"].sum(),
    "a maximum after a number of rows": lambda w, b: jnp.where(w > 1e6, b["x"].max(), w + 4),
    "by its own square": lambda w, b: w * w + b["x"].sum(),
    "times a sum": lambda w, b: w * b["x"].sum(),
}


@pytest.mark.parametrize("case", RESETS)
def test_a_part_that_decides_or_multiplies_is_not_linear(case: str) -> None:
    assert dependence_of(RESETS[case], 1.0, LINEAR) == (OTHER, False)


def test_a_constant_key_that_draws_for_rows_is_found() -> None:
    key = jax.random.key(0)
    assert dependence_of(lambda w, b: (b["x"] + jax.random.normal(key, b["x"].shape)).sum()) == (LINEAR, True)
    folded = lambda i: jax.random.normal(jax.random.fold_in(key, i))  # noqa: E731
    assert dependence_of(lambda w, b: jax.vmap(folded)(jnp.arange(len(b["x"]))).sum())[1]
    assert not dependence_of(lambda w, b: (b["x"] + jax.random.normal(key, (3,))).sum())[1]
    of_replica = lambda: jax.random.fold_in(key, jax.lax.axis_index("data"))  # noqa: E731
    noisy = lambda w, b: (b["x"] + jax.random.normal(of_replica(), b["x"].shape)).sum()  # noqa: E731
    assert dependence_of(noisy) == (LINEAR, False)


def test_traces_that_differ_in_more_than_rows_show_nothing() -> None:
    step = lambda w, b: b["x"][: min(len(b["x"]), 8)].sum()  # noqa: E731
    one, longer = traced(step, 4, jnp.zeros(())), traced(step, 12, jnp.zeros(()))
    assert growing(one.jaxpr, longer.jaxpr) is None
    assert dependence(one.jaxpr, [CONSTANT, ROWS, ROWS], None, "data") == ([OTHER], False)


def test_how_rows_add_up_is_run_without_what_is_computed_of_them() -> None:
    weights = jnp.ones((3, 5))

    def step(w: jax.Array, b: dict[str, jax.Array]) -> list[jax.Array]:
        x = jax.lax.scan(lambda x, _: (jnp.tanh(x), None), b["x"] @ weights, length=2)[0]
        return [x.mean(), x.sum(), w + 0.1 * jax.jit(jnp.sum)(x) / 4]

    programs = [traced(step, rows, jnp.zeros(())) for rows in (4, 12)]
    results = []
    for program, other, rows in zip(programs, programs[::-1], (4, 12), strict=True):
        run = partial(run_drawing_alike, program, dict.fromkeys(growing(program.jaxpr, other.jaxpr) or (), 2.0))
        batch = make_batch(rows)
        assert "dot_general" not in str(jax.make_jaxpr(run)(jnp.zeros(()), batch["label"], batch["x"]))
        results.append([float(x) for x in run(jnp.zeros(()), batch["label"], batch["x"])])
    assert results == [[2.0, 40.0, 1.0], [2.0, 120.0, 3.0]]
