"""The programs of one stage: forward, backward, and backward in two parts."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxlit as jl
from jaxlit.pipeline.cut import Input, Role, cut
from jaxlit.pipeline.segments import marking
from jaxlit.pipeline.stages import Stage, flow_of

PASSES: Any = SimpleNamespace(add=lambda total, grad, rows, scale: total + rows * grad)


def loss(a: Any, b: Any, scale: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(jl.pipeline_yield(jnp.tanh(x @ a)) @ b) ** 2) * scale


def arrays() -> list[jax.Array]:
    draw = np.random.default_rng(0).normal
    return [jnp.asarray(draw(size=size), jnp.float32) for size in ((5, 5), (5, 5), (), (4, 5))]


@pytest.fixture(params=[None, jax.checkpoint_policies.nothing_saveable], ids=["kept", "again"])
def stages(request: pytest.FixtureRequest) -> list[Stage]:
    with marking():
        closed = jax.make_jaxpr(loss)(*arrays())
    inputs = [Input(Role.WEIGHT), Input(Role.WEIGHT), Input(Role.STATE), Input(Role.BATCH)]
    result, flow = cut(closed, inputs, 2, balance="count"), flow_of(closed.jaxpr, [0, 1])
    jit = lambda fn, what, **options: jax.jit(fn, **options)  # noqa: E731
    return [Stage(result, piece, flow, PASSES, jit, request.param) for piece in result.pieces]


def test_a_backward_pass_in_two_parts_is_that_in_one(stages: list[Stage]) -> None:
    (a, b, scale, x), (first, last) = arrays(), stages
    expected = jax.grad(loss, argnums=(0, 1))(a, b, scale, x)
    (sent,), _, residuals = first.forward([a, x], [])
    _, (value,), after = last.forward([b, scale], [sent])
    np.testing.assert_allclose(value, loss(a, b, scale, x), rtol=1e-6)
    kept = last.keep([b, scale], [sent], after)
    given = (kept.inputs, kept.ins), kept.residuals, []
    (back,), crossing = last.backward_input(*given)
    zeros, rows = [jnp.zeros((5, 5))], jnp.float32(3)
    (of_b,) = last.backward_weight(given, crossing, zeros, rows, None)
    np.testing.assert_allclose(of_b, 3 * expected[1], rtol=1e-5, atol=1e-7)
    kept = first.keep([a, x], [], residuals)
    _, (of_a,) = first.backward((kept.inputs, kept.ins), kept.residuals, [[back]], [jnp.ones((5, 5))], rows, None)
    np.testing.assert_allclose(of_a, 1 + 3 * expected[0], rtol=1e-5, atol=1e-7)


def test_each_product_of_a_backward_pass_is_in_one_of_its_parts(stages: list[Stage]) -> None:
    a, b, scale, x = arrays()
    (sent,), _, _ = stages[0].forward([a, x], [])
    last = stages[1]
    kept = last.keep([b, scale], [sent], last.forward([b, scale], [sent])[2])
    given = (kept.inputs, kept.ins), kept.residuals, []
    rest = last.backward_input(*given)[1], [jnp.zeros((5, 5))], jnp.float32(1), None
    products = [str(jax.make_jaxpr(last.backward_input)(*given)).count("dot_general")]
    products += [str(jax.make_jaxpr(last.backward_weight)(given, *rest)).count("dot_general")]
    again = products[0] - 1  # the forward product, where it is computed again
    assert products == [1 + again, 1] and again in (0, 1)


def test_weights_are_not_among_what_a_microbatch_keeps(stages: list[Stage]) -> None:
    a, b, scale, x = arrays()
    (sent,), _, residuals = stages[0].forward([a, x], [])
    after = stages[1].forward([b, scale], [sent])[2]
    assert a.shape not in [r.shape for r in (*residuals, *after)]
    kept = stages[1].keep([b, scale], [sent], after)
    assert kept.inputs[0] is b and kept.nbytes == sum(r.nbytes for r in (sent, *after))  # b is the state's own
    unused = stages[0].keep([a, x], [], residuals).inputs[0]  # nothing waits for the gradient of the batch
    assert (unused is None) == (stages[0]._remat is None)
