"""Arrays of callbacks are what a loop written by hand has, split as the parameters are, and saved with them."""

import itertools
import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kit.trainers import thinned

import jaxlit as jl
from jaxlit.errors import ArgumentError, CheckpointError, ModuleError

STRATEGIES = ("single", "ddp", "fsdp", "shard_map", "pmap", "simulate:8", "zero1")
DECAY, CLIP = 0.75, 0.5


class EMA(jl.Callback):
    """An exponential moving average of the weights."""

    def init_arrays(self, params: Any) -> Any:
        return params

    def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> Any:
        return jax.tree.map(lambda old, new: DECAY * old + (1 - DECAY) * new, arrays, params), params


class Lookahead(jl.Callback):
    """Every second step goes back half of the way to where the last one began (Zhang et al., 2019)."""

    def init_arrays(self, params: Any) -> Any:
        return params

    def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> Any:
        slow = jax.tree.map(lambda a, b: a + 0.5 * (b - a), arrays, params)
        ends = global_step % 2 == 1
        choose = lambda a, b: jnp.where(ends, a, b)  # noqa: E731
        return jax.tree.map(choose, slow, arrays), jax.tree.map(choose, slow, params)


class Norms(jl.Callback):
    """The sum of the gradients' norms, how many there were, and a random key that moves on."""

    def init_arrays(self, params: Any) -> Any:
        return [jnp.zeros(()), np.zeros((), np.int32), jax.random.key(3)]

    def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> Any:
        total, count, key = arrays
        return [total + optax.tree.norm(grads), count + 1, jax.random.fold_in(key, global_step)], params


class Line(jl.TrainModule):
    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self.kernel = nnx.Param(jnp.asarray(rng.normal(size=(8, 16)), jnp.float32))
        self.bias = nnx.Param(jnp.zeros(16))

    def training_step(self, batch: Any) -> jax.Array:
        return loss_of({"kernel": self.kernel[...], "bias": self.bias[...]}, batch)

    def configure_optimizers(self) -> optax.GradientTransformation:
        return optax.adam(0.05, eps=1e-3)


def loss_of(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["kernel"] + params["bias"] - batch["y"]) ** 2)


def make_batches(count: int, bad: int = -1) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    draw = lambda width: rng.normal(size=(16, width)).astype(np.float32)  # noqa: E731
    found = [{"x": draw(8), "y": draw(16)} for _ in range(count)]
    if bad >= 0:
        found[bad]["y"][0, 0] = np.nan
    return found


def by_hand(batches: list[Any], keeper: Any, accumulate: int = 1, clip: float | None = None) -> tuple[Any, Any]:
    """Train in plain JAX and optax; returns the parameters and the callback's arrays."""
    module = Line()
    params = {"kernel": module.kernel[...], "bias": module.bias[...]}
    tx = optax.adam(0.05, eps=1e-3)
    if clip is not None:
        tx = optax.chain(optax.clip_by_global_norm(clip), tx)
    opt_state, arrays, step = tx.init(params), keeper.init_arrays({**params}), 0
    for at in range(0, len(batches), accumulate):
        window = [jax.grad(loss_of)(params, batch) for batch in batches[at : at + accumulate]]
        grads = jax.tree.map(lambda *g: sum(g) / len(g), *window)
        if not all(np.isfinite(g).all() for g in jax.tree.leaves(grads)):
            step += 1
            continue
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        arrays, params = keeper.update_arrays(arrays, params, grads, jnp.int32(step))
        step += 1
    return params, arrays


def make_trainer(*callbacks: jl.Callback, strategy: str = "single", **arguments: Any) -> jl.Trainer:
    sharded = {"fsdp": {"min_size": 0}, "zero1": {"min_size": 0, "stage": 1}}.get(strategy)
    chosen: Any = strategy if sharded is None else jl.strategies.FSDP(**sharded)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    return jl.Trainer(strategy=chosen, callbacks=list(callbacks), **(quiet | arguments))


def train(keeper: jl.Callback, batches: Any, **arguments: Any) -> tuple[jl.Trainer, Any]:
    trainer, module = make_trainer(keeper, **arguments), Line()
    trainer.fit(module, batches)
    return trainer, module


def assert_close(got: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)


def bits(tree: Any) -> list[bytes]:
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return [np.asarray(data(x)).tobytes() for x in jax.tree.leaves(tree)]


WINDOWS = ((1, None), (1, CLIP), (3, CLIP))
OFTEN = (
    ("single", (3, CLIP), EMA),
    ("ddp", (1, CLIP), Norms),
    ("fsdp", (1, CLIP), EMA),
    ("fsdp", (3, CLIP), Lookahead),
    ("shard_map", (1, None), Lookahead),
    ("shard_map", (3, CLIP), Norms),
    ("pmap", (1, CLIP), EMA),
    ("zero1", (1, None), EMA),
)


@pytest.mark.parametrize(
    ("strategy", "window", "keeper"), thinned(itertools.product(STRATEGIES, WINDOWS, (EMA, Lookahead, Norms)), *OFTEN)
)
def test_arrays_and_parameters_are_those_of_a_loop_by_hand(
    strategy: str, window: tuple[int, float | None], keeper: type[jl.Callback]
) -> None:
    batches, callback, (accumulate, clip) = make_batches(6), keeper(), window
    trainer, module = train(
        callback, batches, strategy=strategy, accumulate_grad_batches=accumulate, gradient_clip_val=clip
    )
    params, arrays = by_hand(batches, keeper(), accumulate, clip)
    assert_close(trainer.callback_arrays(callback), arrays)
    assert_close(dict(trainer.state.params), params)
    assert_close([module.bias[...], module.kernel[...]], [params["bias"], params["kernel"]])


@pytest.mark.parametrize("policy", ["raise", "ignore"])
@pytest.mark.parametrize("strategy", ["single", "fsdp", "shard_map"])
def test_a_callback_may_write_to_the_containers_that_it_is_given(strategy: str, policy: str) -> None:
    """As numpy users write it; a step that is left out has the arrays and the parameters of before all the same."""

    class InPlace(jl.Callback):
        def init_arrays(self, params: Any) -> Any:
            params["count"], params["last"] = jnp.zeros(()), params.pop("bias")
            return params

        def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> Any:
            arrays["count"] += 1
            arrays["last"] = params["bias"]
            params["bias"] = params["bias"] * 0.5
            grads["bias"] = None
            return arrays, params

    keeper, norms = InPlace(), Norms()
    trainer = make_trainer(keeper, norms, strategy=strategy, nan_policy=policy)
    trainer.fit(Line(), make_batches(3))
    params, arrays = by_hand(make_batches(3), InPlace())
    assert_close(trainer.callback_arrays(keeper), arrays)
    assert_close(dict(trainer.state.params), params)
    assert int(trainer.callback_arrays(norms)[1]) == 3 and float(trainer.callback_arrays(norms)[0]) > 0


def test_arrays_like_the_parameters_are_split_as_they_are() -> None:
    class Two(EMA):
        def init_arrays(self, params: Any) -> Any:
            return {"slow": params, "count": jnp.zeros(8), "wide": {"kernel": jnp.zeros((8, 8))}}

        def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> Any:
            return arrays, params

    keeper = Two()
    trainer, _ = train(keeper, make_batches(1), strategy="fsdp")
    arrays, params = trainer.callback_arrays(keeper), trainer.state.params
    assert not params["kernel"].sharding.is_fully_replicated
    assert arrays["slow"]["kernel"].sharding == params["kernel"].sharding
    assert arrays["slow"]["bias"].sharding == params["bias"].sharding
    assert arrays["count"].sharding.is_fully_replicated
    assert arrays["wide"]["kernel"].sharding.is_fully_replicated, "of another shape than the parameter"


@pytest.mark.parametrize("policy", ["skip", "raise"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_is_not_finite_leaves_the_arrays(accumulate: int, policy: str) -> None:
    keeper, batches = EMA(), make_batches(4, bad=3)
    trainer = make_trainer(keeper, accumulate_grad_batches=accumulate, nan_policy=policy)
    if policy == "raise":
        with pytest.raises(jl.errors.NonFiniteError):
            trainer.fit(Line(), batches)
    else:
        trainer.fit(Line(), batches)
    params, arrays = by_hand(batches, EMA(), accumulate)
    assert_close(trainer.callback_arrays(keeper), arrays)
    assert_close(dict(trainer.state.params), params)


def test_an_overflow_of_the_loss_scale_leaves_the_arrays() -> None:
    keeper = Norms()
    trainer, _ = train(keeper, [{k: v * 10 for k, v in b.items()} for b in make_batches(3)], precision="16-mixed")
    assert int(trainer.callback_arrays(keeper)[1]) < 3


def test_arrays_have_the_dtype_in_which_parameters_are_held() -> None:
    keeper = EMA()
    trainer, _ = train(keeper, make_batches(2), precision="bf16-true")
    assert {x.dtype for x in jax.tree.leaves(trainer.callback_arrays(keeper))} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("keeper", [EMA, Norms])
@pytest.mark.parametrize("strategy", ["single", "fsdp", "shard_map", "pmap", "zero1"])
def test_a_resumed_training_has_the_same_bits(strategy: str, keeper: type[jl.Callback], tmp_path: Path) -> None:
    batches, whole = make_batches(3), keeper()
    trainer, _ = train(whole, batches, strategy=strategy, max_epochs=2)
    first, _ = train(keeper(), batches, strategy=strategy)
    first.save_checkpoint(tmp_path / "kept")
    resumed, module = keeper(), Line()
    later = make_trainer(resumed, strategy=strategy, max_epochs=2)
    later.fit(module, batches, ckpt_path=tmp_path / "kept")
    assert bits(later.callback_arrays(resumed)) == bits(trainer.callback_arrays(whole))
    assert bits(later.state.params) == bits(trainer.state.params)


@pytest.mark.parametrize(("then", "now"), [("fsdp", "single"), ("single", "fsdp"), ("pmap", "zero1"), ("ddp", "fsdp")])
def test_arrays_are_restored_under_another_strategy(then: str, now: str, tmp_path: Path) -> None:
    class Keep(EMA):
        def on_fit_start(self, trainer: jl.Trainer, module: Any) -> None:
            self.held = jax.tree.map(jnp.copy, trainer.callback_arrays(self))

    before, after = Keep(), Keep()
    trainer, _ = train(before, make_batches(3), strategy=then)
    trainer.save_checkpoint(tmp_path / "kept")
    later = make_trainer(after, strategy=now, max_epochs=2, devices=4 if now == "fsdp" else "auto")
    later.fit(Line(), make_batches(3), ckpt_path=tmp_path / "kept")
    assert bits(after.held) == bits(trainer.callback_arrays(before))
    assert after.held["kernel"].sharding == later.state.params["kernel"].sharding


def test_arrays_have_names_of_their_own_in_a_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(EMA(), Norms(), EMA())
    trainer.fit(Line(), make_batches(1))
    trainer.save_checkpoint(tmp_path / "kept")
    names = [name for name, _, _ in trainer._session.engine.state.specs]  # type: ignore[union-attr]
    assert [name for name in names if name.startswith("extras")] == [
        *("extras['EMA'].bias", "extras['EMA'].kernel", "extras['EMA:1'].bias", "extras['EMA:1'].kernel"),
        *("extras['Norms'][0]", "extras['Norms'][1]", "extras['Norms'][2]"),
    ]


def test_a_new_callback_begins_from_the_restored_parameters(tmp_path: Path, caplog: Any) -> None:
    class Keep(EMA):
        def on_fit_start(self, trainer: jl.Trainer, module: Any) -> None:
            self.held = jax.tree.map(jnp.copy, trainer.callback_arrays(self))

    first, module = make_trainer(), Line()
    first.fit(module, make_batches(3))
    first.save_checkpoint(tmp_path / "kept")
    keeper = Keep()
    later = make_trainer(keeper, strategy="fsdp", max_epochs=2)
    with caplog.at_level(logging.WARNING, "jaxlit"):
        later.fit(Line(), make_batches(3), ckpt_path=tmp_path / "kept")
    assert "has no arrays of 'Keep', which was not among the callbacks: they begin anew, from" in caplog.text
    assert bits(keeper.held) == bits([module.bias[...], module.kernel[...]])
    assert keeper.held["kernel"].sharding == later.state.params["kernel"].sharding
    assert bits(later.callback_arrays(keeper)) != bits(keeper.held)


def test_arrays_of_a_callback_that_is_gone_are_told(tmp_path: Path, caplog: Any) -> None:
    trainer, _ = train(EMA(), make_batches(3))
    trainer.save_checkpoint(tmp_path / "kept")
    later = make_trainer(Norms(), max_epochs=2)
    with caplog.at_level(logging.WARNING, "jaxlit"):
        later.fit(Line(), make_batches(3), ckpt_path=tmp_path / "kept")
    assert "keeps the arrays of 'EMA', which is not among the callbacks now." in caplog.text
    with caplog.at_level(logging.WARNING, "jaxlit"):
        caplog.clear()
        make_trainer().validate(Validated(), make_batches(1), ckpt_path=tmp_path / "kept")
    assert "arrays" not in caplog.text


class Validated(Line):
    def validation_step(self, batch: Any) -> None:
        self.log("val", loss_of({"kernel": self.kernel[...], "bias": self.bias[...]}, batch))


def test_arrays_of_another_shape_are_refused_or_begin_anew(tmp_path: Path) -> None:
    class Keep(EMA):
        @property
        def state_key(self) -> str:
            return "EMA"

        def init_arrays(self, params: Any) -> Any:
            return params | {"more": jnp.zeros(3)} if isinstance(params, dict) else [params["kernel"], jnp.zeros(3)]

        def update_arrays(self, arrays: Any, params: Any, grads: Any, global_step: jax.Array) -> Any:
            return arrays, params

    trainer, _ = train(EMA(), make_batches(3))
    trainer.save_checkpoint(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"extras\['EMA'\]\.kernel"):
        make_trainer(Keep(), max_epochs=2).fit(Line(), make_batches(3), ckpt_path=tmp_path / "kept")
    keeper = Keep()
    later = make_trainer(keeper, max_epochs=1)
    later.fit(Line(), make_batches(3), ckpt_path=tmp_path / "kept", strict=False)
    assert bits(later.callback_arrays(keeper)[0]) == bits(trainer.state.params["kernel"])


def test_rollback_takes_the_arrays_of_the_checkpoint() -> None:
    batches, keeper = make_batches(6, bad=2), EMA()
    saver = jl.callbacks.ModelCheckpoint(every_n_train_steps=2)
    trainer = make_trainer(keeper, saver, nan_policy="rollback", default_root_dir="run", log_every_n_steps=1)
    trainer.fit(Line(), batches)
    _, arrays = by_hand([*batches[:2], *batches[4:]], EMA())  # the bad step is seen one later
    assert_close(trainer.callback_arrays(keeper), arrays)


def test_a_strategy_that_knows_nothing_of_extras_trains() -> None:
    class Copies(jl.Strategy):
        def state_sharding(self, state: Any) -> Any:
            whole = jax.tree.map(lambda _: self.replicated, state)
            names = ("counters", "params", "frozen", "model_state", "opt_state", "window", "loss_scale", "sums")
            return type(state)(**{name: getattr(whole, name) for name in names})

    keeper = EMA()
    trainer = make_trainer(keeper)
    trainer = jl.Trainer(strategy=Copies(), callbacks=[keeper], max_epochs=1, logger=False, enable_progress_bar=False)
    trainer.fit(Line(), make_batches(2))
    assert_close(trainer.callback_arrays(keeper), by_hand(make_batches(2), EMA())[1])


def test_a_run_without_such_callbacks_holds_no_more_arrays() -> None:
    plain, _ = train(jl.Callback(), make_batches(1))
    keeping, _ = train(EMA(), make_batches(1))
    counts = [len(t._session.engine.state.leaves) for t in (plain, keeping)]  # type: ignore[union-attr]
    assert plain.state.extras == {}
    assert counts[1] - counts[0] == 2


def _made(**methods: Any) -> jl.Callback:
    return type("Made", (jl.Callback,), methods)()


def _keep(self: Any, arrays: Any, params: Any, grads: Any, global_step: Any) -> Any:
    return arrays, params


def _zeros(self: Any, params: Any) -> Any:
    return {"total": jnp.zeros(3)}


REFUSED = {
    r"Made defines init_arrays and no update_arrays": {"init_arrays": _zeros},
    r"Made defines update_arrays and no init_arrays": {"update_arrays": _keep},
    r"Made\.update_arrays\(arrays, params\) is called with \(arrays, params, grads, global_step\)": {
        "init_arrays": _zeros,
        "update_arrays": lambda self, arrays, params: (arrays, params),
    },
    r"init_arrays must return a pytree of arrays, and name is of type str": {
        "init_arrays": lambda self, params: {"name": "ema"},
        "update_arrays": _keep,
    },
    r"init_arrays must return a pytree of arrays, and it is of type float": {
        "init_arrays": lambda self, params: 0.5,
        "update_arrays": _keep,
    },
    r"init_arrays must return a pytree of arrays, got None, which has none": {
        "init_arrays": lambda self, params: None,
        "update_arrays": _keep,
    },
    r"update_arrays must return a tuple of two, \(arrays, params\), got dict": {
        "init_arrays": _zeros,
        "update_arrays": lambda self, arrays, params, grads, global_step: arrays,
    },
    r"update_arrays changed arrays at total from float32\[3\] to float32\[2\]": {
        "init_arrays": _zeros,
        "update_arrays": lambda self, arrays, params, grads, global_step: ({"total": arrays["total"][:2]}, params),
    },
    r"update_arrays changed arrays at total from float32\[3\] to float32\[4\]": {
        "init_arrays": _zeros,
        "update_arrays": lambda self, arrays, params, grads, global_step: (
            arrays.update(total=jnp.zeros(4)) or arrays,
            params,
        ),
    },
    r"update_arrays changed arrays at total from float32\[3\] to float16\[3\]": {
        "init_arrays": _zeros,
        "update_arrays": lambda self, arrays, params, grads, global_step: (
            {"total": arrays["total"].astype(jnp.float16)},
            params,
        ),
    },
    r"update_arrays changed params at bias from float32\[16\] to nothing": {
        "init_arrays": _zeros,
        "update_arrays": lambda self, arrays, params, grads, global_step: (arrays, {"kernel": params["kernel"]}),
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_kept_is_refused_before_the_first_step(message: str) -> None:
    with pytest.raises(ModuleError, match=message):
        make_trainer(_made(**REFUSED[message])).fit(Line(), make_batches(1))


def test_reading_arrays_of_a_callback_without_any_is_refused() -> None:
    keeper = EMA()
    trainer = make_trainer(keeper)
    with pytest.raises(ArgumentError, match=r"takes a callback of the newest fit that keeps arrays, \[\] here"):
        trainer.callback_arrays(keeper)
    trainer.fit(Line(), make_batches(1))
    with pytest.raises(ArgumentError, match=r"\['EMA'\] here, got"):
        trainer.callback_arrays(EMA())
