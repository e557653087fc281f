"""What is computed in 16 bits and what is kept in 32, against formulas and a loop that casts by hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import sized
from kit.by_hand import assert_same
from kit.journal import hooks
from kit.modules import Linear, module
from kit.trainers import fit, splitting, thinned

from jaxlit.core.train_state import Precision
from jaxlit.errors import NonFiniteError, StateError

LOW = {"bf16-mixed": jnp.bfloat16, "16-mixed": jnp.float16, "bf16-true": jnp.bfloat16}


def scalar(loss: Callable[..., jax.Array], tx: Any, start: float = 0.0) -> Any:
    def init(self: Any) -> None:
        self.w = nnx.Param(jnp.full((), start, jnp.float32))

    return module(lambda self, batch: loss(self.w[...], batch), tx=tx, init=init)


def constant(*values: float) -> list[dict[str, np.ndarray]]:
    return [{"x": np.full(8, value, np.float32)} for value in values]


def floats(tree: Any) -> set[Any]:
    return {x.dtype for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)}


@pytest.mark.parametrize("strategy", thinned(("single", "fsdp", "shard_map"), "fsdp"))
def test_bf16_true_holds_float32_statistics(strategy: str) -> None:
    seen: list[Any] = []

    def step(self: Any, batch: Any) -> jax.Array:
        seen.append((batch["x"].dtype, self.kernel[...].dtype))
        self.mean[...] = batch["x"].mean(0)
        return self.loss(batch)

    made = module(step, base=Linear, init=lambda self: Linear.__init__(self, 8))
    made.mean = nnx.BatchStat(jnp.zeros(8))
    state = fit(made, sized(8, 8, features=8), strategy=splitting(strategy), precision="bf16-true").state
    assert seen and set(seen) == {(jnp.dtype(jnp.bfloat16),) * 2}
    assert floats((state.params, state.opt_state)) == {jnp.dtype(jnp.bfloat16)} == {made.kernel[...].dtype}
    assert floats(state.model_state) == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("precision", LOW)
def test_gradients_accumulate_in_float32(precision: str) -> None:
    # 2048 + 1 + 1 is 2048 in either 16-bit type.
    result: list[Any] = []
    keep = hooks(on_train_batch_end=lambda t, *_: result.append((floats(t.state.window.grads), t.state.window.grads)))
    made = scalar(lambda w, batch: jnp.mean(w * batch["x"]) / 4096, optax.sgd(1.0))
    strategy = "pmap" if precision == "16-mixed" else "single"
    fit(made, constant(2048, 1, 1), None, keep, strategy=strategy, precision=precision, accumulate_grad_batches=3)
    assert [dtypes for dtypes, _ in result] == [{jnp.dtype(jnp.float32)}] * 3
    rounded = jnp.asarray(-2050 / 3 / 4096, jnp.bfloat16 if precision == "bf16-true" else jnp.float32)
    assert float(made.w[...]) == pytest.approx(float(rounded), rel=1e-6)


@pytest.mark.parametrize("precision", LOW)
def test_a_low_precision_step_equals_a_loop_that_casts(precision: str) -> None:
    # So small a loss does not overflow at the first scale; a power of two rounds nothing.
    low, factor, batches = LOW[precision], 2.0**-6, sized(8, 8, 5)
    made = module(lambda self, batch: self.loss(batch) * factor, base=Linear)
    params = {"kernel": made.kernel[...], "bias": made.bias[...]}
    params = jax.tree.map(lambda x: jnp.array(x, low if precision == "bf16-true" else x.dtype), params)
    fit(made, batches, precision=precision)
    tx = optax.sgd(0.1, momentum=0.9)
    opt_state = tx.init(params)

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            p, b = jax.tree.map(lambda x: x.astype(low), (params, batch))
            return (jnp.mean((b["x"] @ p["kernel"] + p["bias"] - b["y"]) ** 2) * factor).astype(jnp.float32)

        updates, opt_state = tx.update(jax.grad(loss_of)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    assert_same({k: np.asarray(getattr(made, k)[...], np.float32) for k in params}, params, rtol=0)


@pytest.mark.parametrize("strategy", thinned(("single", "shard_map"), "shard_map"))
def test_scaling_keeps_gradients_that_float16_alone_would_lose(strategy: str) -> None:
    # 2^-30 is below the least float16, which is 2^-24.
    made = scalar(lambda w, batch: jnp.mean(w * batch["x"]).astype(jnp.float32) * 2.0**-30, optax.sgd(2.0**30))
    fit(made, constant(1, 1), strategy=strategy, precision="16-mixed")
    assert float(made.w[...]) == -2.0


def test_the_loss_scale_doubles_and_halves() -> None:
    next_scale = jax.jit(Precision("16-mixed").next_scale)
    fine, overflow = jnp.zeros((), bool), jnp.ones((), bool)
    scale_after = lambda scale, steps, flag: next_scale(jnp.array([scale, steps], jnp.float32), flag).tolist()  # noqa: E731
    assert Precision("16-mixed").first_scale().tolist() == [2.0**15, 0]  # type: ignore[union-attr]
    assert scale_after(8, 0, fine) == [8, 1]
    assert scale_after(8, 1998, fine) == [8, 1999]
    assert scale_after(8, 1999, fine) == [16, 0]
    assert scale_after(8, 1999, overflow) == [4, 0]
    assert scale_after(8, 5, overflow) == [4, 0]


@pytest.mark.parametrize(
    ("loss", "values", "step", "end"),
    [
        # After 15 halvings the scale is 1, and the infinite slope of a root at 0 is no overflow of it.
        (lambda w, batch: jnp.mean(jnp.sqrt(w) * batch["x"]), [1] * 20, 15, 0),
        # A loss that is not finite is no overflow.
        (lambda w, batch: jnp.mean(w * batch["x"]), [1, np.nan, 1], 1, -1),
    ],
)
def test_what_no_scale_makes_finite_raises(loss: Any, values: list[float], step: int, end: float) -> None:
    made = scalar(loss, optax.sgd(1.0))
    with pytest.raises(NonFiniteError, match=f"at optimizer step {step} "):
        fit(made, constant(*values), precision="16-mixed")
    assert float(made.w[...]) == end


@pytest.mark.parametrize("precision", ("32-true", "16-mixed"))
def test_clipping_sees_accumulated_unscaled_gradients(precision: str) -> None:
    # The mean of 6, -2 and -2 is 2/3, within the bound; clipped one by one they would give -1/3.
    made = scalar(lambda w, batch: jnp.mean(w * batch["x"]) / 4, optax.sgd(1.0))
    clip = {"gradient_clip_val": 0.25, "gradient_clip_algorithm": "value"}
    fit(made, constant(6, -2, -2), precision=precision, accumulate_grad_batches=3, **clip)
    assert float(made.w[...]) == pytest.approx(-1 / 6, rel=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_a_clip_in_16_bits_has_the_norm_of_float32(dtype: Any) -> None:
    """The square of 512 is infinite in float16; in bfloat16 it stays as it is when that of 22 is added, 30 times."""

    def init(self: Any) -> None:
        self.ws = nnx.List([nnx.Param(jnp.zeros(1, dtype)) for _ in range(31)])

    grads = [512, *[22] * 30]
    loss = lambda self, batch: sum(w[0] * g for w, g in zip(self.ws, grads, strict=True))  # noqa: E731
    made = module(loss, tx=optax.sgd(1.0), init=init)
    fit(made, constant(1), gradient_clip_val=1.0)
    expected = -np.array(grads) / np.linalg.norm(grads)
    np.testing.assert_allclose([float(w[0]) for w in made.ws], expected, rtol=float(jnp.finfo(dtype).eps))


def test_a_write_that_would_round_trained_weights_is_refused() -> None:
    def step(self: Any, batch: Any) -> jax.Array:
        self.kernel[...] = 0.999 * self.kernel[...]
        return self.loss(batch)

    with pytest.raises(StateError, match="writes to kernel, which is trained, and under precision='bf16-mixed'"):
        fit(module(step, base=Linear), sized(8), precision="bf16-mixed")
    fit(module(step, base=Linear), sized(8), precision="bf16-true")
