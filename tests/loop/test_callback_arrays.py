"""Arrays of callbacks are what a loop written by hand has, split as the parameters are, and saved with them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.batches import random
from kit.inside import engine_of, is_key
from kit.journal import hooks
from kit.modules import Linear
from kit.refusals import fit_refuses, warnings_of
from kit.trainers import FOUR, STRATEGIES, fit, make_trainer, splitting, thinned

import jaxlit as jl
from jaxlit.errors import CheckpointError, ModuleError, NonFiniteError

DECAY, CLIP = 0.75, 0.5


class EMA(jl.Callback):
    """An exponential moving average of the weights, and what it was when training began."""

    def init_arrays(self, params: Any) -> Any:
        return params

    def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> Any:
        return jax.tree.map(lambda old, new: DECAY * old + (1 - DECAY) * new, arrays, params), params

    def on_fit_start(self, trainer: jl.Trainer, module: Any) -> None:
        self.held = jax.tree.map(jnp.copy, trainer.callback_arrays(self))


class Norms(jl.Callback):
    """The sum of the gradients' norms, how many there were, and a random key that moves on."""

    def init_arrays(self, params: Any) -> Any:
        return [jnp.zeros(()), np.zeros((), np.int32), jax.random.key(3)]

    def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> Any:
        total, count, key = arrays
        return [total + optax.tree.norm(grads), count + 1, jax.random.fold_in(key, global_step)], params


class Wide(Linear):
    def __init__(self) -> None:
        self.kernel, self.bias = nnx.Param(jnp.linspace(-1.0, 1.0, 8)[:, None] * jnp.ones(16)), nnx.Param(jnp.zeros(16))

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.05, eps=1e-3)


def made(**methods: Any) -> jl.Callback:
    return type("Made", (jl.Callback,), methods)()


def keep(self: Any, arrays: Any, params: Any, grads: Any, global_step: Any) -> Any:
    return arrays, params


def batches_of(count: int, bad: int | None = None) -> list[dict[str, np.ndarray]]:
    result = random(count, features=8)
    if bad is not None:
        result[bad]["y"][0, 0] = np.nan
    return result


def by_hand(batches: list[Any], keeper: Any, accumulate: int = 1, clip: float | None = None) -> tuple[Any, Any]:
    """Train in plain JAX and optax; returns the parameters and the callback's arrays."""

    def loss_of(params: Any, batch: Any) -> jax.Array:
        return jnp.mean((batch["x"] @ params["kernel"] + params["bias"] - batch["y"]) ** 2)

    module = Wide()
    params = {"kernel": module.kernel[...], "bias": module.bias[...]}
    tx = optax.chain(*[optax.clip_by_global_norm(clip)] * (clip is not None), module.configure_optimizers())
    opt_state, arrays = tx.init(params), keeper.init_arrays({**params})

    @jax.jit
    def take_step(params: Any, opt_state: Any, arrays: Any, window: Any, number: Any) -> Any:
        grads = [jax.grad(loss_of)(params, batch) for batch in window]
        grads = jax.tree.map(lambda *g: sum(g) / len(g), *grads)
        finite = jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        updates, opt_state = tx.update(grads, opt_state, params)
        arrays, params = keeper.update_arrays(arrays, optax.apply_updates(params, updates), grads, number)
        return finite, params, opt_state, arrays

    for number, at in enumerate(range(0, len(batches), accumulate)):
        finite, *new = take_step(params, opt_state, arrays, batches[at : at + accumulate], np.int32(number))
        if finite:
            params, opt_state, arrays = new
    return params, arrays


def train(keeper: jl.Callback, batches: Any, strategy: str = "single", **arguments: Any) -> jl.Trainer:
    return fit(Wide(), batches, None, keeper, strategy=splitting(strategy), **arguments)


def numbers(tree: Any) -> list[np.ndarray]:
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def bits(tree: Any) -> list[bytes]:
    return [x.tobytes() for x in numbers(tree)]


def assert_close(got: Any, expected: Any) -> None:
    for a, b in zip(numbers(got), numbers(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


# Each strategy with each kind of window that its programs differ by.
WINDOWS = [("single", 3, CLIP), ("fsdp", 3, CLIP), ("shard_map", 1, None), ("pmap", 1, CLIP)]
MORE_WINDOWS = [("single", 1, None), ("ddp", 3, CLIP), ("fsdp", 1, None), ("zero1", 1, CLIP)]
MORE_WINDOWS += [("shard_map", 3, CLIP), ("pmap", 3, None), ("replicas:8", 3, CLIP)]


@pytest.mark.parametrize(
    ("strategy", "accumulate", "clip"), thinned(WINDOWS + MORE_WINDOWS, WINDOWS[1], full=[*WINDOWS, *MORE_WINDOWS[::3]])
)
def test_arrays_and_parameters_are_those_of_a_loop_by_hand(strategy, accumulate, clip) -> None:
    batches, keepers = batches_of(6), (EMA(), Norms())
    arguments = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    trainer = fit(Wide(), batches, None, *keepers, strategy=splitting(strategy), **arguments)
    for keeper in keepers:
        params, arrays = by_hand(batches, type(keeper)(), accumulate, clip)
        assert_close(trainer.callback_arrays(keeper), arrays)
        assert_close(dict(trainer.state.params), params)
        assert_close([trainer.module.bias[...], trainer.module.kernel[...]], [params["bias"], params["kernel"]])


def test_arrays_like_parameters_are_sharded_like_them() -> None:
    begin = {"count": jnp.zeros(8), "wide": {"kernel": jnp.zeros((8, 8))}}
    keeper = made(init_arrays=lambda self, params: {"slow": params} | begin, update_arrays=keep)
    trainer = train(keeper, batches_of(1), "fsdp")
    arrays, params = trainer.callback_arrays(keeper), trainer.state.params
    assert not params["kernel"].sharding.is_fully_replicated
    assert arrays["slow"]["kernel"].sharding == params["kernel"].sharding
    assert arrays["slow"]["bias"].sharding == params["bias"].sharding
    assert arrays["count"].sharding.is_fully_replicated
    assert arrays["wide"]["kernel"].sharding.is_fully_replicated, "of another shape than the parameter"
    assert train(jl.Callback(), batches_of(1)).state.extras == {}
    # In a checkpoint they have names of their own.
    trainer = fit(Wide(), batches_of(1), None, EMA(), Norms(), EMA())
    assert [name for name, _, _ in engine_of(trainer).state.spec.entries if name.startswith("extras")] == [
        *("extras['EMA'].bias", "extras['EMA'].kernel", "extras['EMA:1'].bias", "extras['EMA:1'].kernel"),
        *("extras['Norms'][0]", "extras['Norms'][1]", "extras['Norms'][2]"),
    ]


@pytest.mark.parametrize(
    ("policy", "accumulate"), thinned([("skip", 1), ("skip", 2), ("raise", 2), ("rollback", 1)], ("raise", 2))
)
def test_a_step_that_is_not_finite_leaves_the_arrays(policy, accumulate) -> None:
    keeper, batches = EMA(), batches_of(6, bad=3)
    saver = jl.callbacks.ModelCheckpoint(every_n_train_steps=2)
    trainer = make_trainer(keeper, saver, accumulate_grad_batches=accumulate, nan_policy=policy, log_every_n_steps=1)
    if policy == "raise":
        with pytest.raises(NonFiniteError):
            trainer.fit(Wide(), batches)
        batches = batches[:4]
    else:
        trainer.fit(Wide(), batches)
    # A rollback goes back where the next checkpoint is due, to that of the second step.
    counted = [*batches[:2], *batches[4:]] if policy == "rollback" else batches
    assert_close(trainer.callback_arrays(keeper), by_hand(counted, EMA(), accumulate)[1])


@pytest.mark.parametrize("strategy", thinned(STRATEGIES, "shard_map", full=FOUR))
def test_a_resumed_training_has_the_same_bits(strategy) -> None:
    whole, resumed = (EMA(), Norms()), (EMA(), Norms())
    given = {"strategy": splitting(strategy), "max_epochs": 2}
    saves = hooks(on_train_epoch_end=lambda t, m: t.current_epoch or t.save_checkpoint("kept"))
    trainer = fit(Wide(), batches_of(3), None, *whole, saves, **given)
    later = fit(Wide(), batches_of(3), None, *resumed, ckpt_path="kept", **given)
    for keeper, other in zip(resumed, whole, strict=True):
        assert bits(later.callback_arrays(keeper)) == bits(trainer.callback_arrays(other))
    assert bits(later.state.params) == bits(trainer.state.params)


def test_a_resume_names_new_and_missing_array_keepers(caplog) -> None:
    batches, first, keeper = batches_of(3), EMA(), type("Slow", (EMA,), {})()
    trainer = train(first, batches)
    trainer.save_checkpoint("kept")
    later = train(keeper, batches, "fsdp", max_epochs=2, ckpt_path="kept")
    assert "has no arrays of 'Slow': they start again, from" in caplog.text
    assert "keeps the arrays of 'EMA', which is not among the callbacks now." in caplog.text
    assert bits(keeper.held) == bits(trainer.state.params), "of the restored parameters"
    assert keeper.held["kernel"].sharding == later.state.params["kernel"].sharding
    assert bits(later.callback_arrays(keeper)) != bits(keeper.held)
    caplog.clear()
    make_trainer().validate(Wide(), batches, ckpt_path="kept")
    assert not [message for message in warnings_of(caplog) if "arrays" in message]

    def begin(self: Any, params: Any) -> Any:
        return [params["kernel"], jnp.zeros(3)]

    other = type("EMA", (jl.Callback,), {"init_arrays": begin, "update_arrays": keep})()
    with pytest.raises(CheckpointError, match=r"extras\['EMA'\]\.kernel"):
        train(other, batches, max_epochs=2, ckpt_path="kept")
    again = train(other, batches, ckpt_path="kept", strict=False)
    assert bits(again.callback_arrays(other)[0]) == bits(trainer.state.params["kernel"])


def zeros(self: Any, params: Any) -> Any:
    return {"total": jnp.zeros(3)}


CALLED = r"Made\.update_arrays\(arrays, params\) is called with \(arrays, params, grads, global_step\)"
RETURNED, LEAVES = "must return a pytree of arrays, got", r"Made\.eval_params must return leaves of its arrays"
half = lambda x: x.astype("float16")  # noqa: E731
longer = lambda x: jnp.ones(1) * x  # noqa: E731
# What the message says, and the methods; None for one that is not defined.
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("Made defines one of init_arrays and update_arrays", {"update_arrays": None}),
    ("Made defines one of init_arrays and update_arrays", {"init_arrays": None}),
    (CALLED, {"update_arrays": lambda self, arrays, params: (arrays, params)}),
    (
        rf"{LEAVES} .* structure, shapes and dtypes",
        {"init_arrays": lambda self, params: jax.tree.map(half, params), "eval_params": lambda self, arrays: arrays},
    ),
    (
        LEAVES,
        {"init_arrays": lambda self, params: params, "eval_params": lambda self, arrays: jax.tree.map(longer, arrays)},
    ),
    (rf"{RETURNED} {{'name': 'ema'}}", {"init_arrays": lambda self, params: {"name": "ema"}}),
    (f"{RETURNED} None", {"init_arrays": lambda self, params: None}),
    (r"changed arrays\.total float32\[3\]", {"update_arrays": lambda self, a, p, *_: ({"total": a["total"][:2]}, p)}),
    (r"changed params\.bias float32\[16\]", {"update_arrays": lambda self, a, p, *_: (a, {"kernel": p["kernel"]})}),
]


@pytest.mark.parametrize(("words", "methods"), REFUSED)
def test_what_cannot_be_kept_is_refused_before_the_first_step(words, methods) -> None:
    methods = {"init_arrays": zeros, "update_arrays": keep} | methods
    keeper = made(**{name: method for name, method in methods.items() if method is not None})
    fit_refuses(ModuleError, words, model=Wide(), train=batches_of(1), callbacks=[keeper])
