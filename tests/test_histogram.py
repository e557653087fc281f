"""Histograms computed on the device count what numpy counts, and only the counts leave the devices."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxlit as jl
from jaxlit.reporting.histogram import BINS, count, histogram, unpack

rng = np.random.default_rng(0)
NORMAL = rng.normal(size=(40, 25)).astype(np.float32)


def check(x: Any, bins: int = BINS, *, expected: Any = None, traced: bool = True) -> None:
    """Compare with numpy; counts near an edge may lie in the bin beside it, as numpy divides in float64."""
    packed = np.asarray((jax.jit(histogram, static_argnums=1) if traced else histogram)(jnp.asarray(x), bins))
    assert packed.shape == (2 + bins,) and packed.dtype == np.float32
    counts, edges = unpack(packed)
    values = np.asarray(x if expected is None else expected, np.float64)
    values = values[np.isfinite(values)]
    known, known_edges = np.histogram(values, bins)
    np.testing.assert_allclose(edges, known_edges, rtol=1e-6, atol=1e-6 * np.abs(known_edges).max())
    assert counts.dtype == np.int64 and counts.sum() == values.size
    # Cumulated, so that a number which float32 puts beside an edge is one off at that edge only.
    width = (known_edges[-1] - known_edges[0]) / bins
    near = [(np.abs(values - edge) < 1e-4 * width).sum() for edge in known_edges[1:-1]]
    assert (np.abs(np.cumsum(counts) - np.cumsum(known))[:-1] <= near).all()


@pytest.mark.parametrize("bins", [1, 7, 64, 1000])
@pytest.mark.parametrize("traced", [True, False])
def test_normal_numbers_are_counted_as_by_numpy(bins: int, traced: bool) -> None:
    check(NORMAL, bins, traced=traced)


@pytest.mark.parametrize("shape", [(1000,), (10, 100), (2, 5, 10, 10), (1000, 1)])
def test_the_shape_does_not_matter(shape: tuple[int, ...]) -> None:
    expected = np.asarray(histogram(jnp.asarray(NORMAL)))
    np.testing.assert_array_equal(np.asarray(histogram(jnp.asarray(NORMAL.reshape(shape)))), expected)


@pytest.mark.parametrize("value", [0.0, 3.0, -2.5, 1e-3])
@pytest.mark.parametrize("size", [1, 5])
def test_a_constant_array_has_numpys_edges_half_beside_it(value: float, size: int) -> None:
    check(np.full(size, value, np.float32), 5)
    counts, edges = unpack(np.asarray(histogram(jnp.full(size, value), 5)))
    assert counts.tolist() == [0, 0, size, 0, 0]
    np.testing.assert_allclose(edges, np.linspace(value - 0.5, value + 0.5, 6), rtol=1e-6)


@pytest.mark.parametrize("value", [1e8, -1e8, 3e38, 2.0**25])
def test_a_constant_too_large_for_a_half_beside_it_is_counted(value: float) -> None:
    packed = np.asarray(histogram(jnp.full(6, value), 5))
    assert np.isfinite(packed).all() and packed[2:].sum() == 6
    assert packed[0] <= np.float32(value) <= packed[1]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_left_out(bad: float) -> None:
    x = NORMAL.copy()
    x[::3, 1] = bad
    check(x)


def test_infinities_of_both_signs_and_nan_are_left_out_together() -> None:
    check(np.array([np.nan, np.inf, 1, 2, -np.inf, 3], np.float32), 2)


def test_nothing_finite_counts_nothing() -> None:
    for x in (jnp.full(4, jnp.nan), jnp.array([jnp.inf, -jnp.inf]), jnp.zeros(0), jnp.zeros((3, 0))):
        counts, edges = unpack(np.asarray(histogram(x, 4)))
        known, known_edges = np.histogram(np.zeros(0), 4)
        assert counts.tolist() == known.tolist() == [0, 0, 0, 0]
        np.testing.assert_allclose(edges - edges[0], known_edges - known_edges[0])


@pytest.mark.parametrize("bins", [4, 8, 64])
def test_numbers_on_an_edge_lie_in_the_bin_above_and_the_highest_in_the_last(bins: int) -> None:
    x = np.arange(bins + 1, dtype=np.float32)  # each exactly an edge
    counts, edges = unpack(np.asarray(histogram(jnp.asarray(x), bins)))
    assert counts.tolist() == [1] * (bins - 1) + [2] == np.histogram(x, bins)[0].tolist()
    np.testing.assert_array_equal(edges, x)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int8, np.bool_, np.float16, ml_dtypes.bfloat16])
def test_every_kind_of_number_is_counted_as_what_it_is(dtype: Any) -> None:
    x = (NORMAL * 20).astype(np.int32).clip(0, 100).astype(dtype)
    check(x, 16, expected=x.astype(np.float64))


def test_a_scalar_is_an_array_of_one() -> None:
    check(np.float32(2.5), 3, expected=[2.5])


def test_tiny_and_huge_numbers_keep_their_order() -> None:
    check(NORMAL * np.float32(1e-30))
    check(NORMAL * np.float32(1e30))


def test_counts_on_the_host_are_numpys_own_of_what_is_finite() -> None:
    x = NORMAL.copy()
    x[0, :3] = np.nan, np.inf, -np.inf
    for given in (x, jnp.asarray(x), x.tolist()):
        counts, edges = count(given, 10)
        known, known_edges = np.histogram(x[np.isfinite(x)].astype(np.float64), 10)
        np.testing.assert_array_equal(counts, known)
        np.testing.assert_array_equal(edges, known_edges)
    assert count(np.zeros(0), 3)[0].tolist() == [0, 0, 0]


# Sharded ---------------------------------------------------------------------------------------------


def collectives(text: str) -> dict[str, list[int]]:
    """Return how many numbers each collective of a compiled program has, by its kind."""
    found: dict[str, list[int]] = {}
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    for result, kind in re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", text):
        sizes = [
            int(np.prod([int(d) for d in dims.split(",") if d])) for dims in re.findall(r"\w+\[([\d,]*)\]", result)
        ]
        found.setdefault(kind, []).extend(sizes)
    return found


@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp"), P(None, None, "fsdp")])
def test_a_sharded_array_stays_where_it_is(spec: P) -> None:
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    x = rng.normal(size=(16, 32, 24)).astype(np.float32)
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    run = jax.jit(histogram).lower(sharded).compile()
    found = collectives(run.as_text())
    assert set(found) == {"all-reduce"} and max(found["all-reduce"]) == BINS
    np.testing.assert_array_equal(np.asarray(run(sharded)), np.asarray(histogram(jnp.asarray(x))))


def test_collectives_are_found_in_a_program_that_has_them() -> None:
    mesh = Mesh(np.asarray(jax.devices()), ("fsdp",), axis_types=(AxisType.Auto,))
    x = jax.device_put(np.zeros((16, 8), np.float32), NamedSharding(mesh, P("fsdp")))
    text = jax.jit(lambda x: x + 1, out_shardings=NamedSharding(mesh, P())).lower(x).compile().as_text()
    assert collectives(text) == {"all-gather": [128]}


class Wide(jl.TrainModule):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.asarray(NORMAL.reshape(-1)[:512].reshape(16, 32)))

    def training_step(self, batch: Any) -> jax.Array:
        return jnp.mean((batch @ self.w) ** 2)

    def configure_optimizers(self) -> Any:
        return optax.adam(0.1)


class Histograms(jl.Callback):
    trace_every_n_steps = 2

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, np.ndarray]] = {}

    def trace_step(self, grads: Any, updates: Any, params: Any, opt_state: Any) -> dict[str, jax.Array]:
        return {"grads": histogram(grads["w"][...]), "params": histogram(params["w"][...])}

    def on_trace(self, trainer: Any, values: dict[str, np.ndarray], step: int) -> None:
        self.seen[step] = values


def test_in_a_sharded_step_histograms_gather_nothing_and_count_what_one_device_counts() -> None:
    seen, found = [], {}
    data = jl.ArrayLoader(rng.normal(size=(32, 16)).astype(np.float32), 16)
    for strategy in (jl.strategies.FSDP(min_size=0), "single"):
        histograms = Histograms()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = jl.Trainer(strategy=strategy, callbacks=histograms, max_epochs=2, **quiet)
        trainer.fit(Wide(), data)
        seen.append(histograms.seen)
        if strategy != "single":
            engine: Any = trainer._session.engine
            batch = engine.strategy.shard_batch(next(iter(data)))
            for key, program in engine._programs.items():
                found[key if isinstance(key, str) else "traced"] = collectives(
                    program.lower(engine.state.leaves, batch).compile().as_text()
                )
    plain, traced = found["train_step"], found["traced"]
    assert sorted(traced.get("all-gather", [])) == sorted(plain["all-gather"])
    assert traced.keys() - plain.keys() <= {"all-reduce"}
    more = sorted(traced["all-reduce"])
    for size in plain.get("all-reduce", []):
        more.remove(size)
    assert more and max(more) <= BINS
    assert list(seen[0]) == list(seen[1]) == [1, 3]
    for step, values in seen[0].items():
        for name, packed in values.items():
            other = seen[1][step][name]
            np.testing.assert_allclose(packed[:2], other[:2], rtol=1e-4)
            assert packed[2:].sum() == other[2:].sum() == 16 * 32
            assert np.abs(np.cumsum(packed[2:]) - np.cumsum(other[2:])).max() <= 2  # those on an edge
